"""A gated MLP whose projection back is a plain linear layer: one operator does both and keeps no product for backward.

It multiplies with the parameters of the projection outside the projection's own forward. That is wrong where these are
whole, or of the right dtype, only while that forward runs, as of a layer that is sharded by itself (FSDP with a unit of
its own, ZeRO-3), offloaded or tensor-parallel, and where the forward does more: an adapter, a quantised layer, a hook.
Sharding a layer or an MLP as one unit is no obstacle: its parameters are whole while it runs. Every call looks, since
all of these may come after patching, and where it may not, it calls the projection.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops._device import constant_while_compiling
from ..ops._op import DEBUG, autocast_dtype
from ..ops.glu_linear import glu_linear, glu_linear_reference, product_dtype
from . import _glu, _probe, _swap
from ._deferred import real
from ._form import Found, Match, argument_of, is_plain
from ._gate import choose
from ._normed import Normed, through
from ._probe import Refused

NAME = "glu_linear"
logger = logging.getLogger("tigon")


class GluLinearSettings(NamedTuple):
    mlp: _glu.GluSettings


class Parts(NamedTuple):
    """What the verdict depends on besides the MLP, whose projections are not looked into."""

    mlp: _glu.GluSettings
    has_bias: bool
    # Why the projection must be called, "" where it need not.
    why: str


def gate_of(module: nn.Module) -> _glu.GluSettings:
    """What is known of a gated MLP that is replaced, with this fusion or without."""
    settings = module._tigon.settings
    return settings.mlp if isinstance(settings, GluLinearSettings) else settings  # type: ignore[return-value]


def parts_of(module: nn.Module, mlp: _glu.GluSettings) -> Parts:
    down = getattr(module, mlp.down)
    why = why_called(down)
    return Parts(mlp, not why and down.bias is not None, why and f"its {mlp.down} {why}")


def match(module: nn.Module, parts: Parts) -> Match:
    return "sure"


def opaque(module: nn.Module, parts: Parts) -> tuple[str, ...]:
    return ()


# ---- the projection ----

_FORWARD, _CALL = nn.Linear.forward, nn.Linear.__call__


def why_called(down: nn.Module) -> str:
    """Why a call of `down` may do more than multiply with its parameters, "" where it does not."""
    if type(down) is not nn.Linear:
        return f"is a {type(down).__name__}, not a plain nn.Linear"
    if "forward" in down.__dict__ or nn.Linear.forward is not _FORWARD or nn.Linear.__call__ is not _CALL:
        return "has another forward than nn.Linear"
    hooks = down._forward_hooks or down._forward_pre_hooks or down._backward_hooks or down._backward_pre_hooks
    if hooks or _swap.watched_by_all():
        return "has hooks"
    return ""


def why_apart(mlp: _glu.GluSettings, down: nn.Module, gate: Tensor, up: Tensor | None) -> str:
    """Why this call must go through the projection, "" where it need not."""
    if why := why_called(down):
        return f"its {mlp.down} {why}"
    weight, bias = down.weight, down.bias
    if not is_plain(gate, up, weight, bias):
        return f"its {mlp.down} has, or is given, tensors that are not plain"
    if weight.shape != (down.out_features, down.in_features):
        return f"the weight of its {mlp.down} is not whole outside of it"
    if weight.device != gate.device:
        return f"the weight of its {mlp.down} is on another device"
    dtype = product_dtype(gate, up)
    is_cast = autocast_dtype(gate.device.type) is not None and not mlp.casts
    if not is_cast and any(t is not None and t.dtype != dtype for t in (weight, bias)):
        return f"the weight of its {mlp.down} has another dtype than what it is multiplied with"
    return ""


# ---- probing ----


class _Down(_probe.Projection):
    """Stand-in for a linear layer whose weight and bias are what it multiplies with."""

    def __init__(self, sizes: tuple[int, int], has_bias: bool, generator: torch.Generator) -> None:
        super().__init__(*sizes, generator)
        self.has_bias = has_bias

    @property
    def weight(self) -> Tensor:
        return self.matrix.to(self.dtype)

    @property
    def bias(self) -> Tensor | None:
        return self.shift.to(self.dtype) if self.has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class _Fused(_glu.Mlp):
    """Runs of one MLP, with a projection back that the reference of the fused operator reads the weight of."""

    def __init__(self, module: nn.Module, parts: Parts, generator: torch.Generator, small: tuple[int, int]) -> None:
        super().__init__(module, generator, None, small)
        self.down = self.lines[parts.mlp.down] = _Down(small[::-1], parts.has_bias, generator)

    def reference(self, x: Tensor, mlp: _glu.GluSettings, **numbers: float) -> Tensor:
        values = _glu.with_numbers(self.module, numbers)
        self.down.dtype = x.dtype
        op = functools.partial(glu_linear_reference, weight=self.down.weight, bias=self.down.bias)
        up = None if mlp.up is None else self.lines[mlp.up](x)
        return _glu.scaled(mlp, values, mlp.how.call(op, values, self.lines[mlp.gate](x), up))

    def leaves(self) -> list[Tensor]:
        return [*super().leaves(), *([self.down.shift] if self.down.has_bias else [])]


def verify(module: nn.Module, parts: Parts, generator: torch.Generator) -> Found:
    if parts.why:
        raise Refused(parts.why)
    mlp = parts.mlp
    if mlp.inner:
        raise Refused(f"its {mlp.inner} stands between the product and {mlp.down}")

    def probe(sizes: tuple[int, int]) -> Found:
        choose(_Fused(module, parts, generator, sizes), [mlp])
        return Found(mlp.down, GluLinearSettings(mlp))

    return _glu.in_small(module, probe)


# ---- replacing ----


def replacement(module: nn.Module) -> Callable[..., Any]:
    return _swap.like(forward, type(module).forward, argument_of(module))


def forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    mlp = self._tigon.settings.mlp
    if not _glu.is_known(self, mlp, *args, *kwargs.values()):
        return type(self).forward(self, real(x), *args, **kwargs)
    if type(x) is Normed:
        y, x = through(self, mlp, x)
        if y is not None:
            return y
    gate, up = _glu.halves(self, mlp, x)
    down = getattr(self, mlp.down)
    why = why_apart(mlp, down, gate, up)
    if why:
        note(f"{NAME} is off in {type(self).__name__}: {why}")
        return _glu.from_halves(self, mlp, gate, up)
    op = functools.partial(glu_linear, weight=down.weight, bias=down.bias)
    return _glu.scaled(mlp, self, mlp.how.call(op, self, gate, up))


_noted: set[str] = set()


@constant_while_compiling
def note(message: str) -> None:
    if message not in _noted:
        _noted.add(message)
        logger.log(logging.WARNING if DEBUG else logging.INFO, message)
