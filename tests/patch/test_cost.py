"""What patching and a patched step cost, in calls, which say the same on every machine."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tigon
from tigon.patch import _apply, _probe


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Calls by name: what walks a model, what inspects code, and what runs a module to see what it computes."""
    calls: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        native = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return native(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for owner, name in (
        (nn.Module, "named_modules"),
        (nn.Module, "get_submodule"),
        (inspect, "signature"),
        (inspect, "unwrap"),
        (_probe, "explained"),
    ):
        count(owner, name)
    return calls


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Phi3"])
def test_a_kind_of_module_is_probed_once_however_many_there_are(
    family: str, build: Any, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rotations are remembered by their function, for good.
    tigon.patch(build(family), only=["rope"])
    runs = []
    for layers in (2, 8):
        monkeypatch.setattr(_apply, "_verdicts", {})
        model = build(family, num_hidden_layers=layers)
        counts.clear()
        tigon.patch(model)
        runs.append(counts["explained"])
    assert runs[0] == runs[1] > 0
    tigon.unpatch(model)
    counts.clear()
    tigon.patch(model)
    assert counts["explained"] == 0


def test_a_model_of_32_layers_without_memory_is_walked_once(build: Any, counts: Counter[str]) -> None:
    with torch.device("meta"):
        model = build("Llama", hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32)
    counts.clear()
    assert tigon.patch(model).summary == "replaced 129 of 129 modules; loss: fused"
    # One recursive walk calls it once for each module; a few look at the parameters of a child, once for each kind.
    assert counts["named_modules"] < 2 * len(list(model.modules()))


def test_a_patched_step_walks_and_inspects_nothing(build: Any, batch: Any, counts: Counter[str]) -> None:
    model = build("Llama")
    for _ in range(2):
        # What is looked up once for a class is looked up in the first.
        counts.clear()
        model(**batch).loss.backward()
    native = Counter(counts)
    tigon.patch(model)
    for _ in range(2):
        counts.clear()
        model(**batch).loss.backward()
        # Less than natively is fine.
        assert counts <= native, counts - native
