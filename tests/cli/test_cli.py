from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tigon
from tigon import cli
from tigon.testing import CheckResult


@pytest.mark.parametrize("command", [[], ["info"], ["check"], ["demo"], ["patch-report"], ["bench"]])
def test_help_has_options_and_examples(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command, "--help"])
    out = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "usage: tigon" in out
    assert not command or "examples:\n  tigon " in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"tigon {tigon.__version__}\n"


@pytest.mark.parametrize("words", [[], ["unknown"], ["check", "--dtype", "int8"], ["demo", "--steps", "many"]])
def test_wrong_command_line_is_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 2
    assert "usage: tigon" in capsys.readouterr().err


def test_info_names_every_operator_and_the_backend(capsys: pytest.CaptureFixture[str], device: torch.device) -> None:
    assert cli.main(["info", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["torch"] == torch.__version__
    assert set(info["operators"]) == set(tigon.OPS)
    # The kernels run in the tests, in the interpreter or on the GPU.
    assert info["operators"]["rms_norm"][info["devices"][-1]["device"]] == {"backend": "triton", "why_not_triton": []}


def test_info_gives_the_reason_for_plain_torch(capsys: pytest.CaptureFixture[str]) -> None:
    with tigon.backend("torch"):
        assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert "backend       torch" in out
    row = next(line for line in out.splitlines() if line.split()[:2] == ["rms_norm", "cpu"])
    assert row.endswith("torch     the backend is set to torch")


def _results(*passed: bool) -> list[CheckResult]:
    return [
        CheckResult("rms_norm", f"case{i}", "float32", "budget", ok, 0.5 if ok else float("inf"), "" if ok else "wrong")
        for i, ok in enumerate(passed)
    ]


@pytest.mark.parametrize(("passed", "status"), [((True, True), 0), ((True, False), 1), ((), 1)])
def test_check_status_and_report(
    passed: tuple[bool, ...],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tigon.testing.check_op", lambda spec, **_: iter(_results(*passed)))
    file = tmp_path / "check.json"
    words = ["check", "--op", "rms_norm", "--device", "cpu", "--dtype", "float32", "--json", str(file)]
    assert cli.main(words) == status
    out = capsys.readouterr().out
    assert out.endswith(f"{sum(passed)} passed, {len(passed) - sum(passed)} failed on cpu, backend triton\n")
    assert ("FAILED rms_norm float32 case case1, budget: wrong" in out) == (False in passed)
    results = json.loads(file.read_text())["results"]
    assert [r["used"] for r in results] == [0.5 if ok else None for ok in passed]


def test_check_runs_kernels_whatever_the_backend_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        "tigon.testing.check_op", lambda spec, **_: iter(seen.append(tigon.current_backend()) or _results(True))
    )
    with tigon.backend("torch"):
        assert cli.main(["check", "--op", "rms_norm", "--device", "cpu"]) == 0
    assert seen == ["triton"]


def test_check_refuses_what_it_cannot_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--device", "cpu", "--op", "sofmax"]) == 2
    assert "--op: expected one of rms_norm" in capsys.readouterr().err
    assert cli.main(["check", "--device", "cpu", "--dtype", "bfloat16"]) == 2
    assert "interpreter truncates bfloat16" in capsys.readouterr().err


TINY = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_patch_report_from_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    assert cli.main(["patch-report", str(config), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    replaced = {row["form"]: row["count"] for row in rows if row["verdict"] == "replaced"}
    assert replaced == {"rms_norm": 5, "glu": 2, "rope": 2, "linear_cross_entropy": 1}
    assert cli.main(["patch-report", str(config)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "LlamaForCausalLM"
    assert len(table) == 3 + len(rows)
    assert table[-1] == "replaced 9 of 9 modules; loss: fused"


def test_patch_report_writes_files_and_takes_folders_and_model_types(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "architectures": ["LlamaForSequenceClassification"]}))
    page, data = tmp_path / "report.html", tmp_path / "report.json"
    assert cli.main(["patch-report", str(tmp_path), "--html", str(page), "--json", str(data)]) == 0
    table = capsys.readouterr().out
    # The class that the configuration names has no language model loss.
    assert table.startswith("LlamaForSequenceClassification\n")
    assert table.endswith("replaced 9 of 9 modules\n")
    assert json.loads(data.read_text())["num_replaced"] == 9
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert cli.main(["patch-report", "gpt2"]) == 0
    assert capsys.readouterr().out.startswith("GPT2LMHeadModel\n")


def test_patch_report_without_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["patch-report", str(tmp_path)]) == 2
    assert f"no configuration can be read from '{tmp_path}'" in capsys.readouterr().err


def test_bench_names_a_wrong_operator(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--op", "sofmax"]) == 2
    assert "tigon bench: --op: expected some of rms_norm" in capsys.readouterr().err


def test_check_starts_the_interpreter_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run(
        [sys.executable, "-m", "tigon.cli", "check", "--op", "swiglu", "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed on cpu" in done.stdout
