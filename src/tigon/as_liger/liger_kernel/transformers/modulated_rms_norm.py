from __future__ import annotations

from torch import Tensor, nn

from .._options import cast_of
from ..ops import LigerModulatedRMSNormFunction
from .rms_norm import initial


class LigerModulatedRMSNorm(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        cast_of(casting_mode)
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        self.in_place, self.elementwise_affine = in_place, elementwise_affine
        if elementwise_affine:
            self.weight = initial("LigerModulatedRMSNorm", hidden_size, init_fn)
        else:
            self.register_parameter("weight", None)

    def forward(self, hidden_states: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
        return LigerModulatedRMSNormFunction.apply(
            hidden_states,
            self.weight,
            scale,
            shift,
            self.variance_epsilon,
            self.offset,
            self.casting_mode,
            self.in_place,
        )
