"""The fastest of several ways is taken, and the first where nothing may be tried."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from tigon.cli import main
from tigon.ops import _choice, _choice_file

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(_choice, "_chosen", {})
    monkeypatch.setenv("TIGON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a device")
    _choice._kept.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    yield
    _choice._kept.cache_clear()


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


# ---- what earlier processes found ----


@pytest.fixture
def restart(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """As if a process began."""

    def begin() -> None:
        monkeypatch.setattr(_choice, "_chosen", {})
        _choice._kept.cache_clear()

    return begin


def test_a_later_process_takes_what_was_found(restart: Callable[[], None]) -> None:
    assert _take({"a": 1.0, "b": 0.5}) == "b"
    restart()
    # Times that would say otherwise.
    assert _take({"a": 1.0, "b": 2.0}) == "b"
    assert _choice.choices() == [("(0, 'key')", "b", {"a": 1.0, "b": 0.5})]
    # Other ways than there were, in the same process and in another one.
    assert _take({"a": 1.0, "c": 2.0}) == "a"
    assert _take({"a": 1.0, "b": 0.5}) == "b"
    restart()
    assert _take({"c": 1.0, "d": 2.0}) == "c"


def test_another_device_version_or_source_measures_again(
    restart: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _take({"a": 1.0, "b": 0.5}) == "b"
    for owner, name, value in (
        (torch.cuda, "get_device_name", lambda _: "another"),
        (torch, "__version__", "0.0"),
        (_choice_file, "_sources", lambda: "edited"),
    ):
        restart()
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value)
            assert _take({"a": 1.0, "b": 2.0}) == "a"
    restart()
    assert _take({"a": 1.0, "b": 2.0}) == "b"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "not json",
        "[]",
        '{"x": 3}',
        '{"ENV": {"\'key\'": {"way": "b"}}}',
        '{"ENV": {"\'key\'": {"way": 1, "ms": {}}}}',
    ],
)
def test_a_file_that_is_not_ours_is_as_good_as_none(content: str, restart: Callable[[], None]) -> None:
    file = _choice_file.path()
    assert file is not None
    file.write_text(content.replace("ENV", _choice_file.environment(0)))
    assert _take({"a": 1.0, "b": 2.0}) == "a"
    restart()
    assert _take({"a": 2.0, "b": 1.0}) == "a"
    assert json.loads(file.read_text())[_choice_file.environment(0)]["'key'"]["way"] == "a"
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_nothing_is_kept_without_a_folder_or_of_a_way_that_failed(
    restart: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert _take({"a": float("inf"), "b": 1.0}) == "b"
    restart()
    assert _take({"a": 1.0, "b": 2.0}) == "a"
    not_a_folder = tmp_path / "file"
    not_a_folder.write_text("")
    for value in ("", str(not_a_folder)):
        monkeypatch.setenv("TIGON_CACHE_DIR", value)
        restart()
        assert _take({"a": 1.0, "b": 0.5}) == "b"
        restart()
        assert _take({"a": 1.0, "b": 2.0}) == "a"
    assert not_a_folder.read_text() == ""


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGON_CACHE_DIR", "/a")
    assert str(_choice_file.path()) == "/a/choices.json"
    monkeypatch.delenv("TIGON_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert str(_choice_file.path()) == "/b/tigon/choices.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert str(_choice_file.path()) == "/c/.cache/tigon/choices.json"


def test_info_shows_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    assert "none yet" in capsys.readouterr().out
    _take({"one kernel": 1.0, "two": 0.5})
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    assert "'key': two   (one kernel 1.000 ms, two 0.500 ms)" in shown
    assert _choice_file.environment(0) in shown
