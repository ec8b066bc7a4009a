"""Cases of `jsd`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.divergence import jsd_reference
from ._divergence import COMPILED, EMPTY, cases, cost, labels, logarithms, mutations
from ._spec import Case, Make, Mutation, OpSpec


def _inputs(case: Case, make: Make) -> dict[str, Tensor | None]:
    # At the ends one of the two must be finite where the other is 0, or the loss is infinite.
    drawn = [logarithms(case, make), logarithms(case, make)]
    beta = case.options.get("beta")
    if beta in (0, 1):
        positive = make.randn(case.M, case.N, scale=2.0, dtype=torch.float32).log_softmax(-1)
        drawn[int(beta)] = positive.to(make.dtype)
    student, teacher = drawn
    return {"student_log_probs": student, "teacher_log_probs": teacher, "labels": labels(case, make)}


def _roles_swapped(student_log_probs: Tensor, teacher_log_probs: Tensor, **options: Any) -> Tensor:
    return jsd_reference(teacher_log_probs, student_log_probs, **options)


def _always_half(student_log_probs: Tensor, teacher_log_probs: Tensor, **options: Any) -> Tensor:
    return jsd_reference(student_log_probs, teacher_log_probs, **{**options, "beta": 0.5})


def _weights_swapped(
    student_log_probs: Tensor, teacher_log_probs: Tensor, *, beta: float = 0.5, **options: Any
) -> Tensor:
    return jsd_reference(student_log_probs, teacher_log_probs, beta=1 - beta, **options)


SPEC = OpSpec(
    name="jsd",
    cases=cases(
        "teacher_log_probs",
        ("beta_0", {"beta": 0.0}),
        ("beta_1", {"beta": 1.0}),
        ("beta_tenth", {"beta": 0.1}),
        ("beta_most", {"beta": 0.9, "reduction": "none"}),
    ),
    inputs=_inputs,
    differentiable=("student_log_probs", "teacher_log_probs"),
    empty=EMPTY,
    cost=cost(backward_reads=2),
    mutations=(
        *mutations(jsd_reference),
        Mutation("student and teacher swapped", _roles_swapped),
        Mutation("beta ignored", _always_half),
        Mutation("weights swapped", _weights_swapped),
    ),
    compile_cases=(*COMPILED, "beta_0", "beta_1"),
)
