"""Write the table of docs/liger.md: `python -m tests.compat`."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "liger.md"
BEGIN, END = "<!-- missing:begin -->\n", "<!-- missing:end -->"


def table() -> str:
    import tigon.as_liger  # noqa: F401, I001
    from liger_kernel._missing import FEATURES

    lines = ["| reason | names | modules with nothing else |", "|---|---|---|"]
    for feature in FEATURES:
        names, modules = (
            ", ".join(f"`{word}`" for word in sorted(text.split())) for text in (feature.names, feature.modules)
        )
        lines.append(f"| {feature.reason} | {names} | {modules} |")
    return "\n".join(lines) + "\n"


def page_with_table(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
