"""Cross entropy of a linear projection, without ever holding all of its logits.

    logits = (hidden @ weight.T + bias) * logit_scale
    loss   = cross_entropy(logits, labels, ...)                         (softcap, smoothing, z-loss as there)

Gradient, with dlogits that of cross_entropy times logit_scale:

    dhidden = dlogits @ weight,   dweight = dlogits.T @ hidden,   dbias = sum over rows of dlogits

Rows are taken in chunks: the logits of one chunk are computed, turned into dlogits in place, and multiplied into
the gradients before the next chunk overwrites them. For a scalar loss that happens in forward, up to the upstream
gradient, which backward multiplies in; for losses of rows backward computes the logits again. The dlogits of a mean
are those of a sum: times 1 / divisor the label's entries, all next to -1, would all have the same rounding error.
The plain loss reads its logits once (`_anchored.py`). Where all of them fit into the memory of dweight and what
`max_logits_bytes` adds to it, they are one chunk, in blocks of classes, and each part of dweight is written by one
product over logits that are used up.

M rows (all leading axes), D hidden size, V classes. Saved for backward: the inputs, 8 bytes a row, and for a
scalar loss the gradients.   Source: Wijmans et al. 2024, arXiv:2411.09009, and Hsu et al. 2024, arXiv:2410.10989
(chunks with the gradient in forward).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _op
from ._anchored import anchor_rows, place_blocks, plan_blocks, wave_columns
from ._check import require, require_floating, require_number, require_one_of, require_same_device
from ._device import num_sms
from ._launch import as_rows, cdiv
from ._op import define, once_differentiable, op, runs_reference
from ._projection import (
    CPU_LOGITS_BYTES,
    CPU_SLICE_LOGITS,
    LOGITS_BYTES,
    SLICE_LOGITS,
    TILE_ROWS,
    accumulate,
    chunk_rows,
    fake_gradients,
    finished,
    has_wide_product,
    is_foreign,
    matmul_dtype,
    multiply_,
    row_stride,
    scale_rows,
    scaled_rows,
)
from ._slices import Options, sliced_gradients, sliced_statistics
from .cross_entropy import (
    CrossEntropyOutput,
    Reduction,
    checked_labels,
    cross_entropy_reference,
    launch_rows,
    mean_divisors,
    reduce_rows,
    require_options,
    stand_in_labels,
    wide_dtype,
)

Memory = Literal["default", "min"]
MEMORIES = ("default", "min")


# ---- reference ----


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    class_weight: Tensor | None = None,
    reduction: Reduction = "mean",
    num_items: float | Tensor | None = None,
    logit_scale: float | None = None,
    return_z_loss: bool = False,
    max_logits_bytes: int | None = None,
    memory: Memory = "default",
) -> Tensor | CrossEntropyOutput:
    # What an ignored row holds must not reach dweight, where 0 * inf is NaN.
    hidden = hidden.masked_fill((labels == ignore_index).unsqueeze(-1), 0.0)
    logits = F.linear(hidden, weight, bias)
    if logit_scale is not None:
        logits = logits.to(wide_dtype(logits.dtype)) * logit_scale
    return cross_entropy_reference(
        logits,
        labels,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        class_weight=class_weight,
        reduction=reduction,
        num_items=num_items,
        return_z_loss=return_z_loss,
    )


# ---- kernels ----

# Those of `_anchored.py`, `cross_entropy.py` and `_projection.py`.


# ---- operators ----

# The same by tiles, where losses are all that is wanted or memory matters most.
MIN_LOGITS_BYTES = 64 << 20
# fp32 sums of dhidden over blocks of classes, and sums of dweight that are not worth a rounding.
_SUM_BYTES, _FREE_SUM_BYTES = 96 << 20, 64 << 20
_MAX_ROUNDED_CHUNKS = 8


def _fill_rows(
    logits: Tensor,
    labels: Tensor,
    class_weight: Tensor | None,
    ce: Tensor | None,
    squares: Tensor | None,
    stats: Tensor,
    dce: Tensor | None,
    dsquares: Tensor | None,
    dlogits: Tensor | None,
    z_loss: float,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    scale: float | None,
) -> None:
    """What `launch_rows` does, in torch and in the dtype of `stats`."""
    num_classes = logits.shape[-1]
    wide = stats.dtype
    valid, y, poison = stand_in_labels(labels, num_classes, ignore_index, wide)
    confidence, smoothing = 1.0 - label_smoothing, label_smoothing / num_classes
    w = None if class_weight is None else class_weight.to(wide)
    label_weight = confidence if w is None else confidence * w[y].unsqueeze(-1)
    smooth_weight = label_smoothing if w is None else smoothing * w.sum()
    z = logits.masked_fill(~valid.unsqueeze(-1), 0.0).to(wide)
    if scale is not None:
        z *= scale
    slope = 1.0 if scale is None else scale
    if softcap is not None:
        t = torch.tanh_(z.div_(softcap))
        slope = (1 - t.square()).mul_(slope)
        z = t.mul_(softcap)
    if ce is not None:
        peak = z.amax(-1, keepdim=True)
        log_sum = (z - peak).exp_().sum(-1, keepdim=True).log_()
        peak = peak * poison.unsqueeze(-1)
    else:
        peak, log_sum = stats[:, :1], stats[:, 1:]
    z -= peak
    z -= log_sum
    lse = peak + log_sum
    if ce is not None:
        rows_ce = -label_weight * z.gather(-1, y.unsqueeze(-1))
        if label_smoothing:
            rows_ce -= smoothing * (z if w is None else z * w).sum(-1, keepdim=True)
        ce.copy_(rows_ce.squeeze(-1).masked_fill(~valid, 0.0))
        stats.copy_(torch.cat((peak, log_sum), -1))
        if z_loss:
            squares.copy_((z_loss * lse.square()).squeeze(-1).masked_fill(~valid, 0.0))  # type: ignore[union-attr]
    if dlogits is not None:
        dce, dsquares = (None if t is None else t.to(wide).expand(labels.shape).unsqueeze(-1) for t in (dce, dsquares))
        p_factor = dce * (label_weight + smooth_weight)
        if z_loss:
            p_factor = p_factor + dsquares * (2 * z_loss * lse)
        dz = z.exp_().mul_(p_factor)
        if label_smoothing:
            dz -= dce * smoothing * (1.0 if w is None else w)
        dz.scatter_add_(-1, y.unsqueeze(-1), -(dce * label_weight))
        dlogits.copy_(dz.mul_(slope).masked_fill_(~valid.unsqueeze(-1), 0.0))


def _part(rows: Tensor | None, start: int, end: int) -> Tensor | None:
    return rows if rows is None or rows.dim() == 0 else rows[start:end]


def _drive(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    class_weight: Tensor | None,
    ce: Tensor | None,
    squares: Tensor | None,
    stats: Tensor,
    dce: Tensor | None,
    dsquares: Tensor | None,
    factor: Tensor | None,
    needs: Sequence[bool],
    dtype: torch.dtype,
    z_loss: float,
    max_logits_bytes: int,
    has_kernel: bool,
    ignore_index: int,
    *options: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """All chunks: fills `ce`, `squares`, `stats` where `ce` is given, and sums up the gradients that are needed.

    dweight and dbias come times `factor`, dhidden does not.
    """
    needs_dhidden, needs_dweight, needs_dbias = needs
    device, (num_classes, width) = hidden.device, weight.shape
    is_cpu = device.type == "cpu"
    rows, labels = as_rows(hidden), labels.reshape(-1).contiguous()
    num_rows = rows.shape[0]
    w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
    dhidden = hidden.new_empty(hidden.shape if needs_dhidden else (0,))
    total = dbias = None
    stats = stats.view(-1, 2)
    if ce is not None:
        ce, squares = ce.view(-1), squares.view(-1) if z_loss else None
    # An upstream gradient is one for all rows, or one a row.
    upstream = [t if t is None or t.dim() == 0 else t.reshape(-1) for t in (dce, dsquares)]
    per_row = ce, squares, *upstream

    stride = row_stride(num_classes, device)
    step = chunk_rows(num_rows, stride * dtype.itemsize, max_logits_bytes)
    buffer = rows.new_empty((step, stride), dtype=dtype)[:, :num_classes]
    slice_rows = max(1, (CPU_SLICE_LOGITS if is_cpu else SLICE_LOGITS) // num_classes)
    # With one chunk there is nothing to add up, and the product can be rounded at once.
    is_rounded_once = num_rows <= step and weight.dtype == dtype

    for start in range(0, num_rows, max(step, 1)):
        end = min(start + step, num_rows)
        logits, h = buffer[: end - start], rows[start:end].to(dtype)
        if b is None:
            torch.mm(h, w.t(), out=logits)
        else:
            torch.addmm(b, h, w.t(), out=logits)
        for i in range(start, end, end - start if has_kernel else slice_rows):
            j = end if has_kernel else min(i + slice_rows, end)
            part = logits[i - start : j - start]
            part_ce, part_squares, part_dce, part_dsquares = (_part(t, i, j) for t in per_row)
            (launch_rows if has_kernel else _fill_rows)(
                part,
                labels[i:j],
                class_weight,
                part_ce,
                part_squares,
                stats[i:j],
                part_dce,
                part_dsquares,
                None if dce is None else part,
                z_loss,
                ignore_index,
                *options,
            )
        if needs_dhidden:
            out = dhidden.view(num_rows, width)[start:end]
            if hidden.dtype == dtype:
                torch.mm(logits, w, out=out)
            else:
                out.copy_(torch.mm(logits, w))
        if needs_dweight:
            h = scaled_rows(h, labels[start:end], factor, ignore_index, has_kernel)
            total = torch.mm(logits.t(), h) if is_rounded_once else accumulate(total, logits.t(), h)
        if needs_dbias:
            part_sum = logits.sum(0, dtype=wide_dtype(dtype))
            dbias = part_sum if dbias is None else dbias.add_(part_sum)
    if dbias is not None and factor is not None:
        dbias *= factor
    return dhidden, total, dbias


def _anchors(
    ce: Tensor | None,
    dce: Tensor | None,
    class_weight: Tensor | None,
    needs: Sequence[bool],
    z_loss: float,
    label_smoothing: float,
    has_kernel: bool,
    like: Tensor,
) -> bool:
    """True where `_drive_anchored` does what `_drive` would: both losses and gradients, of the plain cross entropy."""
    is_plain = class_weight is None and not z_loss and not label_smoothing and not needs[2]
    if ce is None or dce is None or not is_plain or not has_kernel or not any(needs):
        return False
    return like.dtype == torch.float32 or (like.dtype == torch.bfloat16 and has_wide_product(like))


def _sums_widely(num_chunks: int, num_elements: int) -> bool:
    """True where chunks of 16-bit products add up in fp32 rather than in their own dtype.

    In that they are rounded once a chunk, which the first few hardly show beside the rounding of the factors; a sum
    in fp32 takes twice the memory of the gradient while it grows.
    """
    return num_chunks > _MAX_ROUNDED_CHUNKS or 4 * num_elements <= _FREE_SUM_BYTES


def _drive_anchored(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ce: Tensor,
    stats: Tensor,
    dce: Tensor,
    factor: Tensor | None,
    needs: Sequence[bool],
    dtype: torch.dtype,
    max_logits_bytes: int,
    ignore_index: int,
    softcap: float | None,
    scale: float | None,
) -> tuple[Tensor, Tensor | None]:
    """What `_drive` does, with logits read once; dweight comes in its own dtype where one product makes it."""
    needs_dhidden, needs_dweight, _ = needs
    num_classes, width = weight.shape
    rows, labels = as_rows(hidden), labels.reshape(-1).contiguous()
    num_rows = rows.shape[0]
    w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
    dhidden = hidden.new_empty(hidden.shape if needs_dhidden else (0,))
    ce, stats = ce.view(-1), stats.view(-1, 2)
    dce = dce if dce.dim() == 0 else dce.reshape(-1)
    options = ignore_index, softcap, scale

    def fill(block: Tensor, h: Tensor, first: int) -> None:
        part = slice(first, first + block.shape[1])
        if b is None:
            torch.mm(h, w[part].t(), out=block)
        else:
            torch.addmm(b[part], h, w[part].t(), out=block)

    def write_dhidden(blocks: list[Tensor], factors: Tensor, start: int) -> None:
        """Rows from `start` on, as many at a time as an fp32 sum over the blocks has room for."""
        out = dhidden.view(num_rows, width)
        step = max(TILE_ROWS, _SUM_BYTES // (4 * width) // TILE_ROWS * TILE_ROWS)
        for i in range(0, factors.shape[0], step):
            part = slice(i, i + step)
            total, first = None, 0
            for block in blocks:
                total = accumulate(total, block[part], w[first : first + block.shape[1]])
                first += block.shape[1]
            target = slice(start + i, min(start + i + step, num_rows))
            scale_rows(total, labels[target], factors[part], None, ignore_index, out[target])  # type: ignore[arg-type]

    stride = row_stride(num_classes, hidden.device)
    row_bytes = stride * dtype.itemsize
    if needs_dweight and weight.dtype == dtype and num_rows * row_bytes > max_logits_bytes:
        plan = plan_blocks(num_rows, width, num_classes, wave_columns(num_sms(hidden.device), num_classes))
        if plan.num_outside * dtype.itemsize <= max_logits_bytes:
            dweight = weight.new_empty(weight.shape)
            blocks = place_blocks(plan, dweight, num_rows)
            h = rows.to(dtype)
            firsts = [sum(plan.widths[:i]) for i in range(len(blocks))]
            factors = anchor_rows(
                blocks, labels, ce, stats, dce, *options, fill=lambda i: fill(blocks[i], h, firsts[i])
            )
            if needs_dhidden:
                write_dhidden(blocks, factors, 0)
            h = scale_rows(h, labels, factors, factor, ignore_index, h.new_empty(h.shape))
            # From the first on: each part of dweight lies where blocks before it were.
            for block, first in zip(blocks, firsts, strict=True):
                torch.mm(block.t(), h, out=dweight[first : first + block.shape[1]])
            return dhidden, dweight

    step = chunk_rows(num_rows, row_bytes, max_logits_bytes)
    buffer = rows.new_empty((step, stride), dtype=dtype)[:, :num_classes]
    num_chunks = cdiv(num_rows, max(step, 1))
    is_rounded = weight.dtype == dtype and (num_chunks <= 1 or not _sums_widely(num_chunks, weight.numel()))
    total = None
    for start in range(0, num_rows, max(step, 1)):
        end = min(start + step, num_rows)
        logits, h, y = buffer[: end - start], rows[start:end].to(dtype), labels[start:end]
        fill(logits, h, 0)
        upstream = dce if dce.dim() == 0 else dce[start:end]
        factors = anchor_rows([logits], y, ce[start:end], stats[start:end], upstream, *options)
        if needs_dhidden:
            write_dhidden([logits], factors, start)
        if needs_dweight:
            h = scale_rows(h, y, factors, factor, ignore_index, h.new_empty(h.shape))
            if not is_rounded:
                total = accumulate(total, logits.t(), h)
            else:
                total = torch.mm(logits.t(), h) if total is None else total.addmm_(logits.t(), h)
    return dhidden, total


def _sliced(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    class_weight: Tensor | None,
    ce: Tensor | None,
    squares: Tensor | None,
    stats: Tensor,
    dce: Tensor | None,
    dsquares: Tensor | None,
    factor: Tensor | None,
    needs: Sequence[bool],
    dtype: torch.dtype,
    z_loss: float,
    max_logits_bytes: int,
    has_kernel: bool,
    ignore_index: int,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `_gradients` does, by tiles: either the losses or, with their statistics, the gradients."""
    labels, stats = labels.reshape(-1).contiguous(), stats.view(-1, 2)
    w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
    inputs = as_rows(hidden).to(dtype), w, b, labels
    settings = max_logits_bytes, ignore_index, Options(z_loss, *options), has_kernel
    # Without smoothing the weight of a class is a factor of the rows that have its label.
    row_weight = None
    if class_weight is not None:
        _, y, _ = stand_in_labels(labels, weight.shape[0], ignore_index, stats.dtype)
        row_weight = class_weight.to(stats.dtype)[y]
    if ce is not None:
        ce, squares = ce.view(-1), squares.view(-1) if z_loss else None  # type: ignore[union-attr]
        sliced_statistics(*inputs, ce, squares, stats, *settings)
        if row_weight is not None:
            ce *= row_weight
    like = hidden, weight, weight[:, 0] if bias is None else bias
    if dce is None:
        return tuple(t.new_empty(0) for t in like)  # type: ignore[return-value]
    if dsquares is None and dce.numel() and not any(dce.stride()):
        # One upstream gradient for all rows: multiplied in last, it spares dlogits a rounding that all labels share.
        dce, factor = dce.new_ones(()), dce.view(-1)[0] if dce.dim() == 0 else dce[(0,) * dce.dim()]
    if dsquares is None and z_loss:
        dsquares = dce
    upstream = [t if t is None or t.dim() == 0 else t.reshape(-1) for t in (dce, dsquares)]
    if row_weight is not None:
        upstream[0] = upstream[0] * row_weight  # type: ignore[operator]
    made = [t.new_empty(t.shape) if is_needed else None for t, is_needed in zip(like, needs, strict=True)]
    if made[2] is not None:
        made[2] = made[2].new_empty(weight.shape[0], dtype=stats.dtype)
    if labels.numel():
        dhidden = None if made[0] is None else made[0].view(-1, hidden.shape[-1])
        sliced_gradients(*inputs, stats, *upstream, factor, dhidden, *made[1:], *settings)  # type: ignore[arg-type]
    else:
        made = [None if t is None else t.zero_() for t in made]
    return tuple(finished(t, x, is_needed) for t, x, is_needed in zip(made, like, needs, strict=True))  # type: ignore[return-value]


