from __future__ import annotations

from torch import Tensor

from tigon.ops import group_norm
from tigon.ops._check import require

from .._missing import missing_from

__getattr__ = missing_from(__name__)


class LigerGroupNormFunction:
    @staticmethod
    def apply(
        X: Tensor,
        affine_scaling_weight: Tensor | None,
        affine_shifting_bias: Tensor | None,
        num_channels: int,
        num_groups: int,
        eps: float,
    ) -> Tensor:
        held = X.dim() >= 2 and X.shape[1] == num_channels
        require(held, "liger_group_norm", "num_channels", "the length of the second axis", num_channels)
        return group_norm(X, num_groups, affine_scaling_weight, affine_shifting_bias, eps=eps).to(X.dtype)
