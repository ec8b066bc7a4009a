from __future__ import annotations

from torch import Tensor, nn

from ..ops import LigerSoftmaxFunction


class LigerSoftmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return LigerSoftmaxFunction.apply(x)
