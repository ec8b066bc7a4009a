from __future__ import annotations

from torch import Tensor

from ..ops import LigerQwen2VLMRopeFunction


def liger_multimodal_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: list[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    return LigerQwen2VLMRopeFunction.apply(q, k, cos, sin, mrope_section, unsqueeze_dim)
