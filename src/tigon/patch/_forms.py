"""The forms: what a module of each kind looks like, what its numbers might mean, and the forward that replaces it.

A form matches on structure only: parameters, shapes, children, float attributes. What the module computes is
found by running it (see _probe.py); a module that no candidate reproduces is left alone, with the reason.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.glu import ACTIVATIONS, glu, glu_reference
from ..ops.layer_norm import layer_norm, layer_norm_reference
from ..ops.rms_norm import CASTS, rms_norm, rms_norm_reference
from . import _probe
from ._probe import Refused

# "sure" gets a row whatever comes of it; "maybe" is a shape that other things have too, so only success is reported.
Match = Literal["no", "maybe", "sure"]


class Found(NamedTuple):
    """A candidate that the probe accepted: what the report calls it, and what its forward needs to know."""

    variant: str
    settings: Any


@dataclass(frozen=True)
class Form:
    """One kind of module. `verify` returns what it is or raises Refused; `forward` is the replacement."""

    name: str
    match: Callable[[nn.Module], Match]
    verify: Callable[[nn.Module, torch.Generator], Found]
    forward: Callable[..., Any]


def argument_of(module: nn.Module) -> str:
    """The name of the only argument of the module's forward."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if len(parameters) != 1 or parameters[0].kind not in named:
        names = ", ".join(str(parameter) for parameter in parameters)
        raise Refused(f"its forward takes ({names}), the form one tensor")
    return parameters[0].name


def _run(module: nn.Module, x: Tensor) -> Any:
    return _probe.explained(type(module).forward, module, x)


def _own(store: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in store.items() if value is not None}


def _floats(module: nn.Module) -> list[str]:
    return [name for name, value in module.__dict__.items() if type(value) is float]


def _is_plain(*tensors: Tensor | None) -> bool:
    """Whether the kernels may have them: a sharded or wrapped tensor goes to the module's own forward."""
    return all(t is None or type(t) in (Tensor, nn.Parameter) for t in tensors)


# ---- norms ----


class NormSettings(NamedTuple):
    """Attribute names are read at every call, so that a changed eps or a re-assigned weight is honoured."""

    weight: str | None
    bias: str | None
    eps: str
    offset: float = 0.0
    cast: str = "cast_then_scale"
    # torch's own norms have an autocast rule, which only they know.
    native_autocast: bool = False


def _vectors(module: nn.Module) -> list[int] | None:
    """Sizes of the parameters of a module that has float attributes and nothing but vectors of one size."""
    if _own(module._buffers) or module._modules or not _floats(module):
        return None
    shapes = [_probe.shape_of(p) for p in _own(module._parameters).values()]
    if any(len(shape) != 1 for shape in shapes) or len(set(shapes)) > 1:
        return None
    return [shape[0] for shape in shapes]


def _match_rms_norm(module: nn.Module) -> Match:
    sizes = _vectors(module)
    if sizes is None or len(sizes) > 1:
        return "no"
    return "sure" if sizes else "maybe"


def _match_layer_norm(module: nn.Module) -> Match:
    sizes = _vectors(module)
    return "no" if sizes is None or len(sizes) not in (1, 2) else "sure"


