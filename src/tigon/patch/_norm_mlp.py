"""A gated MLP and the norm before it: one operator does both and keeps neither the norm nor the product for backward.

Which norm goes into which MLP, and nowhere else, is found in a trial run of the module that holds both. While that
module's own forward runs, these norms give what they are given, to be normalised: the MLP that gets it does all of it,
any other use computes the norm as it would have been. So a layer that does with the norm what it did not do in the
trial run gets right numbers too.

The operator reads the parameters of three projections outside their own forwards; as with "glu_linear", every call
looks whether it may.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops._check import require_one_of
from ..ops._op import autocast_dtype
from ..ops.rms_norm import rms_norm, rms_norm_reference
from ..ops.rms_norm_mlp import rms_norm_mlp
from . import _add_norm, _glu, _glu_linear, _norms, _probe, _swap
from ._deferred import real
from ._form import Found, Match, is_plain, own, refuse_unseen
from ._normed import Normed
from ._probe import Refused

NAME = "rms_norm_mlp"
# Rows of a tile: enough for a matrix product to be as fast as one of all rows, next to nothing of a long sequence.
TILE_ROWS = 4096
# What `patch(mlp=)` takes, and what the operator is told.
MLP = {
    "saved": {},
    "recompute": {"recompute": True},
    "tiled": {"recompute": True, "max_rows": TILE_ROWS},
}


class NormMlpSettings(NamedTuple):
    """Names of children: norms, and the MLP that each goes into; and a key of `MLP`."""

    pairs: tuple[tuple[str, str], ...]
    mlp: str = "saved"

    @property
    def norms(self) -> tuple[str, ...]:
        return tuple(norm for norm, _ in self.pairs)

    @property
    def mlps(self) -> tuple[str, ...]:
        return tuple(mlp for _, mlp in self.pairs)


class Parts(NamedTuple):
    """Children that are replaced: RMS norms, and gated MLPs with what is known of their projections."""

    norms: dict[str, Found]
    mlps: dict[str, _glu_linear.Parts]


def parts_of(module: nn.Module, norms: dict[str, Found], mlps: dict[str, Found]) -> Parts:
    def known(name: str) -> _glu_linear.Parts:
        mlp = module._modules[name]
        parts = _glu_linear.parts_of(mlp, mlps[name].settings)  # type: ignore[arg-type]
        return parts._replace(why=why_called(mlp, parts.mlp))  # type: ignore[arg-type]

    return Parts(norms, {name: known(name) for name in mlps})


def match(module: nn.Module, parts: Parts) -> Match:
    children = own(module._modules)
    if not parts.norms or any(
        isinstance(each, (nn.ModuleList, nn.ModuleDict)) for each in (module, *children.values())
    ):
        return "no"
    if parts.mlps:
        return "sure"
    # A layer of experts; an MLP that is kept or left alone has said so itself.
    if any(_glu.match(child) != "no" for child in children.values()):
        return "no"
    return "sure" if _add_norm.match(module, parts.norms) == "sure" else "no"


def opaque(module: nn.Module, parts: Parts) -> list[str]:
    return _add_norm.opaque(module, parts.norms)


# ---- the projections ----


def _names(mlp: _glu.GluSettings) -> list[str]:
    return [name for name in (mlp.gate, mlp.up, mlp.down) if name is not None]


def why_called(module: nn.Module, mlp: _glu.GluSettings) -> str:
    """Why some projection of an MLP must be called, "" where none need be."""
    for name in _names(mlp):
        if why := _glu_linear.why_called(getattr(module, name)):
            return f"its {name} {why}"
    return ""


def why_apart(module: nn.Module, mlp: _glu.GluSettings, x: Normed) -> str:
    """Why this call must go through norm and projections, "" where it need not."""
    if why := why_called(module, mlp):
        return why
    weight = _norms.weight_of(x.norm)
    if weight is not None and (weight.shape != x.shape[-1:] or weight.device != x.device):
        return "the weight of its norm is not whole outside of it, or on another device"
    cast = autocast_dtype(x.device.type)
    if cast is not None and mlp.casts:
        return "it casts its product itself under autocast"
    for name in _names(mlp):
        line: Any = getattr(module, name)
        weight, bias = line.weight, line.bias
        if not is_plain(weight, bias):
            return f"its {name} has tensors that are not plain"
        if weight.shape != (line.out_features, line.in_features):
            return f"the weight of its {name} is not whole outside of it"
        if weight.device != x.device:
            return f"the weight of its {name} is on another device"
        dtypes = {t.dtype for t in (weight, bias) if t is not None}
        if dtypes != {x.dtype} if cast is None else torch.float64 in (*dtypes, x.dtype):
            return f"the weight of its {name} has another dtype than what it is multiplied with"
    return ""


def why_off(module: nn.Module, settings: NormMlpSettings) -> str:
    """Why the pairs of a module run apart, as far as that shows in its children, "" where they need not."""
    for form, names in (("rms_norm", settings.norms), ("glu", settings.mlps)):
        for name in names:
            if not _swap.ours_unwatched(module, (name,), form):
                return f"its {name} has hooks, or another forward since"
            if getattr(module._modules[name], "_compiled_call_impl", None) is not None:
                return f"its {name} is compiled by itself"
    return ""


def why_not(module: nn.Module, settings: NormMlpSettings) -> str:
    """`why_off`, or why the projections must be called."""
    if why := why_off(module, settings):
        return why
    mlps = ((name, module._modules[name]) for name in settings.mlps)
    for name, mlp in mlps:
        if why := why_called(mlp, _glu_linear.gate_of(mlp)):  # type: ignore[arg-type]
            return f"in its {name}, {why}"
    return ""


# ---- probing ----


class _Seen(Normed):
    """Counts every use, of which a block that is given it makes one."""

    def __init__(self, name: str, uses: Counter[str], norm: nn.Module, x: Tensor) -> None:
        super().__init__(norm, x, lambda: _norms.rms_norm_by(rms_norm_reference, norm, x), lambda *_: None)
        self.name, self.uses = name, uses

    def materialise(self) -> Tensor:
        self.uses[self.name] += 1
        return super().materialise()


class _Layer(_add_norm.Layer):
    """Runs of one layer, to see where its norms go."""

    def sealed(
        self, blocks: dict[str, _add_norm.Block], training: bool
    ) -> tuple[_add_norm.Run, Counter[str], dict[str, list[str]]]:
        """A run, how often the result of each norm was used, and by which blocks."""
        uses: Counter[str] = Counter()

        def forward_of(name: str) -> Any:
            return (lambda norm, x: _Seen(name, uses, norm, real(x))) if name in self.norms else None

        for block in blocks.values():
            block.given.clear()
        leaf = self.x.clone().requires_grad_()
        run = self.run(self.twin(blocks, forward_of, training), blocks, leaf, leaf)
        takers: dict[str, list[str]] = {}
        for name, block in blocks.items():
            for value in block.given:
                if isinstance(value, _Seen):
                    takers.setdefault(value.name, []).append(name)
        return run, uses, takers


def verify(module: nn.Module, parts: Parts, generator: torch.Generator) -> Found:
    if not parts.mlps:
        raise Refused("none of its blocks is a gated MLP")
    refuse_unseen(module)
    usable, refused = [], Refused("")
    for name, mlp in parts.mlps.items():
        try:
            _glu_linear.verify(module._modules[name], mlp, generator)  # type: ignore[arg-type]
            usable.append(name)
        except Refused as error:
            refused = Refused(f"in its {name}, {error}")
    if not usable:
        raise refused
    norms = {name: found for name, found in parts.norms.items() if found.settings.group_size is None}
    if not norms:
        raise Refused("its norms are over groups of columns")
    layer = _Layer(module, norms, generator)
    found = [_pairs(layer, usable, training) for training in (False, True)]
    if found[0] != found[1]:
        raise Refused("its norms go elsewhere in training")
    return Found(", ".join(f"{norm} + {mlp}" for norm, mlp in found[0].pairs), found[0])


def _pairs(layer: _Layer, usable: list[str], training: bool) -> NormMlpSettings:
    native, blocks = layer.native(training)
    sealed, uses, takers = layer.sealed(blocks, training)
    pairs, shared = [], ""
    for norm, names in takers.items():
        if len(names) == uses[norm] == 1 and names[0] in usable:
            pairs.append((norm, names[0]))
        elif set(names) & set(usable):
            others = sorted(set(names) - set(usable)) or ["it elsewhere"]
            shared = f"what its {norm} gives is taken by {', '.join(others)} too"
    if not pairs:
        raise Refused(shared or f"none of its norms goes straight into its {', '.join(usable)}")
    same = len(native.results) == len(sealed.results) and all(
        _probe.same(a, b) for a, b in zip(sealed.results, native.results, strict=True)
    )
    if not same or not _probe.same_gradients(sealed.grads, native.grads):
        raise Refused("it does not compute the same with its norms put off")
    return NormMlpSettings(tuple(pairs))


# ---- replacing ----


def replacement(module: nn.Module) -> Callable[..., Any]:
    return _swap.like(forward, type(module).forward)


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    settings = self._tigon.settings
    # A compiler would have to follow what is put off.
    if torch.compiler.is_compiling():
        return type(self).forward(self, *args, **kwargs)
    if why := why_off(self, settings):
        _glu_linear.note(f"{NAME} is off in {type(self).__name__}: {why}")
        return type(self).forward(self, *args, **kwargs)
    with _norms.deferring(self, settings.norms, functools.partial(_later, MLP[settings.mlp])):
        return real(type(self).forward(self, *args, **kwargs))


def checked_mlp(function: str, mlp: Any) -> str | None:
    if mlp is not None:
        require_one_of(function, "mlp", mlp, tuple(MLP))
    return mlp


def set_mlp(module: nn.Module, mlp: str) -> None:
    mark = module.__dict__["_tigon"]
    module.__dict__["_tigon"] = mark._replace(settings=mark.settings._replace(mlp=mlp))


def _later(options: dict[str, Any], norm: nn.Module, x: Any) -> Normed | None:
    """The norm of `x`, to be computed with the MLP, None where only the norm may."""
    settings, x = norm._tigon.settings, real(x)
    native = settings.native_autocast and torch.is_autocast_enabled(x.device.type)
    if native or settings.group_size is not None or not is_plain(x, _norms.weight_of(norm)):
        return None
    return Normed(norm, x, lambda: _norms.rms_norm_by(rms_norm, norm, x), functools.partial(_together, options))


def _together(options: dict[str, Any], self: nn.Module, mlp: _glu.GluSettings, x: Normed) -> Tensor | None:
    if why := why_apart(self, mlp, x):
        _glu_linear.note(f"{NAME} is off in {type(self).__name__}: {why}")
        return None
    norm = x.norm._tigon.settings
    weight, offset = norm.scaled_by(_norms.weight_of(x.norm))
    gate, up, down = (name and getattr(self, name) for name in (mlp.gate, mlp.up, mlp.down))
    op = functools.partial(
        rms_norm_mlp,
        x.x,
        weight,
        down_weight=down.weight,
        gate_bias=gate.bias,
        up_bias=up and up.bias,
        down_bias=down.bias,
        eps=norm.eps_of(x.norm),
        offset=offset,
        cast=norm.cast,
        **options,
    )
    return _glu.scaled(mlp, self, mlp.how.call(op, self, gate.weight, up and up.weight))
