from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon import losses

from .._missing import missing_from
from ._calls import of_pairs

__getattr__ = missing_from(__name__)


class LigerFusedLinearSimPOFunction:
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
        compute_nll_loss: bool = False,
        compiled: bool = True,
        gamma: float = 0.5,
        chunk_size: int = 1,
    ) -> Any:
        out = losses.simpo(
            _input,
            weight,
            target,
            bias=bias,
            ignore_index=ignore_index,
            beta=beta,
            gamma=gamma,
            label_smoothing=label_smoothing,
            nll_weight=alpha if compute_nll_loss else 0.0,
        )
        return of_pairs(out, _input, weight, bias, compute_nll_loss)


class LigerFusedLinearSimPOLoss(torch.nn.Module):
    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        gamma: float = 0.5,
        chunk_size: int = 1,
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.beta = beta
        self.alpha = alpha
        self.label_smoothing = label_smoothing
        self.compute_nll_loss = compute_nll_loss
        self.compiled = compiled
        self.gamma = gamma
        self.chunk_size = chunk_size

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
    ) -> Any:
        return LigerFusedLinearSimPOFunction.apply(
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
            gamma=self.gamma,
            chunk_size=self.chunk_size,
        )
