"""What a norm gives that its MLP may compute with its own first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.rms_norm import _out_dtype
from ._deferred import Deferred


class Normed(Deferred):
    """The norm of `x` that is not computed yet. `into` makes what an MLP gives for it, or None where it may not."""

    def __init__(
        self, norm: nn.Module, x: Tensor, made_by: Callable[[], Tensor], into: Callable[..., Tensor | None]
    ) -> None:
        settings = norm._tigon.settings
        weight = None if settings.weight is None else getattr(norm, settings.weight)
        self.norm, self.x, self.made_by, self.into = norm, x, made_by, into
        self.shape, self.device = x.shape, x.device
        self.dtype: torch.dtype = _out_dtype(x, weight, settings.cast)
        self.real: Tensor | None = None

    def materialise(self) -> Tensor:
        if self.real is None:
            self.real = self.made_by()
        return self.real


def through(mlp: nn.Module, settings: Any, x: Any) -> tuple[Tensor | None, Any]:
    """What an MLP gives for the norm of a tensor where one operator does both, None with a tensor where none does."""
    if x.real is None:
        y = x.into(mlp, settings, x)
        if y is not None:
            return y, x
    return None, x.materialise()
