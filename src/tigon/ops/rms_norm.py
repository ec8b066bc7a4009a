"""RMS normalisation, optionally of a sum with the residual stream.

    s = x + residual                              (s = x without a residual)
    rstd = 1 / sqrt(mean(s^2) + eps)
    y = s * rstd * (offset + weight)

Gradient, with g = dy * (offset + weight) and n = s * rstd:

    ds = rstd * (g - n * mean(g * n)) + (gradient of the returned s)
    dweight = sum over rows of dy * n

M rows (all leading axes), N columns, the means over all N or over each group of `group_size` of them.
Saved for backward: s, weight, rstd (4 bytes a row and group).
Source: Zhang & Sennrich 2019, arXiv:1910.07467.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ._check import require, require_floating, require_one_of, require_same_device
from ._device import num_sms
from ._launch import cdiv, column_groups, launch, next_power_of_2, pipeline_stages, rows_of
from ._op import accept, apply, call_key, define, is_accepted, once_differentiable, op, runs_reference
from ._partials import sum_partials
from ._triton import tl, triton

Cast = Literal["cast_then_scale", "scale_then_cast", "cast_rstd", "cast_to_weight", "none"]
CASTS = ("cast_then_scale", "scale_then_cast", "cast_rstd", "cast_to_weight", "none")


class NormResidual(NamedTuple):
    """A normalised tensor and the sum it was computed from."""

    y: Tensor
    residual: Tensor


# ---- reference ----


def rms_norm_reference(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast: Cast = "cast_then_scale",
    residual: Tensor | None = None,
    group_size: int | None = None,
) -> Tensor | NormResidual:
    s = x if residual is None else x + residual
    wide = torch.float64 if s.dtype == torch.float64 else torch.float32
    groups = s.to(wide).reshape(*s.shape[:-1], *column_groups(s, group_size))
    rstd = torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
    if cast == "cast_rstd":
        rstd = rstd.to(s.dtype).to(wide)
    n = (groups * rstd).reshape(s.shape)
    if cast in ("cast_then_scale", "cast_rstd"):
        n = n.to(s.dtype)
    if cast == "cast_to_weight":
        n = n.to(weight.dtype)
    y = n if weight is None else n.to(wide) * (offset + weight.to(wide))
    y = y.to(_out_dtype(s, weight, cast))
    return y if residual is None else NormResidual(y, s)


def _out_dtype(s: Tensor, weight: Tensor | None, cast: str) -> torch.dtype:
    if weight is None or cast == "scale_then_cast":
        return s.dtype
    return weight.dtype if cast == "cast_to_weight" else torch.promote_types(s.dtype, weight.dtype)


# ---- kernels ----


@triton.jit
def _load_sum(x_ptr, residual_ptr, offsets, residual_offsets, mask, HAS_RESIDUAL: tl.constexpr, s_dtype):
    s = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        s += tl.load(residual_ptr + residual_offsets, mask=mask, other=0.0).to(tl.float32)
        # The statistics are those of the rounded sum, which is what the next layer sees.
        s = s.to(s_dtype).to(tl.float32)
    return s


@triton.jit
def _rounded(n, s_dtype, w_ptr, CAST: tl.constexpr):
    if CAST == "cast_to_weight":
        n = n.to(w_ptr.dtype.element_ty)
    elif CAST == "cast_then_scale" or CAST == "cast_rstd":
        n = n.to(s_dtype)
    return n.to(tl.float32)


@triton.jit
def _normalised(s, rstd, w_ptr, cols, col_mask, shift, offset, s_dtype, CAST: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    if CAST == "cast_rstd":
        rstd = rstd.to(s_dtype).to(tl.float32)
    n = _rounded(s * rstd[:, None], s_dtype, w_ptr, CAST)
    if HAS_WEIGHT:
        w = tl.load(w_ptr + shift + cols, mask=col_mask, other=0.0).to(tl.float32)
        n *= (w + offset)[None, :]
    return n


@triton.jit
def _rms_norm_fwd_kernel(
    x_ptr,
    residual_ptr,
    w_ptr,
    y_ptr,
    s_ptr,
    rstd_ptr,
    x_stride,
    residual_stride,
    num_rows,
    num_cols,
    num_groups,
    eps,
    offset,
    CAST: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per BLOCK_M rows of a group; one wider than BLOCK_N is read twice, the second time from cache."""
    group = tl.program_id(0) % num_groups
    shift = group * num_cols
    rows = (tl.program_id(0) // num_groups).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    if HAS_RESIDUAL:
        s_dtype = s_ptr.dtype.element_ty
    else:
        s_dtype = x_ptr.dtype.element_ty
    x_rows = rows[:, None] * x_stride + shift
    residual_rows = rows[:, None] * residual_stride + shift
    out_rows = rows[:, None] * (num_groups * num_cols) + shift
    cols = tl.arange(0, BLOCK_N)

    if ONE_BLOCK:
        mask = row_mask[:, None] & (cols < num_cols)[None, :]
        s = _load_sum(
            x_ptr,
            residual_ptr,
            x_rows + cols[None, :],
            residual_rows + cols[None, :],
            mask,
            HAS_RESIDUAL,
            s_dtype,
        )
        rstd = tl.rsqrt(tl.sum(s * s, axis=1) / num_cols + eps)
        tl.store(rstd_ptr + rows * num_groups + group, rstd, mask=row_mask)
        if HAS_RESIDUAL:
            tl.store(s_ptr + out_rows + cols[None, :], s, mask=mask)
        y = _normalised(s, rstd, w_ptr, cols, cols < num_cols, shift, offset, s_dtype, CAST, HAS_WEIGHT)
        tl.store(y_ptr + out_rows + cols[None, :], y, mask=mask)
    else:
        squares = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for start in range(0, num_cols, BLOCK_N):
            c = start + cols
            mask = row_mask[:, None] & (c < num_cols)[None, :]
            s = _load_sum(
                x_ptr,
                residual_ptr,
                x_rows + c[None, :],
                residual_rows + c[None, :],
                mask,
                HAS_RESIDUAL,
                s_dtype,
            )
            squares += s * s
            if HAS_RESIDUAL:
                tl.store(s_ptr + out_rows + c[None, :], s, mask=mask)
        rstd = tl.rsqrt(tl.sum(squares, axis=1) / num_cols + eps)
        tl.store(rstd_ptr + rows * num_groups + group, rstd, mask=row_mask)
        for start in range(0, num_cols, BLOCK_N):
            c = start + cols
            mask = row_mask[:, None] & (c < num_cols)[None, :]
            s = _load_sum(
                x_ptr,
                residual_ptr,
                x_rows + c[None, :],
                residual_rows + c[None, :],
                mask,
                HAS_RESIDUAL,
                s_dtype,
            )
            y = _normalised(s, rstd, w_ptr, c, c < num_cols, shift, offset, s_dtype, CAST, HAS_WEIGHT)
            tl.store(y_ptr + out_rows + c[None, :], y, mask=mask)


@triton.jit
def _rms_norm_bwd_kernel(
    s_ptr,
    w_ptr,
    rstd_ptr,
    dy_ptr,
    ds_out_ptr,
    ds_ptr,
    partial_ptr,
    s_stride,
    dy_stride,
    ds_out_stride,
    num_rows,
    num_cols,
    num_groups,
    offset,
    CAST: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_DS_OUT: tl.constexpr,
    NEEDS_DS: tl.constexpr,
    NEEDS_DW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Persistent: program p of a group takes row tiles p, p + P, ... and leaves its part of an fp32 row of dweight."""
    group = tl.program_id(0) % num_groups
    program = tl.program_id(0) // num_groups
    shift = group * num_cols
    cols = tl.arange(0, BLOCK_N)
    col_mask = cols < num_cols
    if HAS_WEIGHT:
        w = tl.load(w_ptr + shift + cols, mask=col_mask, other=0.0).to(tl.float32) + offset
    if NEEDS_DW:
        dw = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    num_tiles = tl.cdiv(num_rows, BLOCK_M)
    for tile in tl.range(program, num_tiles, tl.num_programs(0) // num_groups, num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        row_mask = rows < num_rows
        mask = row_mask[:, None] & col_mask[None, :]
        # Both are dead after this read, so they should not push weights and partials out of the cache.
        s = tl.load(
            s_ptr + rows[:, None] * s_stride + (shift + cols)[None, :],
            mask=mask,
            other=0.0,
            eviction_policy="evict_first",
        ).to(tl.float32)
        dy = tl.load(
            dy_ptr + rows[:, None] * dy_stride + (shift + cols)[None, :],
            mask=mask,
            other=0.0,
            eviction_policy="evict_first",
        ).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows * num_groups + group, mask=row_mask, other=0.0)
        n = s * rstd[:, None]
        if NEEDS_DW:
            dw += dy * _rounded(n, s_ptr.dtype.element_ty, w_ptr, CAST)
        if NEEDS_DS:
            g = dy
            if HAS_WEIGHT:
                g = dy * w[None, :]
            ds = rstd[:, None] * (g - n * (tl.sum(g * n, axis=1) / num_cols)[:, None])
            if HAS_DS_OUT:
                ds_out = ds_out_ptr + rows[:, None] * ds_out_stride + (shift + cols)[None, :]
                ds += tl.load(ds_out, mask=mask, other=0.0).to(tl.float32)
            out = ds_ptr + rows[:, None] * (num_groups * num_cols) + (shift + cols)[None, :]
            tl.store(out, ds, mask=mask)
    if NEEDS_DW:
        out = partial_ptr + program * (num_groups * num_cols) + shift + cols
        tl.store(out, tl.sum(dw, axis=0), mask=col_mask)


@triton.jit
def _rms_norm_bwd_wide_ds_kernel(
    s_ptr,
    w_ptr,
    rstd_ptr,
    dy_ptr,
    ds_out_ptr,
    ds_ptr,
    s_stride,
    dy_stride,
    ds_out_stride,
    num_cols,
    num_groups,
    offset,
    HAS_WEIGHT: tl.constexpr,
    HAS_DS_OUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per row of a group, for those too wide for registers: two passes over the columns."""
    rstd = tl.load(rstd_ptr + tl.program_id(0))
    row = (tl.program_id(0) // num_groups).to(tl.int64)
    shift = tl.program_id(0) % num_groups * num_cols
    s_ptr += row * s_stride + shift
    dy_ptr += row * dy_stride + shift
    ds_ptr += row * (num_groups * num_cols) + shift
    if HAS_WEIGHT:
        w_ptr += shift
    if HAS_DS_OUT:
        ds_out_ptr += row * ds_out_stride + shift
    dot = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, num_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < num_cols
        g = tl.load(dy_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g *= tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32) + offset
        dot += g * (tl.load(s_ptr + cols, mask=mask, other=0.0).to(tl.float32) * rstd)
    mean = tl.sum(dot, axis=0) / num_cols
    for start in range(0, num_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = cols < num_cols
        g = tl.load(dy_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g *= tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32) + offset
        n = tl.load(s_ptr + cols, mask=mask, other=0.0).to(tl.float32) * rstd
        ds = rstd * (g - n * mean)
        if HAS_DS_OUT:
            ds += tl.load(ds_out_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(ds_ptr + cols, ds, mask=mask)


@triton.jit
def _rms_norm_bwd_wide_dw_kernel(
    s_ptr,
    w_ptr,
    rstd_ptr,
    dy_ptr,
    partial_ptr,
    s_stride,
    dy_stride,
    num_rows,
    num_cols,
    num_groups,
    CAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (p, c) sums column block c, counted over all groups, over row tiles p, p + P, ... into partial row p."""
    group = tl.program_id(1) % num_groups
    rows = tl.arange(0, BLOCK_M)
    cols = (tl.program_id(1) // num_groups) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < num_cols
    cols += group * num_cols
    dw = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * BLOCK_M + rows
        row_mask = row < num_rows
        mask = row_mask[:, None] & col_mask[None, :]
        s = tl.load(s_ptr + row[:, None] * s_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        n = s * tl.load(rstd_ptr + row * num_groups + group, mask=row_mask, other=0.0)[:, None]
        n = _rounded(n, s_ptr.dtype.element_ty, w_ptr, CAST)
        dw += n * tl.load(dy_ptr + row[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    out = partial_ptr + tl.program_id(0) * (num_groups * num_cols) + cols
    tl.store(out, tl.sum(dw, axis=0), mask=col_mask)


# ---- operators ----

# Widest row that one program holds in registers, forward and backward.
_MAX_FWD_BLOCK = 16384
_MAX_BWD_BLOCK = 8192


@functools.cache
def _fwd_blocks(num_cols: int) -> tuple[int, int, int]:
    """BLOCK_M, BLOCK_N, num_warps: 16 elements a thread, four warps or more (MEASURED.md)."""
    block_n = min(next_power_of_2(num_cols), _MAX_FWD_BLOCK)
    block_m = max(1, 2048 // block_n)
    return block_m, block_n, min(16, block_m * block_n // 512)


@functools.cache
def _bwd_blocks(num_cols: int) -> tuple[int, int, int, int]:
    """BLOCK_M, BLOCK_N, num_warps, programs per multiprocessor of the persistent backward.

    32 elements a thread. Twice as many programs of half the size divide the rows more evenly, which around 1024
    columns is faster; with more rows a tile the sums over columns get in the way (MEASURED.md).
    """
    block_n = next_power_of_2(num_cols)
    return (4096 // block_n, block_n, 4, 2) if 256 < block_n <= 1024 else (8192 // block_n, block_n, 8, 1)


def _fake_fwd(
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    eps: float,
    offset: float,
    cast: str,
    group_size: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    s_dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    s = x.new_empty(x.shape if residual is not None else (0,), dtype=s_dtype)
    y = x.new_empty(x.shape, dtype=_out_dtype(s, weight, cast))
    return y, s, x.new_empty((*x.shape[:-1], column_groups(x, group_size)[0]), dtype=torch.float32)


@define(
    "rms_norm_fwd(Tensor x, Tensor? weight, Tensor? residual, float eps, float offset, str cast,"
    " int? group_size) -> (Tensor, Tensor, Tensor)",
    fake=_fake_fwd,
)
def _fwd(
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    eps: float,
    offset: float,
    cast: str,
    group_size: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    num_groups, num_cols = column_groups(x, group_size)
    x_rows, num_rows, x_stride = rows_of(x)
    residual_rows, residual_stride, s = None, 0, None
    if residual is not None:
        residual_rows, _, residual_stride = rows_of(residual)
        s_dtype = torch.promote_types(x.dtype, residual.dtype)
        s = torch.empty_like(x, dtype=s_dtype, memory_format=torch.contiguous_format)
    y_dtype = _out_dtype(x if s is None else s, weight, cast)
    y = torch.empty_like(x, dtype=y_dtype, memory_format=torch.contiguous_format)
    rstd = x.new_empty((*x.shape[:-1], num_groups), dtype=torch.float32)
    block_m, block_n, num_warps = _fwd_blocks(num_cols)
    launch(
        _rms_norm_fwd_kernel,
        (cdiv(num_rows, block_m) * num_groups,),
        x_rows,
        residual_rows,
        weight,
        y,
        s,
        rstd,
        x_stride,
        residual_stride,
        num_rows,
        num_cols,
        num_groups,
        eps,
        offset,
        CAST=cast,
        HAS_WEIGHT=weight is not None,
        HAS_RESIDUAL=residual is not None,
        ONE_BLOCK=num_cols <= block_n,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=num_warps,
    )
    return y, x.new_empty(0) if s is None else s, rstd


def _fake_bwd(
    dy: Tensor,
    s: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    ds_out: Tensor | None,
    offset: float,
    cast: str,
    group_size: int | None,
    needs_ds: bool,
    needs_dw: bool,
) -> tuple[Tensor, Tensor]:
    ds = s.new_empty(s.shape if needs_ds else (0,))
    return ds, s.new_empty(0) if weight is None or not needs_dw else weight.new_empty(weight.shape)


@define(
    "rms_norm_bwd(Tensor dy, Tensor s, Tensor? weight, Tensor rstd, Tensor? ds_out, float offset, str cast,"
    " int? group_size, bool needs_ds, bool needs_dw) -> (Tensor, Tensor)",
    fake=_fake_bwd,
)
def _bwd(
    dy: Tensor,
    s: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    ds_out: Tensor | None,
    offset: float,
    cast: str,
    group_size: int | None,
    needs_ds: bool,
    needs_dw: bool,
) -> tuple[Tensor, Tensor]:
    ds, dw = _fake_bwd(dy, s, weight, rstd, ds_out, offset, cast, group_size, needs_ds, needs_dw)
    (s_rows, num_rows, s_stride), (dy_rows, _, dy_stride) = rows_of(s), rows_of(dy)
    ds_out_rows, _, ds_out_stride = (None, 0, 0) if ds_out is None else rows_of(ds_out)
    num_groups, num_cols = column_groups(s, group_size)
    wide = next_power_of_2(num_cols) > _MAX_BWD_BLOCK
    block_m, block_n, num_warps, per_sm = (4, 512, 4, 1) if wide else _bwd_blocks(num_cols)
    num_programs = min(cdiv(num_rows, block_m), cdiv(num_sms(s.device) * per_sm, num_groups))
    partial = s.new_empty((num_programs, num_groups * num_cols) if needs_dw else (0,), dtype=torch.float32)
    bytes_a_pair = s.element_size() + dy.element_size() + (0 if ds_out is None else ds_out.element_size())
    if not wide:
        launch(
            _rms_norm_bwd_kernel,
            (num_programs * num_groups,),
            s_rows,
            weight,
            rstd,
            dy_rows,
            ds_out_rows,
            ds,
            partial,
            s_stride,
            dy_stride,
            ds_out_stride,
            num_rows,
            num_cols,
            num_groups,
            offset,
            CAST=cast,
            HAS_WEIGHT=weight is not None,
            HAS_DS_OUT=ds_out is not None,
            NEEDS_DS=needs_ds,
            NEEDS_DW=needs_dw,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            STAGES=pipeline_stages(block_m * block_n * bytes_a_pair),
            num_warps=num_warps,
        )
    else:
        if needs_ds:
            launch(
                _rms_norm_bwd_wide_ds_kernel,
                (num_rows * num_groups,),
                s_rows,
                weight,
                rstd,
                dy_rows,
                ds_out_rows,
                ds,
                s_stride,
                dy_stride,
                ds_out_stride,
                num_cols,
                num_groups,
                offset,
                HAS_WEIGHT=weight is not None,
                HAS_DS_OUT=ds_out is not None,
                BLOCK_N=4096,
                num_warps=8,
            )
        if needs_dw:
            launch(
                _rms_norm_bwd_wide_dw_kernel,
                (num_programs, cdiv(num_cols, block_n) * num_groups),
                s_rows,
                weight,
                rstd,
                dy_rows,
                partial,
                s_stride,
                dy_stride,
                num_rows,
                num_cols,
                num_groups,
                CAST=cast,
                BLOCK_M=block_m,
                BLOCK_N=block_n,
                num_warps=num_warps,
            )
    if needs_dw:
        sum_partials(partial, dw)
    return ds, dw


# ---- autograd ----


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        residual: Tensor | None,
        eps: float,
        offset: float,
        cast: str,
        group_size: int | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        y, s, rstd = _fwd(x, weight, residual, eps, offset, cast, group_size)
        ctx.set_materialize_grads(False)
        if residual is not None and not (ctx.needs_input_grad[0] or ctx.needs_input_grad[2]):
            ctx.mark_non_differentiable(s)
        ctx.save_for_backward(x if residual is None else s, weight, rstd)
        ctx.options = offset, cast, group_size
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        return y if residual is None else (y, s)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, ds_out: Tensor | None = None) -> tuple[Tensor | None, ...]:
        s, weight, rstd = ctx.saved_tensors
        needs_dx, needs_dw, needs_dresidual = ctx.needs_input_grad[:3]
        if dy is None:
            dy = torch.zeros_like(s)
        ds, dw = _bwd(dy, s, weight, rstd, ds_out, *ctx.options, needs_dx or needs_dresidual, needs_dw)
        x_dtype, residual_dtype = ctx.dtypes
        dx = ds.to(x_dtype) if needs_dx else None
        dresidual = ds.to(residual_dtype) if needs_dresidual else None
        return dx, dw if needs_dw else None, dresidual, None, None, None, None


# ---- public ----


def _supports(x: Tensor, weight: Tensor | None = None, *, residual: Tensor | None = None, **_: Any) -> list[str]:
    reasons = []
    if any(t is not None and t.dtype == torch.float64 for t in (x, weight, residual)):
        reasons.append("float64 is computed by the reference")
    return reasons


def require_scale(
    name: str, x: Tensor, weight: Tensor | None, offset: float, cast: str, argument: str = "weight"
) -> None:
    """Raise unless `weight`, which messages call `argument`, is a scale of the last axis of `x` with these options."""
    require(x.dim() >= 1, name, "x", "at least one axis", "a scalar")
    require_one_of(name, "cast", cast, CASTS)
    require(weight is not None or offset == 0, name, "offset", "0 without a weight", offset)
    require(weight is not None or cast != "cast_to_weight", name, argument, "a tensor for this cast", None)
    if weight is not None:
        require(weight.shape == x.shape[-1:], name, argument, f"shape {tuple(x.shape[-1:])}", tuple(weight.shape))


@op(reference=rms_norm_reference, supports=_supports)
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast: Cast = "cast_then_scale",
    residual: Tensor | None = None,
    group_size: int | None = None,
) -> Tensor | NormResidual:
    """RMS normalisation over the last axis, optionally of `x + residual`.

        y = s * rsqrt(mean(s^2) + eps) * (offset + weight),   s = x + residual     # the reference, in one line

    Args:
        x: `[..., N]`, floating point, any strides.
        weight: `[N]`, or None for a norm without a scale.
        eps: added to the mean square.
        offset: added to the weight in fp32; 1 for models that store the weight minus one; 0 without a weight.
        cast: where the fp32 result is rounded to the dtype of `s`: "cast_then_scale" before the weight, so that
            an fp32 weight gives an fp32 result; "scale_then_cast" after it, the result has the dtype of `s`;
            "cast_rstd" is "cast_then_scale" with `rsqrt(...)` rounded too; "cast_to_weight" rounds to the dtype of
            the weight, before it and after; "none" rounds once, to the promoted dtype of `s` and `weight`.
        residual: `[..., N]`, the shape of `x`; added to it before the norm, the sum is returned too.
        group_size: the mean is taken over each group of this many neighbouring columns; None for all N.

    Returns:
        `y`, `[..., N]`; with `residual` the named tuple `(y, residual)` where `residual` is the sum.

    Raises:
        ValueError: shapes, dtypes or devices disagree, `cast` is unknown, or `group_size` does not divide N.

    Numerics: statistics, scale and gradients in fp32; `dweight` is summed in fp32 in a fixed order.
    Memory:   saves the normalised input (or the sum), `weight` and 4 bytes a row and group.
    Differs from the reference: never in formula; order of summation over N.
    Source: Zhang & Sennrich 2019, arXiv:1910.07467.
    """
    name = "rms_norm"
    key = call_key(name, (x, weight, residual), offset, cast, group_size)
    if not is_accepted(key):
        require_floating(name, x=x, weight=weight, residual=residual)
        require_scale(name, x, weight, offset, cast)
        if group_size is not None:
            divides = group_size > 0 and x.shape[-1] % group_size == 0
            require(divides, name, "group_size", f"a divisor of {x.shape[-1]}", group_size)
        if residual is not None:
            require(residual.shape == x.shape, name, "residual", f"shape {tuple(x.shape)}", tuple(residual.shape))
        require_same_device(name, x=x, weight=weight, residual=residual)
        if runs_reference(name, x, weight, residual=residual):
            return rms_norm_reference(
                x, weight, eps=eps, offset=offset, cast=cast, residual=residual, group_size=group_size
            )
        accept(key, x)
    # The kernels read one row of weights, which is nothing beside x.
    weight = None if weight is None else weight.contiguous()
    out = apply(_RMSNorm, x, weight, residual, eps, offset, cast, group_size)
    return out if residual is None else NormResidual(*out)
