"""How `linear_cross_entropy` goes over its logits: chunks of rows, blocks read once, or tiles."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._anchored import (
    anchor_rows,
    place_blocks,
    plan_rows,
    wave_columns,
)
from ._choice import take
from ._device import num_sms
from ._hopper_cross_entropy import can_anchor
from ._launch import as_rows, cdiv, next_power_of_2
from ._predictions import Predictions
from ._projection import (
    CPU_SLICE_LOGITS,
    SLICE_LOGITS,
    TILE_ROWS,
    accumulate,
    chunk_rows,
    finished,
    has_wide_product,
    row_stride,
    scale_rows,
    scaled_rows,
)
from ._slices import (
    Options,
    sliced_gradients,
    sliced_statistics,
)
from .cross_entropy import (
    launch_rows,
    stand_in_labels,
    wide_dtype,
)

# fp32 sums of dhidden over blocks of classes, and sums of dweight that are not worth a rounding.
_SUM_BYTES, _FREE_SUM_BYTES = 64 << 20, 64 << 20
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


def drive(
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
    predictions: Predictions | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """All chunks: fills `ce`, `squares`, `stats` where `ce` is given, and sums up the gradients that are needed.

    dweight and dbias come times `factor`, dhidden does not. `predictions` see all logits.
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
        if predictions is not None:
            predictions.update(logits, slice(start, end))
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


def anchors(
    ce: Tensor | None,
    dce: Tensor | None,
    class_weight: Tensor | None,
    needs: Sequence[bool],
    z_loss: float,
    label_smoothing: float,
    scale: float | None,
    has_kernel: bool,
    like: Tensor,
) -> bool:
    """True where `drive_anchored` does what `drive` would: both losses and gradients, of the plain cross entropy."""
    # The factor of a row, which holds the scale, divides it out of what is stored.
    is_plain = class_weight is None and not z_loss and not label_smoothing and not needs[2] and scale != 0
    if ce is None or dce is None or not is_plain or not has_kernel or not any(needs):
        return False
    return like.dtype == torch.float32 or (like.dtype == torch.bfloat16 and has_wide_product(like))


def _sums_widely(num_chunks: int, num_elements: int) -> bool:
    """True where chunks of 16-bit products add up in fp32 rather than in their own dtype.

    In that they are rounded once a chunk, which the first few hardly show beside the rounding of the factors; a sum
    in fp32 takes twice the memory of the gradient while it grows.
    """
    return num_chunks > _MAX_ROUNDED_CHUNKS or 4 * num_elements <= _FREE_SUM_BYTES


