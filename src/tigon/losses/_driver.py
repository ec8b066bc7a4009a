"""What all losses of log-probabilities under a head share: the head, groups of sequences, and the way to gradients.

A loss is a function `terms(log_probs, entropy, data)` of `[n, T]` log-probabilities and entropies of n sequences and of
what belongs to these sequences, which gives their share of the loss: a scalar, whose divisors are in `data` already.
How many sequences it has to see at once is its `unit`:

    token      each token has its term (a clipped ratio)      sequence   tokens of a sequence meet in it (a mean ratio)
    pair       sequences i and i + n/2 meet in it (DPO)       batch      all meet (sorted margins, a quantile)

Where a unit fits into the memory for logits, the gradients are made in forward, while its logits are there: three
matrix products. Else, and in fp16, while a compiler records, and for tensor subclasses, `linear_log_probs` computes the
logits again in backward: four. Either way the gradient is that of `terms` by autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..ops import _op
from ..ops._check import require, require_bytes, require_floating, require_number, require_same_device
from ..ops._launch import cdiv
from ..ops._loss_gradients import loss_gradients
from ..ops._projection import (
    CPU_LOGITS_BYTES,
    LOGITS_BYTES,
    is_foreign,
    matmul_dtype,
    multiply_,
    row_stride,
)
from ..ops.cross_entropy import checked_labels, wide_dtype
from ..ops.linear_log_probs import _bwd, linear_log_probs, require_head

Unit = Literal["token", "sequence", "pair", "batch"]
Data = Mapping[str, Tensor | None]
Terms = Callable[[Tensor, Tensor, Data], Tensor]


class Head(NamedTuple):
    """A head and what it is asked: the options that all losses have, under the names of their arguments."""

    name: str
    weight: Tensor
    bias: Tensor | None
    ignore_index: int
    softcap: float | None
    logit_scale: float | None
    max_logits_bytes: int | None
    skip_ignored: bool
    temperature: float = 1.0

    def log_probs(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, with the gradient of `linear_log_probs`."""
        softcap, scale = scaled(self.softcap, self.logit_scale, self.temperature)
        options: dict[str, Any] = {"softcap": softcap, "logit_scale": scale, "return_entropy": True}
        options |= {"bias": self.bias, "max_logits_bytes": self.max_logits_bytes, "ignore_index": self.ignore_index}
        if not self.skip_ignored:
            out = linear_log_probs(hidden, self.weight, labels, **options)
            return out.log_probs, out.entropy  # type: ignore[union-attr, return-value]
        flat = labels.reshape(-1)
        index = (flat != self.ignore_index).nonzero().squeeze(-1)
        rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, index)
        out = linear_log_probs(rows, self.weight, flat[index], **options)
        made = out.log_probs, out.entropy  # type: ignore[union-attr]
        whole = (t.new_zeros(flat.shape[0]).index_copy(0, index, t).view(labels.shape) for t in made)  # type: ignore[union-attr]
        return tuple(whole)  # type: ignore[return-value]

    def frozen_log_probs(self, hidden: Tensor, labels: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Log-probabilities without a gradient under another head, or under this one where `weight` is None."""
        if weight is None:
            weight, bias = self.weight, self.bias
        with torch.no_grad():
            log_probs, _ = self._replace(weight=weight, bias=bias).log_probs(hidden, labels)
        return log_probs


def scaled(softcap: float | None, logit_scale: float | None, temperature: float) -> tuple[float | None, float | None]:
    """Cap and scale of logits that are divided by the temperature after both."""
    if temperature == 1.0:
        return softcap, logit_scale
    scale = (1.0 if logit_scale is None else logit_scale) / temperature
    return None if softcap is None else softcap / temperature, scale


def check_head(head: Head, hidden: Tensor, labels: Tensor) -> Tensor:
    """Labels as int64.

    Raises:
        ValueError: naming the argument, what was expected, and what it was.
    """
    name = head.name
    require_floating(name, hidden=hidden, weight=head.weight, bias=head.bias)
    require(hidden.dim() == 3, name, "hidden", "[sequences, tokens, width]", f"shape {tuple(hidden.shape)}")
    is_labels = isinstance(labels, Tensor) and not labels.is_floating_point() and labels.dtype != torch.bool
    require(is_labels, name, "labels", "a tensor of integers", getattr(labels, "dtype", type(labels).__name__))
    require_head(name, hidden, head.weight, labels, head.bias, head.softcap, head.logit_scale)
    require_number(name, "temperature", head.temperature, low=0, above=True)
    if head.max_logits_bytes is not None:
        require_bytes(name, "max_logits_bytes", head.max_logits_bytes)
    if head.skip_ignored:
        is_unseen = _op.is_traced(hidden) or (hidden.is_cuda and torch.cuda.is_current_stream_capturing())
        require(not is_unseen, name, "skip_ignored", "False while a compiler or a graph records", True)
    return checked_labels(name, labels, head.weight.shape[0], head.ignore_index)


def check_rows(name: str, hidden: Tensor, **tensors: tuple[Tensor | None, Sequence[tuple[int, ...]]]) -> None:
    """Raise unless every tensor that is given is on the device of `hidden` and has one of its shapes."""
    for argument, (tensor, shapes) in tensors.items():
        if tensor is None:
            continue
        require(isinstance(tensor, Tensor), name, argument, "a tensor", type(tensor).__name__)
        # Words are found only for an error: a compiler traces the comparison and not them.
        if tuple(tensor.shape) not in shapes:
            require(False, name, argument, " or ".join(f"shape {shape}" for shape in shapes), tuple(tensor.shape))
        require_same_device(name, hidden=hidden, **{argument: tensor})


def count(value: float | Tensor, like: Tensor) -> Tensor:
    """A divisor as a scalar on the device of `like`: infinite in place of 0, so that 0 comes out."""
    if isinstance(value, Tensor):
        is_cpu = like.device.type == "cpu"
        value = value.detach().to(like.device, like.dtype, non_blocking=not is_cpu).reshape(())
        return value.masked_fill(value == 0, float("inf"))
    return like.new_full((), value if value else float("inf"))


def check_count(name: str, argument: str, value: float | Tensor | None) -> None:
    if isinstance(value, Tensor):
        require(value.numel() == 1, name, argument, "one element", f"shape {tuple(value.shape)}")
    elif value is not None:
        require_number(name, argument, value, low=0)


# ---- groups of sequences ----


class Group(NamedTuple):
    """Sequences `[first, last)`, of pairs those of both halves, and the tokens `[start, stop)` of each."""

    first: int
    last: int
    start: int
    stop: int


class Plan(NamedTuple):
    """What is judged at once, and which rows that is."""

    groups: list[Group]
    rows: list[slice | Tensor]
    places: list[Tensor | None]


def plan_groups(num_sequences: int, length: int, unit: Unit, fit: int) -> list[Group] | None:
    """Few groups, and these about equal, of at most `fit` rows; None where a unit has more."""
    if not num_sequences or not length:
        return []
    if unit == "token" and length > fit:
        parts = cdiv(length, fit)
        step = cdiv(length, parts)
        columns = [(start, min(start + step, length)) for start in range(0, length, step)]
        return [Group(i, i + 1, *part) for i in range(num_sequences) for part in columns]
    num_units, rows = {
        "pair": (num_sequences // 2, 2 * length),
        "batch": (1, num_sequences * length),
    }.get(unit, (num_sequences, length))
    if rows > fit:
        return None
    step = cdiv(num_units, cdiv(num_units, fit // rows))
    size = num_sequences if unit == "batch" else step
    last = num_units if unit != "batch" else num_sequences
    return [Group(i, min(i + size, last), 0, length) for i in range(0, last, size)]


def _of_group(t: Tensor, group: Group, num_sequences: int, length: int, is_pair: bool) -> Tensor:
    """What of a tensor `[sequences]`, `[sequences, 1]` or `[sequences, tokens]` belongs to a group; others whole."""
    if t.dim() == 0 or t.shape[0] != num_sequences:
        return t
    first, last = group.first, group.last
    if is_pair:
        half = num_sequences // 2
        t = torch.cat((t[first:last], t[half + first : half + last]))
    else:
        t = t[first:last]
    return t[:, group.start : group.stop] if t.dim() > 1 and t.shape[1] == length else t


def _plan(hidden: Tensor, labels: Tensor, head: Head, unit: Unit, fit: int) -> Plan | None:
    num_sequences, length = labels.shape
    is_pair = unit == "pair"
    if head.skip_ignored:
        return _plan_of_valid(labels, head.ignore_index, unit, fit)
    groups = plan_groups(num_sequences, length, unit, fit)
    if groups is None:
        return None
    rows: list[slice | Tensor] = []
    for g in groups:
        if not is_pair:
            first = g.first * length + g.start
            rows.append(slice(first, first + (g.last - g.first - 1) * length + g.stop - g.start))
            continue
        chosen = torch.arange(g.first * length, g.last * length, device=hidden.device)
        # Of one group they are all rows in their order.
        whole = len(groups) == 1
        half = num_sequences // 2 * length
        rows.append(slice(0, 2 * half) if whole else torch.cat((chosen, chosen + half)))
    return Plan(groups, rows, [None] * len(groups))


def _plan_of_valid(labels: Tensor, ignore_index: int, unit: Unit, fit: int) -> Plan | None:
    """Groups that hold as many valid rows as fit, whose numbers the host waits for."""
    num_sequences, length = labels.shape
    valid = labels != ignore_index
    counts = valid.sum(1).tolist()
    index = valid.reshape(-1).nonzero().squeeze(-1)
    half = num_sequences // 2
    num_units = {"pair": half, "batch": 1}.get(unit, num_sequences)
    if unit == "pair":
        sizes = [counts[i] + counts[half + i] for i in range(half)]
    else:
        sizes = [sum(counts)] if unit == "batch" else counts
    if max(sizes, default=0) > fit:
        return None
    offsets = [0]
    for n in counts:
        offsets.append(offsets[-1] + n)
    plan = Plan([], [], [])
    first = 0
    while first < num_units:
        last, size = first + 1, sizes[first]
        while last < num_units and size + sizes[last] <= fit:
            size, last = size + sizes[last], last + 1
        ends = [(0, num_sequences)] if unit == "batch" else [(first, last)]
        ends += [(half + first, half + last)] if unit == "pair" else []
        parts = [index[offsets[i] : offsets[j]] for i, j in ends]
        # Where each row is among those of the group, the second half right after the first.
        shifts = [i * length - k * (last - first) * length for k, (i, _) in enumerate(ends)]
        plan.places.append(torch.cat([part - shift for part, shift in zip(parts, shifts, strict=True)]))
        plan.rows.append(torch.cat(parts))
        plan.groups.append(Group(0, num_sequences, 0, length) if unit == "batch" else Group(first, last, 0, length))
        first = last
    return plan


# ---- gradients in forward ----


class _LossInForward(torch.autograd.Function):
    """A loss whose gradients forward computes for an upstream gradient of 1, and backward multiplies."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        terms: Terms,
        data: Data,
        plan: Plan,
        is_pair: bool,
        uses_entropy: bool,
        settings: tuple[Any, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_sequences, length = labels.shape
        needs = tuple(ctx.needs_input_grad[:3])
        dtype, _, has_kernel, ignore_index, softcap, scale = settings
        losses: list[Tensor] = []

        def coefficients(number: int, lp: Tensor, ent: Tensor) -> tuple[Tensor, Tensor | None]:
            group, place = plan.groups[number], plan.places[number]
            shape = (1 + is_pair) * (group.last - group.first), group.stop - group.start
            of_group = {
                k: None if t is None else _of_group(t, group, num_sequences, length, is_pair) for k, t in data.items()
            }

            def dense(t: Tensor) -> Tensor:
                if place is None:
                    return t.view(shape)
                return t.new_zeros(shape).view(-1).index_copy(0, place, t).view(shape)

            with torch.enable_grad(), torch.autocast(hidden.device.type, enabled=False):
                lp = dense(lp).detach().requires_grad_()
                ent = dense(ent).detach().requires_grad_(uses_entropy)
                loss = terms(lp, ent, of_group)
                inputs = (lp, ent) if uses_entropy else (lp,)
                if loss.requires_grad:
                    made = torch.autograd.grad(loss, inputs, allow_unused=True)
                else:
                    made = (None,) * len(inputs)
            losses.append(loss.detach())
            flat = [torch.zeros_like(lp).view(-1) if g is None else g.reshape(-1) for g in made]
            if place is not None:
                flat = [g[place] for g in flat]
            return flat[0], flat[1] if uses_entropy else None

        options = has_kernel, ignore_index, softcap, scale
        made = loss_gradients(hidden, weight, bias, labels, plan.rows, coefficients, needs, dtype, *options)
        ctx.gradients, ctx.settings, ctx.needs = (made.dhidden, made.dweight, made.dbias), settings, needs
        ctx.save_for_backward(hidden, weight, bias, labels, made.stats, made.dlog_probs, made.dentropy)
        ctx.set_materialize_grads(False)
        log_probs, entropy = made.log_probs.view(labels.shape), made.entropy.view(labels.shape)
        ctx.mark_non_differentiable(log_probs, entropy)
        loss = torch.stack(losses).sum() if losses else log_probs.new_zeros(())
        return loss, log_probs, entropy

    @staticmethod
    @_op.once_differentiable
    def backward(ctx: Any, dloss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if dloss is None:
            return (None,) * 10
        has_kernel = ctx.settings[2]
        if ctx.gradients is not None:
            gradients, ctx.gradients = ctx.gradients, None
            for gradient in gradients:
                multiply_(gradient, dloss, has_kernel)
        else:
            # Not the first backward: the gradients were handed over.
            *inputs, dlog_probs, dentropy = ctx.saved_tensors
            dentropy = None if dentropy is None else dloss * dentropy
            gradients = _bwd(*inputs, dloss * dlog_probs, dentropy, ctx.needs, *ctx.settings)
        wanted = (g if is_needed else None for g, is_needed in zip(gradients, ctx.needs, strict=True))
        return *wanted, *[None] * 7


def head_loss(
    head: Head,
    hidden: Tensor,
    labels: Tensor,
    terms: Terms,
    data: Data,
    unit: Unit,
    *,
    uses_entropy: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and per token the log-probabilities and entropies, both without a gradient.

    Nothing in `data` gets a gradient.
    """
    data = {k: None if t is None else t.detach() for k, t in data.items()}
    weight, bias = head.weight, head.bias
    wants = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    dtype = matmul_dtype(head.name, "hidden", hidden.dtype, weight, bias)
    is_late = any(is_foreign(t) or _op.is_traced(t) for t in (hidden, weight, labels, bias) if t is not None)
    if wants and not is_late and dtype != torch.float16:
        is_cpu = hidden.device.type == "cpu"
        most = head.max_logits_bytes or (CPU_LOGITS_BYTES if is_cpu else LOGITS_BYTES)
        fit = most // (row_stride(weight.shape[0], hidden.device) * dtype.itemsize)
        plan = _plan(hidden, labels, head, unit, fit) if fit else None
        if plan is not None:
            has_kernel = not _op.runs_reference("linear_log_probs", hidden, weight, labels, bias=bias)
            softcap, scale = scaled(head.softcap, head.logit_scale, head.temperature)
            scale = None if scale is None else float(scale)
            settings = dtype, most, has_kernel, head.ignore_index, softcap, scale
            given = terms, data, plan, unit == "pair", uses_entropy, settings
            return _LossInForward.apply(hidden, weight, bias, labels, *given)  # type: ignore[return-value]
    log_probs, entropy = head.log_probs(hidden, labels)
    with torch.autocast(hidden.device.type, enabled=False):
        loss = terms(log_probs, entropy if uses_entropy else entropy.detach(), data)
    return loss, log_probs.detach(), entropy.detach()


def wide_zeros(head: Head, hidden: Tensor, *shape: int) -> Tensor:
    """Zeros of the dtype in which losses of `hidden` are computed."""
    return hidden.new_zeros(shape, dtype=wide_dtype(matmul_dtype(head.name, "hidden", hidden.dtype, head.weight, None)))
