"""Layers for Hugging Face's `kernels`: a configuration for a model, a registration for all, and an export."""

from __future__ import annotations

import importlib
from typing import Any

from ._export import export, repository

__all__ = ["KernelConfig", "export", "register_kernels", "repository", "unregister_kernels"]

_LATE = {"KernelConfig": "._config", "register_kernels": "._register", "unregister_kernels": "._register"}


def __getattr__(name: str) -> Any:
    # The configuration is of a class of transformers, which takes seconds to import.
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
