from __future__ import annotations

from torch import Tensor

from tigon.ops import rms_norm

from .._missing import missing_from
from .._options import cast_of

__getattr__ = missing_from(__name__)


class LigerFusedAddRMSNormFunction:
    @staticmethod
    def apply(
        X: Tensor,
        R: Tensor,
        W: Tensor,
        eps: float,
        offset: float = 0.0,
        casting_mode: str | int = "llama",
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor]:
        y, total = rms_norm(X, W, eps=eps, offset=offset, cast=cast_of(casting_mode), residual=R)
        return y.to(X.dtype), total
