from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon import losses
from tigon.ops._check import require

from .._missing import missing_from
from ._calls import mean_logits, reference

__getattr__ = missing_from(__name__)


class LigerFusedLinearKTOFunction:
    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        preference_labels: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        kl: Tensor | None = None,
        ignore_index: int = -100,
        beta: float = 0.1,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
    ) -> Any:
        name = "LigerFusedLinearKTOLoss"
        require(preference_labels is not None, name, "preference_labels", "a tensor", None)
        wanted = preference_labels.bool()
        out = losses.kto(
            _input,
            weight,
            target,
            wanted,
            bias=bias,
            ignore_index=ignore_index,
            beta=beta,
            kl=kl,
            average_log_probs=average_log_prob,
            **reference(name, use_ref_model, ref_input, ref_weight, ref_bias),
        )
        classes = wanted, ~wanted
        of_classes = [torch.where(mask, t, 0.0).sum() for t in (out.log_probs, out.rewards) for mask in classes]
        sums = mean_logits(_input, weight, bias) * (_input.shape[1] * weight.shape[0])
        logits = (torch.where(mask, sums, 0.0).sum() for mask in classes)
        return out.loss, (*of_classes[:2], *logits, *of_classes[2:])


class LigerFusedLinearKTOLoss(torch.nn.Module):
    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compiled: bool = True,
        use_ref_model: bool = False,
        average_log_prob: bool = False,
        chunk_size: int = 1,
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.beta = beta
        self.compiled = compiled
        self.use_ref_model = use_ref_model
        self.average_log_prob = average_log_prob
        self.chunk_size = chunk_size

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        preference_labels: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        kl: Tensor | None = None,
    ) -> Any:
        return LigerFusedLinearKTOFunction.apply(
            _input,
            lin_weight,
            target,
            preference_labels,  # type: ignore[arg-type]
            bias,
            ref_input,
            ref_weight,
            ref_bias,
            kl,
            ignore_index=self.ignore_index,
            beta=self.beta,
            compiled=self.compiled,
            use_ref_model=self.use_ref_model,
            average_log_prob=self.average_log_prob,
            chunk_size=self.chunk_size,
        )
