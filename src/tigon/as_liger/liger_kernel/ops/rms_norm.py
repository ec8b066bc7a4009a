from __future__ import annotations

from torch import Tensor

from tigon.ops import rms_norm

from .._missing import missing_from
from .._options import cast_of

__getattr__ = missing_from(__name__)


class LigerRMSNormFunction:
    @staticmethod
    def apply(
        X: Tensor,
        W: Tensor | None,
        eps: float,
        offset: float = 0.0,
        casting_mode: str | int = "llama",
        in_place: bool = True,
        row_mode: bool | None = None,
    ) -> Tensor:
        # in_place and row_mode allow and choose what changes no result: nothing is overwritten here.
        offset = 0.0 if W is None else offset
        return rms_norm(X, W, eps=eps, offset=offset, cast=cast_of(casting_mode)).to(X.dtype)
