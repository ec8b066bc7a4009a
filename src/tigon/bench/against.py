"""Another version of this package as a peer, in the same process, so that both are measured launch by launch."""

from __future__ import annotations

import atexit
import importlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from .peers import Peer

_NAME = "tigon_against"
# A copy that is imported under another name must register its operators under another name too.
_NAMESPACE = f'''def add_op_namespace_prefix(name: str) -> str:
    return f"{_NAME}::{{name}}"
'''


def _copy_sources(against: str, target: Path) -> None:
    folder = Path(against)
    if (folder / "src" / "tigon" / "__init__.py").is_file():
        shutil.copytree(folder / "src" / "tigon", target, ignore=shutil.ignore_patterns("__pycache__"))
        return
    here = Path(__file__).parent
    # From the top of the checkout, which is not the folder that this file is in.
    top = subprocess.run(["git", "rev-parse", "--show-toplevel"], cwd=here, capture_output=True, text=True)
    archived = subprocess.run(
        ["git", "archive", f"{against}:src/tigon"], cwd=top.stdout.strip() or here, capture_output=True
    )
    if archived.returncode:
        raise ValueError(
            "bench: --against: expected a folder with src/tigon or a revision of the checkout that tigon runs from, "
            f"got {against!r} ({archived.stderr.decode(errors='replace').strip()})"
        )
    with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as tar:
        tar.extractall(target, filter="data")


def load(against: str) -> Peer:
    """The operators of another revision, or of the checkout in a folder, as a peer called `tigon@...`.

    Raises:
        ValueError: `against` is neither a revision nor a folder with `src/tigon`, or was loaded before as another.
    """
    if _NAME in sys.modules:
        raise ValueError("bench: --against: expected one version in a process, got a second")
    parent = Path(tempfile.mkdtemp(prefix="tigon-against-"))
    try:
        _copy_sources(against, parent / _NAME)
        (parent / _NAME / "_ops.py").write_text(_NAMESPACE)
        sys.path.insert(0, str(parent))
        try:
            # Kernels are read from their files when they are compiled, so the folder stays until the process ends.
            ops = importlib.import_module(f"{_NAME}.ops").OPS
        finally:
            sys.path.remove(str(parent))
    except BaseException:
        shutil.rmtree(parent, ignore_errors=True)
        raise
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    return Peer(f"tigon@{Path(against).name}", _NAME, {name: op.public for name, op in ops.items()}, "tigon")
