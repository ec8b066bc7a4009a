from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..ops import LigerKLDivLossFunction


class LigerKLDIVLoss(nn.KLDivLoss):
    """With the options of torch, and its "mean", which divides by the number of elements."""

    def __init__(self, eps: float = 1e-10, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.eps = eps

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        return LigerKLDivLossFunction.apply(y_pred, y_true, self.reduction, self.log_target, self.eps)
