"""Cases of `tvd`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..ops.divergence import tvd_reference
from ._divergence import COMPILED, EMPTY, cases, cost, labels, mutations, probabilities
from ._spec import Case, Make, Mutation, OpSpec


def _inputs(case: Case, make: Make) -> dict[str, Tensor | None]:
    return {"p": probabilities(case, make), "q": probabilities(case, make), "labels": labels(case, make)}


def _twice(p: Tensor, q: Tensor, **options: Any) -> Tensor:
    return 2 * tvd_reference(p, q, **options)


SPEC = OpSpec(
    name="tvd",
    cases=cases("q"),
    inputs=_inputs,
    differentiable=("p", "q"),
    empty=EMPTY,
    cost=cost(backward_reads=2),
    mutations=(*mutations(tvd_reference), Mutation("without the half", _twice)),
    compile_cases=COMPILED,
)
