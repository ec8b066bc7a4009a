"""Divergences of two distributions over the last axis: Kullback-Leibler, generalised Jensen-Shannon, total variation.

Of one row, with t the target, p the teacher, q the student, and m = beta * p + (1 - beta) * q:

    kl_div:  sum_j t_j * (log t_j - log q_j)
    jsd:     beta * sum_j p_j * (log p_j - log m_j) + (1 - beta) * sum_j q_j * (log q_j - log m_j)
    tvd:     1/2 * sum_j |p_j - q_j|

and at the ends, where the formula of jsd gives 0, beta = 0 is KL(p || q) and beta = 1 is KL(q || p).

Gradients, none of which assumes that a row sums to 1, with x = log q and y = log p:

    kl_div:  dx = -t,  dt = log t + 1 - x                   (of a logarithmic target y: dx = -p, dy = p * (y - x + 1))
    jsd:     dx = (1 - beta) * q * (x - log m),  dy = beta * p * (y - log m)
    tvd:     dp = sign(p - q) / 2 = -dq

M rows (all leading axes), N columns. Probability 0 times any logarithm is 0, in values and gradients.
Saved for backward: the inputs.
Source: Kullback & Leibler 1951, Ann. Math. Stat. 22(1); Lin 1991, IEEE Trans. Inf. Theory 37(1); Agarwal et al. 2024,
arXiv:2306.13649 (generalised jsd of students and teachers).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from ._check import require, require_floating, require_number, require_one_of, require_same_device
from ._launch import as_rows, launch, next_power_of_2
from ._op import apply, define, once_differentiable, op, runs_reference
from ._triton import tl, triton
from .cross_entropy import mean_divisors, wide_dtype

Reduction = Literal["batchmean", "mean", "sum", "rows", "none"]
REDUCTIONS = ("batchmean", "mean", "sum", "rows", "none")


# ---- reference ----


def kl_div_reference(
    log_probs: Tensor,
    target: Tensor,
    *,
    log_target: bool = False,
    reduction: Reduction = "batchmean",
    labels: Tensor | None = None,
    ignore_index: int = -100,
    num_items: float | Tensor | None = None,
) -> Tensor:
    x, t = _rows_that_count(log_probs, target, labels, ignore_index)
    elements = _kl_elements(x, t) if log_target else _times(t, t.masked_fill(t == 0, 1.0).log() - x)
    return _reduced(elements, elements.shape, reduction, labels, ignore_index, num_items)


def jsd_reference(
    student_log_probs: Tensor,
    teacher_log_probs: Tensor,
    *,
    beta: float = 0.5,
    reduction: Reduction = "batchmean",
    labels: Tensor | None = None,
    ignore_index: int = -100,
    num_items: float | Tensor | None = None,
) -> Tensor:
    x, y = _rows_that_count(student_log_probs, teacher_log_probs, labels, ignore_index)
    if beta == 0:
        elements = _kl_elements(x, y)
    elif beta == 1:
        elements = _kl_elements(y, x)
    else:
        # Finite in place of -inf, whose differences are NaN; the probability is 0 all the same.
        x, y = (t.clamp(min=torch.finfo(t.dtype).min / 4) for t in (x, y))
        log_beta, log_rest = x.new_full((), math.log(beta)), x.new_full((), math.log1p(-beta))
        log_m_over_p = torch.logaddexp(log_beta, log_rest + (x - y))
        log_m_over_q = torch.logaddexp(log_rest, log_beta + (y - x))
        elements = -beta * y.exp() * log_m_over_p - (1 - beta) * x.exp() * log_m_over_q
    return _reduced(elements, elements.shape, reduction, labels, ignore_index, num_items)


def tvd_reference(
    p: Tensor,
    q: Tensor,
    *,
    reduction: Reduction = "batchmean",
    labels: Tensor | None = None,
    ignore_index: int = -100,
    num_items: float | Tensor | None = None,
) -> Tensor:
    p, q = _rows_that_count(p, q, labels, ignore_index)
    elements = 0.5 * (p - q).abs()
    return _reduced(elements, elements.shape, reduction, labels, ignore_index, num_items)


def _rows_that_count(first: Tensor, second: Tensor, labels: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Both in fp32 or wider; rows that are ignored are 0 in both, which is no divergence in any of the formulae."""
    wide = wide_dtype(torch.promote_types(first.dtype, second.dtype))
    first, second = first.to(wide), second.to(wide)
    if labels is None:
        return first, second
    ignored = (labels.long() == ignore_index).unsqueeze(-1)
    return first.masked_fill(ignored, 0.0), second.masked_fill(ignored, 0.0)


