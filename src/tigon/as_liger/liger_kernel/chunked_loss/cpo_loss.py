from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon import losses

from .._missing import missing_from
from ._calls import of_pairs

__getattr__ = missing_from(__name__)


class LigerFusedLinearCPOFunction:
    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
    ) -> Any:
        out = losses.cpo(
            _input,
            weight,
            target,
            bias=bias,
            ignore_index=ignore_index,
            beta=beta,
            label_smoothing=label_smoothing,
            average_log_probs=average_log_prob,
            nll_weight=alpha if compute_nll_loss else 0.0,
        )
        return of_pairs(out, _input, weight, bias, compute_nll_loss)


class LigerFusedLinearCPOLoss(torch.nn.Module):
    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.beta = beta
        self.alpha = alpha
        self.label_smoothing = label_smoothing
        self.compute_nll_loss = compute_nll_loss
        self.compiled = compiled
        self.average_log_prob = average_log_prob
        self.chunk_size = chunk_size

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
    ) -> Any:
        return LigerFusedLinearCPOFunction.apply(
            _input,
            lin_weight,
            target,
            bias,
            ignore_index=self.ignore_index,
            beta=self.beta,
            alpha=self.alpha,
            label_smoothing=self.label_smoothing,
            compute_nll_loss=self.compute_nll_loss,
            compiled=self.compiled,
            average_log_prob=self.average_log_prob,
            chunk_size=self.chunk_size,
        )
