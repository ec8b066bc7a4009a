from __future__ import annotations

from torch import Tensor

from tigon.ops import geglu

from .._missing import missing_from

__getattr__ = missing_from(__name__)


class LigerGELUMulFunction:
    @staticmethod
    def apply(a: Tensor, b: Tensor) -> Tensor:
        return geglu(a, b)
