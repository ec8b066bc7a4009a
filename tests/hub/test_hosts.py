"""Every class and function of transformers that carries a name is one that its layer knows."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import nn

from tigon.layers import _host

pytestmark = pytest.mark.usefixtures("tables")
MODELS = Path(transformers.__file__).parent / "models"
TAGS = ("RMSNorm", "RMSNormZeroCentered", "RMSNormGated", "rotary_pos_emb")


def hosts(*tags: str) -> Iterator[tuple[str, str, Any]]:
    """Name of a tag, of a module and what carries the tag."""
    tag = re.compile(rf'@use_kernel_forward_from_hub\("({"|".join(tags)})"\)\n(?:class|def) (\w+)')
    for file in sorted(MODELS.glob("*/modeling_*.py")):
        found = tag.findall(file.read_text(encoding="utf-8"))
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}") if found else None
        yield from ((name, file.parent.name, getattr(module, host)) for name, host in found)


def form(tag: str, host: Any) -> Any:
    if tag == "rotary_pos_emb":
        return _host.rope_form(type(host), False) or _host.rope_form(type(host), True)
    if tag == "RMSNormGated":
        return _host.gated_norm_form(host, "silu") and _host.gated_norm_form(host, "sigmoid")
    return _host.norm_form(host)


def test_every_tagged_host_is_known() -> None:
    count, unknown = 0, []
    for tag, module, host in hosts(*TAGS):
        count += 1
        if form(tag, host) is None:
            unknown.append((tag, module, getattr(host, "__name__", host)))
    assert not unknown
    assert count >= 200


def test_forwards_under_one_name_take_as_many_arguments() -> None:
    """`kernels` looks at the first host of a name alone."""
    expected = {"RMSNorm": 1, "RMSNormZeroCentered": 1, "RMSNormGated": 2, "rotary_pos_emb": 5}
    for tag, module, host in hosts(*TAGS):
        kind = type(host) if isinstance(host, nn.Module) else host
        assert len(inspect.signature(kind.forward).parameters) == 1 + expected[tag], (tag, module)
