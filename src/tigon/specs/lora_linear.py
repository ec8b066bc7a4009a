"""Cases of `lora_linear`: sizes within and across tiles, mixed dtypes, masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, float32

from ..ops.lora_linear import lora_linear_reference
from ._spec import Case, Cost, Make, Mutation, OpSpec


def inputs(case: Case, make: Make) -> dict[str, Tensor | None]:
    """`fp32_adapter` keeps the adapter in fp32, as adapters of 16-bit layers often are."""
    dtype = float32 if case.sizes.get("fp32_adapter") else None
    return {
        "x": make.rows(case.M, case.K, spread=1.0),
        "weight": make.randn(case.N, case.K, scale=case.K**-0.5),
        "lora_a": make.randn(case.R, case.K, scale=case.K**-0.5, dtype=dtype),
        "lora_b": make.randn(case.N, case.R, scale=case.R**-0.5, dtype=dtype),
        "bias": make.randn(case.N) if case.sizes.get("bias") else None,
        "seed": make.integers(0, 2**62) if case.options.get("dropout") else None,
    }


def cost(case: Case, itemsize: int) -> Cost:
    """What is given and returned, once, with a frozen weight; one large product forward and one backward."""
    x, y, weight = case.M * case.K, case.M * case.N, case.N * case.K
    adapter = case.R * (case.K + case.N)
    return Cost(
        forward_bytes=(x + y + weight + adapter) * itemsize,
        backward_bytes=(2 * x + y + weight + 2 * adapter) * itemsize,
        forward_flops=2 * case.M * (weight + adapter),
        backward_flops=2 * case.M * (weight + 2 * adapter),
    )


def _changed(change: Callable[..., dict[str, Any]]) -> Callable[..., Tensor]:
    def mutant(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, **options: Any) -> Tensor:
        given = {"x": x, "weight": weight, "lora_a": lora_a, "lora_b": lora_b, **options}
        return lora_linear_reference(**{**given, **change(**given)})

    return mutant


def _no_bias(bias: Tensor | None = None, **_: Any) -> dict[str, Any]:
    return {"bias": None if bias is None else 0 * bias}


def _no_last(lora_a: Tensor, **_: Any) -> dict[str, Any]:
    """Without the last column of `x` in the adapter."""
    return {"lora_a": F.pad(lora_a[:, :-1], (0, 1))}


def _no_dropout(**_: Any) -> dict[str, Any]:
    return {"dropout": 0.0}


def _other_mask(seed: Tensor | None = None, **_: Any) -> dict[str, Any]:
    return {} if seed is None else {"seed": seed + 1}


def _dx_of_weight_alone(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, **options: Any) -> Tensor:
    """Right values, but what the adapter adds to dx is lost."""
    whole = lora_linear_reference(x.detach(), weight, lora_a, lora_b, **options)
    base = F.linear(x, weight.detach())
    return whole + base - base.detach()


def _not_dropped_in_backward(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, **options: Any) -> Tensor:
    """Right values, but dlora_a is that of the whole `x`."""
    whole = lora_linear_reference(x, weight, lora_a.detach(), lora_b, **options)
    low = F.linear(F.linear(x.detach().to(lora_a.dtype), lora_a), lora_b.detach()) * options.get("scaling", 1.0)
    return whole + (low - low.detach()).to(whole.dtype)


SPEC = OpSpec(
    name="lora_linear",
    cases=(
        Case("odd", {"M": 37, "K": 300, "N": 48, "R": 5}, {"scaling": 1.7}),
        Case("bias", {"M": 9, "K": 65, "N": 33, "R": 16, "bias": 1}, {"scaling": 0.5}),
        # More than one tile of rows and part of columns, of x and of dy.
        Case("tiles", {"M": 141, "K": 600, "N": 520, "R": 4}, {"scaling": 2.0}),
        Case("wide_rank", {"M": 40, "K": 70, "N": 130, "R": 72}),
        Case("dropout", {"M": 37, "K": 300, "N": 48, "R": 5}, {"scaling": 1.7, "dropout": 0.25}),
        Case("dropout_tiles", {"M": 35, "K": 515, "N": 30, "R": 20, "bias": 1}, {"dropout": 0.1}),
        Case("fp32_adapter", {"M": 37, "K": 130, "N": 70, "R": 8, "fp32_adapter": 1}, {"scaling": 2.0}),
        Case("fp32_adapter_dropout", {"M": 20, "K": 130, "N": 70, "R": 8, "fp32_adapter": 1}, {"dropout": 0.5}),
        Case("one_row", {"M": 1, "K": 3, "N": 5, "R": 1}),
        Case("one_column", {"M": 5, "K": 1, "N": 1, "R": 3}),
        *(
            Case(f"{k}_to_{n}", {"M": 8192, "K": k, "N": n, "R": 16}, {"scaling": 2.0}, True, frozen=("weight",))
            for k, n in ((4096, 4096), (4096, 14336), (14336, 4096))
        ),
        Case(
            "4096_to_4096_r64_dropout",
            {"M": 8192, "K": 4096, "N": 4096, "R": 64},
            {"scaling": 2.0, "dropout": 0.05},
            models_only=True,
            frozen=("weight",),
        ),
        Case(
            "4096_to_4096_fp32_adapter",
            {"M": 8192, "K": 4096, "N": 4096, "R": 16, "fp32_adapter": 1},
            {"scaling": 2.0},
            models_only=True,
            frozen=("weight",),
        ),
    ),
    inputs=inputs,
    differentiable=("x", "weight", "lora_a", "lora_b", "bias"),
    empty=Case("empty", {"M": 0, "K": 64, "N": 16, "R": 4, "bias": 1}, {"dropout": 0.5}),
    cost=cost,
    mutations=(
        Mutation("bias left out", _changed(_no_bias)),
        Mutation("scaling ignored", _changed(lambda **_: {"scaling": 1.0})),
        Mutation("last column left out", _changed(_no_last)),
        Mutation("dropout ignored", _changed(_no_dropout)),
        Mutation("mask of another seed", _changed(_other_mask)),
        Mutation("dx of the weight alone", _dx_of_weight_alone),
        Mutation("dlora_a not dropped out", _not_dropped_in_backward),
    ),
    compile_cases=(
        "tiles",
        "wide_rank",
        "dropout_tiles",
        "fp32_adapter_dropout",
        "4096_to_4096",
        "14336_to_4096",
        "4096_to_4096_r64_dropout",
        "4096_to_4096_fp32_adapter",
    ),
)
