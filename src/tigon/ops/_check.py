"""Argument checks with one wording: `op: argument: expected ..., got ...`."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def require(holds: bool, op: str, argument: str, expected: Any, got: Any) -> None:
    """Raise ValueError unless `holds`."""
    if not holds:
        raise ValueError(f"{op}: {argument}: expected {expected}, got {got}")


def require_one_of(op: str, argument: str, value: Any, choices: Sequence[Any]) -> None:
    # The words are found for an error only: a compiler that takes a number for dynamic has none for it.
    if value not in choices:
        require(False, op, argument, f"one of {', '.join(map(repr, choices))}", repr(value))


def require_number(
    op: str, argument: str, value: Any, *, low: float = -math.inf, high: float = math.inf, above: bool = False
) -> None:
    """Raise unless `value` is a finite number in [low, high], or above `low`."""
    # Comparisons alone decide, and words are found only for an error: a compiler traces the one and not the other.
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if is_number and low <= value <= high and -math.inf < value < math.inf and not (above and value == low):
        return
    expected = f"a finite number above {low:g}" if above else f"a finite number in [{low:g}, {high:g}]"
    raise ValueError(f"{op}: {argument}: expected {expected}, got {value!r}")


def require_bytes(op: str, argument: str, value: Any) -> None:
    """Raise unless `value` is a positive whole number, or one that a compiler has not decided yet."""
    is_whole = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    if not is_whole or value < 1:
        raise ValueError(f"{op}: {argument}: expected a positive int, got {value!r}")


def require_floating(op: str, **tensors: Tensor | None) -> None:
    """Raise unless every given tensor is a floating-point tensor."""
    for argument, tensor in tensors.items():
        if tensor is None:
            continue
        require(isinstance(tensor, Tensor), op, argument, "a tensor", type(tensor).__name__)
        require(tensor.is_floating_point(), op, argument, "a floating-point dtype", tensor.dtype)


def require_same_device(op: str, **tensors: Tensor | None) -> None:
    """Raise unless all given tensors are on the device of the first."""
    first = None
    for argument, tensor in tensors.items():
        if tensor is None:
            continue
        first = tensor.device if first is None else first
        require(tensor.device == first, op, argument, f"device {first}", tensor.device)
