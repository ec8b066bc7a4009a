"""docs/architectures.md from the records of a sweep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import transformers

from .compare import KINDS, Record
from .liger import LIGER

TITLES = {"norm": "norms", "mlp": "gated MLPs", "rope": "rope", "experts": "experts"}
LONGEST_REASON = 90


def versions() -> str:
    return f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"


def complete(record: Record) -> bool:
    """Whether everything that there is a form for, and the loss, runs on the operators."""
    return record["fused"] and all(replaced == there for replaced, there in record["counts"].values())


def totals(records: Iterable[Record]) -> dict[str, tuple[int, int]]:
    """By kind how many modules were replaced and how many there are; for `loss` and `complete` how many classes."""
    records = [record for record in records if "counts" in record]
    sums = {kind: tuple(sum(r["counts"][kind][i] for r in records) for i in (0, 1)) for kind in KINDS}
    classes = {"loss": sum(r["fused"] for r in records), "complete": sum(complete(r) for r in records)}
    return {**sums, **{key: (number, len(records)) for key, number in classes.items()}}  # type: ignore[dict-item]


def _cell(replaced: int, there: int) -> str:
    return f"{replaced}/{there}" if there else ""


def _remarks(record: Record) -> str:
    classes: dict[tuple[str, str], list[str]] = {}
    for kind, cls, reason, _ in record["kept"]:
        classes.setdefault((kind, reason), []).append(f"`{cls}`")
    lines = [f"{kind} {', '.join(names)}: {_short(reason)}" for (kind, reason), names in classes.items()]
    if not record["fused"]:
        lines.append(f"loss: {record['loss'] or 'its forward uses the logits'}")
    return "; ".join(lines)


def _short(reason: str) -> str:
    text = reason.replace("|", "\\|").replace("\n", " ")
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3] + "..."


def _row(record: Record) -> str:
    cells = [_cell(*record["counts"][kind]) for kind in KINDS]
    loss = "fused" if record["fused"] else "native"
    liger = str(LIGER.get(record["name"], ""))
    return "| " + " | ".join([record["name"], *cells, loss, liger, _remarks(record)]) + " |"


def render(records: Sequence[Record], order: Sequence[str]) -> str:
    by_name = {record["name"]: record for record in records}
    rows = [by_name[name] for name in order if "counts" in by_name.get(name, {})]
    sums = totals(rows)
    trained = len(rows)
    claimed = [LIGER[r["name"]] for r in rows if r["name"] in LIGER]
    lines = [
        "# Architectures",
        "",
        "<!-- Written by `make zoo`; do not edit. -->",
        "",
        f"Every causal and image-text-to-text language model class of transformers that has a loss from labels,"
        f" {trained} in all ({versions()}). Each is built tiny and random at two sizes, run as it is and patched, in"
        " training and evaluation, and must give the same loss, the same gradients and the same outputs"
        " ([tests/zoo](../tests/zoo)). Counted are the modules that run on text: replaced / present. A model is patched"
        " by what its modules compute, so classes that are not in this table gain in the same way.",
        "",
        "| | replaced | of |",
        "|---|---|---|",
        *(f"| {TITLES[kind]} (modules) | {sums[kind][0]} | {sums[kind][1]} |" for kind in KINDS),
        f"| loss without logits (classes) | {sums['loss'][0]} | {trained} |",
        f"| all of these (classes) | {sums['complete'][0]} | {trained} |",
        "",
        f"Liger-Kernel 0.8.5 patches {len(claimed)} of these classes, by its list of model types; its column was"
        " measured in the same way. Its MLPs are counted with the experts.",
        "",
        "| class | " + " | ".join(TITLES.values()) + " | loss | Liger-Kernel 0.8.5 | left alone, and why |",
        "|" + "---|" * (len(TITLES) + 4),
        *map(_row, rows),
    ]
    return "\n".join(lines) + "\n"
