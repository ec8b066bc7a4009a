"""RMS normalisation, the two projections of a gated MLP and their gated product.

    n = x * rstd * (offset + norm_weight),   rstd = 1 / sqrt(mean(x^2) + eps)       (as in rms_norm)
    gate = n @ gate_weight.T + gate_bias,   up = n @ up_weight.T + up_bias
    p = f(gate) * (up_offset + up)                                                  (f and limits as in glu)

Gradient, with dgate and dup those of glu for dp:

    dgate_weight = dgate.T @ n,   dup_weight = dup.T @ n,   dbias = sum over rows of dgate or dup
    dn = dgate @ gate_weight + dup @ up_weight,   dx and dnorm_weight those of rms_norm for dn

Backward makes n again, from x, and writes dgate and dup over gate and up.

M rows (all leading axes), D columns of x, I of p. Saved for backward: x, rstd (4 bytes a row), gate, up, the weights.
Source: Zhang & Sennrich 2019, arXiv:1910.07467; Shazeer 2020, arXiv:2002.05202; Chen et al. 2016, arXiv:1604.06174.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._check import require, require_floating, require_same_device
from ._choice import pick, take
from ._hopper_glu import can_project, can_unproject, project_glu, unproject_glu
from ._hopper_sum import can_sum_products, sum_products
from ._launch import next_power_of_2
from ._norm_glu import MAX_ROWS, can_project_few, project_few
from ._op import as_output, define, is_traced, once_differentiable, op, runs_reference
from ._projection import shared_matmul_dtype
from ._reuse import claim, release, save_for_reuse
from .glu import LimitOn, fill_bwd, fill_fwd, glu_reference, kernel_options, require_options
from .glu import _bwd as _glu_bwd
from .glu import _fwd as _product
from .glu_linear import _bwd as _glu_bwd_with_product
from .rms_norm import Cast, _out_dtype, require_scale, rms_norm_reference
from .rms_norm import _bwd as _norm_bwd
from .rms_norm import _fwd as _norm_fwd

# ---- reference ----


def rms_norm_glu_reference(
    x: Tensor,
    norm_weight: Tensor | None,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
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
    n = rms_norm_reference(x, norm_weight, eps=eps, offset=offset, cast=cast)
    return glu_reference(
        F.linear(n, gate_weight, gate_bias),
        None if up_weight is None else F.linear(n, up_weight, up_bias),
        activation=activation,
        gate_first=gate_first,
        interleaved=interleaved,
        limit=limit,
        limit_on=limit_on,
        alpha=alpha,
        gate_scale=gate_scale,
        up_offset=up_offset,
    )


# ---- kernels ----

# Those of rms_norm and glu, the matrix products of torch, for few rows that of `_norm_glu.py`, and on compute
# capability 9.0 that of `_hopper_glu.py`.

# ---- operators ----


class Projected(NamedTuple):
    """What `project` gives, by rows: `[M, I]`, and gate `[M, 2I]` where it is packed; None for what is not wanted."""

    product: Tensor | None
    rstd: Tensor
    gate: Tensor | None
    up: Tensor | None


def project(
    x: Tensor,
    rstd: Tensor | None,
    norm_weight: Tensor | None,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    up_weight: Tensor | None,
    up_bias: Tensor | None,
    dtype: torch.dtype,
    eps: float,
    offset: float,
    cast: str,
    *options: Any,
    saves: bool,
    needs_product: bool = True,
) -> Projected:
    """Norm, projections and activation: the whole forward, and what backward repeats of it to have gate and up again.

    `dtype` is that of the matrix products. `rstd` is what forward gave for this `x`, None in forward itself.
    """
    given = x, rstd, norm_weight, gate_weight, gate_bias, up_weight, up_bias, dtype, eps, offset, cast, *options
    apart = partial(_project_apart, *given, saves=saves, needs_product=needs_product)
    if rstd is not None or is_traced(x) or num_rows(x) > MAX_ROWS:
        return apart()
    weights = _split_weights(gate_weight, gate_bias, up_weight, up_bias, dtype, *options[1:3])
    if weights is None or not can_project_few(rows_of(x), dtype, weights[0], weights[2]):
        return apart()

    def together() -> Projected:
        size = num_rows(x), weights[0].shape[0]
        product, kept, gate, up = _new_outputs(x, size, up_weight is None, saves, options[1])
        rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        project_few(
            rows_of(x), _row(norm_weight), *weights, *kept, product, rstd, eps, offset, options[0], *options[3:]
        )
        return Projected(product, rstd, gate, up)

    key = "norm", next_power_of_2(num_rows(x)), *weights[0].shape, saves, dtype
    return take(key, {"norm apart": apart, "norm in the kernel for gate and up": together}, x.device)


def _project_apart(
    x: Tensor,
    rstd: Tensor | None,
    norm_weight: Tensor | None,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    up_weight: Tensor | None,
    up_bias: Tensor | None,
    dtype: torch.dtype,
    eps: float,
    offset: float,
    cast: str,
    *options: Any,
    saves: bool,
    needs_product: bool,
) -> Projected:
    """What `project` gives, by way of the norm as a tensor of its own."""
    if rstd is None:
        n, _, rstd = _norm_fwd(x, _row(norm_weight), None, eps, offset, cast, None)
        n = _as_factor(n, dtype)
    else:
        n = _as_factor(_norm_again(x, norm_weight, eps, offset, cast), dtype)
    if needs_product and not is_traced(n):
        weights = _split_weights(gate_weight, gate_bias, up_weight, up_bias, dtype, *options[1:3])
        if weights is not None and can_project(n, weights[0], weights[2]):
            product, gate, up = _project_rows(n, *weights, up_weight is None, saves, *options)
            return Projected(product, rstd, gate, up)
    gate, up = linear(n, gate_weight, gate_bias), None if up_weight is None else linear(n, up_weight, up_bias)
    # Before the product is made, which is the largest.
    del n
    product = _product(gate, up, *options) if needs_product else None
    return Projected(product, rstd, *(gate, up) if saves else (None, None))


def _split_weights(
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    up_weight: Tensor | None,
    up_bias: Tensor | None,
    dtype: torch.dtype,
    gate_first: bool,
    interleaved: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None] | None:
    """Weight and bias of gate and of up, of `dtype`; None where their rows are interleaved."""
    if interleaved:
        return None
    gate_weight, gate_bias = gate_weight.to(dtype), None if gate_bias is None else gate_bias.to(dtype)
    if up_weight is not None:
        return gate_weight, gate_bias, up_weight.to(dtype), None if up_bias is None else up_bias.to(dtype)
    weights = gate_weight.chunk(2)
    biases = (None, None) if gate_bias is None else gate_bias.chunk(2)
    i, j = (0, 1) if gate_first else (1, 0)
    return weights[i], biases[i], weights[j], biases[j]


def _project_rows(
    n: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor | None,
    is_packed: bool,
    saves: bool,
    activation: str,
    gate_first: bool,
    interleaved: bool,
    *options: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Product, gate and up, the latter two None unless `saves`, gate with both where `is_packed`."""
    size = n.shape[0], gate_weight.shape[0]
    product, kept, gate, up = _new_outputs(n, size, is_packed, saves, gate_first)

    def apart() -> None:
        # In their own memory where nobody keeps them.
        halves = [n.new_empty(size) if t is None else t for t in kept]
        for out, weight, bias in zip(halves, (gate_weight, up_weight), (gate_bias, up_bias), strict=True):
            torch.mm(n, weight.t(), out=out) if bias is None else torch.addmm(bias, n, weight.t(), out=out)
        fill_fwd(*halves, product, activation, True, False, *options)

    weights = gate_weight, gate_bias, up_weight, up_bias
    fused = partial(project_glu, n, *weights, *kept, product, activation, *options)
    key = "rms_norm_glu", next_power_of_2(size[0]), size[1], n.shape[1], saves, n.dtype
    take(key, {"one kernel for gate and up": fused, "products, then glu": apart}, n.device)
    return product, gate, up


