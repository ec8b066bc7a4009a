"""Norms: root mean square and layer norms over the last axis."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.glu import ACTIVATIONS
from ..ops.layer_norm import layer_norm, layer_norm_reference
from ..ops.rms_norm import CASTS, _out_dtype, rms_norm, rms_norm_reference
from ..ops.rms_norm_gated import CASTS as GATED_CASTS
from ..ops.rms_norm_gated import rms_norm_gated, rms_norm_gated_reference
from . import _probe
from ._deferred import Deferred, real
from ._form import Found, Match, arguments_of, floats_of, is_plain, only_argument, own, run
from ._probe import Refused
from ._stream import Stream
from ._swap import this_thread


class NormSettings(NamedTuple):
    """Attribute names are read at every call, so that a changed eps or a re-assigned weight is honoured."""

    weight: str | None
    bias: str | None
    # A number where the forward has one of its own.
    eps: str | float
    offset: float = 0.0
    cast: str = "cast_then_scale"
    # Whether the offset is added, and rounded, in the dtype of the weight.
    rounds_offset: bool = False
    # The attribute that says how many columns a mean is taken over.
    group_size: str | None = None
    # Some norms have a rule for autocast, which only they know.
    native_autocast: bool = False
    # With a second argument that gates: its name, what activates it, whether it comes after the norm.
    gate: str | None = None
    activation: str = "silu"
    norm_before_gate: bool = True

    @property
    def variant(self) -> str:
        if self.weight is None:
            notes = ["no weight", "" if self.cast == "cast_then_scale" else self.cast]
        else:
            notes = [
                self.cast,
                "offset 1" if self.offset else "",
                "rounded with the weight" if self.rounds_offset else "",
            ]
        if self.gate is not None:
            notes += [f"{self.activation} {'after' if self.norm_before_gate else 'before'}"]
        return ", ".join(note for note in (*notes, "groups" if self.group_size else "") if note)

    def scaled_by(self, weight: Tensor | None) -> tuple[Tensor | None, float]:
        """The weight and the offset that the operator gets."""
        return (weight + self.offset, 0.0) if self.rounds_offset and weight is not None else (weight, self.offset)

    def eps_of(self, module: nn.Module) -> float:
        return getattr(module, self.eps) if isinstance(self.eps, str) else self.eps


# ---- matching ----


def _vectors(module: nn.Module) -> dict[str, int] | None:
    """Sizes by name of the parameters and buffers of a module that has nothing but vectors of one size."""
    if module._modules or _is_another(module):
        return None
    shapes = {name: _probe.shape_of(p) for name, p in own({**module._parameters, **module._buffers}).items()}
    if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) > 1:
        return None
    return {name: shape[0] for name, shape in shapes.items()}


def _is_another(module: nn.Module) -> bool:
    """Whether it is a module of torch's, or made from one, that normalises over other axes or not at all."""
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return False
    return isinstance(module, nn.GroupNorm) or _is_torchs(module)


def _is_torchs(module: nn.Module) -> bool:
    return (type(module).forward.__module__ or "").startswith("torch.")


def _names_an_eps(module: nn.Module) -> bool:
    return any("eps" in name for name in floats_of(module))


def match_rms_norm(module: nn.Module) -> Match:
    vectors = _vectors(module)
    if vectors is None or len(vectors) > 1 or match_rms_norm_gated(module) == "sure":
        return "no"
    if own(module._parameters):
        return "sure" if floats_of(module) else "maybe"
    # An activation or a dropout has neither.
    return "sure" if _names_an_eps(module) else "maybe" if floats_of(module) else "no"


def match_rms_norm_gated(module: nn.Module) -> Match:
    vectors = _vectors(module)
    if vectors is None or len(vectors) != 1 or len(arguments_of(module)) != 2 or not own(module._parameters):
        return "no"
    return "sure" if floats_of(module) else "maybe"


def match_layer_norm(module: nn.Module) -> Match:
    vectors = _vectors(module)
    if match_rms_norm_gated(module) == "sure":
        return "no"
    if vectors is None or len(vectors) > 2:
        # Weights of each head; norms of images have three axes.
        weight = module._parameters.get("weight") if isinstance(module, nn.LayerNorm) else None
        return "sure" if weight is not None and len(_probe.shape_of(weight)) == 2 else "no"
    if not vectors:
        return "maybe" if floats_of(module) or "normalized_shape" in module.__dict__ else "no"
    # Tables of frequencies are vectors too, but buffers.
    if not floats_of(module) or not own(module._parameters):
        return "maybe"
    # Those made from torch's with a forward of their own are mostly for images.
    changed = isinstance(module, nn.LayerNorm) and not _is_torchs(module)
    return "maybe" if changed else "sure"


