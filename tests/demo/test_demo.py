from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path

import pytest
import torch

from tigon import cli
from tigon._progress import Progress
from tigon.demo import DemoError, Options, _run
from tigon.demo._figure import draw
from tigon.demo._text import encode, read_text, train_tokenizer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "--steps: expected at least 1, got 0"),
        ({"batch_size": -1}, "--batch-size: expected at least 1, got -1"),
        ({"seq_len": 1}, "--seq-len: expected at least 2, got 1"),
        ({"lr": 0.0}, "--lr: expected a positive number, got 0.0"),
        ({"lr": float("nan")}, "--lr: expected a positive number, got nan"),
        ({"text": Path("no/such/file.txt")}, "--text: no such file: no/such/file.txt"),
        ({"output": Path(__file__)}, "exists and is not a folder"),
        ({"device": "tpu"}, "--device: expected one of auto, cpu, cuda, got 'tpu'"),
        ({"dtype": "int8"}, "--dtype: expected one of auto, float32, bfloat16, got 'int8'"),
        ({"model": "no/such/folder/"}, "--model: no configuration can be read from 'no/such/folder/'"),
        ({"seq_len": 100_000}, "--seq-len: the model takes at most 2048 positions, got 100000"),
    ],
)
def test_option_that_cannot_work_is_named(options: dict, message: str) -> None:
    with pytest.raises(DemoError) as refused:
        _run.make_plan(Options(**{"device": "cpu", **options}))
    assert message in str(refused.value)


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    with pytest.raises(DemoError) as refused:
        Options().check()
    assert str(refused.value) == "the demo needs matplotlib: pip install 'tigon[hf,bench]'"


def test_text_too_short_or_not_text(tmp_path: Path) -> None:
    short, binary = tmp_path / "short.txt", tmp_path / "binary.txt"
    short.write_text("a few words")
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DemoError) as refused:
        _run.make_plan(Options(device="cpu", text=short, seq_len=64))
    assert "tokens are too few for sequences of 64" in str(refused.value)
    with pytest.raises(DemoError) as refused:
        _run.make_plan(Options(device="cpu", text=binary))
    assert "is not UTF-8 text" in str(refused.value)


def test_default_text_fills_the_vocabulary() -> None:
    text, _ = read_text(None)
    tokenizer = train_tokenizer(text, _run.TOKENIZER_VOCAB)
    assert tokenizer.get_vocab_size() == _run.TOKENIZER_VOCAB
    tokens = encode(text, tokenizer, 512)
    assert tokens.numel() > 50_000
    assert tokenizer.decode(tokens[:200].tolist()) == text[: len(tokenizer.decode(tokens[:200].tolist()))]


def test_progress_on_a_terminal_and_off() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, lines in ((Terminal(), 1), (io.StringIO(), 11)):
        progress = Progress("train", 100, stream)
        for step in range(1, 101):
            progress.update(step, f"loss {step}")
        said = stream.getvalue()
        assert said.count("\n") == lines
        assert said.rstrip("\n").split("\n")[-1].count("100/100") == 1
        assert ("\x1b" in said) == stream.isatty()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """One real run, of a tiny model from a configuration file."""
    folder = tmp_path_factory.mktemp("demo")
    config = folder / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "vocab_size": 2048,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            }
        )
    )
    words = ["--model", str(config), "--steps", "12", "--batch-size", "2", "--seq-len", "64", "--lr", "1e-2"]
    assert cli.main(["demo", *words, "--device", "cpu", "--output", str(folder / "out")]) == 0
    return folder / "out", json.loads((folder / "out" / "demo.json").read_text())


def test_both_runs_follow_the_same_curve_and_learn(demo: tuple[Path, dict]) -> None:
    _, results = demo
    native, patched = results["native"]["losses"], results["patched"]["losses"]
    assert len(native) == len(patched) == 12
    # fp32 on a CPU: only the order of summation differs.
    assert results["compared"]["largest_loss_difference"] == max(
        abs(a - b) for a, b in zip(native, patched, strict=True)
    )
    assert results["compared"]["largest_loss_difference"] < 1e-4
    assert native[-1] < native[0] - 0.5


def test_run_is_measured_and_the_model_is_patched(demo: tuple[Path, dict]) -> None:
    folder, results = demo
    for run in (results["native"], results["patched"]):
        assert run["peak_bytes"] > run["baseline_bytes"] > 50 * 2**20
        assert run["tokens_per_second"] > 0
    assert results["native"]["patch_report"] is None
    assert "rms_norm" in results["patched"]["patch_report"]
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert results["environment"]["torch"] == torch.__version__


def test_figure_of_one_step(demo: tuple[Path, dict], tmp_path: Path) -> None:
    results = json.loads(json.dumps(demo[1]))
    for run in (results["native"], results["patched"]):
        run["losses"] = run["losses"][:1]
    draw(results, tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 10_000


def test_failure_of_a_run_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    # Three heads do not divide the width: the model cannot be built.
    config.write_text(
        json.dumps(
            {"model_type": "gpt2", "vocab_size": 1024, "n_embd": 64, "n_head": 3, "n_layer": 1, "n_positions": 64}
        )
    )
    words = ["demo", "--model", str(config), "--steps", "1", "--seq-len", "16", "--device", "cpu"]
    assert cli.main([*words, "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "tigon demo: the native run failed with exit code 1" in said
    assert "divisible by num_heads" in said
    assert not (tmp_path / "out").exists()
