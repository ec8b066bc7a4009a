"""Cases of `swiglu`; its kernels are those of `glu`, whose specification has the sizes of models."""

from __future__ import annotations

from torch import Tensor

from ..ops.glu import glu_reference, swiglu_reference
from ._spec import Case, Mutation, OpSpec
from .glu import cost, inputs


def _swapped(gate: Tensor, up: Tensor | None = None, *, gate_first: bool = True) -> Tensor:
    return swiglu_reference(up, gate) if up is not None else swiglu_reference(gate, gate_first=not gate_first)


def _gelu(gate: Tensor, up: Tensor | None = None, *, gate_first: bool = True) -> Tensor:
    return glu_reference(gate, up, activation="gelu", gate_first=gate_first)


def _gate_detached(gate: Tensor, up: Tensor | None = None, *, gate_first: bool = True) -> Tensor:
    return swiglu_reference(gate.detach(), up, gate_first=gate_first) + 0 * gate.sum()


SPEC = OpSpec(
    name="swiglu",
    cases=(
        Case("split", {"M": 5, "I": 65}),
        Case("packed", {"M": 5, "I": 64, "packed": 1}, {"gate_first": False}),
    ),
    inputs=inputs,
    differentiable=("gate", "up"),
    empty=Case("empty", {"M": 0, "I": 64}),
    cost=cost,
    mutations=(
        Mutation("gate and up swapped", _swapped),
        Mutation("gelu for silu", _gelu),
        Mutation("gradient of the gate lost", _gate_detached),
    ),
)
