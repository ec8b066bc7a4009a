"""The class of the largest logit of each row, from logits that are seen part by part."""

from __future__ import annotations

import torch
from torch import Tensor

from ._launch import launch
from ._projection import CPU_SLICE_LOGITS, SLICE_LOGITS
from ._triton import tl, triton
from .cross_entropy import _blocks, _load_logits, wide_dtype

# Value and class of the best logit of a lane take as many registers as the sums of a loss: half as many lanes.
_MAX_BLOCK = 2048


@triton.jit
def _predictions_kernel(
    logits_ptr,
    best_ptr,
    classes_ptr,
    logits_stride,
    first_col,
    num_cols,
    softcap,
    scale,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per row: the first of its largest logits here, if it is above those before."""
    row = tl.program_id(0).to(tl.int64)
    before = tl.load(best_ptr + row)
    if before == float("inf"):
        return
    logits_ptr += row * logits_stride
    cols = tl.arange(0, BLOCK_V)
    best = tl.full([BLOCK_V], float("-inf"), tl.float32)
    best_col = cols
    for start in tl.range(0, num_cols, BLOCK_V, num_stages=STAGES):
        c = start + cols
        z, _slope = _load_logits(logits_ptr + c, c < num_cols, scale, softcap, HAS_SCALE, HAS_SOFTCAP, "")
        # In each lane the first of equals, since no later one is larger.
        is_better = z > best
        best = tl.where(is_better, z, best)
        best_col = tl.where(is_better, c, best_col)
    top = tl.max(best, axis=0)
    first = tl.min(tl.where(best == top, best_col, 2147483647), axis=0)
    if top > before:
        tl.store(best_ptr + row, top)
        tl.store(classes_ptr + row, first_col + first.to(tl.int64))


class Predictions:
    """Fills `classes`, `[...]` int64: -1 where the label is ignored, and class 0 until a logit is above -inf."""

    def __init__(
        self,
        classes: Tensor,
        labels: Tensor,
        dtype: torch.dtype,
        ignore_index: int,
        softcap: float | None,
        scale: float | None,
        has_kernel: bool,
    ) -> None:
        ignored = labels == ignore_index
        self.classes = classes.zero_().masked_fill_(ignored, -1).view(-1)
        # Above which nothing is.
        best = classes.new_full(labels.shape, float("-inf"), dtype=wide_dtype(dtype))
        self.best = best.masked_fill_(ignored, float("inf")).view(-1)
        self.softcap, self.scale, self.has_kernel = softcap, scale, has_kernel

    def update(self, logits: Tensor, rows: slice, first: int = 0) -> None:
        """See logits of some `rows` and of classes from `first` on: parts of a row come in the order of classes."""
        best, classes = self.best[rows], self.classes[rows]
        num_rows, num_cols = logits.shape
        if self.has_kernel:
            block, num_warps = _blocks(num_cols, True, False, True)
            launch(
                _predictions_kernel,
                (num_rows,),
                logits,
                best,
                classes,
                logits.stride(0),
                first,
                num_cols,
                float(self.softcap or 0.0),
                1.0 if self.scale is None else self.scale,
                HAS_SOFTCAP=self.softcap is not None,
                HAS_SCALE=self.scale is not None,
                BLOCK_V=min(block, _MAX_BLOCK),
                STAGES=2,
                num_warps=num_warps,
            )
            return
        step = max(1, (CPU_SLICE_LOGITS if logits.device.type == "cpu" else SLICE_LOGITS) // num_cols)
        for i in range(0, num_rows, step):
            part = slice(i, i + step)
            z = logits[part].to(best.dtype)
            if self.scale is not None:
                z = z * self.scale
            if self.softcap is not None:
                z = self.softcap * torch.tanh(z / self.softcap)
            top, index = z.max(-1)
            is_better = top > best[part]
            best[part] = torch.where(is_better, top, best[part])
            classes[part] = torch.where(is_better, index + first, classes[part])
