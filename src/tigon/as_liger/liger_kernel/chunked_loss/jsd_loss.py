from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._missing import missing_from
from ._distilled import distilled

__getattr__ = missing_from(__name__)


class LigerFusedLinearJSDFunction:
    @staticmethod
    def apply(
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None,
        teacher_bias: Tensor | None,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> Any:
        given = student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias
        weights = weight_hard_loss, weight_soft_loss, beta, ignore_index, temperature
        return distilled("jsd", *given, *weights, return_soft_hard_loss)


class LigerFusedLinearJSDLoss(torch.nn.Module):
    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> None:
        super().__init__()
        self.weight_hard_loss = weight_hard_loss
        self.weight_soft_loss = weight_soft_loss
        self.beta = beta
        self.ignore_index = ignore_index
        self.temperature = temperature
        self.compiled = compiled
        self.chunk_size = chunk_size
        self.return_soft_hard_loss = return_soft_hard_loss

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Any:
        return LigerFusedLinearJSDFunction.apply(
            student_input,
            student_weight,
            teacher_input,
            teacher_weight,
            true_labels,
            student_bias,
            teacher_bias,
            weight_hard_loss=self.weight_hard_loss,
            weight_soft_loss=self.weight_soft_loss,
            beta=self.beta,
            ignore_index=self.ignore_index,
            temperature=self.temperature,
            compiled=self.compiled,
            chunk_size=self.chunk_size,
            return_soft_hard_loss=self.return_soft_hard_loss,
        )
