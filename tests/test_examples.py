"""The examples run as a reader would run them, on plain torch, and do what their text says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(name: str, *words: str, processes: int = 1) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "TIGON_"))}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT / "src"), env.get("PYTHONPATH"))))
    start = [] if processes == 1 else ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command = [sys.executable, *start, str(ROOT / "examples" / name), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    assert processes > 1 or "Warning" not in done.stderr, done.stderr
    return done.stdout


def test_own_loop() -> None:
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", run("own_loop.py", "--steps", "30"))]
    assert losses[0] > 6.9
    assert losses[-1] < 0.5


def test_dpo_and_grpo() -> None:
    out = run("dpo_and_grpo.py", "--steps", "16")
    read, loss, accuracy, reward = (
        [float(x) for x in re.findall(pattern, out)]
        for pattern in (r"read.+loss ([\d.]+)", r"dpo.+loss ([\d.]+)", r"accuracy ([\d.]+)", r"reward ([\d.]+)")
    )
    assert read[-1] < 3.0 < read[0]
    assert loss[0] == 0.693  # the model is its own reference yet
    assert loss[-1] < 0.5
    assert accuracy[-1] == 1.0
    assert reward[-1] > 2 * reward[0]


def test_patch_model() -> None:
    out = run("patch_model.py")
    assert "linear_cross_entropy" in out
    native, patched = re.search(r"native ([\d.]+)  patched ([\d.]+)", out).groups()
    assert abs(float(native) - float(patched)) < 1e-5
    assert float(re.search(r"largest relative difference ([\d.e+-]+)", out)[1]) < 1e-5
    assert "in training: None" in out
    assert "as before: True" in out


def test_hf_trainer() -> None:
    out = run("hf_trainer.py", "--steps", "6")
    losses = [float(x) for x in out.splitlines()[-1].removeprefix("losses ").split()]
    assert losses[-1] < losses[0] < 5.6


def test_hf_trainer_in_two_processes() -> None:
    out = run("hf_trainer.py", "--steps", "3", "--fsdp", processes=2)
    # Both say the same mean.
    first, second = (line for line in out.splitlines() if line.startswith("losses "))
    assert first == second
    losses = [float(x) for x in first.removeprefix("losses ").split()]
    assert losses[-1] < losses[0] < 5.6


def test_fsdp2() -> None:
    out = run("fsdp2.py", "--steps", "6", processes=2)
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", out)]
    assert losses[-1] < losses[0] < 5.7
    assert "replaced 9 of 9 modules; loss: fused" in out
    assert "21 tensors to save" in out


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_is_short_and_tested(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 130
    assert path.name in Path(__file__).read_text()