def drive_anchored(
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
    predictions: Predictions | None = None,
) -> tuple[Tensor, Tensor | None]:
    """What `drive` does, with logits read once; dweight comes in its own dtype where one product makes it."""
    needs_dhidden, needs_dweight, _ = needs
    num_classes, width = weight.shape
    rows, labels = as_rows(hidden), labels.reshape(-1).contiguous()
    num_rows = rows.shape[0]
    w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
    dhidden = hidden.new_empty(hidden.shape if needs_dhidden else (0,))
    ce, stats = ce.view(-1), stats.view(-1, 2)
    dce = dce if dce.dim() == 0 else dce.reshape(-1)
    options = ignore_index, softcap, scale

    def fill(block: Tensor, h: Tensor, rows: slice, first: int) -> None:
        part = slice(first, first + block.shape[1])
        if b is None:
            torch.mm(h, w[part].t(), out=block)
        else:
            torch.addmm(b[part], h, w[part].t(), out=block)
        if predictions is not None:
            predictions.update(block, rows, first)

    def anchored(blocks: list[Tensor], h: Tensor, rows: slice) -> Tensor:
        """Turn blocks into e, by a kernel that multiplies too where that is faster; the factors of the rows."""
        firsts = [sum(block.shape[1] for block in blocks[:i]) for i in range(len(blocks))]
        given = blocks, labels[rows], ce[rows], stats[rows], dce if dce.dim() == 0 else dce[rows], *options
        ways = {
            "product, then anchored": partial(anchor_rows, *given, fill=lambda i: fill(blocks[i], h, rows, firsts[i]))
        }
        if predictions is None and can_anchor(h, w, b, softcap, scale):
            ways = {"anchored product": partial(anchor_rows, *given, factors=(h, w)), **ways}
        key = "linear_cross_entropy", next_power_of_2(h.shape[0]), num_classes, width, h.dtype
        return take(key, ways, h.device)

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
    step = chunk_rows(num_rows, row_bytes, max_logits_bytes)
    num_chunks, start, total, buffer = cdiv(num_rows, max(step, 1)), 0, None, None
    is_rounded = weight.dtype == dtype and (num_chunks <= 1 or not _sums_widely(num_chunks, weight.numel()))
    if needs_dweight and weight.dtype == dtype and num_chunks > 1:
        align = wave_columns(num_sms(hidden.device), num_classes)
        plan = plan_rows(num_rows, width, num_classes, max_logits_bytes // dtype.itemsize, align)
        # A first chunk that is all of them adds nothing up.
        if plan is not None and (plan.num_chunks == 1 or not _sums_widely(plan.num_chunks, weight.numel())):
            total, buffer = weight.new_empty(weight.shape), rows.new_empty(plan.num_outside, dtype=dtype)
            blocks = place_blocks(plan.blocks, total, plan.num_first, buffer)
            start, step, is_rounded = plan.num_first, plan.step, True
            y, h = labels[:start], rows[:start].to(dtype)
            factors = anchored(blocks, h, slice(start))
            if needs_dhidden:
                write_dhidden(blocks, factors, 0)
            h = scale_rows(h, y, factors, factor, ignore_index, h.new_empty(h.shape))
            # From the first on: each part of dweight lies where blocks before it were.
            first = 0
            for block in blocks:
                torch.mm(block.t(), h, out=total[first : first + block.shape[1]])
                first += block.shape[1]
    if start < num_rows:
        buffer = rows.new_empty(step * stride, dtype=dtype) if buffer is None else buffer[: step * stride]
        buffer = buffer.view(step, stride)[:, :num_classes]
    for i in range(start, num_rows, max(step, 1)):
        j = min(i + step, num_rows)
        logits, h, y = buffer[: j - i], rows[i:j].to(dtype), labels[i:j]  # type: ignore[index]
        factors = anchored([logits], h, slice(i, j))
        if needs_dhidden:
            write_dhidden([logits], factors, i)
        if needs_dweight:
            h = scale_rows(h, y, factors, factor, ignore_index, h.new_empty(h.shape))
            if not is_rounded:
                total = accumulate(total, logits.t(), h)
            else:
                total = torch.mm(logits.t(), h) if total is None else total.addmm_(logits.t(), h)
    return dhidden, total


def drive_sliced(
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
    main_grad: Tensor | None = None,
    predictions: Predictions | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `_gradients` does, by tiles: either the losses or, with their statistics, the gradients.

    That of the weight is added to `main_grad` where there is one, and is then empty.
    """
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
        sliced_statistics(*inputs, ce, squares, stats, *settings, predictions)
        if row_weight is not None:
            ce *= row_weight
    like = hidden, weight, weight[:, 0] if bias is None else bias
    if dce is None:
        return tuple(t.new_empty(0) for t in like)  # type: ignore[return-value]
    # Not into fp16, whose range needs the loss scale in dlogits.
    if dsquares is None and dtype != torch.float16 and dce.numel() and not any(dce.stride()):
        # One upstream gradient for all rows: multiplied in last, it spares dlogits a rounding that all labels share.
        dce, factor = dce.new_ones(()), dce.view(-1)[0] if dce.dim() == 0 else dce[(0,) * dce.dim()]
    if dsquares is None and z_loss:
        dsquares = dce
    upstream = [t if t is None or t.dim() == 0 else t.reshape(-1) for t in (dce, dsquares)]
    if row_weight is not None:
        upstream[0] = upstream[0] * row_weight  # type: ignore[operator]
    made = [t.new_empty(t.shape) if is_needed else None for t, is_needed in zip(like, needs, strict=True)]
    if main_grad is not None:
        made[1], needs = main_grad, (needs[0], False, needs[2])
    elif made[1] is not None and weight.dtype != dtype:
        # What is rounded to another dtype is summed in fp32 before.
        made[1] = made[1].to(stats.dtype)
    if made[2] is not None:
        made[2] = made[2].new_empty(weight.shape[0], dtype=stats.dtype)
    if labels.numel():
        dhidden = None if made[0] is None else made[0].view(-1, hidden.shape[-1])
        sliced_gradients(*inputs, stats, *upstream, factor, dhidden, *made[1:], *settings, main_grad is not None)  # type: ignore[arg-type]
    else:
        made = [t if t is None or t is main_grad else t.zero_() for t in made]
    return tuple(finished(t, x, is_needed) for t, x, is_needed in zip(made, like, needs, strict=True))  # type: ignore[return-value]
