from __future__ import annotations

from torch import Tensor, nn

from ..ops import LigerTVDLossFunction


class LigerTVDLoss(nn.Module):
    """Of probabilities."""

    def __init__(self, reduction: str = "batchmean", ignore_index: int = -100) -> None:
        super().__init__()
        self.reduction, self.ignore_index = reduction, ignore_index

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return LigerTVDLossFunction.apply(p, q, shift_labels, self.reduction, self.ignore_index)
