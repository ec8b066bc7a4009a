"""Answer `import liger_kernel` with tigon, in this process.

    import tigon.as_liger
    from liger_kernel.transformers import apply_liger_kernel_to_llama

The package `liger_kernel` lies beside this file. It is found under its own name only after this import, or when the
distribution in `compat/liger_kernel` is installed, which does nothing but this import.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

NAME = "liger_kernel"
_HERE = Path(__file__).parent / NAME
# What the one file of the distribution is known by.
_MARK = "tigon.as_liger"


def install() -> None:
    """Put the package into `sys.modules` under its own name; done by importing this module.

    Raises:
        ImportError: Liger-Kernel itself is installed or imported.
    """
    other = _other()
    if other:
        raise ImportError(
            f"tigon.as_liger: liger_kernel is already there, {other}. One process can have one of the two:"
            f" `pip uninstall liger-kernel` first, or do not import tigon.as_liger"
        )
    if not _is_ours(sys.modules.get(NAME)):
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.append(_Finder())
        spec = _spec()
        module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
        assert spec.loader is not None
        spec.loader.exec_module(module)
    # Asked before, transformers remembers that there is none.
    remembered = getattr(sys.modules.get("transformers.utils.import_utils"), "is_liger_kernel_available", None)
    if hasattr(remembered, "cache_clear"):
        remembered.cache_clear()


def _spec() -> ModuleSpec:
    spec = importlib.util.spec_from_file_location(NAME, _HERE / "__init__.py", submodule_search_locations=[str(_HERE)])
    assert spec is not None
    return spec


def _is_ours(module: Any) -> bool:
    return str(_HERE) in [str(path) for path in getattr(module, "__path__", ())]


def _other() -> str:
    """Where another package of this name is; "" if nowhere."""
    module = sys.modules.get(NAME)
    if _is_ours(module):
        return ""
    file = getattr(module, "__file__", None)
    if module is None:
        spec = importlib.util.find_spec(NAME)
        # A folder of this name without __init__.py is no package of anybody's.
        file = None if spec is None else spec.origin
    elif file is None:
        return f"imported as {module!r}"
    if file is None:
        return ""
    folder = Path(file).parent
    if folder == _HERE:
        return ""
    if _MARK not in Path(file).read_text(encoding="utf-8"):
        return f"in {folder}"
    rest = {path.name for path in folder.iterdir()} - {"__init__.py", "__pycache__"}
    return f"with other files in {folder}: {', '.join(sorted(rest))}" if rest else ""


class _Distribution(importlib.metadata.Distribution):
    """What the package is to those who ask `importlib.metadata` for it."""

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            version = importlib.import_module(NAME).__version__
            return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n"
        return f"{NAME}\n" if filename == "top_level.txt" else None

    def locate_file(self, path: Any) -> Any:
        return _HERE.parent / path


class _Finder(importlib.metadata.DistributionFinder):
    """Finds the package again where it was taken out of `sys.modules`, and its metadata; says of modules that
    Liger-Kernel has and this package has not why that is so."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == NAME:
            return _spec()
        if name.startswith(f"{NAME}.") and _is_ours(sys.modules.get(NAME)):
            sys.modules[NAME].refuse_module(name)
        return None

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        name = getattr(context, "name", None)
        asked = None if name is None else re.sub(r"[-_.]+", "-", name).lower()
        if asked in (None, "liger-kernel"):
            yield _Distribution()


install()
