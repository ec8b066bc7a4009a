"""Cases of `linear_divergence`."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..ops.linear_divergence import linear_divergence_reference
from ._spec import Case, Cost, Make, Mutation, OpSpec
from .cross_entropy import draw_labels


def _inputs(case: Case, make: Make) -> dict[str, Tensor | None]:
    has_bias = case.sizes.get("bias")
    return {
        "student_hidden": make.randn(case.M, case.D),
        "student_weight": make.randn(case.V, case.D, scale=2.0 * case.D**-0.5),
        "teacher_hidden": make.randn(case.M, case.E),
        "teacher_weight": make.randn(case.V, case.E, scale=2.0 * case.E**-0.5),
        "labels": draw_labels(case, make),
        "student_bias": make.randn(case.V) if has_bias else None,
        "teacher_bias": make.randn(case.V) if has_bias else None,
    }


def _cost(case: Case, itemsize: int) -> Cost:
    # Logits that stay within a chunk need not cross memory; a gradient of 1 leaves nothing to do in backward.
    student, teacher = (2 * case.M * width * case.V for width in (case.D, case.E))
    elements = 2 * (case.M + case.V) * case.D + (case.M + case.V) * case.E
    return Cost(
        forward_bytes=elements * itemsize + 8 * case.M,
        backward_bytes=4,
        forward_flops=3 * student + teacher,
    )


def _swapped(
    student_hidden: Tensor, student_weight: Tensor, *rest: Any, divergence: str = "jsd", **options: Any
) -> Any:
    other = {"kl": "reverse_kl", "reverse_kl": "kl"}.get(divergence, divergence)
    beta = 1 - options.pop("beta", 0.5)
    return linear_divergence_reference(
        student_hidden,
        student_weight,
        *rest,
        divergence=other,
        beta=beta,
        **options,  # type: ignore[arg-type]
    )


def _without(*names: str) -> Any:
    def faulty(*given: Any, **options: Any) -> Any:
        return linear_divergence_reference(*given, **{k: v for k, v in options.items() if k not in names})

    return faulty


def _no_bias(*given: Any, student_bias: Tensor | None = None, **options: Any) -> Any:
    student_bias = None if student_bias is None else 0 * student_bias
    return linear_divergence_reference(*given, student_bias=student_bias, **options)


def _hard_at_temperature(*given: Any, **options: Any) -> Any:
    hard, temperature = options.get("hard_weight", 0.0), options.get("temperature", 1.0)
    if not hard or temperature == 1:
        return linear_divergence_reference(*given, **options)
    soft = linear_divergence_reference(*given, **(options | {"hard_weight": 0.0}))
    options["logit_scale"] = (options.get("logit_scale") or 1.0) / temperature
    both = linear_divergence_reference(*given, **(options | {"soft_weight": 0.0}))
    return both._replace(loss=soft.loss + both.loss, soft_loss=soft.soft_loss)


def _padding_counted(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    labels: Tensor,
    *,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    **options: Any,
) -> Any:
    weights = (F.pad(w, (0, 0, 0, 1)) for w in (student_weight, teacher_weight))
    student_weight, teacher_weight = weights
    biases = [None if b is None else F.pad(b, (0, 1)) for b in (student_bias, teacher_bias)]
    given = student_hidden, student_weight, teacher_hidden, teacher_weight, labels
    return linear_divergence_reference(*given, student_bias=biases[0], teacher_bias=biases[1], **options)


def _all_rows_in_divisor(*given: Any, **options: Any) -> Any:
    labels = given[4] if len(given) > 4 else options["labels"]
    options.setdefault("num_items", labels.numel())
    return linear_divergence_reference(*given, **options)


def _by_name(fault: Any) -> Any:
    """`fault` called with the first five by position."""
    names = "student_hidden", "student_weight", "teacher_hidden", "teacher_weight", "labels"

    def faulty(*given: Any, **options: Any) -> Any:
        first = [*given, *(options.pop(name) for name in names[len(given) :])]
        return fault(*first, **options)

    return faulty


SPEC = OpSpec(
    name="linear_divergence",
    cases=(
        Case("odd", {"M": 37, "D": 48, "E": 40, "V": 300}),
        Case("chunks", {"M": 37, "D": 32, "E": 16, "V": 129, "bias": 1}, {"beta": 0.1, "max_logits_bytes": 10320}),
        Case("kl", {"M": 9, "D": 16, "E": 24, "V": 200}, {"divergence": "kl", "temperature": 2.0}),
        Case("reverse_kl", {"M": 9, "D": 16, "E": 24, "V": 200, "bias": 1}, {"divergence": "reverse_kl"}),
        Case("tvd", {"M": 9, "D": 16, "E": 16, "V": 65}, {"divergence": "tvd", "temperature": 0.7}),
        Case("cosine", {"M": 9, "D": 16, "E": 24, "V": 127, "bias": 1}, {"divergence": "cosine", "logit_scale": 0.5}),
        Case(
            "mixed",
            {"M": 17, "D": 24, "E": 32, "V": 200, "bias": 1},
            {"soft_weight": 0.7, "hard_weight": 0.3, "temperature": 1.7, "num_items": 11},
        ),
        Case(
            "capped",
            {"M": 9, "D": 16, "E": 24, "V": 130},
            {
                "softcap": 2.0,
                "logit_scale": 0.5,
                "teacher_softcap": 3.0,
                "teacher_logit_scale": 0.7,
                "hard_weight": 0.5,
            },
        ),
        Case("blocks", {"M": 3, "D": 16, "E": 8, "V": 8200}, {"hard_weight": 0.5}),
        Case("one_class", {"M": 5, "D": 16, "E": 16, "V": 1}, {"hard_weight": 0.5}),
        Case("all_ignored", {"M": 5, "D": 16, "E": 16, "V": 40, "bias": 1, "all_ignored": 1}, {"hard_weight": 0.5}),
        Case("hidden_4096", {"M": 4096, "D": 4096, "E": 4096, "V": 128256}, models_only=True),
        Case("kl_4096", {"M": 4096, "D": 4096, "E": 4096, "V": 128256}, {"divergence": "kl"}, models_only=True),
    ),
    inputs=_inputs,
    differentiable=("student_hidden", "student_weight", "student_bias"),
    empty=Case("empty", {"M": 0, "D": 8, "E": 8, "V": 64, "bias": 1}, {"hard_weight": 0.5}),
    cost=_cost,
    mutations=(
        Mutation("student and teacher change places in the mean", _swapped),
        Mutation("temperature ignored", _without("temperature")),
        Mutation("bias left out", _no_bias),
        Mutation("bias of the teacher left out", _without("teacher_bias")),
        Mutation("cap of the teacher left out", _without("teacher_softcap")),
        Mutation("hard loss left out", _without("hard_weight")),
        Mutation("temperature in the hard loss", _hard_at_temperature),
        Mutation("a padded lane enters the sum", _by_name(_padding_counted)),
        Mutation("ignored rows in the divisor", _all_rows_in_divisor),
    ),
    # As for linear_cross_entropy: dhidden sums over the vocabulary in the order that the matrix library picks.
    factor={"hidden_4096": 3.0, "kl_4096": 3.0},
    compile_cases=("hidden_4096", "kl_4096", "reverse_kl", "tvd", "cosine", "mixed", "capped"),
)
