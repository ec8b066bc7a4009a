"""Gradients of a loss of log-probabilities, made while the logits that gave them are still there: three products.

    logits -> log_probs, entropy -> coefficients dloss/dlog_probs, dloss/dentropy -> dlogits, in place of the logits

Only who knows the loss knows the coefficients, so rows come in groups that one call of `coefficients` can judge: single
rows, sequences, pairs of sequences. `linear_log_probs` has to wait for the upstream gradient of all rows, and computes
the logits again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._launch import as_rows
from ._linear_cross_entropy import _sums_widely
from ._projection import accumulate, finished, row_stride, scaled_rows
from .cross_entropy import wide_dtype
from .linear_log_probs import _fill_dlogits, _fill_outputs, _launch_bwd, _launch_fwd, _pieces

# What a group of rows gives: dloss/dlog_probs, and dloss/dentropy or None.
Coefficients = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor | None]]


class LossGradients(NamedTuple):
    """Per row: log-probability, entropy, statistics and coefficients; the gradients of the inputs."""

    log_probs: Tensor
    entropy: Tensor
    stats: Tensor
    dlog_probs: Tensor
    dentropy: Tensor | None
    dhidden: Tensor
    dweight: Tensor
    dbias: Tensor


def loss_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    groups: Sequence[slice | Tensor],
    coefficients: Coefficients,
    needs: Sequence[bool],
    dtype: torch.dtype,
    has_kernel: bool,
    ignore_index: int,
    softcap: float | None,
    scale: float | None,
) -> LossGradients:
    """All groups of rows, given as slices or as indices of the flattened rows.

    Rows of no group are taken for ignored. `coefficients(i, log_probs, entropy)` is called for each group in turn.
    """
    rows, y = as_rows(hidden), labels.reshape(-1).contiguous()
    w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
    num_rows, wide = rows.shape[0], wide_dtype(dtype)
    log_probs, entropy, dlog_probs = (rows.new_zeros(num_rows, dtype=wide) for _ in range(3))
    stats = rows.new_zeros(num_rows, 3, dtype=wide)
    dentropy: Tensor | None = None
    sizes = [g.stop - g.start if isinstance(g, slice) else g.shape[0] for g in groups]
    is_whole = sum(sizes) == num_rows
    made = hidden.new_empty if is_whole else hidden.new_zeros
    dhidden = made(hidden.shape if needs[0] else (0,))
    num_classes = weight.shape[0]
    buffer = rows.new_empty((max(sizes, default=0), row_stride(num_classes, hidden.device)), dtype=dtype)
    buffer = buffer[:, :num_classes]
    options = ignore_index, softcap, scale
    read, write = (_launch_fwd, _launch_bwd) if has_kernel else (_fill_outputs, _fill_dlogits)
    is_rounded = weight.dtype == dtype and (len(groups) <= 1 or not _sums_widely(len(groups), weight.numel()))
    total = dbias = None

    for number, (index, size) in enumerate(zip(groups, sizes, strict=True)):
        h, labels_of, logits = rows[index].to(dtype), y[index], buffer[:size]
        if b is None:
            torch.mm(h, w.t(), out=logits)
        else:
            torch.addmm(b, h, w.t(), out=logits)
        lp, ent, part_stats = log_probs.new_empty(size), entropy.new_empty(size), stats.new_empty(size, 3)
        pieces = list(_pieces(slice(0, size), logits, has_kernel)) if size else []
        for i, part in pieces:
            read(part, labels_of[i], lp[i], ent[i], None, part_stats[i], *options)
        c, d = coefficients(number, lp, ent)
        c, d = c.to(wide).contiguous(), None if d is None else d.to(wide).contiguous()
        for i, part in pieces:
            write(part, labels_of[i], part_stats[i], c[i], None if d is None else d[i], *options)
        if needs[0]:
            out = dhidden.view(rows.shape)
            if isinstance(index, slice) and hidden.dtype == dtype:
                torch.mm(logits, w, out=out[index])
            else:
                out[index] = torch.mm(logits, w).to(hidden.dtype)
        if needs[1]:
            h = scaled_rows(h, labels_of, None, ignore_index, has_kernel)
            if not is_rounded:
                total = accumulate(total, logits.t(), h)
            else:
                total = torch.mm(logits.t(), h) if total is None else total.addmm_(logits.t(), h)
        if needs[2]:
            part_sum = logits.sum(0, dtype=wide)
            dbias = part_sum if dbias is None else dbias.add_(part_sum)
        log_probs[index], entropy[index], stats[index], dlog_probs[index] = lp, ent, part_stats, c
        if d is not None:
            dentropy = torch.zeros_like(entropy) if dentropy is None else dentropy
            dentropy[index] = d
    b = weight[:, 0] if bias is None else bias
    gradients: tuple[Any, ...] = dhidden, finished(total, weight, needs[1]), finished(dbias, b, needs[2])
    return LossGradients(log_probs, entropy, stats, dlog_probs, dentropy, *gradients)
