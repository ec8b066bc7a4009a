"""How the fused loss of a patched model computes: options that reach every call of it, and stay with the model."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from tests.zoo import build as zoo
from torch import nn

import tigon
from tigon.patch import _head

# Three rows of logits of 61 classes in fp32 at once.
OPTIONS = {"memory": "min", "skip_ignored": True, "max_logits_bytes": 3 * 61 * 4}
OTHER = {"max_logits_bytes": None}


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Of each call of the fused loss, the options that say how."""
    calls: list[Any] = []
    operator = _head.linear_cross_entropy

    def seen(*args: Any, **kwargs: Any) -> Any:
        calls.append({name: kwargs[name] for name in _head.LOSS_OPTIONS if name in kwargs})
        return operator(*args, **kwargs)

    monkeypatch.setattr(_head, "linear_cross_entropy", seen)
    return calls


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def shifted(labels: torch.Tensor) -> torch.Tensor:
    return F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()


CALLS = {
    "labels": lambda ids, labels: {"input_ids": ids, "labels": labels},
    "count": lambda ids, labels: {"input_ids": ids, "labels": labels, "num_items_in_batch": torch.tensor(12)},
    "shifted": lambda ids, labels: {"input_ids": ids, "labels": labels, "shift_labels": shifted(labels)},
}


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Granite"])
@pytest.mark.parametrize("call", CALLS)
def test_they_reach_the_loss_which_stays_what_it_is(
    call: str, family: str, build: Any, batch: Any, step: Any, assert_same_step: Any, fused: list[Any]
) -> None:
    model, inputs = build(family), CALLS[call](batch["input_ids"], batch["labels"])
    native = step(model, inputs)
    tigon.patch(model, only=["linear_cross_entropy"], loss_options=OPTIONS)
    actual = step(model, inputs)
    assert_same_step(actual, native)
    assert "logits" not in actual["output"]
    assert fused == [OPTIONS]


@pytest.mark.kernels
def test_the_kernels_take_them(build: Any, batch: Any, step: Any, assert_same_step: Any, fused: list[Any]) -> None:
    model = build("Llama", num_hidden_layers=1)
    with tigon.backend("torch"):
        native = step(model, batch)
    tigon.patch(model, only=["linear_cross_entropy"], loss_options=OPTIONS)
    assert_same_step(step(model, batch), native)
    assert fused == [OPTIONS]


def test_they_reach_a_cross_entropy_in_the_forward(build: Any, batch: Any, fused: list[Any]) -> None:
    class Model(type(build("Llama"))):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            loss = nn.CrossEntropyLoss()(logits.view(-1, 61), labels.view(-1))
            return types.SimpleNamespace(loss=loss, logits=logits)

    model = Model(build("Llama").config).train()
    native = model(**batch).loss
    tigon.patch(model, loss_options=OPTIONS)
    torch.testing.assert_close(model(**batch).loss, native, rtol=1e-5, atol=1e-5)
    assert fused == [OPTIONS]


def test_no_valid_label_gives_zero_and_zero_gradients(build: Any, batch: Any, step: Any) -> None:
    batch["labels"] = torch.full_like(batch["labels"], -100)
    model = build("Llama")
    tigon.patch(model, loss_options={"skip_ignored": True})
    actual = step(model, batch)
    assert float(actual["loss"]) == 0.0
    assert all(not grad.any() for grad in actual["grads"].values())


def test_a_later_call_keeps_or_replaces_them_and_unpatch_removes_them(build: Any, batch: Any, fused: list[Any]) -> None:
    model = build("Llama")
    given = dict(OPTIONS)
    tigon.patch(model, loss_options=given)
    given.clear()
    for later, expected in ((None, OPTIONS), (OTHER, OTHER), ({}, {}), (OPTIONS, OPTIONS), (None, OPTIONS)):
        report = tigon.patch(model, loss_options=later)
        assert {row.reason for row in report} == {"already patched"}
        model(**batch)
        assert fused.pop() == expected
    tigon.unpatch(model)
    assert all("_tigon" not in module.__dict__ for module in model.modules())
    tigon.patch(model)
    model(**batch)
    assert fused == [{}]


