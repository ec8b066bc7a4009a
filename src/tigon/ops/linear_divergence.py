"""Divergence of a student from a teacher under their own heads, without ever holding all of their logits.

    z = softcap(logit_scale * (hidden @ weight.T + bias)) of student and teacher,   x, y = log_softmax(z / temperature)
    soft = divergence of exp(y) and exp(x), hard = -log_softmax(z_student)[label]
    loss = sum over rows of (soft_weight * soft + hard_weight * hard) / divisor

with, of one row, p = exp(y), q = exp(x) and m = beta * p + (1 - beta) * q,

    kl:      sum_j p_j (y_j - x_j)                        reverse_kl:  sum_j q_j (x_j - y_j)
    jsd:     beta KL(p || m) + (1 - beta) KL(q || m), at the ends kl (beta 0) and reverse_kl (beta 1)
    tvd:     1/2 sum_j |p_j - q_j|                        cosine:      1 - z_s . z_t / (|z_s| |z_t|)

Gradient, with g = dsoft/dx:   dz_soft = (g - q * sum(g)) / temperature,   dz_hard = softmax(z) - [j = label]
(of cosine dz_soft = (cos * z_s / |z_s| - z_t / |z_t|) / |z_s|),   dlogits = dz * logit_scale * (1 - (z / softcap)^2)

Rows are taken in chunks, whose logits of both are computed, turned into dlogits in place, and multiplied into the
gradients before the next chunk overwrites them, all in forward: four matrix products, two of them forward. The teacher
gets no gradient. Those of a mean are those of a sum times 1 / divisor, which backward multiplies in.

M rows (all leading axes), D and E hidden sizes, V classes. Saved for backward: the inputs and the gradients.
Source: Hinton et al. 2015, arXiv:1503.02531; Agarwal et al. 2024, arXiv:2306.13649 (jsd); Wen et al. 2023,
arXiv:2307.15190 (tvd); chunks as in linear_cross_entropy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _op
from ._check import require, require_bytes, require_floating, require_number, require_one_of, require_same_device
from ._launch import as_rows, launch, next_power_of_2
from ._linear_cross_entropy import _sums_widely
from ._op import define, once_differentiable, op, runs_reference
from ._projection import (
    CPU_LOGITS_BYTES,
    LOGITS_BYTES,
    accumulate,
    cdiv,
    chunk_rows,
    fake_gradients,
    finished,
    is_foreign,
    matmul_dtype,
    multiply_,
    row_stride,
    scaled_rows,
)
from ._triton import tl, triton
from .cross_entropy import _load_logits, checked_labels, mean_divisors, require_options, stand_in_labels, wide_dtype
from .divergence import _jsd, _kl_log, _reverse_kl_log, jsd_reference, tvd_reference
from .linear_log_probs import _capped, _pieces

Divergence = Literal["kl", "reverse_kl", "jsd", "tvd", "cosine"]
DIVERGENCES = ("kl", "reverse_kl", "jsd", "tvd", "cosine")


class LinearDivergenceOutput(NamedTuple):
    """A loss, and without a gradient the means of its two parts before their weights; the hard one 0 if it has none."""

    loss: Tensor
    soft_loss: Tensor
    hard_loss: Tensor


# ---- reference ----


def linear_divergence_reference(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    labels: Tensor,
    *,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    divergence: Divergence = "jsd",
    beta: float = 0.5,
    temperature: float = 1.0,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float | None = None,
    ignore_index: int = -100,
    num_items: float | Tensor | None = None,
    max_logits_bytes: int | None = None,
) -> LinearDivergenceOutput:
    ignored = labels == ignore_index
    # What an ignored row holds must not reach dweight, where 0 * inf is NaN.
    student_hidden, teacher_hidden = (
        t.masked_fill(ignored.unsqueeze(-1), 0.0) for t in (student_hidden, teacher_hidden)
    )
    with torch.no_grad():
        t = _logits(teacher_hidden, teacher_weight, teacher_bias, teacher_softcap, teacher_logit_scale)
    s = _logits(student_hidden, student_weight, student_bias, softcap, logit_scale)
    t = t.to(s.dtype)
    x, y = (s / temperature).log_softmax(-1), (t / temperature).log_softmax(-1)
    if divergence == "cosine":
        soft = 1 - F.cosine_similarity(s, t, dim=-1, eps=_TINY)
    elif divergence == "tvd":
        soft = tvd_reference(y.exp(), x.exp(), reduction="rows")
    else:
        soft = jsd_reference(x, y, beta={"kl": 0.0, "reverse_kl": 1.0}.get(divergence, beta), reduction="rows")
    valid, known, poison = stand_in_labels(labels, s.shape[-1], ignore_index, s.dtype)
    hard = torch.zeros_like(soft)
    if hard_weight:
        hard = -s.log_softmax(-1).gather(-1, known.unsqueeze(-1)).squeeze(-1) * poison
    divisor = mean_divisors(labels, None, ignore_index, num_items, s.dtype)[0]
    soft, hard = (torch.where(valid, part, 0.0).sum() / divisor for part in (soft, hard))
    return LinearDivergenceOutput(soft_weight * soft + hard_weight * hard, soft.detach(), hard.detach())


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, scale: float | None) -> Tensor:
    z = F.linear(hidden, weight, bias)
    z = z.to(wide_dtype(z.dtype))
    if scale is not None:
        z = z * scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


# Norms are at least this: rows of zeros have no direction.
_TINY = 1e-12


# ---- kernels ----


@triton.jit
def _tvd_log(x, y, teacher_weight, student_weight):
    q = tl.exp(x)
    gap = q - tl.exp(y)
    half = tl.where(gap > 0, 0.5, tl.where(gap < 0, -0.5, gap))
    return 0.5 * tl.abs(gap), half * q, gap


@triton.jit
def _joined(peak, total, z):
    """The peak and the sum of exponentials relative to it, of lanes, with another block."""
    new_peak = tl.maximum(peak, tl.max(z, axis=0))
    # Up to the first finite logit the peak is -inf, and -inf - -inf is NaN.
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    return new_peak, total * tl.exp(peak - shift) + tl.exp(z - shift)


@triton.jit
def _linear_divergence_kernel(
    student_ptr,
    teacher_ptr,
    labels_ptr,
    soft_ptr,
    hard_ptr,
    student_stride,
    teacher_stride,
    num_cols,
    ignore_index,
    beta,
    inverse_temperature,
    soft_weight,
    hard_weight,
    softcap,
    scale,
    teacher_softcap,
    teacher_scale,
    tiny,
    FORM: tl.constexpr,
    IS_COSINE: tl.constexpr,
    HAS_HARD: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_TEACHER_SOFTCAP: tl.constexpr,
    HAS_TEACHER_SCALE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per row, whose student logits it replaces by their gradient where that is wanted."""
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * student_stride
    teacher_ptr += row * teacher_stride
    label = tl.load(labels_ptr + row)
    cols = tl.arange(0, BLOCK_V)
    # Python numbers in the interpreter.
    beta = tl.cast(beta, tl.float32)
    inverse_temperature = tl.cast(inverse_temperature, tl.float32)
    soft_weight = tl.cast(soft_weight, tl.float32)
    hard_weight = tl.cast(hard_weight, tl.float32)

    if label == ignore_index:
        tl.store(soft_ptr + row, 0.0)
        tl.store(hard_ptr + row, 0.0)
        if HAS_GRADIENT:
            zeros = tl.zeros([BLOCK_V], dtype=student_ptr.dtype.element_ty)
            for start in range(0, num_cols, BLOCK_V):
                tl.store(student_ptr + start + cols, zeros, mask=start + cols < num_cols)
        return

    # Of student and teacher at the temperature, of the student without, and what a cosine is made of.
    s_peak = tl.full([], float("-inf"), tl.float32)
    t_peak = tl.full([], float("-inf"), tl.float32)
    h_peak = tl.full([], float("-inf"), tl.float32)
    s_total = tl.zeros([BLOCK_V], dtype=tl.float32)
    t_total = tl.zeros([BLOCK_V], dtype=tl.float32)
    h_total = tl.zeros([BLOCK_V], dtype=tl.float32)
    both = tl.zeros([BLOCK_V], dtype=tl.float32)
    for start in tl.range(0, num_cols, BLOCK_V, num_stages=STAGES):
        c = start + cols
        mask = c < num_cols
        s, _slope = _load_logits(student_ptr + c, mask, scale, softcap, HAS_SCALE, HAS_SOFTCAP, "")
        t, _slope = _load_logits(
            teacher_ptr + c, mask, teacher_scale, teacher_softcap, HAS_TEACHER_SCALE, HAS_TEACHER_SOFTCAP, ""
        )
        if HAS_HARD:
            h_peak, h_total = _joined(h_peak, h_total, s)
        if IS_COSINE:
            s = tl.where(mask, s, 0.0)
            t = tl.where(mask, t, 0.0)
            s_total += s * s
            t_total += t * t
            both += s * t
        else:
            s_peak, s_total = _joined(s_peak, s_total, s * inverse_temperature)
            t_peak, t_total = _joined(t_peak, t_total, t * inverse_temperature)
    h_log = 0.0
    if HAS_HARD:
        h_log = tl.log(tl.sum(h_total, axis=0))

    soft = 0.0
    g_sum = 0.0
    s_log = 0.0
    t_log = 0.0
    cosine = 0.0
    s_inverse = 0.0
    t_inverse = 0.0
    if IS_COSINE:
        s_inverse = 1.0 / tl.maximum(tl.sqrt_rn(tl.sum(s_total, axis=0)), tiny)
        t_inverse = 1.0 / tl.maximum(tl.sqrt_rn(tl.sum(t_total, axis=0)), tiny)
        cosine = tl.sum(both, axis=0) * s_inverse * t_inverse
        soft = 1.0 - cosine
    else:
        s_log = tl.log(tl.sum(s_total, axis=0))
        t_log = tl.log(tl.sum(t_total, axis=0))
        losses = tl.zeros([BLOCK_V], dtype=tl.float32)
        slopes = tl.zeros([BLOCK_V], dtype=tl.float32)
        for start in tl.range(0, num_cols, BLOCK_V, num_stages=STAGES):
            c = start + cols
            mask = c < num_cols
            s, _slope = _load_logits(student_ptr + c, mask, scale, softcap, HAS_SCALE, HAS_SOFTCAP, "")
            t, _slope = _load_logits(
                teacher_ptr + c, mask, teacher_scale, teacher_softcap, HAS_TEACHER_SCALE, HAS_TEACHER_SOFTCAP, ""
            )
            x = (s * inverse_temperature - s_peak) - s_log
            y = (t * inverse_temperature - t_peak) - t_log
            loss, dx, _dy = FORM(x, y, beta, 1.0 - beta)
            losses += tl.where(mask, loss, 0.0)
            slopes += tl.where(mask, dx, 0.0)
        soft = tl.sum(losses, axis=0)
        g_sum = tl.sum(slopes, axis=0)
    is_class = (label >= 0) & (label < num_cols)
    hard = 0.0
    if HAS_HARD:
        z_label, _ = _load_logits(student_ptr + label, is_class, scale, softcap, HAS_SCALE, HAS_SOFTCAP, "")
        h_peak = tl.where(is_class, h_peak, float("nan"))
        hard = h_log - (z_label - h_peak)
    tl.store(soft_ptr + row, soft)
    tl.store(hard_ptr + row, hard)
    if not HAS_GRADIENT:
        return

    for start in tl.range(0, num_cols, BLOCK_V, num_stages=STAGES):
        c = start + cols
        mask = c < num_cols
        s, slope = _load_logits(student_ptr + c, mask, scale, softcap, HAS_SCALE, HAS_SOFTCAP, "evict_first")
        t, _slope = _load_logits(
            teacher_ptr + c,
            mask,
            teacher_scale,
            teacher_softcap,
            HAS_TEACHER_SCALE,
            HAS_TEACHER_SOFTCAP,
            "evict_first",
        )
        if IS_COSINE:
            # Finite where masked: the difference of infinities would warn in the interpreter.
            s = tl.where(mask, s, 0.0)
            dz = soft_weight * (cosine * s * s_inverse - tl.where(mask, t, 0.0) * t_inverse) * s_inverse
        else:
            x = (s * inverse_temperature - s_peak) - s_log
            y = (t * inverse_temperature - t_peak) - t_log
            _loss, dx, _dy = FORM(x, y, beta, 1.0 - beta)
            dz = soft_weight * inverse_temperature * (dx - tl.exp(x) * g_sum)
        if HAS_HARD:
            dz += hard_weight * (tl.exp((s - h_peak) - h_log) - tl.where(c == label, 1.0, 0.0))
        tl.store(student_ptr + c, dz * slope, mask=mask)


