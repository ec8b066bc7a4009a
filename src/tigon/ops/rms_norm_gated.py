"""RMS normalisation with a gate, before or after it.

    n = x * rstd(x),   y = n * (offset + weight) * act(gate)         norm_before_gate
    n = s * rstd(s),   y = n * (offset + weight),   s = x * act(gate)     otherwise

    rstd(s) = 1 / sqrt(mean(s^2) + eps)

Gradient, with g = dy * act(gate) of the first form and g = dy of the second, and h = g * (offset + weight):

    ds = rstd * (h - n * mean(h * n)),   dweight = sum over rows of g * n
    dx = ds,              dgate = dy * n * (offset + weight) * act'(gate)     norm_before_gate
    dx = ds * act(gate),  dgate = ds * x * act'(gate)                         otherwise

M rows (all leading axes), N columns, the means over all N or over each group of `group_size` of them.
Saved for backward: x, weight, gate, rstd (4 bytes a row and group).
Source: Zhang & Sennrich 2019, arXiv:1910.07467; Dao & Gu 2024, arXiv:2405.21060.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ._check import require, require_floating, require_one_of, require_same_device
from ._device import num_sms
from ._launch import as_rows, cdiv, column_groups, launch, next_power_of_2, pipeline_stages
from ._op import apply, define, once_differentiable, op, runs_reference
from ._partials import sum_partials
from ._triton import tl, triton
from .glu import ACTIVATIONS

Cast = Literal["cast_then_scale", "scale_then_cast"]
CASTS = ("cast_then_scale", "scale_then_cast")


# ---- reference ----


def rms_norm_gated_reference(
    x: Tensor,
    weight: Tensor,
    gate: Tensor,
    *,
    eps: float = 1e-6,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    offset: float = 0.0,
    cast: Cast = "cast_then_scale",
) -> Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    act = ACTIVATIONS[activation].reference(gate.to(wide))
    s = x.to(wide) if norm_before_gate else x.to(wide) * act
    groups = s.reshape(*s.shape[:-1], *column_groups(s, group_size))
    n = (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)).reshape(s.shape)
    if cast == "cast_then_scale":
        n = n.to(x.dtype)
    y = n.to(wide) * (offset + weight.to(wide))
    if cast == "cast_then_scale":
        y = y.to(torch.promote_types(x.dtype, weight.dtype))
    if norm_before_gate:
        y = y.to(wide) * act
    return y.to(_out_dtype(x, weight, norm_before_gate, cast))


def _out_dtype(x: Tensor, weight: Tensor, norm_before_gate: bool, cast: str) -> torch.dtype:
    if norm_before_gate or cast == "scale_then_cast":
        return x.dtype
    return torch.promote_types(x.dtype, weight.dtype)


# ---- kernels ----


@triton.jit
def _load(ptr, offsets, mask, EVICTION: tl.constexpr):
    return tl.load(ptr + offsets, mask=mask, other=0.0, eviction_policy=EVICTION).to(tl.float32)


@triton.jit
def _scaled(n, w, x_dtype, CAST_FIRST: tl.constexpr, ROUND_PRODUCT: tl.constexpr):
    """The norm times the weight, rounded where the model's own code rounds."""
    if CAST_FIRST:
        n = n.to(x_dtype).to(tl.float32)
    y = n * w
    if ROUND_PRODUCT:
        y = y.to(x_dtype).to(tl.float32)
    return y


