"""Logits into gradients of cross entropy with one read and one write, before the normaliser of their row is known.

    e_j = exp(z_j - a),  a any logit of the row that is at most some e-folds below its largest
    s = sum of the e_j without the label's
    loss = log((s + e_label) / e_label)
    dz_j = v * e_j,  dz_label = -v * s,     v = dloss / (s + e_label)

Stored in place of z are e and, at the label, -s: both matrix products of the gradient commute with the factor v of
their rows, which makes up for the rounding of -s. Where a tile finds a logit far above the anchor, that becomes the
anchor; what was written relative to the old one is scaled when the row is finished, so any logits are exact and the
host waits for nothing. A label's entry is a sum without cancellation, so the relative error of a gradient does not
grow as the loss falls.

The logits may lie in several blocks of columns, each `[rows, columns]` and contiguous (`Blocks`): blocks can share
memory with the gradient of the weight, of which a part is written when the blocks that were there are used up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ._hopper import TILE_N
from ._hopper_cross_entropy import anchored_products, label_logits
from ._launch import cdiv, launch, next_power_of_2
from ._projection import padded
from ._tl import label_loss
from ._triton import tl, triton
from .cross_entropy import _load_logits

# How far above the anchor a logit may be, in e-folds: sums of exp(40) leave room in bf16 and fp32 on both sides.
MAX_RISE = 40.0
_MAX_TILE, _STAGES = 1024, 3


@triton.jit
def _anchored_kernel(
    logits_ptr,
    labels_ptr,
    state_ptr,
    label_ptr,
    anchors_ptr,
    row_stride,
    anchors_stride,
    first_col,
    num_cols,
    ignore_index,
    softcap,
    scale,
    max_rise,
    IS_FIRST: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per row of a block of columns; anchor and sum of the row come from the block before."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    anchors_ptr += row * anchors_stride
    label = tl.load(labels_ptr + row)
    cols = tl.arange(0, BLOCK_V)
    if label == ignore_index:
        zeros = tl.zeros([BLOCK_V], dtype=logits_ptr.dtype.element_ty)
        for start in range(0, num_cols, BLOCK_V):
            tl.store(logits_ptr + start + cols, zeros, mask=start + cols < num_cols)
        return

    # Read before the first store, which may overwrite it; the maximum of a tile is a barrier.
    label -= first_col
    is_here = (label >= 0) & (label < num_cols)
    z_label, slope_label = _load_logits(logits_ptr + label, is_here, scale, softcap, HAS_SCALE, HAS_SOFTCAP, "")
    if HAS_SCALE:
        slope_label = slope_label / scale
    if IS_FIRST:
        anchor = tl.full([], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_V], dtype=tl.float32)
        # NaN until the block with the label comes: of a label that is no class loss and gradient are NaN.
        z_label = tl.where(is_here, z_label, float("nan"))
    else:
        anchor = tl.load(state_ptr + 2 * row)
        total = tl.where(cols == 0, tl.load(state_ptr + 2 * row + 1), 0.0)
    if IS_FIRST or is_here:
        tl.store(label_ptr + 2 * row, z_label)
        tl.store(label_ptr + 2 * row + 1, slope_label)

    for start in tl.range(0, num_cols, BLOCK_V, num_stages=STAGES):
        c = start + cols
        mask = c < num_cols
        z, slope = _load_logits(logits_ptr + c, mask, scale, softcap, HAS_SCALE, HAS_SOFTCAP, "evict_first")
        top = tl.max(z, axis=0)
        # Of -inf anything finite is above, too.
        raised = tl.where(top > anchor + max_rise, top, anchor)
        shift = tl.where(raised == float("-inf"), 0.0, raised)
        total *= tl.where(raised == anchor, 1.0, tl.exp(anchor - shift))
        anchor = raised
        tl.store(anchors_ptr + start // BLOCK_V, anchor)
        e = tl.exp(z - shift)
        total += tl.where(c == label, 0.0, e)
        if HAS_SOFTCAP:
            if HAS_SCALE:
                slope = slope / scale
            e *= slope
        tl.store(logits_ptr + c, e, mask=mask)
    tl.store(state_ptr + 2 * row, anchor)
    tl.store(state_ptr + 2 * row + 1, tl.sum(total, axis=0))


@triton.jit
def _finish_kernel(
    e_ptr,
    labels_ptr,
    state_ptr,
    label_ptr,
    anchors_ptr,
    ce_ptr,
    stats_ptr,
    dce_ptr,
    factors_ptr,
    row_stride,
    anchors_stride,
    dce_stride,
    first_col,
    num_cols,
    ignore_index,
    scale,
    IS_LAST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program per row of a block: the label's entry, and tiles from before the anchor was raised.

    That of the last block writes what there is once a row.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    if label == ignore_index:
        if IS_LAST:
            tl.store(ce_ptr + row, 0.0)
            tl.store(stats_ptr + 2 * row, 0.0)
            tl.store(stats_ptr + 2 * row + 1, 0.0)
            tl.store(factors_ptr + row, 0.0)
        return
    e_ptr += row * row_stride
    anchors_ptr += row * anchors_stride
    anchor = tl.load(state_ptr + 2 * row)
    others = tl.load(state_ptr + 2 * row + 1)
    z_label = tl.load(label_ptr + 2 * row)

    num_tiles = tl.cdiv(num_cols, BLOCK_V)
    tiles = tl.arange(0, BLOCK_T)
    old = tl.load(anchors_ptr + tiles, mask=tiles < num_tiles, other=0.0)
    is_behind = (tiles < num_tiles) & (old != anchor)
    if tl.max(is_behind.to(tl.int32), axis=0) > 0:
        cols = tl.arange(0, BLOCK_V)
        for tile in range(num_tiles):
            tile_anchor = tl.load(anchors_ptr + tile)
            if tile_anchor != anchor:
                c = tile * BLOCK_V + cols
                mask = c < num_cols
                e = tl.load(e_ptr + c, mask=mask, other=0.0).to(tl.float32)
                # An anchor of -inf had nothing but zeros.
                e = tl.where(e == 0.0, 0.0, e * tl.exp(tile_anchor - anchor))
                tl.store(e_ptr + c, e, mask=mask)
        tl.debug_barrier()

    label -= first_col
    # What is next to -1 times the factor of the row is most of the gradient's norm: the factor takes its rounding back.
    exact = -others * tl.load(label_ptr + 2 * row + 1)
    rounded = exact.to(e_ptr.dtype.element_ty)
    if (label >= 0) & (label < num_cols):
        tl.store(e_ptr + label, rounded)

    if IS_LAST:
        loss, log_sum, total = label_loss(anchor, others, z_label)
        tl.store(ce_ptr + row, loss)
        tl.store(stats_ptr + 2 * row, tl.where(z_label == z_label, anchor, float("nan")))
        tl.store(stats_ptr + 2 * row + 1, log_sum)
        dce = tl.load(dce_ptr + row * dce_stride).to(tl.float32)
        rounded = rounded.to(tl.float32)
        correction = tl.where(rounded == 0.0, 1.0, exact / tl.where(rounded == 0.0, 1.0, rounded))
        tl.store(factors_ptr + row, dce * scale / total * correction)


def _tile(num_cols: int) -> tuple[int, int]:
    """BLOCK_V and num_warps, measured on an H200 (MEASURED.md)."""
    block = min(max(next_power_of_2(num_cols), 128), _MAX_TILE)
    return block, min(4, block // 128)


def anchor_rows(
    blocks: list[Tensor],
    labels: Tensor,
    ce: Tensor,
    stats: Tensor,
    dce: Tensor,
    ignore_index: int,
    softcap: float | None,
    scale: float | None,
    *,
    fill: Callable[[int], None] | None = None,
    factors: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Turn logits into e in place and fill `ce` and `stats`; the factors v of the rows, fp32.

    `blocks` hold the logits column after column; `fill(i)` is called right before block i is read, to make it. With
    `factors`, hidden and weight, whose product is taken by a kernel that stores e, what the blocks hold is not read.
    """
    num_rows = labels.numel()
    state = labels.new_empty((num_rows, 2), dtype=torch.float32)
    if factors is None:
        label_info = torch.empty_like(state)
        anchors = _anchor_blocks(blocks, labels, state, label_info, ignore_index, softcap, scale, fill)
    else:
        label_info = label_logits(*factors, labels, ignore_index, scale)
        options = ignore_index, scale, MAX_RISE
        anchors = anchored_products(*factors, labels, label_info, blocks, state, *options)
    row_factors = state.new_empty(num_rows)
    flat = dce.reshape(-1)
    first = 0
    for index, block in enumerate(blocks):
        num_cols = block.shape[1]
        launch(
            _finish_kernel,
            (num_rows,),
            block,
            labels,
            state,
            label_info,
            anchors[index],
            ce,
            stats,
            flat,
            row_factors,
            block.stride(0),
            anchors[index].stride(0),
            flat.stride(0) if flat.numel() > 1 else 0,
            first,
            num_cols,
            ignore_index,
            scale or 1.0,
            IS_LAST=index == len(blocks) - 1,
            BLOCK_T=next_power_of_2(anchors[index].shape[1]),
            BLOCK_V=TILE_N if factors is not None else _tile(num_cols)[0],
            num_warps=4,
        )
        first += num_cols
    return row_factors


