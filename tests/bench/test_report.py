"""Rows survive being stored, and tables and plots show what the rows say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tigon.bench import report, store
from tigon.bench.peers import NAMES, peers
from tigon.bench.store import Row


def _row(implementation: str = "tigon", ms: float = 1.0, mode: str = "both", case: str = "wide") -> Row:
    return Row(
        op="rms_norm",
        case=case,
        sizes={"M": 8, "N": 4, "residual": 1},
        dtype="bfloat16",
        implementation=implementation,
        version="1",
        mode=mode,
        device_ms=ms,
        low_ms=ms * 0.9,
        high_ms=ms * 1.1,
        host_ms=0.1,
        peak_mib=2.0,
        gbps=100.0,
        percent_of_roof=80.0 / ms,
        budget_used=0.5,
        gpu="NVIDIA H200",
        torch="2.11",
        triton="3.6",
        commit="abc",
        date="2026-11-30",
        command="tigon bench",
    )


def test_rows_are_read_as_written(tmp_path: Path) -> None:
    rows = [_row(), _row("liger", 2.0)]
    (path,) = store.write(rows, tmp_path)
    assert path == tmp_path / "nvidia-h200" / "rms_norm.jsonl"
    assert store.read(path) == rows


def test_new_rows_replace_the_same_case_and_keep_others(tmp_path: Path) -> None:
    store.write([_row(), _row("liger"), _row(case="narrow")], tmp_path)
    (path,) = store.write([_row(ms=3.0)], tmp_path)
    assert [(r.case, r.implementation, r.device_ms) for r in store.read(path)] == [
        ("narrow", "tigon", 1.0),
        ("wide", "tigon", 3.0),
    ]


def test_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("{}\n")
    with pytest.raises(ValueError, match=r"x\.jsonl:1"):
        store.read(path)


def test_table_shows_both_sides_and_marks_the_fastest() -> None:
    table = report.markdown_table([_row(ms=1.5), _row("liger", 1.25), _row(mode="forward")])
    (line,) = [t for t in table.splitlines() if t.startswith("| rms_norm")]
    assert "| 1.500 | **1.250** |" in line
    assert "M 8 x N 4 |" in line
    assert "tigon bench --output" in table


def test_table_takes_replay_where_all_have_it_and_marks_what_is_not_exact() -> None:
    exact = dataclasses.replace(_row(), graph_ms=0.8, graph_percent=93.0, percent_of_roof=71.0)
    wrong = dataclasses.replace(_row("liger", 2.0), budget_used=1.01, graph_percent=55.0, percent_of_roof=40.0)

    def line_of(*rows: Row) -> str:
        (line,) = [t for t in report.markdown_table(rows).splitlines() if t.startswith("| rms_norm")]
        return line

    assert "| 93 % | liger 55 % |" in line_of(exact, wrong)
    assert "| 2.000 † |" in line_of(exact, wrong)
    assert "| 71 % | liger 40 % |" in line_of(exact, dataclasses.replace(wrong, graph_percent=0.0))
    assert "| 93 % | - |" in line_of(exact)


def test_readme_is_rewritten_between_markers_only(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nstale numbers\n{report.END}\nafter\n")
    report.write_into(readme, [_row()])
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "stale" not in text
    assert "| rms_norm, wide |" in text
    readme.write_text("no markers")
    with pytest.raises(ValueError, match="markers"):
        report.write_into(readme, [_row()])


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_pages_show_the_committed_rows(page: str, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    copy = tmp_path / "page.md"
    copy.write_text((root / page).read_text())
    report.write_into(copy, report.rows_in(root / "benchmarks" / "results"))
    assert copy.read_text() == (root / page).read_text()


def test_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    report.plot([_row(), _row("liger", 2.0), _row("tigon@abc")], path, path.with_suffix(".svg"))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.with_suffix(".svg").read_text().startswith("<?xml")


def test_unknown_peer_is_refused() -> None:
    with pytest.raises(ValueError, match="nonesuch"):
        peers(("nonesuch",))


def test_eager_peer_is_every_reference() -> None:
    (eager,) = peers(("torch_eager",))
    from tigon.ops import OPS

    assert set(eager.provides) == set(OPS)
    assert "liger" in NAMES


def test_row_fields_are_documented() -> None:
    documented = Row.__doc__ or ""
    for field in ("mode", "device_ms", "host_ms", "peak_mib", "gbps", "percent_of_roof", "budget_used"):
        assert f"{field}" in documented
        assert field in {f.name for f in dataclasses.fields(Row)}