@triton.jit
def _rms_norm_gated_fwd_kernel(
    x_ptr,
    gate_ptr,
    w_ptr,
    y_ptr,
    rstd_ptr,
    x_stride,
    gate_stride,
    num_rows,
    num_cols,
    num_groups,
    eps,
    offset,
    ACTIVATION: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    ROUND_PRODUCT: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per BLOCK_M rows of a group; one wider than BLOCK_N is read twice, the second time from cache."""
    group = tl.program_id(0) % num_groups
    shift = group * num_cols
    rows = (tl.program_id(0) // num_groups).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < num_rows
    x_rows = rows[:, None] * x_stride + shift
    gate_rows = rows[:, None] * gate_stride + shift
    y_rows = rows[:, None] * (num_groups * num_cols) + shift
    x_dtype = x_ptr.dtype.element_ty
    cols = tl.arange(0, BLOCK_N)

    if ONE_BLOCK:
        mask = row_mask[:, None] & (cols < num_cols)[None, :]
        s = _load(x_ptr, x_rows + cols[None, :], mask, EVICTION="")
        act, _ = ACTIVATION(_load(gate_ptr, gate_rows + cols[None, :], mask, EVICTION=""))
        w = tl.load(w_ptr + shift + cols, mask=cols < num_cols, other=0.0).to(tl.float32) + offset
        if not NORM_FIRST:
            s *= act
        rstd = tl.rsqrt(tl.sum(s * s, axis=1) / num_cols + eps)
        tl.store(rstd_ptr + rows * num_groups + group, rstd, mask=row_mask)
        y = _scaled(s * rstd[:, None], w[None, :], x_dtype, CAST_FIRST, ROUND_PRODUCT)
        if NORM_FIRST:
            y *= act
        tl.store(y_ptr + y_rows + cols[None, :], y, mask=mask)
    else:
        squares = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for start in range(0, num_cols, BLOCK_N):
            c = start + cols
            mask = row_mask[:, None] & (c < num_cols)[None, :]
            s = _load(x_ptr, x_rows + c[None, :], mask, EVICTION="")
            if not NORM_FIRST:
                act, _ = ACTIVATION(_load(gate_ptr, gate_rows + c[None, :], mask, EVICTION=""))
                s *= act
            squares += s * s
        rstd = tl.rsqrt(tl.sum(squares, axis=1) / num_cols + eps)
        tl.store(rstd_ptr + rows * num_groups + group, rstd, mask=row_mask)
        for start in range(0, num_cols, BLOCK_N):
            c = start + cols
            mask = row_mask[:, None] & (c < num_cols)[None, :]
            s = _load(x_ptr, x_rows + c[None, :], mask, EVICTION="")
            act, _ = ACTIVATION(_load(gate_ptr, gate_rows + c[None, :], mask, EVICTION=""))
            w = tl.load(w_ptr + shift + c, mask=c < num_cols, other=0.0).to(tl.float32) + offset
            if not NORM_FIRST:
                s *= act
            y = _scaled(s * rstd[:, None], w[None, :], x_dtype, CAST_FIRST, ROUND_PRODUCT)
            if NORM_FIRST:
                y *= act
            tl.store(y_ptr + y_rows + c[None, :], y, mask=mask)


@triton.jit
def _normalised(x, gate, dy, rstd, ACTIVATION: tl.constexpr, NORM_FIRST: tl.constexpr):
    """act(gate), act'(gate), n, and the gradient g of n times the weight."""
    act, slope = ACTIVATION(gate)
    if NORM_FIRST:
        n = x * rstd
        g = dy * act
    else:
        n = x * act * rstd
        g = dy
    return act, slope, n, g


@triton.jit
def _store_gradients(
    dx_ptr,
    dgate_ptr,
    offsets,
    mask,
    x,
    dy,
    act,
    slope,
    n,
    w,
    ds,
    x_dtype,
    NORM_FIRST: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    ROUND_PRODUCT: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DGATE: tl.constexpr,
):
    if NEEDS_DGATE:
        if NORM_FIRST:
            dgate = dy * _scaled(n, w, x_dtype, CAST_FIRST, ROUND_PRODUCT) * slope
        else:
            dgate = ds * x * slope
        tl.store(dgate_ptr + offsets, dgate, mask=mask)
    if NEEDS_DX:
        dx = ds
        if not NORM_FIRST:
            dx *= act
        tl.store(dx_ptr + offsets, dx, mask=mask)


@triton.jit
def _rms_norm_gated_bwd_kernel(
    x_ptr,
    gate_ptr,
    w_ptr,
    rstd_ptr,
    dy_ptr,
    dx_ptr,
    dgate_ptr,
    partial_ptr,
    x_stride,
    gate_stride,
    dy_stride,
    num_rows,
    num_cols,
    num_groups,
    offset,
    ACTIVATION: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    ROUND_PRODUCT: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DW: tl.constexpr,
    NEEDS_DGATE: tl.constexpr,
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
    w = (tl.load(w_ptr + shift + cols, mask=col_mask, other=0.0).to(tl.float32) + offset)[None, :]
    x_dtype = x_ptr.dtype.element_ty
    if NEEDS_DW:
        dw = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    num_tiles = tl.cdiv(num_rows, BLOCK_M)
    for tile in tl.range(program, num_tiles, tl.num_programs(0) // num_groups, num_stages=STAGES):
        rows = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        row_mask = rows < num_rows
        mask = row_mask[:, None] & col_mask[None, :]
        c = (shift + cols)[None, :]
        # All three are dead after this read.
        x = _load(x_ptr, rows[:, None] * x_stride + c, mask, EVICTION="evict_first")
        gate = _load(gate_ptr, rows[:, None] * gate_stride + c, mask, EVICTION="evict_first")
        dy = _load(dy_ptr, rows[:, None] * dy_stride + c, mask, EVICTION="evict_first")
        rstd = tl.load(rstd_ptr + rows * num_groups + group, mask=row_mask, other=0.0)[:, None]
        act, slope, n, g = _normalised(x, gate, dy, rstd, ACTIVATION, NORM_FIRST)
        if NEEDS_DW:
            dw += _scaled(n, g, x_dtype, CAST_FIRST, ROUND_PRODUCT=False)
        h = g * w
        ds = rstd * (h - n * (tl.sum(h * n, axis=1) / num_cols)[:, None])
        offsets = rows[:, None] * (num_groups * num_cols) + c
        _store_gradients(
            dx_ptr, dgate_ptr, offsets, mask, x, dy, act, slope, n, w, ds, x_dtype,
            NORM_FIRST, CAST_FIRST, ROUND_PRODUCT, NEEDS_DX, NEEDS_DGATE,
        )  # fmt: skip
    if NEEDS_DW:
        out = partial_ptr + program * (num_groups * num_cols) + shift + cols
        tl.store(out, tl.sum(dw, axis=0), mask=col_mask)


@triton.jit
def _rms_norm_gated_bwd_wide_kernel(
    x_ptr,
    gate_ptr,
    w_ptr,
    rstd_ptr,
    dy_ptr,
    dx_ptr,
    dgate_ptr,
    partial_ptr,
    x_stride,
    gate_stride,
    dy_stride,
    num_rows,
    num_cols,
    num_groups,
    offset,
    ACTIVATION: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    ROUND_PRODUCT: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DW: tl.constexpr,
    NEEDS_DGATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """As above one row at a time, in two passes over its columns; the part of dweight stays in cache between rows."""
    group = tl.program_id(0) % num_groups
    program = tl.program_id(0) // num_groups
    shift = group * num_cols
    partial_ptr += program * (num_groups * num_cols) + shift
    x_dtype = x_ptr.dtype.element_ty
    for tile in range(program, num_rows, tl.num_programs(0) // num_groups):
        row = tl.cast(tile, tl.int64)
        x_row = x_ptr + row * x_stride + shift
        gate_row = gate_ptr + row * gate_stride + shift
        dy_row = dy_ptr + row * dy_stride + shift
        rstd = tl.load(rstd_ptr + row * num_groups + group)
        dot = tl.zeros([BLOCK_N], dtype=tl.float32)
        for start in range(0, num_cols, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)
            mask = cols < num_cols
            x = _load(x_row, cols, mask, EVICTION="")
            gate = _load(gate_row, cols, mask, EVICTION="")
            dy = _load(dy_row, cols, mask, EVICTION="")
            w = tl.load(w_ptr + shift + cols, mask=mask, other=0.0).to(tl.float32) + offset
            _, _, n, g = _normalised(x, gate, dy, rstd, ACTIVATION, NORM_FIRST)
            dot += g * w * n
        mean = tl.sum(dot, axis=0) / num_cols
        for start in range(0, num_cols, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)
            mask = cols < num_cols
            x = _load(x_row, cols, mask, EVICTION="evict_first")
            gate = _load(gate_row, cols, mask, EVICTION="evict_first")
            dy = _load(dy_row, cols, mask, EVICTION="evict_first")
            w = tl.load(w_ptr + shift + cols, mask=mask, other=0.0).to(tl.float32) + offset
            act, slope, n, g = _normalised(x, gate, dy, rstd, ACTIVATION, NORM_FIRST)
            if NEEDS_DW:
                dw = tl.load(partial_ptr + cols, mask=mask, other=0.0)
                dw += _scaled(n, g, x_dtype, CAST_FIRST, ROUND_PRODUCT=False)
                tl.store(partial_ptr + cols, dw, mask=mask)
            ds = rstd * (g * w - n * mean)
            offsets = row * (num_groups * num_cols) + shift + cols
            _store_gradients(
                dx_ptr, dgate_ptr, offsets, mask, x, dy, act, slope, n, w, ds, x_dtype,
                NORM_FIRST, CAST_FIRST, ROUND_PRODUCT, NEEDS_DX, NEEDS_DGATE,
            )  # fmt: skip


# ---- operators ----

# Widest group that one program holds in registers, forward and backward.
_MAX_FWD_BLOCK = 8192
_MAX_BWD_BLOCK = 4096


def _fwd_blocks(num_cols: int) -> tuple[int, int, int]:
    """BLOCK_M, BLOCK_N, num_warps: about 4096 elements of x and of the gate a program, 32 a thread."""
    block_n = min(next_power_of_2(num_cols), _MAX_FWD_BLOCK)
    return max(1, 4096 // block_n), block_n, 4 if block_n <= 4096 else 8


_OPTIONS = "str activation, bool norm_before_gate, int? group_size, float offset, str cast"


def _fake_fwd(
    x: Tensor,
    weight: Tensor,
    gate: Tensor,
    eps: float,
    activation: str,
    norm_before_gate: bool,
    group_size: int | None,
    offset: float,
    cast: str,
) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=_out_dtype(x, weight, norm_before_gate, cast))
    return y, x.new_empty((*x.shape[:-1], column_groups(x, group_size)[0]), dtype=torch.float32)


@define(
    f"rms_norm_gated_fwd(Tensor x, Tensor weight, Tensor gate, float eps, {_OPTIONS}) -> (Tensor, Tensor)",
    fake=_fake_fwd,
)
def _fwd(
    x: Tensor,
    weight: Tensor,
    gate: Tensor,
    eps: float,
    activation: str,
    norm_before_gate: bool,
    group_size: int | None,
    offset: float,
    cast: str,
) -> tuple[Tensor, Tensor]:
    y, rstd = _fake_fwd(x, weight, gate, eps, activation, norm_before_gate, group_size, offset, cast)
    x_rows, gate_rows = as_rows(x), as_rows(gate)
    num_rows = x_rows.shape[0]
    num_groups, num_cols = column_groups(x, group_size)
    block_m, block_n, num_warps = _fwd_blocks(num_cols)
    launch(
        _rms_norm_gated_fwd_kernel,
        (cdiv(num_rows, block_m) * num_groups,),
        x_rows,
        gate_rows,
        weight,
        y,
        rstd,
        x_rows.stride(0),
        gate_rows.stride(0),
        num_rows,
        num_cols,
        num_groups,
        eps,
        offset,
        ACTIVATION=ACTIVATIONS[activation].kernel,
        NORM_FIRST=norm_before_gate,
        CAST_FIRST=cast == "cast_then_scale",
        ROUND_PRODUCT=_rounds_product(x, weight, norm_before_gate, cast),
        ONE_BLOCK=num_cols <= block_n,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=num_warps,
    )
    return y, rstd


def _rounds_product(x: Tensor, weight: Tensor, norm_before_gate: bool, cast: str) -> bool:
    """Whether norm times weight is rounded before the gate; any two dtypes promote to fp32, which rounds nothing."""
    return norm_before_gate and cast == "cast_then_scale" and x.dtype == weight.dtype


def _fake_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    gate: Tensor,
    rstd: Tensor,
    needs_dx: bool,
    needs_dw: bool,
    needs_dgate: bool,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape if needs_dx else (0,)),
        weight.new_empty(weight.shape if needs_dw else (0,)),
        gate.new_empty(gate.shape if needs_dgate else (0,)),
    )


@define(
    "rms_norm_gated_bwd(Tensor dy, Tensor x, Tensor weight, Tensor gate, Tensor rstd, bool needs_dx, bool needs_dw,"
    f" bool needs_dgate, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    fake=_fake_bwd,
)
def _bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    gate: Tensor,
    rstd: Tensor,
    needs_dx: bool,
    needs_dw: bool,
    needs_dgate: bool,
    activation: str,
    norm_before_gate: bool,
    group_size: int | None,
    offset: float,
    cast: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dw, dgate = _fake_bwd(dy, x, weight, gate, rstd, needs_dx, needs_dw, needs_dgate)
    x_rows, gate_rows, dy_rows = as_rows(x), as_rows(gate), as_rows(dy)
    num_rows = x_rows.shape[0]
    num_groups, num_cols = column_groups(x, group_size)
    wide = next_power_of_2(num_cols) > _MAX_BWD_BLOCK
    block_n = 2048 if wide else next_power_of_2(num_cols)
    block_m = 1 if wide else _MAX_BWD_BLOCK // block_n
    num_programs = min(cdiv(num_rows, block_m), cdiv((3 if wide else 2) * num_sms(x.device), num_groups))
    # The wide kernel adds to its part of it.
    allocate = x.new_zeros if wide else x.new_empty
    partial = allocate((num_programs, num_groups * num_cols) if needs_dw else (0,), dtype=torch.float32)
    bytes_a_tile = block_m * block_n * sum(t.element_size() for t in (x, gate, dy))
    launch(
        _rms_norm_gated_bwd_wide_kernel if wide else _rms_norm_gated_bwd_kernel,
        (num_programs * num_groups,),
        x_rows,
        gate_rows,
        weight,
        rstd,
        dy_rows,
        dx,
        dgate,
        partial,
        x_rows.stride(0),
        gate_rows.stride(0),
        dy_rows.stride(0),
        num_rows,
        num_cols,
        num_groups,
        offset,
        ACTIVATION=ACTIVATIONS[activation].kernel,
        NORM_FIRST=norm_before_gate,
        CAST_FIRST=cast == "cast_then_scale",
        ROUND_PRODUCT=_rounds_product(x, weight, norm_before_gate, cast),
        NEEDS_DX=needs_dx,
        NEEDS_DW=needs_dw,
        NEEDS_DGATE=needs_dgate,
        BLOCK_N=block_n,
        num_warps=8,
        **({} if wide else {"BLOCK_M": block_m, "STAGES": pipeline_stages(bytes_a_tile)}),
    )
    if needs_dw:
        sum_partials(partial, dw)
    return dx, dw, dgate


# ---- autograd ----


class _RMSNormGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gate: Tensor, eps: float, *options: Any) -> Tensor:
        y, rstd = _fwd(x, weight, gate, eps, *options)
        ctx.save_for_backward(x, weight, gate, rstd)
        ctx.options = options
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[:3]
        gradients = _bwd(dy, *ctx.saved_tensors, *needed, *ctx.options)
        wanted = (gradient if needs else None for gradient, needs in zip(gradients, needed, strict=True))
        return (*wanted, None, *[None] * len(ctx.options))


# ---- public ----


def _supports(x: Tensor, weight: Tensor, gate: Tensor, **_: Any) -> list[str]:
    reasons = []
    if any(t.dtype == torch.float64 for t in (x, weight, gate)):
        reasons.append("float64 is computed by the reference")
    return reasons


@op(reference=rms_norm_gated_reference, supports=_supports)
def rms_norm_gated(
    x: Tensor,
    weight: Tensor,
    gate: Tensor,
    *,
    eps: float = 1e-6,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    offset: float = 0.0,
    cast: Cast = "cast_then_scale",
) -> Tensor:
    """RMS normalisation over the last axis, times an activated gate or of a product with one.

        y = rms_norm(x, weight) * act(gate)      # the reference, in one line; else rms_norm(x * act(gate), weight)

    Args:
        x: `[..., N]`, floating point, any strides.
        weight: `[N]`.
        gate: `[..., N]`, the shape of `x`, any strides.
        eps: added to the mean square.
        activation: of the gate: "silu", "sigmoid" or another of those of `glu`.
        norm_before_gate: whether the gate multiplies the result of the norm, or its input.
        group_size: the mean is taken over each group of this many neighbouring columns; None for all N.
        offset: added to the weight in fp32.
        cast: where the fp32 norm is rounded. "cast_then_scale": to the dtype of `x` before the weight, and the
            product with the weight to the promoted dtype of both; where a gate follows, its product is rounded to
            the dtype of `x`. "scale_then_cast": once, at the end, to the dtype of `x`.

    Returns:
        `[..., N]` in the dtype of `x`, but for "cast_then_scale" without `norm_before_gate`: in the promoted dtype
        of `x` and `weight`.

    Raises:
        ValueError: shapes, dtypes or devices disagree, an option is unknown, or `group_size` does not divide N.

    Numerics: statistics, gate and gradients in fp32; `dweight` is summed in fp32 in a fixed order.
    Memory:   saves `x`, `weight`, `gate` and 4 bytes a row and group.
    Differs from the reference: never in formula; order of summation over N, last bits of exp.
    Source: Zhang & Sennrich 2019, arXiv:1910.07467; Dao & Gu 2024, arXiv:2405.21060.
    """
    name = "rms_norm_gated"
    require(weight is not None, name, "weight", "a tensor", None)
    require(gate is not None, name, "gate", "a tensor; rms_norm is the norm without one", None)
    require_floating(name, x=x, weight=weight, gate=gate)
    require(x.dim() >= 1, name, "x", "at least one axis", "a scalar")
    require_one_of(name, "activation", activation, tuple(ACTIVATIONS))
    require_one_of(name, "cast", cast, CASTS)
    require(weight.shape == x.shape[-1:], name, "weight", f"shape {tuple(x.shape[-1:])}", tuple(weight.shape))
    require(gate.shape == x.shape, name, "gate", f"shape {tuple(x.shape)}", tuple(gate.shape))
    if group_size is not None:
        divides = group_size > 0 and x.shape[-1] % group_size == 0
        require(divides, name, "group_size", f"a divisor of {x.shape[-1]}", group_size)
    require_same_device(name, x=x, weight=weight, gate=gate)
    if runs_reference(name, x, weight, gate):
        return rms_norm_gated_reference(
            x,
            weight,
            gate,
            eps=eps,
            activation=activation,
            norm_before_gate=norm_before_gate,
            group_size=group_size,
            offset=offset,
            cast=cast,
        )
    # The kernels read one row of weights, which is nothing beside x.
    weight = weight.contiguous()
    return apply(_RMSNormGated, x, weight, gate, eps, activation, norm_before_gate, group_size, offset, cast)
