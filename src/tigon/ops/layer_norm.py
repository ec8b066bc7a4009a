"""Layer normalisation.

    mean = mean(x)
    rstd = 1 / sqrt(mean((x - mean)^2) + eps)
    y = (x - mean) * rstd * weight + bias

Gradient, with g = dy * weight and n = (x - mean) * rstd:

    dx = rstd * (g - mean(g) - n * mean(g * n))
    dweight = sum over rows of dy * n
    dbias = sum over rows of dy

M rows (all leading axes), N columns. Saved for backward: x, weight, mean, rstd (8 bytes a row).
Source: Ba et al. 2016, arXiv:1607.06450; Chan et al. 1979 (joining the statistics of blocks).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ._check import require, require_floating, require_same_device
from ._device import num_sms
from ._launch import cdiv, launch, next_power_of_2, pipeline_stages, rows_of
from ._op import accept, apply, call_key, define, is_accepted, once_differentiable, op, runs_reference
from ._partials import sum_partials
from ._triton import tl, triton

# ---- reference ----


def layer_norm_reference(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    dtype = _out_dtype(x, weight, bias)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    y = x.to(wide)
    y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(dtype)


def _out_dtype(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> torch.dtype:
    dtype = x.dtype
    for t in (weight, bias):
        if t is not None:
            dtype = torch.promote_types(dtype, t.dtype)
    return dtype


# ---- kernels ----


@triton.jit
def _affine(n, w_ptr, b_ptr, cols, num_cols, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    if HAS_WEIGHT:
        n *= tl.load(w_ptr + cols, mask=cols < num_cols, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        n += tl.load(b_ptr + cols, mask=cols < num_cols, other=0.0).to(tl.float32)[None, :]
    return n


@triton.jit
def _layer_norm_fwd_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    x_stride,
    num_rows,
    num_cols,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per BLOCK_M rows; a row wider than BLOCK_N is read twice, the second time from cache."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    x_rows = x_ptr + rows[:, None] * x_stride
    y_rows = y_ptr + rows[:, None] * num_cols
    cols = tl.arange(0, BLOCK_N)

    if ONE_BLOCK:
        mask = row_mask[:, None] & (cols < num_cols)[None, :]
        x = tl.load(x_rows + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(x, axis=1) / num_cols
        # Lanes beyond the row hold -mean after centring and must not count.
        centred = tl.where(mask, x - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, axis=1) / num_cols + eps)
        y = _affine(centred * rstd[:, None], w_ptr, b_ptr, cols, num_cols, HAS_WEIGHT, HAS_BIAS)
        tl.store(y_rows + cols[None, :], y, mask=mask)
    else:
        mean = tl.zeros([BLOCK_M], dtype=tl.float32)
        squares = tl.zeros([BLOCK_M], dtype=tl.float32)
        for start in range(0, num_cols, BLOCK_N):
            c = start + cols
            mask = row_mask[:, None] & (c < num_cols)[None, :]
            x = tl.load(x_rows + c[None, :], mask=mask, other=0.0).to(tl.float32)
            count = tl.minimum(num_cols - start, BLOCK_N)
            block_mean = tl.sum(x, axis=1) / count
            centred = tl.where(mask, x - block_mean[:, None], 0.0)
            # Joins two sets of samples without the cancellation of mean(x^2) - mean(x)^2.
            delta = block_mean - mean
            share = count / (start + count)
            mean += delta * share
            squares += tl.sum(centred * centred, axis=1) + delta * delta * (start * share)
        rstd = tl.rsqrt(squares / num_cols + eps)
        for start in range(0, num_cols, BLOCK_N):
            c = start + cols
            mask = row_mask[:, None] & (c < num_cols)[None, :]
            x = tl.load(x_rows + c[None, :], mask=mask, other=0.0).to(tl.float32)
            n = (x - mean[:, None]) * rstd[:, None]
            y = _affine(n, w_ptr, b_ptr, c, num_cols, HAS_WEIGHT, HAS_BIAS)
            tl.store(y_rows + c[None, :], y, mask=mask)
    tl.store(mean_ptr + rows, mean, mask=row_mask)
    tl.store(rstd_ptr + rows, rstd, mask=row_mask)


@triton.jit
def _store_partials(partial_ptr, dw, db, cols, num_cols, NEEDS_DW: tl.constexpr, NEEDS_DB: tl.constexpr):
    """Row `program_id(0)` of one matrix of partial sums for each gradient that is needed, dweight first."""
    out = partial_ptr + tl.program_id(0).to(tl.int64) * num_cols + cols
    if NEEDS_DW:
        tl.store(out, tl.sum(dw, axis=0), mask=cols < num_cols)
        out += tl.num_programs(0).to(tl.int64) * num_cols
    if NEEDS_DB:
        tl.store(out, tl.sum(db, axis=0), mask=cols < num_cols)


@triton.jit
def _layer_norm_bwd_kernel(
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    dy_ptr,
    dx_ptr,
    partial_ptr,
    x_stride,
    dy_stride,
    num_rows,
    num_cols,
    HAS_WEIGHT: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DW: tl.constexpr,
    NEEDS_DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Persistent: program p takes row tiles p, p + P, ... and leaves fp32 partial rows of dweight and dbias."""
    cols = tl.arange(0, BLOCK_N)
    col_mask = cols < num_cols
    if HAS_WEIGHT:
        w = tl.load(w_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    db = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        row_mask = rows < num_rows
        mask = row_mask[:, None] & col_mask[None, :]
        # Both are dead after this read, so they should not push weights and partials out of the cache.
        x = tl.load(
            x_ptr + rows[:, None] * x_stride + cols[None, :],
            mask=mask,
            other=0.0,
            eviction_policy="evict_first",
        ).to(tl.float32)
        dy = tl.load(
            dy_ptr + rows[:, None] * dy_stride + cols[None, :],
            mask=mask,
            other=0.0,
            eviction_policy="evict_first",
        ).to(tl.float32)
        mean = tl.load(mean_ptr + rows, mask=row_mask, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)
        n = tl.where(mask, (x - mean[:, None]) * rstd[:, None], 0.0)
        if NEEDS_DW:
            dw += dy * n
        if NEEDS_DB:
            db += dy
        if NEEDS_DX:
            g = dy
            if HAS_WEIGHT:
                g = dy * w[None, :]
            mean_g = tl.sum(g, axis=1) / num_cols
            mean_gn = tl.sum(g * n, axis=1) / num_cols
            dx = rstd[:, None] * (g - mean_g[:, None] - n * mean_gn[:, None])
            tl.store(dx_ptr + rows[:, None] * num_cols + cols[None, :], dx, mask=mask)
    _store_partials(partial_ptr, dw, db, cols, num_cols, NEEDS_DW, NEEDS_DB)


@triton.jit
def _layer_norm_bwd_wide_dx_kernel(
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    dy_ptr,
    dx_ptr,
    x_stride,
    dy_stride,
    num_cols,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per row, for rows too wide for registers: two passes over the columns."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    dy_ptr += row * dy_stride
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    sum_g = tl.zeros([BLOCK_N], dtype=tl.float32)
    sum_gn = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, num_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < num_cols
        g = tl.load(dy_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g *= tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        n = (tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
        sum_g += g
        sum_gn += tl.where(mask, g * n, 0.0)
    mean_g = tl.sum(sum_g, axis=0) / num_cols
    mean_gn = tl.sum(sum_gn, axis=0) / num_cols
    for start in range(0, num_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < num_cols
        g = tl.load(dy_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g *= tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        n = (tl.load(x_ptr + cols, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
        tl.store(dx_ptr + row * num_cols + cols, rstd * (g - mean_g - n * mean_gn), mask=mask)


@triton.jit
def _layer_norm_bwd_wide_dw_kernel(
    x_ptr,
    mean_ptr,
    rstd_ptr,
    dy_ptr,
    partial_ptr,
    x_stride,
    dy_stride,
    num_rows,
    num_cols,
    NEEDS_DW: tl.constexpr,
    NEEDS_DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (p, c) sums column block c over row tiles p, p + P, ... into partial row p."""
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < num_cols
    dw = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    db = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), tl.num_programs(0)):
        rows = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        row_mask = rows < num_rows
        mask = row_mask[:, None] & col_mask[None, :]
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if NEEDS_DW:
            x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            mean = tl.load(mean_ptr + rows, mask=row_mask, other=0.0)
            rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)
            dw += tl.where(mask, dy * ((x - mean[:, None]) * rstd[:, None]), 0.0)
        if NEEDS_DB:
            db += dy
    _store_partials(partial_ptr, dw, db, cols, num_cols, NEEDS_DW, NEEDS_DB)


# ---- operators ----

# Widest row that one program holds in registers, forward and backward, and the block in which wider ones are read.
_MAX_FWD_BLOCK = 16384
_MAX_BWD_BLOCK = 8192
_WIDE_FWD_BLOCK = 8192
# Rows of a tile, which bounds tiles of very narrow rows.
_MAX_ROWS = 256


@functools.cache
def _fwd_blocks(num_cols: int) -> tuple[int, int, int]:
    """BLOCK_M, BLOCK_N, num_warps: 16 elements a thread of four warps or more, and 32 of wide rows (MEASURED.md)."""
    block_n = next_power_of_2(num_cols)
    if block_n > _MAX_FWD_BLOCK:
        block_n = _WIDE_FWD_BLOCK
    return min(max(1, 2048 // block_n), _MAX_ROWS), block_n, max(4, min(8, block_n // 512), block_n // 1024)


@functools.cache
def _bwd_blocks(num_cols: int) -> tuple[int, int, int, int]:
    """BLOCK_M, BLOCK_N, num_warps, programs per multiprocessor of the persistent backward.

    A thread holds 32 elements, and 16 of wider rows: each needs two accumulators, two inputs and a weight.
    """
    block_n = next_power_of_2(num_cols)
    if block_n > 4096:
        return 1, block_n, block_n // 512, 1
    return min(8192 // block_n, _MAX_ROWS), block_n, 8, 1


def _fake_fwd(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=_out_dtype(x, weight, bias))
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    return y, mean, rstd


@define(
    "layer_norm_fwd(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    fake=_fake_fwd,
)
def _fwd(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty_like(x, dtype=_out_dtype(x, weight, bias), memory_format=torch.contiguous_format)
    mean = x.new_empty(x.shape[:-1], dtype=torch.float32)
    rstd = torch.empty_like(mean)
    num_cols = x.shape[-1]
    x_rows, num_rows, x_stride = rows_of(x)
    block_m, block_n, num_warps = _fwd_blocks(num_cols)
    launch(
        _layer_norm_fwd_kernel,
        (cdiv(num_rows, block_m),),
        x_rows,
        weight,
        bias,
        y,
        mean,
        rstd,
        x_stride,
        num_rows,
        num_cols,
        eps,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        ONE_BLOCK=num_cols <= block_n,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=num_warps,
    )
    return y, mean, rstd


def _fake_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    needs_dx: bool,
    needs_dw: bool,
    needs_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx = x.new_empty(x.shape if needs_dx else (0,))
    dw = x.new_empty(0) if weight is None or not needs_dw else weight.new_empty(weight.shape)
    db = x.new_empty(0) if bias is None or not needs_db else bias.new_empty(bias.shape)
    return dx, dw, db


@define(
    "layer_norm_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd,"
    " bool needs_dx, bool needs_dw, bool needs_db) -> (Tensor, Tensor, Tensor)",
    fake=_fake_bwd,
)
def _bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    needs_dx: bool,
    needs_dw: bool,
    needs_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dw, db = _fake_bwd(dy, x, weight, bias, mean, rstd, needs_dx, needs_dw, needs_db)
    num_cols = x.shape[-1]
    (x_rows, num_rows, x_stride), (dy_rows, _, dy_stride) = rows_of(x), rows_of(dy)
    wide = next_power_of_2(num_cols) > _MAX_BWD_BLOCK
    block_m, block_n, num_warps, per_sm = (4, 512, 4, 1) if wide else _bwd_blocks(num_cols)
    num_programs = min(cdiv(num_rows, block_m), num_sms(x.device) * per_sm)
    partial = x.new_empty((needs_dw + needs_db, num_programs, num_cols), dtype=torch.float32)
    if not wide:
        launch(
            _layer_norm_bwd_kernel,
            (num_programs,),
            x_rows,
            weight,
            mean,
            rstd,
            dy_rows,
            dx,
            partial,
            x_stride,
            dy_stride,
            num_rows,
            num_cols,
            HAS_WEIGHT=weight is not None,
            NEEDS_DX=needs_dx,
            NEEDS_DW=needs_dw,
            NEEDS_DB=needs_db,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            STAGES=pipeline_stages(block_m * block_n * (x.element_size() + dy.element_size())),
            num_warps=num_warps,
        )
    else:
        if needs_dx:
            launch(
                _layer_norm_bwd_wide_dx_kernel,
                (num_rows,),
                x_rows,
                weight,
                mean,
                rstd,
                dy_rows,
                dx,
                x_stride,
                dy_stride,
                num_cols,
                HAS_WEIGHT=weight is not None,
                BLOCK_N=4096,
                num_warps=8,
            )
        if needs_dw or needs_db:
            launch(
                _layer_norm_bwd_wide_dw_kernel,
                (num_programs, cdiv(num_cols, block_n)),
                x_rows,
                mean,
                rstd,
                dy_rows,
                partial,
                x_stride,
                dy_stride,
                num_rows,
                num_cols,
                NEEDS_DW=needs_dw,
                NEEDS_DB=needs_db,
                BLOCK_M=block_m,
                BLOCK_N=block_n,
                num_warps=num_warps,
            )
    if needs_dw or needs_db:
        if needs_dw:
            sum_partials(partial[0], dw)
        if needs_db:
            sum_partials(partial[-1], db)
    return dx, dw, db


# ---- autograd ----


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y, mean, rstd = _fwd(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[:3]
        gradients = _bwd(dy, *ctx.saved_tensors, *needs)
        return (*(d if needed else None for d, needed in zip(gradients, needs, strict=True)), None)


# ---- public ----


def _supports(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, **_: Any) -> list[str]:
    reasons = []
    if any(t is not None and t.dtype == torch.float64 for t in (x, weight, bias)):
        reasons.append("float64 is computed by the reference")
    return reasons


@op(reference=layer_norm_reference, supports=_supports)
def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """Layer normalisation over the last axis.

        y = (x - mean) * rsqrt(var + eps) * weight + bias       # the reference, in one line

    Args:
        x: `[..., N]`, floating point, any strides.
        weight: `[N]`, or None for a norm without a scale.
        bias: `[N]`, or None for a norm without a shift.
        eps: added to the variance, which is divided by N.

    Returns:
        `[..., N]` in the promoted dtype of the three, which for one dtype is that of F.layer_norm.

    Raises:
        ValueError: shapes or devices disagree.

    Numerics: computed in fp32 and rounded once; `dweight` and `dbias` are summed in fp32 in a fixed order.
    Memory:   saves `x`, `weight` and 8 bytes a row.
    Differs from the reference: never in formula; order of summation over N.
    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    name = "layer_norm"
    key = call_key(name, (x, weight, bias))
    if not is_accepted(key):
        require_floating(name, x=x, weight=weight, bias=bias)
        require(x.dim() >= 1, name, "x", "at least one axis", "a scalar")
        for argument, t in (("weight", weight), ("bias", bias)):
            if t is not None:
                require(t.shape == x.shape[-1:], name, argument, f"shape {tuple(x.shape[-1:])}", tuple(t.shape))
        require_same_device(name, x=x, weight=weight, bias=bias)
        if runs_reference(name, x, weight, bias):
            return layer_norm_reference(x, weight, bias, eps=eps)
        accept(key, x)
    # The kernels read one row of each, which is nothing beside x.
    weight = None if weight is None else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    return apply(_LayerNorm, x, weight, bias, eps)
