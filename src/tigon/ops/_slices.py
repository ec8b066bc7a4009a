"""Cross entropy of a head by tiles of rows and classes: logits exist for one tile only.

    forward:   statistics of each tile, joined to those of the rows                                    one product
    backward:  the logits of each tile again, dlogits in place, and both products of the gradient      three products

A tile sees some of the classes, as one rank does of a vocabulary that ranks share: labels are a class of the tile,
`ELSEWHERE` or `IGNORED`, and what a tile adds to the statistics of a row is its peak, the sum of exponentials relative
to that, the logit of the label if it is here, and for smoothing the sum of distances from one logit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ._anchored import MAX_RISE
from ._choice import take
from ._hopper import TILE_N
from ._hopper_cross_entropy import can_anchor, label_flags, product_dlogits, product_losses
from ._launch import cdiv, next_power_of_2
from ._predictions import Predictions
from ._projection import CPU_SLICE_LOGITS, accumulate, padded, scale_rows, scaled_rows
from .cross_entropy import launch_rows, stand_in_labels, wide_dtype

IGNORED, ELSEWHERE = -1, -2
# Rows of a tile, and the most sums of dweight. A tile of r rows and c classes adds r numbers of 8 bytes to the sums of
# dhidden for each that it adds, of 4 bytes, to dweight; of 64 MiB of logits, r = 4096 moves least.
_MAX_ROWS, _MAX_ROW_CHUNKS = 4096, 8


class Options(NamedTuple):
    """What changes the formula."""

    z_loss: float
    label_smoothing: float
    softcap: float | None
    scale: float | None


# ---- one tile, or one rank's part of the logits ----


def shard_statistics(
    logits: Tensor,
    labels: Tensor,
    at: Tensor,
    distance: Tensor | None,
    stats: Tensor,
    options: Options,
    num_classes: int,
    has_kernel: bool,
) -> None:
    """Fill `at`, the label's logit or that of class 0, `distance`, the sum of distances from it, and `stats`."""
    _, *rest = options
    if has_kernel:
        given = None, at, distance, stats, None, None, None, 0.0, IGNORED
        launch_rows(logits, labels, *given, *rest, num_classes=num_classes)
        return
    for part in _row_slices(logits):
        z, _ = _capped(logits[part], labels[part], stats.dtype, options)
        at[part] = z.gather(-1, labels[part].clamp(min=0).unsqueeze(-1)).squeeze(-1)
        if distance is not None:
            distance[part] = (z - anchor_of(at[part]).unsqueeze(-1)).sum(-1)
        peak = z.amax(-1)
        stats[part, 0] = peak
        shift = peak.masked_fill(peak == float("-inf"), 0.0)
        stats[part, 1] = (z - shift.unsqueeze(-1)).exp_().sum(-1)


def shard_dlogits(
    logits: Tensor,
    labels: Tensor,
    stats: Tensor,
    dce: Tensor,
    dsquares: Tensor,
    options: Options,
    num_classes: int,
    has_kernel: bool,
) -> None:
    """Turn logits into dlogits in place, from the `stats` of whole rows."""
    z_loss, *rest = options
    if has_kernel:
        given = None, None, None, stats, dce, dsquares, logits, z_loss, IGNORED
        launch_rows(logits, labels, *given, *rest, num_classes=num_classes)
        return
    wide, smoothing = stats.dtype, options.label_smoothing
    for part in _row_slices(logits):
        z, slope = _capped(logits[part], labels[part], wide, options)
        peak, log_sum = stats[part, :1], stats[part, 1:]
        factors = (t.to(wide).expand(labels.shape)[part].unsqueeze(-1) for t in (dce, dsquares))
        part_dce, part_dsquares = factors
        dz = ((z - peak) - log_sum).exp_().mul_(part_dce + part_dsquares * (2 * z_loss * (peak + log_sum)))
        if smoothing:
            dz -= part_dce * (smoothing / num_classes)
        dlabel = (part_dce * (smoothing - 1)).masked_fill((labels[part] < 0).unsqueeze(-1), 0.0)
        dz.scatter_add_(-1, labels[part].clamp(min=0).unsqueeze(-1), dlabel)
        logits[part] = dz.mul_(slope).masked_fill_((labels[part] == IGNORED).unsqueeze(-1), 0.0).to(logits.dtype)


def anchor_of(at: Tensor) -> Tensor:
    """What `distance` is a sum of distances from."""
    return at.masked_fill(at == float("-inf"), 0.0)


