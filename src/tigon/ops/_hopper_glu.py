"""Both projections of a gated unit and their product in one kernel (compute capability 9.0).

A tile has 128 columns of gate and the same of up in the registers of the same threads; what the two give, rounded as
a product of its own would be, goes to memory only if it is wanted there.
"""

from __future__ import annotations

from torch import Tensor

from ._gluon import gl, gluon
from ._hopper import can_multiply, halves, multiply, no_prologue, put
from .glu import ACTIVATIONS, _activate, _limit_up

# ---- kernels ----


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
    staging,
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
        put(gate, staging, WHICH, gate_desc, row, col)
        put(up, staging, 1 - WHICH, up_desc, row, col)
    act, _ = _activate(gate.to(gl.float32), limit, gate_factor, act_factor, ACTIVATION, LIMITS_GATE)
    product = act * _limit_up(up.to(gl.float32), limit, up_offset)
    put(product, staging, WHICH, product_desc, row, col)


@gluon.jit
def _glu_epilogue(acc, row, n, loaded, staging, outs, args, FUNCTION: gl.constexpr, FLAG: gl.constexpr):
    gate, up = halves(acc)
    gate0, gate1 = halves(gate)
    up0, up1 = halves(up)
    _part(gate0, up0, row, n * 128, staging, outs, args, 0, FUNCTION, FLAG)
    _part(gate1, up1, row, n * 128 + 64, staging, outs, args, 1, FUNCTION, FLAG)


# ---- launch ----


def can_project(n: Tensor, gate_weight: Tensor, up_weight: Tensor) -> bool:
    """True where `project_glu` does these."""
    return gate_weight.shape[0] % 8 == 0 and can_multiply(n, gate_weight, up_weight)


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
        function=ACTIVATIONS[activation].kernel,
        flag=limit is not None and limit_on == "gate",
    )
