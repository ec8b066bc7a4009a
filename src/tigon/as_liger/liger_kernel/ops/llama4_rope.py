from __future__ import annotations

from typing import Any

from torch import Tensor

from tigon.ops import rope
from tigon.ops._check import require

from .._missing import missing_from
from .._options import require_default

__getattr__ = missing_from(__name__)


class LigerLlama4RopeFunction:
    @staticmethod
    def apply(q: Tensor, k: Tensor, freqs_cis: Tensor, BLOCK_SIZE: Any = None) -> tuple[Tensor, Tensor]:
        name = "LigerLlama4RopeFunction"
        require_default(name, BLOCK_SIZE=BLOCK_SIZE)
        require(freqs_cis.is_complex(), name, "freqs_cis", "a complex dtype", freqs_cis.dtype)
        if freqs_cis.dim() == 4:
            freqs_cis = freqs_cis.squeeze(2)
        cos, sin = freqs_cis.real, freqs_cis.imag
        q_out, k_out = rope(q, k, cos, sin, layout="interleaved", tables="half", unsqueeze_dim=2)
        return q_out.to(q.dtype), k_out.to(k.dtype)
