"""Softmax over the last axis, and its logarithm.

    softmax:      y = exp(x - max) / s,       s = sum(exp(x - max))
    log_softmax:  y = (x - max) - log(s)

Gradient:

    softmax:      dx = y * (dy - sum(dy * y))
    log_softmax:  dx = dy - exp(y) * sum(dy)

M rows (all leading axes), N columns. Saved for backward: y, as in torch.
Source: Milakov & Gimelshein 2018, arXiv:1805.02867 (online softmax, for rows wider than a program's registers).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._check import require, require_floating
from ._launch import as_rows, cdiv, launch, next_power_of_2, pipeline_stages
from ._op import apply, define, once_differentiable, op, runs_reference
from ._triton import tl, triton

# ---- reference ----


def softmax_reference(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    # In fp32 inside, also for 16-bit tensors, whose results it rounds once.
    return torch.softmax(x, -1, dtype=torch.promote_types(x.dtype, dtype or x.dtype))


def log_softmax_reference(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return torch.log_softmax(x, -1, dtype=torch.promote_types(x.dtype, dtype or x.dtype))


# ---- kernels ----


@triton.jit
def _softmax_fwd_kernel(
    x_ptr,
    y_ptr,
    x_stride,
    num_rows,
    num_cols,
    LOG: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per BLOCK_M rows; those wider than BLOCK_N are read twice, the second time from cache."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = (rows < num_rows)[:, None]
    # Beyond the last row it is read again, so that only columns need a stand-in.
    x_ptr += tl.minimum(rows, num_rows - 1)[:, None] * x_stride
    y_ptr += rows[:, None] * num_cols
    cols = tl.arange(0, BLOCK_N)[None, :]

    if ONE_BLOCK:
        mask = cols < num_cols
        x = tl.load(x_ptr + cols, mask=mask, other=float("-inf")).to(tl.float32)
        # A row of -inf alone is NaN, as in torch.
        z = x - tl.max(x, axis=1)[:, None]
        e = tl.exp(z)
        total = tl.sum(tl.where(mask, e, 0.0), axis=1)[:, None]
        if LOG:
            y = z - tl.log(total)
        else:
            y = e / total
        tl.store(y_ptr + cols, y, mask=row_mask & mask)
    else:
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        shifted_sum = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for start in tl.range(0, num_cols, BLOCK_N, num_stages=STAGES):
            c = start + cols
            mask = c < num_cols
            x = tl.load(x_ptr + c, mask=mask, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
            new_peak = tl.maximum(peak, tl.max(x, axis=1))
            # Up to the first finite element the peak is -inf, and -inf - -inf is NaN.
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            shifted_sum = shifted_sum * tl.exp(peak - shift)[:, None] + tl.exp(x - shift[:, None])
            peak = new_peak
        total = tl.sum(shifted_sum, axis=1)[:, None]
        if LOG:
            total = tl.log(total)
        for start in tl.range(0, num_cols, BLOCK_N, num_stages=STAGES):
            c = start + cols
            mask = c < num_cols
            x = tl.load(x_ptr + c, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            z = x - peak[:, None]
            if LOG:
                y = z - total
            else:
                y = tl.exp(z) / total
            tl.store(y_ptr + c, y, mask=row_mask & mask)


@triton.jit
def _softmax_bwd_kernel(
    y_ptr,
    dy_ptr,
    dx_ptr,
    dy_stride,
    num_rows,
    num_cols,
    LOG: tl.constexpr,
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
        y = tl.load(y_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        dy = tl.load(dy_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if LOG:
            dx = dy - tl.exp(y) * tl.sum(dy, axis=1)[:, None]
        else:
            dx = y * (dy - tl.sum(dy * y, axis=1)[:, None])
        tl.store(dx_ptr + cols, dx, mask=mask)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for start in tl.range(0, num_cols, BLOCK_N, num_stages=STAGES):
            c = start + cols
            mask = row_mask & (c < num_cols)
            dy = tl.load(dy_ptr + c, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            if not LOG:
                dy *= tl.load(y_ptr + c, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            total += dy
        dot = tl.sum(total, axis=1)[:, None]
        for start in tl.range(0, num_cols, BLOCK_N, num_stages=STAGES):
            c = start + cols
            mask = row_mask & (c < num_cols)
            y = tl.load(y_ptr + c, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            dy = tl.load(dy_ptr + c, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            if LOG:
                dx = dy - tl.exp(y) * dot
            else:
                dx = y * (dy - dot)
            tl.store(dx_ptr + c, dx, mask=mask)


# ---- operators ----

# Widest row that one program holds in registers, two tensors of it in backward, and what it takes at a time of a wider.
_MAX_FWD_BLOCK, _MAX_BWD_BLOCK = 32768, 16384
_WIDE_BLOCK = 8192


def _blocks(num_cols: int, widest: int, bytes_a_column: int) -> dict[str, Any]:
    """Tile and warps, measured on an H200 (MEASURED.md): 16 elements a thread, 32 of the widest rows."""
    block_n = next_power_of_2(num_cols)
    one_block = block_n <= widest
    if not one_block:
        block_n = _WIDE_BLOCK
    block_m = max(1, 2048 // block_n)
    stages = 1 if one_block else pipeline_stages(bytes_a_column * block_n)
    num_warps = 32 if one_block and block_n == _MAX_FWD_BLOCK else min(16, block_m * block_n // 512)
    return {"ONE_BLOCK": one_block, "BLOCK_M": block_m, "BLOCK_N": block_n, "STAGES": stages, "num_warps": num_warps}


def _fake_fwd(x: Tensor, dtype: torch.dtype, log: bool) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@define("softmax_fwd(Tensor x, ScalarType dtype, bool log) -> Tensor", fake=_fake_fwd)
def _fwd(x: Tensor, dtype: torch.dtype, log: bool) -> Tensor:
    y = _fake_fwd(x, dtype, log)
    rows = as_rows(x)
    num_rows, num_cols = rows.shape
    blocks = _blocks(num_cols, _MAX_FWD_BLOCK, x.itemsize)
    grid = (cdiv(num_rows, blocks["BLOCK_M"]),)
    launch(_softmax_fwd_kernel, grid, rows, y, rows.stride(0), num_rows, num_cols, LOG=log, **blocks)
    return y


def _fake_bwd(y: Tensor, dy: Tensor, dtype: torch.dtype, log: bool) -> Tensor:
    return y.new_empty(y.shape, dtype=dtype)


@define("softmax_bwd(Tensor y, Tensor dy, ScalarType dtype, bool log) -> Tensor", fake=_fake_bwd)
def _bwd(y: Tensor, dy: Tensor, dtype: torch.dtype, log: bool) -> Tensor:
    dx = _fake_bwd(y, dy, dtype, log)
    rows = as_rows(dy)
    num_rows, num_cols = rows.shape
    blocks = _blocks(num_cols, _MAX_BWD_BLOCK, y.itemsize + dy.itemsize)
    grid = (cdiv(num_rows, blocks["BLOCK_M"]),)
    launch(_softmax_bwd_kernel, grid, y, rows, dx, rows.stride(0), num_rows, num_cols, LOG=log, **blocks)
    return dx


# ---- autograd ----


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, log: bool) -> Tensor:
        y = _fwd(x, dtype, log)
        ctx.save_for_backward(y)
        ctx.options = x.dtype, log
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        (y,) = ctx.saved_tensors
        return _bwd(y, dy, *ctx.options), None, None


# ---- public ----


def _supports(x: Tensor, *, dtype: torch.dtype | None = None) -> list[str]:
    if torch.float64 in (x.dtype, dtype):
        return ["float64 is computed by the reference"]
    return [] if x.shape[-1] else ["rows without columns are left to the reference"]


def _checked_dtype(name: str, x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    require_floating(name, x=x)
    require(x.dim() >= 1, name, "x", "at least one axis", "a scalar")
    if dtype is None:
        return x.dtype
    require(
        dtype.is_floating_point and torch.promote_types(x.dtype, dtype) == dtype,
        name,
        "dtype",
        f"None or one that holds all values of {x.dtype}",
        dtype,
    )
    return dtype


@op(reference=softmax_reference, supports=_supports)
def softmax(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax of `x` over its last axis.

        y = torch.softmax(x, -1)      # the reference, in one line

    Args:
        x: `[..., N]`, floating point, any strides.
        dtype: of the result, at least as wide as that of `x`, which it is by default.

    Returns:
        `[..., N]` in `dtype`. Infinite elements count as in torch: -inf gives 0, a row of -inf alone or with +inf NaN.

    Raises:
        ValueError: `x` is no floating-point tensor with an axis, or `dtype` is narrower.

    Numerics: fp32 inside, rounded once, in the backward too.
    Memory:   saves y and nothing else. Up to 16384 columns are read once, more twice; backward up to 8192.
    Differs from the reference: never in formula; order of summation over N.
    Source: Milakov & Gimelshein 2018, arXiv:1805.02867 (online softmax).
    """
    dtype = _checked_dtype("softmax", x, dtype)
    if runs_reference("softmax", x, dtype=dtype):
        return softmax_reference(x, dtype=dtype)
    return apply(_Softmax, x, dtype, False)


