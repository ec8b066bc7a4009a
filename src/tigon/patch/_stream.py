"""The residual stream within a layer: adding to it is put off until it is known whether a norm takes the sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._deferred import Deferred, real
from ._form import is_plain


class Stream(Deferred):
    """A tensor, or the sum of two that is not computed yet."""

    def __init__(self, real: Tensor | None, terms: tuple[Tensor, Tensor] | None = None) -> None:
        like = real if terms is None else terms[1]
        self.real, self.terms = real, terms
        self.shape, self.device = like.shape, like.device  # type: ignore[union-attr]
        self.dtype = like.dtype if terms is None else torch.promote_types(terms[0].dtype, like.dtype)  # type: ignore

    def materialise(self) -> Tensor:
        if self.terms is not None:
            self.settle(self.terms[0] + self.terms[1])
        return self.real  # type: ignore[return-value]

    def settle(self, total: Tensor) -> None:
        """The sum was computed; its terms need not be kept alive."""
        self.real, self.terms = total, None

    def __add__(self, other: Any) -> Any:
        return _sum(self.materialise(), real(other))

    def __radd__(self, other: Any) -> Any:
        return _sum(real(other), self.materialise())

    @classmethod
    def noted(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in (Tensor.add, torch.add) and len(args) == 2 and not kwargs:
            return _sum(*real(args))
        return NotImplemented


def _sum(first: Any, second: Any) -> Any:
    fits = (
        isinstance(first, Tensor)
        and isinstance(second, Tensor)
        and is_plain(first, second)
        and first.shape == second.shape
        and first.device == second.device
        and first.is_floating_point()
        and second.is_floating_point()
    )
    return Stream(None, (first, second)) if fits else first + second
