from __future__ import annotations

from torch import Tensor, nn

from .._options import cast_of
from ..ops import LigerFusedAddRMSNormFunction
from .rms_norm import initial


class LigerFusedAddRMSNorm(nn.Module):
    """Returns the norm of the sum, and the sum."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
    ) -> None:
        super().__init__()
        cast_of(casting_mode)
        self.weight = initial("LigerFusedAddRMSNorm", hidden_size, init_fn)
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        self.in_place = in_place

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return LigerFusedAddRMSNormFunction.apply(
            hidden_states,
            residual,
            self.weight,
            self.variance_epsilon,
            self.offset,
            self.casting_mode,
            self.in_place,
        )
