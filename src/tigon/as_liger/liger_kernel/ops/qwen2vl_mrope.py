from __future__ import annotations

import torch
from torch import Tensor

from .._missing import missing_from
from .rope import LigerRopeFunction

__getattr__ = missing_from(__name__)


class LigerQwen2VLMRopeFunction:
    @staticmethod
    def apply(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: list[int], unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        # Columns in turn from the tables of the three axes, for both halves of the head.
        axes = [axis for axis, size in enumerate(mrope_section) for _ in range(size)] * 2
        axis = torch.tensor(axes, device=cos.device).expand(1, *cos.shape[1:])
        cos, sin = cos.gather(0, axis).squeeze(0), sin.gather(0, axis).squeeze(0)
        return LigerRopeFunction.apply(q, k, cos, sin, None, unsqueeze_dim)
