"""Cases of `geglu`; its kernels are those of `glu`, whose specification has the sizes of models."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..ops.glu import geglu_reference, swiglu_reference
from ._spec import Case, Mutation, OpSpec
from .glu import cost, inputs


def _swapped(gate: Tensor, up: Tensor | None = None, *, gate_first: bool = True, **options: Any) -> Tensor:
    if up is None:
        return geglu_reference(gate, gate_first=not gate_first, **options)
    return geglu_reference(up, gate, **options)


def _other_form(gate: Tensor, up: Tensor | None = None, *, approximate: str = "tanh", **options: Any) -> Tensor:
    return geglu_reference(gate, up, approximate="none" if approximate == "tanh" else "tanh", **options)


def _silu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "tanh", gate_first: bool = True) -> Tensor:
    return swiglu_reference(gate, up, gate_first=gate_first)


SPEC = OpSpec(
    name="geglu",
    cases=(
        Case("tanh", {"M": 5, "I": 65}),
        Case("exact", {"M": 5, "I": 65}, {"approximate": "none"}),
        Case("packed", {"M": 5, "I": 64, "packed": 1}, {"gate_first": False}),
    ),
    inputs=inputs,
    differentiable=("gate", "up"),
    empty=Case("empty", {"M": 0, "I": 64}),
    cost=cost,
    mutations=(
        Mutation("gate and up swapped", _swapped),
        Mutation("the other form of gelu", _other_form),
        Mutation("silu for gelu", _silu),
    ),
)
