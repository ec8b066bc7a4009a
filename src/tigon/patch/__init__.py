"""Make an existing model use the fused operators.

The package can be called: `tigon.patch(model)` is `tigon.patch.patch(model)`, whichever was imported first.
"""

from __future__ import annotations

import inspect
import sys
import types

from ._apply import patch, unpatch
from ._on_build import PatchOnBuild, patch_on_build
from .report import Report, Row

__all__ = ["PatchOnBuild", "Report", "Row", "patch", "patch_on_build", "unpatch"]


class _Callable(types.ModuleType):
    __call__ = staticmethod(patch)


sys.modules[__name__].__class__ = _Callable
# A callable instance would show its signature without the first argument.
__signature__ = inspect.signature(patch)
