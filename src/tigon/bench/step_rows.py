"""Rows of whole training steps, and the tables and plots made from committed ones."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import report, store
from .step_kinds import KINDS, TITLES
from .step_variants import VARIANTS

BEGIN, END = "<!-- steps:begin -->", "<!-- steps:end -->"
NATIVE, LIGER = "native", "liger"
# Losses of the same steps may drift apart by the rounding of a 16-bit dtype; more is another training.
_SAME_LOSS = 0.05


@dataclass(frozen=True)
class StepRow:
    """One variant of the training of one model.

    Attributes:
        case: name of the model's configuration file.
        status: "ok", or "out of memory", and then nothing was measured but memory.
        tokens_per_s: of the median of the measured steps, `step_ms`; `low_ms` and `high_ms` are the 10th and 90th
            percentile.
        peak_gib: allocated during the measured steps; `first_peak_gib` during those before, with what compilation and
            trials take; `reserved_gib` what the allocator held.
        first_step_s: until the first step has ended: compilation of kernels and of the model.
        sm_mhz: median clock of the multiprocessors during the measured steps, 0 where it cannot be read.
        replaced: modules with a forward of their own, or of another class.
        losses: of every step, those of the warm-up first.
        kinds_ms: of a step by what it was spent on, from a profile of two more; "host_gap" is what of `step_ms` no
            kernel ran in. Empty where there is no profile.
    """

    case: str
    batch: int
    seq: int
    checkpointing: bool
    dtype: str
    attention: str
    implementation: str
    version: str
    status: str
    gpu: str
    torch: str
    triton: str
    transformers: str
    commit: str
    date: str
    command: str
    text_seed: int = 0
    peak_gib: float = 0.0
    reserved_gib: float = 0.0
    first_peak_gib: float = 0.0
    tokens_per_s: float = 0.0
    step_ms: float = 0.0
    low_ms: float = 0.0
    high_ms: float = 0.0
    first_step_s: float = 0.0
    sm_mhz: int = 0
    replaced: int = 0
    parameters: int = 0
    losses: list[float] = field(default_factory=list)
    kinds_ms: dict[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        """What rows that may be compared have in common."""
        return self.case, self.batch, self.seq, self.checkpointing, self.dtype, self.attention, self.text_seed


@dataclass(frozen=True)
class LongestRow:
    """The longest sequence of which one variant trains a step.

    Attributes:
        longest: tokens of a sequence, to 1024 or a sixty-fourth; a step of them has run.
        peaks_gib: of every length tried, 0 where memory ran out.
    """

    case: str
    batch: int
    checkpointing: bool
    dtype: str
    attention: str
    implementation: str
    version: str
    longest: int
    peaks_gib: dict[str, float]
    gpu: str
    torch: str
    triton: str
    transformers: str
    commit: str
    date: str
    command: str

    @property
    def key(self) -> tuple[Any, ...]:
        """What rows that may be compared have in common."""
        return self.case, self.batch, self.checkpointing, self.dtype, self.attention


# ---- files ----


def write(rows: Sequence[Any], folder: Path) -> Path:
    """Write rows of one kind and GPU to `folder/<gpu>/`, replacing all earlier ones of the same models and sizes.

    All of them, because what is compared was measured in one run.
    """
    kind = type(rows[0])
    path = folder / store.gpu_folder(rows[0].gpu) / (store.STEPS if kind is StepRow else store.LONGEST)
    replaced = {row.key for row in rows}
    kept = [row for row in (store.read(path, kind) if path.exists() else []) if row.key not in replaced]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in [*kept, *rows]))
    return path


def rows_in(folder: Path, kind: type[Any]) -> list[Any]:
    """All rows of `kind` below `folder`."""
    name = store.STEPS if kind is StepRow else store.LONGEST
    return [row for path in sorted(folder.rglob(name)) for row in store.read(path, kind)]


def _cases(rows: Iterable[Any]) -> list[list[Any]]:
    """Rows that may be compared, in the order of the table of variants."""
    grouped: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        grouped.setdefault(row.key, []).append(row)
    order = list(VARIANTS)
    return [sorted(found, key=lambda row: order.index(row.implementation)) for found in grouped.values()]


def _of(rows: Iterable[Any], name: str) -> Any:
    return next((row for row in rows if row.implementation == name), None)


def loss_distance(row: StepRow, native: StepRow | None) -> float | None:
    """The largest difference of a step's loss from native's, None where one of both has none; NaN is infinitely far."""
    if native is None or not row.losses or not native.losses:
        return None
    pairs = list(zip(row.losses, native.losses, strict=False))
    return max(abs(a - b) if abs(a - b) < float("inf") else float("inf") for a, b in pairs)


# ---- tables ----


def text_table(rows: Sequence[Any]) -> str:
    """One line a variant, for a terminal."""
    if isinstance(rows[0], LongestRow):
        return "\n".join(f"{row.implementation:<18}{row.longest:>10} tokens" for row in rows)
    lines = [
        f"{'variant':<18}{'tokens/s':>10}{'step ms':>10}{'spread':>18}{'peak GiB':>10}{'first s':>9}{'SM MHz':>8}"
        f"{'replaced':>10}{'last loss':>11}"
    ]
    for row in rows:
        if row.status != "ok":
            lines.append(f"{row.implementation:<18}{row.status:>10}")
            continue
        lines.append(
            f"{row.implementation:<18}{row.tokens_per_s:>10,.0f}{row.step_ms:>10.2f}"
            f"{f'{row.low_ms:.2f}-{row.high_ms:.2f}':>18}{row.peak_gib:>10.2f}{row.first_step_s:>9.1f}"
            f"{row.sm_mhz or '-':>8}{row.replaced:>10}{row.losses[-1]:>11.4f}"
        )
    profiled = [row for row in rows if row.kinds_ms]
    if profiled:
        titles = {"pointwise": "norms etc.", "products": "products", "other": "other", "host_gap": "host"}
        lines += ["", f"{'ms of a step':<18}" + "".join(f"{titles.get(kind, kind):>12}" for kind in KINDS)]
        for row in profiled:
            lines.append(f"{row.implementation:<18}" + "".join(f"{row.kinds_ms[kind]:>12.2f}" for kind in KINDS))
    return "\n".join(lines)


def _times(value: float, other: float | None) -> str:
    return f"{value / other:.2f}" if value and other else "-"


def _label(row: Any) -> str:
    is_step = isinstance(row, StepRow)
    extra = {
        "checkpointing": row.checkpointing,
        f"{row.attention} attention": row.attention != "sdpa",
        row.dtype: row.dtype != "bfloat16",
        f"text {row.text_seed if is_step else 0}": is_step and row.text_seed,
    }
    sizes = f"{row.batch} x {row.seq}" if is_step else f"batch {row.batch}"
    return ", ".join([row.case, sizes, *(text for text, is_so in extra.items() if is_so)])


def markdown_tables(rows: Sequence[StepRow], longest: Sequence[LongestRow]) -> str:
    """Speed and memory of every variant; where the time goes; the longest sequences."""
    if not rows and not longest:
        return "No rows yet."
    lines: list[str] = []
    if rows:
        lines += [
            "| model, batch x sequence | variant | tokens/s | x native | x liger | peak GiB | of liger's "
            "| first step s | loss, first to last |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
    for found in _cases(rows):
        native, liger = (_of(found, name) for name in (NATIVE, LIGER))
        fastest = max(row.tokens_per_s for row in found)
        for row in found:
            if row.status != "ok":
                lines.append(f"| {_label(row)} | {row.implementation} | {row.status} | - | - | - | - | - | - |")
                continue
            speed = f"{row.tokens_per_s:,.0f}"
            distance = loss_distance(row, native)
            mark = " †" if distance is not None and distance > _SAME_LOSS else ""
            cells = [
                _label(row),
                row.implementation,
                f"**{speed}**" if row.tokens_per_s == fastest else speed,
                _times(row.tokens_per_s, native and native.tokens_per_s),
                _times(row.tokens_per_s, liger and liger.tokens_per_s),
                f"{row.peak_gib:.1f}",
                _times(row.peak_gib, liger and liger.status == "ok" and liger.peak_gib),
                f"{row.first_step_s:.1f}",
                f"{row.losses[0]:.3f} to {row.losses[-1]:.3f}{mark}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    profiled = [row for found in _cases(rows) for row in found if row.kinds_ms]
    if profiled:
        lines += ["", "Milliseconds of a step:", ""]
        lines.append("| model, batch x sequence | variant | " + " | ".join(TITLES[kind] for kind in KINDS) + " |")
        lines.append("|---|---|" + "---|" * len(KINDS))
        for row in profiled:
            cells = [f"{row.kinds_ms[kind]:.1f}" for kind in KINDS]
            lines.append(f"| {_label(row)} | {row.implementation} | {' | '.join(cells)} |")
    if longest:
        lines += ["", "The longest sequence of which a step fits into memory:", ""]
        lines += ["| model | variant | tokens | x native | x liger |", "|---|---|---|---|---|"]
        for found in _cases(longest):
            native, liger = (_of(found, name) for name in (NATIVE, LIGER))
            for row in found:
                ratios = (_times(row.longest, other and other.longest) for other in (native, liger))
                lines.append(f"| {_label(row)} | {row.implementation} | {row.longest:,} | {' | '.join(ratios)} |")
    some = next(iter([*rows, *longest]))
    version = next((row.version for row in [*rows, *longest] if row.implementation.startswith(LIGER)), "")
    lines += [
        "",
        f"{some.dtype} weights drawn at random, fused AdamW, one {some.gpu}; torch {some.torch}, Triton {some.triton}, "
        f"transformers {some.transformers}{f', Liger-Kernel {version}' if version else ''}, {some.date}. "
        f"† a step's loss is more than {_SAME_LOSS} from native's. Each row in `benchmarks/results` has its own "
        "command and commit.",
    ]
    return "\n".join(lines)


def write_into(page: Path, folder: Path) -> None:
    """Replace what stands between the markers in `page` by the tables of the rows below `folder`.

    Raises:
        ValueError: a marker is missing.
    """
    report.write_between(page, BEGIN, END, markdown_tables(rows_in(folder, StepRow), rows_in(folder, LongestRow)))


# ---- plots ----

_COLORS = {
    "products": "#30638e",
    "attention": "#00798c",
    "pointwise": "#edae49",
    "loss": "#d1495b",
    "optimiser": "#7d5ba6",
    "other": "#8d96a3",
    "host_gap": "#e8e8e8",
}


def plots(rows: Sequence[StepRow], folder: Path) -> list[Path]:
    """A PNG and an SVG for each case: where the time goes, tokens/s and memory, losses."""
    return [path for found in _cases(rows) for path in _plot(found, folder)]


def _plot(found: Sequence[StepRow], folder: Path) -> tuple[Path, Path]:
    import matplotlib

    matplotlib.use("Agg")
    # With no date and these names the same rows make the same file.
    matplotlib.rcParams["svg.hashsalt"] = "tigon"
    import matplotlib.pyplot as plt

    names = [row.implementation.replace("_", " ") for row in found]
    # Without a profile there is no time to show.
    is_profiled = any(row.kinds_ms for row in found)
    widths = (1.15, 1, 1.15) if is_profiled else (1, 1.15)
    figure, (*times, speed, losses) = plt.subplots(
        1, len(widths), figsize=(5 * len(widths), 4.4), layout="constrained", width_ratios=widths
    )
    if is_profiled:
        _draw_times(times[0], found, names)
    places = range(len(found))
    bars = speed.bar([p - 0.2 for p in places], [row.tokens_per_s for row in found], 0.4, color="#30638e")
    speed.bar_label(
        bars, [f"{row.tokens_per_s:,.0f}" if row.tokens_per_s else "out of\nmemory" for row in found], fontsize=7
    )
    memory = speed.twinx()
    bars = memory.bar([p + 0.2 for p in places], [row.peak_gib for row in found], 0.4, color="#edae49")
    memory.bar_label(bars, [f"{row.peak_gib:.1f}" for row in found], fontsize=7)
    speed.set_ylabel("tokens/s", color="#30638e")
    memory.set_ylabel("peak GiB", color="#9c6b12")
    for axes in (speed, memory):
        axes.margins(y=0.12)
    speed.set_xticks(list(places), names, rotation=30, ha="right", fontsize=8)
    for index, (row, name) in enumerate(zip(found, names, strict=True)):
        if row.losses:
            # Thinner from line to line, so that those beneath are seen where all agree.
            width = 4.0 - 3.0 * index / len(found)
            losses.plot(range(1, len(row.losses) + 1), row.losses, label=name, linewidth=width)
    native = _of(found, NATIVE)
    if native is not None and native.losses:
        # A training that goes wrong must not flatten the others.
        margin = max(0.3, 0.5 * (max(native.losses) - min(native.losses)))
        losses.set_ylim(min(native.losses) - margin, max(native.losses) + margin)
    losses.set_xlabel("step")
    losses.set_ylabel("loss")
    losses.legend(fontsize=8, frameon=False)
    for axes in (*times, losses):
        axes.spines[["top", "right"]].set_visible(False)
    some = found[0]
    figure.suptitle(f"{_label(some)}, {some.dtype}, {some.gpu}", fontsize=11)
    path = folder / f"step-{_label(some).replace(' x ', 'x').replace(', ', '-').replace(' ', '-')}.png"
    written = path, path.with_suffix(".svg")
    for target in written:
        figure.savefig(target, dpi=130, **({"metadata": {"Date": None}} if target.suffix == ".svg" else {}))
    plt.close(figure)
    return written


def _draw_times(axes: Any, rows: Sequence[StepRow], names: Sequence[str]) -> None:
    left = [0.0] * len(rows)
    for kind in KINDS:
        values = [row.kinds_ms.get(kind, 0.0) for row in rows]
        axes.barh(range(len(rows)), values, left=left, color=_COLORS[kind], label=TITLES[kind], height=0.7)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of a step")
    axes.legend(fontsize=7, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.45, 1.16))
