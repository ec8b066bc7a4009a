"""Choices of earlier processes: a file of the user's that says which way was the faster one, for a kind and size.

With it a restart and all ranks of a machine take the same ways, and nothing is tried twice. It is in TIGON_CACHE_DIR,
by default `tigon` in XDG_CACHE_HOME or ~/.cache; an empty TIGON_CACHE_DIR keeps nothing. What was measured on another
kind of device, with another version of torch or Triton or of these sources, is left aside. A file that cannot be read
or written is as good as none.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from ._triton import triton

logger = logging.getLogger("tigon")

# Kind and size: the way, and milliseconds of each.
Choices = dict[str, tuple[str, dict[str, float]]]


def path() -> Path | None:
    """Where the file is, or would be."""
    given = os.environ.get("TIGON_CACHE_DIR")
    if given == "":
        return None
    try:
        folder = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tigon"
    except RuntimeError:
        # No home.
        return None
    return folder / "choices.json"


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def environment(index: int) -> str:
    """What times depend on beside kind and size."""
    versions = f"torch {torch.__version__}, triton {getattr(triton, '__version__', 'none')}, sources {_sources()}"
    return f"{torch.cuda.get_device_name(index)}, {versions}"


def load(environment: str) -> Choices:
    """What was measured in this environment, without what is not of the form that `save` writes."""
    return {
        key: (value["way"], value["ms"])
        for key, value in _read().get(environment, {}).items()
        if _is_choice(value) and value["way"] in value["ms"]
    }


def load_all() -> dict[str, Choices]:
    """By environment, for people to read."""
    return {name: load(name) for name in _read()}


def save(environment: str, key: str, way: str, times: dict[str, float]) -> None:
    """Add one; what other processes have added meanwhile is kept but for a moment between reading and writing."""
    file = path()
    if file is None or not all(math.isfinite(ms) for ms in times.values()):
        return
    everything = _read()
    everything.setdefault(environment, {})[key] = {"way": way, "ms": times}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all for whoever reads meanwhile.
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            new = Path(folder, file.name)
            new.write_text(json.dumps(everything, indent=1))
            os.replace(new, file)
    except OSError as error:
        logger.debug("tigon: %s: %s; the choice is measured again in the next process", file, error)


def _read() -> dict[str, dict[str, Any]]:
    file = path()
    try:
        read = json.loads(file.read_text()) if file is not None else {}
    except (OSError, ValueError):
        return {}
    if not isinstance(read, dict):
        return {}
    return {name: part for name, part in read.items() if isinstance(part, dict)}


def _is_choice(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("way"), str) or not isinstance(value.get("ms"), dict):
        return False
    return all(isinstance(ms, (int, float)) for ms in value["ms"].values())
