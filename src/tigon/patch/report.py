"""What a patch did: one row for every group of modules that look alike, with the verdict and the reason."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["replaced", "kept"]
LOSS = "linear_cross_entropy"
_COLUMNS = ("modules", "form", "variant", "verdict", "reason")


@dataclass(frozen=True)
class Row:
    """Modules of one class that were recognised as one form and met the same fate.

    `modules` are their names in the model, "" for the model itself; `reason` says why a kept row was kept.
    """

    modules: tuple[str, ...]
    cls: str
    form: str
    variant: str
    verdict: Verdict
    reason: str = ""

    @property
    def count(self) -> int:
        return len(self.modules)

    def to_dict(self) -> dict[str, Any]:
        return {
            "modules": list(self.modules),
            "class": self.cls,
            "form": self.form,
            "variant": self.variant,
            "verdict": self.verdict,
            "reason": self.reason,
            "count": self.count,
        }


@dataclass
class Report:
    """The rows of one `patch` call. `print(report)` shows them as a table."""

    model: str
    rows: list[Row] = field(default_factory=list)

    @property
    def replaced(self) -> list[Row]:
        return [row for row in self.rows if row.verdict == "replaced"]

    @property
    def kept(self) -> list[Row]:
        return [row for row in self.rows if row.verdict == "kept"]

    @property
    def loss(self) -> Literal["fused", "native", ""]:
        """What became of the loss: fused where any is; "" for a model without one that was looked at."""
        verdicts = {row.verdict for row in self.rows if row.form == LOSS}
        return "fused" if "replaced" in verdicts else "native" if verdicts else ""

    @property
    def num_modules(self) -> int:
        """Modules that were recognised, but for the loss, which is counted apart."""
        return sum(row.count for row in self.rows if row.form != LOSS)

    @property
    def num_replaced(self) -> int:
        return sum(row.count for row in self.replaced if row.form != LOSS)

    @property
    def summary(self) -> str:
        """The counts in one line."""
        loss = f"; loss: {self.loss}" if self.loss else ""
        return f"replaced {self.num_replaced} of {self.num_modules} modules{loss}"

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        if not self.rows:
            return f"{self.model}: nothing recognised"
        cells = [(f"{row.cls} x {row.count}", row.form, row.variant, row.verdict, row.reason) for row in self.rows]
        table = [_COLUMNS, *cells]
        widths = [max(len(line[i]) for line in table) for i in range(len(_COLUMNS))]
        lines = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in table]
        return "\n".join([self.model, *(line.rstrip() for line in lines), self.summary])

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "rows": [row.to_dict() for row in self.rows],
            "num_modules": self.num_modules,
            "num_replaced": self.num_replaced,
            "loss": self.loss,
        }

    def to_json(self, *, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def to_html(self) -> str:
        """A page by itself: one table for each form, with the names of the modules behind each count."""
        return _PAGE.format(title=html.escape(self.model), content=self._repr_html_())

    def _repr_html_(self) -> str:
        # The name under which notebooks look for it.
        forms = dict.fromkeys(row.form for row in self.rows)
        tables = "".join(_table(form, [row for row in self.rows if row.form == form]) for form in forms)
        summary = html.escape(self.summary if self.rows else "nothing recognised")
        title = html.escape(self.model)
        return f'<style>{_STYLE}</style>\n<div class="tigon"><h1>{title}</h1>\n{tables}<p>{summary}</p></div>\n'


def _table(form: str, rows: list[Row]) -> str:
    count, replaced = sum(row.count for row in rows), sum(row.count for row in rows if row.verdict == "replaced")
    head = f"<h2>{html.escape(form)} <small>{replaced} of {count} replaced</small></h2>"
    columns = "".join(f"<th>{name}</th>" for name in ("class", "modules", "verdict", "variant or reason"))
    body = "".join(_line(row) for row in sorted(rows, key=lambda row: row.verdict, reverse=True))
    return f"{head}<table><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table>\n"


def _line(row: Row) -> str:
    names = "<br>".join(html.escape(name or "the model itself") for name in row.modules)
    modules = f"<details><summary>{row.count}</summary>{names}</details>"
    says = html.escape("; ".join(text for text in (row.variant, row.reason) if text))
    cells = f"<td><code>{html.escape(row.cls)}</code></td><td>{modules}</td><td>{row.verdict}</td><td>{says}</td>"
    return f'<tr class="{row.verdict}">{cells}</tr>'


_STYLE = """
.tigon { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
.tigon h1 { font-size: 1.5rem; margin: 0; }
.tigon h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem; }
.tigon small, .tigon th { opacity: .7; font-weight: 600; }
.tigon table { border-collapse: collapse; width: 100%; table-layout: fixed; }
.tigon th, .tigon td { text-align: left; vertical-align: top; padding: .35rem .6rem; border-bottom: 1px solid #8886;
  overflow-wrap: anywhere; }
.tigon th:nth-child(1) { width: 30%; } .tigon th:nth-child(2) { width: 25%; } .tigon th:nth-child(3) { width: 6rem; }
.tigon td:nth-child(3) { font-weight: 600; }
.tigon tr.replaced td:nth-child(3) { color: #1a7f37; color: light-dark(#1a7f37, #3fb950); }
.tigon tr.kept td:nth-child(3) { color: #9a6700; color: light-dark(#9a6700, #d29922); }
.tigon summary { cursor: pointer; }
"""
_PAGE = """<!DOCTYPE html>
<html lang="en" style="color-scheme: light dark"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>tigon: {title}</title></head>
<body>{content}</body></html>
"""


def grouped(findings: Iterable[tuple[str, str, str, str, Verdict, str]]) -> list[Row]:
    """Rows from (module name, class, form, variant, verdict, reason), in the order each group was first met."""
    groups: dict[tuple[str, str, str, Verdict, str], list[str]] = {}
    for name, *key in findings:
        groups.setdefault(tuple(key), []).append(name)  # type: ignore[arg-type]
    return [Row(tuple(names), *key) for key, names in groups.items()]
