"""Cases of `rms_norm_gated`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.rms_norm_gated import rms_norm_gated_reference
from ._spec import Case, Cost, Make, Mutation, OpSpec


def _inputs(case: Case, make: Make) -> dict[str, Tensor | None]:
    # Whole groups also where a test cuts all sizes down.
    group_size = case.options.get("group_size", 1)
    num_cols = -(-case.N // group_size) * group_size
    weight_dtype = torch.float32 if case.sizes.get("fp32_weight") else None
    return {
        "x": make.rows(case.M, num_cols, spread=0.5),
        "weight": make.randn(num_cols, mean=0.5, dtype=weight_dtype),
        "gate": make.rows(case.M, num_cols, spread=0.5),
    }


def _cost(case: Case, itemsize: int) -> Cost:
    tensor, rstd = case.M * case.N * itemsize, 4 * case.M * (case.N // case.options.get("group_size", case.N))
    return Cost(
        forward_bytes=3 * tensor + case.N * itemsize + rstd,
        backward_bytes=5 * tensor + 2 * case.N * itemsize + rstd,
    )


def _with(**changed: Any) -> Callable[..., Tensor]:
    """The reference with options replaced."""

    def mutant(x: Tensor, weight: Tensor, gate: Tensor, **options: Any) -> Tensor:
        return rms_norm_gated_reference(x, weight, gate, **{**options, **changed})

    return mutant


def _other_order(x: Tensor, weight: Tensor, gate: Tensor, *, norm_before_gate: bool = True, **options: Any) -> Tensor:
    return rms_norm_gated_reference(x, weight, gate, norm_before_gate=not norm_before_gate, **options)


def _weight_of_the_first_group(
    x: Tensor, weight: Tensor, gate: Tensor, *, group_size: int | None = None, **options: Any
) -> Tensor:
    if group_size is not None:
        weight = weight[:group_size].repeat(x.shape[-1] // group_size)
    return rms_norm_gated_reference(x, weight, gate, group_size=group_size, **options)


def _x_and_gate_swapped(x: Tensor, weight: Tensor, gate: Tensor, **options: Any) -> Tensor:
    return rms_norm_gated_reference(gate, weight, x, **options)


def _gate_left_out_of_the_statistics(
    x: Tensor, weight: Tensor, gate: Tensor, *, norm_before_gate: bool = True, **options: Any
) -> Tensor:
    return rms_norm_gated_reference(x, weight, gate, norm_before_gate=True, **options)


def _gradient_of_the_statistics_lost(x: Tensor, weight: Tensor, gate: Tensor, **options: Any) -> Tensor:
    """Right values, but the gradient of x is the one at fixed statistics."""
    y = rms_norm_gated_reference(x.detach(), weight, gate, **options)
    slope = torch.where(x == 0, torch.zeros_like(y), y / x.to(y.dtype)).detach()
    return y + slope * (x - x.detach()).to(y.dtype)


_GATE_FIRST = {"norm_before_gate": False}
_LARGE = {"M": 16384, "N": 8192}

SPEC = OpSpec(
    name="rms_norm_gated",
    cases=(
        Case("odd", {"M": 37, "N": 300}),
        Case("gate_first", {"M": 37, "N": 129}, _GATE_FIRST),
        Case("sigmoid", {"M": 9, "N": 65}, {"activation": "sigmoid", "cast": "scale_then_cast"}),
        Case("offset", {"M": 5, "N": 33}, {"offset": 1.0, "eps": 1e-5, **_GATE_FIRST}),
        Case("head_dim", {"M": 300, "N": 16}),
        Case("one_row", {"M": 1, "N": 257}),
        Case("one_column", {"M": 5, "N": 1}, _GATE_FIRST),
        Case("groups", {"M": 9, "N": 60}, {"group_size": 20}),
        Case("groups_gate_first", {"M": 130, "N": 24}, {"group_size": 3, **_GATE_FIRST}),
        Case("groups_scaled", {"M": 7, "N": 12}, {"group_size": 6, "cast": "scale_then_cast", **_GATE_FIRST}),
        Case("fp32_weight", {"M": 7, "N": 48, "fp32_weight": 1}),
        Case("fp32_weight_gate_first", {"M": 7, "N": 48, "fp32_weight": 1}, _GATE_FIRST),
        Case("wide", {"M": 3, "N": 8200}),
        Case("wide_gate_first", {"M": 3, "N": 5000}, _GATE_FIRST),
        Case("head_dim_128", {"M": 524288, "N": 128}, models_only=True),
        Case(
            "head_dim_128_sigmoid",
            {"M": 524288, "N": 128},
            {"activation": "sigmoid", "cast": "scale_then_cast"},
            models_only=True,
        ),
        Case("state_4096", {"M": 16384, "N": 4096}, _GATE_FIRST, models_only=True),
        Case("state_8192", _LARGE, _GATE_FIRST, models_only=True),
        Case("groups_8_1024", _LARGE, {"group_size": 1024, **_GATE_FIRST}, models_only=True),
        Case("norm_first_10240", {"M": 4096, "N": 10240}, {"cast": "scale_then_cast"}, models_only=True),
    ),
    inputs=_inputs,
    differentiable=("x", "weight", "gate"),
    empty=Case("empty", {"M": 0, "N": 64}),
    cost=_cost,
    mutations=(
        Mutation("gate on the other side of the norm", _other_order),
        Mutation("x and gate swapped", _x_and_gate_swapped),
        Mutation("silu for every activation", _with(activation="silu")),
        Mutation("mean over all groups", _with(group_size=None)),
        Mutation("offset ignored", _with(offset=0.0)),
        Mutation("weight of the first group for all", _weight_of_the_first_group),
        Mutation("gate left out of the statistics", _gate_left_out_of_the_statistics),
        Mutation("gradient of the statistics lost", _gradient_of_the_statistics_lost),
    ),
    # A row of one element is its own norm: dx and dgate cancel to the rounding of dy * weight.
    floor={"one_column": 1e-6},
)
