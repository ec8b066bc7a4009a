from __future__ import annotations

from typing import Any

from torch import Tensor

from ..ops import LigerLlama4RopeFunction


def liger_llama4_text_rotary_pos_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    return LigerLlama4RopeFunction.apply(xq, xk, freqs_cis)


def liger_llama4_vision_rotary_pos_emb(query: Tensor, key: Tensor, freqs_ci: Tensor) -> tuple[Tensor, Tensor]:
    # One table for all samples, with an axis for the heads or without.
    return LigerLlama4RopeFunction.apply(query, key, freqs_ci.reshape(-1, freqs_ci.shape[-1]))


def apply_liger_llama4_rope_full(modeling_module: Any) -> None:
    """Replace both functions in the given module, for every model that looks them up there."""
    modeling_module.apply_rotary_emb = liger_llama4_text_rotary_pos_emb
    modeling_module.vision_apply_rotary_emb = liger_llama4_vision_rotary_pos_emb
