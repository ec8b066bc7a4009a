"""What `_anchored.py` and `_slices.py` do to logits, done before these reach memory (compute capability 9.0).

The anchor of a row is the logit of its label, from a pass of its own over the rows of weight that are labels. A tile
that finds a logit far above it takes that as its anchor; when all tiles are there, the largest anchor is that of the
row, and tiles with another one are scaled (`_finish_kernel`), which is rare.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._gluon import gl, gluon
from ._hopper import TILE_M, TILE_N, by_row, can_multiply, halves, multiply, put, rows_of
from ._launch import cdiv, launch, next_power_of_2
from ._tl import label_loss
from ._triton import tl, triton

# ---- kernels ----


@triton.jit
def _label_logits_kernel(
    hidden_ptr,
    weight_ptr,
    labels_ptr,
    out_ptr,
    hidden_stride,
    weight_stride,
    num_cols,
    num_classes,
    ignore_index,
    scale,
    BLOCK: tl.constexpr,
):
    """One program per row: the logit of its label, 0 where ignored and NaN where the label is no class; its slope 1."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row).to(tl.int64)
    is_class = (label >= 0) & (label < num_classes)
    # Nothing of an ignored row is read.
    is_read = is_class & (label != ignore_index)
    hidden_ptr += row * hidden_stride
    weight_ptr += tl.where(is_read, label, 0) * weight_stride
    num_read = tl.where(is_read, num_cols, 0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, num_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < num_read
        h = tl.load(hidden_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        total += h * w
    logit = tl.where(is_class, tl.sum(total, axis=0) * scale, float("nan"))
    tl.store(out_ptr + 2 * row, tl.where(label == ignore_index, 0.0, logit))
    tl.store(out_ptr + 2 * row + 1, 1.0)


@triton.jit
def _flags_kernel(labels_ptr, flags_ptr, num_rows, num_classes, num_tiles, ignore_index, ROWS: tl.constexpr):
    """One program per group of rows: 1 at each tile of classes with a label, and behind them if a row is ignored."""
    group = tl.program_id(0).to(tl.int64)
    rows = group * ROWS + tl.arange(0, ROWS)
    label = tl.load(labels_ptr + rows, mask=rows < num_rows, other=ignore_index).to(tl.int64)
    is_used = label != ignore_index
    is_class = is_used & (label >= 0) & (label < num_classes)
    flags_ptr += group * (num_tiles + 1)
    tl.store(flags_ptr + label // 256, tl.full([ROWS], 1, tl.int8), mask=is_class)
    if tl.min(is_used.to(tl.int32), axis=0) == 0:
        tl.store(flags_ptr + num_tiles, 1)


@triton.jit
def _join_kernel(anchors_ptr, sums_ptr, state_ptr, num_tiles, BLOCK_T: tl.constexpr):
    """One program per row: its anchor, and the sum relative to that, from those of its tiles."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, BLOCK_T)
    mask = tiles < num_tiles
    anchors = tl.load(anchors_ptr + row * num_tiles + tiles, mask=mask, other=float("-inf"))
    sums = tl.load(sums_ptr + row * num_tiles + tiles, mask=mask, other=0.0)
    anchor = tl.max(anchors, axis=0)
    # A maximum may drop NaN, which a sum keeps.
    poison = tl.sum(tl.where(anchors == anchors, 0.0, anchors), axis=0)
    shift = tl.where(anchor == float("-inf"), 0.0, anchor)
    total = tl.sum(tl.where(sums == 0.0, 0.0, sums * tl.exp(anchors - shift)), axis=0)
    tl.store(state_ptr + 2 * row, anchor + poison)
    tl.store(state_ptr + 2 * row + 1, total)


@triton.jit
def _losses_kernel(labels_ptr, state_ptr, label_ptr, ce_ptr, stats_ptr, num_rows, ignore_index, BLOCK: tl.constexpr):
    """One program per BLOCK rows, of which only losses and statistics are wanted."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_rows
    is_valid = mask & (tl.load(labels_ptr + rows, mask=mask, other=0) != ignore_index)
    anchor = tl.load(state_ptr + 2 * rows, mask=mask, other=0.0)
    others = tl.load(state_ptr + 2 * rows + 1, mask=mask, other=0.0)
    z_label = tl.load(label_ptr + 2 * rows, mask=mask, other=0.0)
    loss, log_sum, _ = label_loss(anchor, others, z_label)
    peak = tl.where(z_label == z_label, anchor, float("nan"))
    tl.store(ce_ptr + rows, tl.where(is_valid, loss, 0.0), mask=mask)
    tl.store(stats_ptr + 2 * rows, tl.where(is_valid, peak, 0.0), mask=mask)
    tl.store(stats_ptr + 2 * rows + 1, tl.where(is_valid, log_sum, 0.0), mask=mask)


# Logits in units of a factor of two: a multiply-add and one instruction an exponential.


@gluon.jit
def _prologue(row, n, layout: gl.constexpr, own, ins, args):
    """Label within the tile and anchor of each row, and whether any label is here and any row ignored."""
    labels_ptr, anchor_ptr, _, _, flags_ptr, _, num_rows, _, first_tile, num_tiles, ignore_index, _, _ = args
    rows = rows_of(row, layout)
    is_row = rows < num_rows
    label = gl.load(labels_ptr + rows, mask=is_row, other=ignore_index)
    anchor = gl.load(anchor_ptr + 2 * rows, mask=is_row, other=0.0)
    flags_ptr += row // 64 * (num_tiles + 1)
    flags = gl.load(flags_ptr + first_tile + n), gl.load(flags_ptr + num_tiles)
    return label, anchor, flags


@gluon.jit
def _used(acc, n, is_used, any_ignored, num_cols):
    """Products with -inf where the row is ignored, whatever it holds, and beyond the last class."""
    if (any_ignored != 0) | (n * 256 + 256 > num_cols):
        cols = n * 256 + gl.arange(0, 256, gl.SliceLayout(0, acc.type.layout))
        keep = gl.expand_dims(cols < num_cols, 0) & gl.expand_dims(is_used, 1)
        acc = gl.where(keep, acc, float("-inf"))
    return acc


@gluon.jit
def _exponentials(x, label, shift, any_here, factor, COL: gl.constexpr):
    """Of 64 columns, and the same without that of the label."""
    e = gl.exp2(x * factor - by_row(shift, x))
    others = e
    if any_here != 0:
        cols = COL + gl.arange(0, 64, gl.SliceLayout(0, x.type.layout))
        others = gl.where(gl.expand_dims(cols, 0) == by_row(label, x), 0.0, e)
    return e, others


@gluon.jit
def _anchored_epilogue(acc, row, n, loaded, own, ins, outs, args, FUNCTION: gl.constexpr, FLAG: gl.constexpr):
    _, _, anchors_ptr, sums_ptr, _, first_col, num_rows, num_cols, first_tile, num_tiles, ignored, factor, max_rise = (
        args
    )
    label, anchor, flags = loaded
    any_here, any_ignored = flags
    acc = _used(acc, n, label != ignored, any_ignored, num_cols)
    label = label.to(gl.int32) - first_col - n * 256
    # In e-folds, as everything that is stored.
    top = gl.max(acc, 1) * (factor * 0.6931471805599453)
    anchor = gl.where(top > anchor + max_rise, top, anchor)
    shift = gl.where(anchor == float("-inf"), 0.0, anchor) * 1.4426950408889634
    left, right = halves(acc)
    x0, x1 = halves(left)
    x2, x3 = halves(right)
    e0, total0 = _exponentials(x0, label, shift, any_here, factor, 0)
    if outs[0] is not None:
        put(e0, own, 0, outs[0], row, n * 256)
    e1, total1 = _exponentials(x1, label, shift, any_here, factor, 64)
    if outs[0] is not None:
        put(e1, own, 1, outs[0], row, n * 256 + 64)
    e2, total2 = _exponentials(x2, label, shift, any_here, factor, 128)
    if outs[0] is not None:
        put(e2, own, 0, outs[0], row, n * 256 + 128)
    e3, total3 = _exponentials(x3, label, shift, any_here, factor, 192)
    if outs[0] is not None:
        put(e3, own, 1, outs[0], row, n * 256 + 192)
    total = gl.sum((total0 + total1) + (total2 + total3), 1)
    layout: gl.constexpr = acc.type.layout
    total = gl.convert_layout(total, gl.SliceLayout(1, layout))
    rows = rows_of(row, layout)
    at = rows.to(gl.int64) * num_tiles + first_tile + n
    gl.store(anchors_ptr + at, anchor, mask=rows < num_rows)
    gl.store(sums_ptr + at, total, mask=rows < num_rows)


@gluon.jit
def _gradient_prologue(row, n, layout: gl.constexpr, own, ins, args):
    labels_ptr, stats_ptr, dce_ptr, flags_ptr, dce_stride, _, first_col, num_rows, _, num_tiles, ignored, _ = args
    rows = rows_of(row, layout)
    is_row = rows < num_rows
    label = gl.load(labels_ptr + rows, mask=is_row, other=ignored)
    peak = gl.load(stats_ptr + 2 * rows, mask=is_row, other=0.0)
    log_sum = gl.load(stats_ptr + 2 * rows + 1, mask=is_row, other=0.0)
    # Of an ignored row it may be anything, as the slope of a root at a loss of 0 is.
    is_used = is_row & (label != ignored)
    dce = gl.load(dce_ptr + rows.to(gl.int64) * dce_stride, mask=is_used, other=0.0).to(gl.float32)
    flags_ptr += row // 64 * (num_tiles + 1)
    flags = gl.load(flags_ptr + first_col // 256 + n), gl.load(flags_ptr + num_tiles)
    return label, peak, log_sum, dce, flags


@gluon.jit
def _dlogits(x, label, shift, dce, any_here, factor, COL: gl.constexpr):
    d = gl.exp2(x * factor - by_row(shift, x))
    if any_here != 0:
        cols = COL + gl.arange(0, 64, gl.SliceLayout(0, x.type.layout))
        d = gl.where(gl.expand_dims(cols, 0) == by_row(label, x), d - 1.0, d)
    return d * by_row(dce, x)


@gluon.jit
def _gradient_epilogue(acc, row, n, loaded, own, ins, outs, args, FUNCTION: gl.constexpr, FLAG: gl.constexpr):
    _, _, _, _, _, scale, first_col, _, num_cols, _, ignored, factor = args
    label, peak, log_sum, dce, flags = loaded
    any_here, any_ignored = flags
    acc = _used(acc, n, label != ignored, any_ignored, num_cols)
    label = label.to(gl.int32) - first_col - n * 256
    shift = (peak + log_sum) * 1.4426950408889634
    dce *= scale
    left, right = halves(acc)
    x0, x1 = halves(left)
    x2, x3 = halves(right)
    put(_dlogits(x0, label, shift, dce, any_here, factor, 0), own, 0, outs[0], row, n * 256)
    put(_dlogits(x1, label, shift, dce, any_here, factor, 64), own, 1, outs[0], row, n * 256 + 64)
    put(_dlogits(x2, label, shift, dce, any_here, factor, 128), own, 0, outs[0], row, n * 256 + 128)
    put(_dlogits(x3, label, shift, dce, any_here, factor, 192), own, 1, outs[0], row, n * 256 + 192)


# ---- launch ----


def can_anchor(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, scale: float | None) -> bool:
    """True where the functions below do these."""
    is_plain = bias is None and softcap is None and (scale is None or scale > 0)
    return is_plain and can_multiply(hidden, weight)


def label_logits(hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, scale: float | None) -> Tensor:
    """`[M, 2]` fp32: the logit of each row's label, and 1, its slope."""
    out = labels.new_empty((labels.numel(), 2), dtype=torch.float32)
    launch(
        _label_logits_kernel,
        (labels.numel(),),
        hidden,
        weight,
        labels,
        out,
        hidden.stride(0),
        weight.stride(0),
        hidden.shape[1],
        weight.shape[0],
        ignore_index,
        scale or 1.0,
        BLOCK=min(next_power_of_2(hidden.shape[1]), 1024),
        num_warps=4,
    )
    return out


def label_flags(labels: Tensor, num_classes: int, ignore_index: int) -> Tensor:
    """`[groups of 64 rows, tiles of classes + 1]`: which tiles have a label, and whether a row is ignored.

    A tile has two groups, even where the second has no rows.
    """
    num_rows, num_tiles = labels.numel(), cdiv(num_classes, TILE_N)
    flags = labels.new_zeros((2 * cdiv(num_rows, TILE_M), num_tiles + 1), dtype=torch.int8)
    sizes = num_rows, num_classes, num_tiles, ignore_index
    launch(_flags_kernel, (flags.shape[0],), labels, flags, *sizes, ROWS=64, num_warps=2)
    return flags


def anchored_products(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    label_info: Tensor,
    blocks: list[Tensor] | None,
    state: Tensor,
    ignore_index: int,
    scale: float | None,
    max_rise: float,
) -> list[Tensor]:
    """Fill `blocks` of columns, if there are any, with e of the logits, and `state` with anchor and sum of each row.

    All blocks but the last have a multiple of 256 columns.

    Returns:
        The anchors of the tiles of each block, `[M, tiles]`.
    """
    widths = [weight.shape[0]] if blocks is None else [block.shape[1] for block in blocks]
    counts = [cdiv(width, TILE_N) for width in widths]
    num_rows, num_tiles = labels.numel(), sum(counts)
    flags = label_flags(labels, weight.shape[0], ignore_index)
    anchors, sums = (state.new_empty((num_rows, num_tiles)) for _ in range(2))
    first_col = first_tile = 0
    for index, width in enumerate(widths):
        sizes = first_col, num_rows, width, first_tile, num_tiles, ignore_index
        args = labels, label_info, anchors, sums, flags, *sizes, (scale or 1.0) * math.log2(math.e), max_rise
        outs = () if blocks is None else (blocks[index],)
        part = weight[first_col : first_col + width]
        multiply(hidden, part, None, outs, args, _prologue, _anchored_epilogue)
        first_col, first_tile = first_col + width, first_tile + counts[index]
    launch(_join_kernel, (num_rows,), anchors, sums, state, num_tiles, BLOCK_T=next_power_of_2(num_tiles), num_warps=4)
    return list(anchors.split(counts, 1))


def product_dlogits(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    flags: Tensor,
    stats: Tensor,
    dce: Tensor,
    first_col: int,
    ignore_index: int,
    scale: float | None,
    dlogits: Tensor,
) -> None:
    """Gradient of the logits `hidden @ weight.T` of classes from `first_col` on, from the `stats` of whole rows."""
    stride = dce.stride(0) if dce.dim() and dce.numel() > 1 else 0
    sizes = first_col, labels.numel(), weight.shape[0], flags.shape[1] - 1, ignore_index
    args = labels, stats, dce, flags, stride, scale or 1.0, *sizes, (scale or 1.0) * math.log2(math.e)
    multiply(hidden, weight, None, (dlogits,), args, _gradient_prologue, _gradient_epilogue)


_LOSS_BLOCK = 256


def product_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ce: Tensor,
    stats: Tensor,
    ignore_index: int,
    scale: float | None,
    max_rise: float,
) -> None:
    """Fill `ce` and `stats` of the logits `hidden @ weight.T`, of which none reaches memory."""
    label_info = label_logits(hidden, weight, labels, ignore_index, scale)
    state = torch.empty_like(label_info)
    anchored_products(hidden, weight, labels, label_info, None, state, ignore_index, scale, max_rise)
    num_rows = labels.numel()
    rows = labels, state, label_info, ce, stats, num_rows, ignore_index
    launch(_losses_kernel, (cdiv(num_rows, _LOSS_BLOCK),), *rows, BLOCK=_LOSS_BLOCK, num_warps=4)
