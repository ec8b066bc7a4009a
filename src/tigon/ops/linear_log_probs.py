"""Log-probabilities of labels, and entropies, under a linear projection, without ever holding all of its logits.

    z_ij  = softcap(logit_scale * (hidden_i . weight_j + bias_j))
    m_i   = max_j z_ij,   s_i = sum_j exp(z_ij - m_i),   p_ij = exp((z_ij - m_i) - log(s_i))
    log_probs_i = (z_iy - m_i) - log(s_i)
    entropy_i   = log(s_i) - u_i,   u_i = sum_j p_ij * (z_ij - m_i)              (no term of it is negative)
    predictions_i = the first j with z_ij = m_i

Gradient, with upstream c of log_probs_i and d of entropy_i, where z - m - u is log(p) + entropy:

    dz_j = c * [j = y] - p_j * (c + d * (z_j - m - u)),   dlogits_j = dz_j * logit_scale * (1 - (z_j / softcap)^2)
    dhidden = dlogits @ weight,   dweight = dlogits.T @ hidden,   dbias = sum over rows of dlogits

Rows are taken in chunks. Backward computes the logits of a chunk again, turns them into dlogits in place, and
multiplies these into the gradients before the next chunk overwrites them: any upstream gradient is exact.

M rows (all leading axes), D hidden size, V classes, y the label of a row. Saved for backward: the inputs and 8 bytes a
row, 12 with the entropy.   Source: Milakov & Gimelshein 2018, arXiv:1805.02867 (online softmax); Wijmans et al. 2024,
arXiv:2411.09009 (logits computed again); chunks as in linear_cross_entropy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._check import require, require_bytes, require_floating, require_number, require_same_device
from ._launch import as_rows, launch
from ._op import define, once_differentiable, op, runs_reference
from ._projection import (
    CPU_LOGITS_BYTES,
    CPU_SLICE_LOGITS,
    LOGITS_BYTES,
    SLICE_LOGITS,
    accumulate,
    chunk_rows,
    fake_gradients,
    finished,
    is_foreign,
    matmul_dtype,
    row_stride,
    scaled_rows,
)
from ._triton import tl, triton
from .cross_entropy import _blocks, _load_logits, checked_labels, require_options, stand_in_labels, wide_dtype


class LogProbsOutput(NamedTuple):
    """Of each row: log-probability of its label, entropy, likeliest class; None for what was not asked for."""

    log_probs: Tensor
    entropy: Tensor | None
    predictions: Tensor | None


# ---- reference ----


def linear_log_probs_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float | None = None,
    return_entropy: bool = False,
    return_predictions: bool = False,
    max_logits_bytes: int | None = None,
) -> Tensor | LogProbsOutput:
    # What an ignored row holds must not reach dweight, where 0 * inf is NaN.
    z = F.linear(hidden.masked_fill((labels == ignore_index).unsqueeze(-1), 0.0), weight, bias)
    z = z.to(wide_dtype(z.dtype))
    if logit_scale is not None:
        z = z * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    valid, y, poison = stand_in_labels(labels, z.shape[-1], ignore_index, z.dtype)
    log_p = z.log_softmax(-1)
    log_probs = torch.where(valid, log_p.gather(-1, y.unsqueeze(-1)).squeeze(-1) * poison, 0.0)
    if not (return_entropy or return_predictions):
        return log_probs
    entropy = predictions = None
    if return_entropy:
        p = log_p.exp()
        entropy = torch.where(valid, -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1) * poison, 0.0)
    if return_predictions:
        predictions = z.argmax(-1).masked_fill(~valid, -1)
    return LogProbsOutput(log_probs, entropy, predictions)


# ---- kernels ----


@triton.jit
def _finite(x):
    """What of a logarithm is multiplied with its exponential: exp(-1000) is 0, and 0 * -inf would be NaN."""
    return tl.maximum(x, -1000.0)


@triton.jit
def _linear_log_probs_fwd_kernel(
    logits_ptr,
    labels_ptr,
    log_probs_ptr,
    entropy_ptr,
    predictions_ptr,
    stats_ptr,
    logits_stride,
    stats_stride,
    num_cols,
    ignore_index,
    softcap,
    scale,
    HAS_ENTROPY: tl.constexpr,
    HAS_PREDICTIONS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per row, in one pass over its logits."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    stats_ptr += row * stats_stride
    label = tl.load(labels_ptr + row)

    if label == ignore_index:
        tl.store(log_probs_ptr + row, 0.0)
        tl.store(stats_ptr, 0.0)
        tl.store(stats_ptr + 1, 0.0)
        if HAS_ENTROPY:
            tl.store(entropy_ptr + row, 0.0)
            tl.store(stats_ptr + 2, 0.0)
        if HAS_PREDICTIONS:
            tl.store(predictions_ptr + row, -1)
        return

    is_class = (label >= 0) & (label < num_cols)
    z_label, _ = _load_logits(logits_ptr + label, is_class, scale, softcap, HAS_SCALE, HAS_SOFTCAP, "")
    cols = tl.arange(0, BLOCK_V)
    peak = tl.full([], float("-inf"), tl.float32)
    shifted_sum = tl.zeros([BLOCK_V], dtype=tl.float32)
    weighted_sum = tl.zeros([BLOCK_V], dtype=tl.float32)
    best = tl.full([BLOCK_V], float("-inf"), tl.float32)
    best_col = cols
    for start in tl.range(0, num_cols, BLOCK_V, num_stages=STAGES):
        c = start + cols
        z, _slope = _load_logits(logits_ptr + c, c < num_cols, scale, softcap, HAS_SCALE, HAS_SOFTCAP, "evict_first")
        new_peak = tl.maximum(peak, tl.max(z, axis=0))
        # Up to the first finite logit the peak is -inf, and -inf - -inf is NaN.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay = tl.exp(peak - shift)
        e = tl.exp(z - shift)
        if HAS_ENTROPY:
            weighted_sum = weighted_sum * decay + shifted_sum * (_finite(peak - shift) * decay) + e * _finite(z - shift)
        shifted_sum = shifted_sum * decay + e
        peak = new_peak
        if HAS_PREDICTIONS:
            # In each lane the first of equals, since no later one is larger.
            is_better = z > best
            best = tl.where(is_better, z, best)
            best_col = tl.where(is_better, c, best_col)
    total = tl.sum(shifted_sum, axis=0)
    log_sum = tl.log(total)
    if HAS_PREDICTIONS:
        # The first lane has a class, also where no logit is above -inf.
        first = tl.min(tl.where(best == tl.max(best, axis=0), best_col, 2147483647), axis=0)
        tl.store(predictions_ptr + row, first.to(tl.int64))
    # NaN here makes the gradient of the row NaN too, which starts from the statistics.
    peak = tl.where(is_class, peak, float("nan"))
    tl.store(log_probs_ptr + row, (z_label - peak) - log_sum)
    tl.store(stats_ptr, peak)
    tl.store(stats_ptr + 1, log_sum)
    if HAS_ENTROPY:
        mean = tl.sum(weighted_sum, axis=0) / total
        tl.store(entropy_ptr + row, tl.where(is_class, log_sum - mean, float("nan")))
        tl.store(stats_ptr + 2, mean)


@triton.jit
def _linear_log_probs_bwd_kernel(
    logits_ptr,
    labels_ptr,
    stats_ptr,
    dlog_probs_ptr,
    dentropy_ptr,
    logits_stride,
    stats_stride,
    dlog_probs_stride,
    dentropy_stride,
    num_cols,
    ignore_index,
    softcap,
    scale,
    HAS_ENTROPY: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per row, whose logits it replaces by their gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    stats_ptr += row * stats_stride
    label = tl.load(labels_ptr + row)
    cols = tl.arange(0, BLOCK_V)

    if label == ignore_index:
        zeros = tl.zeros([BLOCK_V], dtype=logits_ptr.dtype.element_ty)
        for start in range(0, num_cols, BLOCK_V):
            tl.store(logits_ptr + start + cols, zeros, mask=start + cols < num_cols)
        return

    peak = tl.load(stats_ptr)
    log_sum = tl.load(stats_ptr + 1)
    dlog_prob = tl.load(dlog_probs_ptr + row * dlog_probs_stride).to(tl.float32)
    if HAS_ENTROPY:
        mean = tl.load(stats_ptr + 2)
        dentropy = tl.load(dentropy_ptr + row * dentropy_stride).to(tl.float32)
    for start in tl.range(0, num_cols, BLOCK_V, num_stages=STAGES):
        c = start + cols
        mask = c < num_cols
        z, slope = _load_logits(logits_ptr + c, mask, scale, softcap, HAS_SCALE, HAS_SOFTCAP, "evict_first")
        z -= peak
        factor = dlog_prob
        if HAS_ENTROPY:
            factor += dentropy * (_finite(z) - mean)
        dz = -tl.exp(z - log_sum) * factor
        dz = tl.where(c == label, dz + dlog_prob, dz)
        tl.store(logits_ptr + c, dz * slope, mask=mask)


# ---- operators ----

# Value and class of the best logit of a lane take as many registers as its sums: half as many lanes a program.
_PREDICTIONS_BLOCK = 2048


def _chunks(
    rows: Tensor, weight: Tensor, bias: Tensor | None, max_logits_bytes: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Which rows, their hidden states and their logits, chunk after chunk; all logits lie in the same memory."""
    num_rows, num_classes, dtype = rows.shape[0], weight.shape[0], weight.dtype
    stride = row_stride(num_classes, rows.device)
    step = chunk_rows(num_rows, stride * dtype.itemsize, max_logits_bytes)
    buffer = rows.new_empty((step, stride), dtype=dtype)[:, :num_classes]
    for start in range(0, num_rows, max(step, 1)):
        chunk = slice(start, min(start + step, num_rows))
        h, logits = rows[chunk].to(dtype), buffer[: chunk.stop - start]
        if bias is None:
            torch.mm(h, weight.t(), out=logits)
        else:
            torch.addmm(bias, h, weight.t(), out=logits)
        yield chunk, h, logits


