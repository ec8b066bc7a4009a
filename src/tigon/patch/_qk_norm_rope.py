"""Attention that normalises the heads of its queries and keys and then rotates them: one kernel does both.

While the attention's forward runs, its two norms give what they are given, to be normalised: the rotation that gets
both does all of it. Any other use computes the norm as it would have been.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.qk_norm_rope import qk_norm_rope_reference
from ..ops.rms_norm import rms_norm_reference
from ..ops.rope import rope_reference
from . import _hf, _norms, _probe, _rope, _swap
from ._form import Found, Match, argument_of, arguments_of, own, refuse_unseen, required_arguments_of
from ._probe import Refused

NAME = "qk_norm_rope"


class QkNormSettings(NamedTuple):
    """The two norms, by name."""

    norms: tuple[str, str]


def match(module: nn.Module, norms: dict[str, Found]) -> Match:
    """`norms` are the children that are replaced RMS norms, of a module whose rotation is replaced."""
    return "sure" if len(norms) > 1 else "no"


def opaque(module: nn.Module, norms: dict[str, Found]) -> tuple[str, ...]:
    return ()


# ---- probing ----


class _Columns(_probe.StandIn):
    """Stand-in for a projection of any size: columns of its input, scaled."""

    def __init__(self, sizes: tuple[int, int], generator: torch.Generator) -> None:
        super().__init__()
        self.in_features, self.out_features = sizes
        self.scale = nn.Parameter(torch.randn(self.out_features, generator=generator))
        self.columns = torch.arange(self.out_features) % self.in_features

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.columns] * self.scale


class _Attention:
    """Runs of one attention module with its norms and stand-ins for its projections."""

    def __init__(self, module: nn.Module, norms: dict[str, Found], generator: torch.Generator) -> None:
        self.module, self.norms = module, norms
        self.argument = argument_of(module)
        children = own(module._modules)
        sizes = {name: _probe.sizes_of(child) for name, child in children.items()}
        self.lines = {name: _Columns(size, generator) for name, size in sizes.items() if size}
        for name, child in children.items():
            if name not in {**norms, **self.lines} and any(True for _ in child.parameters()):
                raise Refused(f"its child {name} has parameters, which the trial run does not know")

        def random(tensor: Tensor) -> Tensor:
            return torch.randn(_probe.shape_of(tensor), generator=generator)

        self.weights = {
            name: {key: random(p) for key, p in own(module._modules[name]._parameters).items()} for name in norms
        }
        self.parameters = {name: random(p) for name, p in own(module._parameters).items()}
        # A norm without a weight takes any width.
        widths = {w.shape[0] for each in self.weights.values() for w in each.values()} or {module.head_dim}
        if len(widths) > 1:
            raise Refused("its norms differ in width")
        if not self.lines:
            raise Refused("it has no projections")
        (self.head_dim,) = widths
        self.x = torch.randn(2, 3, next(iter(self.lines.values())).in_features, generator=generator)
        self.tables = torch.randn(2, 1, 3, self.head_dim, generator=generator)

    def run(
        self,
        forward: Callable[..., Any],
        width: int,
        forwards: dict[str, Any],
        deferring: tuple[str, ...],
        training: bool = False,
    ) -> Any:
        children: dict[str, Any] = {}
        for name, child in self.module._modules.items():
            children[name] = self.lines.get(name) or (
                child and _probe.twin(child, parameters=self.weights.get(name), training=training)
            )
            if name in forwards:
                mark = _swap.Installed("rms_norm", "", self.norms[name].settings, "forward", ())
                children[name].__dict__.update(_tigon=mark, forward=types.MethodType(forwards[name], children[name]))
        copy = _probe.twin(
            self.module,
            parameters=self.parameters,
            children=children,
            attributes=_hf.with_eager_attention(self.module.__dict__),
            training=training,
        )
        x = self.x.clone().requires_grad_()
        arguments = dict.fromkeys(required_arguments_of(self.module))
        tables = tuple(self.tables[..., :width])
        names = {a.name for a in arguments_of(self.module)}
        given = (
            {"position_embeddings": tables} if "position_embeddings" in names else {"cos": tables[0], "sin": tables[1]}
        )
        # What is dropped out is the same in every run.
        torch.random.default_generator.manual_seed(0)
        call = functools.partial(forward, copy, **{**arguments, **given, self.argument: x})
        with _norms.deferring(copy, deferring, _norms.heads_later):
            y = _probe.watched(copy, call, draws=True)
        y = y if isinstance(y, Tensor) else y[0]
        leaves = [x, *(line.scale for line in self.lines.values())]
        leaves += [p for name in self.norms for p in copy._modules[name].parameters()]  # type: ignore[union-attr]
        upstream = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
        return y, _probe.gradients(y, leaves, upstream)


@_probe.remembered
def _trial(native: Any, functions: tuple[tuple[str, Any], ...]) -> tuple[Callable[..., Any], list[str]]:
    """The attention's forward on references, and a list that gets longer with every rotation that normalises."""
    fused: list[str] = []

    def together(*args: Any, **kwargs: Any) -> Any:
        fused.append("once")
        return qk_norm_rope_reference(*args, **kwargs)

    return _rope.rebuilt_with(native, dict(functions), rope_reference, together), fused


def verify(module: nn.Module, norms: dict[str, Found], generator: torch.Generator) -> Found:
    refuse_unseen(module)
    functions = _rope.rotary_functions(type(module).forward)
    forward, fused = _trial(type(module).forward, tuple(functions.items()))
    materialised: list[str] = []
    attention = _Attention(module, norms, generator)

    def forward_of(name: str) -> Any:
        def now(norm: nn.Module, x: Tensor) -> Tensor:
            return _norms.rms_norm_by(rms_norm_reference, norm, x)

        def later(norm: nn.Module, x: Tensor) -> Any:
            if norm.__dict__.get("_tigon_defer") is None or not _norms.can_defer(norm, x):
                return now(norm, x)
            return _norms.NormedHeads(norm, x, lambda: materialised.append(name) or now(norm, x))

        return later

    refused = Refused("no rotation takes what two of its norms give")
    for pair, width in itertools.product(itertools.combinations(norms, 2), (1, 2)):
        forwards, narrow = {name: forward_of(name) for name in norms}, attention.head_dim // width
        for training in (False, True):
            del fused[:], materialised[:]
            try:
                y, grads = attention.run(forward, narrow, forwards, pair, training)
                wanted, wanted_grads = attention.run(type(module).forward, narrow, {}, (), training)
            except Refused as error:
                if training:
                    raise
                refused = error
                break
            if not fused or materialised:
                break
            if not _probe.same(y, wanted) or not _probe.same_gradients(grads, wanted_grads):
                raise Refused("it does not compute the same with its norms in its rotation")
        else:
            return Found(", ".join(pair), QkNormSettings(pair))
    raise refused


# ---- replacing ----


def replacement(module: nn.Module) -> Callable[..., Any]:
    forward = type(module).forward
    return _forward_around(_rope.rebound(forward, tuple(_rope.rotary_functions(forward).items())))


@functools.cache
def _forward_around(rotating: Callable[..., Any]) -> Callable[..., Any]:
    """The attention's forward that has its rotation replaced, with its norms put off."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        norms = self._tigon.settings.norms
        if torch.compiler.is_compiling() or not _swap.ours_unwatched(self, norms, "rms_norm"):
            return rotating(self, *args, **kwargs)
        with _norms.deferring(self, norms, _norms.heads_later):
            return rotating(self, *args, **kwargs)

    functools.update_wrapper(forward, rotating)
    return _swap.signed(forward)
