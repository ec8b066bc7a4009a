from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon import losses

from .._missing import missing_from
from ._calls import of_pairs, reference

__getattr__ = missing_from(__name__)


class LigerFusedLinearDPOFunction:
    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        ignore_index: int = -100,
        beta: float = 0.1,
        compute_nll_loss: bool = False,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        loss_type: str = "sigmoid",
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
        alpha: float = 1.0,
    ) -> Any:
        out = losses.dpo(
            _input,
            weight,
            target,
            bias=bias,
            ignore_index=ignore_index,
            beta=beta,
            loss_type=loss_type,
            label_smoothing=label_smoothing,
            discopop_tau=discopop_tau,
            average_log_probs=average_log_prob,
            nll_weight=alpha if compute_nll_loss else 0.0,
            **reference("LigerFusedLinearDPOLoss", use_ref_model, ref_input, ref_weight, ref_bias),
        )
        return of_pairs(out, _input, weight, bias, compute_nll_loss)


class LigerFusedLinearDPOLoss(torch.nn.Module):
    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        compute_nll_loss: bool = False,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        loss_type: str = "sigmoid",
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.beta = beta
        self.alpha = alpha
        self.compute_nll_loss = compute_nll_loss
        self.compiled = compiled
        self.use_ref_model = use_ref_model
        self.average_log_prob = average_log_prob
        self.chunk_size = chunk_size
        self.loss_type = loss_type
        self.label_smoothing = label_smoothing
        self.discopop_tau = discopop_tau

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
    ) -> Any:
        return LigerFusedLinearDPOFunction.apply(
            _input,
            lin_weight,
            target,
            bias,
            ref_input,
            ref_weight,
            ref_bias,
            ignore_index=self.ignore_index,
            beta=self.beta,
            compute_nll_loss=self.compute_nll_loss,
            compiled=self.compiled,
            use_ref_model=self.use_ref_model,
            average_log_prob=self.average_log_prob,
            chunk_size=self.chunk_size,
            loss_type=self.loss_type,
            label_smoothing=self.label_smoothing,
            discopop_tau=self.discopop_tau,
            alpha=self.alpha,
        )