def _gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any, needs: Sequence[bool], settings: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """All chunks, then the gradients in their dtypes, for which the buffer of logits makes room."""
    labels, class_weight, ce, _, stats, dce, _, factor = rest
    dtype, z_loss, max_logits_bytes, has_kernel, ignore_index, label_smoothing, softcap, scale, is_sliced = settings
    dbias = None
    settings = settings[:-1]
    if is_sliced:
        return _sliced(hidden, weight, bias, *rest, needs, *settings)
    if _anchors(ce, dce, class_weight, needs, z_loss, label_smoothing, has_kernel, hidden.new_empty(0, dtype=dtype)):
        inputs = hidden, weight, bias, labels, ce, stats, dce, factor, needs
        dhidden, dweight = _drive_anchored(*inputs, dtype, max_logits_bytes, ignore_index, softcap, scale)
    else:
        dhidden, dweight, dbias = _drive(hidden, weight, bias, *rest, needs, *settings)
    b = weight[:, 0] if bias is None else bias
    return dhidden, finished(dweight, weight, needs[1]), finished(dbias, b, needs[2])


# Arguments that both operators pass on as they are, in the order of `_drive`.
_SETTINGS = (
    "bool[] needs, ScalarType dtype, float z_loss, SymInt max_logits_bytes, bool has_kernel,"
    " int ignore_index, float label_smoothing, float? softcap, float? scale, bool is_sliced"
)


