"""What a patch did: one row for every group of modules that look alike, with the verdict and the reason."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["replaced", "kept"]
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
        return "\n".join([self.model, *(line.rstrip() for line in lines)])

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.model, "rows": [row.to_dict() for row in self.rows]}

    def to_json(self, *, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent)


def grouped(findings: Iterable[tuple[str, str, str, str, Verdict, str]]) -> list[Row]:
    """Rows from (module name, class, form, variant, verdict, reason), in the order each group was first met."""
    groups: dict[tuple[str, str, str, Verdict, str], list[str]] = {}
    for name, *key in findings:
        groups.setdefault(tuple(key), []).append(name)  # type: ignore[arg-type]
    return [Row(tuple(names), *key) for key, names in groups.items()]
