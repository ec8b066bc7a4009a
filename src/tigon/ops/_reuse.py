"""When a backward may write a gradient over a tensor that its forward saved: only when nobody else can see it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._op import is_traced
from ._triton import INTERPRETED


def _found(name: str) -> Callable[..., Any] | None:
    """A function of torch's own, or None where this version has none of that name: then nothing is reused."""
    owner, _, attribute = name.rpartition(".")
    return getattr(getattr(torch._C, owner, None) if owner else torch._C, attribute, None)


_use_count = _found("_storage_Use_Count")
_keeps_graph = _found("_autograd._get_current_graph_task_keep_graph")
_saving_hooks = _found("_autograd._top_saved_tensors_default_hooks")
_KNOWS = None not in (_use_count, _keeps_graph, _saving_hooks)


def save_for_reuse(ctx: Any, *tensors: Tensor | None, others: tuple[Tensor | None, ...] = ()) -> None:
    """`ctx.save_for_backward(*tensors, *others)`; `claim` can tell in backward who else holds memory of `tensors`."""
    ctx.is_spent = False
    ctx.may_reuse = _KNOWS and not is_traced(tensors[0]) and _saving_hooks(True) is None  # type: ignore[misc]
    if ctx.may_reuse:
        _sole_holder()
        # autograd would save the caller's own tensor object; an alias makes every other holder a reference more.
        tensors = tuple(t if t is None else t.detach() for t in tensors)
    ctx.save_for_backward(*tensors, *others)


def claim(ctx: Any, *saved: Tensor | None) -> list[bool]:
    """Which of `saved`, local variables out of `ctx.saved_tensors`, this backward may write over, and will.

    Those whose memory no other tensor shares, that nobody took out of the graph, while the graph is not kept for a
    second backward and no hook packed them. What is written cannot be read again.

    Raises:
        RuntimeError: an earlier run of this backward, which did not end, has written over what it needs.
    """
    if ctx.is_spent:
        raise RuntimeError(
            "a backward that raised is repeated, but has written gradients over what it saved; repeat the forward, or "
            "run backward with retain_graph=True"
        )
    if not ctx.may_reuse or _keeps_graph():  # type: ignore[misc]
        return [False] * len(saved)
    held = _holders(*saved)
    claimed = [
        t is not None and t.is_contiguous() and h == _sole_holder() and _is_private(t)
        for t, h in zip(saved, held, strict=True)
    ]
    ctx.is_spent = any(claimed)
    return claimed


def release(ctx: Any) -> None:
    """Let go of what `ctx` saved, unless the graph is kept: names in backward are then the last that hold it."""
    clear = getattr(ctx, "maybe_clear_saved_tensors", None)
    if clear is not None:
        clear()


def _holders(*saved: Tensor | None) -> list[tuple[int, int]]:
    """How many tensors hold the memory of each, and how many names and C++ objects the tensor itself has."""
    return [(0, 0) if t is None else (_uses(t), sys.getrefcount(t)) for t in saved]


def _uses(t: Tensor) -> int:
    return _use_count(t.untyped_storage()._cdata)  # type: ignore[misc]


@functools.cache
def _sole_holder() -> tuple[int, int]:
    """What `_holders` finds of a tensor that only a graph holds: measured, as versions of torch count differently."""

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x.detach())
            return x.sum()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            found.extend(as_claimed(x))
            return torch.zeros_like(x)

    def as_claimed(*saved: Tensor) -> list[tuple[int, int]]:
        return _holders(*saved)

    found: list[tuple[int, int]] = []
    with torch.enable_grad():
        leaf = torch.zeros(1, requires_grad=True)
        Probe.apply(leaf.clone()).backward()
    return found[0]


def _is_private(t: Tensor) -> bool:
    """False for memory that torch shares with another library, process or file, or that is held without a tensor."""
    storage = t.untyped_storage()
    is_shared = t.device.type == "cpu" and storage.is_shared()
    # All Python names of a storage are one holder in its count. The interpreter keeps some of its own.
    is_named = not INTERPRETED and sys.getrefcount(storage) > _names_of_storage()
    return storage.resizable() and not is_shared and not is_named


@functools.cache
def _names_of_storage() -> int:
    """What `sys.getrefcount` finds of a storage that is one local variable."""
    fresh = torch.empty(0)
    storage = fresh.untyped_storage()
    return sys.getrefcount(storage)
