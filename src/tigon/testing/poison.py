"""Allocations filled with NaN, so that an element a kernel did not write cannot pass for a zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_ALLOCATORS = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}


class poison(TorchDispatchMode):
    """Context manager: floats from `torch.empty*` are NaN, whole numbers the largest there is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _ALLOCATORS and isinstance(out, Tensor) and out.device.type != "meta":
            if out.is_floating_point():
                out.fill_(float("nan"))
            elif out.dtype != torch.bool:
                out.fill_(torch.iinfo(out.dtype).max)
        return out
