from __future__ import annotations

from torch import Tensor

from tigon.ops import layer_norm

from .._missing import missing_from

__getattr__ = missing_from(__name__)


class LigerLayerNormFunction:
    @staticmethod
    def apply(X: Tensor, W: Tensor, B: Tensor | None, eps: float) -> Tensor:
        return layer_norm(X, W, B, eps=eps).to(X.dtype)
