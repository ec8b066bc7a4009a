"""Cases of `nf4_lora_linear`: sizes of blocks, scales of 8 bits, an odd number of elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.nf4_lora_linear import nf4_lora_linear_reference
from ._spec import Case, Cost, Make, Mutation, OpSpec


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def inputs(case: Case, make: Make) -> dict[str, Tensor | None]:
    """`nested` scales are bytes; `fp32_adapter` keeps the adapter in fp32, as adapters of 16-bit layers often are."""
    dtype = torch.float32 if case.sizes.get("fp32_adapter") else None
    is_nested = bool(case.sizes.get("nested"))
    num_blocks = _ceil(case.N * case.K, case.options.get("block_size", 64))
    num_outer = _ceil(num_blocks, case.options.get("nested_block_size", 256))
    size = case.K**-0.5
    if is_nested:
        absmax = make.integers(0, 256, num_blocks).to(torch.uint8)
    else:
        absmax = make.randn(num_blocks, scale=0.2 * size, mean=2 * size, dtype=torch.float32)
    return {
        "x": make.rows(case.M, case.K, spread=1.0),
        "packed": make.integers(0, 256, _ceil(case.N * case.K, 2), 1).to(torch.uint8),
        "absmax": absmax,
        "nested_absmax": make.randn(num_outer, scale=0.1 * size, mean=size, dtype=torch.float32) if is_nested else None,
        "nested_code": make.randn(256, dtype=torch.float32) if is_nested else None,
        "nested_offset": make.randn(1, mean=2 * size, scale=0.0, dtype=torch.float32)[0] if is_nested else None,
        "lora_a": make.randn(case.R, case.K, scale=size, dtype=dtype),
        "lora_b": make.randn(case.N, case.R, scale=case.R**-0.5, dtype=dtype),
        "bias": make.randn(case.N) if case.sizes.get("bias") else None,
        "seed": make.integers(0, 2**62) if case.options.get("dropout") else None,
    }


def cost(case: Case, itemsize: int) -> Cost:
    """What is given and returned, once, and the weight written and read for each product."""
    x, y, weight = case.M * case.K, case.M * case.N, case.N * case.K
    adapter = case.R * (case.K + case.N)
    return Cost(
        forward_bytes=(x + y + 2 * weight + adapter) * itemsize + weight // 2,
        backward_bytes=(2 * x + y + 2 * weight + 2 * adapter) * itemsize + weight // 2,
        forward_flops=2 * case.M * (weight + adapter),
        backward_flops=2 * case.M * (weight + 2 * adapter),
    )


def _changed(change: Callable[..., dict[str, Any]]) -> Callable[..., Tensor]:
    def mutant(x: Tensor, packed: Tensor, absmax: Tensor, lora_a: Tensor, lora_b: Tensor, **options: Any) -> Tensor:
        given = {"x": x, "packed": packed, "absmax": absmax, "lora_a": lora_a, "lora_b": lora_b, **options}
        return nf4_lora_linear_reference(**{**given, **change(**given)})

    return mutant


def _swapped(packed: Tensor, **_: Any) -> dict[str, Any]:
    return {"packed": (packed >> 4) | (packed << 4)}


def _no_offset(nested_offset: Tensor | None = None, **_: Any) -> dict[str, Any]:
    return {"nested_offset": None if nested_offset is None else 0 * nested_offset}


def _one_scale(absmax: Tensor, **_: Any) -> dict[str, Any]:
    return {"absmax": absmax.roll(1)}


SPEC = OpSpec(
    name="nf4_lora_linear",
    cases=(
        Case("odd", {"M": 17, "K": 65, "N": 33, "R": 5}, {"scaling": 1.7}),
        Case("nested", {"M": 9, "K": 100, "N": 48, "R": 8, "nested": 1, "bias": 1}, {"nested_block_size": 16}),
        Case("blocks", {"M": 5, "K": 96, "N": 70, "R": 4}, {"block_size": 32}),
        Case("dropout", {"M": 9, "K": 130, "N": 40, "R": 4, "nested": 1}, {"dropout": 0.25}),
        Case("fp32_adapter", {"M": 9, "K": 64, "N": 40, "R": 4, "nested": 1, "fp32_adapter": 1}, {"scaling": 2.0}),
        Case("one_row", {"M": 1, "K": 3, "N": 5, "R": 1}),
        *(
            Case(f"{k}_to_{n}", {"M": 8192, "K": k, "N": n, "R": 16, "nested": 1}, {"scaling": 2.0}, models_only=True)
            for k, n in ((4096, 4096), (4096, 14336), (14336, 4096))
        ),
    ),
    inputs=inputs,
    differentiable=("x", "lora_a", "lora_b", "bias"),
    empty=Case("empty", {"M": 0, "K": 64, "N": 16, "R": 4, "bias": 1}),
    cost=cost,
    mutations=(
        Mutation("elements of a byte swapped", _changed(_swapped)),
        Mutation("scale of another block", _changed(_one_scale)),
        Mutation("offset of scales left out", _changed(_no_offset)),
        Mutation("scaling ignored", _changed(lambda **_: {"scaling": 1.0})),
        Mutation("dropout ignored", _changed(lambda **_: {"dropout": 0.0})),
    ),
    compile_cases=("odd", "nested", "4096_to_14336"),
)
