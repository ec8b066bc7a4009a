"""Cross entropy of a linear projection whose classes are divided among the ranks of a group (tensor parallel).

    logits = (hidden @ weight.T + bias) * logit_scale                   (weight and bias of all ranks, row after row)
    loss   = cross_entropy(logits, labels, ...)                         (softcap, smoothing, z-loss as there)

A rank has the logits z_ij of its own classes j. Of each row the ranks share four numbers, the largest logit and sums:

    m_i = max_j z_ij,   s_i = sum_j exp(z_ij - m_i),   t_i = z_iy - m_i,   d_i = sum_j (z_ij - m_i)
    ce_i = log(s_i) - (1 - eps) * t_i - eps / V * d_i,   lse_i = m_i + log(s_i)

Gradient, with dlogits those of cross_entropy times logit_scale, in the columns of this rank:

    dhidden = sum over ranks of dlogits @ weight,   dweight = dlogits.T @ hidden,   dbias = sum over rows of dlogits

Communication: for each chunk of rows one maximum of m and one sum of (s, t, d), d with smoothing alone; at the end
one sum of dhidden. For losses of rows the sum of dhidden is in backward, which has m and s from forward.

M rows (all leading axes), D hidden size, V classes on all ranks, y the label of a row, eps the label smoothing.
Saved for backward: the inputs, 8 bytes a row, and for a scalar loss the gradients.
Source: Shoeybi et al. 2019, arXiv:1909.08053 (the division of the classes); chunks as in linear_cross_entropy.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import _op
from ._check import require, require_bytes, require_floating, require_number, require_same_device
from ._device import constant_while_compiling
from ._launch import as_rows
from ._op import define, once_differentiable, op, runs_reference
from ._projection import (
    CPU_LOGITS_BYTES,
    LOGITS_BYTES,
    accumulate,
    chunk_rows,
    fake_gradients,
    finished,
    is_foreign,
    matmul_dtype,
    multiply_,
    row_stride,
    scaled_rows,
)
from ._slices import ELSEWHERE, IGNORED, Options, anchor_of, shard_dlogits, shard_statistics
from .cross_entropy import (
    Reduction,
    checked_labels,
    mean_divisors,
    reduce_rows,
    require_options,
    stand_in_labels,
    wide_dtype,
)
from .linear_cross_entropy import linear_cross_entropy_reference

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NAME = "vocab_parallel_linear_cross_entropy"

# ---- reference ----


def vocab_parallel_linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    group: ProcessGroup | None = None,
    bias: Tensor | None = None,
    vocab_start: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    num_items: float | Tensor | None = None,
    logit_scale: float | None = None,
    max_logits_bytes: int | None = None,
) -> Tensor:
    name = _group_name(group)
    shards = _shards(weight, name, vocab_start)
    return linear_cross_entropy_reference(  # type: ignore[return-value]
        hidden,
        _whole(weight, shards, name),
        labels,
        bias=None if bias is None else _whole(bias, shards, name),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        reduction=reduction,
        num_items=num_items,
        logit_scale=logit_scale,
    )


def _whole(shard: Tensor, shards: _Shards, group_name: str | None) -> Tensor:
    """The shards of all ranks, row after row. All compute the same loss of it, so each gets the gradient of its own."""
    end = shards.start + shard.shape[0]
    everyone = shard.new_zeros(shards.num_classes, *shard.shape[1:])
    everyone[shards.start : end] = shard.detach()
    _all_reduce(everyone, "sum", group_name)
    return torch.cat((everyone[: shards.start], shard, everyone[end:]))


class _Shards(NamedTuple):
    """How the classes are divided: the first of this rank, those of all ranks, those of the rank with the most."""

    start: int
    num_classes: int
    largest: int


@constant_while_compiling
def _group_name(group: ProcessGroup | None) -> str | None:
    """What a registered operator can be given in place of the group; None where there is nobody to talk to."""
    if not (dist.is_available() and dist.is_initialized()):
        require(group is None, _NAME, "group", "None before torch.distributed is initialized", group)
        return None
    group = dist.group.WORLD if group is None else group
    require(isinstance(group, dist.ProcessGroup), _NAME, "group", "a process group with this rank in it", group)
    return None if group.size() == 1 else group.group_name  # type: ignore[union-attr]


def _group_of(name: str) -> ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)


def _all_reduce(t: Tensor, what: str, group_name: str | None, *, is_async: bool = False) -> Any:
    """Reduce `t` in place over the ranks, all of which get the same bits; returns what to wait for where `is_async`."""
    if group_name is None or t.numel() == 0:
        return None
    operation = dist.ReduceOp.MAX if what == "max" else dist.ReduceOp.SUM
    return dist.all_reduce(t, operation, group=_group_of(group_name), async_op=is_async)


# By the memory of a weight, which views and detached copies share: (group, offset, rows, vocab_start) -> shards.
_seen: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], _Shards]] = weakref.WeakKeyDictionary()


def _shards(weight: Tensor, group_name: str | None, vocab_start: int | None) -> _Shards:
    """Ask the other ranks for the sizes of their shards, once for each weight.

    Not once for each size: a rank that knows its size from another weight would stay away from the exchange in which
    a rank whose size is new waits for it.

    Raises:
        ValueError: on all ranks alike, if there is no class, or if the values of `vocab_start` leave gaps or overlap.
    """
    num_rows = weight.shape[0]
    if group_name is None:
        return _divided([(num_rows, -1 if vocab_start is None else vocab_start)], 0)
    group = _group_of(group_name)
    known = _seen.setdefault(weight.untyped_storage(), {})
    key = weakref.ref(group), weight.storage_offset(), num_rows, vocab_start
    if key not in known:
        mine = torch.tensor((num_rows, -1 if vocab_start is None else vocab_start), device=weight.device)
        everyone = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(everyone, mine, group=group)
        known[key] = _divided([tuple(t) for t in torch.stack(everyone).tolist()], group.rank())
    return known[key]


def _divided(ranks: Sequence[tuple[int, int]], rank: int) -> _Shards:
    """From the number of classes and the first one of each rank, -1 for one that follows the rank before."""
    num_classes = sum(size for size, _ in ranks)
    require(num_classes >= 1, _NAME, "classes", "at least one", num_classes)
    starts = [start for _, start in ranks]
    if set(starts) == {-1}:
        starts = [sum(size for size, _ in ranks[:i]) for i in range(len(ranks))]
    end = 0
    for start, size in sorted((start, size) for start, (size, _) in zip(starts, ranks, strict=True) if size):
        require(start == end, _NAME, "vocab_start", f"a shard that begins at {end}, given on all ranks or none", starts)
        end = start + size
    return _Shards(starts[rank], num_classes, max(size for size, _ in ranks))


# ---- kernels ----

# Those of cross_entropy, on the logits of a shard, and those that linear_cross_entropy scales with.


# ---- operators ----


def _reduce(
    stats: Tensor,
    at: Tensor,
    distance: Tensor | None,
    labels: Tensor,
    poison: Tensor,
    losses: Tensor,
    num_local: int,
    num_classes: int,
    group_name: str | None,
    z_loss: float,
    label_smoothing: float,
) -> None:
    """Statistics of the shards become those of the rows, in `stats`, and their `losses`."""
    own = stats[:, 0]
    peak = own.clone()
    _all_reduce(peak, "max", group_name)
    sums = [stats[:, 1] * (own - peak).exp_(), (at - peak).masked_fill_(labels < 0, 0.0)]
    if distance is not None:
        sums.append(distance + num_local * (anchor_of(at) - peak))
    total = torch.stack(sums)
    _all_reduce(total, "sum", group_name)
    # NaN where the label is no class, also in the gradient, which starts from the statistics.
    peak *= poison
    log_sum = total[0].log()
    rows = log_sum - (1 - label_smoothing) * total[1]
    if distance is not None:
        rows -= (label_smoothing / num_classes) * total[2]
    if z_loss:
        rows += z_loss * (peak + log_sum).square()
    losses.copy_((rows * poison).masked_fill_(labels == IGNORED, 0.0))
    torch.stack((peak, log_sum), -1, out=stats)


def _drive(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    losses: Tensor | None,
    stats: Tensor,
    dce: Tensor | None,
    factor: Tensor | None,
    needs: Sequence[bool],
    group_name: str | None,
    vocab_start: int | None,
    dtype: torch.dtype,
    z_loss: float,
    max_logits_bytes: int,
    has_kernel: bool,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """All chunks: fills `losses` and `stats` where `losses` is given, and sums up the gradients that are needed.

    They come times `factor`. All ranks take the same chunks, so that they meet in the same collectives.
    """
    shards = _shards(weight, group_name, vocab_start)
    labels = checked_labels(_NAME, labels, shards.num_classes, ignore_index).reshape(-1)
    device, (num_local, width), wide = hidden.device, weight.shape, wide_dtype(dtype)
    row_bytes = row_stride(shards.largest, device) * dtype.itemsize
    expected = f"at least {row_bytes}, one row of logits of the largest shard"
    require(max_logits_bytes >= row_bytes, _NAME, "max_logits_bytes", expected, max_logits_bytes)
    needs_dhidden, needs_dweight, needs_dbias = needs if dce is not None else (False,) * 3

    rows, w, b = as_rows(hidden), weight.to(dtype), None if bias is None else bias.to(dtype)
    num_rows = rows.shape[0]
    valid, y, poison = stand_in_labels(labels, shards.num_classes, ignore_index, wide)
    y -= shards.start
    y = y.masked_fill((y < 0) | (y >= num_local), ELSEWHERE).masked_fill_(~valid, IGNORED)
    stats = stats.view(-1, 2)
    losses = None if losses is None else losses.view(-1)
    dce = dce if dce is None or dce.dim() == 0 else dce.reshape(-1)
    # In fp32 until the ranks are summed up: roundings of the summands would add up too.
    dhidden = rows.new_empty((num_rows if needs_dhidden else 0, width), dtype=wide)
    total = dbias = sum_of_ranks = None

    step = chunk_rows(num_rows, row_bytes, max_logits_bytes)
    buffer = rows.new_empty((step, row_stride(num_local, device)), dtype=dtype)[:, :num_local]
    # With one chunk there is nothing to add up, and the product can be rounded at once.
    is_rounded_once = num_rows <= step and weight.dtype == dtype
    options = Options(z_loss, label_smoothing, softcap, scale)

    for start in range(0, num_rows, max(step, 1)):
        end = min(start + step, num_rows)
        logits, h = buffer[: end - start], rows[start:end].to(dtype)
        if b is None:
            torch.mm(h, w.t(), out=logits)
        else:
            torch.addmm(b, h, w.t(), out=logits)
        if losses is not None:
            at = stats.new_empty(end - start)
            distance = torch.empty_like(at) if label_smoothing else None
            if num_local == 0:
                # What adds nothing to any maximum or sum.
                stats[start:end, 0] = float("-inf")
                for t in (stats[start:end, 1], at, distance):
                    if t is not None:
                        t.zero_()
            else:
                part = slice(start, end)
                filled = at, distance, stats[part]
                shard_statistics(logits, y[part], *filled, options, shards.num_classes, has_kernel)
            part = slice(start, end)
            sizes = num_local, shards.num_classes
            row_tensors = stats[part], at, distance, y[part], poison[part], losses[part]
            _reduce(*row_tensors, *sizes, group_name, z_loss, label_smoothing)
        if dce is None:
            continue

        if num_local:
            part = slice(start, end)
            upstream = dce[part] if dce.dim() else dce
            shard_dlogits(logits, y[part], stats[part], upstream, upstream, options, shards.num_classes, has_kernel)
        if needs_dhidden:
            if dtype == wide:
                torch.mm(logits, w, out=dhidden[start:end])
            else:
                dhidden[start:end] = accumulate(None, logits, w)
            if end == num_rows:
                # What is left to do with the weight does not wait for it.
                sum_of_ranks = _all_reduce(dhidden, "sum", group_name, is_async=True)
        if needs_dweight:
            h = scaled_rows(h, y[start:end], factor, IGNORED, has_kernel)
            total = torch.mm(logits.t(), h) if is_rounded_once else accumulate(total, logits.t(), h)
        if needs_dbias:
            part_sum = logits.sum(0, dtype=wide)
            dbias = part_sum if dbias is None else dbias.add_(part_sum)
    del buffer
    if dbias is not None and factor is not None:
        dbias *= factor
    dweight = finished(total, weight, needs_dweight)
    dbias = finished(dbias, weight[:, 0] if bias is None else bias, needs_dbias)
    if sum_of_ranks is not None:
        sum_of_ranks.wait()
    if factor is not None:
        dhidden *= factor
    return finished(dhidden.view(hidden.shape) if needs_dhidden else None, hidden, needs_dhidden), dweight, dbias


# Arguments that both operators pass on as they are, in the order of `_drive`.
_SETTINGS = (
    "bool[] needs, str? group_name, SymInt? vocab_start, ScalarType dtype, float z_loss, SymInt max_logits_bytes,"
    " bool has_kernel, int ignore_index, float label_smoothing, float? softcap, float? scale"
)


def _row_buffers(
    hidden: Tensor, labels: Tensor, group_name: str | None, vocab_start: int | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    losses = hidden.new_empty(labels.shape, dtype=wide_dtype(dtype))
    return losses, losses.new_empty((*labels.shape, 2))


def _fake_fwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    factor: Tensor | None,
    needs: Sequence[bool],
    *settings: Any,
) -> tuple[Tensor, ...]:
    needs = needs if factor is not None else (False,) * 3
    return *_row_buffers(hidden, labels, *settings[:3]), *fake_gradients(hidden, weight, bias, needs)


@define(
    f"{_NAME}_fwd(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor? factor, {_SETTINGS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_fwd,
)
def _fwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    factor: Tensor | None,
    needs: Sequence[bool],
    *settings: Any,
) -> tuple[Tensor, ...]:
    rows = _row_buffers(hidden, labels, *settings[:3])
    dce = None if factor is None else torch.ones_like(factor)
    return *rows, *_drive(hidden, weight, bias, labels, *rows, dce, factor, needs, *settings)


def _fake_bwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    stats: Tensor,
    dce: Tensor,
    needs: Sequence[bool],
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(hidden, weight, bias, needs)


@define(
    f"{_NAME}_bwd(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor stats, Tensor dce, {_SETTINGS})"
    " -> (Tensor, Tensor, Tensor)",
    fake=_fake_bwd,
)
def _bwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    stats: Tensor,
    dce: Tensor,
    needs: Sequence[bool],
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return _drive(hidden, weight, bias, labels, None, stats, dce, None, needs, *settings)


# ---- autograd ----


def _wanted(gradients: Sequence[Tensor], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    return tuple(g if is_needed else None for g, is_needed in zip(gradients, needs, strict=True))


class _RowLosses(torch.autograd.Function):
    """Losses of rows: any upstream gradient is exact, because backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, settings: tuple[Any, ...]
    ) -> Tensor:
        losses, stats, *_ = _fwd(hidden, weight, bias, labels, None, *settings)
        ctx.save_for_backward(hidden, weight, bias, labels, stats)
        ctx.settings = settings
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _bwd(*ctx.saved_tensors, dlosses, *ctx.settings)
        return *_wanted(gradients, ctx.settings[0]), None, None