def _row_buffers(hidden: Tensor, labels: Tensor, dtype: torch.dtype, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    ce = hidden.new_empty(labels.shape, dtype=wide_dtype(dtype))
    return ce, ce.new_empty(labels.shape if z_loss else (0,)), ce.new_empty((*labels.shape, 2))


def _fake_fwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    class_weight: Tensor | None,
    dce: Tensor | None,
    dsquares: Tensor | None,
    factor: Tensor | None,
    needs: Sequence[bool],
    dtype: torch.dtype,
    z_loss: float,
    *settings: Any,
) -> tuple[Tensor, ...]:
    gradients = fake_gradients(hidden, weight, bias, needs if dce is not None else (False,) * 3)
    return *_row_buffers(hidden, labels, dtype, z_loss), *gradients


@define(
    "linear_cross_entropy_fwd(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor? class_weight,"
    f" Tensor? dce, Tensor? dsquares, Tensor? factor, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_fwd,
)
def _fwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    class_weight: Tensor | None,
    dce: Tensor | None,
    dsquares: Tensor | None,
    factor: Tensor | None,
    needs: Sequence[bool],
    dtype: torch.dtype,
    z_loss: float,
    *settings: Any,
) -> tuple[Tensor, ...]:
    rows = _row_buffers(hidden, labels, dtype, z_loss)
    needs = needs if dce is not None else (False,) * 3
    inputs, settings = (hidden, weight, bias, labels, class_weight), (dtype, z_loss, *settings)
    return *rows, *_gradients(*inputs, *rows, dce, dsquares, factor, needs=needs, settings=settings)


