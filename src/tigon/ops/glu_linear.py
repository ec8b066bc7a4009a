"""Gated linear unit and the projection back, without keeping the product between them.

    p = f(gate) * (up_offset + up)                               (f, limits and packed tensors as in glu)
    y = p @ weight.T + bias

Gradient:

    dp = dy @ weight,   dgate and dup those of glu for dp
    dweight = dy.T @ p,   dbias = sum over rows of dy

Backward computes p again in the kernel that writes dgate and dup, and over dp, which that kernel is the last to read.

M rows (all leading axes), I columns of p, D columns of y. Saved for backward: gate, up and weight; glu and a linear
layer save I numbers of a row more.
Source: Shazeer 2020, arXiv:2002.05202 (the unit); Chen et al. 2016, arXiv:1604.06174 (what is cheap is computed again).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._check import require, require_floating, require_same_device
from ._op import apply, as_output, define, is_traced, once_differentiable, op, runs_reference
from ._projection import matmul_dtype
from ._reuse import claim, save_for_reuse
from .glu import _OPTIONS, LimitOn, fill_bwd, glu_reference, kernel_options, require_inputs, require_options
from .glu import _fwd as _product

# ---- reference ----


def glu_linear_reference(
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str = "silu",
    gate_first: bool = True,
    interleaved: bool = False,
    limit: float | None = None,
    limit_on: LimitOn = "gate",
    alpha: float = 1.0,
    gate_scale: float = 1.0,
    up_offset: float = 0.0,
) -> Tensor:
    product = glu_reference(
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
    return F.linear(product, weight, bias)


# ---- kernels ----

# Those of glu, and the matrix products of torch.

# ---- operators ----


def product_dtype(gate: Tensor, up: Tensor | None) -> torch.dtype:
    """The dtype of what `glu` gives."""
    return gate.dtype if up is None else torch.promote_types(gate.dtype, up.dtype)


def _fake_bwd(
    dproduct: Tensor, gate: Tensor, up: Tensor | None, needs_dgate: bool, needs_dup: bool, *_: Any
) -> tuple[Tensor, Tensor]:
    dgate = gate.new_empty(gate.shape if needs_dgate else (0,))
    return dgate, gate.new_empty(0) if up is None else up.new_empty(up.shape if needs_dup else (0,))


@define(
    "glu_linear_bwd(Tensor(a!) dproduct, Tensor gate, Tensor? up, bool needs_dgate, bool needs_dup,"
    f" bool emits_product, {_OPTIONS}) -> (Tensor, Tensor)",
    fake=_fake_bwd,
)
def _bwd(
    dproduct: Tensor,
    gate: Tensor,
    up: Tensor | None,
    needs_dgate: bool,
    needs_dup: bool,
    emits_product: bool,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """The gradients of `gate` and `up`, and the product in place of its own gradient."""
    dgate, dup = _fake_bwd(dproduct, gate, up, needs_dgate, needs_dup)
    rows = dproduct.contiguous()
    fill_bwd(rows, gate, up, dgate, dup, needs_dgate, needs_dup, *options, emits_product=emits_product)
    if emits_product and rows is not dproduct:
        dproduct.copy_(rows)
    return dgate, dup


# ---- autograd ----


class _GLULinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        *options: Any,
    ) -> Tensor:
        needs_inputs, needs_dweight = any(ctx.needs_input_grad[:2]), ctx.needs_input_grad[2]
        inputs = (gate, up) if needs_inputs or needs_dweight else (None, None)
        # The parameter itself: wrappers that shard exchange what it holds.
        save_for_reuse(ctx, *inputs, others=(weight if needs_inputs else None,))
        ctx.options, ctx.dtypes = options, (weight.dtype, None if bias is None else bias.dtype)
        product = _product(gate, up, *options).to(dtype)
        y = F.linear(product, weight.to(dtype), None if bias is None else bias.to(dtype))
        return as_output(y, gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        needs_dgate, needs_dup, needs_dweight, needs_dbias = ctx.needs_input_grad[:4]
        weight_dtype, bias_dtype = ctx.dtypes
        dy = dy.reshape(math.prod(dy.shape[:-1]), dy.shape[-1])
        dgate = dup = product = dweight = dbias = None
        if needs_dgate or needs_dup:
            product = torch.mm(dy, weight.to(dy.dtype))
            seen = product_dtype(gate, up)
            # Rounded as in forward, between glu and the matrix product; from fp32 and to it the kernel rounds.
            product = product if seen == torch.float32 else product.to(seen)
            needs = needs_dgate, needs_dup, needs_dweight
            if is_traced(dy):
                dgate, dup = _bwd(product, gate, up, *needs, *ctx.options)
            else:
                takes_gate, takes_up = claim(ctx, gate, up)
                dgate = gate if takes_gate else gate.new_empty(gate.shape if needs_dgate else (0,))
                dup = up if up is None or takes_up else up.new_empty(up.shape if needs_dup else (0,))
                fill_bwd(product, gate, up, dgate, dup, *needs[:2], *ctx.options, emits_product=needs_dweight)
        elif needs_dweight:
            product = _product(gate, up, *ctx.options)
        if needs_dweight:
            product = product.to(dy.dtype).view(dy.shape[0], product.shape[-1])
            dweight = torch.mm(dy.t(), product).to(weight_dtype)
        if needs_dbias:
            # torch adds 16-bit numbers in fp32.
            dbias = dy.sum(0).to(bias_dtype)
        dgate, dup = dgate if needs_dgate else None, dup if needs_dup else None
        return dgate, dup, dweight, dbias, None, *[None] * len(ctx.options)


# ---- public ----


def _supports(
    gate: Tensor, up: Tensor | None = None, weight: Tensor | None = None, *, bias: Tensor | None = None, **_: Any
) -> list[str]:
    if any(t is not None and t.dtype == torch.float64 for t in (gate, up, weight, bias)):
        return ["float64 is computed by the reference"]
    return []


@op(reference=glu_linear_reference, supports=_supports)
def glu_linear(
    gate: Tensor,
    up: Tensor | None,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str = "silu",
    gate_first: bool = True,
    interleaved: bool = False,
    limit: float | None = None,
    limit_on: LimitOn = "gate",
    alpha: float = 1.0,
    gate_scale: float = 1.0,
    up_offset: float = 0.0,
) -> Tensor:
    """The down projection of a gated MLP, which keeps no product of gate and up for backward.

        y = F.linear(glu(gate, up), weight, bias)      # the reference, in one line

    Args:
        gate: `[..., I]`, floating point, any strides; `[..., 2I]` with both when `up` is None.
        up: `[..., I]`, the shape of `gate`, or None.
        weight: `[D, I]`, in the promoted dtype of `gate` and `up`, or cast with them by autocast.
        bias: `[D]`, same dtype as `weight`, or None.
        activation, gate_first, interleaved, limit, limit_on, alpha, gate_scale, up_offset: as in `glu`.

    Returns:
        `[..., D]` in the dtype that `F.linear` gives.

    Raises:
        ValueError: shapes, dtypes or devices disagree, a packed axis is odd, or an option is unknown or out of range.

    Numerics: those of `glu` followed by `F.linear`: the product, computed in fp32, is rounded to its own dtype and to
              that of the matrix product, in backward again. Matrix products are those of torch.
    Memory:   saves the inputs, and neither the product nor a cast weight. Backward needs one tensor of the size of the
              product, for its gradient and then for itself; gradients are written over `gate` and `up` as in `glu`.
              It costs one more write in the backward of `glu`.
    Differs from the reference: never in formula; in the last bits of exp and erf.
    Source: Shazeer 2020, arXiv:2002.05202; Chen et al. 2016, arXiv:1604.06174.
    """
    name = "glu_linear"
    require_options(name, activation, limit, limit_on, alpha)
    require_inputs(name, gate, up, gate_first, interleaved)
    require_floating(name, weight=weight, bias=bias)
    require(weight.dim() == 2, name, "weight", "two axes", f"shape {tuple(weight.shape)}")
    shape = weight.shape[0], gate.shape[-1] // (2 if up is None else 1)
    require(weight.shape == shape, name, "weight", f"shape {shape}", tuple(weight.shape))
    if bias is not None:
        require(bias.shape == shape[:1], name, "bias", f"shape {shape[:1]}", tuple(bias.shape))
    require_same_device(name, gate=gate, weight=weight, bias=bias)
    dtype = matmul_dtype(name, "gate and up", product_dtype(gate, up), weight, bias)
    if runs_reference(name, gate, up, weight, bias=bias):
        return glu_linear_reference(
            gate,
            up,
            weight,
            bias=bias,
            activation=activation,
            gate_first=gate_first,
            interleaved=interleaved,
            limit=limit,
            limit_on=limit_on,
            alpha=alpha,
            gate_scale=gate_scale,
            up_offset=up_offset,
        )
    options = activation, gate_first, interleaved, limit, limit_on, alpha, gate_scale, up_offset
    return apply(_GLULinear, gate, up, weight, bias, dtype, *kernel_options(*options))
