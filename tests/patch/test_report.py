"""The report as a table and as data."""

from __future__ import annotations

import json
from typing import Any

import tigon
from tigon.patch import Row


def test_the_table_groups_by_class_and_form_with_counts(build: Any) -> None:
    report = tigon.patch(build("Gemma2", hidden_activation="gelu_10"))
    lines = [line.split() for line in str(report).splitlines()]
    assert lines[0] == ["Gemma2ForCausalLM"]
    assert lines[1] == ["modules", "form", "variant", "verdict", "reason"]
    assert ["Gemma2RMSNorm", "x", "9", "rms_norm", "scale_then_cast,", "offset", "1", "replaced"] in lines
    assert ["Gemma2MLP", "x", "2", "glu", "kept", "no", "candidate", "computes", "the", "same"] in lines
    assert len(lines) == 2 + len(report) == 6


def test_rows_name_their_modules_and_go_to_json(build: Any) -> None:
    report = tigon.patch(build("Llama"))
    data = json.loads(report.to_json())
    assert data == report.to_dict()
    assert data["model"] == "LlamaForCausalLM"
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