def _fake_bwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    class_weight: Tensor | None,
    stats: Tensor,
    dce: Tensor,
    dsquares: Tensor | None,
    needs: Sequence[bool],
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(hidden, weight, bias, needs)


@define(
    "linear_cross_entropy_bwd(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor? class_weight,"
    f" Tensor stats, Tensor dce, Tensor? dsquares, {_SETTINGS}) -> (Tensor, Tensor, Tensor)",
    fake=_fake_bwd,
)
def _bwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    class_weight: Tensor | None,
    stats: Tensor,
    dce: Tensor,
    dsquares: Tensor | None,
    needs: Sequence[bool],
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = hidden, weight, bias, labels, class_weight
    return _gradients(*inputs, None, None, stats, dce, dsquares, None, needs=needs, settings=settings)


# ---- autograd ----


class _RowLosses(torch.autograd.Function):
    """Losses of rows: any upstream gradient is exact, because backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        class_weight: Tensor | None,
        settings: tuple[Any, ...],
    ) -> Tensor | tuple[Tensor, Tensor]:
        ce, squares, stats, *_ = _fwd(hidden, weight, bias, labels, class_weight, None, None, None, *settings)
        ctx.save_for_backward(hidden, weight, bias, labels, class_weight, stats)
        ctx.settings = settings
        return (ce, squares) if settings[2] else ce

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dce: Tensor, dsquares: Tensor | None = None) -> tuple[Tensor | None, ...]:
        gradients = _bwd(*ctx.saved_tensors, dce, dsquares, *ctx.settings)
        wanted = (g if is_needed else None for g, is_needed in zip(gradients, ctx.settings[0], strict=True))
        return *wanted, None, None, None


class _ScalarLoss(torch.autograd.Function):
    """A mean or a sum: forward computes the gradients for an upstream gradient of 1, backward multiplies."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        class_weight: Tensor | None,
        divisor: Tensor,
        squares_divisor: Tensor | None,
        returns_z_loss: bool,
        is_traced: bool,
        settings: tuple[Any, ...],
    ) -> Tensor | tuple[Tensor, ...]:
        inputs = hidden, weight, bias, labels, class_weight
        one = divisor.new_ones(())
        if squares_divisor is None:
            dce, factor = one, divisor.reciprocal()
        else:
            dce, factor = squares_divisor / divisor, squares_divisor.reciprocal()
        ce, squares, stats, *gradients = _fwd(*inputs, dce, one, factor, *settings)
        ctx.settings, ctx.is_traced = settings, is_traced
        if is_traced:
            ctx.save_for_backward(*gradients, factor)
        else:
            # Not saved tensors: backward takes them out, so that nothing else holds them when it hands them over.
            ctx.gradients = gradients
            ctx.save_for_backward(*inputs, stats, dce, factor)
            ctx.set_materialize_grads(False)
        divisors = divisor, divisor if squares_divisor is None else squares_divisor
        out = reduce_rows(ce, squares if settings[2] else None, divisors, "sum", returns_z_loss)
        return tuple(out) if returns_z_loss else out  # type: ignore[return-value]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor | None, dz_loss: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if ctx.is_traced:
            *gradients, factor = ctx.saved_tensors
            factors = dloss * factor, dloss, dloss  # type: ignore[operator]
            pairs = zip(gradients, factors, strict=True)
            gradients = [(g.to(f.dtype) * f).to(g.dtype) for g, f in pairs]
        elif ctx.gradients is not None and dloss is not None and dz_loss is None:
            gradients, ctx.gradients = ctx.gradients, None
            factors = dloss * ctx.saved_tensors[-1], dloss, dloss
            for gradient, gradient_factor in zip(gradients, factors, strict=True):
                multiply_(gradient, gradient_factor, ctx.settings[4])
        else:
            # The z-loss has an upstream gradient of its own, or this is not the first backward.
            *inputs, stats, dce, factor = ctx.saved_tensors
            dloss = torch.zeros_like(factor) if dloss is None else dloss
            dsquares = dloss if dz_loss is None else dloss + dz_loss
            gradients = _bwd(*inputs, stats, dloss * dce * factor, dsquares * factor, *ctx.settings)
        wanted = (g if is_needed else None for g, is_needed in zip(gradients, ctx.settings[0], strict=True))
        return *wanted, None, None, None, None, None, None, None


