"""Gated linear unit: an activated gate times a second tensor.

    y = act(gate) * up

Gradient:

    dgate = dy * up * act'(gate)
    dup = dy * act(gate)

M rows (all leading axes), I columns. `gate` and `up` are two tensors or the halves of one packed `[..., 2I]`,
whose gradient is packed too. Saved for backward: the inputs, so that nothing but y is new.
Source: Shazeer 2020, arXiv:2002.05202.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _tl
from ._check import require, require_floating, require_one_of, require_same_device
from ._launch import as_rows, cdiv, launch, next_power_of_2
from ._op import define, once_differentiable, op, runs_reference
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
# What `approximate` of `geglu` selects, with the values of torch.nn.functional.gelu.
GELUS = {"tanh": "gelu_tanh", "none": "gelu"}


# ---- reference ----


def glu_reference(
    gate: Tensor, up: Tensor | None = None, *, activation: str = "silu", gate_first: bool = True
) -> Tensor:
    gate, up = _split(gate, up, gate_first)
    dtype = torch.promote_types(gate.dtype, up.dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (ACTIVATIONS[activation].reference(gate.to(wide)) * up.to(wide)).to(dtype)


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


def _split(gate: Tensor, up: Tensor | None, gate_first: bool) -> tuple[Tensor, Tensor]:
    """Gate and up; without `up` they are views of the halves of `gate`."""
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, -1)
    return (first, second) if gate_first else (second, first)


# ---- kernels ----


@triton.jit
def _tile(num_rows, num_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows, columns and mask of this program's tile; the tiles of one row are neighbours."""
    num_col_tiles = tl.cdiv(num_cols, BLOCK_N)
    rows = (tl.program_id(0) // num_col_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (tl.program_id(0) % num_col_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    return rows[:, None], cols[None, :], (rows < num_rows)[:, None] & (cols < num_cols)[None, :]


@triton.jit
def _glu_fwd_kernel(
    gate_ptr,
    up_ptr,
    y_ptr,
    gate_stride,
    up_stride,
    num_rows,
    num_cols,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per tile."""
    rows, cols, mask = _tile(num_rows, num_cols, BLOCK_M, BLOCK_N)
    gate = tl.load(gate_ptr + rows * gate_stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + rows * up_stride + cols, mask=mask, other=0.0).to(tl.float32)
    act, _ = ACTIVATION(gate)
    tl.store(y_ptr + rows * num_cols + cols, act * up, mask=mask)


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
    ACTIVATION: tl.constexpr,
    NEEDS_DGATE: tl.constexpr,
    NEEDS_DUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per tile."""
    rows, cols, mask = _tile(num_rows, num_cols, BLOCK_M, BLOCK_N)
    # All three are dead after this read.
    dy = tl.load(dy_ptr + rows * dy_stride + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    gate = tl.load(gate_ptr + rows * gate_stride + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(
        tl.float32
    )
    act, slope = ACTIVATION(gate)
    if NEEDS_DGATE:
        up = tl.load(up_ptr + rows * up_stride + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(
            tl.float32
        )
        tl.store(dgate_ptr + rows * dgate_stride + cols, dy * up * slope, mask=mask)
    if NEEDS_DUP:
        tl.store(dup_ptr + rows * dup_stride + cols, dy * act, mask=mask)


# ---- operators ----

# Elements of a tile: 8 a thread of 4 warps, which is one 16-byte access of a 16-bit dtype.
_TILE = 1024
# Longest row whose column numbers stay in int32, the last tile's masked lanes included.
_MAX_COLS = 2**31 - _TILE


def _blocks(num_cols: int) -> tuple[int, int]:
    """BLOCK_M, BLOCK_N."""
    block_n = min(next_power_of_2(num_cols), _TILE)
    return _TILE // block_n, block_n


def _as_matrices(*tensors: Tensor) -> list[Tensor]:
    """Tensors of one shape or empty as `[M, N]` with unit column stride, as one long row where all are contiguous.

    One long row has no row ends, so odd widths neither waste lanes nor break the alignment of vector loads.
    """
    if tensors[0].numel() <= _MAX_COLS and all(t.is_contiguous() for t in tensors):
        return [t.view(1, t.numel()) for t in tensors]
    return [as_rows(t) for t in tensors]


def _fake_fwd(gate: Tensor, up: Tensor | None, activation: str, gate_first: bool) -> Tensor:
    if up is None:
        return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


@define("glu_fwd(Tensor gate, Tensor? up, str activation, bool gate_first) -> Tensor", fake=_fake_fwd)
def _fwd(gate: Tensor, up: Tensor | None, activation: str, gate_first: bool) -> Tensor:
    y = _fake_fwd(gate, up, activation, gate_first)
    gate, up = _as_matrices(*_split(gate, up, gate_first))
    num_rows, num_cols = gate.shape
    block_m, block_n = _blocks(num_cols)
    launch(
        _glu_fwd_kernel,
        (cdiv(num_rows, block_m) * cdiv(num_cols, block_n),),
        gate,
        up,
        y,
        gate.stride(0),
        up.stride(0),
        num_rows,
        num_cols,
        ACTIVATION=ACTIVATIONS[activation].kernel,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4,
    )
    return y


def _fake_bwd(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    gate_first: bool,
    needs_dgate: bool,
    needs_dup: bool,
) -> tuple[Tensor, Tensor]:
    dgate = gate.new_empty(gate.shape if needs_dgate else (0,))
    return dgate, gate.new_empty(0) if up is None else up.new_empty(up.shape if needs_dup else (0,))


@define(
    "glu_bwd(Tensor dy, Tensor gate, Tensor? up, str activation, bool gate_first, bool needs_dgate,"
    " bool needs_dup) -> (Tensor, Tensor)",
    fake=_fake_bwd,
)
def _bwd(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    gate_first: bool,
    needs_dgate: bool,
    needs_dup: bool,
) -> tuple[Tensor, Tensor]:
    out = _fake_bwd(dy, gate, up, activation, gate_first, needs_dgate, needs_dup)
    dgate, dup = out
    if up is None:
        needs_dup = needs_dgate
        dgate, dup = _split(dgate, None, gate_first)
    gate, up = _split(gate, up, gate_first)
    gate, up, dy, dgate, dup = _as_matrices(gate, up, dy, dgate, dup)
    num_rows, num_cols = gate.shape
    block_m, block_n = _blocks(num_cols)
    launch(
        _glu_bwd_kernel,
        (cdiv(num_rows, block_m) * cdiv(num_cols, block_n),),
        gate,
        up,
        dy,
        dgate,
        dup,
        gate.stride(0),
        up.stride(0),
        dy.stride(0),
        dgate.stride(0),
        dup.stride(0),
        num_rows,
        num_cols,
        ACTIVATION=ACTIVATIONS[activation].kernel,
        NEEDS_DGATE=needs_dgate,
        NEEDS_DUP=needs_dup,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4,
    )
    return out


# ---- autograd ----


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, activation: str, gate_first: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation, ctx.gate_first = activation, gate_first
        return _fwd(gate, up, activation, gate_first)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        needs_dgate, needs_dup = ctx.needs_input_grad[:2]
        dgate, dup = _bwd(dy, gate, up, ctx.activation, ctx.gate_first, needs_dgate, needs_dup)
        return dgate if needs_dgate else None, dup if needs_dup else None, None, None


# ---- public ----


def _supports(gate: Tensor, up: Tensor | None = None, **_: Any) -> list[str]:
    if any(t is not None and t.dtype == torch.float64 for t in (gate, up)):
        return ["float64 is computed by the reference"]
    return []


def _glu(name: str, gate: Tensor, up: Tensor | None, activation: str, gate_first: bool) -> Tensor:
    require_floating(name, gate=gate, up=up)
    require(gate.dim() >= 1, name, "gate", "at least one axis", "a scalar")
    if up is None:
        require(gate.shape[-1] % 2 == 0, name, "gate", "an even last axis, as up is None", tuple(gate.shape))
    else:
        require(up.shape == gate.shape, name, "up", f"shape {tuple(gate.shape)}", tuple(up.shape))
        require(gate_first, name, "gate_first", "True when up is given", gate_first)
    require_same_device(name, gate=gate, up=up)
    if runs_reference(name, gate, up):
        return glu_reference(gate, up, activation=activation, gate_first=gate_first)
    return _GLU.apply(gate, up, activation, gate_first)


@op(reference=glu_reference, supports=_supports)
def glu(gate: Tensor, up: Tensor | None = None, *, activation: str = "silu", gate_first: bool = True) -> Tensor:
    """Activated gate times `up`, for two tensors or the two halves of one.

        y = act(gate) * up      # the reference, in one line

    Args:
        gate: `[..., I]`, floating point, any strides; `[..., 2I]` with both halves when `up` is None.
        up: `[..., I]`, the shape of `gate`, or None.
        activation: "silu", "gelu" (with erf), "gelu_tanh", "relu", "relu2" (its square), "sigmoid", "identity".
        gate_first: of packed halves, whether the first is the gate.

    Returns:
        `[..., I]` in the promoted dtype of `gate` and `up`.

    Raises:
        ValueError: shapes or devices disagree, a packed axis is odd, or `activation` is unknown.

    Numerics: computed in fp32 and rounded once; model code that rounds the activation first is less exact.
    Memory:   saves the inputs; halves of a packed tensor are read in place and their gradient is one tensor.
    Differs from the reference: never in formula; in the last bits of exp and erf.
    Source: Shazeer 2020, arXiv:2002.05202.
    """
    require_one_of("glu", "activation", activation, tuple(ACTIVATIONS))
    return _glu("glu", gate, up, activation, gate_first)


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
