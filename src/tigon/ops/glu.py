"""Gated linear unit: an activated gate times a second tensor.

    y = f(gate) * (up_offset + up)
    f(gate) = act(alpha * gate_scale * gate) / alpha           (act(gate) by default)

With a limit, `up` is clamped to [-limit, limit] and `gate` or `f(gate)` to at most limit.

Gradient, zero where a clamp cut, as that of torch.clamp:

    dgate = dy * (up_offset + up) * f'(gate)
    dup = dy * f(gate)

M rows (all leading axes), I columns. `gate` and `up` are two tensors, or one packed `[..., 2I]` of two halves or of
neighbours in turns, whose gradient is packed too. Saved for backward: the inputs, so that nothing but y is new; their
gradients take their place where nobody else can see them.
Source: Shazeer 2020, arXiv:2002.05202.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _tl
from ._check import require, require_floating, require_one_of, require_same_device
from ._launch import as_rows, cdiv, launch, next_power_of_2
from ._op import (
    accept,
    apply,
    call_key,
    define,
    is_accepted,
    is_traced,
    once_differentiable,
    op,
    runs_reference,
)
from ._reuse import claim, save_for_reuse
from ._triton import tl, triton


class Activation(NamedTuple):
    """A function of one tensor, in torch and as a kernel piece that returns its value and its derivative."""

    reference: Callable[[Tensor], Tensor]
    kernel: Any


ACTIVATIONS = {
    "silu": Activation(F.silu, _tl.silu_and_slope),
    "gelu": Activation(F.gelu, _tl.gelu_and_slope),
    "gelu_tanh": Activation(lambda x: F.gelu(x, approximate="tanh"), _tl.gelu_tanh_and_slope),
    "relu": Activation(F.relu, _tl.relu_and_slope),
    "relu2": Activation(lambda x: F.relu(x).square(), _tl.relu2_and_slope),
    "sigmoid": Activation(torch.sigmoid, _tl.sigmoid_and_slope),
    "identity": Activation(lambda x: x, _tl.identity_and_slope),
}
LimitOn = Literal["gate", "activation"]
LIMITS = ("gate", "activation")
# What `approximate` of `geglu` selects, with the values of torch.nn.functional.gelu.
GELUS = {"tanh": "gelu_tanh", "none": "gelu"}


# ---- reference ----


def glu_reference(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    activation: str = "silu",
    gate_first: bool = True,
    interleaved: bool = False,
    limit: float | None = None,
    limit_on: LimitOn = "gate",
    alpha: float = 1.0,
    gate_scale: float = 1.0,
    up_offset: float = 0.0,
) -> Tensor:
    gate, up = _split(gate, up, gate_first, interleaved)
    dtype = torch.promote_types(gate.dtype, up.dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    gate, up = gate.to(wide), up.to(wide)
    if limit is not None:
        up = up.clamp(-limit, limit)
        gate = gate.clamp(max=limit) if limit_on == "gate" else gate
    act = ACTIVATIONS[activation].reference(alpha * gate_scale * gate) / alpha
    if limit is not None and limit_on == "activation":
        act = act.clamp(max=limit)
    return (act * (up_offset + up)).to(dtype)


def swiglu_reference(gate: Tensor, up: Tensor | None = None, *, gate_first: bool = True) -> Tensor:
    return glu_reference(gate, up, activation="silu", gate_first=gate_first)


def geglu_reference(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    approximate: Literal["tanh", "none"] = "tanh",
    gate_first: bool = True,
) -> Tensor:
    return glu_reference(gate, up, activation=GELUS[approximate], gate_first=gate_first)


def _split(gate: Tensor, up: Tensor | None, gate_first: bool, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Gate and up; without `up` they are views of `gate`."""
    if up is not None:
        return gate, up
    first, second = (gate[..., 0::2], gate[..., 1::2]) if interleaved else gate.chunk(2, -1)
    return (first, second) if gate_first else (second, first)


# ---- kernels ----


