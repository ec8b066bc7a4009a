"""Language models that hold another: one loss, made by the outermost, and outputs as the native ones are."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.zoo import build as zoo
from torch import nn

import tigon
from tigon.patch import _head

# A decoder whose logits the outer model slices, one that the outer model calls with the labels of its own, one whose
# outer model only hands labels on, and one whose outer and inner model share the output layer.
CLASSES = (
    "Blip2ForConditionalGeneration",
    "InstructBlipForConditionalGeneration",
    "Kosmos2ForConditionalGeneration",
    "Llama4ForConditionalGeneration",
)
NESTED = pytest.mark.parametrize("name", CLASSES)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    operator = _head.linear_cross_entropy
    monkeypatch.setattr(_head, "linear_cross_entropy", lambda *a, **k: calls.append(k) or operator(*a, **k))
    return calls


def shifted(batch: dict[str, Any]) -> torch.Tensor:
    """Not what shifting the labels gives."""
    labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].clone()
    labels[:, 4:6] = -100
    return labels


def made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    model = zoo.build(name)
    return model, zoo.make_batch(name, model)


def shapes(value: Any) -> Any:
    """What an output holds, with shapes for tensors. Fields named logits are left out, in tuples they are None."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return {key: shapes(item) for key, item in value.items() if key != "logits"}
    if isinstance(value, (tuple, list)):
        return [shapes(item) for item in value]
    return type(value)


@NESTED
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_shifted_labels_are_used_once_by_the_outermost(name: str, training: bool, fused: list[Any]) -> None:
    model, batch = made(name)
    model.train(training)
    batch["shift_labels"] = shifted(batch)
    native = model(**batch)
    tigon.patch(model, only=["linear_cross_entropy"])
    output = model(**batch)
    torch.testing.assert_close(output.loss, native.loss, rtol=1e-5, atol=1e-5)
    assert len(fused) == training
    assert shapes(output) == shapes(native)
    assert output.keys() == native.keys() - ({"logits"} if training else set())
    del batch["labels"]
    torch.testing.assert_close(model(**batch).loss, native.loss, rtol=1e-5, atol=1e-5)
    if training:
        kept = model(**batch, skip_logits=False)
        torch.testing.assert_close(kept.logits, native.logits, rtol=1e-4, atol=1e-5)
        assert type(kept.logits) is torch.Tensor
        assert len(fused) == 2


@NESTED
def test_tuples_keep_their_positions_at_every_level(name: str) -> None:
    model, batch = made(name)
    native = model(**batch, return_dict=False)
    tigon.patch(model, only=["linear_cross_entropy"])
    output = model(**batch, return_dict=False)
    flat, wanted = (torch.utils._pytree.tree_leaves(each, lambda x: x is None) for each in (output, native))
    assert len(flat) == len(wanted)
    logits = native[1].shape
    for got, want in zip(flat, wanted, strict=True):
        assert type(got) is (type(None) if want.shape == logits else torch.Tensor)
        if got is not None:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@NESTED
def test_nested_models_have_the_native_gradients(name: str, step: Any, fused: list[Any]) -> None:
    model, batch = made(name)
    native = step(model, batch)["grads"]
    tigon.patch(model, only=["linear_cross_entropy"])
    grads = step(model, batch)["grads"]
    assert len(fused) == 1
    assert grads.keys() == native.keys()
    # Of the gradient of a key bias, which cancels, rounding is left.
    rounding = 1e-7 * max(grad.abs().max() for grad in native.values())
    for key, want in native.items():
        assert (grads[key] - want).abs().max() <= 1e-4 * want.abs().max() + rounding, key


@NESTED
def test_nothing_is_left_on_nested_models(name: str) -> None:
    model, batch = made(name)
    before = [dict(module.__dict__) for module in model.modules()]
    tigon.patch(model)
    model(**batch)
    tigon.patch(model)
    tigon.unpatch(model)
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_an_inner_model_is_the_outermost_when_it_is_called_by_itself() -> None:
    model, batch = made("Llama4ForConditionalGeneration")
    tigon.patch(model)
    model(**batch)
    inner = model.language_model
    ids = batch["input_ids"]
    output = inner(ids, shift_labels=shifted(batch))
    assert (output.loss is not None, "logits" in output) == (True, False)
    with pytest.raises(ValueError, match="skip_logits=True"):
        inner(ids, skip_logits=True)


def test_a_model_that_hands_labels_on_has_no_row_of_its_own() -> None:
    model, batch = made("Kosmos2ForConditionalGeneration")
    report = tigon.patch(model, only=["linear_cross_entropy"], strict=True)
    assert [row.modules for row in report] == [("text_model",)]
    with pytest.raises(ValueError, match="skip_logits=True"):
        model(**{key: value for key, value in batch.items() if key != "labels"}, skip_logits=True)
    assert model.eval()(**batch, skip_logits=True).logits is None


def test_copies_and_an_outer_model_that_is_patched_last_know_their_own_inner_models(fused: list[Any]) -> None:
    model, batch = made("Llama4ForConditionalGeneration")
    batch["shift_labels"] = shifted(batch)
    native = model(**batch).loss
    tigon.patch(model, only=["language_model"])
    torch.testing.assert_close(model(**batch).loss, native, rtol=1e-5, atol=1e-5)
    assert not fused
    report = tigon.patch(model, only=["linear_cross_entropy"])
    assert [row.reason for row in report] == ["", "already patched"]
    twin = copy.deepcopy(model)
    for each in (model, twin):
        torch.testing.assert_close(each(**batch).loss, native, rtol=1e-5, atol=1e-5)
    assert len(fused) == 2
    tigon.unpatch(model)
    assert model(**batch).logits is not None
    assert twin(**batch).logits is None


def test_an_inner_model_that_another_thread_calls_meanwhile_is_its_outermost() -> None:
    model, batch = made("Llama4ForConditionalGeneration")
    native = model(**batch).loss
    tigon.patch(model, only=["linear_cross_entropy"])
    inner, seen = model.language_model, []

    def call_from_another(*_: Any) -> None:
        handle.remove()
        thread = threading.Thread(target=lambda: seen.append(inner(batch["input_ids"], shift_labels=shifted(batch))))
        thread.start()
        thread.join()

    handle = inner.model.register_forward_pre_hook(call_from_another)
    torch.testing.assert_close(model(**batch).loss, native, rtol=1e-5, atol=1e-5)
    assert (seen[0].loss is not None, "logits" in seen[0]) == (True, False)