def _new_outputs(
    like: Tensor, size: tuple[int, int], is_packed: bool, saves: bool, gate_first: bool
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None], Tensor | None, Tensor | None]:
    """Memory for the product, for gate and up as kernels write them, and the same two as they are kept."""
    product = like.new_empty(size)
    if not saves:
        return product, (None, None), None, None
    gate = like.new_empty(size[0], 2 * size[1]) if is_packed else like.new_empty(size)
    kept = gate.chunk(2, -1) if is_packed else (gate, like.new_empty(size))
    kept = kept if gate_first else kept[::-1]
    return product, kept, gate, None if is_packed else kept[1]


def _fake_again(x: Tensor, norm_weight: Tensor | None, eps: float, offset: float, cast: str) -> Tensor:
    return x.new_empty(x.shape, dtype=_out_dtype(x, norm_weight, cast))


@define("rms_norm_again(Tensor x, Tensor? norm_weight, float eps, float offset, str cast) -> Tensor", fake=_fake_again)
def _norm_again(x: Tensor, norm_weight: Tensor | None, eps: float, offset: float, cast: str) -> Tensor:
    """The norm for backward: a compiler that saw forward's operator twice would keep what the first gave."""
    return _norm_fwd(x, _row(norm_weight), None, eps, offset, cast, None)[0]


