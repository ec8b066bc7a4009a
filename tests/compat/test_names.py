"""Every public name of Liger-Kernel is answered with its signature, or refused by name, as docs/liger.md says."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from tests.compat.__main__ import PAGE, page_with_table

SURFACE = Path(__file__).parent / "surface.txt"


def rows() -> dict[str, list[tuple[str, str]]]:
    by_module: dict[str, list[tuple[str, str]]] = {}
    for line in SURFACE.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            module, name, signature = (*line.split(" ", 2), "")[:3]
            by_module.setdefault("" if module == "." else f".{module}", []).append((name, signature))
    return by_module


ROWS = rows()


def shown(function: Any) -> str:
    parameters = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in inspect.signature(function).parameters.values()
        if each.name != "self"
    ]
    return str(inspect.Signature(parameters))


def signature_of(value: Any) -> str:
    if not isinstance(value, type):
        return shown(value)
    if hasattr(value, "apply") and not hasattr(value, "forward"):
        return "apply" + shown(value.apply)
    return shown(value.__init__) + (f" -> {shown(value.forward)}" if hasattr(value, "forward") else "")


def same(ours: str, theirs: str) -> bool:
    return ours.replace("1e-06", "1e-6").replace(" ", "") == theirs.replace(" ", "")


def answer(module: str, name: str) -> Any:
    """The value, or the message of the ImportError; AttributeError is no answer."""
    namespace: dict[str, Any] = {}
    try:
        exec(f"from liger_kernel{module} import {name} as value", namespace)
    except ImportError as error:
        return str(error)
    return namespace["value"]


@pytest.mark.parametrize("module", ROWS, ids=lambda module: module or "liger_kernel")
def test_names_are_answered_or_refused(module: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, signature in ROWS[module]:
        value = answer(module, name)
        if isinstance(value, str):
            assert "tigon has no counterpart yet" in value, value
            assert not signature, f"liger_kernel{module}.{name} was answered before"
            # A parent that is refused is the one that is named.
            assert f"liger_kernel{module}.{name}".startswith(value.partition(":")[0])
            path = module.removeprefix(".")
            parents = [path[: match.start()] for match in re.finditer(r"\.|$", path)]
            shown_as = [name, *parents] + (["lce_forward"] if path.startswith("transformers.model.") else [])
            assert any(f"`{each}`" in page for each in shown_as), f"{path}.{name} is not in {PAGE.name}"
        elif signature and signature != "?":
            ours = signature_of(value)
            if "?" in signature:
                # It has the constructor of a base class.
                ours = "? -> " + ours.partition(" -> ")[2]
            elif " -> " not in signature:
                # It has the forward of a base class.
                ours = ours.partition(" -> ")[0]
            assert same(ours, signature), f"{name}: {ours}, expected {signature}"


def test_unknown_names_are_attribute_errors(liger: Any) -> None:
    for module in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.ops", "liger_kernel.functional"):
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            importlib.import_module(module).nothing  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("liger_kernel.nothing")


def test_the_page_shows_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_with_table(page), "run python -m tests.compat"


def test_no_name_is_answered_and_refused() -> None:
    from liger_kernel._missing import FEATURES

    refused = {name for feature in FEATURES for name in feature.names.split()}
    given = {name for names in ROWS.values() for name, signature in names if signature}
    # `softmax`, `jsd` and `kl_div` are functions of one module and files of others.
    # Of `chunked_loss`; those of `ops` and `transformers` under the same names are others.
    assert refused & given == {"LigerFusedLinearJSDFunction", "liger_fused_linear_jsd"}


def test_all_of_transformers_is_known() -> None:
    import liger_kernel.transformers as module

    known = {name for name, _ in ROWS[".transformers"]}
    assert len(known) >= 84
    assert set(module.__all__) <= known | {"is_transformers_available"}
    for name in known - set(module.__all__):
        assert isinstance(answer(".transformers", name), str), f"{name} is missing in __all__"