@triton.jit
def _tile(num_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows and first column of this program's tile; the tiles of one row are neighbours."""
    num_col_tiles = tl.cdiv(num_cols, BLOCK_N)
    rows = (tl.program_id(0) // num_col_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    return rows[:, None], (tl.program_id(0) % num_col_tiles) * BLOCK_N


@triton.jit
def _load_interleaved(
    ptr, offsets, mask, GATE_FIRST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVICTION: tl.constexpr
):
    both = tl.load(ptr + offsets, mask=mask, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    gate, up = tl.split(tl.reshape(both, (BLOCK_M, BLOCK_N, 2)))
    if not GATE_FIRST:
        gate, up = up, gate
    return gate, up


@triton.jit
def _activate(gate, limit, gate_factor, act_factor, ACTIVATION: tl.constexpr, LIMITS_GATE: tl.constexpr):
    """Value and derivative; what is None has no code."""
    x = gate
    if LIMITS_GATE:
        # Not the minimum, which would drop a NaN.
        x = tl.where(gate > limit, limit, gate)
    if gate_factor is not None:
        x = x * gate_factor
    act, slope = ACTIVATION(x)
    if gate_factor is not None:
        slope = slope * gate_factor
    if act_factor is not None:
        act = act * act_factor
        slope = slope * act_factor
    if LIMITS_GATE:
        slope = tl.where(gate > limit, 0.0, slope)
    elif limit is not None:
        slope = tl.where(act > limit, 0.0, slope)
        act = tl.where(act > limit, limit, act)
    return act, slope


@triton.jit
def _limit_up(up, limit, up_offset):
    if limit is not None:
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    if up_offset is not None:
        up = up + up_offset
    return up


@triton.jit
def _limit_dup(dup, up, limit):
    return tl.where(tl.abs(up) > limit, 0.0, dup)


@triton.jit
def _glu_fwd_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    gate_stride,
    up_stride,
    num_rows,
    num_cols,
    limit,
    gate_factor,
    act_factor,
    up_offset,
    ACTIVATION: tl.constexpr,
    LIMITS_GATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per tile."""
    rows, start = _tile(num_cols, BLOCK_M, BLOCK_N)
    cols = start + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < num_rows) & (cols < num_cols)
    if INTERLEAVED:
        both = 2 * start + tl.arange(0, 2 * BLOCK_N)[None, :]
        both_mask = (rows < num_rows) & (both < 2 * num_cols)
        gate, up = _load_interleaved(
            gate_ptr, rows * gate_stride + both, both_mask, GATE_FIRST, BLOCK_M, BLOCK_N, EVICTION=""
        )
    else:
        gate = tl.load(gate_ptr + rows * gate_stride + cols, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + rows * up_stride + cols, mask=mask, other=0.0).to(tl.float32)
    act, _ = _activate(gate, limit, gate_factor, act_factor, ACTIVATION, LIMITS_GATE)
    tl.store(y_ptr + rows * num_cols + cols, act * _limit_up(up, limit, up_offset), mask=mask)


@triton.jit
def _glu_bwd_kernel(
    gate_ptr,
    up_ptr,
    dy_ptr,
    dgate_ptr,
    dup_ptr,
    gate_stride,
    up_stride,
    dy_stride,
    dgate_stride,
    dup_stride,
    num_rows,
    num_cols,
    limit,
    gate_factor,
    act_factor,
    up_offset,
    ACTIVATION: tl.constexpr,
    LIMITS_GATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    NEEDS_UP: tl.constexpr,
    NEEDS_DGATE: tl.constexpr,
    NEEDS_DUP: tl.constexpr,
    EMITS_PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per tile; what forward gave can be written over `dy`."""
    rows, start = _tile(num_cols, BLOCK_M, BLOCK_N)
    cols = start + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < num_rows) & (cols < num_cols)
    # All three are dead after this read.
    dy = tl.load(dy_ptr + rows * dy_stride + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if INTERLEAVED:
        both = 2 * start + tl.arange(0, 2 * BLOCK_N)[None, :]
        both_mask = (rows < num_rows) & (both < 2 * num_cols)
        gate, up = _load_interleaved(
            gate_ptr, rows * gate_stride + both, both_mask, GATE_FIRST, BLOCK_M, BLOCK_N, EVICTION="evict_first"
        )
    else:
        gate = tl.load(gate_ptr + rows * gate_stride + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(
            tl.float32
        )
        if NEEDS_UP:
            up = tl.load(up_ptr + rows * up_stride + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(
                tl.float32
            )
    act, slope = _activate(gate, limit, gate_factor, act_factor, ACTIVATION, LIMITS_GATE)
    if NEEDS_DGATE:
        dgate = dy * _limit_up(up, limit, up_offset) * slope
    if NEEDS_DUP:
        dup = dy * act
        if limit is not None:
            dup = _limit_dup(dup, up, limit)
    if INTERLEAVED:
        if not GATE_FIRST:
            dgate, dup = dup, dgate
        pairs = tl.reshape(tl.join(dgate, dup), (BLOCK_M, 2 * BLOCK_N))
        tl.store(dgate_ptr + rows * dgate_stride + both, pairs, mask=both_mask)
    else:
        if NEEDS_DGATE:
            tl.store(dgate_ptr + rows * dgate_stride + cols, dgate, mask=mask)
        if NEEDS_DUP:
            tl.store(dup_ptr + rows * dup_stride + cols, dup, mask=mask)
    if EMITS_PRODUCT:
        tl.store(dy_ptr + rows * dy_stride + cols, act * _limit_up(up, limit, up_offset), mask=mask)


# ---- operators ----

# Elements of a tile: 8 a thread of 4 warps, which is one 16-byte access of a 16-bit dtype.
_TILE = 1024
# Longest row whose column numbers stay in int32, the last tile's masked lanes included.
_MAX_COLS = 2**31 - _TILE


@functools.cache
def _blocks(num_cols: int) -> tuple[int, int]:
    """BLOCK_M, BLOCK_N."""
    block_n = min(next_power_of_2(num_cols), _TILE)
    return _TILE // block_n, block_n


def _as_matrices(*tensors: Tensor) -> tuple[Sequence[Tensor], list[int], int, int]:
    """Tensors of one shape or empty as matrices with unit column stride: with row strides, and size of the last.

    Contiguous ones, as they are, for one long row: that has no row ends, so odd widths neither waste lanes nor break
    the alignment of vector loads.
    """
    if tensors[0].numel() > _MAX_COLS or False in [t.is_contiguous() for t in tensors]:
        rows = [as_rows(t) for t in tensors]
        return rows, [t.stride(0) for t in rows], *rows[-1].shape
    return tensors, [0] * len(tensors), 1, tensors[-1].numel()


def _fake_fwd(gate: Tensor, up: Tensor | None, *_: Any) -> Tensor:
    if up is None:
        return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


def _like(gate: Tensor, up: Tensor) -> Tensor:
    """What `_fake_fwd` gives for two tensors, with less to do for the host."""
    dtype = gate.dtype if gate.dtype is up.dtype else torch.promote_types(gate.dtype, up.dtype)
    return torch.empty_like(gate, dtype=dtype, memory_format=torch.contiguous_format)


_OPTIONS = (
    "str activation, bool gate_first, bool interleaved, float? limit, str limit_on, float? gate_factor,"
    " float? act_factor, float? up_offset"
)


@define(f"glu_fwd(Tensor gate, Tensor? up, {_OPTIONS}) -> Tensor", fake=_fake_fwd)
def _fwd(gate: Tensor, up: Tensor | None, *options: Any) -> Tensor:
    y = _like(gate, up) if up is not None else _fake_fwd(gate, up)
    fill_fwd(gate, up, y, *options)
    return y


def fill_fwd(
    gate: Tensor,
    up: Tensor | None,
    y: Tensor,
    activation: str,
    gate_first: bool,
    interleaved: bool,
    limit: float | None,
    limit_on: str,
    gate_factor: float | None,
    act_factor: float | None,
    up_offset: float | None,
) -> None:
    """Writes `y`, which is contiguous."""
    if interleaved:
        (gate, _), (gate_stride, _), num_rows, num_cols = _as_matrices(gate, y)
        up, up_stride = None, 0
    else:
        (gate, up), (gate_stride, up_stride), num_rows, num_cols = _as_matrices(*_split(gate, up, gate_first))
    block_m, block_n = _blocks(num_cols)
    launch(
        _glu_fwd_kernel,
        (cdiv(num_rows, block_m) * cdiv(num_cols, block_n),),
        gate,
        up,
        y,
        gate_stride,
        up_stride,
        num_rows,
        num_cols,
        limit,
        gate_factor,
        act_factor,
        up_offset,
        ACTIVATION=ACTIVATIONS[activation].kernel,
        LIMITS_GATE=limit is not None and limit_on == "gate",
        INTERLEAVED=interleaved,
        GATE_FIRST=gate_first,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4,
    )


def _fake_bwd(
    dy: Tensor, gate: Tensor, up: Tensor | None, needs_dgate: bool, needs_dup: bool, *_: Any
) -> tuple[Tensor, Tensor]:
    dgate = gate.new_empty(gate.shape if needs_dgate else (0,))
    return dgate, gate.new_empty(0) if up is None else up.new_empty(up.shape if needs_dup else (0,))


@define(
    f"glu_bwd(Tensor dy, Tensor gate, Tensor? up, bool needs_dgate, bool needs_dup, {_OPTIONS}) -> (Tensor, Tensor)",
    fake=_fake_bwd,
)
def _bwd(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    needs_dgate: bool,
    needs_dup: bool,
    activation: str,
    gate_first: bool,
    interleaved: bool,
    limit: float | None,
    limit_on: str,
    gate_factor: float | None,
    act_factor: float | None,
    up_offset: float | None,
) -> tuple[Tensor, Tensor]:
    dgate, dup = _fake_bwd(dy, gate, up, needs_dgate, needs_dup)
    options = activation, gate_first, interleaved, limit, limit_on, gate_factor, act_factor, up_offset
    fill_bwd(dy, gate, up, dgate, dup, needs_dgate, needs_dup, *options)
    return dgate, dup


def fill_bwd(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    dgate: Tensor,
    dup: Tensor | None,
    needs_dgate: bool,
    needs_dup: bool,
    activation: str,
    gate_first: bool,
    interleaved: bool,
    limit: float | None,
    limit_on: str,
    gate_factor: float | None,
    act_factor: float | None,
    up_offset: float | None,
    *,
    emits_product: bool = False,
) -> None:
    """Writes `dgate` and `dup`, which may be `gate` and `up` themselves: a program reads its tile before it writes.

    With `emits_product`, what forward gave takes the place of `dy`, which must be contiguous and the caller's own.
    """
    if up is None:
        needs_dup = needs_dgate
    if interleaved:
        (gate, dgate, dy), strides, num_rows, num_cols = _as_matrices(gate, dgate, dy)
        up, dup = None, None
        gate_stride, dgate_stride, dy_stride, up_stride, dup_stride = *strides, 0, 0
    else:
        if up is None:
            dgate, dup = _split(dgate, None, gate_first)
        gate, up = _split(gate, up, gate_first)
        (gate, up, dgate, dup, dy), strides, num_rows, num_cols = _as_matrices(gate, up, dgate, dup, dy)
        gate_stride, up_stride, dgate_stride, dup_stride, dy_stride = strides
    block_m, block_n = _blocks(num_cols)
    launch(
        _glu_bwd_kernel,
        (cdiv(num_rows, block_m) * cdiv(num_cols, block_n),),
        gate,
        up,
        dy,
        dgate,
        dup,
        gate_stride,
        up_stride,
        dy_stride,
        dgate_stride,
        dup_stride,
        num_rows,
        num_cols,
        limit,
        gate_factor,
        act_factor,
        up_offset,
        ACTIVATION=ACTIVATIONS[activation].kernel,
        LIMITS_GATE=limit is not None and limit_on == "gate",
        INTERLEAVED=interleaved,
        GATE_FIRST=gate_first,
        NEEDS_UP=needs_dgate or emits_product or limit is not None,
        NEEDS_DGATE=needs_dgate,
        NEEDS_DUP=needs_dup,
        EMITS_PRODUCT=emits_product,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4,
    )


# ---- autograd ----


def _gradient_of(x: Tensor, needed: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format) if needed else x.new_empty(0)


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, *options: Any) -> Tensor:
        save_for_reuse(ctx, gate, up)
        ctx.options = options
        return _fwd(gate, up, *options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        needs_dgate, needs_dup = ctx.needs_input_grad[:2]
        if is_traced(dy):
            dgate, dup = _bwd(dy, gate, up, needs_dgate, needs_dup, *ctx.options)
        else:
            takes_gate, takes_up = claim(ctx, gate, up)
            dgate = gate if takes_gate else _gradient_of(gate, needs_dgate)
            dup = up if up is None or takes_up else _gradient_of(up, needs_dup)
            fill_bwd(dy, gate, up, dgate, dup, needs_dgate, needs_dup, *ctx.options)
        return (dgate if needs_dgate else None, dup if needs_dup else None, *[None] * len(ctx.options))


# ---- public ----


def _supports(gate: Tensor, up: Tensor | None = None, **_: Any) -> list[str]:
    if any(t is not None and t.dtype == torch.float64 for t in (gate, up)):
        return ["float64 is computed by the reference"]
    return []


def require_inputs(name: str, gate: Tensor, up: Tensor | None, gate_first: bool, interleaved: bool) -> None:
    """Raise unless `gate` and `up` are two halves, or `gate` is both."""
    require_floating(name, gate=gate, up=up)
    require(gate.dim() >= 1, name, "gate", "at least one axis", "a scalar")
    if up is None:
        require(gate.shape[-1] % 2 == 0, name, "gate", "an even last axis, as up is None", tuple(gate.shape))
    else:
        require(up.shape == gate.shape, name, "up", f"shape {tuple(gate.shape)}", tuple(up.shape))
        require(gate_first, name, "gate_first", "True when up is given", gate_first)
        require(not interleaved, name, "interleaved", "False when up is given", interleaved)
    require_same_device(name, gate=gate, up=up)


def require_options(name: str, activation: str, limit: float | None, limit_on: LimitOn, alpha: float) -> None:
    require_one_of(name, "activation", activation, tuple(ACTIVATIONS))
    require_one_of(name, "limit_on", limit_on, LIMITS)
    require(limit is None or limit > 0, name, "limit", "a positive number or None", limit)
    require(alpha > 0, name, "alpha", "a positive number", alpha)


def kernel_options(
    activation: str,
    gate_first: bool,
    interleaved: bool,
    limit: float | None,
    limit_on: LimitOn,
    alpha: float,
    gate_scale: float,
    up_offset: float,
) -> tuple[Any, ...]:
    """The options as the kernels take them: what changes nothing is None, and so left out."""
    return (
        activation,
        gate_first,
        interleaved,
        None if limit is None or limit == math.inf else float(limit),
        limit_on,
        None if alpha * gate_scale == 1 else float(alpha * gate_scale),
        None if alpha == 1 else 1.0 / alpha,
        None if up_offset == 0 else float(up_offset),
    )


def _glu(
    name: str,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    gate_first: bool,
    interleaved: bool = False,
    limit: float | None = None,
    limit_on: LimitOn = "gate",
    alpha: float = 1.0,
    gate_scale: float = 1.0,
    up_offset: float = 0.0,
) -> Tensor:
    key = call_key(name, (gate, up), gate_first, interleaved)
    if not is_accepted(key):
        require_inputs(name, gate, up, gate_first, interleaved)
        if runs_reference(name, gate, up):
            return glu_reference(
                gate,
                up,
                activation=activation,
                gate_first=gate_first,
                interleaved=interleaved,
                limit=limit,
                limit_on=limit_on,
                alpha=alpha,
                gate_scale=gate_scale,
                up_offset=up_offset,
            )
        accept(key, gate)
    options = activation, gate_first, interleaved, limit, limit_on, alpha, gate_scale, up_offset
    return apply(_GLU, gate, up, *kernel_options(*options))


@op(reference=glu_reference, supports=_supports)
def glu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    activation: str = "silu",
    gate_first: bool = True,
    interleaved: bool = False,
    limit: float | None = None,
    limit_on: LimitOn = "gate",
    alpha: float = 1.0,
    gate_scale: float = 1.0,
    up_offset: float = 0.0,
) -> Tensor:
    """Activated gate times `up`, for two tensors or two in one.

        y = act(gate) * up      # the reference, in one line

    Args:
        gate: `[..., I]`, floating point, any strides; `[..., 2I]` with both when `up` is None.
        up: `[..., I]`, the shape of `gate`, or None.
        activation: "silu", "gelu" (with erf), "gelu_tanh", "relu", "relu2" (its square), "sigmoid", "identity".
        gate_first: of packed halves or neighbours, whether the first is the gate.
        interleaved: the packed tensor holds gate and up in turns, `gate[..., 0::2]` and `gate[..., 1::2]`, rather
            than in halves.
        limit: `up` is clamped to [-limit, limit], and what `limit_on` says to at most `limit`; None or inf for no
            limit. Gradients are zero beyond it.
        limit_on: what the upper limit applies to besides `up`: "gate" or the "activation" of it.
        alpha: the activation becomes `act(alpha * gate) / alpha`: with silu, `gate * sigmoid(alpha * gate)`.
        gate_scale: factor of the gate inside the activation, after its limit.
        up_offset: added to `up` after its limit.

    Returns:
        `[..., I]` in the promoted dtype of `gate` and `up`.

    Raises:
        ValueError: shapes or devices disagree, a packed axis is odd, or an option is unknown or out of range.

    Numerics: computed in fp32 and rounded once; model code that rounds the activation first is less exact.
    Memory:   saves the inputs; those in a packed tensor are read in place and their gradient is one tensor. Where
              nothing but this operator holds an input any more, its gradient is written over it.
    Differs from the reference: never in formula; in the last bits of exp and erf.
    Source: Shazeer 2020, arXiv:2002.05202.
    """
    require_options("glu", activation, limit, limit_on, alpha)
    return _glu("glu", gate, up, activation, gate_first, interleaved, limit, limit_on, alpha, gate_scale, up_offset)


@op(reference=swiglu_reference, supports=_supports)
def swiglu(gate: Tensor, up: Tensor | None = None, *, gate_first: bool = True) -> Tensor:
    """`silu(gate) * up`: `glu` with its default activation.

        y = F.silu(gate) * up      # the reference, in one line

    Args:
        gate: `[..., I]`, floating point, any strides; `[..., 2I]` with both halves when `up` is None.
        up: `[..., I]`, the shape of `gate`, or None.
        gate_first: of packed halves, whether the first is the gate.

    Returns:
        `[..., I]` in the promoted dtype of `gate` and `up`.

    Raises:
        ValueError: shapes or devices disagree, or a packed axis is odd.

    Numerics, memory, difference from the reference and source are those of `glu`.
    """
    return _glu("swiglu", gate, up, "silu", gate_first)


@op(reference=geglu_reference, supports=_supports)
def geglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    approximate: Literal["tanh", "none"] = "tanh",
    gate_first: bool = True,
) -> Tensor:
    """`gelu(gate) * up`: `glu` with one of the two forms of gelu.

        y = F.gelu(gate, approximate=approximate) * up      # the reference, in one line

    Args:
        gate: `[..., I]`, floating point, any strides; `[..., 2I]` with both halves when `up` is None.
        up: `[..., I]`, the shape of `gate`, or None.
        approximate: "tanh", or "none" for the exact form with erf. They differ by up to 4.7e-4.
        gate_first: of packed halves, whether the first is the gate.

    Returns:
        `[..., I]` in the promoted dtype of `gate` and `up`.

    Raises:
        ValueError: shapes or devices disagree, a packed axis is odd, or `approximate` is unknown.

    Numerics, memory, difference from the reference and source are those of `glu`.
    """
    require_one_of("geglu", "approximate", approximate, tuple(GELUS))
    return _glu("geglu", gate, up, GELUS[approximate], gate_first)
