from __future__ import annotations

from typing import Any

from torch import Tensor

from tigon.ops import rope
from tigon.ops._check import require

from .._missing import missing_from

__getattr__ = missing_from(__name__)


class LigerRopeFunction:
    @staticmethod
    def apply(
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        position_ids: Tensor | None = None,
        unsqueeze_dim: int = 1,
        rotary_dim: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        if cos.dim() == 4:
            cos, sin = cos.squeeze(unsqueeze_dim), sin.squeeze(unsqueeze_dim)
        if cos.dim() == 2 and position_ids is not None:
            cos, sin = cos[position_ids], sin[position_ids]
        width = cos.shape[-1]
        tables: Any = "half" if rotary_dim == 2 * width else "full"
        expected = f"None, or {width} or {2 * width} for tables of {width} columns"
        require(rotary_dim in (None, width, 2 * width), "liger_rotary_pos_emb", "rotary_dim", expected, rotary_dim)
        q_out, k_out = rope(q, k, cos, sin, tables=tables, unsqueeze_dim=unsqueeze_dim)
        return q_out.to(q.dtype), k_out.to(k.dtype)
