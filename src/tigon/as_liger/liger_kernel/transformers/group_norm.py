from __future__ import annotations

import torch
from torch import Tensor, nn

from tigon.ops._check import require

from ..ops import LigerGroupNormFunction
from .rms_norm import initial


class LigerGroupNorm(nn.Module):
    """With `bias` it begins at zero; without it there is none."""

    def __init__(
        self, num_channels: int, num_groups: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones"
    ) -> None:
        super().__init__()
        divides = num_groups > 0 and num_channels % num_groups == 0
        require(divides, "LigerGroupNorm", "num_groups", f"a divisor of {num_channels}", num_groups)
        self.num_channels, self.num_groups = num_channels, num_groups
        self.eps, self.variance_epsilon = eps, eps
        self.weight = initial("LigerGroupNorm", num_channels, init_fn)
        self.register_parameter("bias", nn.Parameter(torch.zeros(num_channels)) if bias else None)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return LigerGroupNormFunction.apply(
            hidden_states, self.weight, self.bias, self.num_channels, self.num_groups, self.variance_epsilon
        )

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.variance_epsilon}"