def test_copies_have_their_own_and_pickles_get_them_back(build: Any, batch: Any, fused: list[Any]) -> None:
    model = build("Llama")
    tigon.patch(model, loss_options=OPTIONS)
    twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    tigon.patch(model, loss_options=OTHER)
    tigon.patch(loaded)
    for each in (model, twin, loaded):
        each(**batch)
    assert fused == [OTHER, OPTIONS, OPTIONS]


@pytest.mark.parametrize("when", ["before", "after"])
def test_they_pass_through_wrappers(when: str, build: Any, batch: Any, fused: list[Any]) -> None:
    peft = pytest.importorskip("peft")
    model = build("Llama")
    native = model(**batch).loss
    if when == "before":
        tigon.patch(model, loss_options=OPTIONS)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).train()
    if when == "after":
        tigon.patch(wrapped, loss_options=OPTIONS)
    torch.testing.assert_close(wrapped(**batch).loss, native, rtol=1e-5, atol=1e-5)
    assert fused == [OPTIONS]


def test_replicas_have_them(build: Any, batch: Any, fused: list[Any]) -> None:
    model = build("Llama")
    tigon.patch(model, loss_options=OPTIONS)
    replica = model.lm_head._replicate_for_data_parallel()
    replica.weight = model.lm_head.weight
    assert _head.loss_options_of(replica) == OPTIONS


