"""Both distillation losses, which differ in the name of a divergence."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tigon import losses
from tigon.ops import linear_cross_entropy
from tigon.ops._check import require_number


def distilled(
    divergence: str,
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    true_labels: Tensor,
    student_bias: Tensor | None,
    teacher_bias: Tensor | None,
    weight_hard_loss: float,
    weight_soft_loss: float,
    beta: float,
    ignore_index: int,
    temperature: float,
    return_soft_hard_loss: bool,
) -> Any:
    require_number(f"liger_fused_linear_{divergence}", "beta", beta, low=0, high=1)
    factor, options = 1.0, {"divergence": divergence}
    if divergence == "jsd":
        options["beta"] = beta
    else:
        # There it is the weight of the cosine, which has no temperature.
        factor = beta
    # Classes that only the teacher has are padding: logits of 0 in the divergence, and none in the hard loss.
    more = teacher_weight.shape[0] - student_weight.shape[0]
    weight, bias = student_weight, student_bias
    if more > 0:
        weight, bias = F.pad(weight, (0, 0, 0, more)), None if bias is None else F.pad(bias, (0, more))
    out = losses.distill(
        student_input,
        weight,
        teacher_input,
        teacher_weight,
        true_labels,
        student_bias=bias,
        teacher_bias=teacher_bias,
        temperature=temperature,
        soft_weight=factor * weight_soft_loss,
        hard_weight=weight_hard_loss if more <= 0 else 0.0,
        ignore_index=ignore_index,
        **options,  # type: ignore[arg-type]
    )
    loss, hard = out.loss, out.hard_loss
    if more > 0 and weight_hard_loss:
        hard = linear_cross_entropy(
            student_input, student_weight, true_labels, bias=student_bias, ignore_index=ignore_index
        )
        loss, hard = loss + weight_hard_loss * hard, hard.detach()  # type: ignore[operator, union-attr]
    return (loss, factor * out.soft_loss, hard) if return_soft_hard_loss else loss
