"""A folder that `kernels` loads: the operators, losses and layers as they are, without the rest of the package.

Nothing but the standard library is imported here, so that a wheel can be built with such a folder in it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
BACKENDS = ("cpu", "cuda", "rocm", "xpu")
PORTABLE = ("_ops.py", "layers", "losses", "ops")
# Raised when a layer is taken away or changes what it computes; added ones need none.
VERSION = 1


def export(directory: str | Path, *, force: bool = False) -> Path:
    """Write a repository for `kernels` into `directory`.

    It holds the portable folders, unchanged, once for each backend that torch may have been built for; a card, the
    licence, a script for `kernels benchmark`, and tests that run on the copy with torch and pytest alone. Operators of
    the copy are registered under a name with a hash of its content, so that it can be loaded beside the installed
    package.

    Args:
        directory: is made; must be empty, or an earlier export with `force`.
        force: whether an earlier export is replaced.

    Returns:
        `directory`, absolute.

    Raises:
        FileExistsError: there is something in `directory`.
    """
    root = Path(directory).absolute()
    is_ours = (root / "build" / "torch-cpu" / "metadata.json").is_file()
    if root.exists() and (not root.is_dir() or any(root.iterdir())) and not (force and is_ours):
        hint = "; --force replaces an earlier export" if is_ours else ""
        raise FileExistsError(f"{root}: expected an empty folder, or none{hint}")
    for backend in BACKENDS:
        export_backend(root, backend)
    templates = Path(__file__).parent / "exported"
    card = (templates / "card.md").read_text(encoding="utf-8")
    (root / "README.md").write_text(card.replace("TIGON_VERSION", _package_version()), encoding="utf-8")
    for name, folder in (("benchmark.py", "benchmarks"), ("test_kernel.py", "tests")):
        (root / folder).mkdir(exist_ok=True)
        shutil.copyfile(templates / name, root / folder / name)
    for file in _licences():
        shutil.copyfile(file, root / file.name)
    return root


def export_backend(root: Path, backend: str) -> None:
    """The folder of one backend."""
    folder = root / "build" / f"torch-{backend}"
    if folder.exists():
        shutil.rmtree(folder)
    for file in _sources():
        target = folder / file.relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    name = f"tigon_{backend}_{content_hash()}"
    (folder / "_ops.py").write_text(_OPS.format(name=name), encoding="utf-8")
    (folder / "__init__.py").write_text(_INIT.format(version=_package_version()), encoding="utf-8")
    metadata = {
        "name": "tigon",
        "id": f"_{name}",
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")


def content_hash() -> str:
    """Of everything that is copied."""
    digest = hashlib.sha256()
    for file in _sources():
        digest.update(file.relative_to(PACKAGE).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def repository() -> Path:
    """A repository of this version: that of the wheel, or, where there is none, one made in the user's cache."""
    packaged = Path(__file__).parent / "repository"
    if packaged.is_dir():
        return packaged
    from ..ops._choice_file import path as choices

    file = choices()
    if file is None:
        raise FileNotFoundError(
            "repository: TIGON_CACHE_DIR is empty, so there is no place for one: use tigon.hub.export"
        )
    root = file.parent / "hub" / content_hash()
    if not (root / "README.md").is_file():
        # Whole or not at all, whoever else makes it meanwhile.
        root.parent.mkdir(parents=True, exist_ok=True)
        made = export(root.with_name(f"{root.name}.{_unique()}"))
        try:
            made.rename(root)
        except OSError:
            shutil.rmtree(made)
    return root


def _unique() -> str:
    import uuid

    return uuid.uuid4().hex[:8]


def _sources() -> Iterator[Path]:
    for part in PORTABLE:
        path = PACKAGE / part
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def _package_version() -> str:
    found = re.search(r'^__version__ = "(.+)"', (PACKAGE / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else "unknown"


def _licences() -> Iterator[Path]:
    names = ("LICENSE", "NOTICE")
    in_tree = [PACKAGE.parents[1] / name for name in names]
    if all(file.is_file() for file in in_tree):
        yield from in_tree
        return
    import importlib.metadata

    for file in importlib.metadata.files("tigon") or ():
        if file.name in names:
            yield Path(str(file.locate()))


_OPS = '''"""Namespace of the registered operators, which is that of this copy alone."""


def add_op_namespace_prefix(name: str) -> str:
    return f"{name}::{{name}}"
'''
_INIT = '''"""The operators, losses and layers of tigon {version}."""

from . import layers, losses, ops
from .ops import *  # noqa: F403

__all__ = [*ops.__all__, "layers", "losses"]
'''
