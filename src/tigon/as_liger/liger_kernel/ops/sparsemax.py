from __future__ import annotations

from torch import Tensor

from tigon.ops import sparsemax

from .._missing import missing_from

__getattr__ = missing_from(__name__)


class LigerSparsemaxFunction:
    @staticmethod
    def apply(x: Tensor, dim: int) -> Tensor:
        return sparsemax(x.transpose(dim, -1)).transpose(dim, -1)
