from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon import losses

from .._missing import missing_from
from ._calls import of_pairs

__getattr__ = missing_from(__name__)


class LigerFusedLinearORPOFunction:
    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ignore_index: int = -100,
        beta: float = 0.1,
        compute_nll_loss: bool = True,
        nll_target: Tensor | None = None,
        compiled: bool = True,
        chunk_size: int = 1,
    ) -> Any:
        # Of targets of both halves, the likelihood is that of the chosen ones.
        nll_labels = None if nll_target is None else nll_target[: target.shape[0] // 2]
        out = losses.orpo(
            _input,
            weight,
            target,
            bias=bias,
            ignore_index=ignore_index,
            beta=beta,
            nll_weight=1.0 if compute_nll_loss else 0.0,
            nll_labels=nll_labels if compute_nll_loss else None,
        )
        means = F.logsigmoid(out.log_odds).mean(), out.log_odds.mean()
        return of_pairs(out, _input, weight, bias, compute_nll_loss, *means)


class LigerFusedLinearORPOLoss(torch.nn.Module):
    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        chunk_size: int = 1,
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.beta = beta
        self.compute_nll_loss = compute_nll_loss
        self.compiled = compiled
        self.chunk_size = chunk_size

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        nll_target: Tensor | None = None,
    ) -> Any:
        return LigerFusedLinearORPOFunction.apply(
            _input,
            lin_weight,
            target,
            bias,
            nll_target=nll_target,
            ignore_index=self.ignore_index,
            beta=self.beta,
            compute_nll_loss=self.compute_nll_loss,
            compiled=self.compiled,
            chunk_size=self.chunk_size,
        )
