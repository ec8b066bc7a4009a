"""Counts of what a model calls, forward and backward."""

from __future__ import annotations

import collections
import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch

# Where a layer finds its operator.
OPERATORS = {"rms_norm": "norms", "rope": "rotary", "glu": "mlp", "cross_entropy": "loss"}


class _Seen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, name: str, counts: Any) -> torch.Tensor:
        ctx.name, ctx.counts = name, counts
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        ctx.counts[f"{ctx.name} backward"] += 1
        return dy, None, None


@contextlib.contextmanager
def counted(package: str = "tigon") -> Iterator[collections.Counter[str]]:
    """Calls of operators by the layers of a package, and how many of their results got a gradient."""
    counts: collections.Counter[str] = collections.Counter()
    originals = []
    for name, module in OPERATORS.items():
        place = importlib.import_module(f"{package}.layers.{module}")
        original = getattr(place, name)
        originals.append((place, name, original))

        def call(*args: Any, _name: str = name, _original: Any = original, **options: Any) -> Any:
            counts[_name] += 1
            y = _original(*args, **options)
            parts = y if isinstance(y, tuple) else (y,)
            # One for each call.
            first = _Seen.apply(parts[0], _name, counts) if parts[0].requires_grad else parts[0]
            return (first, *parts[1:]) if isinstance(y, tuple) else first

        setattr(place, name, call)
    try:
        yield counts
    finally:
        for place, name, original in originals:
            setattr(place, name, original)
