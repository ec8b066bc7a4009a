"""Sums over the rows of partial results that the programs of a backward leave, in a fixed order."""

from __future__ import annotations

import torch
from torch import Tensor

from ._launch import cdiv, launch, next_power_of_2
from ._triton import tl, triton

# A program reads all its rows at once, of few columns, so that even narrow gradients occupy many multiprocessors; of as
# many as make a tile where the rows are few.
_MIN_BLOCK_N, _MAX_BLOCK_P, _TILE = 16, 512, 2048


@triton.jit
def _sum_partials_kernel(
    partial_ptr,
    out_ptr,
    num_partials,
    num_cols,
    HAS_PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (c, p) sums BLOCK_N columns of all rows, or of the p-th BLOCK_P rows into row p of the result."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_P)
    first = tl.program_id(1) * BLOCK_P
    total = tl.zeros([BLOCK_P, BLOCK_N], dtype=tl.float32)
    for start in range(first, first + BLOCK_P if HAS_PARTS else num_partials, BLOCK_P):
        mask = (start + rows < num_partials)[:, None] & (cols < num_cols)[None, :]
        offsets = (start + rows).to(tl.int64)[:, None] * num_cols + cols[None, :]
        total += tl.load(partial_ptr + offsets, mask=mask, other=0.0)
    if HAS_PARTS:
        out_ptr += tl.program_id(1) * num_cols
    tl.store(out_ptr + cols, tl.sum(total, axis=0), mask=cols < num_cols)


def _launch_sum(partial: Tensor, out: Tensor, num_parts: int) -> None:
    num_partials, num_cols = partial.shape
    block_p = min(_MAX_BLOCK_P, next_power_of_2(num_partials))
    block_n = max(_MIN_BLOCK_N, min(_TILE // block_p, next_power_of_2(num_cols)))
    launch(
        _sum_partials_kernel,
        (cdiv(num_cols, block_n), num_parts),
        partial,
        out,
        num_partials,
        num_cols,
        HAS_PARTS=num_parts > 1,
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        num_warps=8,
    )


def sum_partials(partial: Tensor, out: Tensor) -> None:
    """Fill `out`, `[N]` of any dtype, with the sum over the rows of `partial`, contiguous fp32 `[P, N]`.

    One launch where torch needs two, a sum and a change of dtype; two launches for many rows, which one after the
    other would take longer than the kernel that made them.
    """
    num_parts = cdiv(partial.shape[0], _MAX_BLOCK_P)
    if num_parts > 2:
        sums = torch.empty((num_parts, partial.shape[1]), dtype=torch.float32, device=partial.device)
        _launch_sum(partial, sums, num_parts)
        partial = sums
    _launch_sum(partial, out, 1)
