"""Sums over the rows of partial results that the programs of a backward leave, in a fixed order."""

from __future__ import annotations

from torch import Tensor

from ._launch import cdiv, launch, next_power_of_2
from ._triton import tl, triton

# Few columns, so that even narrow gradients occupy many multiprocessors; their rows are read at once.
_BLOCK_N, _MAX_BLOCK_P = 16, 512


@triton.jit
def _sum_partials_kernel(
    partial_ptr, first_ptr, second_ptr, num_partials, num_cols, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Program (c, m) sums BLOCK_N columns of matrix m of `[2, P, N]` or `[1, P, N]` into the first or second vector."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_P)
    matrix = tl.program_id(1)
    partial_ptr += matrix.to(tl.int64) * num_partials * num_cols
    total = tl.zeros([BLOCK_P, BLOCK_N], dtype=tl.float32)
    for start in range(0, num_partials, BLOCK_P):
        mask = (start + rows < num_partials)[:, None] & (cols < num_cols)[None, :]
        total += tl.load(partial_ptr + (start + rows)[:, None] * num_cols + cols[None, :], mask=mask, other=0.0)
    column_sums = tl.sum(total, axis=0)
    if matrix == 0:
        tl.store(first_ptr + cols, column_sums, mask=cols < num_cols)
    else:
        tl.store(second_ptr + cols, column_sums, mask=cols < num_cols)


def sum_partials(partial: Tensor, first: Tensor, second: Tensor | None = None) -> None:
    """Fill `first` with the sum over the rows of `partial`, fp32 `[P, N]`; of `[2, P, N]` also `second`.

    One launch where torch needs two for each, a sum and a change of dtype.
    """
    num_partials, num_cols = partial.shape[-2:]
    grid = cdiv(num_cols, _BLOCK_N), 1 if second is None else 2
    block_p = min(_MAX_BLOCK_P, next_power_of_2(num_partials))
    launch(
        _sum_partials_kernel,
        grid,
        partial,
        first,
        first if second is None else second,
        num_partials,
        num_cols,
        BLOCK_P=block_p,
        BLOCK_N=_BLOCK_N,
        num_warps=8,
    )