def _row_slices(logits: Tensor) -> Iterator[slice]:
    step = max(1, CPU_SLICE_LOGITS // max(logits.shape[1], 1))
    return (slice(i, min(i + step, logits.shape[0])) for i in range(0, logits.shape[0], step))


def _capped(logits: Tensor, labels: Tensor, dtype: torch.dtype, options: Options) -> tuple[Tensor, Tensor | float]:
    """Scaled and capped logits, zeros in ignored rows, and their derivative."""
    z = logits.masked_fill((labels == IGNORED).unsqueeze(-1), 0.0).to(dtype)
    slope: Tensor | float = 1.0
    if options.scale is not None:
        z, slope = z * options.scale, options.scale
    if options.softcap is not None:
        t = torch.tanh_(z / options.softcap)
        z, slope = options.softcap * t, (1 - t.square()) * slope
    return z, slope


# ---- all tiles ----


class _Tiles(NamedTuple):
    """Rows and classes of a tile."""

    num_rows: int
    num_cols: int


def plan_tiles(num_rows: int, num_classes: int, itemsize: int, max_bytes: int) -> _Tiles:
    """Few chunks of rows, because each adds to dweight; as many classes as the rest of `max_bytes` allows."""
    rows = max(1, min(num_rows, max(_MAX_ROWS, cdiv(num_rows, _MAX_ROW_CHUNKS))))
    cols = max_bytes // itemsize // rows // TILE_N * TILE_N
    if cols == 0:
        cols = min(padded(num_classes), TILE_N)
        rows = max(1, min(rows, max_bytes // itemsize // cols))
    return _Tiles(rows, min(cols, padded(num_classes)))


def _local_labels(labels: Tensor, num_classes: int, ignore_index: int, num_cols: int) -> Tensor:
    """`[tiles, rows]`: the labels as each tile of classes is given them."""
    valid, y, _ = stand_in_labels(labels, num_classes, ignore_index, torch.float32)
    starts = torch.arange(0, num_classes, num_cols, device=labels.device).unsqueeze(-1)
    local = y - starts
    is_here = (local >= 0) & (local < (num_classes - starts).clamp(max=num_cols))
    return local.masked_fill(~is_here, ELSEWHERE).masked_fill_(~valid, IGNORED)


def _tile_of(buffer: Tensor, num_rows: int, num_cols: int) -> Tensor:
    return buffer[: num_rows * padded(num_cols)].view(num_rows, padded(num_cols))[:, :num_cols]


def _product(h: Tensor, weight: Tensor, bias: Tensor | None, part: slice, buffer: Tensor) -> Tensor:
    out = _tile_of(buffer, h.shape[0], part.stop - part.start)
    if bias is None:
        return torch.mm(h, weight[part].t(), out=out)
    return torch.addmm(bias[part], h, weight[part].t(), out=out)


def _parts(total: int, step: int) -> list[slice]:
    return [slice(i, min(i + step, total)) for i in range(0, total, step)]


def sliced_statistics(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ce: Tensor,
    squares: Tensor | None,
    stats: Tensor,
    max_bytes: int,
    ignore_index: int,
    options: Options,
    has_kernel: bool,
    predictions: Predictions | None = None,
) -> None:
    """Fill `ce`, `squares` and `stats`, vectors of the rows; `weight` has the dtype of `rows`.

    `predictions` see all logits.
    """
    num_classes = weight.shape[0]
    tiles = plan_tiles(rows.shape[0], num_classes, rows.element_size(), max_bytes)
    for part in _parts(rows.shape[0], tiles.num_rows):
        h, out = rows[part], (labels[part], ce[part], stats[part])
        see = None if predictions is None else partial(predictions.update, rows=part)
        given = h, weight, bias, *out, tiles.num_cols, ignore_index, options, has_kernel, see
        ways: dict[str, Callable[[], None]] = {"product, then statistics": partial(_tiled_statistics, *given)}
        if see is None and has_kernel and not options.label_smoothing and can_anchor(h, weight, bias, *options[2:]):
            fused = partial(product_losses, h, weight, *out, ignore_index, options.scale, MAX_RISE)
            ways = {"product into statistics": fused, **ways}
        take(("statistics", next_power_of_2(h.shape[0]), *weight.shape, h.dtype), ways, h.device)
        if squares is not None:
            squares[part] = options.z_loss * stats[part].sum(-1).square()


def _tiled_statistics(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ce: Tensor,
    stats: Tensor,
    num_cols: int,
    ignore_index: int,
    options: Options,
    has_kernel: bool,
    see: Callable[..., None] | None,
) -> None:
    """Those of rows whose logits are computed for `num_cols` classes at a time, and shown to `see`."""
    num_classes, smoothing = weight.shape[0], options.label_smoothing
    buffer = h.new_empty(h.shape[0] * padded(num_cols))
    columns = _parts(num_classes, num_cols)
    y = _local_labels(labels, num_classes, ignore_index, num_cols)
    found = stats.new_empty((len(columns), h.shape[0], 2))
    at = stats.new_empty((len(columns), h.shape[0]))
    distance = torch.empty_like(at) if smoothing else None
    for index, cols in enumerate(columns):
        logits = _product(h, weight, bias, cols, buffer)
        if see is not None:
            see(logits, first=cols.start)
        part_distance = None if distance is None else distance[index]
        shard_statistics(logits, y[index], at[index], part_distance, found[index], options, num_classes, has_kernel)
    valid, _, poison = stand_in_labels(labels, num_classes, ignore_index, stats.dtype)
    own = found[..., 0]
    peak = own.amax(0)
    shift = peak.masked_fill(peak == float("-inf"), 0.0)
    log_sum = (found[..., 1] * (own - shift).exp()).sum(0).log()
    loss = log_sum - (1 - smoothing) * (at - shift).masked_fill(y < 0, 0.0).sum(0)
    if distance is not None:
        sizes = stats.new_tensor([c.stop - c.start for c in columns]).unsqueeze(-1)
        loss -= smoothing / num_classes * (distance + sizes * (anchor_of(at) - shift)).sum(0)
    # NaN where the label is no class, also in the gradient, which starts from the statistics.
    peak = peak * poison
    ce.copy_((loss * poison).masked_fill(~valid, 0.0))
    stats.copy_(torch.stack((peak, log_sum), -1).masked_fill(~valid.unsqueeze(-1), 0.0))


def sliced_gradients(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    stats: Tensor,
    dce: Tensor,
    dsquares: Tensor | None,
    factor: Tensor | None,
    dhidden: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    max_bytes: int,
    ignore_index: int,
    options: Options,
    has_kernel: bool,
    adds_dweight: bool = False,
) -> None:
    """Write the gradients that are given, all of them times `factor`; `dbias` is fp32, `dweight` may be added to."""
    num_rows, num_classes = rows.shape[0], weight.shape[0]
    tiles = plan_tiles(num_rows, num_classes, rows.element_size(), max_bytes)
    buffer = rows.new_empty(tiles.num_rows * padded(tiles.num_cols))
    columns = _parts(num_classes, tiles.num_cols)
    wide = wide_dtype(rows.dtype)
    for part in _parts(num_rows, tiles.num_rows):
        h, y = rows[part], _local_labels(labels[part], num_classes, ignore_index, tiles.num_cols)
        upstream = [t if t is None or t.dim() == 0 else t[part] for t in (dce, dsquares)]
        upstream[1] = upstream[0] if upstream[1] is None else upstream[1]
        scaled = None
        if dweight is not None and has_kernel:
            # Where dhidden will be, which is written last.
            room = h.new_empty(h.shape) if dhidden is None or dhidden.dtype != h.dtype else dhidden[part]
            scaled = scale_rows(h, labels[part], None, factor, ignore_index, room)
        elif dweight is not None:
            scaled = scaled_rows(h, labels[part], factor, ignore_index, has_kernel)
        is_first, total = part.start == 0, None
        is_plain = has_kernel and not (options.z_loss or options.label_smoothing)
        multiplies = is_plain and can_anchor(h, weight, bias, *options[2:])
        flags = label_flags(labels[part], num_classes, ignore_index) if multiplies else None
        for index, cols in enumerate(columns):
            logits = _tile_of(buffer, h.shape[0], cols.stop - cols.start)

            made = partial(_product_then_dlogits, h, weight, bias, cols, buffer, y[index], stats[part], upstream)
            ways: dict[str, Callable[[], None]] = {"product, then dlogits": partial(made, options, has_kernel)}
            if flags is not None:
                given = labels[part], flags, stats[part], upstream[0], cols.start, ignore_index, options.scale, logits
                ways = {"product into dlogits": partial(product_dlogits, h, weight[cols], *given), **ways}
            # Tiles of all sizes but the last are alike.
            size = next_power_of_2(h.shape[0]), next_power_of_2(logits.shape[1]), h.shape[1], h.dtype
            take(("dlogits", *size), ways, h.device)
            if dhidden is not None:
                total = accumulate(total, logits, weight[cols])
            if scaled is not None:
                _add_product(dweight[cols], logits.t(), scaled, is_first and not adds_dweight)  # type: ignore[index]
            if dbias is not None:
                dbias[cols] = logits.sum(0, dtype=wide) + (0 if is_first else dbias[cols])
        if dhidden is not None and has_kernel:
            scale_rows(total, labels[part], None, factor, ignore_index, dhidden[part])  # type: ignore[arg-type]
        elif dhidden is not None:
            dhidden[part] = total if factor is None else total * factor  # type: ignore[operator]
    if dbias is not None and factor is not None:
        dbias *= factor


def _product_then_dlogits(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cols: slice,
    buffer: Tensor,
    labels: Tensor,
    stats: Tensor,
    upstream: list[Tensor],
    options: Options,
    has_kernel: bool,
) -> None:
    logits = _product(h, weight, bias, cols, buffer)
    shard_dlogits(logits, labels, stats, *upstream, options, weight.shape[0], has_kernel)


def _add_product(total: Tensor, a: Tensor, b: Tensor, is_first: bool) -> None:
    """`total = a @ b`, or added to it; fp32 inside."""
    if total.dtype == a.dtype:
        torch.mm(a, b, out=total) if is_first else total.addmm_(a, b)
    else:
        total.copy_(accumulate(None, a, b)) if is_first else accumulate(total, a, b)
