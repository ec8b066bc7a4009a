"""Cases of `sparsemax`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..ops.sparsemax import sparsemax_reference
from ._spec import Case, Cost, Make, Mutation, OpSpec


def _inputs(case: Case, make: Make) -> dict[str, Tensor | None]:
    # From rows with all columns in the support to rows with one.
    spread = case.sizes.get("spread", 1)
    return {"x": make.randn(case.M, case.N) if case.models_only else make.rows(case.M, case.N, spread=spread)}


def _cost(case: Case, itemsize: int) -> Cost:
    tensor = case.M * case.N * itemsize
    return Cost(forward_bytes=2 * tensor, backward_bytes=3 * tensor)


def _softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def _padding_counted(x: Tensor) -> Tensor:
    return sparsemax_reference(F.pad(x, (0, 1)))[..., :-1]


def _one_step(x: Tensor) -> Tensor:
    """Newton's method that stops after its first step."""
    z = x - x.detach().amax(-1, keepdim=True)
    inside = (z > -1).to(z.dtype)
    return F.relu(z - ((z * inside).sum(-1, keepdim=True) - 1) / inside.sum(-1, keepdim=True))


def _mean_of_all(x: Tensor) -> Tensor:
    """The right value with the mean over the whole row in the backward."""
    y = sparsemax_reference(x)
    inside = (y > 0).to(y.dtype)
    gradient = inside * (x - x.mean(-1, keepdim=True))
    return y.detach() + gradient - gradient.detach()


def _no_mean(x: Tensor) -> Tensor:
    y = sparsemax_reference(x).detach()
    return y + (y > 0) * (x - x.detach())


SPEC = OpSpec(
    name="sparsemax",
    cases=(
        Case("odd", {"M": 37, "N": 300}),
        Case("one_column", {"M": 5, "N": 1}),
        Case("one_row", {"M": 1, "N": 129}),
        Case("narrow", {"M": 300, "N": 3}),
        Case("sparse_and_dense", {"M": 33, "N": 130, "spread": 3}),
        Case("register_row", {"M": 7, "N": 16384}),
        Case("two_reads", {"M": 7, "N": 16385}),
        Case("two_reads_backward", {"M": 7, "N": 8193}),
        Case("columns_4096", {"M": 16384, "N": 4096}, models_only=True),
        Case("columns_32768", {"M": 8192, "N": 32768}, models_only=True),
    ),
    inputs=_inputs,
    differentiable=("x",),
    empty=Case("empty", {"M": 0, "N": 64}),
    cost=_cost,
    mutations=(
        Mutation("softmax", _softmax),
        Mutation("a padded lane takes part", _padding_counted),
        Mutation("only one step to tau", _one_step),
        Mutation("mean over the whole row", _mean_of_all),
        Mutation("no mean in the backward", _no_mean),
    ),
    # Where dy is the same all over the row, dx is the rounding error of a mean.
    floor={"odd": 1e-7, "one_row": 1e-7, "narrow": 1e-7, "sparse_and_dense": 1e-7},
    compile_cases=("columns_4096", "columns_32768", "register_row", "two_reads_backward", "narrow"),
)
