"""Make an existing model use the fused operators.

The package can be called: `tigon.patch(model)` is `tigon.patch.patch(model)`, whichever was imported first.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable

from torch import nn

from ._apply import patch, unpatch
from .report import Report, Row

__all__ = ["Report", "Row", "patch", "unpatch"]


class _Callable(types.ModuleType):
    def __call__(
        self,
        model: nn.Module,
        *,
        only: Iterable[str] | None = None,
        skip: Iterable[str] | None = None,
        strict: bool = False,
    ) -> Report:
        return patch(model, only=only, skip=skip, strict=strict)

    __call__.__doc__ = patch.__doc__


sys.modules[__name__].__class__ = _Callable
