"""The report as a table and as data."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import tigon
from tigon.patch import Row
from tigon.patch.report import LOSS


def test_the_table_groups_by_class_and_form_with_counts(build: Any) -> None:
    report = tigon.patch(build("Gemma2", hidden_activation="gelu_10"))
    lines = [line.split() for line in str(report).splitlines()]
    assert lines[0] == ["Gemma2ForCausalLM"]
    assert lines[1] == ["modules", "form", "variant", "verdict", "reason"]
    assert ["Gemma2RMSNorm", "x", "9", "rms_norm", "scale_then_cast,", "offset", "1", "replaced"] in lines
    assert ["Gemma2MLP", "x", "2", "glu", "kept", "no", "candidate", "computes", "the", "same"] in lines
    assert len(lines) == 3 + len(report) == 7
    assert str(report).splitlines()[-1] == report.summary == "replaced 11 of 13 modules; loss: fused"


def test_the_summary_counts_modules_and_says_what_became_of_the_loss(build: Any) -> None:
    reports = [tigon.patch(build("Llama"), **options) for options in ({}, {"skip": ["linear_cross_entropy"]})]
    assert [report.summary for report in reports] == [
        "replaced 9 of 9 modules; loss: fused",
        "replaced 9 of 9 modules",
    ]
    kept = tigon.Report(
        "Any", [Row(("a", "b"), "C", "glu", "", "kept", "why"), Row(("",), "M", LOSS, "", "kept", "why")]
    )
    assert (kept.summary, kept.num_modules, kept.num_replaced) == ("replaced 0 of 2 modules; loss: native", 2, 0)


def test_rows_name_their_modules_and_go_to_json(build: Any) -> None:
    report = tigon.patch(build("Llama"))
    data = json.loads(report.to_json())
    assert data == report.to_dict()
    assert data["model"] == "LlamaForCausalLM"
    assert (data["num_replaced"], data["num_modules"], data["loss"]) == (9, 9, "fused")
    norms = next(row for row in data["rows"] if row["form"] == "rms_norm")
    assert norms == {
        "modules": [f"model.layers.{i}.{name}_layernorm" for i in (0, 1) for name in ("input", "post_attention")]
        + ["model.norm"],
        "class": "LlamaRMSNorm",
        "form": "rms_norm",
        "variant": "cast_then_scale",
        "verdict": "replaced",
        "reason": "",
        "count": 5,
    }
    assert all(isinstance(row, Row) for row in report)
    assert report.replaced == report.rows
    assert report.kept == []


class Page(HTMLParser):
    """Cells by row, the tags that are open at the end, and every address that the page asks for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


def test_the_page_stands_alone_and_is_grouped_by_form(build: Any) -> None:
    report = tigon.patch(build("Gemma2", hidden_activation="gelu_10"))
    text = report.to_html()
    page = Page(text)
    assert (page.open, page.addresses) == ([], [])
    assert "url(" not in text
    assert [row for row in page.rows if row[0] == "Gemma2MLP"] == [
        ["Gemma2MLP", "2model.layers.0.mlpmodel.layers.1.mlp", "kept", "no candidate computes the same"]
    ]
    assert [row[0] for row in page.rows].count("class") == len({row.form for row in report}) == 4
    assert report.summary in text
    assert "<h2>glu <small>0 of 2 replaced</small></h2>" in text


def test_the_page_escapes_what_comes_from_the_model() -> None:
    report = tigon.Report("<M>", [Row(("a<b>",), "C<script>", "glu", "", "kept", "it has <x> & y")])
    page = Page(report.to_html())
    assert page.rows[1] == ["C<script>", "1a<b>", "kept", "it has <x> & y"]
    assert "nothing recognised" in tigon.Report("M").to_html()