# ---- operators ----

_FORMS = {"kl": _kl_log, "reverse_kl": _reverse_kl_log, "jsd": _jsd, "tvd": _tvd_log, "cosine": _kl_log}
_BLOCK = 4096


class _Options(NamedTuple):
    """What the formula takes beside tensors, in the order of the schema."""

    ignore_index: int
    divergence: str
    beta: float
    temperature: float
    soft_weight: float
    hard_weight: float
    softcap: float | None
    scale: float | None
    teacher_softcap: float | None
    teacher_scale: float | None


def _launch_rows(s: Tensor, t: Tensor, labels: Tensor, soft: Tensor, hard: Tensor, gradient: bool, o: _Options) -> None:
    num_rows, num_cols = s.shape
    # What is in flight of fp32 spills registers on some targets.
    block = min(max(next_power_of_2(num_cols), 128), _BLOCK if s.element_size() == 2 else _BLOCK // 2)
    launch(
        _linear_divergence_kernel,
        (num_rows,),
        s,
        t,
        labels,
        soft,
        hard,
        s.stride(0),
        t.stride(0),
        num_cols,
        o.ignore_index,
        o.beta,
        1.0 / o.temperature,
        o.soft_weight,
        o.hard_weight,
        float(o.softcap or 0.0),
        1.0 if o.scale is None else o.scale,
        float(o.teacher_softcap or 0.0),
        1.0 if o.teacher_scale is None else o.teacher_scale,
        _TINY,
        FORM=_FORMS[o.divergence],
        IS_COSINE=o.divergence == "cosine",
        HAS_HARD=o.hard_weight != 0,
        HAS_GRADIENT=gradient,
        HAS_SOFTCAP=o.softcap is not None,
        HAS_SCALE=o.scale is not None,
        HAS_TEACHER_SOFTCAP=o.teacher_softcap is not None,
        HAS_TEACHER_SCALE=o.teacher_scale is not None,
        BLOCK_V=block,
        STAGES=2,
        num_warps=max(4, block // 256),
    )


def _fill_rows(s: Tensor, t: Tensor, labels: Tensor, soft: Tensor, hard: Tensor, gradient: bool, o: _Options) -> None:
    """What the kernel does, in torch and in the dtype of `soft`."""
    wide = soft.dtype
    valid, known, poison = stand_in_labels(labels, s.shape[-1], o.ignore_index, wide)
    z, slope = _capped(s, wide, o.softcap, o.scale)
    y, _ = _capped(t, wide, o.teacher_softcap, o.teacher_scale)
    if o.divergence == "cosine":
        s_inverse, t_inverse = (v.norm(dim=-1, keepdim=True).clamp(min=_TINY).reciprocal() for v in (z, y))
        cosine = (z * y).sum(-1, keepdim=True) * s_inverse * t_inverse
        losses = (1 - cosine).squeeze(-1)
        dz = (cosine * z * s_inverse - y * t_inverse) * s_inverse
    else:
        x, y = (z / o.temperature).log_softmax(-1), (y / o.temperature).log_softmax(-1)
        q, p = x.exp(), y.exp()
        if o.divergence == "tvd":
            losses, g = 0.5 * (q - p).abs().sum(-1), 0.5 * (q - p).sign() * q
        elif o.divergence == "jsd":
            losses = jsd_reference(x, y, beta=o.beta, reduction="rows")
            floor = torch.finfo(wide).min / 4
            x_, y_ = x.clamp(min=floor), y.clamp(min=floor)
            log_beta, log_rest = (x.new_full((), b).log() for b in (o.beta, 1 - o.beta))
            g = -(1 - o.beta) * q * torch.logaddexp(log_rest, log_beta + (y_ - x_))
        elif o.divergence == "kl":
            losses, g = jsd_reference(x, y, beta=0.0, reduction="rows"), -p
        else:
            losses = jsd_reference(x, y, beta=1.0, reduction="rows")
            g = q * ((x - y).masked_fill(q == 0, 0.0) + 1)
        dz = (g - q * g.sum(-1, keepdim=True)) / o.temperature
    soft.copy_(losses.masked_fill_(~valid, 0.0))
    hard.zero_()
    dz = dz * o.soft_weight
    if o.hard_weight:
        log_q = z.log_softmax(-1)
        at = log_q.gather(-1, known.unsqueeze(-1)).squeeze(-1)
        hard.copy_((-at * poison).masked_fill_(~valid, 0.0))
        dz += o.hard_weight * poison.unsqueeze(-1) * log_q.exp()
        dz.scatter_add_(-1, known.unsqueeze(-1), dz.new_full((len(dz), 1), -o.hard_weight))
    if gradient:
        s.copy_(dz.mul_(slope).masked_fill_(~valid.unsqueeze(-1), 0.0))


_OPTIONS = (
    "int ignore_index, str divergence, float beta, float temperature, float soft_weight, float hard_weight,"
    " float? softcap, float? scale, float? teacher_softcap, float? teacher_scale"
)


def _fake_fwd(
    student_hidden: Tensor,
    student_weight: Tensor,
    student_bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    labels: Tensor,
    factor: Tensor,
    needs: Sequence[bool],
    dtype: torch.dtype,
    teacher_dtype: torch.dtype,
    *settings: Any,
) -> tuple[Tensor, ...]:
    soft = student_hidden.new_empty(labels.shape, dtype=wide_dtype(dtype))
    return soft, torch.empty_like(soft), *fake_gradients(student_hidden, student_weight, student_bias, needs)


@define(
    "linear_divergence_fwd(Tensor student_hidden, Tensor student_weight, Tensor? student_bias, Tensor teacher_hidden,"
    " Tensor teacher_weight, Tensor? teacher_bias, Tensor labels, Tensor factor, bool[] needs, ScalarType dtype,"
    f" ScalarType teacher_dtype, SymInt max_logits_bytes, bool has_kernel, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_fwd,
)
def _fwd(
    student_hidden: Tensor,
    student_weight: Tensor,
    student_bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    labels: Tensor,
    factor: Tensor,
    needs: Sequence[bool],
    dtype: torch.dtype,
    teacher_dtype: torch.dtype,
    max_logits_bytes: int,
    has_kernel: bool,
    *options: Any,
) -> tuple[Tensor, ...]:
    """Losses of rows, and gradients of their weighted sum, of weight and bias times `factor`."""
    o = _Options(*options)
    rows, teacher_rows = as_rows(student_hidden), as_rows(teacher_hidden)
    y = labels.reshape(-1).contiguous()
    heads = [
        (w.to(d), None if b is None else b.to(d))
        for w, b, d in ((student_weight, student_bias, dtype), (teacher_weight, teacher_bias, teacher_dtype))
    ]
    made = _fake_fwd(student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, None, labels,
                     factor, (needs[0], False, False), dtype, teacher_dtype)  # fmt: skip
    soft, hard, dhidden = made[0].view(-1), made[1].view(-1), made[2]
    num_rows, (num_classes, width) = rows.shape[0], student_weight.shape
    stride = row_stride(num_classes, rows.device)
    step = chunk_rows(num_rows, stride * (dtype.itemsize + teacher_dtype.itemsize), max_logits_bytes)
    buffers = [rows.new_empty((step, stride), dtype=d)[:, :num_classes] for d in (dtype, teacher_dtype)]
    num_chunks = cdiv(num_rows, max(step, 1))
    is_rounded = student_weight.dtype == dtype and (
        num_chunks <= 1 or not _sums_widely(num_chunks, student_weight.numel())
    )
    gradient = any(needs)
    fill = _launch_rows if has_kernel else _fill_rows
    total = dbias = None
    for start in range(0, num_rows, max(step, 1)):
        chunk = slice(start, min(start + step, num_rows))
        hs = rows[chunk].to(dtype), teacher_rows[chunk].to(teacher_dtype)
        logits = [b[: chunk.stop - start] for b in buffers]
        for h, (w, b), out in zip(hs, heads, logits, strict=True):
            if b is None:
                torch.mm(h, w.t(), out=out)
            else:
                torch.addmm(b, h, w.t(), out=out)
        dlogits, h = logits[0], hs[0]
        for i, part in _pieces(chunk, dlogits, has_kernel):
            of_teacher = logits[1][i.start - start : i.stop - start]
            fill(part, of_teacher, y[i], soft[i], hard[i], gradient, o)
        if needs[0]:
            out = dhidden.view(num_rows, width)[chunk]
            if student_hidden.dtype == dtype:
                torch.mm(dlogits, heads[0][0], out=out)
            else:
                out.copy_(torch.mm(dlogits, heads[0][0]))
        if needs[1]:
            h = scaled_rows(h, y[chunk], factor, o.ignore_index, has_kernel)
            if not is_rounded:
                total = accumulate(total, dlogits.t(), h)
            else:
                total = torch.mm(dlogits.t(), h) if total is None else total.addmm_(dlogits.t(), h)
        if needs[2]:
            part_sum = dlogits.sum(0, dtype=soft.dtype)
            dbias = part_sum if dbias is None else dbias.add_(part_sum)
    if dbias is not None:
        dbias *= factor
    b = student_weight[:, 0] if student_bias is None else student_bias
    return *made[:3], finished(total, student_weight, needs[1]), finished(dbias, b, needs[2])


# ---- autograd ----

_NONE = (False, False, False)


class _LinearDivergence(torch.autograd.Function):
    """Forward computes the gradients for an upstream gradient of 1, backward multiplies."""

    @staticmethod
    def forward(
        ctx: Any,
        student_hidden: Tensor,
        student_weight: Tensor,
        student_bias: Tensor | None,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        labels: Tensor,
        divisor: Tensor,
        is_traced: bool,
        settings: tuple[Any, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias, labels
        factor = divisor.reciprocal()
        # fp16 has no room for a share of the mean: its gradients wait for the upstream gradient, which scales the loss.
        ctx.settings, ctx.is_traced, ctx.is_late = settings, is_traced, settings[1] == torch.float16
        soft, hard, *gradients = _fwd(*inputs, factor, _NONE if ctx.is_late else settings[0], *settings[1:])
        if ctx.is_late:
            ctx.save_for_backward(*inputs, factor)
        elif is_traced:
            ctx.save_for_backward(*gradients, factor)
        else:
            # Not saved tensors: backward takes them out, so that nothing else holds them when it hands them over.
            ctx.gradients = gradients
            ctx.save_for_backward(*inputs, factor)
        weights = _Options(*settings[-len(_Options._fields) :])
        soft, hard = soft.sum() / divisor, hard.sum() / divisor
        ctx.mark_non_differentiable(soft, hard)
        return weights.soft_weight * soft + weights.hard_weight * hard, soft, hard

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        # Once: what is saved can be asked for a single time where it is computed again.
        saved = ctx.saved_tensors
        factor = saved[-1]
        factors: tuple[Tensor, ...] = dloss * factor, dloss, dloss
        if ctx.is_late:
            _soft, _hard, *gradients = _fwd(*saved[:-1], dloss * factor, *ctx.settings)
            factors = factors[:1]
            gradients[0] = (gradients[0].to(factor.dtype) * factors[0]).to(gradients[0].dtype)
        elif ctx.is_traced:
            *gradients, _factor = saved
            gradients = [(g.to(f.dtype) * f).to(g.dtype) for g, f in zip(gradients, factors, strict=True)]
        else:
            gradients, ctx.gradients = ctx.gradients, None
            if gradients is None:
                # Not the first backward: they were handed over.
                _soft, _hard, *gradients = _fwd(*saved, *ctx.settings)
            has_kernel = ctx.settings[4]
            for gradient, gradient_factor in zip(gradients, factors, strict=True):
                multiply_(gradient, gradient_factor, has_kernel)
        wanted = (g if is_needed else None for g, is_needed in zip(gradients, ctx.settings[0], strict=True))
        return *wanted, *[None] * 7


# ---- public ----


def _supports(student_hidden: Tensor, *rest: Any, **_: Any) -> list[str]:
    tensors = [t for t in (student_hidden, *rest) if isinstance(t, Tensor)]
    return ["float64 is computed in plain torch"] if any(t.dtype == torch.float64 for t in tensors) else []


@op(reference=linear_divergence_reference, supports=_supports)
def linear_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    labels: Tensor,
    *,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    divergence: Divergence = "jsd",
    beta: float = 0.5,
    temperature: float = 1.0,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float | None = None,
    ignore_index: int = -100,
    num_items: float | Tensor | None = None,
    max_logits_bytes: int | None = None,
) -> LinearDivergenceOutput:
    """Divergence of a student from its teacher, each under its own head, without storing the logits of either.

        x, y = (log_softmax(F.linear(hidden, weight, bias) / temperature) of student and teacher)
        loss = mean of jsd(x, y, beta)                                            # the reference, in one line

    Args:
        student_hidden: `[..., D]`, floating point, any strides.
        student_weight: `[V, D]`, same dtype as `student_hidden`, or cast with it by autocast.
        teacher_hidden, teacher_weight: `[..., E]` and `[V, E]`: another width, and another dtype, if need be.
        labels: `[...]`, any integer dtype: which rows are ignored, and the classes of the hard loss.
        student_bias, teacher_bias: `[V]` or None.
        divergence: "kl" of the teacher from the student, KL(teacher || student), "reverse_kl", KL(student || teacher),
            "jsd" with `beta`, "tvd", or "cosine", one less the cosine of the logits, which no temperature changes.
        beta: of "jsd", in [0, 1]: the weight of the teacher in the mean distribution. 0 is "kl", 1 is "reverse_kl".
        temperature: divides the logits of both in the divergence, after scale and cap. The loss is not multiplied by
            its square.
        soft_weight, hard_weight: factors of the divergence and of the cross entropy of `labels`, at temperature 1.
        softcap, logit_scale: logits become `softcap * tanh(logit_scale * logits / softcap)`; None leaves them.
        teacher_softcap, teacher_logit_scale: likewise those of the teacher.
        ignore_index: rows with this label add exactly 0 to the loss and to all gradients, whatever they hold.
        num_items: rows to divide by in place of those that are not ignored, for a batch that is part of a larger one:
            a number or a tensor of one element on any device.
        max_logits_bytes: most bytes of logits of both that exist at once, None for 1.25 GiB on accelerators and 64 MiB
            on a CPU.

    Returns:
        The named tuple `(loss, soft_loss, hard_loss)`, scalars in fp32 (fp64 for fp64 inputs): the means of both parts
        without a gradient, the hard one 0 for a `hard_weight` of 0. A divisor of 0 gives 0 and gradients 0.

    Raises:
        ValueError: shapes, dtypes, devices or options disagree, or one row of logits exceeds `max_logits_bytes`.
            A label that is neither a class nor `ignore_index` raises on a CPU; on a GPU the hard loss and the gradients
            it enters are NaN, and TIGON_DEBUG=1 raises.

    Numerics: logits in the dtype of the product, everything after them in fp32; sums of `dweight` as in
              `linear_cross_entropy`.
    Memory:   `max_logits_bytes` and the gradients. Four matrix products: two for the logits, and one for each of
              `dstudent_hidden` and `dstudent_weight` that is needed. A second backward makes all four again. In fp16
              the logits are computed in backward once more, when the scale of the loss is known.
    Differs from the reference: never in formula; order of summation over V and over rows. Tensor subclasses go to the
              reference itself, which stores all logits.
    Source: Hinton et al. 2015, arXiv:1503.02531; Agarwal et al. 2024, arXiv:2306.13649; Wen et al. 2023,
            arXiv:2307.15190.
    """
    name = "linear_divergence"
    heads = {
        "student": (student_hidden, student_weight, student_bias),
        "teacher": (teacher_hidden, teacher_weight, teacher_bias),
    }
    dtypes = []
    for role, (hidden, weight, bias) in heads.items():
        require_floating(name, **{f"{role}_hidden": hidden, f"{role}_weight": weight, f"{role}_bias": bias})
        require(weight.dim() == 2, name, f"{role}_weight", "two axes", f"shape {tuple(weight.shape)}")
        require(hidden.dim() >= 1, name, f"{role}_hidden", "at least one axis", "a scalar")
        classes, width = weight.shape
        require(width >= 1, name, f"{role}_weight", "at least one column", f"shape {tuple(weight.shape)}")
        expected = f"last axis {width}"
        require(hidden.shape[-1] == width, name, f"{role}_hidden", expected, f"shape {tuple(hidden.shape)}")
        if bias is not None:
            require(bias.shape == (classes,), name, f"{role}_bias", f"shape ({classes},)", tuple(bias.shape))
        dtypes.append(matmul_dtype(name, f"{role}_hidden", hidden.dtype, weight, bias))
    num_classes, rows = student_weight.shape[0], student_hidden.shape[:-1]
    same = teacher_weight.shape[0] == num_classes
    require(same, name, "teacher_weight", f"{num_classes} classes, as the student", f"{teacher_weight.shape[0]}")
    same = teacher_hidden.shape[:-1] == rows
    require(same, name, "teacher_hidden", f"rows {tuple(rows)}, as the student", tuple(teacher_hidden.shape[:-1]))
    require_one_of(name, "divergence", divergence, DIVERGENCES)
    require_number(name, "beta", beta, low=0, high=1)
    require_number(name, "temperature", temperature, low=0, above=True)
    numbers = {"soft_weight": soft_weight, "hard_weight": hard_weight}
    numbers |= {"logit_scale": logit_scale, "teacher_logit_scale": teacher_logit_scale}
    for argument, value in numbers.items():
        if value is not None:
            require_number(name, argument, value)
    for cap in (softcap, teacher_softcap):
        require_options(name, labels, rows, num_classes, 0.0, cap, None, "mean", num_items, 0.0)
    tensors = {f"{role}_{part}": t for role, head in heads.items() for part, t in zip("hwb", head, strict=True)}
    require_same_device(name, **tensors, labels=labels)
    dtype, teacher_dtype = dtypes
    if max_logits_bytes is None:
        max_logits_bytes = CPU_LOGITS_BYTES if student_hidden.device.type == "cpu" else LOGITS_BYTES
    require_bytes(name, "max_logits_bytes", max_logits_bytes)
    row_bytes = row_stride(num_classes, student_hidden.device) * (dtype.itemsize + teacher_dtype.itemsize)
    expected = f"at least {row_bytes}, one row of logits of both"
    require(max_logits_bytes >= row_bytes, name, "max_logits_bytes", expected, max_logits_bytes)
    labels = checked_labels(name, labels, num_classes, ignore_index)
    if divergence == "jsd" and beta in (0, 1):
        divergence = "kl" if beta == 0 else "reverse_kl"

    main = student_hidden, student_weight, teacher_hidden, teacher_weight, labels
    has_kernel = not runs_reference(name, *main, student_bias=student_bias, teacher_bias=teacher_bias)
    if not has_kernel and any(is_foreign(t) for t in (*main, student_bias, teacher_bias)):
        return linear_divergence_reference(
            *main,
            student_bias=student_bias,
            teacher_bias=teacher_bias,
            divergence=divergence,
            beta=beta,
            temperature=temperature,
            soft_weight=soft_weight,
            hard_weight=hard_weight,
            softcap=softcap,
            logit_scale=logit_scale,
            teacher_softcap=teacher_softcap,
            teacher_logit_scale=teacher_logit_scale,
            ignore_index=ignore_index,
            num_items=num_items,
        )
    student = student_hidden, student_weight, student_bias
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in student)
    scales = (None if s is None else float(s) for s in (logit_scale, teacher_logit_scale))
    scale, teacher_scale = scales
    options = (float(beta), float(temperature), float(soft_weight), float(hard_weight))
    caps = softcap, scale, teacher_softcap, teacher_scale
    settings = needs, dtype, teacher_dtype, max_logits_bytes, has_kernel, ignore_index, divergence, *options, *caps
    divisor = mean_divisors(labels, None, ignore_index, num_items, wide_dtype(dtype))[0]
    inputs = *student, teacher_hidden.detach(), teacher_weight.detach()
    inputs = *inputs, None if teacher_bias is None else teacher_bias.detach(), labels
    made = _LinearDivergence.apply(*inputs, divisor, _op.is_traced(student_hidden), settings)
    return LinearDivergenceOutput(*made)
