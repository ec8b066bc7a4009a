from __future__ import annotations

from torch import Tensor, nn

from ..ops import LigerReLUSquaredFunction


class LigerReLUSquared(nn.Module):
    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return LigerReLUSquaredFunction.apply(x)