# ---- probing ----

Candidate = Callable[[Tensor, dict[str, Tensor], float], Any]
# Among the weights of a draw, the gate of a norm that takes one.
GATE = "argument: gate"


class _Norms:
    """Runs of one norm module on random rows and random weights."""

    def __init__(self, module: nn.Module, generator: torch.Generator, gated: bool = False) -> None:
        if not gated:
            only_argument(module)
        self.module, self.generator, self.gated = module, generator, gated
        self.names = list(own({**module._parameters, **module._buffers}))
        self.width = self._width()
        if self.width < 2:
            raise Refused(f"its weight has {self.width} elements here; patch before the model is sharded")
        self.rows = max(4, 2048 // self.width)
        x, weights = self.draw()
        try:
            y = self.native(x, weights)
        except Refused as refused:
            raise Refused(f"it does not take rows of the width of its weight: {refused}") from refused
        if not isinstance(y, Tensor) or y.shape != x.shape:
            shape = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise Refused(f"it makes {shape} of {tuple(x.shape)}, the form a tensor of the same shape")

    def _width(self) -> int:
        for name in self.names:
            shape = _probe.shape_of({**self.module._parameters, **self.module._buffers}[name])
            if len(shape) != 1:
                raise Refused(f"its {name} has {len(shape)} axes, the form's one")
            return shape[0]
        # A norm without parameters takes any width, or says which.
        sizes = self.module.__dict__.get("normalized_shape")
        return sizes[0] if isinstance(sizes, tuple) and len(sizes) == 1 else 64

    def draw(self, x_scale: float = 1.0, w_scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        # Not centred, so that subtracting the mean shows.
        x = (torch.randn(self.rows, self.width, generator=self.generator) + 0.5) * x_scale
        weights = {name: torch.randn(self.width, generator=self.generator) * w_scale for name in self.names}
        if self.gated:
            weights[GATE] = torch.randn(x.shape, generator=self.generator) * w_scale
        return x, weights

    def twin(self, weights: dict[str, Tensor], **options: Any) -> nn.Module:
        buffers = {name: weight for name, weight in weights.items() if name in self.module._buffers}
        parameters = {name: weight for name, weight in weights.items() if name in self.module._parameters}
        return _probe.twin(self.module, parameters=parameters, buffers=buffers, **options)

    def native(self, x: Tensor, weights: dict[str, Tensor], training: bool = False, **attributes: Any) -> Any:
        return self.run(self.twin(weights, attributes=attributes, training=training), x, weights)

    def run(self, module: nn.Module, x: Tensor, weights: dict[str, Tensor]) -> Any:
        return run(module, x, weights[GATE]) if self.gated else run(module, x)

    def epsilons(self) -> Iterator[str | float]:
        """Attributes that might be the eps, then the number that the module behaves as if it had."""
        yield from floats_of(self.module)
        measured = self._measured_eps()
        if measured is not None:
            yield measured

    def sizes(self) -> list[str]:
        """Attributes that might be the size of a group."""
        integers = {name: value for name, value in self.module.__dict__.items() if type(value) is int}
        return [name for name, value in integers.items() if 1 < value < self.width and self.width % value == 0]

    def value_of(self, eps: str | float) -> float:
        return getattr(self.module, eps) if isinstance(eps, str) else eps

    def _measured_eps(self) -> float | None:
        """How much smaller the result gets with the input says what is added to the mean square.

        y(t x) / y(x) = r = t sqrt(m + eps) / sqrt(t^2 m + eps), for any weights; m of a norm that centres is another.
        """
        x, weights = self.draw()
        x = x - x.mean(-1, keepdim=True)
        weights = {name: weight if name in (self.names[0], GATE) else 0 * weight for name, weight in weights.items()}
        mean = x.double().square().mean(-1, keepdim=True)
        full = self.native(x, weights).detach().double()
        for t in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6):
            ratio = (self.native(x * t, weights).detach().double() / full).nanmedian(-1, keepdim=True).values
            eps = float((t**2 * mean * (1 - ratio**2) / (ratio**2 - t**2)).median())
            if float(ratio.median()) < 0.9:
                usual = min((float(f"{eps:.1g}"), torch.finfo(torch.float32).eps), key=lambda e: abs(e - eps))
                return usual if abs(eps - usual) <= 0.01 * usual else None
        return None

    def agrees(self, candidate: Candidate, eps: str | float) -> bool:
        """In fp32, at scales that show a clamp, with an eps that shows which attribute it is, and in the gradients; in
        training and in evaluation, in which a module may do different things."""
        value = self.value_of(eps)
        tiny = value**0.5
        for x_scale, w_scale in ((1.0, 1.0), (1e-3, 1.0), (tiny, 1.0), (1e4, 1.0), (1.0, 1e4)):
            x, weights = self.draw(x_scale, w_scale)
            y = candidate(x, weights, value)
            if not all(_probe.same(y, self.native(x, weights, training)) for training in (False, True)):
                return False
        x, weights = self.draw()
        if isinstance(eps, str) and not _probe.same(candidate(x, weights, 0.3), self.native(x, weights, **{eps: 0.3})):
            return False
        return all(self._same_gradients(candidate, value, training) for training in (True, False))

    def _same_gradients(self, candidate: Candidate, eps: float, training: bool) -> bool:
        x, weights = self.draw()
        leaves = {
            name: weight.clone().requires_grad_(name == GATE or name in self.module._parameters)
            for name, weight in weights.items()
        }
        trained = [leaf for leaf in leaves.values() if leaf.requires_grad]
        copy = self.twin(leaves, training=training)
        # Parameters of the twin are other objects than what they were made of.
        own_leaves = [copy._parameters.get(name, leaf) for name, leaf in leaves.items() if leaf.requires_grad]
        upstream = torch.randn(x.shape, generator=self.generator)
        y = self.run(copy, x.requires_grad_(), leaves)
        wanted = _probe.gradients(y, [x, *own_leaves], upstream)
        got = _probe.gradients(candidate(x, leaves, eps), [x, *trained], upstream)
        return _probe.same_gradients(got, wanted)

    def rounds_alike(self, candidate: Candidate, eps: str | float) -> bool:
        """In bf16, bit for bit, and with the weight in another dtype than the input where the module allows it."""
        bf16, fp32, value = torch.bfloat16, torch.float32, self.value_of(eps)
        # Dtypes of x, the weights and the gate. At the size of the eps it shows if that depends on the dtype.
        cases = [(bf16, bf16, bf16, 1.0), (bf16, bf16, bf16, value**0.5)]
        cases += [(bf16, fp32, bf16, 1.0), (fp32, bf16, fp32, 1.0)] if self.names else []
        cases += [(bf16, bf16, fp32, 1.0), (fp32, fp32, bf16, 1.0)] if self.gated else []
        for x_dtype, w_dtype, gate_dtype, scale in cases:
            x, weights = self.draw(scale)
            x = x.to(x_dtype)
            weights = {name: t.to(gate_dtype if name == GATE else w_dtype) for name, t in weights.items()}
            try:
                native = self.native(x, weights)
            except Refused:
                if x_dtype == w_dtype == gate_dtype:
                    raise
                continue
            if _probe.flips(candidate(x, weights, value), native) > _probe.BF16_FLIPS:
                return False
        return True

    @property
    def native_autocast(self) -> bool:
        """Whether the forward leaves it to torch, or asks itself, what autocast changes."""
        names = " ".join(inspect.unwrap(type(self.module).forward).__code__.co_names)
        return _is_torchs(self.module) or any(name in names for name in ("autocast", "layer_norm", "rms_norm"))


def _pairs(first: Iterator[Any], second: list[Any]) -> Iterator[tuple[Any, Any]]:
    """`itertools.product`, but of a `first` that is made only as far as it is used."""
    return ((a, b) for a in first for b in second)


def verify_rms_norm(module: nn.Module, generator: torch.Generator) -> Found:
    norms = _Norms(module, generator)

    def reference(norm: NormSettings) -> Candidate:
        def call(x: Tensor, weights: dict[str, Tensor], eps: float) -> Tensor:
            weight, offset = norm.scaled_by(None if norm.weight is None else weights[norm.weight])
            size = None if norm.group_size is None else getattr(module, norm.group_size)
            return rms_norm_reference(x, weight, eps=eps, offset=offset, cast=norm.cast, group_size=size)

        return call

    weighted = [(name, offset) for name in norms.names for offset in (0.0, 1.0)]
    shapes = list(itertools.product([*weighted, (None, 0.0)], (None, *norms.sizes())))
    for eps, ((name, offset), size) in _pairs(norms.epsilons(), shapes):
        norm = NormSettings(name, None, eps, offset, "none", False, size, norms.native_autocast)
        if not norms.agrees(reference(norm), eps):
            continue
        for rounds, cast in itertools.product((False, True) if offset else (False,), CASTS):
            norm = norm._replace(cast=cast, rounds_offset=rounds)
            if (name or cast != "cast_to_weight") and norms.rounds_alike(reference(norm), eps):
                return Found(norm.variant, norm)
        raise Refused("it rounds to 16 bits in a place that no candidate does")
    raise Refused("no candidate computes the same")


def verify_rms_norm_gated(module: nn.Module, generator: torch.Generator) -> Found:
    norms = _Norms(module, generator, gated=True)

    def reference(norm: NormSettings) -> Candidate:
        def call(x: Tensor, weights: dict[str, Tensor], eps: float) -> Tensor:
            size = None if norm.group_size is None else getattr(module, norm.group_size)
            return _gated(rms_norm_gated_reference, norm, x, weights[norm.weight], weights[GATE], eps, size)

        return call

    options = list(itertools.product((True, False), ACTIVATIONS, (None, *norms.sizes()), (0.0, 1.0)))
    (weight,), gate = norms.names, arguments_of(module)[1].name
    for eps, (after, activation, size, offset) in _pairs(norms.epsilons(), options):
        norm = NormSettings(
            weight, None, eps, offset, "scale_then_cast", False, size, norms.native_autocast, gate, activation, after
        )
        if not norms.agrees(reference(norm), eps):
            continue
        for cast in GATED_CASTS:
            norm = norm._replace(cast=cast)
            if norms.rounds_alike(reference(norm), eps):
                return Found(norm.variant, norm)
        raise Refused("it rounds to 16 bits in a place that no candidate does")
    raise Refused("no candidate computes the same")


def verify_layer_norm(module: nn.Module, generator: torch.Generator) -> Found:
    norms = _Norms(module, generator)

    def reference(weight: str | None, bias: str | None, offset: float, cast: str) -> Candidate:
        def call(x: Tensor, weights: dict[str, Tensor], eps: float) -> Tensor:
            return _layer_norm(layer_norm_reference, x, weights.get(weight), weights.get(bias), eps, offset, cast)

        return call

    named = [
        (names[0], names[1] if len(names) > 1 else None, offset)
        for names in itertools.permutations(norms.names)
        if names
        for offset in (0.0, 1.0)
    ]
    for eps, (weight, bias, offset) in _pairs(norms.epsilons(), named or [(None, None, 0.0)]):
        if not norms.agrees(reference(weight, bias, offset, "none"), eps):
            continue
        for cast in ("scale_then_cast", "none"):
            if norms.rounds_alike(reference(weight, bias, offset, cast), eps):
                settings = NormSettings(weight, bias, eps, offset, cast, False, None, norms.native_autocast)
                variant = "weight, bias" if bias else "weight" if weight else "no weight"
                return Found(f"{variant}, offset 1" if offset else variant, settings)
        raise Refused("it rounds to 16 bits in a place that no candidate does")
    raise Refused("no candidate computes the same")


# ---- replacing ----


class NormedHeads(Deferred):
    """The norm of queries or keys that is not computed yet, for a rotation that does it."""

    def __init__(self, norm: nn.Module, x: Tensor, made_by: Callable[[], Tensor]) -> None:
        weight = weight_of(norm)
        self.norm, self.x, self.made_by = norm, x, made_by
        self.shape, self.device = x.shape, x.device
        self.dtype = _out_dtype(x, weight, norm._tigon.settings.cast)
        self.real: Tensor | None = None

    def materialise(self) -> Tensor:
        if self.real is None:
            self.real = self.made_by()
        return self.real

    def transpose(self, first: Any, second: Any) -> Any:
        last = {self.ndim - 1, -1}
        if self.real is not None or first in last or second in last:
            return self.materialise().transpose(first, second)
        return NormedHeads(
            self.norm, self.x.transpose(first, second), lambda: self.materialise().transpose(first, second)
        )


def weight_of(norm: nn.Module) -> Tensor | None:
    name = norm._tigon.settings.weight
    return None if name is None else getattr(norm, name)


def heads_later(norm: nn.Module, x: Any) -> NormedHeads | None:
    # Not in the forward itself, whose argument is renamed and must be no variable of a closure.
    return NormedHeads(norm, x, lambda: rms_norm_by(rms_norm, norm, x)) if can_defer(norm, x) else None


class deferring:
    """While it lasts, these norms of a module leave their work to what gets their results, where `later` allows."""

    def __init__(self, module: nn.Module, names: tuple[str, ...], later: Callable[[nn.Module, Any], Any]) -> None:
        self.norms = [module._modules[name] for name in names]
        self.later = later

    def __enter__(self) -> None:
        for norm in self.norms:
            norm.__dict__["_tigon_defer"] = this_thread(), self.later  # type: ignore[union-attr]

    def __exit__(self, *_: object) -> None:
        for norm in self.norms:
            norm.__dict__.pop("_tigon_defer", None)  # type: ignore[union-attr]


def rms_norm_forward(self: nn.Module, x: Any) -> Any:
    thread, later = self.__dict__.get("_tigon_defer") or (None, None)
    if later is not None and thread == this_thread():
        put_off = later(self, x)
        if put_off is not None:
            return put_off
    return rms_norm_by(rms_norm, self, x)


def rms_norm_by(op: Callable[..., Any], self: nn.Module, x: Any) -> Any:
    norm = self._tigon.settings
    weight = weight_of(self)
    native = norm.native_autocast and torch.is_autocast_enabled(x.device.type)
    given = x.terms if type(x) is Stream and x.terms else (real(x),)
    if native or not is_plain(*given, weight):
        return type(self).forward(self, real(x))
    size = None if norm.group_size is None else getattr(self, norm.group_size)
    weight, offset = norm.scaled_by(weight)
    options = {"eps": norm.eps_of(self), "offset": offset, "cast": norm.cast, "group_size": size}
    if len(given) == 1:
        return op(given[0], weight, **options)
    # In the order of the layer's own addition, which decides how the sum lies in memory.
    y, total = op(given[0], weight, residual=given[1], **options)
    x.settle(total)
    return y


def can_defer(norm: nn.Module, x: Any) -> bool:
    """Whether the norm of `x` may be left to a rotation."""
    settings = norm._tigon.settings
    native = settings.native_autocast and torch.is_autocast_enabled(x.device.type)
    return not native and settings.group_size is None and x.dim() == 4 and is_plain(x, weight_of(norm))


def rms_norm_gated_forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    norm = self._tigon.settings
    weight, gate = getattr(self, norm.weight), args[0] if args else kwargs.get(norm.gate)
    native = norm.native_autocast and torch.is_autocast_enabled(x.device.type)
    if gate is None or gate.shape != x.shape or not is_plain(x, weight, gate) or native:
        return type(self).forward(self, x, *args, **kwargs)
    size = None if norm.group_size is None else getattr(self, norm.group_size)
    return _gated(rms_norm_gated, norm, x, weight, gate, norm.eps_of(self), size)


def _gated(
    op: Callable[..., Tensor], norm: NormSettings, x: Tensor, weight: Tensor, gate: Tensor, eps: float, size: int | None
) -> Tensor:
    return op(
        x,
        weight,
        gate,
        eps=eps,
        activation=norm.activation,
        norm_before_gate=norm.norm_before_gate,
        group_size=size,
        offset=norm.offset,
        cast=norm.cast,
    )


def layer_norm_forward(self: nn.Module, x: Tensor) -> Any:
    norm = self._tigon.settings
    weight = None if norm.weight is None else getattr(self, norm.weight)
    bias = None if norm.bias is None else getattr(self, norm.bias)
    if not is_plain(x, weight) or (norm.native_autocast and torch.is_autocast_enabled(x.device.type)):
        return type(self).forward(self, x)
    return _layer_norm(layer_norm, x, weight, bias, norm.eps_of(self), norm.offset, norm.cast)


def _layer_norm(
    op: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    cast: str,
) -> Tensor:
    # Added in the dtype of the weight, where those that have it add it.
    y = op(x, weight + offset if offset and weight is not None else weight, bias, eps=eps)
    return y.to(x.dtype) if cast == "scale_then_cast" else y