def test_every_language_model_within_another_gets_them(fused: list[Any]) -> None:
    name = "Blip2ForConditionalGeneration"
    model = zoo.build(name)
    batch = zoo.make_batch(name, model)
    native = model(**batch).loss
    options = {"memory": "min", "skip_ignored": True}
    tigon.patch(model, loss_options=options)
    torch.testing.assert_close(model(**batch).loss, native, rtol=1e-5, atol=1e-5)
    inner = model.language_model
    inner(input_ids=batch["input_ids"], labels=batch["labels"])
    assert fused == [options, options]


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_leaves_only_skip_ignored_off(
    backend: str, build: Any, batch: Any, step: Any, assert_same_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("Llama", num_hidden_layers=1)
    native = step(model, batch)
    tigon.patch(model, loss_options=OPTIONS)
    traced: list[Any] = []
    chosen = _head._loss_options_now

    def seen(head: nn.Module, hidden: torch.Tensor) -> dict[str, Any]:
        options = chosen(head, hidden)
        traced.append(options)
        return options

    monkeypatch.setattr(_head, "_loss_options_now", seen)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    compiled.zero_grad()
    loss = compiled(**batch, use_cache=False).loss
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert_same_step({"loss": loss.detach(), "grads": grads}, native)
    assert traced == [{**OPTIONS, "skip_ignored": False}]
    # What is set later is seen by what is compiled, and calls that are not compiled skip.
    tigon.patch(model, loss_options={"memory": "default", "skip_ignored": True})
    torch.testing.assert_close(compiled(**batch, use_cache=False).loss, native["loss"], rtol=1e-5, atol=1e-5)
    model(**batch)
    assert traced[1:] == [{"memory": "default", "skip_ignored": skips} for skips in (False, True)]


WRONG = {
    "no mapping": (["memory"], r"loss_options: expected a mapping or None, got \['memory'\]"),
    "another option": ({"z_loss": 0.1}, "loss_options: expected one of 'memory', .*, got 'z_loss'"),
    "memory": ({"memory": "max"}, r"loss_options\['memory'\]: expected one of 'default', 'min', got 'max'"),
    "memory None": ({"memory": None}, r"loss_options\['memory'\]: expected one of 'default', 'min', got None"),
    "skip_ignored": ({"skip_ignored": 1}, r"loss_options\['skip_ignored'\]: expected True or False, got 1"),
    "float": ({"max_logits_bytes": 1e9}, r"\['max_logits_bytes'\]: expected a positive int or None, got 1000000000.0"),
    "bool": ({"max_logits_bytes": True}, r"\['max_logits_bytes'\]: expected a positive int or None, got True"),
    "negative": ({"max_logits_bytes": -1}, r"\['max_logits_bytes'\]: expected a positive int or None, got -1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_errors_and_change_nothing(case: str, build: Any) -> None:
    options, message = WRONG[case]
    model = build("Llama")
    before = [dict(module.__dict__) for module in model.modules()]
    with pytest.raises(ValueError, match=f"patch: .*{message}"):
        tigon.patch(model, loss_options=options)
    assert [dict(module.__dict__) for module in model.modules()] == before
    with pytest.raises(ValueError, match=f"patch_on_build: .*{message}"):
        tigon.patch_on_build(type(model), loss_options=options)


def test_less_than_a_row_of_logits_is_an_error(build: Any, batch: Any) -> None:
    model = build("Llama")
    with pytest.raises(ValueError, match=r"\['max_logits_bytes'\]: expected at least 244, one row of logits, got 243"):
        tigon.patch(model, loss_options={"max_logits_bytes": 243})
    assert all("_tigon" not in module.__dict__ for module in model.modules())
    tigon.patch(model, loss_options={"max_logits_bytes": 244})
    model(**batch).loss.backward()


def test_without_a_fused_loss_they_are_refused_with_the_reason(build: Any) -> None:
    model = build("Llama")
    model.loss_function = lambda logits, labels, **_: logits.float().mean()
    for changed, choice, message in (
        (
            model,
            {},
            r"(?s)expected a model whose loss is fused, got .*linear_cross_entropy +kept +its loss function is",
        ),
        (build("Llama"), {"skip": ["linear_cross_entropy"]}, r"(?s)whose loss is fused, got .*rms_norm"),
        (build("Llama").model, {}, r"(?s)whose loss is fused, got .*rms_norm"),
        (nn.Linear(2, 2), {}, r"whose loss is fused, got \nLinear: nothing recognised"),
    ):
        before = [dict(module.__dict__) for module in changed.modules()]
        with pytest.raises(ValueError, match=message):
            tigon.patch(changed, loss_options={}, **choice)
        assert [dict(module.__dict__) for module in changed.modules()] == before


def test_an_output_layer_that_is_another_since_patching_is_refused(build: Any, batch: Any, fused: list[Any]) -> None:
    model = build("Llama")
    tigon.patch(model)
    model.lm_head = nn.Linear(32, 61, bias=False)
    with pytest.raises(ValueError, match="adapted or exchanged after patching"):
        tigon.patch(model, loss_options=OPTIONS)
    tigon.unpatch(model)
    tigon.patch(model, loss_options=OPTIONS)
    model(**batch)
    assert fused == [OPTIONS]


def test_a_failure_midway_leaves_what_was_set(build: Any, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama")
    tigon.patch(model, loss_options=OPTIONS)

    def failing(modules: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(tigon.patch._apply, "_link", failing)
    with pytest.raises(RuntimeError, match="on purpose"):
        tigon.patch(model, loss_options=OTHER)
    assert _head.loss_options_of(model.lm_head) == OPTIONS


def test_models_built_afterwards_have_them(build: Any, batch: Any, fused: list[Any]) -> None:
    cls = transformers.LlamaForCausalLM
    native = build("Llama")(**batch).loss
    given = dict(OPTIONS)
    with tigon.patch_on_build(cls, loss_options=given), tigon.patch_on_build(cls):
        given.clear()
        model = build("Llama")
    torch.testing.assert_close(model(**batch).loss, native, rtol=1e-5, atol=1e-5)
    assert fused == [OPTIONS]
    with (
        tigon.patch_on_build(cls, only=["rms_norm"], loss_options=OPTIONS),
        pytest.raises(ValueError, match="whose loss is fused"),
    ):
        build("Llama")
