from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._options import require_default
from ..ops import LigerLayerNormFunction
from .rms_norm import initial


class LigerLayerNorm(nn.Module):
    """With `bias` it begins at zero; without it there is none."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        bias: bool = False,
        init_fn: str = "ones",
        impl: Any = None,
        mode: Any = None,
        backend: Any = None,
    ) -> None:
        super().__init__()
        require_default("LigerLayerNorm", impl=impl, mode=mode, backend=backend)
        self.hidden_size, self.eps, self.variance_epsilon = hidden_size, eps, eps
        self.weight = initial("LigerLayerNorm", hidden_size, init_fn)
        self.register_parameter("bias", nn.Parameter(torch.zeros(hidden_size)) if bias else None)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return LigerLayerNormFunction.apply(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.variance_epsilon}"
