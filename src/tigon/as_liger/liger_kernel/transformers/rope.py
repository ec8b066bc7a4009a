"""Rotations with the signature of the functions in model code; `q` and `k` stay as they are."""

from __future__ import annotations

from torch import Tensor

from tigon.ops import rope

from ..ops import LigerRopeFunction


def liger_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    return LigerRopeFunction.apply(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim)


def liger_rotary_pos_emb_gpt_oss(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return LigerRopeFunction.apply(q, k, cos, sin, None, 1, q.shape[-1])


def liger_rotary_pos_emb_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`q` and `k` are `[S, heads, D]`."""
    q_out, k_out = rope(q.unsqueeze(0), k.unsqueeze(0), cos, sin, unsqueeze_dim=2)
    return q_out.squeeze(0).to(q.dtype), k_out.squeeze(0).to(k.dtype)
