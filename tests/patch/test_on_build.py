"""Models that are patched as they are built, and patching from several threads."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import tigon
from tigon.patch import _apply, _on_build

LLAMA = transformers.LlamaForCausalLM


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    init = LLAMA.__dict__["__init__"]
    yield
    assert LLAMA.__dict__["__init__"] is init
    assert not _on_build._asked


def is_patched(model: nn.Module) -> bool:
    return any("_tigon" in module.__dict__ for module in model.modules())


def test_models_built_afterwards_are_patched_until_the_end(build: Any, batch: Any) -> None:
    earlier = build("Llama")
    native = earlier(**batch).loss
    signature = inspect.signature(LLAMA)
    handle = tigon.patch_on_build(LLAMA)
    assert handle.report is None
    assert inspect.signature(LLAMA) == signature
    model = build("Llama")
    assert handle.report.summary == "replaced 9 of 9 modules; loss: fused"
    output = model(**batch)
    assert "logits" not in output
    torch.testing.assert_close(output.loss, native, rtol=1e-5, atol=1e-5)
    handle.remove()
    handle.remove()
    assert not is_patched(earlier)
    assert not is_patched(build("Llama"))
    assert is_patched(model)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_loaded_and_tied_after_patching(tied: bool, build: Any, batch: Any, tmp_path: Path) -> None:
    source = build("Llama", tie_word_embeddings=tied)
    native = source(**batch).loss
    source.save_pretrained(tmp_path)
    with tigon.patch_on_build(LLAMA, strict=True):
        models = [
            LLAMA.from_pretrained(tmp_path),
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path),
        ]
        with torch.device("meta"):
            empty = LLAMA(source.config)
    empty.to_empty(device="cpu").load_state_dict(source.state_dict())
    # Buffers that no state dict holds.
    empty.model.rotary_emb = copy.deepcopy(source.model.rotary_emb)
    empty.tie_weights()
    for model in (*models, empty):
        output = model.train()(**batch)
        assert "logits" not in output
        torch.testing.assert_close(output.loss, native, rtol=1e-5, atol=1e-5)
        output.loss.backward()
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert model.lm_head.weight.grad is not None
        tigon.unpatch(model)
        assert not is_patched(model)


def test_other_classes_are_left_alone_subclasses_too(build: Any) -> None:
    class Heir(LLAMA):
        pass

    class Finished(LLAMA):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            assert not is_patched(self)
            self.extra = nn.Linear(2, 2)

    config = build("Llama").config
    classes = {cls: dict(vars(cls)) for cls in (*LLAMA.__mro__[1:-1], Heir, Finished, transformers.MistralForCausalLM)}
    with tigon.patch_on_build(LLAMA):
        assert all(dict(vars(cls)) == before for cls, before in classes.items())
        assert not any(is_patched(model) for model in (Heir(config), Finished(config), build("Mistral")))
        with tigon.patch_on_build(Heir), tigon.patch_on_build(Finished):
            assert is_patched(Heir(config))
            assert is_patched(Finished(config))
            assert is_patched(build("Llama"))
    assert "__init__" not in vars(Heir)
    assert not is_patched(Heir(config))


def test_a_class_is_asked_twice_and_each_handle_ends_its_own_part(build: Any) -> None:
    def forms(model: nn.Module) -> set[str]:
        return {module._tigon.form for module in model.modules() if "_tigon" in module.__dict__}

    first = tigon.patch_on_build(LLAMA, only="rms_norm")
    second = tigon.patch_on_build(LLAMA, only=iter(["glu"]))
    for _ in range(2):
        assert forms(build("Llama")) == {"rms_norm", "glu"}
    first.remove()
    assert forms(build("Llama")) == {"glu"}
    second.remove()


def test_something_that_wraps_the_constructor_later_is_left_in_place(build: Any) -> None:
    native = LLAMA.__init__
    handle = tigon.patch_on_build(LLAMA)
    ours = LLAMA.__init__
    LLAMA.__init__ = lambda self, *args: ours(self, *args)
    assert is_patched(build("Llama"))
    handle.remove()
    assert not is_patched(build("Llama"))
    LLAMA.__init__ = native


def test_strict_raises_from_the_constructor(build: Any) -> None:
    with tigon.patch_on_build(transformers.Gemma2ForCausalLM, strict=True), pytest.raises(ValueError, match="strict"):
        build("Gemma2", hidden_activation="gelu_10")


@pytest.mark.parametrize("thing", [None, "LlamaForCausalLM", int, nn.Linear(2, 2)])
def test_things_that_are_no_module_classes_are_errors(thing: Any) -> None:
    with pytest.raises(ValueError, match=r"patch_on_build: cls: expected a class of torch\.nn\.Module"):
        tigon.patch_on_build(thing)


def test_threads_patch_and_unpatch_one_at_a_time(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing remembered, so that every thread probes; a probe sets torch's default dtype."""
    monkeypatch.setattr(_apply, "_verdicts", {})
    models = [build(family) for family in ("Llama", "Gemma2", "Qwen3", "Phi3")]
    before = [[dict(module.__dict__) for module in model.modules()] for model in models]
    inside, most, errors = 0, 0, []
    findings = _apply._findings

    def counted(*args: Any) -> Any:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        try:
            return findings(*args)
        finally:
            inside -= 1

    monkeypatch.setattr(_apply, "_findings", counted)

    def work(model: nn.Module) -> None:
        try:
            for _ in range(2):
                tigon.patch(model, strict=True)
                tigon.unpatch(model)
        except BaseException as error:
            errors.append(error)

    torch.set_default_dtype(torch.float64)
    try:
        threads = [threading.Thread(target=work, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert not errors
    assert most == 1
    assert [[dict(module.__dict__) for module in model.modules()] for model in models] == before