class _Norms:
    """Runs of one norm module on random rows and random weights."""

    def __init__(self, module: nn.Module, generator: torch.Generator) -> None:
        argument_of(module)
        self.module, self.generator = module, generator
        self.names = list(_own(module._parameters))
        # A norm without parameters takes any width.
        self.width = _probe.shape_of(module._parameters[self.names[0]])[0] if self.names else 64
        if self.width < 2:
            raise Refused(f"its weight has {self.width} elements here; patch before the model is sharded")
        self.rows = max(4, 2048 // self.width)
        self.native_autocast = type(module).forward.__module__.startswith("torch.")

    def draw(self, x_scale: float = 1.0, w_scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        # Not centred, so that subtracting the mean shows.
        x = (torch.randn(self.rows, self.width, generator=self.generator) + 0.5) * x_scale
        return x, {name: torch.randn(self.width, generator=self.generator) * w_scale for name in self.names}

    def native(self, x: Tensor, weights: dict[str, Tensor], **attributes: Any) -> Any:
        return _run(_probe.twin(self.module, parameters=weights, attributes=attributes), x)

    def agrees(self, candidate: Callable[..., Any], eps_name: str) -> bool:
        """In fp32, at scales that show a clamp, with an eps that shows which attribute it is, and in a gradient."""
        eps = getattr(self.module, eps_name)
        for x_scale, w_scale in ((1.0, 1.0), (1e-3, 1.0), (1e4, 1.0), (1.0, 1e4)):
            x, weights = self.draw(x_scale, w_scale)
            if not _probe.same(candidate(x, weights, eps), self.native(x, weights)):
                return False
        x, weights = self.draw()
        if not _probe.same(candidate(x, weights, 0.3), self.native(x, weights, **{eps_name: 0.3})):
            return False
        x.requires_grad_()
        copy = _probe.twin(self.module, parameters=weights, training=True)
        upstream = torch.randn(x.shape, generator=self.generator)
        wanted = _probe.gradients(_run(copy, x), [x, *_own(copy._parameters).values()], upstream)
        leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        got = _probe.gradients(candidate(x, leaves, eps), [x, *leaves.values()], upstream)
        return all(_probe.same(a, b, tolerance=1e-4) for a, b in zip(got, wanted, strict=True))

    def rounds_alike(self, candidate: Callable[..., Any], eps: float) -> bool:
        """In bf16, bit for bit, and with the weight in another dtype than the input where the module allows it."""
        bf16, fp32 = torch.bfloat16, torch.float32
        mixed = ((bf16, fp32), (fp32, bf16)) if self.names else ()
        for x_dtype, w_dtype in ((bf16, bf16), *mixed):
            x, weights = self.draw()
            x, weights = x.to(x_dtype), {name: weight.to(w_dtype) for name, weight in weights.items()}
            try:
                native = self.native(x, weights)
            except Refused:
                if x_dtype == w_dtype:
                    raise
                continue
            if _probe.flips(candidate(x, weights, eps), native) > _probe.BF16_FLIPS:
                return False
        return True


def _verify_rms_norm(module: nn.Module, generator: torch.Generator) -> Found:
    norms = _Norms(module, generator)
    name = norms.names[0] if norms.names else None

    def reference(offset: float, cast: str) -> Callable[..., Any]:
        return lambda x, weights, eps: rms_norm_reference(
            x,
            weights.get(name),
            eps=eps,
            offset=offset,
            cast=cast,  # type: ignore[arg-type]
        )

    offsets = (0.0, 1.0) if name else (0.0,)
    for eps_name, offset in itertools.product(_floats(module), offsets):
        if not norms.agrees(reference(offset, "none"), eps_name):
            continue
        for cast in CASTS:
            if norms.rounds_alike(reference(offset, cast), getattr(module, eps_name)):
                settings = NormSettings(name, None, eps_name, offset, cast, norms.native_autocast)
                variant = f"{cast}, offset 1" if offset else cast if name else "no weight"
                return Found(variant, settings)
        raise Refused("it rounds to 16 bits in a place that no candidate does")
    raise Refused("no candidate computes the same")


def _verify_layer_norm(module: nn.Module, generator: torch.Generator) -> Found:
    norms = _Norms(module, generator)

    def reference(weight: str, bias: str | None, cast: str) -> Callable[..., Any]:
        def call(x: Tensor, weights: dict[str, Tensor], eps: float) -> Tensor:
            y = layer_norm_reference(x, weights[weight], weights[bias] if bias else None, eps=eps)
            return y.to(x.dtype) if cast == "scale_then_cast" else y

        return call

    for eps_name, names in itertools.product(_floats(module), itertools.permutations(norms.names)):
        weight, bias = names[0], names[1] if len(names) > 1 else None
        if not norms.agrees(reference(weight, bias, "none"), eps_name):
            continue
        for cast in ("scale_then_cast", "none"):
            if norms.rounds_alike(reference(weight, bias, cast), getattr(module, eps_name)):
                settings = NormSettings(weight, bias, eps_name, 0.0, cast, norms.native_autocast)
                return Found("weight, bias" if bias else "weight", settings)
        raise Refused("it rounds to 16 bits in a place that no candidate does")
    raise Refused("no candidate computes the same")


def _rms_norm_forward(self: nn.Module, x: Tensor) -> Any:
    norm = self._tigon.settings
    weight = None if norm.weight is None else getattr(self, norm.weight)
    if not _is_plain(x, weight) or (norm.native_autocast and torch.is_autocast_enabled(x.device.type)):
        return type(self).forward(self, x)
    return rms_norm(x, weight, eps=getattr(self, norm.eps), offset=norm.offset, cast=norm.cast)


def _layer_norm_forward(self: nn.Module, x: Tensor) -> Any:
    norm = self._tigon.settings
    weight = getattr(self, norm.weight)
    bias = None if norm.bias is None else getattr(self, norm.bias)
    if not _is_plain(x, weight) or (norm.native_autocast and torch.is_autocast_enabled(x.device.type)):
        return type(self).forward(self, x)
    y = layer_norm(x, weight, bias, eps=getattr(self, norm.eps))
    return y.to(x.dtype) if norm.cast == "scale_then_cast" else y


# ---- gated MLPs ----


class GluSettings(NamedTuple):
    """Names of the projections; `up` is None when `gate` projects to both halves."""

    gate: str
    up: str | None
    down: str
    activation: str
    gate_first: bool = True


def _projections(module: nn.Module) -> dict[str, tuple[int, int]]:
    sizes = {name: _probe.sizes_of(child) for name, child in module._modules.items()}
    return {name: size for name, size in sizes.items() if size}


def _roles(sizes: dict[str, tuple[int, int]]) -> Iterator[tuple[str, str | None, str]]:
    """Every (gate, up, down) that the shapes allow; `up` is None for a packed projection."""
    if len(sizes) == 3:
        for gate, up, down in itertools.permutations(sizes):
            if sizes[gate] == sizes[up] == sizes[down][::-1]:
                yield gate, up, down
    elif len(sizes) == 2:
        for gate, down in itertools.permutations(sizes):
            if sizes[gate] == (sizes[down][1], 2 * sizes[down][0]):
                yield gate, None, down


def _match_glu(module: nn.Module) -> Match:
    sizes = _projections(module)
    if not any(True for _ in _roles(sizes)):
        return "no"
    others = [child for name, child in module._modules.items() if name not in sizes and child is not None]
    activations = [c for c in others if not isinstance(c, nn.Dropout) and not any(True for _ in c.parameters())]
    functions = [v for v in module.__dict__.values() if inspect.isfunction(v) or inspect.isbuiltin(v)]
    # Attention and mixers have projections of such shapes too, but no activation, or more to their forward.
    arguments = len(inspect.signature(type(module).forward).parameters) - 1
    return "sure" if (activations or functions) and arguments <= 2 else "maybe"


def _verify_glu(module: nn.Module, generator: torch.Generator) -> Found:
    argument_of(module)
    sizes = _projections(module)
    if _own(module._parameters) or _own(module._buffers):
        raise Refused("it has parameters or buffers of its own, which the form does not know")
    for name, child in module._modules.items():
        if child is None or name in sizes:
            continue
        if any(True for _ in child.parameters()) or any(True for _ in child.buffers()):
            raise Refused(f"its child {name} has parameters or buffers, which the form does not know")
        if any(isinstance(part, nn.Dropout) and part.p > 0 for part in child.modules()):
            raise Refused(f"its child {name} drops out elements in training")
    intermediate, hidden = sizes[next(_roles(sizes))[2]]
    try:
        return _probe_glu(module, generator, hidden, _small(hidden, intermediate))
    except Refused:
        # Numbers in the module may depend on its sizes; at full size there is nothing to guess.
        if hidden * intermediate > 2**22:
            raise
        return _probe_glu(module, generator, hidden, (hidden, intermediate))


def _small(hidden: int, intermediate: int) -> tuple[int, int]:
    """Sizes for the probe that keep the relations attributes could stand in."""
    if hidden == intermediate:
        return 8, 8
    return 8, {hidden: 4}.get(2 * intermediate, {intermediate: 16}.get(2 * hidden, 12))


def _probe_glu(module: nn.Module, generator: torch.Generator, hidden: int, small: tuple[int, int]) -> Found:
    sizes = _projections(module)
    roles = list(_roles(sizes))
    intermediate = sizes[roles[0][2]][0]
    resized = {hidden: small[0], intermediate: small[1], 2 * intermediate: 2 * small[1]}
    attributes = {k: resized[v] for k, v in module.__dict__.items() if type(v) is int and v in resized}
    lines = {
        name: _probe.Projection(resized[fan_in], resized[fan_out], generator)
        for name, (fan_in, fan_out) in sizes.items()
    }

    def native(x: Tensor, training: bool) -> Any:
        others = {k: _probe.twin(c, training=training) for k, c in module._modules.items() if c and k not in lines}
        children = {name: lines.get(name) or others.get(name) for name in module._modules}
        return _run(_probe.twin(module, children=children, attributes=attributes, training=training), x)

    def reference(x: Tensor, settings: GluSettings) -> Tensor:
        up = None if settings.up is None else lines[settings.up](x)
        y = glu_reference(lines[settings.gate](x), up, activation=settings.activation, gate_first=settings.gate_first)
        return lines[settings.down](y)

    halves = [(role, first) for role in roles for first in ((True, False) if role[1] is None else (True,))]
    candidates = [
        GluSettings(*role, activation, first) for (role, first), activation in itertools.product(halves, ACTIVATIONS)
    ]
    # The large scales show clamps, the small one what happens near zero.
    for scale, training in itertools.product((1.0, 1e-2, 1e2, 1e4), (False, True)):
        x = torch.randn(2, 32, small[0], generator=generator) * scale
        y = native(x, training)
        candidates = [settings for settings in candidates if _probe.same(reference(x, settings), y)]
        if not candidates:
            raise Refused("no candidate computes the same")
    settings = candidates[0]

    x = torch.randn(2, 32, small[0], generator=generator).to(torch.bfloat16)
    if not _probe.no_worse(reference(x, settings), native(x, False), native(x.float(), False)):
        raise Refused("it computes bf16 inputs in another precision")
    x = torch.randn(2, 32, small[0], generator=generator, requires_grad=True)
    leaves = [x, *(line.matrix.requires_grad_() for line in lines.values())]
    upstream = torch.randn(2, 32, small[0], generator=generator)
    wanted = _probe.gradients(native(x, True), leaves, upstream)
    got = _probe.gradients(reference(x, settings), leaves, upstream)
    if not all(_probe.same(a, b, tolerance=1e-4) for a, b in zip(got, wanted, strict=True)):
        raise Refused("its gradient is not that of the formula it computes")
    packed = "" if settings.up else ", packed" if settings.gate_first else ", packed, gate second"
    return Found(settings.activation + packed, settings)


def _glu_forward(self: nn.Module, x: Tensor) -> Any:
    mlp = self._tigon.settings
    gate = getattr(self, mlp.gate)(x)
    up = None if mlp.up is None else getattr(self, mlp.up)(x)
    op = glu if _is_plain(gate, up) else glu_reference
    return getattr(self, mlp.down)(op(gate, up, activation=mlp.activation, gate_first=mlp.gate_first))


# ---- the table ----

FORMS = (
    Form("rms_norm", _match_rms_norm, _verify_rms_norm, _rms_norm_forward),
    Form("layer_norm", _match_layer_norm, _verify_layer_norm, _layer_norm_forward),
    Form("glu", _match_glu, _verify_glu, _glu_forward),
)
FORM_NAMES = (*(form.name for form in FORMS), "rope", "linear_cross_entropy")

# Rows of (class path, reason, test) for what the probe cannot decide. None is known.
EXCEPTIONS: tuple[tuple[str, str, str], ...] = ()
