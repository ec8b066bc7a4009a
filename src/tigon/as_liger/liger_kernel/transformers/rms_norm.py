from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tigon.ops._check import require, require_one_of

from .._options import cast_of
from ..ops import LigerRMSNormFunction


def initial(name: str, size: int, init_fn: str) -> nn.Parameter:
    require_one_of(name, "init_fn", init_fn, ("ones", "zeros"))
    return nn.Parameter(torch.ones(size) if init_fn == "ones" else torch.zeros(size))


class LigerRMSNorm(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        cast_of(casting_mode)
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        self.in_place, self.row_mode, self.elementwise_affine = in_place, row_mode, elementwise_affine
        if elementwise_affine:
            self.weight = initial("LigerRMSNorm", hidden_size, init_fn)
        else:
            self.register_parameter("weight", None)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return LigerRMSNormFunction.apply(
            hidden_states,
            self.weight,
            self.variance_epsilon,
            self.offset,
            self.casting_mode,
            self.in_place,
            self.row_mode,
        )

    def extra_repr(self) -> str:
        shape = None if self.weight is None else tuple(self.weight.shape)
        return f"{shape}, eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode!r}"


def _begins_with(offset_: float, casting_mode_: str, init_fn_: str, in_place_: bool) -> Any:
    """The constructor of a norm that differs from `LigerRMSNorm` in defaults alone."""

    def __init__(
        self: LigerRMSNorm,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = offset_,
        casting_mode: str = casting_mode_,
        init_fn: str = init_fn_,
        in_place: bool = in_place_,
        row_mode: bool | None = None,
    ) -> None:
        LigerRMSNorm.__init__(self, hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)

    return __init__


class LigerRMSNormForGemma(LigerRMSNorm):
    __init__ = _begins_with(1.0, "gemma", "zeros", True)


class LigerRMSNormForGemma2(LigerRMSNorm):
    __init__ = _begins_with(1.0, "gemma", "zeros", False)


class LigerRMSNormForQwen3Next(LigerRMSNormForGemma2):
    pass


class LigerRMSNormForMuseGlimmerTextCentered(LigerRMSNormForGemma2):
    pass


class LigerRMSNormForOlmo2(LigerRMSNorm):
    __init__ = _begins_with(0.0, "llama", "ones", False)


class LigerRMSNormForGlm4(LigerRMSNormForOlmo2):
    pass


class LigerRMSNormForGemma3(LigerRMSNorm):
    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = False,
    ) -> None:
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place)


class LigerRMSNormForMuseGlimmer(LigerRMSNorm):
    def __init__(
        self,
        dim: int | None = None,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "gemma",
        init_fn: str = "ones",
        in_place: bool = False,
        with_scale: bool = True,
    ) -> None:
        require(dim is not None or not with_scale, type(self).__name__, "dim", "a width for the weight", None)
        super().__init__(dim or 0, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale


class LigerRMSNormForGemma4(LigerRMSNormForMuseGlimmer):
    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "gemma",
        init_fn: str = "ones",
        in_place: bool = False,
        with_scale: bool = True,
    ) -> None:
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, with_scale)
