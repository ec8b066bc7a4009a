"""Cases of `rms_norm`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.rms_norm import NormResidual, rms_norm_reference
from ._spec import Case, Cost, Make, Mutation, OpSpec


def _inputs(case: Case, make: Make) -> dict[str, Tensor | None]:
    # Whole groups also where a test cuts all sizes down.
    num_cols = -(-case.N // case.options.get("group_size", 1)) * case.options.get("group_size", 1)
    x = make.rows(case.M, num_cols)
    weight_dtype = torch.float32 if case.sizes.get("fp32_weight") else None
    return {
        "x": x,
        "weight": None if case.sizes.get("weightless") else make.randn(num_cols, mean=0.5, dtype=weight_dtype),
        "residual": make.rows(case.M, num_cols) if case.sizes.get("residual") else None,
    }


def _cost(case: Case, itemsize: int) -> Cost:
    tensor = case.M * case.N * itemsize
    tensors = 4 if case.sizes.get("residual") else 2
    weight = 0 if case.sizes.get("weightless") else case.N * itemsize
    return Cost(
        forward_bytes=tensors * tensor + weight + 4 * case.M,
        backward_bytes=(4 if case.sizes.get("residual") else 3) * tensor + 2 * weight + 4 * case.M,
    )


def _no_offset(x: Tensor, weight: Tensor | None = None, *, offset: float = 0.0, **options: Any) -> Any:
    return rms_norm_reference(x, weight, **options)


def _eps_outside(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    **options: Any,
) -> Any:
    return rms_norm_reference(x, weight, eps=100 * eps, residual=residual, **options)


def _drops_last_column(x: Tensor, weight: Tensor | None = None, **options: Any) -> Any:
    y = rms_norm_reference(x, weight, **options)
    keep = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
    keep[-1] = 0
    return NormResidual(y.y * keep, y.residual) if isinstance(y, NormResidual) else y * keep


def _wrong_width(x: Tensor, weight: Tensor | None = None, **options: Any) -> Any:
    y = rms_norm_reference(x, weight, **options)
    scale = (x.shape[-1] / (x.shape[-1] + 1)) ** 0.5
    return NormResidual(y.y * scale, y.residual) if isinstance(y, NormResidual) else y * scale


def _mean_over_all_groups(
    x: Tensor, weight: Tensor | None = None, *, group_size: int | None = None, **options: Any
) -> Any:
    return rms_norm_reference(x, weight, **options)


def _weight_of_the_first_group(
    x: Tensor, weight: Tensor | None = None, *, group_size: int | None = None, **options: Any
) -> Any:
    if group_size is not None and weight is not None:
        weight = weight[:group_size].repeat(x.shape[-1] // group_size)
    return rms_norm_reference(x, weight, group_size=group_size, **options)


def _gradient_of_sum_lost(x: Tensor, weight: Tensor | None = None, **options: Any) -> Any:
    y = rms_norm_reference(x, weight, **options)
    return NormResidual(y.y, y.residual.detach() + 0 * x) if isinstance(y, NormResidual) else y


SPEC = OpSpec(
    name="rms_norm",
    cases=(
        Case("odd", {"M": 37, "N": 300}),
        Case("offset", {"M": 5, "N": 129}, {"offset": 1.0, "cast": "scale_then_cast", "eps": 1e-5}),
        Case("no_cast", {"M": 17, "N": 64}, {"cast": "none"}),
        Case("one_column", {"M": 5, "N": 1}),
        Case("one_row", {"M": 1, "N": 257}),
        Case("head_dim", {"M": 70, "N": 16}),
        Case("weightless", {"M": 9, "N": 48, "weightless": 1}),
        Case("residual", {"M": 19, "N": 96, "residual": 1}),
        Case("residual_offset", {"M": 3, "N": 1000, "residual": 1}, {"offset": 1.0, "cast": "scale_then_cast"}),
        Case("fp32_weight", {"M": 7, "N": 65, "fp32_weight": 1}),
        Case("cast_rstd", {"M": 7, "N": 48}, {"cast": "cast_rstd"}),
        Case("cast_to_weight", {"M": 7, "N": 48, "fp32_weight": 1}, {"cast": "cast_to_weight"}),
        Case("groups", {"M": 9, "N": 60}, {"group_size": 20, "offset": 1.0, "cast": "scale_then_cast"}),
        Case("groups_residual", {"M": 130, "N": 24, "residual": 1}, {"group_size": 3}),
        Case("groups_weightless", {"M": 5, "N": 12, "weightless": 1}, {"group_size": 4}),
        Case("wide", {"M": 3, "N": 8193}),
        Case("wide_residual", {"M": 2, "N": 20000, "residual": 1}, {"cast": "none"}),
        Case("hidden_4096", {"M": 16384, "N": 4096}, models_only=True),
        Case("hidden_8192", {"M": 8192, "N": 8192}, models_only=True),
        Case("hidden_1024", {"M": 32768, "N": 1024}, models_only=True),
        Case("qk_norm", {"M": 524288, "N": 128}, models_only=True),
        Case(
            "hidden_3584",
            {"M": 16384, "N": 3584},
            {"offset": 1.0, "cast": "scale_then_cast"},
            models_only=True,
        ),
        Case("residual_4096", {"M": 16384, "N": 4096, "residual": 1}, models_only=True),
        Case(
            "groups_4_2048",
            {"M": 16384, "N": 8192},
            {"group_size": 2048, "offset": 1.0, "cast": "scale_then_cast"},
            models_only=True,
        ),
        Case("weightless_512", {"M": 131072, "N": 512, "weightless": 1}, {"cast": "cast_rstd"}, models_only=True),
        Case("hidden_16384", {"M": 4096, "N": 16384}, models_only=True),
        Case("groups_2_10240", {"M": 4096, "N": 20480}, {"group_size": 10240}, models_only=True),
    ),
    inputs=_inputs,
    differentiable=("x", "weight", "residual"),
    empty=Case("empty", {"M": 0, "N": 64}),
    cost=_cost,
    mutations=(
        Mutation("offset ignored", _no_offset),
        Mutation("eps 100 times too large", _eps_outside),
        Mutation("last column dropped", _drops_last_column),
        Mutation("mean over a padded width", _wrong_width),
        Mutation("mean over all groups", _mean_over_all_groups),
        Mutation("weight of the first group for all", _weight_of_the_first_group),
        Mutation("gradient of the returned sum lost", _gradient_of_sum_lost),
    ),
    # A row of one element is its own norm: dx cancels to the rounding of dy * weight.
    floor={"one_column": 1e-6},
    compile_cases=(
        "hidden_4096",
        "hidden_8192",
        "qk_norm",
        "residual_4096",
        "hidden_16384",
        "weightless_512",
        "cast_to_weight",
        "groups_4_2048",
        "groups_2_10240",
    ),
)