def _pieces(chunk: slice, logits: Tensor, has_kernel: bool) -> Iterator[tuple[slice, Tensor]]:
    """What of a chunk is computed at once: all with a kernel, else as much as may have fp32 intermediates."""
    step = chunk.stop - chunk.start
    if not has_kernel:
        most = CPU_SLICE_LOGITS if logits.device.type == "cpu" else SLICE_LOGITS
        step = min(step, max(1, most // logits.shape[1]))
    for start in range(chunk.start, chunk.stop, step):
        piece = slice(start, min(start + step, chunk.stop))
        yield piece, logits[start - chunk.start : piece.stop - chunk.start]


def _capped(
    logits: Tensor, dtype: torch.dtype, softcap: float | None, scale: float | None
) -> tuple[Tensor, Tensor | float]:
    """Scaled and capped logits, which may be `logits`, and their derivative."""
    z = logits.to(dtype)
    slope: Tensor | float = 1.0
    if scale is not None:
        z, slope = z * scale, scale
    if softcap is not None:
        t = torch.tanh_(z / softcap)
        z, slope = softcap * t, (1 - t.square()).mul_(slope)
    return z, slope


def _fill_outputs(
    logits: Tensor,
    labels: Tensor,
    log_probs: Tensor,
    entropy: Tensor | None,
    predictions: Tensor | None,
    stats: Tensor,
    ignore_index: int,
    softcap: float | None,
    scale: float | None,
) -> None:
    """What the forward kernel does, in torch and in the dtype of `stats`."""
    valid, y, poison = stand_in_labels(labels, logits.shape[1], ignore_index, stats.dtype)
    z, _ = _capped(logits, stats.dtype, softcap, scale)
    if predictions is not None:
        predictions.copy_(z.argmax(-1).masked_fill_(~valid, -1))
    peak = z.amax(-1)
    z = z - peak.unsqueeze(-1)
    at = z.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    e = z.exp()
    total = e.sum(-1)
    log_sum = total.log()
    stats[:, 0], stats[:, 1] = peak * poison, log_sum
    log_probs.copy_(((at - log_sum) * poison).masked_fill_(~valid, 0.0))
    if entropy is not None:
        # As in the kernel, 0 in place of 0 * -inf.
        mean = z.clamp_(min=-1000).mul_(e).sum(-1) / total
        stats[:, 2] = mean
        entropy.copy_(((log_sum - mean) * poison).masked_fill_(~valid, 0.0))


def _fill_dlogits(
    logits: Tensor,
    labels: Tensor,
    stats: Tensor,
    dlog_probs: Tensor,
    dentropy: Tensor | None,
    ignore_index: int,
    softcap: float | None,
    scale: float | None,
) -> None:
    """What the backward kernel does, in torch and in the dtype of `stats`."""
    valid, y, _ = stand_in_labels(labels, logits.shape[1], ignore_index, stats.dtype)
    z, slope = _capped(logits, stats.dtype, softcap, scale)
    dlog_probs = factor = dlog_probs.to(stats.dtype).unsqueeze(-1)
    z = z - stats[:, :1]
    p = (z - stats[:, 1:2]).exp_()
    if dentropy is not None:
        factor = dlog_probs + z.clamp_(min=-1000).sub_(stats[:, 2:]).mul_(dentropy.to(stats.dtype).unsqueeze(-1))
    dz = p.mul_(-factor).scatter_add_(-1, y.unsqueeze(-1), dlog_probs)
    logits.copy_(dz.mul_(slope).masked_fill_(~valid.unsqueeze(-1), 0.0))


def _launch_fwd(
    logits: Tensor,
    labels: Tensor,
    log_probs: Tensor,
    entropy: Tensor | None,
    predictions: Tensor | None,
    stats: Tensor,
    ignore_index: int,
    softcap: float | None,
    scale: float | None,
) -> None:
    num_rows, num_cols = logits.shape
    has_options = softcap is not None or entropy is not None or predictions is not None
    block, num_warps = _blocks(num_cols, True, False, has_options)
    if predictions is not None:
        block = min(block, _PREDICTIONS_BLOCK)
    launch(
        _linear_log_probs_fwd_kernel,
        (num_rows,),
        logits,
        labels,
        log_probs,
        entropy,
        predictions,
        stats,
        logits.stride(0),
        stats.stride(0),
        num_cols,
        ignore_index,
        float(softcap or 0.0),
        1.0 if scale is None else scale,
        HAS_ENTROPY=entropy is not None,
        HAS_PREDICTIONS=predictions is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SCALE=scale is not None,
        BLOCK_V=block,
        STAGES=2,
        num_warps=num_warps,
    )


def _launch_bwd(
    logits: Tensor,
    labels: Tensor,
    stats: Tensor,
    dlog_probs: Tensor,
    dentropy: Tensor | None,
    ignore_index: int,
    softcap: float | None,
    scale: float | None,
) -> None:
    num_rows, num_cols = logits.shape
    block, num_warps = _blocks(num_cols, False, True, False)
    launch(
        _linear_log_probs_bwd_kernel,
        (num_rows,),
        logits,
        labels,
        stats,
        dlog_probs,
        dentropy,
        logits.stride(0),
        stats.stride(0),
        dlog_probs.stride(0),
        0 if dentropy is None else dentropy.stride(0),
        num_cols,
        ignore_index,
        float(softcap or 0.0),
        1.0 if scale is None else scale,
        HAS_ENTROPY=dentropy is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SCALE=scale is not None,
        BLOCK_V=block,
        STAGES=2,
        num_warps=num_warps,
    )


# Arguments that both operators pass on as they are.
_SETTINGS = "ScalarType dtype, SymInt max_logits_bytes, bool has_kernel, int ignore_index, float? softcap, float? scale"


def _fake_fwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    has_entropy: bool,
    has_predictions: bool,
    dtype: torch.dtype,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    log_probs = hidden.new_empty(labels.shape, dtype=wide_dtype(dtype))
    entropy = log_probs.new_empty(labels.shape if has_entropy else (0,))
    predictions = labels.new_empty(labels.shape if has_predictions else (0,), dtype=torch.int64)
    return log_probs, entropy, predictions, log_probs.new_empty((*labels.shape, 3 if has_entropy else 2))


@define(
    "linear_log_probs_fwd(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, bool has_entropy,"
    f" bool has_predictions, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_fwd,
)
def _fwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    has_entropy: bool,
    has_predictions: bool,
    dtype: torch.dtype,
    max_logits_bytes: int,
    has_kernel: bool,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = _fake_fwd(hidden, weight, bias, labels, has_entropy, has_predictions, dtype)
    log_probs, entropy, predictions = (t.view(-1) for t in out[:3])
    stats = out[3].view(-1, out[3].shape[-1])
    w, b, y = weight.to(dtype), None if bias is None else bias.to(dtype), labels.reshape(-1).contiguous()
    fill = _launch_fwd if has_kernel else _fill_outputs
    for chunk, _, logits in _chunks(as_rows(hidden), w, b, max_logits_bytes):
        for i, part in _pieces(chunk, logits, has_kernel):
            asked = entropy[i] if has_entropy else None, predictions[i] if has_predictions else None
            fill(part, y[i], log_probs[i], *asked, stats[i], *options)
    return out


def _sums(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    stats: Tensor,
    dlog_probs: Tensor,
    dentropy: Tensor | None,
    needs: Sequence[bool],
    dtype: torch.dtype,
    max_logits_bytes: int,
    has_kernel: bool,
    ignore_index: int,
    *options: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients that are needed: dhidden in its dtype, the others as they have been summed up."""
    rows = as_rows(hidden)
    w, b, y = weight.to(dtype), None if bias is None else bias.to(dtype), labels.reshape(-1).contiguous()
    stats, dlog_probs = stats.view(-1, stats.shape[-1]), dlog_probs.reshape(-1)
    dentropy = None if dentropy is None else dentropy.reshape(-1)
    dhidden = hidden.new_empty(hidden.shape if needs[0] else (0,))
    total = dbias = None
    fill = _launch_bwd if has_kernel else _fill_dlogits
    for chunk, h, dlogits in _chunks(rows, w, b, max_logits_bytes):
        for i, part in _pieces(chunk, dlogits, has_kernel):
            fill(part, y[i], stats[i], dlog_probs[i], None if dentropy is None else dentropy[i], ignore_index, *options)
        if needs[0]:
            out = dhidden.view(rows.shape)[chunk]
            if hidden.dtype == dtype:
                torch.mm(dlogits, w, out=out)
            else:
                out.copy_(torch.mm(dlogits, w))
        if needs[1]:
            h = scaled_rows(h, y[chunk], None, ignore_index, has_kernel)
            # With one chunk there is nothing to add up, and the product can be rounded at once.
            is_rounded_once = len(h) == len(rows) and weight.dtype == dtype
            total = torch.mm(dlogits.t(), h) if is_rounded_once else accumulate(total, dlogits.t(), h)
        if needs[2]:
            part_sum = dlogits.sum(0, dtype=wide_dtype(dtype))
            dbias = part_sum if dbias is None else dbias.add_(part_sum)
    return dhidden, total, dbias


def _fake_bwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    stats: Tensor,
    dlog_probs: Tensor,
    dentropy: Tensor | None,
    needs: Sequence[bool],
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(hidden, weight, bias, needs)


@define(
    "linear_log_probs_bwd(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor stats, Tensor dlog_probs,"
    f" Tensor? dentropy, bool[] needs, {_SETTINGS}) -> (Tensor, Tensor, Tensor)",
    fake=_fake_bwd,
)
def _bwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    stats: Tensor,
    dlog_probs: Tensor,
    dentropy: Tensor | None,
    needs: Sequence[bool],
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    dhidden, dweight, dbias = _sums(hidden, weight, bias, labels, stats, dlog_probs, dentropy, needs, *settings)
    b = weight[:, 0] if bias is None else bias
    return dhidden, finished(dweight, weight, needs[1]), finished(dbias, b, needs[2])


# ---- autograd ----


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        has_entropy: bool,
        has_predictions: bool,
        settings: tuple[Any, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        *out, stats = _fwd(hidden, weight, bias, labels, has_entropy, has_predictions, *settings)
        ctx.save_for_backward(hidden, weight, bias, labels, stats)
        ctx.mark_non_differentiable(out[2])
        ctx.has_entropy, ctx.settings = has_entropy, settings
        return tuple(out)  # type: ignore[return-value]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlog_probs: Tensor, dentropy: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = tuple(ctx.needs_input_grad[:3])
        gradients = _bwd(*ctx.saved_tensors, dlog_probs, dentropy if ctx.has_entropy else None, needs, *ctx.settings)
        wanted = (g if is_needed else None for g, is_needed in zip(gradients, needs, strict=True))
        return *wanted, None, None, None, None


# ---- public ----


def _supports(hidden: Tensor, weight: Tensor | None = None, labels: Tensor | None = None, **_: Any) -> list[str]:
    return ["float64 is computed in plain torch"] if hidden.dtype == torch.float64 else []


def require_head(
    name: str,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    logit_scale: float | None,
) -> None:
    """The checks of a head that is asked for log-probabilities.

    Raises:
        ValueError: naming the argument, what was expected, and what it was.
    """
    require_floating(name, hidden=hidden, weight=weight, bias=bias)
    require(weight.dim() == 2, name, "weight", "two axes", f"shape {tuple(weight.shape)}")
    num_classes, width = weight.shape
    require(hidden.dim() >= 1, name, "hidden", "at least one axis", "a scalar")
    require(width >= 1, name, "weight", "at least one column", f"shape {tuple(weight.shape)}")
    require(hidden.shape[-1] == width, name, "hidden", f"last axis {width}", f"shape {tuple(hidden.shape)}")
    if bias is not None:
        require(bias.shape == (num_classes,), name, "bias", f"shape ({num_classes},)", tuple(bias.shape))
    require_options(name, labels, hidden.shape[:-1], num_classes, 0.0, softcap, None, "none", None, 0.0)
    if logit_scale is not None:
        require_number(name, "logit_scale", logit_scale)
    require_same_device(name, hidden=hidden, weight=weight, labels=labels, bias=bias)


@op(reference=linear_log_probs_reference, supports=_supports)
def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float | None = None,
    return_entropy: bool = False,
    return_predictions: bool = False,
    max_logits_bytes: int | None = None,
) -> Tensor | LogProbsOutput:
    """Log-probability of each label under the softmax of `hidden @ weight.T`, without storing the logits.

        log_probs = log_softmax(F.linear(hidden, weight, bias).float(), -1).gather(-1, labels[..., None])[..., 0]

    For losses that are functions of log-probabilities and entropies: policy gradients, preferences, distillation.

    Args:
        hidden: `[..., D]`, floating point, any strides.
        weight: `[V, D]`, same dtype as `hidden`, or cast with it by autocast.
        labels: `[...]`, any integer dtype: the classes whose log-probabilities are wanted.
        bias: `[V]`, same dtype as `weight`, or None; -inf takes a class out of the distribution.
        ignore_index: rows with this label give log-probability 0, entropy 0, prediction -1, and add exactly 0 to all
            gradients, whatever they hold.
        softcap: logits become `softcap * tanh(logits / softcap)`, after `logit_scale`; None leaves them.
        logit_scale: factor of the logits, 1 / T for a temperature T; None leaves them.
        return_entropy: return the entropies of the rows too, in nats, with their gradient.
        return_predictions: return the likeliest class of each row too, the first of equals.
        max_logits_bytes: most bytes of logits that exist at once, None for 1.25 GiB on accelerators and 64 MiB on a
            CPU. Fewer chunks are faster; the result does not depend on it but for rounding.

    Returns:
        `log_probs`, `[...]` fp32 (fp64 for fp64 inputs); with `return_entropy` or `return_predictions` the named tuple
        `(log_probs, entropy, predictions)`: `[...]` of the same dtype, `[...]` int64 without a gradient, None for
        what was not asked.

    Raises:
        ValueError: shapes, dtypes, devices or options disagree, or one row of logits exceeds `max_logits_bytes`.
            A label that is neither a class nor `ignore_index` raises on a CPU; on a GPU the log-probability and the
            entropy of its row and the gradients it enters are NaN, and TIGON_DEBUG=1 raises.

    Numerics: logits in the dtype of the product, statistics and results in fp32; the upstream gradient is multiplied in
              before dlogits are rounded; `dweight` and `dbias` add up over chunks in fp32 and are rounded once.
    Memory:   `max_logits_bytes`, and in backward the gradients, and an fp32 copy of `dweight` while 16-bit chunks add
              up. Saves the inputs and 8 bytes a row, 12 with the entropy. One matrix product in forward, in backward
              one for the logits and one for each of `dhidden` and `dweight` that is needed.
    Differs from the reference: never in formula; order of summation over V and over rows, which may decide between
              predictions that are equal to rounding, and the prediction of a row with NaN. Tensor subclasses go to
              the reference itself, which stores all logits.
    Source: Milakov & Gimelshein 2018, arXiv:1805.02867; Wijmans et al. 2024, arXiv:2411.09009.
    """
    name = "linear_log_probs"
    require_head(name, hidden, weight, labels, bias, softcap, logit_scale)
    num_classes = weight.shape[0]
    dtype = matmul_dtype(name, "hidden", hidden.dtype, weight, bias)
    if max_logits_bytes is None:
        max_logits_bytes = CPU_LOGITS_BYTES if hidden.device.type == "cpu" else LOGITS_BYTES
    require_bytes(name, "max_logits_bytes", max_logits_bytes)
    row_bytes = row_stride(num_classes, hidden.device) * dtype.itemsize
    expected = f"at least {row_bytes}, one row of logits"
    require(max_logits_bytes >= row_bytes, name, "max_logits_bytes", expected, max_logits_bytes)
    labels = checked_labels(name, labels, num_classes, ignore_index)

    has_kernel = not runs_reference(name, hidden, weight, labels, bias=bias)
    if not has_kernel and any(is_foreign(t) for t in (hidden, weight, labels, bias)):
        return linear_log_probs_reference(
            hidden,
            weight,
            labels,
            bias=bias,
            ignore_index=ignore_index,
            softcap=softcap,
            logit_scale=logit_scale,
            return_entropy=return_entropy,
            return_predictions=return_predictions,
        )
    scale = None if logit_scale is None else float(logit_scale)
    settings = dtype, max_logits_bytes, has_kernel, ignore_index, softcap, scale
    log_probs, entropy, predictions = _LinearLogProbs.apply(
        hidden, weight, bias, labels, return_entropy, return_predictions, settings
    )
    if not (return_entropy or return_predictions):
        return log_probs
    return LogProbsOutput(log_probs, entropy if return_entropy else None, predictions if return_predictions else None)