# ---- public ----


def _supports(hidden: Tensor, weight: Tensor | None = None, labels: Tensor | None = None, **_: Any) -> list[str]:
    return ["float64 is computed in plain torch"] if hidden.dtype == torch.float64 else []


@op(reference=linear_cross_entropy_reference, supports=_supports)
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    class_weight: Tensor | None = None,
    reduction: Reduction = "mean",
    num_items: float | Tensor | None = None,
    logit_scale: float | None = None,
    return_z_loss: bool = False,
    max_logits_bytes: int | None = None,
    memory: Memory = "default",
) -> Tensor | CrossEntropyOutput:
    """Cross entropy of `hidden @ weight.T` against `labels`, without storing the logits.

        loss = cross_entropy(F.linear(hidden, weight, bias) * logit_scale, labels, ...)     # the reference, in one line

    Args:
        hidden: `[..., D]`, floating point, any strides.
        weight: `[V, D]`, same dtype as `hidden`, or cast with it by autocast.
        labels: `[...]`, any integer dtype.
        bias: `[V]`, same dtype as `weight`, or None.
        ignore_index: rows with this label add exactly 0 to the loss and to all gradients, whatever they hold.
        label_smoothing: weight of the uniform distribution in the target, as in `F.cross_entropy`.
        z_loss: factor of the squared log-sum-exp of each row, which is added to the loss.
        softcap: logits become `softcap * tanh(logits / softcap)`, after `logit_scale`; None leaves them.
        class_weight: `[V]`, factor of each class as `weight` of `F.cross_entropy`; gets no gradient.
        reduction: "mean" divides the cross entropy by the summed weight of the labels that are not ignored and
            the z-loss by their number; "sum" and "none" divide by nothing.
        num_items: replaces both divisors of "mean", for a batch that is part of a larger one: an int or a tensor
            of one element on any device.
        logit_scale: factor of the logits; None leaves them.
        return_z_loss: return the z-loss too.
        max_logits_bytes: most bytes of logits that exist at once beside those in the memory of `dweight`, None for
            1.25 GiB on accelerators and 64 MiB on a CPU. Fewer chunks are faster; the result does not depend on it
            but for rounding.
        memory: "min" computes logits by tiles of rows and classes of at most 64 MiB (or `max_logits_bytes`), once for
            the loss and once more in backward: four products and no other tensor of the size of `weight` than its
            gradient. Not with `label_smoothing` and `class_weight` at once.

    Returns:
        Scalar fp32 (fp64 for fp64 inputs), or `[...]` for reduction "none"; with `return_z_loss` the named tuple
        `(loss, z_loss)`, whose loss contains the z-loss. A divisor of 0 gives loss 0 and gradients 0.

    Raises:
        ValueError: shapes, dtypes, devices or options disagree, or one row of logits exceeds `max_logits_bytes`.
            A label that is neither a class nor `ignore_index` raises on a CPU; on a GPU the loss of its row and
            the gradients it enters are NaN, and TIGON_DEBUG=1 raises.

    Numerics: logits in the dtype of the product, statistics and losses in fp32; `dweight` and `dbias` add up over
              chunks in fp32 and are rounded to the dtype of their input, and once more where the upstream
              gradient is not 1. The sum of a 16-bit `dweight` of more than 64 MiB in fp32 is rounded after each of
              up to 8 chunks instead; raise `max_logits_bytes` for fewer.
    Memory:   `max_logits_bytes`, the gradients, and an fp32 copy of `dweight` while more than 8 16-bit chunks add up.
              A mean or a sum takes three matrix products. A fourth, of logits computed again in backward, is the
              price of reduction "none", of fp16 (whose range needs the loss scale before rounding), of an
              upstream gradient for the returned z-loss, and of a second backward.
    Differs from the reference: never in formula; order of summation over V and over rows. Tensor subclasses go to the
              reference itself, which stores all logits.
    Source: Wijmans et al. 2024, arXiv:2411.09009; Hsu et al. 2024, arXiv:2410.10989.
    """
    name = "linear_cross_entropy"
    require_floating(name, hidden=hidden, weight=weight, bias=bias)
    require(weight.dim() == 2, name, "weight", "two axes", f"shape {tuple(weight.shape)}")
    num_classes, width = weight.shape
    require(hidden.dim() >= 1, name, "hidden", "at least one axis", "a scalar")
    require(hidden.shape[-1] == width, name, "hidden", f"last axis {width}", f"shape {tuple(hidden.shape)}")
    if bias is not None:
        require(bias.shape == (num_classes,), name, "bias", f"shape ({num_classes},)", tuple(bias.shape))
    rows = hidden.shape[:-1]
    require_options(
        name, labels, rows, num_classes, label_smoothing, softcap, class_weight, reduction, num_items, z_loss
    )
    if logit_scale is not None:
        require_number(name, "logit_scale", logit_scale)
    require_one_of(name, "memory", memory, MEMORIES)
    is_weighted = class_weight is not None and label_smoothing != 0
    require(memory == "default" or not is_weighted, name, "memory", "'default' with smoothing and class_weight", memory)
    require_same_device(name, hidden=hidden, weight=weight, labels=labels, bias=bias, class_weight=class_weight)
    dtype = matmul_dtype(name, hidden, weight, bias)
    was_given = max_logits_bytes is not None
    if max_logits_bytes is None:
        max_logits_bytes = CPU_LOGITS_BYTES if hidden.device.type == "cpu" else LOGITS_BYTES
    require_number(name, "max_logits_bytes", max_logits_bytes)
    row_bytes = row_stride(num_classes, hidden.device) * dtype.itemsize
    expected = f"at least {row_bytes}, one row of logits"
    require(max_logits_bytes >= row_bytes, name, "max_logits_bytes", expected, max_logits_bytes)
    labels = checked_labels(name, labels, num_classes, ignore_index)

    has_kernel = not runs_reference(name, hidden, weight, labels, bias=bias)
    if not has_kernel and any(is_foreign(t) for t in (hidden, weight, labels, bias)):
        return linear_cross_entropy_reference(
            hidden,
            weight,
            labels,
            bias=bias,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            class_weight=class_weight,
            reduction=reduction,
            num_items=num_items,
            logit_scale=logit_scale,
            return_z_loss=return_z_loss,
        )
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias))
    scale = None if logit_scale is None else float(logit_scale)
    # Losses alone need no more logits at once than a tile has.
    is_sliced = memory == "min" or (has_kernel and not any(needs) and (class_weight is None or not label_smoothing))
    max_logits_bytes = min(max_logits_bytes, MIN_LOGITS_BYTES) if is_sliced and not was_given else max_logits_bytes
    settings = needs, dtype, z_loss, max_logits_bytes, has_kernel, ignore_index, label_smoothing, softcap, scale
    settings = *settings, is_sliced
    wide = wide_dtype(dtype)
    divisors = mean_divisors(labels, class_weight, ignore_index, num_items, wide) if reduction == "mean" else None
    inputs = hidden, weight, bias, labels, class_weight
    returns_z_loss = return_z_loss and z_loss != 0
    is_traced = _op.is_traced(hidden)
    # A traced graph asks for the gradient of every output, so that the one of the z-loss would be known late.
    is_late = is_sliced or reduction == "none" or dtype == torch.float16 or (returns_z_loss and is_traced)
    if any(needs) and not is_late:
        divisor, squares_divisor = divisors or (labels.new_ones((), dtype=wide), None)
        squares_divisor = None if squares_divisor is divisor else squares_divisor
        out = _ScalarLoss.apply(*inputs, divisor, squares_divisor, returns_z_loss, is_traced, settings)
        if returns_z_loss:
            return CrossEntropyOutput(*out)
        return CrossEntropyOutput(out, torch.zeros_like(out)) if return_z_loss else out
    if any(needs):
        out = _RowLosses.apply(*inputs, settings)
        ce, squares = out if z_loss else (out, None)
    else:
        ce, squares, *_ = _fwd(*inputs, None, None, None, *settings)
        squares = squares if z_loss else None
    return reduce_rows(ce, squares, divisors, reduction, return_z_loss)
