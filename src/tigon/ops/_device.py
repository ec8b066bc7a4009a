"""What the device can do: capability and multiprocessor count, cached, asked for at the first call only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ._triton import HAS_TRITON, INTERPRETED

# Turing; below it Triton has no code generator.
MIN_CAPABILITY = (7, 5)
# Round-to-nearest conversion to bf16 is a hardware instruction from here on.
MIN_BF16_CAPABILITY = (8, 0)

F = TypeVar("F", bound=Callable[..., Any])


def constant_while_compiling(function: F) -> F:
    """What `torch.compiler.assume_constant_result` does, without the second that importing the compiler takes."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_capability: dict[int, tuple[int, int]] = {}
_num_sms: dict[int, int] = {}


@constant_while_compiling
def capability(index: int) -> tuple[int, int]:
    """Compute capability of CUDA device `index`; on ROCm the major and minor of its gfx number."""
    if index not in _capability:
        _capability[index] = torch.cuda.get_device_capability(index)
    return _capability[index]


def num_sms(device: torch.device) -> int:
    """Multiprocessors of `device`: how many programs a persistent kernel needs to fill it."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        if index not in _num_sms:
            _num_sms[index] = torch.cuda.get_device_properties(index).multi_processor_count
        return _num_sms[index]
    if device.type == "xpu":
        return torch.xpu.get_device_properties(device).max_compute_units
    # The interpreter runs programs one after another; four still exercise every reduction over programs.
    return 4


def why_no_kernels(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Reasons why no Triton kernel can run on `device` with `dtype`; empty when it can."""
    if not HAS_TRITON:
        return ["Triton is not installed"]
    if device.type == "cpu":
        if not INTERPRETED:
            return ["a CPU runs kernels only with TRITON_INTERPRET=1"]
        return ["Triton's interpreter truncates bfloat16"] if dtype is torch.bfloat16 else []
    if device.type not in ("cuda", "xpu"):
        return [f"device type {device.type!r} has no Triton backend"]
    if device.type == "cuda" and torch.version.hip is None:
        found = capability(device.index or 0)
        if found < MIN_CAPABILITY:
            return [f"needs compute capability 7.5, this device has {found[0]}.{found[1]}"]
        if dtype is torch.bfloat16 and found < MIN_BF16_CAPABILITY:
            return [f"bfloat16 needs compute capability 8.0, this device has {found[0]}.{found[1]}"]
    return []
