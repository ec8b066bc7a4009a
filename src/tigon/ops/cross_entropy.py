"""Cross entropy of logits against integer labels.

    z     = softcap * tanh(logits / softcap)                            (z = logits without a cap)
    lse_i = log(sum_j exp(z_ij))
    ce_i  = (1 - eps) * w_y * (lse_i - z_iy) + eps / V * sum_j w_j * (lse_i - z_ij)
    loss  = sum_i ce_i / sum_i w_y + z_loss * sum_i lse_i^2 / count     (reduction "mean")

Gradient of row i, with p = exp(z_i - lse_i), upstream c of ce_i and d of z_loss * lse_i^2:

    dz_j = (c * a + 2 * d * z_loss * lse_i) * p_j - c * ((1 - eps) * w_y * [j = y] + eps / V * w_j)
    a = (1 - eps) * w_y + eps / V * sum_j w_j,   dlogits_j = dz_j * (1 - (z_j / softcap)^2)

M rows (all leading axes), V classes, y the label of a row, eps the label smoothing, w the class weights.
Saved for backward: logits, labels, 8 bytes a row (the maximum and the logarithm of the shifted sum, whose sum
is lse: apart they keep p exact where lse is large).
Source: Milakov & Gimelshein 2018, arXiv:1805.02867 (online softmax); Szegedy et al. 2016, arXiv:1512.00567.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from . import _op
from ._check import require, require_floating, require_number, require_one_of, require_same_device
from ._launch import launch, next_power_of_2
from ._op import (
    accept,
    apply,
    call_key,
    define,
    is_accepted,
    is_traced,
    once_differentiable,
    op,
    runs_reference,
)
from ._reuse import claim, save_for_reuse
from ._tl import tanh
from ._triton import tl, triton

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = ("mean", "sum", "none")


class CrossEntropyOutput(NamedTuple):
    """A loss, and the part of it that is the z-loss."""

    loss: Tensor
    z_loss: Tensor


# ---- reference ----


def cross_entropy_reference(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    class_weight: Tensor | None = None,
    reduction: Reduction = "mean",
    num_items: float | Tensor | None = None,
    return_z_loss: bool = False,
) -> Tensor | CrossEntropyOutput:
    valid, y, poison = stand_in_labels(labels, logits.shape[-1], ignore_index, wide_dtype(logits.dtype))
    z = logits.masked_fill(~valid.unsqueeze(-1), 0.0).to(poison.dtype)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    nll = -z.log_softmax(-1)
    w = z.new_ones(z.shape[-1]) if class_weight is None else class_weight.to(z.dtype)
    ce = (1 - label_smoothing) * w[y] * nll.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    if label_smoothing:
        ce = ce + label_smoothing / z.shape[-1] * (w * nll).sum(-1)
    ce = torch.where(valid, ce * poison, 0.0)
    squares = None
    if z_loss:
        squares = torch.where(valid, z_loss * (z.logsumexp(-1) * poison).square(), 0.0)
    divisors = mean_divisors(labels, class_weight, ignore_index, num_items, ce.dtype) if reduction == "mean" else None
    return reduce_rows(ce, squares, divisors, reduction, return_z_loss)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What losses and statistics are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def stand_in_labels(
    labels: Tensor, num_classes: int, ignore_index: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Which rows count; labels that are safe to index with; a factor that is NaN where the label is no class."""
    labels = labels.long()
    valid = labels != ignore_index
    known = (labels >= 0) & (labels < num_classes)
    poison = torch.where(known | ~valid, 1.0, float("nan")).to(dtype)
    return valid, labels.masked_fill(~(known & valid), 0), poison


