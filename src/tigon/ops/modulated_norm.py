"""Modulated normalisation of diffusion transformers, optionally of a gated sum with the residual stream.

    s = residual + gate * x                                       (s = x without a residual)
    n = s * rstd,  rstd = 1 / sqrt(mean(s^2) + eps)               (norm="rms")
    n = (s - mean(s)) * rstd,  rstd = 1 / sqrt(var(s) + eps)      (norm="layer")
    y = n * weight * (1 + scale) + shift

Gradient, with g = dy * weight * (1 + scale) and means over a row, the one of g only for norm="layer":

    ds = rstd * (g - mean(g) - n * mean(g * n)) + (gradient of the returned s)
    dresidual = ds,   dx = gate * ds,   dgate = sum of ds * x
    dscale = weight * sum of dy * n,   dshift = sum of dy         sums over the tokens of a sample
    dweight = sum over samples of (1 + scale) * sum of dy * n

M rows (tokens of all samples), N columns; R rows share a row of scale, shift and gate. Saved for backward: s, weight,
scale, rstd (4 bytes a row), for norm="layer" the mean (4 more), with a gate x and gate.
Source: Peebles & Xie 2023, arXiv:2212.09748 (adaptive norms); Zhang & Sennrich 2019, arXiv:1910.07467; Ba et al. 2016,
arXiv:1607.06450.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ._check import require, require_floating, require_one_of, require_same_device
from ._device import num_sms
from ._launch import as_rows, cdiv, launch, next_power_of_2, pipeline_stages
from ._modulated_norm_kernels import (
    _modulated_norm_bwd_kernel,
    _modulated_norm_bwd_means_kernel,
    _modulated_norm_bwd_sums_kernel,
    _modulated_norm_fwd_kernel,
)
from ._op import apply, define, once_differentiable, op, runs_reference
from ._partials import sum_partials
from .layer_norm import _MAX_ROWS, _fwd_blocks

Norm = Literal["rms", "layer"]
NORMS = ("rms", "layer")


class ModulatedResidual(NamedTuple):
    """A modulated, normalised tensor and the gated sum it was computed from."""

    y: Tensor
    residual: Tensor


# ---- reference ----


def modulated_norm_reference(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    norm: Norm = "rms",
    eps: float = 1e-6,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor | ModulatedResidual:
    dtype = _promoted(x, residual, gate)
    out_dtype = _promoted(x, residual, gate, scale, shift, weight)
    wide = torch.float64 if out_dtype == torch.float64 else torch.float32

    def of_tokens(t: Tensor) -> Tensor:
        per_sample = (t.shape[0], *(1 for _ in x.shape[1:-1]), t.shape[-1])
        return t.to(wide) if t.shape == x.shape else t.to(wide).reshape(per_sample)

    s = x
    if residual is not None:
        added = x.to(wide) if gate is None else of_tokens(gate) * x.to(wide)
        s = (residual.to(wide) + added).to(dtype)
    n = s.to(wide)
    if norm == "layer":
        n = n - n.mean(-1, keepdim=True)
    n = n * torch.rsqrt(n.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        n = n * weight.to(wide)
    y = n * (1 + of_tokens(scale))
    if shift is not None:
        y = y + of_tokens(shift)
    y = y.to(out_dtype)
    return y if residual is None else ModulatedResidual(y, s)


def _promoted(*tensors: Tensor | None) -> torch.dtype:
    given = [t.dtype for t in tensors if t is not None]
    dtype = given[0]
    for other in given[1:]:
        dtype = torch.promote_types(dtype, other)
    return dtype


# ---- kernels ----

# In a file of their own, `_modulated_norm_kernels.py`: with them this one would be too long to read.


# ---- operators ----

# Widest row of which one program holds in registers what the backward needs; the forward is that of `layer_norm`.
_MAX_BWD_BLOCK = 4096


def _bwd_blocks(num_cols: int, rows_per_sample: int) -> tuple[int, int, int, int]:
    """BLOCK_M, BLOCK_N, num_warps, programs per multiprocessor.

    A thread holds 16 elements: each needs three accumulators, two factors and up to four inputs, which is too much for
    the 128 registers of a thread of 16 warps.
    """
    block_n = next_power_of_2(num_cols)
    if block_n > _MAX_BWD_BLOCK:
        return min(4, next_power_of_2(rows_per_sample)), 512, 4, 4
    block_m = min(max(1, 4096 // block_n), _MAX_ROWS, next_power_of_2(rows_per_sample))
    return block_m, block_n, max(4, block_m * block_n // 512), 2


def _rows_per_sample(x: Tensor, by_token: bool) -> int:
    """Rows that share a row of scale, shift and gate."""
    return 1 if by_token else math.prod(x.shape[1:-1])


def _stride(rows: Tensor | None) -> int:
    return 0 if rows is None else rows.stride(0)


def _as_rows(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else as_rows(t) for t in tensors]


def _fake_fwd(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    weight: Tensor | None,
    residual: Tensor | None,
    gate: Tensor | None,
    by_token: bool,
    centred: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=_promoted(x, residual, gate, scale, shift, weight))
    s = x.new_empty((0,) if residual is None else x.shape, dtype=_promoted(x, residual, gate))
    mean = x.new_empty(x.shape[:-1] if centred else (0,), dtype=torch.float32)
    return y, s, mean, x.new_empty(x.shape[:-1], dtype=torch.float32)


@define(
    "modulated_norm_fwd(Tensor x, Tensor scale, Tensor? shift, Tensor? weight, Tensor? residual, Tensor? gate,"
    " bool by_token, bool centred, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_fwd,
)
def _fwd(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    weight: Tensor | None,
    residual: Tensor | None,
    gate: Tensor | None,
    by_token: bool,
    centred: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, s, mean, rstd = _fake_fwd(x, scale, shift, weight, residual, gate, by_token, centred, eps)
    if x.numel() == 0:
        return y, s, mean.zero_(), rstd.zero_()
    x_rows, scale_rows = as_rows(x), as_rows(scale)
    residual_rows, gate_rows, shift_rows = _as_rows(residual, gate, shift)
    num_rows, num_cols = x_rows.shape
    block_m, block_n, num_warps = _fwd_blocks(num_cols)
    launch(
        _modulated_norm_fwd_kernel,
        (cdiv(num_rows, block_m),),
        x_rows,
        residual_rows,
        gate_rows,
        weight,
        scale_rows,
        shift_rows,
        y,
        s,
        mean,
        rstd,
        x_rows.stride(0),
        _stride(residual_rows),
        _stride(gate_rows),
        scale_rows.stride(0),
        _stride(shift_rows),
        num_rows,
        num_cols,
        _rows_per_sample(x, by_token),
        eps,
        CENTRED=centred,
        HAS_RESIDUAL=residual is not None,
        HAS_GATE=gate is not None,
        HAS_WEIGHT=weight is not None,
        HAS_SHIFT=shift is not None,
        ONE_BLOCK=num_cols <= block_n,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=num_warps,
    )
    return y, s, mean, rstd


def _fake_bwd(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    x: Tensor | None,
    scale: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    by_token: bool,
    centred: bool,
    needs_dx: bool,
    needs_dresidual: bool,
    needs_dgate: bool,
    needs_dscale: bool,
    needs_dshift: bool,
    needs_dw: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx, dresidual = (s.new_empty(s.shape if needed else (0,)) for needed in (needs_dx, needs_dresidual))
    dgate, dscale, dshift = (
        dy.new_empty(scale.shape if needed else (0,)) for needed in (needs_dgate, needs_dscale, needs_dshift)
    )
    dw = s.new_empty(0) if weight is None or not needs_dw else weight.new_empty(weight.shape)
    return dx, dresidual, dgate, dscale, dshift, dw


@define(
    "modulated_norm_bwd(Tensor dy, Tensor? ds, Tensor s, Tensor? x, Tensor scale, Tensor? weight, Tensor? gate,"
    " Tensor mean, Tensor rstd, bool by_token, bool centred, bool needs_dx, bool needs_dresidual, bool needs_dgate,"
    " bool needs_dscale, bool needs_dshift, bool needs_dw) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_bwd,
)
def _bwd(
    dy: Tensor,
    ds: Tensor | None,
    s: Tensor,
    x: Tensor | None,
    scale: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    by_token: bool,
    centred: bool,
    needs_dx: bool,
    needs_dresidual: bool,
    needs_dgate: bool,
    needs_dscale: bool,
    needs_dshift: bool,
    needs_dw: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    needs = needs_dx, needs_dresidual, needs_dgate, needs_dscale, needs_dshift, needs_dw
    out = _fake_bwd(dy, ds, s, x, scale, weight, gate, mean, rstd, by_token, centred, *needs)
    dx, dresidual, dgate, dscale, dshift, dw = out
    if s.numel() == 0:
        for gradient in out:
            gradient.zero_()
        return out
    s_rows, dy_rows, scale_rows = as_rows(s), as_rows(dy), as_rows(scale)
    x_rows, gate_rows, ds_rows = _as_rows(x, gate, ds)
    num_rows, num_cols = s_rows.shape
    num_samples, rows_per_sample = (1, num_rows) if by_token else (scale.shape[0], num_rows // scale.shape[0])
    itemsize = max(s.element_size(), dy.element_size())
    block_m, block_n, num_warps, per_sm = _bwd_blocks(num_cols, rows_per_sample)
    col_blocks = cdiv(num_cols, block_n)
    mean_g = mean_gn = None
    if col_blocks > 1 and (needs_dx or needs_dresidual or needs_dgate):
        mean_g, mean_gn = torch.empty_like(mean), torch.empty_like(rstd)
        launch(
            _modulated_norm_bwd_means_kernel,
            (num_rows,),
            s_rows,
            weight,
            scale_rows,
            mean,
            rstd,
            dy_rows,
            mean_g,
            mean_gn,
            s_rows.stride(0),
            scale_rows.stride(0),
            dy_rows.stride(0),
            num_cols,
            _rows_per_sample(s, by_token),
            CENTRED=centred,
            HAS_WEIGHT=weight is not None,
            BLOCK_N=4096,
            num_warps=8,
        )
    programs = max(1, num_sms(s.device) * per_sm // (num_samples * col_blocks))
    num_splits = min(cdiv(rows_per_sample, block_m), programs)
    rows = (num_samples * num_splits, num_cols)

    def partial(needed: bool) -> Tensor:
        return s.new_empty(rows if needed else (0,), dtype=torch.float32)

    by_sample = not by_token
    dgate_partial = partial(needs_dgate) if by_sample else dgate
    dyn_partial = partial(needs_dscale or needs_dw) if by_sample else dscale
    dy_partial = partial(needs_dshift) if by_sample else dshift
    # One row each program by token, one row each sample of what the sums kernel leaves otherwise.
    dw_rows = s.new_empty(((rows if by_token else scale.shape) if needs_dw else (0,)), dtype=torch.float32)
    loads = 2 + (ds is not None) + needs_dgate + by_token * (1 + (gate is not None))
    launch(
        _modulated_norm_bwd_kernel,
        (num_samples, num_splits, col_blocks),
        s_rows,
        x_rows,
        gate_rows,
        weight,
        scale_rows,
        mean,
        rstd,
        mean_g,
        mean_gn,
        dy_rows,
        ds_rows,
        dx,
        dresidual,
        dgate_partial,
        dyn_partial,
        dy_partial,
        dw_rows,
        s_rows.stride(0),
        _stride(x_rows),
        _stride(gate_rows),
        scale_rows.stride(0),
        dy_rows.stride(0),
        _stride(ds_rows),
        rows_per_sample,
        num_cols,
        CENTRED=centred,
        HAS_GATE=gate is not None,
        HAS_WEIGHT=weight is not None,
        HAS_DS=ds is not None,
        BY_TOKEN=by_token,
        GIVEN_MEANS=col_blocks > 1,
        NEEDS_DX=needs_dx,
        NEEDS_DRESIDUAL=needs_dresidual,
        NEEDS_DGATE=needs_dgate,
        NEEDS_DSCALE=needs_dscale,
        NEEDS_DSHIFT=needs_dshift,
        NEEDS_DW=needs_dw,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STAGES=pipeline_stages(block_m * block_n * loads * itemsize),
        num_warps=num_warps,
    )
    if by_sample and (needs_dgate or needs_dscale or needs_dshift or needs_dw):
        launch(
            _modulated_norm_bwd_sums_kernel,
            (cdiv(num_cols, 128), num_samples),
            dyn_partial,
            dy_partial,
            dgate_partial,
            weight,
            scale_rows,
            dgate,
            dscale,
            dshift,
            dw_rows,
            scale_rows.stride(0),
            num_splits,
            num_cols,
            HAS_WEIGHT=weight is not None,
            NEEDS_DGATE=needs_dgate,
            NEEDS_DSCALE=needs_dscale,
            NEEDS_DSHIFT=needs_dshift,
            NEEDS_DW=needs_dw,
            BLOCK_P=min(32, next_power_of_2(num_splits)),
            BLOCK_N=128,
            num_warps=4,
        )
    if needs_dw:
        sum_partials(dw_rows, dw)
    return out


# ---- autograd ----


class _ModulatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        shift: Tensor | None,
        weight: Tensor | None,
        residual: Tensor | None,
        gate: Tensor | None,
        by_token: bool,
        centred: bool,
        eps: float,
    ) -> Tensor | tuple[Tensor, Tensor]:
        y, s, mean, rstd = _fwd(x, scale, shift, weight, residual, gate, by_token, centred, eps)
        ctx.set_materialize_grads(False)
        needs_dx, _, _, _, needs_dresidual, needs_dgate, *_ = ctx.needs_input_grad
        if residual is not None and not (needs_dx or needs_dresidual or needs_dgate):
            ctx.mark_non_differentiable(s)
        ctx.save_for_backward(x if residual is None else s, x if needs_dgate else None, scale, weight, gate, mean, rstd)
        ctx.options = by_token, centred
        ctx.dtypes = [None if t is None else t.dtype for t in (x, scale, shift, residual, gate)]
        return y if residual is None else (y, s)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, ds: Tensor | None = None) -> tuple[Tensor | None, ...]:
        s, x, scale, weight, gate, mean, rstd = ctx.saved_tensors
        needs_dx, needs_dscale, needs_dshift, needs_dw, needs_dresidual, needs_dgate, *_ = ctx.needs_input_grad
        if dy is None:
            dy = torch.zeros_like(s, dtype=_promoted(s, scale, weight))
        # Without a gate both inputs of the sum have one gradient.
        one = gate is None
        of_x, of_residual = needs_dx and not one, needs_dresidual or (needs_dx and one)
        needs = of_x, of_residual, needs_dgate, needs_dscale, needs_dshift, needs_dw
        dx, dresidual, dgate, dscale, dshift, dw = _bwd(
            dy, ds, s, x, scale, weight, gate, mean, rstd, *ctx.options, *needs
        )
        x_dtype, scale_dtype, shift_dtype, residual_dtype, gate_dtype = ctx.dtypes
        return (
            (dresidual if one else dx).to(x_dtype) if needs_dx else None,
            dscale.to(scale_dtype) if needs_dscale else None,
            dshift.to(shift_dtype) if needs_dshift else None,
            dw if needs_dw else None,
            dresidual.to(residual_dtype) if needs_dresidual else None,
            dgate.to(gate_dtype) if needs_dgate else None,
            None,
            None,
            None,
        )


# ---- public ----


def _supports(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    **_: Any,
) -> list[str]:
    reasons = []
    if any(t is not None and t.dtype == torch.float64 for t in (x, scale, shift, weight, residual, gate)):
        reasons.append("float64 is computed by the reference")
    return reasons


def _is_by_token(name: str, argument: str, t: Tensor, x: Tensor) -> bool:
    """Whether `t` has a row for each token rather than for each sample; raises when neither."""
    first, last = x.shape[0], x.shape[-1]
    if t.shape == x.shape:
        return x.dim() > 2
    ones = tuple(1 for _ in x.shape[1:-1])
    by_sample = t.shape == (first, last) or t.shape == (first, *ones, last)
    shapes = f"shape {(first, last)}, {(first, *ones, last)} or {tuple(x.shape)}"
    require(by_sample, name, argument, shapes, tuple(t.shape))
    return False


def _modulation_rows(t: Tensor | None, x: Tensor, by_token: bool) -> Tensor | None:
    """`t` as `[samples, N]`, or as `[tokens, N]` where a modulation by token is among the arguments."""
    if t is None:
        return None
    num_cols = x.shape[-1]
    if by_token and t.shape != x.shape:
        t = t.reshape(x.shape[0], *(1 for _ in x.shape[1:-1]), num_cols).expand(x.shape)
    return t.reshape(math.prod(x.shape[:-1]) if by_token else x.shape[0], num_cols)


@op(reference=modulated_norm_reference, supports=_supports)
def modulated_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    norm: Norm = "rms",
    eps: float = 1e-6,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor | ModulatedResidual:
    """Normalisation over the last axis with a scale and a shift for each sample, optionally of `residual + gate * x`.

        y = norm(s) * weight * (1 + scale) + shift,   s = residual + gate * x       # the reference, in one line

    Args:
        x: `[B, ..., N]`, floating point, any strides.
        scale: `[B, N]` or `[B, 1, N]`, a row for each sample, or the shape of `x`, a row for each token.
        shift: as `scale`, or None for none.
        weight: `[N]`, or None for a norm without a scale of its own.
        norm: "rms" divides by the root of the mean square; "layer" subtracts the mean first.
        eps: added to the mean square, or to the variance, which is divided by N.
        residual: the shape of `x`; `gate * x` is added to it before the norm, the sum is returned too.
        gate: as `scale`, only with `residual`; None for 1.

    Returns:
        `y`, the shape of `x` in the promoted dtype of all arguments; with `residual` the named tuple `(y, residual)`
        where `residual` is the sum, in the promoted dtype of `x`, `residual` and `gate`.

    Raises:
        ValueError: shapes, dtypes or devices disagree, `norm` is unknown, or a `gate` has no `residual`.

    Numerics: computed in fp32 and rounded once, the sum before the norm; gradients of scale, shift, gate and weight are
              summed over tokens in fp32 in a fixed order.
    Memory:   saves `x` (or the sum), `weight`, `scale` and 4 bytes a row, 8 for "layer"; for a gate that needs a
              gradient also `x`.
    Differs from the reference: never in formula; order of summation over N and over tokens.
    Source: Peebles & Xie 2023, arXiv:2212.09748; Zhang & Sennrich 2019, arXiv:1910.07467.
    """
    name = "modulated_norm"
    require_floating(name, x=x, scale=scale, shift=shift, weight=weight, residual=residual, gate=gate)
    require(x.dim() >= 2, name, "x", "at least two axes", f"{x.dim()}")
    require_one_of(name, "norm", norm, NORMS)
    modulations = (("scale", scale), ("shift", shift), ("gate", gate))
    # Each is checked, also after one by token.
    kinds = [_is_by_token(name, argument, t, x) for argument, t in modulations if t is not None]
    by_token = any(kinds)
    if weight is not None:
        require(weight.shape == x.shape[-1:], name, "weight", f"shape {tuple(x.shape[-1:])}", tuple(weight.shape))
    if residual is not None:
        require(residual.shape == x.shape, name, "residual", f"shape {tuple(x.shape)}", tuple(residual.shape))
    require(gate is None or residual is not None, name, "gate", "a residual with it", "none")
    require_same_device(name, x=x, scale=scale, shift=shift, weight=weight, residual=residual, gate=gate)
    if runs_reference(name, x, scale, shift, weight=weight, residual=residual, gate=gate):
        return modulated_norm_reference(
            x, scale, shift, weight=weight, norm=norm, eps=eps, residual=residual, gate=gate
        )
    scale, shift, gate = (_modulation_rows(t, x, by_token) for _, t in modulations)
    # The kernels read one row of weights, which is nothing beside x.
    weight = None if weight is None else weight.contiguous()
    out = apply(_ModulatedNorm, x, scale, shift, weight, residual, gate, by_token, norm == "layer", eps)
    return out if residual is None else ModulatedResidual(*out)
