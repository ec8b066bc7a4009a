"""Result rows as JSON lines, one file an operator and GPU, each row with everything needed to repeat it."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

# Files beside those of operators: rows of whole training steps, and of the longest sequences of such.
STEPS, LONGEST = "step.jsonl", "longest.jsonl"


@dataclass(frozen=True)
class Row:
    """One implementation in one mode on one case.

    Attributes:
        mode: "forward", "backward" or "both".
        device_ms: median kernel time with a cold cache; `low_ms` and `high_ms` are the 10th and 90th percentile.
        host_ms: median time until the call returns.
        graph_ms: median kernel time of one call in the replay of a CUDA graph, cold cache; 0 where it cannot be
            captured.
        peak_mib: memory above the inputs during forward and backward, the inputs being those of a layer inside a model:
            activations that only the graph holds, and weights.
        gbps: bytes that must move over `device_ms`; 0 for operators bound by matrix products.
        percent_of_roof: of the copy bandwidth, or of the matrix products alone, measured in the same run.
        graph_percent: the same for `graph_ms`.
        budget_used: error as a share of what the error budget allows; above 1 the result is not exact enough.
    """

    op: str
    case: str
    sizes: dict[str, int]
    dtype: str
    implementation: str
    version: str
    mode: str
    device_ms: float
    low_ms: float
    high_ms: float
    host_ms: float
    peak_mib: float
    gbps: float
    percent_of_roof: float
    budget_used: float
    gpu: str
    torch: str
    triton: str
    commit: str
    date: str
    command: str
    graph_ms: float = 0.0
    graph_percent: float = 0.0


def environment(command: str) -> dict[str, str]:
    """Fields of a row that are the same for a whole run."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
        "command": command,
    }


def version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """The commit of a checkout; TIGON_COMMIT names that of sources copied without it, or with another history."""
    if named := os.environ.get("TIGON_COMMIT"):
        return named
    here = Path(__file__).parent
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def gpu_folder(gpu: str) -> str:
    return gpu.lower().replace(" ", "-").replace("/", "-")


def write(rows: Iterable[Row], folder: Path) -> list[Path]:
    """Write rows to `folder/<gpu>/<op>.jsonl`, replacing earlier rows of the same op, case, dtype and mode."""
    written = []
    by_file: dict[Path, list[Row]] = {}
    for row in rows:
        by_file.setdefault(folder / gpu_folder(row.gpu) / f"{row.op}.jsonl", []).append(row)
    for path, fresh in by_file.items():
        replaced = {(r.case, r.dtype, r.mode) for r in fresh}
        kept = [r for r in (read(path) if path.exists() else []) if (r.case, r.dtype, r.mode) not in replaced]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(dataclasses.asdict(r)) + "\n" for r in kept + fresh))
        written.append(path)
    return written


def read(path: Path, kind: type[Any] = Row) -> list[Any]:
    """Rows of one file, which are all of one kind.

    Raises:
        ValueError: a line is not a row; the message names file and line.
    """
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            rows.append(kind(**json.loads(line)))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}:{number}: not a result row: {error}") from None
    return rows
