"""Cases of `sandwich_norm`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.rms_norm import NormResidual, rms_norm_reference
from ..ops.sandwich_norm import sandwich_norm_reference
from ._spec import Case, Cost, Make, Mutation, OpSpec


def _inputs(case: Case, make: Make) -> dict[str, Tensor | None]:
    fp32_weight = torch.float32 if case.sizes.get("fp32_weight") else None
    return {
        "x": make.rows(case.M, case.N),
        "post_weight": make.randn(case.N, mean=0.5, dtype=fp32_weight),
        "residual": make.randn(case.M, case.N),
        "pre_weight": make.randn(case.N, mean=0.5),
    }


def _cost(case: Case, itemsize: int) -> Cost:
    tensor, weights, statistics = case.M * case.N * itemsize, 2 * case.N * itemsize, 8 * case.M
    return Cost(
        forward_bytes=4 * tensor + weights + statistics,
        # dy, the gradient of the sum, x and s are read; dx and dresidual are written.
        backward_bytes=6 * tensor + 2 * weights + statistics,
    )


def _weights_exchanged(x: Tensor, post_weight: Tensor, residual: Tensor, pre_weight: Tensor, **options: Any) -> Any:
    return sandwich_norm_reference(x, pre_weight, residual, post_weight, **options)


def _offset_of_the_first_alone(
    x: Tensor, post_weight: Tensor, residual: Tensor, pre_weight: Tensor, *, offset: float = 0.0, **options: Any
) -> Any:
    s = residual + rms_norm_reference(x, post_weight, offset=offset, **options)
    return NormResidual(rms_norm_reference(s, pre_weight, **options), s)


def _norm_of_the_residual_alone(
    x: Tensor, post_weight: Tensor, residual: Tensor, pre_weight: Tensor, **options: Any
) -> Any:
    s = residual + rms_norm_reference(x, post_weight, **options)
    return NormResidual(rms_norm_reference(residual, pre_weight, **options) + 0 * s, s)


def _gradient_of_sum_lost(x: Tensor, post_weight: Tensor, residual: Tensor, pre_weight: Tensor, **options: Any) -> Any:
    y, s = sandwich_norm_reference(x, post_weight, residual, pre_weight, **options)
    return NormResidual(y, s.detach() + 0 * y)


def _eps_100_times(
    x: Tensor, post_weight: Tensor, residual: Tensor, pre_weight: Tensor, *, eps: float = 1e-6, **options: Any
) -> Any:
    return sandwich_norm_reference(x, post_weight, residual, pre_weight, eps=100 * eps, **options)


SPEC = OpSpec(
    name="sandwich_norm",
    cases=(
        Case("odd", {"M": 37, "N": 300}),
        Case("offset", {"M": 5, "N": 129}, {"offset": 1.0, "cast": "scale_then_cast", "eps": 1e-5}),
        Case("no_cast", {"M": 17, "N": 64}, {"cast": "none"}),
        Case("cast_rstd", {"M": 7, "N": 48}, {"cast": "cast_rstd"}),
        Case("one_row", {"M": 1, "N": 257}),
        Case("narrow", {"M": 70, "N": 3}),
        Case("fp32_weight", {"M": 7, "N": 65, "fp32_weight": 1}),
        Case("wide", {"M": 2, "N": 4097}),
        Case("hidden_2304", {"M": 16384, "N": 2304}, {"offset": 1.0, "cast": "scale_then_cast"}, models_only=True),
        Case("hidden_4096", {"M": 16384, "N": 4096}, models_only=True),
        Case("hidden_5376", {"M": 8192, "N": 5376}, {"offset": 1.0, "cast": "scale_then_cast"}, models_only=True),
    ),
    inputs=_inputs,
    differentiable=("x", "post_weight", "residual", "pre_weight"),
    empty=Case("empty", {"M": 0, "N": 64}),
    cost=_cost,
    mutations=(
        Mutation("weights exchanged", _weights_exchanged),
        Mutation("offset of the first norm alone", _offset_of_the_first_alone),
        Mutation("norm of the residual alone", _norm_of_the_residual_alone),
        Mutation("gradient of the returned sum lost", _gradient_of_sum_lost),
        Mutation("eps 100 times too large", _eps_100_times),
    ),
    compile_cases=("hidden_2304", "hidden_4096"),
)
