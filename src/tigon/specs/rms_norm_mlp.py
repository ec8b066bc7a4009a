"""Cases of `rms_norm_mlp`: those of `rms_norm_glu`, with and without the residual and what is computed again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..ops.rms_norm_glu import rms_norm_glu_reference
from ..ops.rms_norm_mlp import rms_norm_mlp_reference
from . import glu_linear, rms_norm_glu
from ._spec import Case, Cost, Make, Mutation, OpSpec


def _inputs(case: Case, make: Make) -> dict[str, Tensor | None]:
    dtype = torch.float32 if case.sizes.get("fp32_norm") else None
    return {
        **rms_norm_glu.inputs(case, make),
        "down_weight": make.randn(case.D, case.I, scale=case.I**-0.5, dtype=dtype),
        "down_bias": make.randn(case.D, dtype=dtype) if case.sizes.get("bias") else None,
    }


def _cost(case: Case, itemsize: int) -> Cost:
    """What is given and returned, once; three products of matrices forward and six backward."""
    x, weights = case.M * case.D, 3 * case.I * case.D
    flops = 6 * case.M * case.D * case.I
    return Cost(
        forward_bytes=(2 * x + weights) * itemsize,
        backward_bytes=(3 * x + 2 * weights) * itemsize,
        forward_flops=flops,
        backward_flops=2 * flops,
    )


def _no_residual(*given: Any, residual: bool = False, **options: Any) -> Tensor:
    return rms_norm_mlp_reference(*given, **options)


def _no_down_bias(*given: Any, down_bias: Tensor | None = None, **options: Any) -> Tensor:
    return rms_norm_mlp_reference(*given, down_bias=None if down_bias is None else 0 * down_bias, **options)


def _gradient_of_residual_lost(x: Tensor, *given: Any, residual: bool = False, **options: Any) -> Tensor:
    """Right values, but the gradient that the residual carries is not added to that of the norm."""
    y = rms_norm_mlp_reference(x, *given, **options)
    return x.detach() + y if residual else y


def _gradient_for_product(
    x: Tensor,
    *given: Any,
    down_weight: Tensor,
    down_bias: Tensor | None = None,
    residual: bool = False,
    recompute: bool = False,
    max_rows: int | None = None,
    **options: Any,
) -> Tensor:
    """Right values, but ddown_weight reads the gradient of the product, where that was to be written over."""
    y = glu_linear._NotEmitted.apply(rms_norm_glu_reference(x, *given, **options), down_weight)
    y = y if down_bias is None else y + down_bias
    return x + y if residual else y


def _with_options(case: Case) -> Case:
    """The case with a residual or recomputation, each on in some of them."""
    return replace(case, options={**case.options, **_CHOICES.get(case.name, {})})


_RESIDUAL, _RECOMPUTE = {"residual": True}, {"recompute": True}
_CHOICES = {
    "odd": _RESIDUAL,
    "packed": _RESIDUAL,
    "interleaved_sloped": _RESIDUAL | _RECOMPUTE,
    "weightless": _RECOMPUTE,
    "offset": _RESIDUAL,
    "limited": _RECOMPUTE,
    "fp32_norm": _RESIDUAL,
    "mlp_14336": _RESIDUAL,
    "mlp_8192": _RESIDUAL,
    "mlp_512": _RESIDUAL,
}


SPEC = OpSpec(
    name="rms_norm_mlp",
    cases=(
        *(_with_options(case) for case in rms_norm_glu.CASES),
        Case("recompute", {"M": 19, "D": 24, "I": 40}, _RESIDUAL | _RECOMPUTE),
        Case("recompute_bias", {"M": 5, "D": 24, "I": 17, "bias": 1}, _RECOMPUTE),
        Case("parts", {"M": 19, "D": 24, "I": 40, "bias": 1}, _RESIDUAL | _RECOMPUTE | {"max_rows": 8}),
    ),
    inputs=_inputs,
    differentiable=(
        "x",
        "norm_weight",
        "gate_weight",
        "up_weight",
        "down_weight",
        "gate_bias",
        "up_bias",
        "down_bias",
    ),
    empty=Case("empty", {"M": 0, "D": 16, "I": 64, "bias": 1}, _RESIDUAL),
    cost=_cost,
    mutations=(
        *rms_norm_glu.mutations(rms_norm_mlp_reference),
        Mutation("residual left out", _no_residual),
        Mutation("bias of the projection back left out", _no_down_bias),
        Mutation("gradient of the residual lost", _gradient_of_residual_lost),
        Mutation("product not written over its gradient", _gradient_for_product),
    ),
    # Those of rms_norm and glu have the rest.
    compile_cases=("mlp_14336",),
)
