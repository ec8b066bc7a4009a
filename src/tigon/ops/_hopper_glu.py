"""Both projections of a gated unit and their product in one kernel, and backward through it (compute capability 9.0).

A tile has 128 columns of gate and the same of up in the registers of the same threads; what the two give, rounded as
a product of its own would be, goes to memory only if it is wanted there. In backward a tile is one of the gradient of
the product, which never reaches memory; gate and up come while the ones before are computed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._gluon import gl, gluon
from ._hopper import ask, can_multiply, halves, multiply, no_prologue, put, receive
from .glu import ACTIVATIONS, _activate, _limit_dup, _limit_up

# ---- kernels ----


@gluon.jit
def _reciprocal(x):
    """Within an ulp or two, by one instruction."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _silu_and_slope(x):
    """What `_tl.silu_and_slope` gives, for results of 16 bits: half the instructions, of which no product hides any."""
    s = _reciprocal(1.0 + gl.exp2(x * -1.4426950408889634))
    return x * s, s + x * (s - s * s)


@gluon.jit
def _with_bias(x, bias_ptr, col, num_cols):
    if bias_ptr is not None:
        cols = col + gl.arange(0, 64, gl.SliceLayout(0, x.type.layout))
        x += gl.expand_dims(gl.load(bias_ptr + cols, mask=cols < num_cols, other=0.0).to(gl.float32), 0)
    return x


@gluon.jit
def _part(
    gate,
    up,
    row,
    col,
    own,
    outs,
    args,
    WHICH: gl.constexpr,
    ACTIVATION: gl.constexpr,
    LIMITS_GATE: gl.constexpr,
):
    """64 columns of each."""
    product_desc, gate_desc, up_desc = outs
    gate_bias_ptr, up_bias_ptr, num_cols, limit, gate_factor, act_factor, up_offset = args
    dtype: gl.constexpr = product_desc.dtype
    gate = _with_bias(gate, gate_bias_ptr, col, num_cols).to(dtype)
    up = _with_bias(up, up_bias_ptr, col, num_cols).to(dtype)
    if gate_desc is not None:
        put(gate, own, WHICH, gate_desc, row, col)
        put(up, own, 1 - WHICH, up_desc, row, col)
    act, _ = _activate(gate.to(gl.float32), limit, gate_factor, act_factor, ACTIVATION, LIMITS_GATE)
    product = act * _limit_up(up.to(gl.float32), limit, up_offset)
    put(product, own, WHICH, product_desc, row, col)


@gluon.jit
def _glu_epilogue(acc, row, n, loaded, own, ins, outs, args, FUNCTION: gl.constexpr, FLAG: gl.constexpr):
    gate, up = halves(acc)
    gate0, gate1 = halves(gate)
    up0, up1 = halves(up)
    _part(gate0, up0, row, n * 128, own, outs, args, 0, FUNCTION, FLAG)
    _part(gate1, up1, row, n * 128 + 64, own, outs, args, 1, FUNCTION, FLAG)


@gluon.jit
def _glu_bwd_prologue(row, n, layout: gl.constexpr, own, ins, args):
    ask(own, ins, row, n * 256)
    return row


@gluon.jit
def _gradient_part(
    dproduct, row, col, own, ins, outs, args, INDEX: gl.constexpr, ACTIVATION: gl.constexpr, LIMITS_GATE: gl.constexpr
):
    """64 columns; what the next ones need is on its way meanwhile."""
    product_desc, dgate_desc, dup_desc = outs
    limit, gate_factor, act_factor, up_offset = args
    gate, up = receive(own, INDEX % 2, dproduct)
    if INDEX < 3:
        ask(own, ins, row, col + 64)
    up = up.to(gl.float32)
    act, slope = _activate(gate.to(gl.float32), limit, gate_factor, act_factor, ACTIVATION, LIMITS_GATE)
    shifted = _limit_up(up, limit, up_offset)
    # As a product of its own would be rounded.
    dproduct = dproduct.to(gate.dtype).to(gl.float32)
    put(dproduct * shifted * slope, own, 0, dgate_desc, row, col)
    dup = dproduct * act
    if limit is not None:
        dup = _limit_dup(dup, up, limit)
    put(dup, own, 1, dup_desc, row, col)
    put(act * shifted, own, 2, product_desc, row, col)


@gluon.jit
def _glu_bwd_epilogue(acc, row, n, loaded, own, ins, outs, args, FUNCTION: gl.constexpr, FLAG: gl.constexpr):
    left, right = halves(acc)
    x0, x1 = halves(left)
    x2, x3 = halves(right)
    _gradient_part(x0, row, n * 256, own, ins, outs, args, 0, FUNCTION, FLAG)
    _gradient_part(x1, row, n * 256 + 64, own, ins, outs, args, 1, FUNCTION, FLAG)
    _gradient_part(x2, row, n * 256 + 128, own, ins, outs, args, 2, FUNCTION, FLAG)
    _gradient_part(x3, row, n * 256 + 192, own, ins, outs, args, 3, FUNCTION, FLAG)


# ---- launch ----


def can_project(n: Tensor, gate_weight: Tensor, up_weight: Tensor) -> bool:
    """True where `project_glu` does these."""
    return gate_weight.shape[0] % 8 == 0 and can_multiply(n, gate_weight, up_weight)


def can_unproject(dy: Tensor, down_weight: Tensor, gate: Tensor, up: Tensor | None) -> bool:
    """True where `unproject_glu` does these, `gate` and `up` being contiguous, or `gate` both side by side."""
    is_known = all(t is None or (t.is_contiguous() and t.dtype == dy.dtype) for t in (gate, up))
    return is_known and down_weight.shape[1] % 8 == 0 and can_multiply(dy, down_weight)


def _function(activation: str) -> Any:
    return _silu_and_slope if activation == "silu" else ACTIVATIONS[activation].kernel


def project_glu(
    n: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor | None,
    gate: Tensor | None,
    up: Tensor | None,
    product: Tensor,
    activation: str,
    limit: float | None,
    limit_on: str,
    gate_factor: float | None,
    act_factor: float | None,
    up_offset: float | None,
) -> None:
    """Fill `product`, and `gate` and `up` if there are any, all `[M, I]` of unit column stride."""
    args = gate_bias, up_bias, gate_weight.shape[0], limit, gate_factor, act_factor, up_offset
    multiply(
        n,
        gate_weight,
        up_weight,
        (product, gate, up),
        args,
        no_prologue,
        _glu_epilogue,
        function=_function(activation),
        flag=limit is not None and limit_on == "gate",
    )


def unproject_glu(
    dy: Tensor,
    down_weight: Tensor,
    gate: Tensor,
    up: Tensor,
    dgate: Tensor,
    dup: Tensor,
    product: Tensor,
    activation: str,
    limit: float | None,
    limit_on: str,
    gate_factor: float | None,
    act_factor: float | None,
    up_offset: float | None,
) -> None:
    """Fill `dgate` and `dup`, for the gradient `dy @ down_weight` of the product, and `product`, all `[M, I]`.

    `dgate` and `dup` may be `gate` and `up`: what a tile reads is read before it is written.
    """
    args = limit, gate_factor, act_factor, up_offset
    multiply(
        dy,
        down_weight,
        None,
        (product, dgate, dup),
        args,
        _glu_bwd_prologue,
        _glu_bwd_epilogue,
        ins=(gate, up),
        function=_function(activation),
        flag=limit is not None and limit_on == "gate",
        transposed=True,
    )
