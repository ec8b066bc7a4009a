"""Gated MLPs that Liger-Kernel computes in one kernel with their projections; here in three products and a kernel."""

from __future__ import annotations

from .swiglu import LigerFalconH1SwiGLUMLP, LigerSwiGLUMLP


class LigerMLP(LigerSwiGLUMLP):
    def __init__(self, config: object) -> None:
        super().__init__(config)


class LigerFalconH1MLP(LigerFalconH1SwiGLUMLP):
    pass
