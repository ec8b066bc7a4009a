"""Cases of `softmax` and of `log_softmax`, which differ in one line of their kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.softmax import softmax_reference
from ._spec import Case, Cost, Make, Mutation, OpSpec


def _inputs(case: Case, make: Make) -> dict[str, Tensor | None]:
    if case.models_only:
        return {"x": make.randn(case.M, case.N, scale=3.0)}
    return {"x": make.rows(case.M, case.N, spread=1.0)}


def _cost(case: Case, itemsize: int) -> Cost:
    tensor = case.M * case.N * itemsize
    result = tensor if case.options.get("dtype") is None else case.M * case.N * case.options["dtype"].itemsize
    return Cost(forward_bytes=tensor + result, backward_bytes=2 * result + tensor)


CASES = (
    Case("odd", {"M": 37, "N": 300}),
    Case("one_column", {"M": 5, "N": 1}),
    Case("one_row", {"M": 1, "N": 129}),
    Case("narrow", {"M": 300, "N": 3}),
    Case("register_row", {"M": 3, "N": 32768}),
    Case("two_reads", {"M": 3, "N": 32769}),
    Case("two_reads_backward", {"M": 3, "N": 16385}),
    Case("wide_result", {"M": 37, "N": 130}, {"dtype": torch.float32}),
    Case("columns_4096", {"M": 16384, "N": 4096}, models_only=True),
    Case("columns_32768", {"M": 8192, "N": 32768}, models_only=True),
)
EMPTY = Case("empty", {"M": 0, "N": 64})
# Where dy is the same all over the row, dx is y times the rounding error of a sum of probabilities.
FLOOR = {case.name: 1e-7 for case in CASES if case.N <= 300}
COMPILED = ("columns_4096", "columns_32768", "register_row", "two_reads_backward", "narrow", "wide_result")


def mutations(reference: Callable[..., Tensor]) -> tuple[Mutation, ...]:
    """Wrong forms of either operator, from its reference."""

    def padding_counted(x: Tensor, **options: Any) -> Tensor:
        return reference(F.pad(x, (0, 1)), **options)[..., :-1]

    def first_block_only(x: Tensor, **options: Any) -> Tensor:
        return torch.cat([reference(part, **options) for part in x.split(16384, -1)], -1)

    def no_sum_in_backward(x: Tensor, **options: Any) -> Tensor:
        with torch.no_grad():
            constant = reference(x, **options)
        factor = constant.detach() if reference is softmax_reference else torch.ones_like(constant)
        return constant + factor * (x - x.detach())

    def wrong_axis(x: Tensor, **options: Any) -> Tensor:
        return reference(x.mT, **options).mT

    return (
        Mutation("a padded lane enters the sum", padding_counted),
        Mutation("each block has a sum of its own", first_block_only),
        Mutation("the sum over the row is missing in the backward", no_sum_in_backward),
        Mutation("over the first axis", wrong_axis),
    )


SPEC = OpSpec(
    name="softmax",
    cases=CASES,
    inputs=_inputs,
    differentiable=("x",),
    empty=EMPTY,
    cost=_cost,
    mutations=mutations(softmax_reference),
    floor=FLOOR,
    compile_cases=COMPILED,
)
