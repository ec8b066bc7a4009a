"""Sparsemax: the point of the probability simplex that is nearest to the last axis.

    y_i = max(x_i - tau, 0),   tau such that sum_i y_i = 1
    tau = (sum of the x_i > tau, minus 1) / (their number)

Gradient, over the support S = {i: y_i > 0}:

    dx_i = dy_i - mean_S(dy) in S, 0 elsewhere

M rows (all leading axes), N columns. Saved for backward: y.
tau is found without sorting: from the maximum minus 1, which is never above it, the second formula climbs to it and
drops elements until none is dropped any more (Newton's method on a convex piecewise-linear function; few steps).
Source: Martins & Astudillo 2016, arXiv:1602.02068; Michelot 1986, J. Optim. Theory Appl. 50(1) (the iteration).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._check import require, require_floating
from ._launch import as_rows, cdiv, launch, next_power_of_2
from ._op import apply, define, once_differentiable, op, runs_reference
from ._triton import tl, triton
from .cross_entropy import wide_dtype

# ---- reference ----


def sparsemax_reference(x: Tensor) -> Tensor:
    z = x.to(wide_dtype(x.dtype))
    z = z - z.detach().amax(-1, keepdim=True)
    ordered = z.sort(-1, descending=True).values
    sums = ordered.cumsum(-1)
    number = torch.arange(1, z.shape[-1] + 1, device=z.device)
    # Of a row with NaN all comparisons are false.
    count = (1 + number * ordered > sums).sum(-1, keepdim=True).clamp(min=1)
    tau = (sums.gather(-1, count - 1) - 1) / count
    return F.relu(z - tau).to(x.dtype)


# ---- kernels ----

# Comparisons are such that NaN is in the support, from where it reaches tau and so the whole row. They compare
# x * number with the sum minus 1: what lies at tau itself, as in 16-bit rows, must not enter by a division's rounding.


@triton.jit
def _sparsemax_fwd_kernel(
    x_ptr,
    y_ptr,
    x_stride,
    num_rows,
    num_cols,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per BLOCK_M rows, each in one block."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = cols < num_cols
    # Beyond the last row it is read again, so that only columns need a stand-in.
    x_ptr += tl.minimum(rows, num_rows - 1)[:, None] * x_stride
    x = tl.load(x_ptr + cols, mask=mask, other=float("-inf")).to(tl.float32)
    z = x - tl.max(x, axis=1)[:, None]

    excess = tl.full([BLOCK_M], -1.0, tl.float32)
    count = tl.full([BLOCK_M], 1.0, tl.float32)
    last_count = tl.full([BLOCK_M], float("inf"), tl.float32)
    is_shrinking = True
    while is_shrinking:
        outside = z * count[:, None] <= excess[:, None]
        count = tl.sum(tl.where(outside, 0.0, 1.0), axis=1)
        excess = tl.sum(tl.where(outside, 0.0, z), axis=1) - 1.0
        is_shrinking = tl.max((count < last_count).to(tl.int32), axis=0) > 0
        last_count = count
    outside = z * count[:, None] <= excess[:, None]
    y = tl.where(outside, 0.0, z - (excess / count)[:, None])
    tl.store(y_ptr + rows[:, None] * num_cols + cols, y, mask=(rows < num_rows)[:, None] & mask)


@triton.jit
def _sparsemax_fwd_wide_kernel(x_ptr, y_ptr, x_stride, num_cols, BLOCK_N: tl.constexpr, STAGES: tl.constexpr):
    """One program per row, which is read for its maximum, for each step of tau, and to be written."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * num_cols
    cols = tl.arange(0, BLOCK_N)

    peaks = tl.full([BLOCK_N], float("-inf"), tl.float32)
    for start in tl.range(0, num_cols, BLOCK_N, num_stages=STAGES):
        c = start + cols
        x = tl.load(x_ptr + c, mask=c < num_cols, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
        peaks = tl.maximum(peaks, x)
    peak = tl.max(peaks, axis=0)

    excess = tl.full([], -1.0, tl.float32)
    count = tl.full([], 1.0, tl.float32)
    last_count = tl.full([], float("inf"), tl.float32)
    is_shrinking = True
    while is_shrinking:
        counts = tl.zeros([BLOCK_N], dtype=tl.float32)
        sums = tl.zeros([BLOCK_N], dtype=tl.float32)
        for start in tl.range(0, num_cols, BLOCK_N, num_stages=STAGES):
            c = start + cols
            mask = c < num_cols
            x = tl.load(x_ptr + c, mask=mask, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
            z = x - peak
            outside = z * count <= excess
            counts += tl.where(outside, 0.0, 1.0)
            sums += tl.where(outside, 0.0, z)
        count = tl.sum(counts, axis=0)
        excess = tl.sum(sums, axis=0) - 1.0
        is_shrinking = count < last_count
        last_count = count

    for start in tl.range(0, num_cols, BLOCK_N, num_stages=STAGES):
        c = start + cols
        mask = c < num_cols
        z = tl.load(x_ptr + c, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32) - peak
        tl.store(y_ptr + c, tl.where(z * count <= excess, 0.0, z - excess / count), mask=mask)


@triton.jit
def _sparsemax_bwd_kernel(
    y_ptr,
    dy_ptr,
    dx_ptr,
    dy_stride,
    num_rows,
    num_cols,
    ONE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per BLOCK_M rows; those wider than BLOCK_N are read twice, the second time from cache."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = (rows < num_rows)[:, None]
    y_ptr += rows[:, None] * num_cols
    dy_ptr += rows[:, None] * dy_stride
    dx_ptr += rows[:, None] * num_cols
    cols = tl.arange(0, BLOCK_N)[None, :]

    if ONE_BLOCK:
        mask = row_mask & (cols < num_cols)
        inside = tl.load(y_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32) > 0
        dy = tl.load(dy_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        count = tl.sum(tl.where(inside, 1.0, 0.0), axis=1)
        mean = tl.sum(tl.where(inside, dy, 0.0), axis=1) / tl.maximum(count, 1.0)
        tl.store(dx_ptr + cols, tl.where(inside, dy - mean[:, None], 0.0), mask=mask)
    else:
        counts = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for start in tl.range(0, num_cols, BLOCK_N, num_stages=STAGES):
            c = start + cols
            mask = row_mask & (c < num_cols)
            inside = tl.load(y_ptr + c, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32) > 0
            dy = tl.load(dy_ptr + c, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            counts += tl.where(inside, 1.0, 0.0)
            sums += tl.where(inside, dy, 0.0)
        mean = tl.sum(sums, axis=1) / tl.maximum(tl.sum(counts, axis=1), 1.0)
        for start in tl.range(0, num_cols, BLOCK_N, num_stages=STAGES):
            c = start + cols
            mask = row_mask & (c < num_cols)
            inside = tl.load(y_ptr + c, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32) > 0
            dy = tl.load(dy_ptr + c, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            tl.store(dx_ptr + c, tl.where(inside, dy - mean[:, None], 0.0), mask=mask)


# ---- operators ----

# Widest row that one program holds in registers, and what it takes at a time of a wider one.
_MAX_FWD_BLOCK = 16384
_MAX_BWD_BLOCK = 8192
_WIDE_BLOCK = 4096


def _blocks(num_cols: int, widest: int) -> tuple[int, int, int]:
    """BLOCK_M, BLOCK_N, num_warps: 16 elements a thread, 32 of the widest row; of wider rows 8."""
    block_n = next_power_of_2(num_cols)
    if block_n > widest:
        return 1, _WIDE_BLOCK, _WIDE_BLOCK // 256
    block_m = max(1, 2048 // block_n)
    return block_m, block_n, min(16, block_m * block_n // 512)


def _fake_fwd(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@define("sparsemax_fwd(Tensor x) -> Tensor", fake=_fake_fwd)
def _fwd(x: Tensor) -> Tensor:
    y = _fake_fwd(x)
    x = as_rows(x)
    num_rows, num_cols = x.shape
    block_m, block_n, num_warps = _blocks(num_cols, _MAX_FWD_BLOCK)
    if num_cols <= block_n:
        launch(
            _sparsemax_fwd_kernel,
            (cdiv(num_rows, block_m),),
            x,
            y,
            x.stride(0),
            num_rows,
            num_cols,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=num_warps,
        )
    else:
        launch(
            _sparsemax_fwd_wide_kernel,
            (num_rows,),
            x,
            y,
            x.stride(0),
            num_cols,
            BLOCK_N=block_n,
            STAGES=2,
            num_warps=num_warps,
        )
    return y


def _fake_bwd(y: Tensor, dy: Tensor) -> Tensor:
    return y.new_empty(y.shape)


@define("sparsemax_bwd(Tensor y, Tensor dy) -> Tensor", fake=_fake_bwd)
def _bwd(y: Tensor, dy: Tensor) -> Tensor:
    dx = _fake_bwd(y, dy)
    dy = as_rows(dy)
    num_rows, num_cols = dy.shape
    block_m, block_n, num_warps = _blocks(num_cols, _MAX_BWD_BLOCK)
    launch(
        _sparsemax_bwd_kernel,
        (cdiv(num_rows, block_m),),
        y,
        dy,
        dx,
        dy.stride(0),
        num_rows,
        num_cols,
        ONE_BLOCK=num_cols <= block_n,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STAGES=2,
        num_warps=num_warps,
    )
    return dx


# ---- autograd ----


class _Sparsemax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = _fwd(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor | None:
        return _bwd(*ctx.saved_tensors, dy) if ctx.needs_input_grad[0] else None


# ---- public ----


def _supports(x: Tensor) -> list[str]:
    return ["float64 is computed by the reference"] if x.dtype == torch.float64 else []


@op(reference=sparsemax_reference, supports=_supports)
def sparsemax(x: Tensor) -> Tensor:
    """Euclidean projection of the last axis of `x` onto the probability simplex: a softmax with exact zeros.

        y = relu(x - tau), with the tau for which y.sum(-1) is 1      # the reference sorts to find it

    Args:
        x: `[..., N]`, floating point, any strides.

    Returns:
        `[..., N]` in the dtype of `x`. -inf gives 0; a row of -inf alone, with +inf or with NaN is NaN.

    Raises:
        ValueError: `x` is no floating-point tensor with an axis and a column.

    Numerics: relative to the maximum, fp32 inside, rounded once; the backward takes the support from the rounded y.
    Memory:   saves y and nothing else; no sorted copy. Up to 16384 columns are read once; more are read for each of
        the few steps to tau, from cache.
    Differs from the reference: never in formula; an element within rounding of tau may be in the support of one and
        not of the other, with a probability of 0 to rounding.
    Source: Martins & Astudillo 2016, arXiv:1602.02068.
    """
    require_floating("sparsemax", x=x)
    require(x.dim() >= 1, "sparsemax", "x", "at least one axis", "a scalar")
    require(x.shape[-1] >= 1, "sparsemax", "x", "at least one column", tuple(x.shape))
    if runs_reference("sparsemax", x):
        return sparsemax_reference(x)
    return apply(_Sparsemax, x)
