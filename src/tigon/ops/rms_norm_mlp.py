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

from collections.abc import Sequence
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
    add_product,
    add_rows,
    dtypes_of,
    input_gradients,
    kept,
    linear,
    num_rows,
    project,
    require_projections,
    rms_norm_glu_reference,
    rows_of,
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
    max_rows: int | None = None,
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

# Those of rms_norm and glu, the matrix products of torch, and on compute capability 9.0 those of `_hopper_glu.py`.

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
        max_rows: int | None,
        *options: Any,
    ) -> Tensor:
        inputs = norm_weight, gate_weight, gate_bias, up_weight, up_bias
        needs = ctx.needs_input_grad[:8]
        needs_halves = any(needs[:7])
        saves = needs_halves and not recompute
        parts = _parts(num_rows(x), max_rows)
        if len(parts) == 1:
            product, rstd, gate, up = project(x, None, *inputs, dtype, *options, saves=saves)
            y = as_output(linear(product, down_weight, down_bias), x)
        else:
            rows, gate, up, rstds, made = rows_of(x), None, None, [], []
            size = (num_rows(x), down_weight.shape[0])
            y = None if is_traced(x) else x.new_empty(size, dtype=dtype)
            for part in parts:
                product, rstd, _, _ = project(rows[part], None, *inputs, dtype, *options, saves=False)
                if y is None:
                    made.append(linear(product, down_weight, down_bias))
                else:
                    y[part] = linear(product, down_weight, down_bias)
                rstds.append(rstd.view(-1))
                # Gone before the next one is made.
                del product
            rstd = torch.cat(rstds)
            y = as_output(torch.cat(made) if y is None else y, x)
        if recompute and needs_halves:
            others = x, norm_weight, rstd, gate_weight, up_weight, gate_bias, up_bias
        else:
            others = *kept(needs[:6], x, norm_weight, rstd, gate_weight, up_weight), None, None
        save_for_reuse(ctx, gate, up, others=(*others, down_weight if any(needs[:6]) else None))
        ctx.recompute, ctx.residual, ctx.max_rows, ctx.dtype, ctx.options = (
            recompute,
            residual,
            max_rows,
            dtype,
            options,
        )
        ctx.dtypes = dtypes_of(x, *inputs, down_weight, down_bias)
        if not residual:
            return y
        # What a compiler sees is written nowhere twice: torch 2.11 loses the gradient of a result that is.
        if is_traced(x) or torch.promote_types(x.dtype, dtype) != dtype:
            return x + y
        return y.add_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, x, norm_weight, rstd, gate_weight, up_weight, gate_bias, up_bias, down_weight = ctx.saved_tensors
        needs, own = ctx.needs_input_grad[:8], [False, False]
        if not ctx.recompute and not is_traced(dy):
            own = claim(ctx, gate, up)
            release(ctx)
        weights = norm_weight, gate_weight, gate_bias, up_weight, up_bias, down_weight
        halves = [gate, up]
        del gate, up
        parts = _parts(num_rows(dy), ctx.max_rows)
        if len(parts) == 1:
            gradients = _gradients(ctx, x, rstd, weights, halves, own, dy, ctx.dtypes, [None] * 8)
            return *gradients, *[None] * (4 + len(ctx.options))
        # Sums over parts, those of vectors in fp32; dx is written part by part.
        vectors = (1, 3, 5, 7)
        dtypes = [torch.float32 if i in vectors and d is not None else d for i, d in enumerate(ctx.dtypes)]
        sums: list[Tensor | None] = [None] * 8
        dx = x.new_empty(x.shape) if needs[0] and not is_traced(dy) else None
        dx_parts = []
        for part in parts:
            x_part, rstd_part = (None if t is None else t[part] for t in (None if x is None else rows_of(x), rstd))
            previous, sums[1] = sums[1], None
            dx_part, *sums[1:] = _gradients(
                ctx, x_part, rstd_part, weights, [None, None], own, rows_of(dy)[part], dtypes, sums
            )
            if dx is None:
                dx_parts.append(dx_part)
            else:
                rows_of(dx)[part] = dx_part
            if needs[1]:
                sums[1] = sums[1].float() if previous is None else previous.add_(sums[1])  # type: ignore[union-attr]
        if needs[0] and dx is None:
            dx = torch.cat(dx_parts).view(x.shape)
        gradients = [dx, *(None if t is None else t.to(d) for t, d in zip(sums[1:], ctx.dtypes[1:], strict=True))]
        return *gradients, *[None] * (4 + len(ctx.options))


def _parts(total: int, max_rows: int | None) -> list[slice]:
    if max_rows is None:
        return [slice(None)]
    return [slice(i, min(i + max_rows, total)) for i in range(0, max(total, 1), max_rows)]


def _gradients(
    ctx: Any,
    x: Tensor | None,
    rstd: Tensor | None,
    weights: tuple[Tensor | None, ...],
    halves: list[Tensor | None],
    own: list[bool],
    dy: Tensor,
    dtypes: Sequence[torch.dtype | None],
    sums: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients of all inputs for these rows, of `dtypes`; those of projections are added to `sums`.

    `halves` are gate and up, taken out of the list.
    """
    norm_weight, gate_weight, _, up_weight, _, down_weight = weights
    needs, options = ctx.needs_input_grad[:8], ctx.options[3:]
    gate, up = halves.pop(0), halves.pop(0)
    if ctx.recompute and any(needs[:7]):
        product, _, gate, up = project(
            x,
            rstd,
            *weights[:5],
            ctx.dtype,
            *ctx.options,
            saves=any(needs[:6]),
            needs_product=not any(needs[:6]),
        )
        own = [True, True]
    rows = rows_of(dy).to(ctx.dtype)
    ddown_weight = ddown_bias = None
    halves = [None, None]
    if any(needs[:6]):
        halves, product = unproject_from(rows, down_weight, gate, up, own, needs[:6], needs[6], *options)
    elif needs[6] and not ctx.recompute:
        product = _product(gate, up, *options)
    del gate, up
    if needs[6]:
        ddown_weight = add_product(sums[6], rows.t(), product, dtypes[6])
    # Before the norm is made again.
    product = None
    if needs[7]:
        ddown_bias = add_rows(sums[7], rows, dtypes[7])
    added = dy if ctx.residual else None
    norm = x, norm_weight, rstd, gate_weight, up_weight
    gradients = input_gradients(halves, *norm, added, needs[:6], dtypes, *ctx.options[:3], sums[:6])
    return [*gradients, ddown_weight, ddown_bias]


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
    max_rows: int | None = None,
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
        max_rows: rows for which norm, gate, up and product exist at once, forward and backward, None for all; with
            `recompute`.
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
              of it, and a product of torch with the backward of `glu` after it; and between one product for the
              gradient of the norm and two, of which the second adds to the first.
    Memory:   saves `x`, 4 bytes a row, and gate and up unless `recompute`; neither norm nor product nor a cast weight.
              Backward needs one tensor of the size of the product, for its gradient and then for itself, and after it
              the norm and its gradient; the gradients of gate and up are written over them. With `max_rows` all of
              this is of these rows alone; 16-bit gradients of the projections are then rounded once for each part.
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
    if max_rows is not None:
        require(max_rows >= 1, name, "max_rows", "at least 1, or None", max_rows)
        require(recompute, name, "recompute", "True with max_rows", recompute)
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
            max_rows=max_rows,
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
    return _RMSNormMLP.apply(*inputs, dtype, residual, recompute, max_rows, eps, offset, cast, *options)
