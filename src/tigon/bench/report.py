"""Tables and plots made from committed rows, and from nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .store import LONGEST, STEPS, Row, read

OURS, PRODUCTS = "tigon", "matrix_products"
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"
_PACKAGES = ("liger", "quack", "cce", "trl")
_SHOWN = ("tigon", *_PACKAGES, "torch_compile", "torch_builtin", "torch_eager")


def rows_in(folder: Path) -> list[Row]:
    """All rows of operators below `folder`."""
    return [row for path in sorted(folder.rglob("*.jsonl")) if path.name not in (STEPS, LONGEST) for row in read(path)]


def _cases(rows: Iterable[Row]) -> dict[tuple[str, str, str], dict[str, Row]]:
    grouped: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        grouped.setdefault((row.op, row.case, row.mode), {})[row.implementation] = row
    return grouped


def _size(row: Row) -> str:
    return " x ".join(f"{k} {v}" for k, v in row.sizes.items() if v > 1)


def text_table(rows: Sequence[Row]) -> str:
    """One line an implementation, for a terminal."""
    lines = [
        f"{'op':36}{'case':20}{'mode':10}{'implementation':16}{'device ms':>10}{'spread':>16}{'graph ms':>10}"
        f"{'host ms':>9}{'peak MiB':>10}{'GB/s':>8}{'% roof':>8}{'% graph':>8}{'budget':>8}"
    ]
    for row in rows:
        lines.append(
            f"{row.op:36}{row.case:20}{row.mode:10}{row.implementation:16}{row.device_ms:10.4f}"
            f"{f'{row.low_ms:.3f}-{row.high_ms:.3f}':>16}{row.graph_ms:10.4f}{row.host_ms:9.3f}{row.peak_mib:10.1f}"
            f"{row.gbps:8.0f}{row.percent_of_roof:8.1f}{row.graph_percent:8.1f}{row.budget_used:8.2f}"
        )
    return "\n".join(lines)


def markdown_table(rows: Sequence[Row]) -> str:
    """Forward plus backward of each case, all implementations side by side, with what is needed to repeat it."""
    shown = [name for name in _SHOWN if any(r.implementation == name for r in rows)]
    lines = [
        "| operator | size | " + " | ".join(shown) + " | tigon, of the roof | best other | peak MiB, tigon / liger |",
        "|---|---|" + "---|" * (len(shown) + 3),
    ]
    for (op, case, mode), found in _cases(rows).items():
        ours = found.get(OURS)
        if mode != "both" or ours is None:
            continue
        fastest = min(r.device_ms for n, r in found.items() if n in _SHOWN)
        cells = []
        for name in shown:
            row = found.get(name)
            cell = "-" if row is None else f"{row.device_ms:.3f}" + (" †" if row.budget_used > 1 else "")
            cells.append(f"**{cell}**" if row is not None and row.device_ms == fastest else cell)
        liger = found.get("liger")
        peak = f"{ours.peak_mib:.0f} / {liger.peak_mib:.0f}" if liger else f"{ours.peak_mib:.0f}"
        label = f"{op}, {case}"
        percents = _percents({n: r for n, r in found.items() if n in _SHOWN})
        others = {n: p for n, p in percents.items() if n != OURS}
        best = max(others, key=others.__getitem__, default=None)
        best = "-" if best is None else f"{best} {others[best]:.0f} %"
        lines.append(f"| {label} | {_size(ours)} | {' | '.join(cells)} | {percents[OURS]:.0f} % | {best} | {peak} |")
    some = next(iter(rows))
    lines += [
        "",
        f"Milliseconds for forward and backward, {some.dtype}, cold cache, medians of interleaved launches on one "
        f"{some.gpu}; torch {some.torch}, Triton {some.triton}, {_versions(rows)}, {some.date}. The roof is the copy "
        "bandwidth, or the matrix products alone, measured in the same run, and the percentages those of the kernels "
        "in the replay of a CUDA graph where all of a line could be captured, else of single calls. † is further from "
        "the fp64 result than twice the error of plain PyTorch in the same dtype. "
        "Repeat with `tigon bench --output benchmarks/results`; each row there has its own command and commit.",
    ]
    return "\n".join(lines)


def _versions(rows: Sequence[Row]) -> str:
    peers = {r.implementation: r.version for r in rows if r.implementation in _PACKAGES}
    return ", ".join(f"{name} {version}" for name, version in peers.items()) or "no other packages"


def _percents(found: Mapping[str, Row]) -> dict[str, float]:
    """Of the roof: by the replay of a graph where all of a case could be captured, else all by single calls."""
    is_replayed = all(row.graph_percent for row in found.values())
    return {name: row.graph_percent if is_replayed else row.percent_of_roof for name, row in found.items()}


def write_into(readme: Path, rows: Sequence[Row]) -> None:
    """Replace what stands between the markers in `readme`.

    Raises:
        ValueError: a marker is missing.
    """
    write_between(readme, BEGIN, END, markdown_table(rows))


def write_between(page: Path, begin: str, end: str, table: str) -> None:
    """Replace what stands between two markers in `page`.

    Raises:
        ValueError: a marker is missing.
    """
    text = page.read_text()
    if begin not in text or end not in text:
        raise ValueError(f"{page}: expected the markers {begin} and {end}")
    head, tail = text.split(begin, 1)[0], text.split(end, 1)[1]
    page.write_text(f"{head}{begin}\n{table}\n{end}{tail}")


def plot(rows: Sequence[Row], *paths: Path) -> None:
    """Bars of forward plus backward for each case of one operator, every peer, with the roof as a line."""
    import matplotlib

    matplotlib.use("Agg")
    # With no date and these names the same rows make the same file.
    matplotlib.rcParams["svg.hashsalt"] = OURS
    import matplotlib.pyplot as plt

    grouped = {case: found for (_, case, mode), found in _cases(rows).items() if mode == "both" and OURS in found}
    measured = {name for found in grouped.values() for name in found}
    names = [n for n in _SHOWN if n in measured] + sorted(n for n in measured if n.startswith(f"{OURS}@"))
    palette = "#d1495b", "#30638e", "#7d5ba6", "#00798c", "#9c6644", "#edae49", "#66a182", "#8d96a3"
    colors = dict(zip(_SHOWN, palette, strict=True))
    figure, axes = plt.subplots(figsize=(max(6.0, 1.9 * len(grouped) + 1.5), 4.2), layout="constrained")
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        values = [_percents(found).get(name, 0.0) for found in grouped.values()]
        places = [x + (index - (len(names) - 1) / 2) * width for x in range(len(grouped))]
        bars = axes.bar(places, values, width, label=name.replace("_", " "), color=colors.get(name, "#e5989b"))
        axes.bar_label(bars, [f"{v:.0f}" if v else "" for v in values], fontsize=7, padding=1)
    axes.axhline(100, color="black", linewidth=1, linestyle="--")
    axes.text(-0.45, 101.5, "roof", fontsize=8)
    axes.set_xticks(range(len(grouped)), list(grouped), fontsize=8)
    axes.set_ylabel("percent of the measured roof")
    axes.set_ylim(0, 118)
    some = rows[0]
    axes.set_title(f"{some.op}, forward + backward, {some.dtype}, {some.gpu}", fontsize=10)
    axes.legend(fontsize=8, ncols=len(names), loc="upper center", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, **({"metadata": {"Date": None}} if path.suffix == ".svg" else {}))
    plt.close(figure)
