"""Launching, and the choice of block sizes and warps as pure functions of shape, dtype and capability."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch `kernel` on the device of its first argument, a tensor or its descriptor; an empty grid does nothing."""
    if 0 in grid:
        return
    device = getattr(args[0], "base", args[0]).device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*args, **constants)
    else:
        kernel[grid](*args, **constants)


def as_rows(x: Tensor) -> Tensor:
    """`x` as `[M, N]` with unit column stride; a view where the strides allow it, else a copy."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def column_groups(x: Tensor, group_size: int | None) -> tuple[int, int]:
    """Number of groups in a row of `x`, and columns of each; None for one group."""
    num_cols = x.shape[-1]
    return (1, num_cols) if group_size is None else (num_cols // group_size, group_size)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


# What loads in flight may take of a program's shared memory: the 99 KiB of compute capability 8.6, 8.9 and 12.0, less
# what reductions need.
_MAX_STAGED_BYTES = 96 * 1024


def pipeline_stages(bytes_a_tile: int) -> int:
    """Depth of a ring of loads, which is the tiles in flight and the one computed on."""
    return 3 if 2 * bytes_a_tile <= _MAX_STAGED_BYTES else 2