def _as_factor(n: Tensor, dtype: torch.dtype) -> Tensor:
    return n.to(dtype).view(num_rows(n), n.shape[-1])


def _row(norm_weight: Tensor | None) -> Tensor | None:
    # The kernels read one row of weights, which is nothing beside x.
    return None if norm_weight is None else norm_weight.contiguous()


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(rows, weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype))


def num_rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])


def rows_of(x: Tensor) -> Tensor:
    """`[M, D]`: a view where strides allow it, always one of what is contiguous."""
    return x.reshape(num_rows(x), x.shape[-1])


# Of x, norm_weight, gate_weight, gate_bias, up_weight and up_bias, which get a gradient.
Needs = Sequence[bool]


def unproject(
    dproduct: Tensor, gate: Tensor, up: Tensor | None, own: Sequence[bool], needs: Needs, emits: bool, *options: Any
) -> list[Tensor | None]:
    """The gradients of gate and up, `own` of them written over; with `emits`, the product over `dproduct`.

    `dproduct` then is the caller's own, and contiguous.
    """
    needs_dgate, needs_dup = any(needs[:4]), any((*needs[:2], *needs[4:]))
    if is_traced(dproduct):
        if emits:
            dgate, dup = _glu_bwd_with_product(dproduct, gate, up, needs_dgate, needs_dup, emits, *options)
        else:
            dgate, dup = _glu_bwd(dproduct, gate, up, needs_dgate, needs_dup, *options)
    else:
        dgate = gate if own[0] else gate.new_empty(gate.shape if needs_dgate else (0,))
        dup = up if up is None or own[1] else up.new_empty(up.shape if needs_dup else (0,))
        fill_bwd(dproduct, gate, up, dgate, dup, needs_dgate, needs_dup, *options, emits_product=emits)
    return [dgate if needs_dgate else None, dup if needs_dup and up is not None else None]


# Rows of which the ways are tried: enough for all multiprocessors, and little memory.
_TRIED_ROWS = 2048


def unproject_from(
    dy: Tensor,
    down_weight: Tensor,
    gate: Tensor,
    up: Tensor | None,
    own: Sequence[bool],
    needs: Needs,
    emits: bool,
    *options: Any,
) -> tuple[list[Tensor | None], Tensor]:
    """What `unproject` gives for `dproduct = dy @ down_weight`, and the product or, unless it `emits`, `dproduct`."""
    down_weight = down_weight.to(dy.dtype)
    activation, gate_first, interleaved, *rest = options
    needs_dgate = any(needs[:4])
    needs_both = needs_dgate and (up is None or any((*needs[:2], *needs[4:])))
    is_known = emits and needs_both and not interleaved and not is_traced(dy)
    if not is_known or not can_unproject(dy, down_weight, gate, up):
        product = torch.mm(dy, down_weight)
        return unproject(product, gate, up, own, needs, emits, *options), product

    def fused(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, product: Tensor) -> None:
        unproject_glu(dy, down_weight, gate, up, dgate, dup, product, activation, *rest)

    def apart(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, product: Tensor) -> None:
        torch.mm(dy, down_weight, out=product)
        inputs = product, gate, up, dgate, dup, True, True
        fill_bwd(*inputs, activation, True, False, *rest, emits_product=True)

    def tried(run: Callable[..., None]) -> None:
        part = slice(_TRIED_ROWS)
        out = [torch.empty_like(product[part]) for _ in range(3)]
        run(dy[part], *(t[part] for t in _sides(gate, up, gate_first)), *out)

    product = dy.new_empty(dy.shape[0], down_weight.shape[1])
    ways = {"one kernel through glu": fused, "product, then through glu": apart}
    key = "rms_norm_mlp", next_power_of_2(dy.shape[0]), *down_weight.shape, dy.dtype
    way = ways[pick(key, {name: partial(tried, run) for name, run in ways.items()}, dy.device)]
    dgate = gate if own[0] else torch.empty_like(gate)
    dup = up if up is None or own[1] else torch.empty_like(up)
    way(dy, *_sides(gate, up, gate_first), *_sides(dgate, dup, gate_first), product)
    return [dgate, dup], product


