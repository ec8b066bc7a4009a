"""When a backward may write a gradient over a tensor that its forward saved: only when nobody else can see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._op import is_traced


def _found(name: str) -> Callable[..., Any] | None:
    """A function of torch's own, or None where this version has none of that name: then nothing is reused."""
    owner, _, attribute = name.rpartition(".")
    return getattr(getattr(torch._C, owner, None) if owner else torch._C, attribute, None)


_use_count = _found("_storage_Use_Count")
_keeps_graph = _found("_autograd._get_current_graph_task_keep_graph")
_saving_hooks = _found("_autograd._top_saved_tensors_default_hooks")
_KNOWS = None not in (_use_count, _keeps_graph, _saving_hooks)


def save_for_reuse(ctx: Any, *tensors: Tensor | None, others: tuple[Tensor | None, ...] = ()) -> None:
    """`ctx.save_for_backward(*tensors, *others)`; `is_ours` can tell in backward who else holds memory of `tensors`."""
    ctx.may_reuse = _KNOWS and not is_traced(tensors[0]) and _saving_hooks(True) is None  # type: ignore[misc]
    if ctx.may_reuse:
        # autograd would save the caller's own tensor object; an alias makes every other holder a reference more.
        tensors = tuple(t if t is None else t.detach() for t in tensors)
    ctx.save_for_backward(*tensors, *others)


def is_ours(ctx: Any, saved: Tensor | None) -> bool:
    """True where the memory of `saved`, out of `ctx.saved_tensors`, is read by nothing after this backward.

    No other tensor shares it, this graph is not kept for a second backward, and no hook packed it.
    """
    if saved is None or not ctx.may_reuse or not saved.is_contiguous() or _keeps_graph():  # type: ignore[misc]
        return False
    return _uses(saved) == _uses(torch.empty(0))


def _uses(t: Tensor) -> int:
    """How many tensors hold the memory of `t`, up to a constant."""
    return _use_count(t.untyped_storage()._cdata)  # type: ignore[misc]
