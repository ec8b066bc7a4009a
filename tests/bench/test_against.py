"""Another version of the package can be measured in the same process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tigon.bench import against

ROOT = Path(__file__).parents[2]
_TRY = """
import sys, torch, tigon
from tigon.bench import against
peer = against.load(sys.argv[1])
x = torch.randn(3, 8)
assert peer.provides["rms_norm"] is not tigon.rms_norm
assert torch.equal(peer.provides["rms_norm"](x), tigon.rms_norm(x))
torch.compile(peer.provides["rms_norm"], fullgraph=True, backend="aot_eager")(x)
print(peer.name, peer.is_available)
"""


def _in_own_process(argument: str) -> str:
    done = subprocess.run([sys.executable, "-c", _TRY, argument], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_folder_is_loaded() -> None:
    assert _in_own_process(str(ROOT)) == f"tigon@{ROOT.name} True"


def test_a_revision_is_loaded() -> None:
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("not a checkout")
    assert _in_own_process("HEAD") == "tigon@HEAD True"


def test_anything_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--against: expected a folder with src/tigon or a revision"):
        against.load(str(tmp_path / "nothing"))