class _ScalarLoss(torch.autograd.Function):
    """A mean or a sum: forward computes the gradients for an upstream gradient of 1, backward multiplies."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        divisor: Tensor,
        is_traced: bool,
        settings: tuple[Any, ...],
    ) -> Tensor:
        inputs, factor = (hidden, weight, bias, labels), divisor.reciprocal()
        losses, stats, *gradients = _fwd(*inputs, factor, *settings)
        ctx.settings, ctx.is_traced = settings, is_traced
        if is_traced:
            ctx.save_for_backward(*gradients)
        else:
            # Not saved tensors: backward takes them out, so that nothing else holds them when it hands them over.
            ctx.gradients = gradients
            ctx.save_for_backward(*inputs, stats, factor)
        return losses.sum() / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        needs, has_kernel = ctx.settings[0], ctx.settings[6]
        if ctx.is_traced:
            gradients = [(g.to(dloss.dtype) * dloss).to(g.dtype) for g in ctx.saved_tensors]
        elif ctx.gradients is not None:
            gradients, ctx.gradients = ctx.gradients, None
            for gradient in gradients:
                multiply_(gradient, dloss, has_kernel)
        else:
            *inputs, stats, factor = ctx.saved_tensors
            gradients = _bwd(*inputs, stats, dloss * factor, *ctx.settings)
        return *_wanted(gradients, needs), None, None, None, None


# ---- public ----


def _supports(hidden: Tensor, weight: Tensor | None = None, labels: Tensor | None = None, **_: Any) -> list[str]:
    return ["float64 is computed in plain torch"] if hidden.dtype == torch.float64 else []


@op(reference=vocab_parallel_linear_cross_entropy_reference, supports=_supports)
def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    group: ProcessGroup | None = None,
    bias: Tensor | None = None,
    vocab_start: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    num_items: float | Tensor | None = None,
    logit_scale: float | None = None,
    max_logits_bytes: int | None = None,
) -> Tensor:
    """Cross entropy of `hidden @ weight.T`, where each rank of a group holds some rows of `weight` (tensor parallel).

        loss = linear_cross_entropy(hidden, all_gather(weight), labels, ...)                # the reference, in one line

    A collective: all ranks of the group call it with the same arguments but for `weight`, `bias` and `vocab_start`,
    and all run its backward with the same upstream gradient.

    Args:
        hidden: `[..., D]`, floating point, any strides; the same on all ranks.
        weight: `[V_rank, D]`, the classes of this rank, none at all allowed; same dtype as `hidden`, or cast with it
            by autocast. A plain tensor: of a DTensor its `to_local()`.
        labels: `[...]`, any integer dtype, counted over the classes of all ranks; the same on all ranks.
        group: the ranks that share the classes; None for all ranks, or for this process alone where there is no group.
        bias: `[V_rank]`, same dtype as `weight`, or None on all ranks.
        vocab_start: the class of this rank's first row, given on all ranks or on none; None for ranks in order.
        ignore_index: rows with this label add exactly 0 to the loss and to all gradients, whatever they hold.
        label_smoothing: weight of the uniform distribution over the classes of all ranks in the target.
        z_loss: factor of the squared log-sum-exp of each row, which is added to the loss.
        softcap: logits become `softcap * tanh(logits / softcap)`, after `logit_scale`; None leaves them.
        reduction: "mean" divides by the number of labels that are not ignored; "sum" and "none" divide by nothing.
        num_items: replaces the divisor of "mean", for a batch that is part of a larger one: a number or a tensor of one
            element on any device.
        logit_scale: factor of the logits; None leaves them.
        max_logits_bytes: most bytes of logits that exist at once on the rank with the most classes, None for 1.25 GiB
            on accelerators and 64 MiB on a CPU. Fewer chunks communicate less often.

    Returns:
        Scalar fp32 (fp64 for fp64 inputs), or `[...]` for reduction "none"; the same bits on all ranks. The gradient
        of `hidden` is that of the whole, the same on all ranks; those of `weight` and `bias` are of the own rows.

    Raises:
        ValueError: shapes, dtypes, devices or options disagree, the shards leave gaps or overlap, or one row of the
            largest shard's logits exceeds `max_logits_bytes`. A label that is no class of any rank and not
            `ignore_index` raises on a CPU; on a GPU the loss of its row and the gradients it enters are NaN, and
            TIGON_DEBUG=1 raises.

    Numerics: logits in the dtype of the product, statistics and losses in fp32; `dhidden` is summed over ranks,
              `dweight` and `dbias` over chunks, in fp32 and rounded to the dtype of their input, and once more where
              the upstream gradient is not 1.
    Memory:   `max_logits_bytes`, the gradients, an fp32 copy of `dhidden`, and one of `dweight` while 16-bit chunks add
              up. A mean or a sum takes three matrix products, reduction "none" and fp16 a fourth.
    Communication: `4 M` bytes of maxima and `8 M` of sums (`12 M` with smoothing) in fp32, in one collective each for
              a chunk of rows, and `4 M D` bytes for `dhidden`, while `dweight` is computed. The sizes of the shards are
              exchanged when the memory of a weight is first seen, which waits for the device, as nothing else does.
              Under `torch.compile` all of it happens within one operator, without a graph break.
    Differs from the reference: never in formula; order of summation over V, over ranks and over rows.
    Source: Shoeybi et al. 2019, arXiv:1909.08053; Wijmans et al. 2024, arXiv:2411.09009.
    """
    name = _NAME
    require_floating(name, hidden=hidden, weight=weight, bias=bias)
    for argument, tensor in (("hidden", hidden), ("weight", weight), ("labels", labels), ("bias", bias)):
        require(not is_foreign(tensor), name, argument, "a plain tensor, the part of this rank", type(tensor).__name__)
    require(weight.dim() == 2, name, "weight", "two axes", f"shape {tuple(weight.shape)}")
    num_local, width = weight.shape
    require(hidden.dim() >= 1, name, "hidden", "at least one axis", "a scalar")
    require(width >= 1, name, "weight", "at least one column", f"shape {tuple(weight.shape)}")
    require(hidden.shape[-1] == width, name, "hidden", f"last axis {width}", f"shape {tuple(hidden.shape)}")
    if bias is not None:
        require(bias.shape == (num_local,), name, "bias", f"shape ({num_local},)", tuple(bias.shape))
    # How many classes there are on all ranks is seen later.
    require_options(name, labels, hidden.shape[:-1], 1, label_smoothing, softcap, None, reduction, num_items, z_loss)
    if logit_scale is not None:
        require_number(name, "logit_scale", logit_scale)
    if vocab_start is not None:
        require_number(name, "vocab_start", vocab_start, low=0)
    require_same_device(name, hidden=hidden, weight=weight, labels=labels, bias=bias)
    dtype = matmul_dtype(name, "hidden", hidden.dtype, weight, bias)
    if max_logits_bytes is None:
        max_logits_bytes = CPU_LOGITS_BYTES if hidden.device.type == "cpu" else LOGITS_BYTES
    require_bytes(name, "max_logits_bytes", max_logits_bytes)

    has_kernel = not runs_reference(name, hidden, weight, labels, bias=bias)
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias))
    scale = None if logit_scale is None else float(logit_scale)
    settings = (
        *(needs, _group_name(group), vocab_start, dtype, z_loss, max_logits_bytes, has_kernel),
        *(ignore_index, label_smoothing, softcap, scale),
    )
    wide, labels = wide_dtype(dtype), labels.long()
    divisors = mean_divisors(labels, None, ignore_index, num_items, wide) if reduction == "mean" else None
    inputs = hidden, weight, bias, labels
    # fp16 has to wait for the loss scale, since the gradients before it may be below its range.
    if any(needs) and reduction != "none" and dtype != torch.float16:
        divisor = labels.new_ones((), dtype=wide) if divisors is None else divisors[0]
        is_traced = _op.is_traced(hidden)
        return _ScalarLoss.apply(*inputs, divisor, is_traced, settings)  # type: ignore[return-value]
    losses = _RowLosses.apply(*inputs, settings) if any(needs) else _fwd(*inputs, None, *settings)[0]
    return reduce_rows(losses, None, divisors, reduction, False)  # type: ignore[return-value]
