"""Implementations that are measured beside ours, each as functions with the signature of our operator.

One module a peer, with `PEER`. A peer says what it needs by import name, and what it cannot take by raising
`NotImplementedError`, which is reported as "n/a" rather than hidden.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

NAMES = ("torch_eager", "torch_compile", "torch_builtin", "liger", "quack", "cce", "trl")


@dataclass(frozen=True)
class Peer:
    """A named implementation.

    Attributes:
        requires: import name that must be present.
        provides: operator name to a function with that operator's signature.
        distribution: package whose version is recorded.
        synchronises: operators that wait for the device, which no CUDA graph can capture.
    """

    name: str
    requires: str
    provides: Mapping[str, Callable[..., Any]]
    distribution: str = "torch"
    synchronises: frozenset[str] = frozenset()

    @property
    def is_available(self) -> bool:
        return importlib.util.find_spec(self.requires) is not None


def peers(names: tuple[str, ...] = NAMES) -> list[Peer]:
    """The peers called `names` that are installed.

    Raises:
        ValueError: a name is unknown.
    """
    unknown = [n for n in names if n not in NAMES]
    if unknown:
        raise ValueError(f"peers: expected some of {', '.join(NAMES)}, got {', '.join(unknown)}")
    return [p for p in (importlib.import_module(f".{n}", __name__).PEER for n in names) if p.is_available]
