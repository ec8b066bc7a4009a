"""torch.compile of patched models: no graph break, the same step, and either order of patching and compiling."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tigon


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Phi3"])
def test_b118_a_training_step_is_one_graph(
    family: str, backend: str, build: Any, batch: Any, step: Any, assert_same_step: Any
) -> None:
    model = build(family, num_hidden_layers=1)
    native = step(model, batch)
    tigon.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    compiled.zero_grad()
    output = compiled(**batch, use_cache=False)
    assert output.logits is None
    output.loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert_same_step({"loss": output.loss.detach(), "grads": grads}, native)
    # The flag that defers the logits is down again.
    logits = compiled(batch["input_ids"], use_cache=False).logits
    torch.testing.assert_close(logits, model(batch["input_ids"]).logits, rtol=1e-5, atol=1e-5)


def test_shapes_may_be_dynamic(build: Any, batch: Any) -> None:
    model = build("Llama", num_hidden_layers=1)
    native = copy.deepcopy(model)
    tigon.patch(model)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    for length in (9, 7, 5):
        inputs = {key: value[:, :length] for key, value in batch.items()}
        loss = compiled(**inputs, use_cache=False).loss
        torch.testing.assert_close(loss, native(**inputs).loss, rtol=1e-5, atol=1e-5)


def test_patching_after_compiling_takes_effect(build: Any, batch: Any) -> None:
    model = build("Llama", num_hidden_layers=1)
    compiled = torch.compile(model, backend="eager")
    native = compiled(**batch, use_cache=False)
    assert native.logits is not None
    report = tigon.patch(compiled)
    assert {row.form for row in report} == {"rms_norm", "glu", "rope", "linear_cross_entropy"}
    output = compiled(**batch, use_cache=False)
    assert output.logits is None
    torch.testing.assert_close(output.loss, native.loss, rtol=1e-5, atol=1e-5)
    tigon.unpatch(compiled)
    assert compiled(**batch, use_cache=False).logits is not None
