"""RMS norm, both projections of a gated unit and their product in one launch, for few rows.

A program has some columns of gate and of up for all rows. It multiplies what is not normalised yet, `x * norm_weight`,
and adds up the squares of `x` on the way: `1 / rms` is a factor of a row, which the sums over D can be given at the
end. Every program reads all of `x` and finds the same `rstd`, which is little beside the weights as long as there are
few rows; with more, a kernel for the norm is cheaper than finding it again and again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._launch import cdiv, launch, next_power_of_2
from ._triton import INTERPRETED, tl, triton
from .glu import ACTIVATIONS, _activate, _limit_up

# Beyond, the statistics that each program finds again cost more than a launch.
MAX_ROWS = 128


# ---- kernels ----


@triton.jit
def _norm_glu_fwd_kernel(
    x_ptr,
    norm_weight_ptr,
    gate_weight_ptr,
    gate_bias_ptr,
    up_weight_ptr,
    up_bias_ptr,
    product_ptr,
    gate_ptr,
    up_ptr,
    rstd_ptr,
    x_stride,
    gate_weight_stride,
    up_weight_stride,
    kept_stride,
    num_rows,
    num_cols,
    num_out,
    eps,
    offset,
    limit,
    gate_factor,
    act_factor,
    up_offset,
    ACTIVATION: tl.constexpr,
    LIMITS_GATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program for BLOCK_N columns of each, and all rows."""
    rows = tl.arange(0, BLOCK_M)[:, None]
    first = tl.program_id(0).to(tl.int64) * BLOCK_N
    lines = first + tl.arange(0, BLOCK_N)[None, :]
    x_rows = x_ptr + rows.to(tl.int64) * x_stride
    gate_lines, up_lines = gate_weight_ptr + lines * gate_weight_stride, up_weight_ptr + lines * up_weight_stride
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for start in tl.range(0, num_cols, BLOCK_K, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_K)
        across, down = cols[None, :], cols[:, None]
        x = tl.load(x_rows + across, mask=(rows < num_rows) & (across < num_cols), other=0.0).to(tl.float32)
        squares += tl.sum(x * x, 1)
        scale = offset + tl.zeros((BLOCK_K,), tl.float32)
        if norm_weight_ptr is not None:
            scale += tl.load(norm_weight_ptr + cols, mask=cols < num_cols, other=0.0).to(tl.float32)
            x *= scale[None, :]
        mask = (lines < num_out) & (down < num_cols)
        a = x.to(gate_weight_ptr.dtype.element_ty)
        w = tl.load(gate_lines + down, mask=mask, other=0.0)
        gate = tl.dot(a, w, gate, input_precision="ieee")
        w = tl.load(up_lines + down, mask=mask, other=0.0)
        up = tl.dot(a, w, up, input_precision="ieee")
    rstd = 1.0 / tl.sqrt(squares / num_cols + eps)
    if first == 0:
        index = tl.arange(0, BLOCK_M)
        tl.store(rstd_ptr + index, rstd, mask=index < num_rows)
    gate *= rstd[:, None]
    up *= rstd[:, None]
    if gate_bias_ptr is not None:
        gate += tl.load(gate_bias_ptr + lines, mask=lines < num_out, other=0.0).to(tl.float32)
    if up_bias_ptr is not None:
        up += tl.load(up_bias_ptr + lines, mask=lines < num_out, other=0.0).to(tl.float32)
    # Rounded as products of their own would be.
    gate = gate.to(product_ptr.dtype.element_ty)
    up = up.to(product_ptr.dtype.element_ty)
    mask = (rows < num_rows) & (lines < num_out)
    if gate_ptr is not None:
        tl.store(gate_ptr + rows.to(tl.int64) * kept_stride + lines, gate, mask=mask)
        tl.store(up_ptr + rows.to(tl.int64) * kept_stride + lines, up, mask=mask)
    act, _ = _activate(gate.to(tl.float32), limit, gate_factor, act_factor, ACTIVATION, LIMITS_GATE)
    product = act * _limit_up(up.to(tl.float32), limit, up_offset)
    tl.store(product_ptr + rows.to(tl.int64) * num_out + lines, product, mask=mask)


# ---- launch ----


def can_project_few(x: Tensor, dtype: torch.dtype, *weights: Tensor) -> bool:
    """True where `project_few` does these rows and weights.

    fp16 has no room for rows before they are normalised, and in fp32 a matrix product of torch is faster.
    """
    is_known = dtype == torch.bfloat16 or (INTERPRETED and dtype == torch.float32)
    if not is_known or not 0 < x.shape[0] <= MAX_ROWS or not x.is_floating_point() or x.numel() == 0:
        return False
    return all(t.dtype == dtype and t.stride(1) == 1 for t in (x, *weights)) and weights[0].numel() > 0


def project_few(
    x: Tensor,
    norm_weight: Tensor | None,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor | None,
    gate: Tensor | None,
    up: Tensor | None,
    product: Tensor,
    rstd: Tensor,
    eps: float,
    offset: float,
    activation: str,
    limit: float | None,
    limit_on: str,
    gate_factor: float | None,
    act_factor: float | None,
    up_offset: float | None,
) -> None:
    """For `x` `[M, D]` fill `product` `[M, I]`, `rstd` `[M]`, and `gate` and `up`, if any, of one row stride."""
    num_rows, num_cols = x.shape
    num_out = gate_weight.shape[0]
    block_m = max(16, next_power_of_2(num_rows))
    # The same shared memory in all: 96 KiB of 16 bits at most.
    block_n, block_k, stages = (32, 128, 4) if block_m <= 32 else (64, 64, 4) if block_m == 64 else (64, 64, 3)
    launch(
        _norm_glu_fwd_kernel,
        (cdiv(num_out, block_n),),
        x,
        norm_weight,
        gate_weight,
        gate_bias,
        up_weight,
        up_bias,
        product,
        gate,
        up,
        rstd,
        x.stride(0),
        gate_weight.stride(0),
        up_weight.stride(0),
        0 if gate is None else gate.stride(0),
        num_rows,
        num_cols,
        num_out,
        eps,
        offset,
        limit,
        gate_factor,
        act_factor,
        up_offset,
        ACTIVATION=ACTIVATIONS[activation].kernel,
        LIMITS_GATE=limit is not None and limit_on == "gate",
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        STAGES=stages,
        num_warps=4 if block_m <= 64 else 8,
    )
