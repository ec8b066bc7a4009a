"""A linear layer with a weight of 4 bits and a low-rank adapter.

    y = x @ weight.T + bias + scaling * drop(x) @ lora_a.T @ lora_b.T    (weight as in _nf4, drop as in lora_linear)

Gradient: that of `lora_linear` for x and the adapter; the weight is frozen.

Forward and backward each make the weight anew, for their product alone, in `compute_dtype`.

M rows (all leading axes), K columns of x, N of y, R the rank. Saved for backward: x, low (R numbers a row), the packed
weight.
Source: Dettmers et al. 2023, arXiv:2305.14314.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._check import require, require_floating, require_same_device
from ._nf4 import Scales, dequantize_nf4_reference, dequantized, require_nf4
from ._op import apply, as_output, autocast_dtype, once_differentiable, op, runs_reference
from ._projection import shared_matmul_dtype
from .lora_linear import (
    _added,
    _low,
    _seed_for,
    adapter_gradients,
    adapter_reference,
    input_gradient,
    require_adapter,
    sum_with_low,
)

# ---- reference ----


def nf4_lora_linear_reference(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    *,
    bias: Tensor | None = None,
    block_size: int = 64,
    nested_absmax: Tensor | None = None,
    nested_code: Tensor | None = None,
    nested_offset: Tensor | None = None,
    nested_block_size: int = 256,
    compute_dtype: torch.dtype | None = None,
    scaling: float = 1.0,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    dtype = _compute_dtype(x, compute_dtype)
    scales = Scales(absmax, block_size, nested_absmax, nested_code, nested_offset, nested_block_size)
    weight = dequantize_nf4_reference(packed, scales, (lora_b.shape[0], x.shape[-1]), dtype)
    y = F.linear(x.to(dtype), weight, None if bias is None else bias.to(dtype)).to(x.dtype)
    return (y + adapter_reference(x, lora_a, lora_b, scaling, dropout, seed)).to(y.dtype)


def _compute_dtype(x: Tensor, asked: torch.dtype | None) -> torch.dtype:
    """The dtype of the product with the weight."""
    if x.dtype == torch.float64:
        return x.dtype
    return asked or autocast_dtype(x.device.type) or x.dtype


# ---- kernels ----

# Those of _nf4 and lora_linear, and the matrix products of torch.

# ---- operators ----


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor, lora_b: Tensor, dtype: torch.dtype) -> Tensor:
    """`x @ weight.T + bias + low @ lora_b.T` in `dtype`, to which the product with the weight is rounded first."""
    if dtype == x.dtype:
        return sum_with_low(x, weight, bias, low, lora_b)
    return _added(F.linear(x, weight, bias).to(dtype), low, lora_b.t())


def _input_gradient(
    dy: Tensor, weight: Tensor, dlow: Tensor, lora_a: Tensor, seed: Tensor | None, dropout: float
) -> Tensor:
    """`dy @ weight + drop(dlow @ lora_a)` in the dtype of `dy`."""
    if dy.dtype == weight.dtype:
        return input_gradient(dy, weight, dlow, lora_a, seed, dropout)
    return _added(torch.mm(dy.to(weight.dtype), weight).to(dy.dtype), dlow, lora_a, seed, dropout)


# ---- autograd ----


class _NF4LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        packed: Tensor,
        absmax: Tensor,
        nested_absmax: Tensor | None,
        nested_code: Tensor | None,
        nested_offset: Tensor | None,
        bias: Tensor | None,
        lora_a: Tensor,
        lora_b: Tensor,
        seed: Tensor | None,
        block_size: int,
        nested_block_size: int,
        dtype: torch.dtype,
        low_dtype: torch.dtype,
        scaling: float,
        dropout: float,
    ) -> Tensor:
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        cast = rows.to(dtype)
        # What is dropped out is scaled before it is rounded.
        seen = cast if dropout == 0 and low_dtype == dtype else rows
        low, _ = _low(seen, lora_a.to(low_dtype).t(), None, seed, scaling, dropout, False, dtype)
        scales = Scales(absmax, block_size, nested_absmax, nested_code, nested_offset, nested_block_size)
        weight = dequantized(packed, scales, (lora_b.shape[0], x.shape[-1]), dtype)
        y = _product(cast, weight, None if bias is None else bias.to(dtype), low, lora_b.to(low_dtype), x.dtype)
        needs_dx, needs_da, needs_db = (ctx.needs_input_grad[i] for i in (0, 7, 8))
        ctx.save_for_backward(
            x if needs_da else None,
            lora_a if needs_dx else None,
            lora_b if needs_dx or needs_da else None,
            low if needs_db else None,
            seed,
            *((packed, absmax, nested_absmax, nested_code, nested_offset) if needs_dx else (None,) * 5),
        )
        ctx.options = dtype, low_dtype, scaling, dropout, x.shape, block_size, nested_block_size
        ctx.dtypes = None if bias is None else bias.dtype, lora_a.dtype, lora_b.dtype
        return as_output(y, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, lora_a, lora_b, low, seed, packed, absmax, *nested = ctx.saved_tensors
        dtype, low_dtype, scaling, dropout, shape, block_size, nested_block_size = ctx.options
        bias_dtype, a_dtype, b_dtype = ctx.dtypes
        needs_dx, needs_dbias, needs_da, needs_db = (ctx.needs_input_grad[i] for i in (0, 6, 7, 8))
        dy = dy.reshape(math.prod(dy.shape[:-1]), dy.shape[-1])
        rows = None if x is None else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        needs = needs_dx, needs_da, needs_db
        dlow, da, db = adapter_gradients(
            dy, rows, lora_b, low, seed, low_dtype, scaling, dropout, needs, a_dtype, b_dtype
        )
        dx = dbias = None
        if needs_dx:
            scales = Scales(absmax, block_size, *nested, nested_block_size)
            weight = dequantized(packed, scales, (dy.shape[1], shape[-1]), dtype)
            dx = _input_gradient(dy, weight, dlow, lora_a.to(low_dtype), seed, dropout).view(shape)
        if needs_dbias:
            # torch adds 16-bit numbers in fp32.
            dbias = dy.sum(0).to(bias_dtype)
        return dx, None, None, None, None, None, dbias, da, db, None, None, None, None, None, None, None


# ---- public ----


def _supports(
    x: Tensor, packed: Tensor, absmax: Tensor, lora_a: Tensor, lora_b: Tensor, *, bias: Tensor | None = None, **_: Any
) -> list[str]:
    if any(t is not None and t.dtype == torch.float64 for t in (x, absmax, lora_a, lora_b, bias)):
        return ["float64 is computed by the reference"]
    return []


@op(reference=nf4_lora_linear_reference, supports=_supports)
def nf4_lora_linear(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    *,
    bias: Tensor | None = None,
    block_size: int = 64,
    nested_absmax: Tensor | None = None,
    nested_code: Tensor | None = None,
    nested_offset: Tensor | None = None,
    nested_block_size: int = 256,
    compute_dtype: torch.dtype | None = None,
    scaling: float = 1.0,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """A linear layer with a frozen weight of 4 bits (NF4), and a low-rank adapter that learns.

        y = lora_linear(x, dequantize_nf4(packed, absmax, (N, K), ...), lora_a, lora_b, ...)     # the reference

    Args:
        x: `[..., K]`, floating point, any strides.
        packed, absmax, block_size, nested_absmax, nested_code, nested_offset, nested_block_size: the weight `[N, K]`,
            as in `dequantize_nf4`.
        lora_a: `[R, K]`, of any rank and any floating dtype, in which `x` is multiplied with it.
        lora_b: `[N, R]`, same dtype as `lora_a`.
        bias: `[N]`, or None.
        compute_dtype: of the product with the weight, which is then rounded to the dtype of `x`; None for that of
            autocast, or of `x`.
        scaling, dropout, seed: as in `lora_linear`.

    Returns:
        `[..., N]` in the dtype of `x`.

    Raises:
        ValueError: shapes, dtypes or devices disagree, or an option is out of range.

    Numerics: those of `dequantize_nf4` and `lora_linear`.
    Memory:   saves `x` and R numbers a row; the weight of `compute_dtype` is there for one product at a time, in
              forward and, where `x` gets a gradient, again in backward.
    Differs from the reference: never in formula; in the order of sums.
    Source: Dettmers et al. 2023, arXiv:2305.14314.
    """
    name = "nf4_lora_linear"
    require_floating(name, x=x, lora_a=lora_a, lora_b=lora_b, bias=bias)
    require(x.dim() >= 1, name, "x", "at least one axis", "a scalar")
    require_adapter(name, x, lora_b.shape[0], lora_a, lora_b, bias, scaling, dropout, seed)
    scales = Scales(absmax, block_size, nested_absmax, nested_code, nested_offset, nested_block_size)
    require_nf4(name, packed, scales, lora_b.shape[0] * x.shape[-1])
    require_same_device(name, x=x, packed=packed)
    low_dtype = shared_matmul_dtype(name, "lora_a", lora_a.dtype, lora_b=lora_b)
    if dropout == 0:
        seed = None
    elif seed is None:
        seed = _seed_for(x)
    if runs_reference(name, x, packed, absmax, lora_a, lora_b, bias=bias):
        return nf4_lora_linear_reference(
            x,
            packed,
            absmax,
            lora_a,
            lora_b,
            bias=bias,
            block_size=block_size,
            nested_absmax=nested_absmax,
            nested_code=nested_code,
            nested_offset=nested_offset,
            nested_block_size=nested_block_size,
            compute_dtype=compute_dtype,
            scaling=scaling,
            dropout=dropout,
            seed=seed,
        )
    sizes = block_size, nested_block_size, _compute_dtype(x, compute_dtype), low_dtype
    nested = nested_absmax, nested_code, nested_offset
    return apply(
        _NF4LoraLinear, x, packed, absmax, *nested, bias, lora_a, lora_b, seed, *sizes, float(scaling), float(dropout)
    )
