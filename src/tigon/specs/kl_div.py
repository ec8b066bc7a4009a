"""Cases of `kl_div`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.divergence import kl_div_reference
from ._divergence import COMPILED, EMPTY, cases, cost, labels, logarithms, mutations, probabilities
from ._spec import Case, Make, Mutation, OpSpec


def _inputs(case: Case, make: Make) -> dict[str, Tensor | None]:
    draw = logarithms if case.options.get("log_target") else probabilities
    # Where the target is 0 only, or the loss is infinite.
    log_probs = make.randn(case.M, case.N, scale=2.0, dtype=torch.float32).log_softmax(-1).to(make.dtype)
    return {"log_probs": log_probs, "target": draw(case, make), "labels": labels(case, make)}


def _logarithm_for_probability(
    log_probs: Tensor, target: Tensor, *, log_target: bool = False, **options: Any
) -> Tensor:
    return kl_div_reference(log_probs, target, log_target=not log_target, **options)


def _reversed(log_probs: Tensor, target: Tensor, *, log_target: bool = False, **options: Any) -> Tensor:
    log_target_probs = target if log_target else target.log()
    return kl_div_reference(log_target_probs, log_probs, log_target=True, **options)


SPEC = OpSpec(
    name="kl_div",
    cases=cases(
        "target", ("log_target", {"log_target": True}), ("log_target_none", {"log_target": True, "reduction": "none"})
    ),
    inputs=_inputs,
    differentiable=("log_probs", "target"),
    empty=EMPTY,
    cost=cost(backward_reads=1),
    mutations=(
        *mutations(kl_div_reference),
        Mutation("log_target taken the other way", _logarithm_for_probability),
        Mutation("direction reversed", _reversed),
    ),
    compile_cases=(*COMPILED, "log_target"),
)