def mean_divisors(
    labels: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    num_items: float | Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """What the sums of ce and of the z-loss are divided by: scalars, infinite in place of 0 so that 0 comes out."""
    if num_items is not None:
        if isinstance(num_items, Tensor):
            # A copy to the CPU has to wait for its value, every other one must not.
            copied = num_items.detach().to(labels.device, dtype, non_blocking=labels.device.type != "cpu").reshape(())
            divisor = copied.masked_fill(copied == 0, float("inf"))
        else:
            divisor = labels.new_full((), num_items if num_items else float("inf"), dtype=dtype)
        return divisor, divisor
    valid = labels != ignore_index
    # Without a valid label the sums are 0 themselves.
    count = valid.sum().clamp(min=1).to(dtype)
    if class_weight is None:
        return count, count
    known = valid & (labels >= 0) & (labels < class_weight.shape[0])
    total = torch.where(known, class_weight.to(dtype)[labels.masked_fill(~known, 0)], 0.0).sum()
    return total.masked_fill(total == 0, float("inf")), count


def reduce_rows(
    ce: Tensor,
    squares: Tensor | None,
    divisors: tuple[Tensor, Tensor] | None,
    reduction: str,
    return_z_loss: bool,
) -> Tensor | CrossEntropyOutput:
    """The public result from the losses of rows; `squares` is the z-loss of each row, None for none."""
    if reduction != "none":
        ce = ce.sum()
        squares = None if squares is None else squares.sum()
    if divisors is not None:
        ce = ce / divisors[0]
        squares = None if squares is None else squares / divisors[1]
    loss = ce if squares is None else ce + squares
    if not return_z_loss:
        return loss
    return CrossEntropyOutput(loss, torch.zeros_like(loss) if squares is None else squares)


# ---- kernels ----


@triton.jit
def _load_logits(
    ptr,
    mask,
    scale,
    softcap,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EVICTION: tl.constexpr,
):
    z = tl.load(ptr, mask=mask, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    slope = 1.0
    if HAS_SCALE:
        z *= scale
        slope = scale
    if HAS_SOFTCAP:
        z /= softcap
        # 1 - tanh^2 without its cancellation.
        e = tl.exp(-2.0 * tl.abs(z))
        slope = slope * (4.0 * e / ((1.0 + e) * (1.0 + e)))
        z = softcap * tanh(z)
    # Masked last: the cap would make a finite value of an infinite one.
    return tl.where(mask, z, float("-inf")), slope


@triton.jit
def _cross_entropy_kernel(
    logits_ptr,
    labels_ptr,
    weight_ptr,
    weight_sum_ptr,
    ce_ptr,
    squares_ptr,
    stats_ptr,
    dce_ptr,
    dsquares_ptr,
    dlogits_ptr,
    outer_stride,
    inner_stride,
    inner_rows,
    dlogits_stride,
    dce_stride,
    dsquares_stride,
    num_cols,
    ignore_index,
    confidence,
    smoothing,
    z_loss,
    softcap,
    scale,
    STATISTICS: tl.constexpr,
    GRADIENT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    SHARD: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per row: a pass for the statistics, a pass for the gradient, or both; dlogits may be logits.

    A SHARD has only some of the classes, so a label may be none of them. Its statistics are parts of those of the row:
    peak and shifted sum, in place of ce the logit that the sum of distances in place of squares starts from.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += (row // inner_rows) * outer_stride + (row % inner_rows) * inner_stride
    if GRADIENT:
        dlogits_ptr += row * dlogits_stride
    label = tl.load(labels_ptr + row)
    cols = tl.arange(0, BLOCK_V)

    if label == ignore_index:
        if STATISTICS:
            tl.store(ce_ptr + row, 0.0)
            tl.store(stats_ptr + 2 * row, 0.0)
            tl.store(stats_ptr + 2 * row + 1, 0.0)
            if HAS_Z_LOSS or (SHARD and HAS_SMOOTHING):
                tl.store(squares_ptr + row, 0.0)
        if GRADIENT:
            zeros = tl.zeros([BLOCK_V], dtype=dlogits_ptr.dtype.element_ty)
            for start in range(0, num_cols, BLOCK_V):
                tl.store(dlogits_ptr + start + cols, zeros, mask=start + cols < num_cols)
        return

    is_class = (label >= 0) & (label < num_cols)
    weight = confidence
    if HAS_WEIGHT:
        weight *= tl.load(weight_ptr + label, mask=is_class, other=0.0).to(tl.float32)
    smooth_weight = 0.0
    if HAS_SMOOTHING:
        if HAS_WEIGHT:
            smooth_weight = smoothing * tl.load(weight_sum_ptr)
        elif SHARD:
            smooth_weight = 1.0 - confidence
        else:
            smooth_weight = smoothing * num_cols

    if STATISTICS:
        # Read before the first store, which in place may overwrite it; the reductions below are barriers.
        if SHARD:
            # Some logit of the row to start from where the label has none.
            label = tl.where(is_class, label, 0)
            is_class = label < num_cols
        z_label, _ = _load_logits(logits_ptr + label, is_class, scale, softcap, HAS_SCALE, HAS_SOFTCAP, "")
        # What is summed for smoothing is relative to a logit of the row, so that a common offset cannot swamp it.
        anchor = tl.where(z_label == float("-inf"), 0.0, z_label)
        peak = tl.full([], float("-inf"), tl.float32)
        shifted_sum = tl.zeros([BLOCK_V], dtype=tl.float32)
        distance = tl.zeros([BLOCK_V], dtype=tl.float32)
        for start in tl.range(0, num_cols, BLOCK_V, num_stages=STAGES):
            c = start + cols
            mask = c < num_cols
            z, slope = _load_logits(
                logits_ptr + c,
                mask,
                scale,
                softcap,
                HAS_SCALE,
                HAS_SOFTCAP,
                "evict_last" if GRADIENT else "evict_first",
            )
            new_peak = tl.maximum(peak, tl.max(z, axis=0))
            # Up to the first finite logit the peak is -inf, and -inf - -inf is NaN.
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            shifted_sum = shifted_sum * tl.exp(peak - shift) + tl.exp(z - shift)
            peak = new_peak
            if HAS_SMOOTHING:
                z = tl.where(mask, z - anchor, 0.0)
                if HAS_WEIGHT:
                    z *= tl.load(weight_ptr + c, mask=mask, other=0.0).to(tl.float32)
                distance += z
        shifted_sum = tl.sum(shifted_sum, axis=0)
        if SHARD:
            tl.store(ce_ptr + row, z_label)
            tl.store(stats_ptr + 2 * row, peak)
            tl.store(stats_ptr + 2 * row + 1, shifted_sum)
            if HAS_SMOOTHING:
                tl.store(squares_ptr + row, tl.sum(distance, axis=0))
        else:
            log_sum = tl.log(shifted_sum)
            # NaN here makes loss and gradient of the row NaN, also in a later pass that starts from the statistics.
            peak = tl.where(is_class, peak, float("nan"))
            ce = weight * (log_sum - (z_label - peak))
            if HAS_SMOOTHING:
                ce += smooth_weight * (log_sum - (anchor - peak)) - smoothing * tl.sum(distance, axis=0)
            tl.store(ce_ptr + row, ce)
            tl.store(stats_ptr + 2 * row, peak)
            tl.store(stats_ptr + 2 * row + 1, log_sum)
            if HAS_Z_LOSS:
                tl.store(squares_ptr + row, z_loss * (peak + log_sum) * (peak + log_sum))
    else:
        peak = tl.load(stats_ptr + 2 * row)
        log_sum = tl.load(stats_ptr + 2 * row + 1)

    if GRADIENT:
        dce = tl.load(dce_ptr + row * dce_stride).to(tl.float32)
        p_factor = dce * (weight + smooth_weight)
        if HAS_Z_LOSS:
            p_factor += tl.load(dsquares_ptr + row * dsquares_stride).to(tl.float32) * (2.0 * z_loss * (peak + log_sum))
        for start in tl.range(0, num_cols, BLOCK_V, num_stages=STAGES):
            c = start + cols
            mask = c < num_cols
            z, slope = _load_logits(logits_ptr + c, mask, scale, softcap, HAS_SCALE, HAS_SOFTCAP, "evict_first")
            dz = p_factor * tl.exp((z - peak) - log_sum)
            if HAS_SMOOTHING:
                if HAS_WEIGHT:
                    dz -= dce * smoothing * tl.load(weight_ptr + c, mask=mask, other=0.0).to(tl.float32)
                else:
                    dz -= dce * smoothing
            dz = tl.where(c == label, dz - dce * weight, dz)
            tl.store(dlogits_ptr + c, dz * slope, mask=mask)


@triton.jit
def _sum_rows_kernel(
    ce_ptr, labels_ptr, loss_ptr, divisor_ptr, num_rows, ignore_index, MEAN: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: the sum of the losses of all rows, divided by the number of those not ignored or by 1."""
    rows = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    count = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, num_rows, BLOCK):
        mask = start + rows < num_rows
        total += tl.load(ce_ptr + start + rows, mask=mask, other=0.0)
        if MEAN:
            labels = tl.load(labels_ptr + start + rows, mask=mask, other=0)
            count += (mask & (labels != ignore_index)).to(tl.float32)
    divisor = tl.sum(count, axis=0)
    # Without a valid label the sum is 0 itself.
    divisor = tl.maximum(divisor, 1.0)
    tl.store(divisor_ptr, divisor)
    tl.store(loss_ptr, tl.sum(total, axis=0) / divisor)


# ---- operators ----


@functools.cache
def _blocks(num_cols: int, has_statistics: bool, has_gradient: bool, has_options: bool) -> tuple[int, int]:
    """BLOCK_V and num_warps, measured on an H200 at 8192 x 128256 (MEASURED.md).

    The statistics are a chain of maxima from block to block, so small blocks, of which more are resident, go first.
    Options need registers, so with them a thread takes fewer elements.
    """
    if has_statistics and not has_gradient and not has_options and num_cols <= 4096:
        # Rows so short, those of a tile of classes, are over before a wide program is under way.
        return min(max(next_power_of_2(num_cols), 128), 1024), 2
    block, num_warps = (4096, 8 if has_gradient or has_options else 4) if has_statistics else (8192, 16)
    needed = max(next_power_of_2(num_cols), 128)
    return (block, num_warps) if needed >= block else (needed, 4 if needed <= 1024 else min(num_warps, 8))


def _row_layout(x: Tensor) -> tuple[Tensor, int, int, int]:
    """`x` with rows at `(row // inner_rows) * outer_stride + (row % inner_rows) * inner_stride`, and these three.

    Two levels hold all but the last token of each sequence without a copy; three or more are copied.
    """
    if x.is_contiguous():
        return x, 1, x.shape[-1], 0
    levels: list[tuple[int, int]] = []
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if levels and stride == levels[-1][0] * levels[-1][1]:
            levels[-1] = (levels[-1][0] * size, levels[-1][1])
        elif size != 1:
            levels.append((size, stride))
    if len(levels) > 2 or (x.stride(-1) != 1 and x.shape[-1] != 1):
        return x.contiguous(), 1, x.shape[-1], 0
    if len(levels) == 2:
        return x, levels[0][0], levels[1][1], levels[0][1]
    return x, 1, levels[0][1] if levels else 0, 0


def _flat_stride(upstream: Tensor | None) -> tuple[Tensor | None, int]:
    """An upstream gradient of the rows, or one scalar for all, as a vector and its stride."""
    if upstream is None:
        return None, 0
    flat = upstream.reshape(-1)
    return flat, flat.stride(0) if flat.numel() > 1 else 0


def launch_rows(
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
    scale: float | None = None,
    num_classes: int | None = None,
) -> None:
    """Fill `ce`, `squares`, `stats` where `ce` is given, else read `stats`; fill `dlogits` where that is given.

    With `num_classes` the logits are a shard of so many classes, and a label below 0 is one of another shard. What is
    filled without `dlogits` are then parts of the statistics, as the kernel says.
    """
    logits, inner_rows, outer_stride, inner_stride = _row_layout(logits)
    num_cols = logits.shape[-1]
    block, num_warps = _blocks(
        num_cols, ce is not None, dlogits is not None, label_smoothing != 0 or softcap is not None
    )
    dce, dce_stride = _flat_stride(dce)
    dsquares, dsquares_stride = _flat_stride(dsquares)
    smoothed = label_smoothing != 0
    if class_weight is not None:
        class_weight = class_weight.contiguous()
    launch(
        _cross_entropy_kernel,
        (labels.numel(),),
        logits,
        labels.contiguous(),
        class_weight,
        class_weight.sum(dtype=torch.float32) if smoothed and class_weight is not None else None,
        ce,
        squares,
        stats,
        dce,
        dsquares,
        dlogits,
        outer_stride,
        inner_stride,
        inner_rows,
        dlogits.stride(0) if dlogits is not None and dlogits.dim() == 2 else num_cols,
        dce_stride,
        dsquares_stride,
        num_cols,
        ignore_index,
        1.0 - label_smoothing,
        label_smoothing / (num_classes or num_cols),
        float(z_loss),
        float(softcap or 0.0),
        1.0 if scale is None else float(scale),
        STATISTICS=ce is not None,
        GRADIENT=dlogits is not None,
        HAS_WEIGHT=class_weight is not None,
        HAS_SMOOTHING=smoothed,
        HAS_Z_LOSS=z_loss != 0,
        HAS_SOFTCAP=softcap is not None,
        HAS_SCALE=scale is not None,
        SHARD=num_classes is not None,
        BLOCK_V=block,
        STAGES=2,
        num_warps=num_warps,
    )


def _fake_fwd(
    logits: Tensor, labels: Tensor, class_weight: Tensor | None, z_loss: float, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    ce = logits.new_empty(labels.shape, dtype=torch.float32)
    squares = logits.new_empty(labels.shape if z_loss else (0,), dtype=torch.float32)
    return ce, squares, logits.new_empty((*labels.shape, 2), dtype=torch.float32)


@define(
    "cross_entropy_fwd(Tensor logits, Tensor labels, Tensor? class_weight, float z_loss, int ignore_index,"
    " float label_smoothing, float? softcap) -> (Tensor, Tensor, Tensor)",
    fake=_fake_fwd,
)
def _fwd(
    logits: Tensor, labels: Tensor, class_weight: Tensor | None, z_loss: float, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    ce = torch.empty_like(labels, dtype=torch.float32, memory_format=torch.contiguous_format)
    squares = torch.empty_like(ce) if z_loss else ce.new_empty(0)
    stats = ce.new_empty((*labels.shape, 2))
    launch_rows(logits, labels, class_weight, ce, squares, stats, None, None, None, z_loss, *options)
    return ce, squares, stats


def _sum(ce: Tensor, labels: Tensor, ignore_index: int, mean: bool) -> tuple[Tensor, Tensor]:
    """The loss and what it was divided by, in one launch where torch needs six; compilers fuse those."""
    loss = ce.new_empty(())
    divisor = torch.empty_like(loss)
    num_rows = ce.numel()
    block = max(128, min(4096, next_power_of_2(num_rows)))
    # One program also without a row: the sum is 0.
    launch(
        _sum_rows_kernel,
        (1,),
        ce,
        labels.contiguous(),
        loss,
        divisor,
        num_rows,
        ignore_index,
        MEAN=mean,
        BLOCK=block,
        num_warps=4 if block <= 1024 else 8,
    )
    return loss, divisor


def _fake_bwd(logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape)


@define(
    "cross_entropy_bwd(Tensor logits, Tensor labels, Tensor? class_weight, Tensor stats, Tensor dce,"
    " Tensor? dsquares, float z_loss, int ignore_index, float label_smoothing, float? softcap) -> Tensor",
    fake=_fake_bwd,
)
def _bwd(
    logits: Tensor,
    labels: Tensor,
    class_weight: Tensor | None,
    stats: Tensor,
    dce: Tensor,
    dsquares: Tensor | None,
    *options: Any,
) -> Tensor:
    dlogits = logits.new_empty(logits.shape)
    launch_rows(logits, labels, class_weight, None, None, stats, dce, dsquares, dlogits, *options)
    return dlogits


# ---- autograd ----


def _gradients(ctx: Any, dce: Tensor, dsquares: Tensor | None = None) -> tuple[Tensor | None, ...]:
    if not ctx.needs_input_grad[0]:
        return None, None, None, None
    logits, *saved = ctx.saved_tensors
    if not is_traced(dce) and claim(ctx, logits)[0]:
        # A program has read a block of its row before it writes the same block.
        launch_rows(logits, saved[0], saved[1], None, None, saved[2], dce, dsquares, logits, *ctx.options)
        return logits, None, None, None
    return _bwd(logits, *saved, dce, dsquares, *ctx.options), None, None, None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, class_weight: Tensor | None, options: tuple[Any, ...]
    ) -> Tensor | tuple[Tensor, Tensor]:
        ce, squares, stats = _fwd(logits, labels, class_weight, *options)
        save_for_reuse(ctx, logits, others=(labels, class_weight, stats))
        ctx.options = options
        return (ce, squares) if options[0] else ce

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dce: Tensor, dsquares: Tensor | None = None) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, dce, dsquares)


class _SummedCrossEntropy(torch.autograd.Function):
    """The sum over the rows, or their mean, with the sum in the same operator: in eager, where launches take time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, options: tuple[Any, ...], mean: bool) -> Tensor:
        ce, _, stats = _fwd(logits, labels, None, *options)
        loss, ctx.divisor = _sum(ce, labels, options[1], mean)
        save_for_reuse(ctx, logits, others=(labels, None, stats))
        ctx.options, ctx.mean = options, mean
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, dloss / ctx.divisor if ctx.mean else dloss)


# ---- public ----


def checked_labels(name: str, labels: Tensor, num_classes: int, ignore_index: int) -> Tensor:
    """`labels` as int64; raises for a label that is no class where that can be seen without waiting for a device.

    Raises:
        ValueError: a label is neither a class nor `ignore_index`; on a GPU only with TIGON_DEBUG=1. `ignore_index`
            is no int.
    """
    require(isinstance(ignore_index, (int, torch.SymInt)), name, "ignore_index", "an int", ignore_index)
    labels = labels.long()
    device = labels.device.type
    readable = not torch.compiler.is_compiling() and type(labels) is Tensor and device != "meta"
    if readable and (device == "cpu" or _op.DEBUG):
        wrong = (labels != ignore_index) & ((labels < 0) | (labels >= num_classes))
        if wrong.any():
            row = int(wrong.reshape(-1).nonzero()[0])
            require(
                False,
                name,
                "labels",
                f"a class below {num_classes} or ignore_index {ignore_index}",
                f"{int(labels.reshape(-1)[row])} in row {row}",
            )
    return labels


def require_options(
    name: str,
    labels: Tensor,
    rows: torch.Size,
    num_classes: int,
    label_smoothing: float,
    softcap: float | None,
    class_weight: Tensor | None,
    reduction: str,
    num_items: float | Tensor | None,
    z_loss: float,
) -> None:
    """The checks that cross entropy has with and without the projection in front.

    Raises:
        ValueError: naming the argument, what was expected, and what it was.
    """
    require(isinstance(labels, Tensor), name, "labels", "a tensor", type(labels).__name__)
    integer = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    require(integer, name, "labels", "an integer dtype", labels.dtype)
    require(labels.shape == rows, name, "labels", f"shape {tuple(rows)}", tuple(labels.shape))
    require(num_classes >= 1, name, "classes", "at least one", num_classes)
    require_number(name, "label_smoothing", label_smoothing, low=0, high=1)
    require_number(name, "z_loss", z_loss)
    if softcap is not None:
        require_number(name, "softcap", softcap, low=0, above=True)
    require_one_of(name, "reduction", reduction, REDUCTIONS)
    if class_weight is not None:
        require_floating(name, class_weight=class_weight)
        shape = tuple(class_weight.shape)
        require(shape == (num_classes,), name, "class_weight", f"shape ({num_classes},)", shape)
        require(not class_weight.requires_grad, name, "class_weight", "no requires_grad", "a tensor that has it")
    if num_items is not None:
        require(reduction == "mean", name, "num_items", "None unless reduction is 'mean'", f"reduction {reduction!r}")
        if isinstance(num_items, Tensor):
            require(num_items.numel() == 1, name, "num_items", "one element", f"shape {tuple(num_items.shape)}")
        else:
            require_number(name, "num_items", num_items, low=0)


def _supports(logits: Tensor, labels: Tensor | None = None, **_: Any) -> list[str]:
    return ["float64 is computed by the reference"] if logits.dtype == torch.float64 else []


@op(reference=cross_entropy_reference, supports=_supports)
def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    class_weight: Tensor | None = None,
    reduction: Reduction = "mean",
    num_items: float | Tensor | None = None,
    return_z_loss: bool = False,
) -> Tensor | CrossEntropyOutput:
    """Cross entropy of `logits` against `labels`, with the gradient in one pass over the logits.

        loss = F.cross_entropy(cap(logits.float()), labels, class_weight) + z_loss * mean(lse^2)    # in one line

    Args:
        logits: `[..., V]`, floating point, any strides; unchanged as long as anything else holds them.
        labels: `[...]`, any integer dtype.
        ignore_index: rows with this label add exactly 0 to the loss and to the gradient, whatever they hold.
        label_smoothing: weight of the uniform distribution in the target, as in `F.cross_entropy`.
        z_loss: factor of the squared log-sum-exp of each row, which is added to the loss.
        softcap: logits become `softcap * tanh(logits / softcap)`; None leaves them.
        class_weight: `[V]`, factor of each class as `weight` of `F.cross_entropy`; gets no gradient.
        reduction: "mean" divides the cross entropy by the summed weight of the labels that are not ignored and
            the z-loss by their number; "sum" and "none" divide by nothing.
        num_items: replaces both divisors of "mean", for a batch that is part of a larger one: a number or a tensor
            of one element on any device.
        return_z_loss: return the z-loss too.

    Returns:
        Scalar fp32 (fp64 for fp64 logits), or `[...]` for reduction "none"; with `return_z_loss` the named tuple
        `(loss, z_loss)`, whose loss contains the z-loss. A divisor of 0 gives loss 0 and gradients 0.

    Raises:
        ValueError: shapes, dtypes, devices or options disagree. A label that is neither a class nor `ignore_index`
            raises on a CPU; on a GPU the loss and gradient of its row are NaN, and TIGON_DEBUG=1 raises.

    Numerics: statistics, losses and gradients in fp32, the gradient rounded once to the dtype of the logits.
    Memory:   saves the logits and 8 bytes a row; the gradient is the only other tensor of their size, and takes their
              place where nothing but this operator holds them any more.
    Differs from the reference: never in formula; order of summation over V.
    Source: Milakov & Gimelshein 2018, arXiv:1805.02867; z-loss: Chowdhery et al. 2022, arXiv:2204.02311.
    """
    name = "cross_entropy"
    key = None
    if num_items is None:
        checked = ignore_index, label_smoothing, z_loss, softcap, reduction
        has_gradient = getattr(class_weight, "requires_grad", False)
        key = call_key(name, (logits, labels, class_weight), *checked, has_gradient)
    is_known = is_accepted(key)
    if not is_known:
        require_floating(name, logits=logits)
        require(logits.dim() >= 1, name, "logits", "at least one axis", "a scalar")
        rows, num_classes = logits.shape[:-1], logits.shape[-1]
        require_options(
            name, labels, rows, num_classes, label_smoothing, softcap, class_weight, reduction, num_items, z_loss
        )
        require_same_device(name, logits=logits, labels=labels, class_weight=class_weight)
    labels = checked_labels(name, labels, logits.shape[-1], ignore_index)
    if not is_known and runs_reference(name, logits, labels):
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
    if not is_known:
        accept(key, logits)
    options = z_loss, ignore_index, label_smoothing, softcap
    is_plain = not z_loss and num_items is None and class_weight is None and not is_traced(logits)
    if is_plain and reduction != "none" and labels.numel() < 2**30:
        loss = apply(_SummedCrossEntropy, logits, labels, options, reduction == "mean")
        return CrossEntropyOutput(loss, torch.zeros_like(loss)) if return_z_loss else loss
    out = apply(_CrossEntropy, logits, labels, class_weight, options)
    ce, squares = out if z_loss else (out, None)
    divisors = mean_divisors(labels, class_weight, ignore_index, num_items, ce.dtype) if reduction == "mean" else None
    return reduce_rows(ce, squares, divisors, reduction, return_z_loss)
