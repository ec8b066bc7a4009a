"""A gated MLP with the norm before it: RMS normalisation, two projections, their gated product, the projection back.

    p = rms_norm_glu(x)                                   (norm, gate, up and product as there)
    y = p @ down_weight.T + down_bias                     (+ x with the residual)

Gradient:

    dp = dy @ down_weight
    ddown_weight = dy.T @ p,   ddown_bias = sum over rows of dy
    dx, dnorm_weight and those of gate and up as in rms_norm_glu for dp      (dx + dy with the residual)

Backward computes p again in the kernel that writes dgate and dup over gate and up, and over dp; then the norm.

M rows (all leading axes), D columns of x and y, I of p. Saved for backward: x, rstd (4 bytes a row), gate, up, the
weights; with `recompute` neither gate nor up.
Source: Zhang & Sennrich 2019, arXiv:1910.07467; Shazeer 2020, arXiv:2002.05202; Chen et al. 2016, arXiv:1604.06174.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._check import require, require_floating, require_same_device
from ._op import as_output, is_traced, once_differentiable, op, runs_reference
from ._projection import shared_matmul_dtype
from ._reuse import claim, release, save_for_reuse
from .glu import LimitOn, kernel_options, require_options
from .glu import _fwd as _product
from .rms_norm import Cast
from .rms_norm_glu import (
    dtypes_of,
    input_gradients,
    kept,
    linear,
    num_rows,
    project,
    require_projections,
    rms_norm_glu_reference,
    supports,
    unproject_from,
)

# ---- reference ----


def rms_norm_mlp_reference(
    x: Tensor,
    norm_weight: Tensor | None,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    residual: bool = False,
    recompute: bool = False,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast: Cast = "cast_then_scale",
    activation: str = "silu",
    gate_first: bool = True,
    interleaved: bool = False,
    limit: float | None = None,
    limit_on: LimitOn = "gate",
    alpha: float = 1.0,
    gate_scale: float = 1.0,
    up_offset: float = 0.0,
) -> Tensor:
    product = rms_norm_glu_reference(
        x,
        norm_weight,
        gate_weight,
        up_weight,
        gate_bias=gate_bias,
        up_bias=up_bias,
        eps=eps,
        offset=offset,
        cast=cast,
        activation=activation,
        gate_first=gate_first,
        interleaved=interleaved,
        limit=limit,
        limit_on=limit_on,
        alpha=alpha,
        gate_scale=gate_scale,
        up_offset=up_offset,
    )
    y = F.linear(product, down_weight, down_bias)
    return x + y if residual else y


# ---- kernels ----

# Those of rms_norm and glu, and the matrix products of torch.

# ---- operators ----

# Those of rms_norm_glu.

# ---- autograd ----


class _RMSNormMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor | None,
        gate_weight: Tensor,
        gate_bias: Tensor | None,
        up_weight: Tensor | None,
        up_bias: Tensor | None,
        down_weight: Tensor,
        down_bias: Tensor | None,
        dtype: torch.dtype,
        residual: bool,
        recompute: bool,
        *options: Any,
    ) -> Tensor:
        inputs = x, norm_weight, gate_weight, gate_bias, up_weight, up_bias
        needs = ctx.needs_input_grad[:8]
        needs_halves = any(needs[:7])
        product, rstd, gate, up = project(x, None, *inputs[1:], dtype, *options, saves=needs_halves and not recompute)
        if recompute and needs_halves:
            others = x, norm_weight, rstd, gate_weight, up_weight, gate_bias, up_bias
        else:
            others = *kept(needs[:6], x, norm_weight, rstd, gate_weight, up_weight), None, None
        save_for_reuse(ctx, gate, up, others=(*others, down_weight if any(needs[:6]) else None))
        ctx.recompute, ctx.residual, ctx.dtype, ctx.options = recompute, residual, dtype, options
        ctx.dtypes = dtypes_of(*inputs, down_weight, down_bias)
        y = as_output(linear(product, down_weight, down_bias), x)
        if not residual:
            return y
        return y.add_(x) if torch.promote_types(x.dtype, dtype) == dtype else x + y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, x, norm_weight, rstd, gate_weight, up_weight, gate_bias, up_bias, down_weight = ctx.saved_tensors
        needs, own, options = ctx.needs_input_grad[:8], [False, False], ctx.options[3:]
        if ctx.recompute and any(needs[:7]):
            weights = norm_weight, gate_weight, gate_bias, up_weight, up_bias
            product, _, gate, up = project(
                x, rstd, *weights, ctx.dtype, *ctx.options, saves=any(needs[:6]), needs_product=not any(needs[:6])
            )
            own = [True, True]
        elif not is_traced(dy):
            own = claim(ctx, gate, up)
            release(ctx)
        rows = dy.reshape(num_rows(dy), dy.shape[-1]).to(ctx.dtype)
        halves: list[Tensor | None] = [None, None]
        ddown_weight = ddown_bias = None
        if any(needs[:6]):
            halves, product = unproject_from(rows, down_weight, gate, up, own, needs[:6], needs[6], *options)
        elif needs[6] and not ctx.recompute:
            product = _product(gate, up, *options)
        del gate, up
        if needs[6]:
            ddown_weight = torch.mm(rows.t(), product).to(ctx.dtypes[6])
        # Before the norm is made again.
        product = None
        if needs[7]:
            # torch adds 16-bit numbers in fp32.
            ddown_bias = rows.sum(0).to(ctx.dtypes[7])
        added = dy if ctx.residual else None
        weights = gate_weight, up_weight
        gradients = input_gradients(
            halves, x, norm_weight, rstd, *weights, added, needs[:6], ctx.dtypes, *ctx.options[:3]
        )
        return *gradients, ddown_weight, ddown_bias, *[None] * (3 + len(ctx.options))


# ---- public ----


@op(reference=rms_norm_mlp_reference, supports=supports)
def rms_norm_mlp(
    x: Tensor,
    norm_weight: Tensor | None,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    residual: bool = False,
    recompute: bool = False,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast: Cast = "cast_then_scale",
    activation: str = "silu",
    gate_first: bool = True,
    interleaved: bool = False,
    limit: float | None = None,
    limit_on: LimitOn = "gate",
    alpha: float = 1.0,
    gate_scale: float = 1.0,
    up_offset: float = 0.0,
) -> Tensor:
    """A gated MLP with the norm before it and the residual after it, which keeps gate and up alone for backward.

        y = F.linear(rms_norm_glu(x, norm_weight, gate_weight, up_weight), down_weight)      # the reference

    Args:
        x: `[..., D]`, floating point, any strides.
        norm_weight: `[D]`, or None for a norm without a scale.
        gate_weight: `[I, D]`, in the dtype that the norm gives, or cast with it by autocast; `[2I, D]` with the rows of
            both when `up_weight` is None.
        up_weight: `[I, D]`, or None.
        down_weight: `[D, I]`, same dtype as `gate_weight`.
        gate_bias, up_bias: `[I]`, or None; without `up_weight` one `gate_bias` of `[2I]`.
        down_bias: `[D]`, or None.
        residual: whether `x` is added to the result.
        recompute: whether gate and up are computed again in backward rather than saved, for two products more.
        eps, offset, cast: of the norm, as in `rms_norm`.
        activation, limit, limit_on, alpha, gate_scale, up_offset: of the product, as in `glu`.
        gate_first, interleaved: which rows of a packed `gate_weight` are those of the gate, as in `glu`.

    Returns:
        `[..., D]` in the dtype that `F.linear` gives, with the residual in the promoted dtype of that and `x`.

    Raises:
        ValueError: shapes, dtypes or devices disagree, a packed axis is odd, or an option is unknown or out of range.

    Numerics: those of `rms_norm`, `F.linear` and `glu`: the norm, gate, up and their product are rounded to their own
              dtypes, norm and product in backward again. The gradient of the norm is added up in one product after the
              other, that of `x` in fp32 with the residual's.
    Choice:   as in `rms_norm_glu`; in backward between one kernel for the gradient of the product and what `glu` makes
              of it, and a product of torch with the backward of `glu` after it.
    Memory:   saves `x`, 4 bytes a row, and gate and up unless `recompute`; neither norm nor product nor a cast weight.
              Backward needs one tensor of the size of the product, for its gradient and then for itself, and after it
              the norm and its gradient; the gradients of gate and up are written over them.
    Differs from the reference: never in formula; order of summation over D, last bits of exp and erf.
    Source: Zhang & Sennrich 2019, arXiv:1910.07467; Shazeer 2020, arXiv:2002.05202; Chen et al. 2016, arXiv:1604.06174.
    """
    name = "rms_norm_mlp"
    require_options(name, activation, limit, limit_on, alpha)
    weights = norm_weight, gate_weight, gate_bias, up_weight, up_bias
    dtype = require_projections(name, x, *weights, offset, cast, gate_first, interleaved)
    require_floating(name, down_weight=down_weight, down_bias=down_bias)
    shape = x.shape[-1], gate_weight.shape[0] // (2 if up_weight is None else 1)
    require(down_weight.shape == shape, name, "down_weight", f"shape {shape}", tuple(down_weight.shape))
    if down_bias is not None:
        require(down_bias.shape == shape[:1], name, "down_bias", f"shape {shape[:1]}", tuple(down_bias.shape))
    require_same_device(name, x=x, down_weight=down_weight, down_bias=down_bias)
    shared_matmul_dtype(name, "the product", dtype, down_weight=down_weight, down_bias=down_bias)
    if runs_reference(name, x, *weights, down_weight, down_bias):
        return rms_norm_mlp_reference(
            x,
            norm_weight,
            gate_weight,
            up_weight,
            down_weight,
            gate_bias=gate_bias,
            up_bias=up_bias,
            down_bias=down_bias,
            residual=residual,
            recompute=recompute,
            eps=eps,
            offset=offset,
            cast=cast,
            activation=activation,
            gate_first=gate_first,
            interleaved=interleaved,
            limit=limit,
            limit_on=limit_on,
            alpha=alpha,
            gate_scale=gate_scale,
            up_offset=up_offset,
        )
    options = kernel_options(activation, gate_first, interleaved, limit, limit_on, alpha, gate_scale, up_offset)
    inputs = x, *weights, down_weight, down_bias
    return _RMSNormMLP.apply(*inputs, dtype, residual, recompute, eps, offset, cast, *options)
