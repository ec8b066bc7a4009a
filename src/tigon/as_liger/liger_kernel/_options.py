"""Options of Liger-Kernel in the words of tigon, or refused by name."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tigon.ops._check import require, require_one_of

_CASTS = {
    "llama": "cast_then_scale",
    "gemma": "scale_then_cast",
    "none": "none",
    0: "cast_then_scale",
    1: "scale_then_cast",
    -1: "none",
}


def cast_of(casting_mode: Any) -> Any:
    """The `cast` of `tigon.rms_norm` that a casting mode means, by name or number."""
    known = isinstance(casting_mode, (str, int)) and casting_mode in _CASTS
    require(known, "liger_kernel", "casting_mode", f"one of {', '.join(map(repr, _CASTS))}", repr(casting_mode))
    return _CASTS[casting_mode]


def require_rows(name: str, distributions: Tensor) -> None:
    """Refuse what has other axes than rows and columns, of which batches are counted in one way or another."""
    require(distributions.dim() == 2, name, "input", "two axes, rows and columns", tuple(distributions.shape))


def require_reduction(name: str, reduction: Any) -> None:
    require_one_of(name, "reduction", reduction, ("batchmean", "mean", "sum", "none"))


def require_default(name: str, **options: Any) -> None:
    """Refuse options that choose between implementations, of which there is one here.

    Raises:
        ValueError: one of them is not None.
    """
    for option, value in options.items():
        require(value is None, name, option, "None, as tigon.backend chooses", repr(value))
