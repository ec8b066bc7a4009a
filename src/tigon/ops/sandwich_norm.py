"""What stands between two branches of a block with norms before and after each: norm, residual addition, next norm.

    p = rms_norm(x, post_weight)                  (the norm after a branch)
    s = residual + p
    y = rms_norm(s, pre_weight)                   (the norm before the next branch)

Gradient, with the gradient of rms_norm for the input called d_norm:

    ds = d_norm(dy; s, pre_weight) + (gradient of the returned s),   dresidual = ds,   dx = d_norm(ds; x, post_weight)

M rows (all leading axes), N columns. Saved for backward: x, s, both weights, 8 bytes a row.
Source: Zhang & Sennrich 2019, arXiv:1910.07467; Ding et al. 2021, arXiv:2105.13290 (norms on both sides of a branch).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._check import require, require_floating, require_one_of, require_same_device
from ._device import num_sms
from ._launch import as_rows, cdiv, launch, next_power_of_2, pipeline_stages
from ._op import apply, define, once_differentiable, op, runs_reference
from ._partials import sum_partials
from ._triton import tl, triton
from .rms_norm import CASTS, Cast, NormResidual, _normalised, _out_dtype, _rounded, rms_norm, rms_norm_reference

# ---- reference ----


def sandwich_norm_reference(
    x: Tensor,
    post_weight: Tensor,
    residual: Tensor,
    pre_weight: Tensor,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast: Cast = "cast_then_scale",
) -> NormResidual:
    p = rms_norm_reference(x, post_weight, eps=eps, offset=offset, cast=cast)
    s = residual + p
    return NormResidual(rms_norm_reference(s, pre_weight, eps=eps, offset=offset, cast=cast), s)


# ---- kernels ----


@triton.jit
def _sandwich_norm_fwd_kernel(
    x_ptr,
    post_weight_ptr,
    residual_ptr,
    pre_weight_ptr,
    y_ptr,
    s_ptr,
    rstd_ptr,
    x_stride,
    residual_stride,
    num_rows,
    num_cols,
    eps,
    offset,
    CAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per BLOCK_M rows."""
    dtype = x_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    row_mask, col_mask = rows < num_rows, cols < num_cols
    mask = row_mask[:, None] & col_mask[None, :]
    out = rows[:, None] * num_cols + cols[None, :]

    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    r = tl.load(residual_ptr + rows[:, None] * residual_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    x_rstd = tl.rsqrt(tl.sum(x * x, axis=1) / num_cols + eps)
    p = _normalised(x, x_rstd, post_weight_ptr, cols, col_mask, 0, offset, dtype, CAST, True)
    # Rounded where the model's own code rounds: the result of the norm, and the sum.
    s = (r + p.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    s_rstd = tl.rsqrt(tl.sum(s * s, axis=1) / num_cols + eps)
    y = _normalised(s, s_rstd, pre_weight_ptr, cols, col_mask, 0, offset, dtype, CAST, True)
    tl.store(s_ptr + out, s, mask=mask)
    tl.store(y_ptr + out, y, mask=mask)
    tl.store(rstd_ptr + rows, x_rstd, mask=row_mask)
    tl.store(rstd_ptr + num_rows + rows, s_rstd, mask=row_mask)


@triton.jit
def _input_gradient(n, g, rstd, num_cols):
    """Gradient of a norm's input from its normalised rows and the gradient `g` before the weight."""
    return rstd[:, None] * (g - n * (tl.sum(g * n, axis=1) / num_cols)[:, None])


@triton.jit
def _sandwich_norm_bwd_kernel(
    x_ptr,
    post_weight_ptr,
    s_ptr,
    pre_weight_ptr,
    rstd_ptr,
    dy_ptr,
    ds_out_ptr,
    dx_ptr,
    dresidual_ptr,
    post_partial_ptr,
    pre_partial_ptr,
    x_stride,
    dy_stride,
    ds_out_stride,
    num_rows,
    num_cols,
    offset,
    CAST: tl.constexpr,
    HAS_DS_OUT: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DRESIDUAL: tl.constexpr,
    NEEDS_DPOST: tl.constexpr,
    NEEDS_DPRE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Persistent: program p takes row tiles p, p + P, ... and leaves its part of both weights' gradients in fp32."""
    dtype = x_ptr.dtype.element_ty
    cols = tl.arange(0, BLOCK_N)
    col_mask = cols < num_cols
    post_weight = tl.load(post_weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32) + offset
    pre_weight = tl.load(pre_weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32) + offset
    if NEEDS_DPOST:
        dpost = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if NEEDS_DPRE:
        dpre = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        row_mask = rows < num_rows
        mask = row_mask[:, None] & col_mask[None, :]
        out = rows[:, None] * num_cols + cols[None, :]
        s = tl.load(s_ptr + out, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        dy_offsets = rows[:, None] * dy_stride + cols[None, :]
        dy = tl.load(dy_ptr + dy_offsets, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        s_rstd = tl.load(rstd_ptr + num_rows + rows, mask=row_mask, other=0.0)
        n = s * s_rstd[:, None]
        if NEEDS_DPRE:
            dpre += dy * _rounded(n, dtype, pre_weight_ptr, CAST)
        ds = _input_gradient(n, dy * pre_weight[None, :], s_rstd, num_cols)
        if HAS_DS_OUT:
            ds_offsets = rows[:, None] * ds_out_stride + cols[None, :]
            ds += tl.load(ds_out_ptr + ds_offsets, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if NEEDS_DRESIDUAL:
            tl.store(dresidual_ptr + out, ds, mask=mask)
        if NEEDS_DX or NEEDS_DPOST:
            x_offsets = rows[:, None] * x_stride + cols[None, :]
            x = tl.load(x_ptr + x_offsets, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            x_rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)
            n = x * x_rstd[:, None]
            if NEEDS_DPOST:
                dpost += ds * _rounded(n, dtype, post_weight_ptr, CAST)
            if NEEDS_DX:
                tl.store(dx_ptr + out, _input_gradient(n, ds * post_weight[None, :], x_rstd, num_cols), mask=mask)
    partial = tl.program_id(0) * num_cols + cols
    if NEEDS_DPOST:
        tl.store(post_partial_ptr + partial, tl.sum(dpost, axis=0), mask=col_mask)
    if NEEDS_DPRE:
        tl.store(pre_partial_ptr + partial, tl.sum(dpre, axis=0), mask=col_mask)


# ---- operators ----

# Widest row of which the backward holds all it needs in registers; wider ones take the two norms one after the other.
_MAX_BLOCK = 4096


def _fwd_blocks(num_cols: int) -> tuple[int, int, int]:
    """BLOCK_M, BLOCK_N, num_warps: 16 elements a thread of four warps or more, as in `rms_norm`."""
    block_n = next_power_of_2(num_cols)
    block_m = max(1, 2048 // block_n)
    return block_m, block_n, block_m * block_n // 512


def _bwd_blocks(num_cols: int) -> tuple[int, int, int]:
    """BLOCK_M, BLOCK_N, num_warps of one program per multiprocessor: 16 elements a thread.

    Half of what `rms_norm` takes, since each has twice as many accumulators, weights and inputs.
    """
    block_n = next_power_of_2(num_cols)
    block_m = max(1, 4096 // block_n)
    return block_m, block_n, block_m * block_n // 512


def _fake_fwd(
    x: Tensor, post_weight: Tensor, residual: Tensor, pre_weight: Tensor, eps: float, offset: float, cast: str
) -> tuple[Tensor, Tensor, Tensor]:
    rstd = x.new_empty((2, *x.shape[:-1]), dtype=torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape), rstd


@define(
    "sandwich_norm_fwd(Tensor x, Tensor post_weight, Tensor residual, Tensor pre_weight, float eps, float offset,"
    " str cast) -> (Tensor, Tensor, Tensor)",
    fake=_fake_fwd,
)
def _fwd(
    x: Tensor, post_weight: Tensor, residual: Tensor, pre_weight: Tensor, eps: float, offset: float, cast: str
) -> tuple[Tensor, Tensor, Tensor]:
    y, s, rstd = _fake_fwd(x, post_weight, residual, pre_weight, eps, offset, cast)
    x_rows, residual_rows = as_rows(x), as_rows(residual)
    num_rows, num_cols = x_rows.shape
    block_m, block_n, num_warps = _fwd_blocks(num_cols)
    launch(
        _sandwich_norm_fwd_kernel,
        (cdiv(num_rows, block_m),),
        x_rows,
        post_weight,
        residual_rows,
        pre_weight,
        y,
        s,
        rstd,
        x_rows.stride(0),
        residual_rows.stride(0),
        num_rows,
        num_cols,
        eps,
        offset,
        CAST=cast,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=num_warps,
    )
    return y, s, rstd


def _fake_bwd(
    dy: Tensor,
    ds_out: Tensor | None,
    x: Tensor,
    post_weight: Tensor,
    s: Tensor,
    pre_weight: Tensor,
    rstd: Tensor,
    offset: float,
    cast: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    likes = zip((x, post_weight, s, pre_weight), needs, strict=True)
    dx, dpost, dresidual, dpre = (t.new_empty(t.shape if is_needed else (0,)) for t, is_needed in likes)
    return dx, dpost, dresidual, dpre


@define(
    "sandwich_norm_bwd(Tensor dy, Tensor? ds_out, Tensor x, Tensor post_weight, Tensor s, Tensor pre_weight,"
    " Tensor rstd, float offset, str cast, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_bwd,
)
def _bwd(
    dy: Tensor,
    ds_out: Tensor | None,
    x: Tensor,
    post_weight: Tensor,
    s: Tensor,
    pre_weight: Tensor,
    rstd: Tensor,
    offset: float,
    cast: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`needs`: of dx, the gradient of post_weight, dresidual and the gradient of pre_weight."""
    dx, dpost, dresidual, dpre = _fake_bwd(dy, ds_out, x, post_weight, s, pre_weight, rstd, offset, cast, needs)
    x_rows, dy_rows = as_rows(x), as_rows(dy)
    ds_out_rows = None if ds_out is None else as_rows(ds_out)
    num_rows, num_cols = x_rows.shape
    block_m, block_n, num_warps = _bwd_blocks(num_cols)
    num_programs = min(cdiv(num_rows, block_m), num_sms(x.device))
    post_partial, pre_partial = (
        x.new_empty((num_programs, num_cols) if is_needed else (0,), dtype=torch.float32)
        for is_needed in (needs[1], needs[3])
    )
    num_staged = 3 if ds_out is None else 4
    launch(
        _sandwich_norm_bwd_kernel,
        (num_programs,),
        x_rows,
        post_weight,
        s,
        pre_weight,
        rstd,
        dy_rows,
        ds_out_rows,
        dx,
        dresidual,
        post_partial,
        pre_partial,
        x_rows.stride(0),
        dy_rows.stride(0),
        0 if ds_out_rows is None else ds_out_rows.stride(0),
        num_rows,
        num_cols,
        offset,
        CAST=cast,
        HAS_DS_OUT=ds_out is not None,
        NEEDS_DX=needs[0],
        NEEDS_DRESIDUAL=needs[2],
        NEEDS_DPOST=needs[1],
        NEEDS_DPRE=needs[3],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STAGES=pipeline_stages(block_m * block_n * num_staged * x.element_size()),
        num_warps=num_warps,
    )
    if needs[1]:
        sum_partials(post_partial, dpost)
    if needs[3]:
        sum_partials(pre_partial, dpre)
    return dx, dpost, dresidual, dpre


# ---- autograd ----


class _SandwichNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        post_weight: Tensor,
        residual: Tensor,
        pre_weight: Tensor,
        eps: float,
        offset: float,
        cast: str,
    ) -> tuple[Tensor, Tensor]:
        y, s, rstd = _fwd(x, post_weight, residual, pre_weight, eps, offset, cast)
        ctx.set_materialize_grads(False)
        if not any(ctx.needs_input_grad[:3]):
            ctx.mark_non_differentiable(s)
        ctx.save_for_backward(x, post_weight, s, pre_weight, rstd)
        ctx.options = offset, cast
        return y, s

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, ds_out: Tensor | None = None) -> tuple[Tensor | None, ...]:
        x, post_weight, s, pre_weight, rstd = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:4])
        if dy is None:
            dy = torch.zeros_like(s)
        gradients = _bwd(dy, ds_out, x, post_weight, s, pre_weight, rstd, *ctx.options, needs)
        return *(g if is_needed else None for g, is_needed in zip(gradients, needs, strict=True)), None, None, None


# ---- public ----


def _supports(x: Tensor, post_weight: Tensor, residual: Tensor, pre_weight: Tensor, **_: Any) -> list[str]:
    if any(t.dtype == torch.float64 for t in (x, post_weight, residual, pre_weight)):
        return ["float64 is computed by the reference"]
    return []


def _is_one_kernel(x: Tensor, post_weight: Tensor, residual: Tensor, pre_weight: Tensor, cast: str) -> bool:
    """False for rows too wide for registers, and where a norm or the sum has another dtype than `x`."""
    results = residual.dtype, _out_dtype(x, post_weight, cast), _out_dtype(x, pre_weight, cast)
    return x.shape[-1] <= _MAX_BLOCK and all(dtype == x.dtype for dtype in results)


@op(reference=sandwich_norm_reference, supports=_supports)
def sandwich_norm(
    x: Tensor,
    post_weight: Tensor,
    residual: Tensor,
    pre_weight: Tensor,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast: Cast = "cast_then_scale",
) -> NormResidual:
    """RMS norm after a branch, residual addition, and the RMS norm before the next branch.

        s = residual + rms_norm(x, post_weight);   y = rms_norm(s, pre_weight)     # the reference, in one line

    Args:
        x: `[..., N]`, floating point, any strides: what the branch returned.
        post_weight: `[N]`, of the norm after the branch.
        residual: `[..., N]`, the shape of `x`: the residual stream before the branch.
        pre_weight: `[N]`, of the norm before the next branch.
        eps: added to both mean squares.
        offset: added to both weights in fp32; 1 for models that store the weight minus one.
        cast: where both norms round, see `rms_norm`.

    Returns:
        The named tuple `(y, residual)`, each `[..., N]`, where `residual` is the sum `s`.

    Raises:
        ValueError: shapes, dtypes or devices disagree, or `cast` is unknown.

    Numerics: statistics, scales and gradients in fp32, rounded once where the separate operations round; gradients
              of weights are summed in fp32 in a fixed order.
    Memory:   saves `x`, the sum, the weights and 8 bytes a row; the result of the first norm is never stored.
    Differs from the reference: never in formula; order of summation over N. Rows above 4096 columns, and tensors of
              different dtypes, take two calls of `rms_norm`.
    Source: Zhang & Sennrich 2019, arXiv:1910.07467; Ding et al. 2021, arXiv:2105.13290.
    """
    name = "sandwich_norm"
    require_floating(name, x=x, post_weight=post_weight, residual=residual, pre_weight=pre_weight)
    require(x.dim() >= 1, name, "x", "at least one axis", "a scalar")
    require_one_of(name, "cast", cast, CASTS)
    for argument, weight in (("post_weight", post_weight), ("pre_weight", pre_weight)):
        require(weight.shape == x.shape[-1:], name, argument, f"shape {tuple(x.shape[-1:])}", tuple(weight.shape))
    require(residual.shape == x.shape, name, "residual", f"shape {tuple(x.shape)}", tuple(residual.shape))
    require_same_device(name, x=x, post_weight=post_weight, residual=residual, pre_weight=pre_weight)
    if runs_reference(name, x, post_weight, residual, pre_weight):
        return sandwich_norm_reference(x, post_weight, residual, pre_weight, eps=eps, offset=offset, cast=cast)
    if not _is_one_kernel(x, post_weight, residual, pre_weight, cast):
        p = rms_norm(x, post_weight, eps=eps, offset=offset, cast=cast)
        return rms_norm(p, pre_weight, eps=eps, offset=offset, cast=cast, residual=residual)  # type: ignore[return-value]
    # The kernels read one row of weights, which is nothing beside x.
    weights = post_weight.contiguous(), pre_weight.contiguous()
    return NormResidual(*apply(_SandwichNorm, x, weights[0], residual, weights[1], eps, offset, cast))