def _anchor_blocks(
    blocks: list[Tensor],
    labels: Tensor,
    state: Tensor,
    label_info: Tensor,
    ignore_index: int,
    softcap: float | None,
    scale: float | None,
    fill: Callable[[int], None] | None,
) -> list[Tensor]:
    """The pass over logits that are in memory; anchors of the tiles of each block."""
    anchors: list[Tensor] = []
    first = 0
    for index, block in enumerate(blocks):
        if fill is not None:
            fill(index)
        num_rows, num_cols = block.shape
        tile, num_warps = _tile(num_cols)
        anchors.append(state.new_empty((num_rows, cdiv(num_cols, tile))))
        launch(
            _anchored_kernel,
            (num_rows,),
            block,
            labels,
            state,
            label_info,
            anchors[-1],
            block.stride(0),
            anchors[-1].stride(0),
            first,
            num_cols,
            ignore_index,
            float(softcap or 0.0),
            scale or 1.0,
            MAX_RISE,
            IS_FIRST=index == 0,
            HAS_SOFTCAP=softcap is not None,
            HAS_SCALE=scale is not None,
            BLOCK_V=tile,
            STAGES=_STAGES,
            num_warps=num_warps,
        )
        first += num_cols
    return anchors


# ---- memory ----

# A tile of `_hopper.py`, and the height of two of other matrix products.
_ALIGN = 256
# Share of the classes in the first block, which sets the room between a block and the gradient that takes its place.
_FIRST_SHARES = (16, 12)
# Rows of a chunk are a multiple of this: the height of a tile of a matrix product.
_ROW_ALIGN = 128


