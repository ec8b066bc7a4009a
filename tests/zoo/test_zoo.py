"""Patched equals native, for every language model class that the installed transformers has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import filelock
import pytest

import tigon
from tigon.patch._forms import FORM_NAMES

from . import build as zoo
from .compare import KINDS, LOSS, Record
from .table import render, totals, versions

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "architectures.md"

# What is reached, on the versions of requirements-dev.txt; to be raised with the patcher, never lowered.
CLASSES = 243
FLOORS = {"norm": 1775, "mlp": 309, "rope": 360, "experts": 88, "loss": 237, "complete": 218}


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    """Records by class of one sweep, which the first worker that needs them runs for all."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    file = shared / "zoo.jsonl"
    with filelock.FileLock(f"{file}.lock"):
        if not file.exists():
            source = str(Path(tigon.__file__).parents[1])
            path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
            command = [sys.executable, "-m", "tests.zoo", "--json", str(file)]
            environment = {**os.environ, "PYTHONPATH": path}
            result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            assert file.exists(), result.stderr
    return {record["name"]: record for record in map(json.loads, file.read_text(encoding="utf-8").splitlines())}


def test_every_form_is_counted_as_some_kind() -> None:
    counted = {form for forms in KINDS.values() for form in forms}
    assert set(FORM_NAMES) <= {*counted, LOSS}


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.classes())
def test_patched_equals_native(name: str, records: dict[str, Record]) -> None:
    record = records[name]
    if record["native"]:
        pytest.skip(f"does not train natively: {record['native']}")
    assert record["wrong"] == []


@pytest.mark.slow
def test_coverage_does_not_fall(records: dict[str, Record]) -> None:
    assert sum(not record["native"] for record in records.values()) >= CLASSES
    reached = {key: number for key, (number, _) in totals(records.values()).items()}
    assert set(reached) == set(FLOORS)
    fallen = {key: f"{number}, floor {FLOORS[key]}" for key, number in reached.items() if number < FLOORS[key]}
    assert not fallen


@pytest.mark.slow
def test_the_table_is_that_of_this_patcher(records: dict[str, Record]) -> None:
    committed = TABLE.read_text(encoding="utf-8")
    if versions() not in committed:
        pytest.skip("the table was made with other versions")
    assert render(list(records.values()), zoo.classes()) == committed, "run `make zoo`"
