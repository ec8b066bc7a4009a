from __future__ import annotations

from torch import Tensor

from tigon.ops import glu, swiglu

from .._missing import missing_from

__getattr__ = missing_from(__name__)


class LigerSiLUMulFunction:
    @staticmethod
    def apply(a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
        y = glu(a, b, gate_scale=gate_multiplier)
        return y if down_multiplier == 1 else y * down_multiplier


class LigerFusedGateUpSiLUMulFunction:
    @staticmethod
    def apply(y: Tensor, in_place: bool = False) -> Tensor:
        return swiglu(y)
