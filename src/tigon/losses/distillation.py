"""Distillation: a student that learns the distributions of a teacher, each with its own head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops import _op
from ..ops._check import require
from ..ops.linear_divergence import Divergence, LinearDivergenceOutput, linear_divergence


def distill(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    labels: Tensor,
    *,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    divergence: Divergence = "jsd",
    beta: float = 0.5,
    temperature: float = 1.0,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float | None = None,
    num_items: float | Tensor | None = None,
    ignore_index: int = -100,
    max_logits_bytes: int | None = None,
    skip_ignored: bool = False,
) -> LinearDivergenceOutput:
    """Generalised distillation, without storing the logits of student or teacher.

        loss = mean of soft_weight * jsd(student, teacher, beta) + hard_weight * cross entropy of the labels

    Args:
        skip_ignored: compute only the rows that are not ignored. The host waits for their number, so not while a
            compiler or a CUDA graph records.
        others: as in `tigon.linear_divergence`, of which returns, errors, numerics and memory are those too. The
            defaults are the pure divergence, at temperature 1, and it is not multiplied by temperature^2.

    Source: Hinton et al. 2015, arXiv:1503.02531; Agarwal et al. 2024, arXiv:2306.13649.
    """
    if skip_ignored:
        is_unseen = _op.is_traced(student_hidden) or (
            student_hidden.is_cuda and torch.cuda.is_current_stream_capturing()
        )
        require(not is_unseen, "distill", "skip_ignored", "False while a compiler or a graph records", True)
        rows = tuple(labels.shape)
        for role, hidden in {"student_hidden": student_hidden, "teacher_hidden": teacher_hidden}.items():
            require(tuple(hidden.shape[:-1]) == rows, "distill", role, f"rows {rows}", tuple(hidden.shape))
        labels = labels.reshape(-1)
        index = (labels != ignore_index).nonzero().squeeze(-1)
        labels = labels[index]
        student_hidden, teacher_hidden = (
            h.reshape(-1, h.shape[-1]).index_select(0, index) for h in (student_hidden, teacher_hidden)
        )
    options: dict[str, Any] = {"student_bias": student_bias, "teacher_bias": teacher_bias, "divergence": divergence}
    options |= {"beta": beta, "temperature": temperature, "soft_weight": soft_weight, "hard_weight": hard_weight}
    options |= {"softcap": softcap, "logit_scale": logit_scale, "teacher_softcap": teacher_softcap}
    options |= {"teacher_logit_scale": teacher_logit_scale, "num_items": num_items, "ignore_index": ignore_index}
    options["max_logits_bytes"] = max_logits_bytes
    return linear_divergence(student_hidden, student_weight, teacher_hidden, teacher_weight, labels, **options)
