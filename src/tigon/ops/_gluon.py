"""`gluon`, `gl` and Hopper's instructions, or stand-ins that let kernel modules import where they are absent."""

from __future__ import annotations

from typing import Any

from ._triton import _Absent

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # Renamed in Triton 3.8.
    load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
    store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
except ImportError:
    gluon: Any = _Absent()
    gl = mbarrier = tma = gluon
    fence_async_shared = load_tile = store_tile = warpgroup_mma = warpgroup_mma_wait = TensorDescriptor = None
    HAS_GLUON = False
else:
    HAS_GLUON = True

__all__ = [
    "HAS_GLUON",
    "TensorDescriptor",
    "fence_async_shared",
    "gl",
    "gluon",
    "load_tile",
    "mbarrier",
    "store_tile",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
