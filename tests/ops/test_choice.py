"""The fastest of several ways is taken, and the first where nothing may be tried."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from tigon.ops import _choice

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_choice, "_chosen", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())


def _take(times: dict[str, float], device: torch.device = CUDA) -> str:
    ways = {name: lambda name=name: name for name in times}
    with mock.patch.object(_choice, "_times", return_value=times) as tried:
        taken = _choice.take("key", ways, device)
        assert _choice.take("key", ways, device) == taken
    assert tried.call_count <= 1
    return taken


@pytest.mark.parametrize(
    ("times", "expected"),
    [({"a": 1.0, "b": 0.9}, "b"), ({"a": 1.0, "b": 0.99}, "a"), ({"a": 1.0, "b": 0.9, "c": 0.8}, "c")],
)
def test_the_fastest_is_taken_and_a_tie_goes_to_the_first(times: dict[str, float], expected: str) -> None:
    assert _take(times) == expected
    assert _choice.choices() == [("(0, 'key')", expected, times)]


def test_nothing_is_tried_on_a_cpu_in_a_graph_or_where_results_may_not_depend_on_times() -> None:
    times = {"a": 1.0, "b": 0.1}
    assert _take(times, CPU) == "a"
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        assert _take(times) == "a"
    torch.use_deterministic_algorithms(True)
    try:
        assert _take(times) == "a"
    finally:
        torch.use_deterministic_algorithms(False)
    assert _choice.choices() == []
    assert _take(times) == "b"


def test_a_forced_way_is_taken_where_there_is_one() -> None:
    with _choice.forced("c", "b"):
        assert _take({"a": 1.0, "b": 5.0}) == "b"
        assert _take({"a": 1.0, "d": 5.0}) == "a"
    assert _take({"a": 1.0, "b": 5.0}) == "a"


class _Event:
    """An event of a device whose clock advances by what `_run` says."""

    clock = 0.0

    def __init__(self, **_: object) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = _Event.clock

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Event) -> float:
        return end.at - self.at


def _run(milliseconds: float) -> Callable[[], None]:
    def run() -> None:
        _Event.clock += milliseconds

    return run


def _fail() -> None:
    raise torch.OutOfMemoryError("no memory")


def test_each_way_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: None)
    assert _choice._times({"a": _run(3.0), "b": _run(1.5)}) == {"a": 3.0, "b": 1.5}


def test_a_way_that_raises_is_not_taken_and_the_last_error_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: None)
    with pytest.warns(UserWarning, match="a: OutOfMemoryError: no memory; not used here"):
        assert _choice.take("key", {"a": _fail, "b": _run(1.0)}, CUDA) is None
    assert _choice.choices() == [("(0, 'key')", "b", {"a": float("inf"), "b": 1.0})]
    with pytest.warns(UserWarning, match="not used here"), pytest.raises(torch.OutOfMemoryError, match="no memory"):
        _choice.take("other", {"a": _fail, "b": _fail}, CUDA)
