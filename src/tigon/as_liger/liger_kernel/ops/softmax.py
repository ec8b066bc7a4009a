from __future__ import annotations

from torch import Tensor

from tigon.ops import softmax

from .._missing import missing_from

__getattr__ = missing_from(__name__)


class LigerSoftmaxFunction:
    @staticmethod
    def apply(input_: Tensor) -> Tensor:
        return softmax(input_)