@op(reference=log_softmax_reference, supports=_supports)
def log_softmax(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Logarithm of the softmax of `x` over its last axis.

        y = torch.log_softmax(x, -1)      # the reference, in one line

    Args:
        x: `[..., N]`, floating point, any strides.
        dtype: of the result, at least as wide as that of `x`, which it is by default. fp32 keeps the small
            probabilities of 16-bit logits, which a bfloat16 logarithm of -10 knows to 3 % only.

    Returns:
        `[..., N]` in `dtype`. Infinite elements count as in torch: -inf stays, a row of -inf alone or with +inf is NaN.

    Raises:
        ValueError: `x` is no floating-point tensor with an axis, or `dtype` is narrower.

    Numerics: fp32 inside, rounded once; the backward starts from the rounded y, as torch's does.
    Memory:   saves y and nothing else. Up to 16384 columns are read once, more twice; backward up to 8192.
    Differs from the reference: never in formula; order of summation over N.
    Source: Milakov & Gimelshein 2018, arXiv:1805.02867 (online softmax).
    """
    dtype = _checked_dtype("log_softmax", x, dtype)
    if runs_reference("log_softmax", x, dtype=dtype):
        return log_softmax_reference(x, dtype=dtype)
    return apply(_Softmax, x, dtype, True)