def _sides(gate: Tensor, up: Tensor | None, gate_first: bool) -> tuple[Tensor, ...]:
    """Gate and up as `[M, I]`, of a packed `gate` views."""
    if up is not None:
        return gate.view(num_rows(gate), -1), up.view(num_rows(up), -1)
    halves = gate.view(num_rows(gate), -1).chunk(2, -1)
    return halves if gate_first else halves[::-1]


def add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`total + a @ b`, in `total`; without it a product of `dtype`."""
    if total is None:
        return torch.mm(a, b).to(dtype)
    return total.addmm_(a, b) if total.dtype == a.dtype else total.add_(torch.mm(a, b))


def add_rows(total: Tensor | None, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """`total` and the sum of `rows`."""
    # torch adds 16-bit numbers in fp32.
    part = rows.sum(0).to(dtype)
    return part if total is None else total.add_(part)


def input_gradients(
    halves: list[Tensor | None],
    x: Tensor | None,
    norm_weight: Tensor | None,
    rstd: Tensor | None,
    gate_weight: Tensor | None,
    up_weight: Tensor | None,
    dy: Tensor | None,
    needs: Needs,
    dtypes: Sequence[torch.dtype | None],
    eps: float,
    offset: float,
    cast: str,
    sums: Sequence[Tensor | None] = (None,) * 6,
) -> list[Tensor | None]:
    """The gradients of x, norm_weight, gate_weight, gate_bias, up_weight and up_bias, of these `dtypes`.

    `halves` are dgate and dup, which are taken out of the list so that each is gone when it has been used. `dy` is a
    gradient of `x` to be added. Those of weights and biases are added to `sums`, where these are tensors.
    """
    needs_dn, needs_dweight = any(needs[:2]), [needs[2], needs[4]]
    n = dn = None
    if needs_dn and up_weight is not None and not is_traced(halves[0]):
        dn = _sum_of_products(*halves, gate_weight, up_weight)  # type: ignore[arg-type]
    has_dn = dn is not None
    gradients: list[Tensor | None] = []
    for i, weight in enumerate((gate_weight, up_weight)):
        half, dweight, dbias = halves.pop(0), None, None
        if needs_dweight[i]:
            if n is None:
                n = _as_factor(_norm_again(x, norm_weight, eps, offset, cast), half.dtype)
            dweight = add_product(sums[2 + 2 * i], half.t(), n, dtypes[2 + 2 * i])
        if not any(needs_dweight[i + 1 :]):
            n = None
        if needs[3 + 2 * i]:
            dbias = add_rows(sums[3 + 2 * i], half, dtypes[3 + 2 * i])
        if needs_dn and not has_dn and half is not None:
            # Into what the other gave: one rounding fewer than a sum of two products.
            weight = weight.to(half.dtype)
            dn = torch.mm(half, weight) if dn is None else dn.addmm_(half, weight)
        gradients += dweight, dbias
    del half
    dx = dnorm_weight = None
    if needs_dn:
        rest = offset, cast, None, needs[0], needs[1]
        dx, dnorm_weight = _norm_bwd(dn.view(x.shape), x, _row(norm_weight), rstd, dy, *rest)
    return [dx if needs[0] else None, dnorm_weight if needs[1] else None, *gradients]


def _sum_of_products(dgate: Tensor, dup: Tensor, gate_weight: Tensor, up_weight: Tensor) -> Tensor | None:
    """`dgate @ gate_weight + dup @ up_weight` where there is a kernel that writes it once, None where there is not."""
    gate_weight, up_weight = gate_weight.to(dgate.dtype), up_weight.to(dgate.dtype)
    if gate_weight.shape[1] % 8 or not can_sum_products(dgate, gate_weight, dup, up_weight):
        return None

    def together() -> Tensor:
        dn = dgate.new_empty(dgate.shape[0], gate_weight.shape[1])
        sum_products(dgate, gate_weight, dup, up_weight, None, dn, transposed=True)
        return dn

    def in_turn() -> Tensor:
        return torch.mm(dgate, gate_weight).addmm_(dup, up_weight)

    key = "dn", next_power_of_2(dgate.shape[0]), *gate_weight.shape, dgate.dtype
    return take(key, {"one product after the other": in_turn, "both products at once": together}, dgate.device)


# ---- autograd ----


def kept(
    needs: Needs,
    x: Tensor,
    norm_weight: Tensor | None,
    rstd: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """What `input_gradients` reads. Parameters themselves: wrappers that shard exchange what they hold."""
    needs_dn, needs_n = any(needs[:2]), needs[2] or needs[4]
    norm = (x, norm_weight, rstd) if needs_dn or needs_n else (None, None, None)
    return *norm, *((gate_weight, up_weight) if needs_dn else (None, None))


def dtypes_of(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    return tuple(None if t is None else t.dtype for t in tensors)


class _RMSNormGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor | None,
        gate_weight: Tensor,
        gate_bias: Tensor | None,
        up_weight: Tensor | None,
        up_bias: Tensor | None,
        dtype: torch.dtype,
        eps: float,
        offset: float,
        cast: str,
        *options: Any,
    ) -> Tensor:
        inputs = x, norm_weight, gate_weight, gate_bias, up_weight, up_bias
        needs = ctx.needs_input_grad[:6]
        product, rstd, gate, up = project(x, None, *inputs[1:], dtype, eps, offset, cast, *options, saves=any(needs))
        save_for_reuse(ctx, gate, up, others=kept(needs, x, norm_weight, rstd, gate_weight, up_weight))
        ctx.dtypes, ctx.norm, ctx.options = dtypes_of(*inputs), (eps, offset, cast), options
        return as_output(product, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, x, norm_weight, rstd, gate_weight, up_weight = ctx.saved_tensors
        needs, own = ctx.needs_input_grad[:6], [False, False]
        if not is_traced(dy):
            own = claim(ctx, gate, up)
            release(ctx)
        rows = dy.reshape(num_rows(dy), dy.shape[-1])
        halves = unproject(rows, gate, up, own, needs, False, *ctx.options)
        del gate, up
        weights = gate_weight, up_weight
        gradients = input_gradients(halves, x, norm_weight, rstd, *weights, None, needs, ctx.dtypes, *ctx.norm)
        return *gradients, *[None] * (4 + len(ctx.options))


# ---- public ----


def supports(x: Tensor, *others: Any, **options: Any) -> list[str]:
    if any(isinstance(t, Tensor) and t.dtype == torch.float64 for t in (x, *others, *options.values())):
        return ["float64 is computed by the reference"]
    return []


def require_projections(
    name: str,
    x: Tensor,
    norm_weight: Tensor | None,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    up_weight: Tensor | None,
    up_bias: Tensor | None,
    offset: float,
    cast: Cast,
    gate_first: bool,
    interleaved: bool,
) -> torch.dtype:
    """The dtype of the matrix products; raises unless the tensors and how they are packed agree."""
    require_floating(
        name,
        x=x,
        norm_weight=norm_weight,
        gate_weight=gate_weight,
        up_weight=up_weight,
        gate_bias=gate_bias,
        up_bias=up_bias,
    )
    require_scale(name, x, norm_weight, offset, cast, argument="norm_weight")
    shape = tuple(gate_weight.shape)
    require(len(shape) == 2, name, "gate_weight", "two axes", f"shape {shape}")
    require(shape[1] == x.shape[-1], name, "gate_weight", f"{x.shape[-1]} columns", f"shape {shape}")
    if up_weight is None:
        require(shape[0] % 2 == 0, name, "gate_weight", "an even first axis, as up_weight is None", shape)
        require(up_bias is None, name, "up_bias", "None, as up_weight is None", "a tensor")
    else:
        require(up_weight.shape == shape, name, "up_weight", f"shape {shape}", tuple(up_weight.shape))
        require(gate_first, name, "gate_first", "True when up_weight is given", gate_first)
        require(not interleaved, name, "interleaved", "False when up_weight is given", interleaved)
    for argument, bias in (("gate_bias", gate_bias), ("up_bias", up_bias)):
        if bias is not None:
            require(bias.shape == shape[:1], name, argument, f"shape {shape[:1]}", tuple(bias.shape))
    require_same_device(
        name,
        x=x,
        norm_weight=norm_weight,
        gate_weight=gate_weight,
        up_weight=up_weight,
        gate_bias=gate_bias,
        up_bias=up_bias,
    )
    factors = {"gate_weight": gate_weight, "up_weight": up_weight, "gate_bias": gate_bias, "up_bias": up_bias}
    return shared_matmul_dtype(name, "the norm", _out_dtype(x, norm_weight, cast), **factors)


@op(reference=rms_norm_glu_reference, supports=supports)
def rms_norm_glu(
    x: Tensor,
    norm_weight: Tensor | None,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
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
    """The first half of a gated MLP with the norm before it, which keeps no normalised tensor for backward.

        n = rms_norm(x, norm_weight);  p = glu(F.linear(n, gate_weight), F.linear(n, up_weight))      # the reference

    Args:
        x: `[..., D]`, floating point, any strides.
        norm_weight: `[D]`, or None for a norm without a scale.
        gate_weight: `[I, D]`, in the dtype that the norm gives, or cast with it by autocast; `[2I, D]` with the rows of
            both when `up_weight` is None.
        up_weight: `[I, D]`, or None.
        gate_bias, up_bias: `[I]`, or None; without `up_weight` one `gate_bias` of `[2I]`.
        eps, offset, cast: of the norm, as in `rms_norm`.
        activation, limit, limit_on, alpha, gate_scale, up_offset: of the product, as in `glu`.
        gate_first, interleaved: which rows of a packed `gate_weight` are those of the gate, as in `glu`.

    Returns:
        `[..., I]` in the dtype that `F.linear` gives.

    Raises:
        ValueError: shapes, dtypes or devices disagree, a packed axis is odd, or an option is unknown or out of range.

    Numerics: those of `rms_norm`, `F.linear` and `glu`: the norm, gate and up are rounded to their own dtypes, the norm
              in backward again. The gradient of the norm is added up in one product after the other, with one rounding
              fewer than a sum of two.
    Choice:   on compute capability 9.0 between one kernel for gate, up and the product, and the products of torch with
              `glu` after them, by time, once for a size; as in `linear_cross_entropy`. Up to 128 rows in bf16 also
              between those and one kernel for all of it, the norm included, which multiplies `x * norm_weight`, rounded
              once, and then by rstd.
    Memory:   saves `x`, 4 bytes a row, gate and up; neither the norm nor a cast weight. Backward needs the norm again
              and its gradient; those of gate and up are written over them as in `glu`.
    Differs from the reference: never in formula; order of summation over D, last bits of exp and erf.
    Source: Zhang & Sennrich 2019, arXiv:1910.07467; Shazeer 2020, arXiv:2002.05202.
    """
    name = "rms_norm_glu"
    require_options(name, activation, limit, limit_on, alpha)
    weights = norm_weight, gate_weight, gate_bias, up_weight, up_bias
    dtype = require_projections(name, x, *weights, offset, cast, gate_first, interleaved)
    if runs_reference(name, x, *weights):
        return rms_norm_glu_reference(
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
    options = activation, gate_first, interleaved, limit, limit_on, alpha, gate_scale, up_offset
    return _RMSNormGLU.apply(x, *weights, dtype, eps, offset, cast, *kernel_options(*options))
