from __future__ import annotations

import math

from torch import Tensor

from tigon.ops import modulated_norm
from tigon.ops._check import require

from .._missing import missing_from
from .._options import cast_of

__getattr__ = missing_from(__name__)
_NAME = "liger_modulated_rms_norm"


class LigerModulatedRMSNormFunction:
    @staticmethod
    def apply(
        X: Tensor,
        W: Tensor | None,
        scale: Tensor,
        shift: Tensor | None,
        eps: float,
        offset: float = 0.0,
        casting_mode: str | int = "llama",
        in_place: bool = True,
    ) -> Tensor:
        """A row of `scale` and `shift` is for as many rows of `X`, one after the other, as there are for each."""
        # Of the casting modes there is one here, more exact than all: rounded once.
        cast_of(casting_mode)
        columns, tokens, rows = X.shape[-1], math.prod(X.shape[:-1]), math.prod(scale.shape[:-1])
        fits = scale.shape[-1:] == X.shape[-1:] and rows > 0 and tokens % rows == 0
        require(fits, _NAME, "scale", "the columns of X and a number of rows that divides its own", scale.shape)
        scale = scale.reshape(rows, columns)
        if shift is not None:
            fits = shift.shape[-1:] == X.shape[-1:] and math.prod(shift.shape[:-1]) == rows
            require(fits, _NAME, "shift", "as many rows and columns as scale", shift.shape)
            shift = shift.reshape(rows, columns)
        if W is not None and offset != 0:
            # 1 and a small weight are not one number of 16 bits.
            W = (W.float() if W.element_size() < 4 else W) + offset
        x = X.reshape(rows, tokens // rows, columns)
        return modulated_norm(x, scale, shift, weight=W, eps=eps).to(X.dtype).reshape(X.shape)