class Blocks(NamedTuple):
    """Columns of all blocks, where those in the memory of dweight begin, and what the last takes outside of it."""

    widths: tuple[int, ...]
    inside: tuple[int, ...]
    num_outside: int


def plan_blocks(num_rows: int, width: int, num_classes: int, align: int = _ALIGN) -> Blocks:
    """Lay `[num_rows, num_classes]` logits over the memory of a `[num_classes, width]` gradient and as little more.

    All blocks but the last have a multiple of `align` columns. Offsets and `num_outside` count elements. The gradient
    of a block's classes begins where those of earlier blocks end; when it is written, what lies there has been used,
    the block itself excepted, which it must not touch.
    """
    low = cdiv(num_classes, _FIRST_SHARES[0] * align) * align
    high = max(low, num_classes // _FIRST_SHARES[1] // align * align)
    plans = (_blocks_from(first, num_rows, width, num_classes, align) for first in range(low, high + 1, align))
    return min(plans, key=lambda plan: (len(plan.widths), plan.num_outside))


def _blocks_from(first: int, num_rows: int, width: int, num_classes: int, align: int) -> Blocks:
    room = num_classes * width
    # Rows of blocks begin where copies of tiles and matrix products want them, at a multiple of 16 bytes.
    base = cdiv(max(0, (width - num_rows) * num_classes) + first * width, padded(1)) * padded(1)
    widths: list[int] = []
    inside: list[int] = []
    done = 0
    while done < num_classes:
        start = base + num_rows * done
        # The gradient up to the end of the block stays below the block; the block ends within the memory.
        end = min(start // width, (room - base) // num_rows, num_classes) // align * align
        if end <= done:
            break
        widths.append(end - done)
        inside.append(start)
        done = end
    rest = num_classes - done
    return Blocks((*widths, rest) if rest else tuple(widths), tuple(inside), num_rows * padded(rest))


def wave_columns(num_sms: int, num_classes: int) -> int:
    """Columns of which a matrix product fills all multiprocessors with tiles again and again, if there are so many."""
    columns = num_sms // 4 * _ALIGN
    return columns if columns and num_classes >= 8 * columns else _ALIGN


class Rows(NamedTuple):
    """Rows whose logits come to lie in the memory of dweight, their blocks, and how the rest is divided."""

    num_first: int
    blocks: Blocks
    step: int
    num_chunks: int
    num_outside: int


@functools.lru_cache(maxsize=64)
def plan_rows(num_rows: int, width: int, num_classes: int, max_elements: int, align: int = _ALIGN) -> Rows | None:
    """The fewest chunks of rows whose logits take `max_elements` outside of dweight, the first of them in its memory.

    Of plans with as many chunks that which takes least outside; None where the memory of dweight spares no chunk.
    """
    row = padded(num_classes)
    num_plain = cdiv(num_rows, max(max_elements // row // _ROW_ALIGN * _ROW_ALIGN, 1))
    best = None
    for num_first in {min(n, num_rows) for n in range(_ROW_ALIGN, num_rows + _ROW_ALIGN, _ROW_ALIGN)}:
        # More rows than that have no room in dweight and outside of it.
        if num_first * row > num_classes * width + max_elements:
            continue
        blocks = plan_blocks(num_first, width, num_classes, align)
        if not blocks.inside or blocks.num_outside > max_elements:
            continue
        rest = num_rows - num_first
        for num_chunks in range(1 + (rest > 0), num_plain):
            step = cdiv(cdiv(rest, max(num_chunks - 1, 1)), _ROW_ALIGN) * _ROW_ALIGN
            num_outside = max(blocks.num_outside, step * row)
            if num_outside > max_elements:
                continue
            plan = Rows(num_first, blocks, step, num_chunks, num_outside)
            if best is None or (plan.num_chunks, plan.num_outside) < (best.num_chunks, best.num_outside):
                best = plan
            break
    return best


def place_blocks(plan: Blocks, dweight: Tensor, num_rows: int, outside: Tensor) -> list[Tensor]:
    """The blocks of `plan`, in the memory of `dweight`, which is contiguous, and in that of `outside`."""
    flat = dweight.view(-1)
    blocks = [
        flat[start : start + num_rows * num_cols].view(num_rows, num_cols)
        for start, num_cols in zip(plan.inside, plan.widths, strict=False)
    ]
    if plan.num_outside:
        num_cols = plan.widths[-1]
        blocks.append(outside[: plan.num_outside].view(num_rows, padded(num_cols))[:, :num_cols])
    return blocks
