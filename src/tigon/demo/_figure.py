"""The picture: both loss curves, and bars for speed and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

NATIVE, TIGON, INK, FAINT = "#9aa5b1", "#d9480f", "#1f2933", "#e4e7eb"


def _bars(axes: Any, title: str, values: tuple[float, float], unit: str, note: str) -> None:
    bars = axes.bar(("native", "tigon"), values, color=(NATIVE, TIGON), width=0.62)
    for bar, value in zip(bars, values, strict=True):
        axes.annotate(
            f"{value:,.0f}",
            (bar.get_x() + bar.get_width() / 2, value),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            color=INK,
            fontsize=12,
            fontweight="bold",
        )
    axes.set_title(title, loc="left", fontsize=12, color=INK, fontweight="bold")
    axes.set_ylabel(unit, color=INK)
    axes.set_xlabel(note, color=INK, labelpad=8)
    axes.set_ylim(0, max(*values, 1e-9) * 1.18)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the picture of `results` to `path` as PNG."""
    # The object interface: no pyplot, hence no display and no state left in the process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    native, patched, compared = results["native"], results["patched"], results["compared"]
    plan, environment = results["plan"], results["environment"]
    figure = Figure(figsize=(13, 5.2), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    loss, speed, memory = figure.subplots(1, 3, width_ratios=(2.1, 1, 1))

    steps = range(1, len(native["losses"]) + 1)
    dot = "o" if len(native["losses"]) == 1 else None
    loss.plot(steps, native["losses"], color=NATIVE, linewidth=6, solid_joinstyle="round", marker=dot, label="native")
    loss.plot(steps, patched["losses"], color=TIGON, linewidth=1.8, marker=dot, label="tigon")
    loss.set_title("Training loss", loc="left", fontsize=12, color=INK, fontweight="bold")
    loss.set_xlabel("step", color=INK)
    loss.set_ylabel("cross entropy, nats per token", color=INK)
    loss.legend(frameon=False, fontsize=11, loc="upper right")
    loss.annotate(
        f"largest difference {compared['largest_loss_difference']:.1e}",
        (0.03, 0.05),
        xycoords="axes fraction",
        color=INK,
        fontsize=11,
    )

    _bars(
        speed,
        "Speed",
        (native["tokens_per_second"], patched["tokens_per_second"]),
        "tokens per second",
        f"{compared['speed_ratio']:.2f} x native",
    )
    mib = 2**20
    kind = "allocated on the GPU" if plan["device"] == "cuda" else "resident, whole process"
    _bars(
        memory,
        "Peak memory",
        (native["peak_bytes"] / mib, patched["peak_bytes"] / mib),
        f"MiB, {kind}",
        f"{compared['saved_bytes'] / mib:,.0f} MiB saved" if compared["saved_bytes"] >= 0 else "nothing saved",
    )
    for axes in (loss, speed, memory):
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=INK, length=0)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(FAINT)

    size = f"{native['num_parameters'] / 1e6:,.1f} M parameters"
    figure.suptitle(
        f"{native['model_class']}, {size}: native and patched by tigon",
        x=0.012,
        ha="left",
        fontsize=15,
        color=INK,
        fontweight="bold",
    )
    figure.text(
        0.012,
        0.895,
        f"{environment['device']}, {plan['dtype']}, batch {plan['batch_size']} x {plan['seq_len']} tokens, "
        f"vocabulary {plan['vocab_size']:,}; torch {environment['torch']}, "
        f"transformers {environment['transformers']}",
        ha="left",
        fontsize=10,
        color=INK,
    )
    figure.tight_layout(rect=(0, 0, 1, 0.9), w_pad=2.5)
    figure.savefig(path)