def _times(p: Tensor, log_ratio: Tensor) -> Tensor:
    return p * log_ratio.masked_fill(p == 0, 0.0)


def _kl_elements(x: Tensor, y: Tensor) -> Tensor:
    """KL(exp(y) || exp(x)) before the sum."""
    return _times(y.exp(), y - x)


def _reduced(
    losses: Tensor,
    shape: torch.Size,
    reduction: str,
    labels: Tensor | None,
    ignore_index: int,
    num_items: float | Tensor | None,
) -> Tensor:
    """The public result from the losses of elements, or of rows, of inputs of `shape`."""
    if reduction == "none":
        return losses
    rows = losses.sum(-1) if losses.shape == shape else losses
    if reduction == "rows":
        return rows
    total = rows.sum()
    if reduction == "sum":
        return total
    columns = shape[-1] if reduction == "mean" else 1
    if labels is None and num_items is None:
        return total / (max(math.prod(shape[:-1]), 1) * columns)
    counted = losses if labels is None else labels.long()
    return total / (mean_divisors(counted, None, ignore_index, num_items, total.dtype)[0] * columns)


# ---- kernels ----

# Forms of one element of student x and teacher y: the loss and its derivatives; the compiler drops what a kernel does
# not use, and the loads for it.


@triton.jit
def _kl(x, t, teacher_weight, student_weight):
    is_zero = t == 0
    gap = tl.log(tl.where(is_zero, 1.0, t)) - tl.where(is_zero, 0.0, x)
    return t * gap, -t, tl.where(is_zero, 0.0, gap + 1.0)


@triton.jit
def _kl_log(x, y, teacher_weight, student_weight):
    p = tl.exp(y)
    is_zero = p == 0
    loss = p * (tl.where(is_zero, 0.0, y) - tl.where(is_zero, 0.0, x))
    return loss, -p, loss + p


@triton.jit
def _reverse_kl_log(x, y, teacher_weight, student_weight):
    loss, dy, dx = _kl_log(y, x, teacher_weight, student_weight)
    return loss, dx, dy


@triton.jit
def _log(w, v):
    """Logarithm of a normal `w`; `v` is w - 1, with the digits that `w` near 1 has lost."""
    # w = 2^e * (1 + r) with r in [-1/3, 1/3), by the bits: fewer instructions than tl.log, which bound this loop.
    bits = w.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F2AAAAB) & -0x800000
    r = tl.where(exponent == 0, v, (bits - exponent).to(tl.float32, bitcast=True) - 1.0)
    # Minimax of (log(1 + r) - r) / r^2, relative error of the logarithm 3e-8.
    q = r * 0.1437231749 - 0.1537074894
    q = q * r + 0.1392136216
    q = q * r - 0.1641976535
    q = q * r + 0.2001602501
    q = q * r - 0.2500757277
    q = q * r + 0.3333310783
    q = q * r - 0.4999993940
    return exponent.to(tl.float32) * 8.262958294e-8 + (r + r * r * q)


@triton.jit
def _jsd(x, y, teacher_weight, student_weight):
    # exp(-1000) is zero in fp32, and differences of infinities would be NaN.
    x = tl.where(x < -1000.0, -1000.0, x)
    y = tl.where(y < -1000.0, -1000.0, y)
    # Relative to the larger of the two probabilities: logarithms near -10 would leave few digits of a small gap.
    is_less = x < y
    peak = tl.where(is_less, y, x)
    gap = tl.abs(x - y)
    lesser = tl.exp(-gap)
    lesser_weight = tl.where(is_less, student_weight, teacher_weight)
    larger_weight = tl.where(is_less, teacher_weight, student_weight)
    # 1 - exp(-gap) would cancel where the gap is small; the series of it does not.
    near = gap * (1 / 120 - gap * (1 / 720)) - 1 / 24
    near = gap * (gap * (gap * near + 1 / 6) - 1 / 2) + 1.0
    deficit = lesser_weight * tl.where(gap < 0.25, gap * near, 1.0 - lesser)
    lesser = lesser_weight * lesser
    # m and its logarithm, relative to the larger; what is left of 1 is the more exact the less is lost.
    m = tl.where(gap < 0.25, 1.0 - deficit, larger_weight + lesser)
    log_m = _log(m, -deficit)
    p = tl.exp(peak)
    of_larger = p * (larger_weight * -log_m)
    of_lesser = p * (lesser * (-gap - log_m))
    # The sum of both, in which first powers of a small gap cancel.
    loss = -p * (m * log_m + lesser * gap)
    return loss, tl.where(is_less, of_lesser, of_larger), tl.where(is_less, of_larger, of_lesser)


