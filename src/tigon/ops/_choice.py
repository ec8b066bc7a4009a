"""Which of several ways to compute the same is taken: the fastest where they were tried once, for a kind and size.

Trying waits for the device, and takes memory for results that are thrown away, once for a size and machine: what was
found is kept in a file (`_choice_file.py`). Where that must not be (a CUDA graph records) and where results must not
depend on times (`torch.use_deterministic_algorithms`), the first one is taken.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TypeVar

import torch

from . import _choice_file

T = TypeVar("T")

# A way that is listed later must be faster by this, so that noise does not decide.
_MARGIN = 0.98
_ROUNDS = 3
_LEAD_CYCLES = 2_000_000

_chosen: dict[Hashable, tuple[str, dict[str, float]]] = {}
_forced: list[str] = []
# Names among which there was a choice.
offered: set[str] = set()


def take(key: Hashable, ways: Mapping[str, Callable[[], T]], device: torch.device) -> T:
    """Run the way to take, and what it returns. Each of `ways` may be run any number of times before, in any order."""
    way = ways[pick(key, ways, device)]
    return way()


def pick(key: Hashable, ways: Mapping[str, Callable[[], object]], device: torch.device) -> str:
    names = list(ways)
    if len(names) > 1:
        offered.update(names)
    for name in names:
        if name in _forced:
            return name
    if len(names) == 1 or device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return names[0]
    key = device.index, key
    if not _is_among(_chosen.get(key), names):
        name = repr(key[1])
        kept = _kept(device.index or 0)
        if _is_among(kept.get(name), names):
            _chosen[key] = kept[name]
            return kept[name][0]
        # Events are of the device that is current.
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                return names[0]
            times = _times(ways)
        best = names[0]
        for each in names[1:]:
            if times[each] < _MARGIN * times[best]:
                best = each
        _chosen[key] = best, times
        _choice_file.save(_choice_file.environment(device.index or 0), name, best, times)
    return _chosen[key][0]


def _is_among(choice: tuple[str, dict[str, float]] | None, names: list[str]) -> bool:
    """True for a choice among just these."""
    return choice is not None and set(choice[1]) == set(names)


@functools.cache
def _kept(index: int) -> _choice_file.Choices:
    """What earlier processes found on this kind of device."""
    return _choice_file.load(_choice_file.environment(index))


def _times(ways: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of each, tried in turn; infinite where it raises, as without memory to spare, unless all do."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    failed: dict[str, Exception] = {}
    for index in range(_ROUNDS + 1):
        for name, run in ways.items():
            if name in failed:
                continue
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # Time for the host to launch everything, as inside a step.
            torch.cuda._sleep(_LEAD_CYCLES)
            start.record()
            try:
                run()
            except Exception as error:
                failed[name] = error
                warnings.warn(f"tigon: {name}: {type(error).__name__}: {error}; not used here", stacklevel=2)
                continue
            end.record()
            end.synchronize()
            # The first compiles.
            if index:
                samples[name].append(start.elapsed_time(end))
    if len(failed) == len(ways):
        raise next(iter(failed.values()))
    return {name: math.inf if name in failed else statistics.median(values) for name, values in samples.items()}


def choices() -> list[tuple[str, str, dict[str, float]]]:
    """What was tried in this process: kind and size, the way that is taken, milliseconds of each."""
    return [(str(key), *value) for key, value in _chosen.items()]


@contextlib.contextmanager
def forced(*names: str) -> Iterator[None]:
    """Take the ways of these names wherever there is one."""
    _forced.extend(names)
    try:
        yield
    finally:
        del _forced[len(_forced) - len(names) :]