@triton.jit
def _tvd(p, q, teacher_weight, student_weight):
    gap = p - q
    # 0 at equality, NaN for NaN.
    dp = tl.where(gap > 0, 0.5, tl.where(gap < 0, -0.5, gap))
    return 0.5 * tl.abs(gap), dp, -dp


@triton.jit
def _divergence_fwd_kernel(
    x_ptr,
    y_ptr,
    labels_ptr,
    loss_ptr,
    x_stride,
    y_stride,
    num_cols,
    ignore_index,
    teacher_weight,
    student_weight,
    FORM: tl.constexpr,
    HAS_LABELS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per row; writes the loss of the row or those of its elements."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * y_stride
    loss_ptr += row * num_cols if ELEMENTS else row
    cols = tl.arange(0, BLOCK_N)
    # A Python number in the interpreter.
    teacher_weight = tl.cast(teacher_weight, tl.float32)
    student_weight = tl.cast(student_weight, tl.float32)

    is_ignored = False
    if HAS_LABELS:
        is_ignored = tl.load(labels_ptr + row) == ignore_index
    if is_ignored:
        if ELEMENTS:
            for start in range(0, num_cols, BLOCK_N):
                tl.store(loss_ptr + start + cols, tl.zeros([BLOCK_N], tl.float32), mask=start + cols < num_cols)
        else:
            tl.store(loss_ptr, 0.0)
        return

    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in tl.range(0, num_cols, BLOCK_N, num_stages=STAGES):
        c = start + cols
        mask = c < num_cols
        x = tl.load(x_ptr + c, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + c, mask=mask, other=0.0).to(tl.float32)
        loss, _dx, _dy = FORM(x, y, teacher_weight, student_weight)
        if ELEMENTS:
            tl.store(loss_ptr + c, loss, mask=mask)
        else:
            total += tl.where(mask, loss, 0.0)
    if not ELEMENTS:
        tl.store(loss_ptr, tl.sum(total, axis=0))


@triton.jit
def _divergence_bwd_kernel(
    x_ptr,
    y_ptr,
    labels_ptr,
    dloss_ptr,
    dx_ptr,
    dy_ptr,
    x_stride,
    y_stride,
    dloss_stride,
    num_cols,
    ignore_index,
    teacher_weight,
    student_weight,
    FORM: tl.constexpr,
    HAS_LABELS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * y_stride
    dloss_ptr += row * dloss_stride
    if NEEDS_DX:
        dx_ptr += row * num_cols
    if NEEDS_DY:
        dy_ptr += row * num_cols
    cols = tl.arange(0, BLOCK_N)
    # A Python number in the interpreter.
    teacher_weight = tl.cast(teacher_weight, tl.float32)
    student_weight = tl.cast(student_weight, tl.float32)

    is_ignored = False
    if HAS_LABELS:
        is_ignored = tl.load(labels_ptr + row) == ignore_index
    if is_ignored:
        zeros = tl.zeros([BLOCK_N], tl.float32)
        for start in range(0, num_cols, BLOCK_N):
            c = start + cols
            if NEEDS_DX:
                tl.store(dx_ptr + c, zeros, mask=c < num_cols)
            if NEEDS_DY:
                tl.store(dy_ptr + c, zeros, mask=c < num_cols)
        return

    if not ELEMENTS:
        dloss = tl.load(dloss_ptr).to(tl.float32)
    for start in tl.range(0, num_cols, BLOCK_N, num_stages=STAGES):
        c = start + cols
        mask = c < num_cols
        x = tl.load(x_ptr + c, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        y = tl.load(y_ptr + c, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if ELEMENTS:
            dloss = tl.load(dloss_ptr + c, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        _loss, dx, dy = FORM(x, y, teacher_weight, student_weight)
        if NEEDS_DX:
            tl.store(dx_ptr + c, dloss * dx, mask=mask)
        if NEEDS_DY:
            tl.store(dy_ptr + c, dloss * dy, mask=mask)


# ---- operators ----

FORMS = {"kl": _kl, "kl_log": _kl_log, "reverse_kl_log": _reverse_kl_log, "jsd": _jsd, "tvd": _tvd}
_BLOCK = 4096


def _settings(num_cols: int) -> dict[str, int]:
    """8 elements a thread of each input, four warps or more: rows are long and the forms take registers."""
    block = min(max(next_power_of_2(num_cols), 128), _BLOCK)
    return {"BLOCK_N": block, "STAGES": 2, "num_warps": max(4, block // 256)}


def _fake_fwd(
    x: Tensor, y: Tensor, labels: Tensor | None, form: str, beta: float, ignore_index: int, elements: bool
) -> Tensor:
    return x.new_empty(x.shape if elements else x.shape[:-1], dtype=torch.float32)


_OPTIONS = "str form, float beta, int ignore_index, bool elements"


@define(f"divergence_fwd(Tensor x, Tensor y, Tensor? labels, {_OPTIONS}) -> Tensor", fake=_fake_fwd)
def _fwd(
    x: Tensor, y: Tensor, labels: Tensor | None, form: str, beta: float, ignore_index: int, elements: bool
) -> Tensor:
    loss = _fake_fwd(x, y, labels, form, beta, ignore_index, elements)
    x, y = as_rows(x), as_rows(y)
    launch(
        _divergence_fwd_kernel,
        (x.shape[0],),
        x,
        y,
        None if labels is None else labels.contiguous(),
        loss,
        x.stride(0),
        y.stride(0),
        x.shape[1],
        ignore_index,
        beta,
        1.0 - beta,
        FORM=FORMS[form],
        HAS_LABELS=labels is not None,
        ELEMENTS=elements,
        **_settings(x.shape[1]),
    )
    return loss


def _fake_bwd(
    x: Tensor, y: Tensor, labels: Tensor | None, dloss: Tensor, needs_dx: bool, needs_dy: bool, *_: Any
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if needs_dx else (0,)), y.new_empty(y.shape if needs_dy else (0,))


@define(
    f"divergence_bwd(Tensor x, Tensor y, Tensor? labels, Tensor dloss, bool needs_dx, bool needs_dy, {_OPTIONS})"
    " -> (Tensor, Tensor)",
    fake=_fake_bwd,
)
def _bwd(
    x: Tensor,
    y: Tensor,
    labels: Tensor | None,
    dloss: Tensor,
    needs_dx: bool,
    needs_dy: bool,
    form: str,
    beta: float,
    ignore_index: int,
    elements: bool,
) -> tuple[Tensor, Tensor]:
    dx, dy = _fake_bwd(x, y, labels, dloss, needs_dx, needs_dy)
    x, y = as_rows(x), as_rows(y)
    dloss = as_rows(dloss) if elements else dloss.reshape(-1)
    launch(
        _divergence_bwd_kernel,
        (x.shape[0],),
        x,
        y,
        None if labels is None else labels.contiguous(),
        dloss,
        dx if needs_dx else None,
        dy if needs_dy else None,
        x.stride(0),
        y.stride(0),
        dloss.stride(0),
        x.shape[1],
        ignore_index,
        beta,
        1.0 - beta,
        FORM=FORMS[form],
        HAS_LABELS=labels is not None,
        ELEMENTS=elements,
        NEEDS_DX=needs_dx,
        NEEDS_DY=needs_dy,
        **_settings(x.shape[1]),
    )
    return dx, dy


# ---- autograd ----


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, labels: Tensor | None, options: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x, y, labels)
        ctx.options = options
        return _fwd(x, y, labels, *options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        needs_dx, needs_dy = ctx.needs_input_grad[:2]
        if not (needs_dx or needs_dy):
            return None, None, None, None
        dx, dy = _bwd(*ctx.saved_tensors, dloss, needs_dx, needs_dy, *ctx.options)
        return dx if needs_dx else None, dy if needs_dy else None, None, None


# ---- public ----


def _supports(*given: Any, num_items: Any = None, **named: Any) -> list[str]:
    tensors = [t for t in (*given, *named.values()) if isinstance(t, Tensor)]
    return ["float64 is computed by the reference"] if any(t.dtype == torch.float64 for t in tensors) else []


def _check(
    name: str,
    given: dict[str, Tensor],
    reduction: str,
    labels: Tensor | None,
    num_items: float | Tensor | None,
) -> None:
    """The checks that all divergences have.

    Raises:
        ValueError: naming the argument, what was expected, and what it was.
    """
    require_floating(name, **given)
    (first_name, first), (second_name, second) = given.items()
    require(first.dim() >= 1, name, first_name, "at least one axis", "a scalar")
    require(first.shape[-1] >= 1, name, first_name, "at least one column", tuple(first.shape))
    require(second.shape == first.shape, name, second_name, f"shape {tuple(first.shape)}", tuple(second.shape))
    require_one_of(name, "reduction", reduction, REDUCTIONS)
    if labels is not None:
        require(isinstance(labels, Tensor), name, "labels", "a tensor", type(labels).__name__)
        integer = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
        require(integer, name, "labels", "an integer dtype", labels.dtype)
        rows = tuple(first.shape[:-1])
        require(tuple(labels.shape) == rows, name, "labels", f"shape {rows}", tuple(labels.shape))
    require_same_device(name, **given, labels=labels)
    if num_items is not None:
        divides = reduction in ("batchmean", "mean")
        require(divides, name, "num_items", "None unless the reduction is a mean", f"reduction {reduction!r}")
        if isinstance(num_items, Tensor):
            require(num_items.numel() == 1, name, "num_items", "one element", f"shape {tuple(num_items.shape)}")
        else:
            require_number(name, "num_items", num_items, low=0)


def _divergence(
    form: str,
    beta: float,
    x: Tensor,
    y: Tensor,
    reduction: str,
    labels: Tensor | None,
    ignore_index: int,
    num_items: float | Tensor | None,
) -> Tensor:
    labels = None if labels is None else labels.long()
    losses = apply(_Divergence, x, y, labels, (form, float(beta), ignore_index, reduction == "none"))
    return _reduced(losses, x.shape, reduction, labels, ignore_index, num_items)


@op(reference=kl_div_reference, supports=_supports)
def kl_div(
    log_probs: Tensor,
    target: Tensor,
    *,
    log_target: bool = False,
    reduction: Reduction = "batchmean",
    labels: Tensor | None = None,
    ignore_index: int = -100,
    num_items: float | Tensor | None = None,
) -> Tensor:
    """Kullback-Leibler divergence KL(target || exp(log_probs)) over the last axis.

        loss = F.kl_div(log_probs.float(), target.float(), reduction="batchmean")      # of two axes, in one line

    Args:
        log_probs: `[..., N]` log-probabilities, floating point, any strides.
        target: `[..., N]` probabilities, or log-probabilities with `log_target`; its dtype may be another. Where it
            is 0 (-inf), loss and gradients are 0, whatever `log_probs` is.
        log_target: whether `target` is in log space.
        reduction: "none" gives each element, "rows" the sum of each row, "sum" that of all; "batchmean" divides it
            by the number of rows that are not ignored, of all leading axes, "mean" by the number of their elements.
        labels: `[...]`, any integer dtype: which rows are ignored, and nothing else.
        ignore_index: rows with this label add exactly 0 to loss and gradients, whatever they hold.
        num_items: replaces the number of rows in both means, for a batch that is part of a larger one: a number or a
            tensor of one element on any device.

    Returns:
        Scalar fp32 (fp64 for fp64 inputs), `[...]` for "rows", `[..., N]` for "none". A divisor of 0 gives loss 0 and
        gradients 0.

    Raises:
        ValueError: shapes, dtypes, devices or options disagree.

    Numerics: fp32 inside; gradients, also of `target`, rounded once to the dtype of their input.
    Memory:   saves the inputs; each gradient is computed only if it is asked for.
    Differs from the reference: never in formula; order of summation over N.
    Source: Kullback & Leibler 1951, Ann. Math. Stat. 22(1).
    """
    _check("kl_div", {"log_probs": log_probs, "target": target}, reduction, labels, num_items)
    if runs_reference("kl_div", log_probs, target):
        return kl_div_reference(
            log_probs,
            target,
            log_target=log_target,
            reduction=reduction,
            labels=labels,
            ignore_index=ignore_index,
            num_items=num_items,
        )
    form = "kl_log" if log_target else "kl"
    return _divergence(form, 0.0, log_probs, target, reduction, labels, ignore_index, num_items)


@op(reference=jsd_reference, supports=_supports)
def jsd(
    student_log_probs: Tensor,
    teacher_log_probs: Tensor,
    *,
    beta: float = 0.5,
    reduction: Reduction = "batchmean",
    labels: Tensor | None = None,
    ignore_index: int = -100,
    num_items: float | Tensor | None = None,
) -> Tensor:
    """Generalised Jensen-Shannon divergence of a student and a teacher over the last axis.

        loss = beta * KL(teacher || m) + (1 - beta) * KL(student || m),   m = beta * teacher + (1 - beta) * student

    Args:
        student_log_probs: `[..., N]` log-probabilities, floating point, any strides.
        teacher_log_probs: `[..., N]` log-probabilities; the dtype may be another.
        beta: in [0, 1]. 0 is KL(teacher || student), 1 is KL(student || teacher), as usual, although the formula
            tends to 0 at both ends.
        reduction, labels, ignore_index, num_items: as in `kl_div`.

    Returns:
        Scalar fp32 (fp64 for fp64 inputs), `[...]` for "rows", `[..., N]` for "none". A divisor of 0 gives loss 0 and
        gradients 0.

    Raises:
        ValueError: shapes, dtypes, devices or options disagree.

    Numerics: fp32 inside, relative to the larger probability, so that a student close to its teacher has digits left;
        equal inputs give exactly 0. -inf is probability 0. Gradients rounded once to the dtype of their input.
    Memory:   saves the inputs; each gradient is computed only if it is asked for.
    Differs from the reference: never in formula; more exact where student and teacher nearly agree.
    Source: Lin 1991, IEEE Trans. Inf. Theory 37(1); Agarwal et al. 2024, arXiv:2306.13649.
    """
    given = {"student_log_probs": student_log_probs, "teacher_log_probs": teacher_log_probs}
    _check("jsd", given, reduction, labels, num_items)
    require_number("jsd", "beta", beta, low=0, high=1)
    if runs_reference("jsd", student_log_probs, teacher_log_probs):
        return jsd_reference(
            student_log_probs,
            teacher_log_probs,
            beta=beta,
            reduction=reduction,
            labels=labels,
            ignore_index=ignore_index,
            num_items=num_items,
        )
    form = "kl_log" if beta == 0 else "reverse_kl_log" if beta == 1 else "jsd"
    return _divergence(form, beta, student_log_probs, teacher_log_probs, reduction, labels, ignore_index, num_items)


@op(reference=tvd_reference, supports=_supports)
def tvd(
    p: Tensor,
    q: Tensor,
    *,
    reduction: Reduction = "batchmean",
    labels: Tensor | None = None,
    ignore_index: int = -100,
    num_items: float | Tensor | None = None,
) -> Tensor:
    """Total variation distance of two distributions over the last axis.

        loss = 0.5 * (p - q).abs().sum(-1).mean()      # the reference, in one line

    Args:
        p: `[..., N]` probabilities, floating point, any strides.
        q: `[..., N]` probabilities; the dtype may be another.
        reduction, labels, ignore_index, num_items: as in `kl_div`.

    Returns:
        Scalar fp32 (fp64 for fp64 inputs), `[...]` for "rows", `[..., N]` for "none". A divisor of 0 gives loss 0 and
        gradients 0.

    Raises:
        ValueError: shapes, dtypes, devices or options disagree.

    Numerics: fp32 inside; where `p` equals `q` the gradient is 0.
    Memory:   saves the inputs; each gradient is computed only if it is asked for.
    Differs from the reference: never in formula; order of summation over N.
    Source: Wen et al. 2023, arXiv:2307.15190 (as a loss of distillation).
    """
    _check("tvd", {"p": p, "q": q}, reduction, labels, num_items)
    if runs_reference("tvd", p, q):
        return tvd_reference(p, q, reduction=reduction, labels=labels, ignore_index=ignore_index, num_items=num_items)
    return _divergence("tvd", 0.0, p, q, reduction, labels, ignore_index, num_items)
