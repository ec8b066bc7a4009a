"""The functions that apply to models: flags, classes, instances, and what is refused."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from tests.compat.conftest import batch, config_of
from torch import nn

import tigon


@pytest.fixture(autouse=True)
def _plain_torch() -> Iterator[None]:
    # What is patched is in question here, not the kernels.
    with tigon.backend("torch"):
        yield


def build(family: str = "Llama", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config_of(family, **options)).train()


def forms(model: nn.Module) -> set[str]:
    marks = [module.__dict__.get("_tigon") for module in model.modules()]
    return {mark.form for mark in marks if mark is not None}


def step(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor], Any]:
    out = model(**batch())
    model.zero_grad()
    out.loss.backward()
    return out.loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}, out


def assert_same_step(model: nn.Module, native: nn.Module) -> None:
    """In fp32 the two differ in the order of sums."""
    (loss, gradients, _), (expected, expected_gradients, _) = step(model), step(native)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-6)


ALL = {"rope", "rms_norm", "glu", "linear_cross_entropy"}


# ---- before the model is built ----


def test_models_built_afterwards_are_patched() -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    before = build()
    handles = apply_liger_kernel_to_llama()
    after = build()
    assert forms(before) == set()
    assert forms(after) == ALL
    assert_same_step(after, before)
    assert forms(transformers.LlamaModel(config_of("Llama"))) == ALL - {"linear_cross_entropy"}
    assert forms(build("Mistral")) == set()
    assert [handle.cls for handle in apply_liger_kernel_to_llama()] == [handle.cls for handle in handles]
    assert apply_liger_kernel_to_llama() == handles
    for handle in handles:
        handle.remove()
    assert forms(build()) == set()


def test_nothing_global_is_replaced() -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_gemma3, apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama

    names = ("LlamaRMSNorm", "LlamaMLP", "apply_rotary_pos_emb", "LlamaForCausalLM")
    before = [getattr(modeling_llama, name) for name in names]
    functions = (torch.nn.functional.cross_entropy, torch.nn.LayerNorm, torch.nn.CrossEntropyLoss)
    forward = transformers.LlamaForCausalLM.forward
    apply_liger_kernel_to_llama(cross_entropy=True)
    apply_liger_kernel_to_gemma3(layer_norm=True)
    apply_liger_kernel_to_llama(model=build())
    assert before == [getattr(modeling_llama, name) for name in names]
    assert functions == (torch.nn.functional.cross_entropy, torch.nn.LayerNorm, torch.nn.CrossEntropyLoss)
    assert transformers.LlamaForCausalLM.forward is forward


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"rope": False}, ALL - {"rope"}),
        ({"rms_norm": False}, ALL - {"rms_norm"}),
        ({"swiglu": False}, ALL - {"glu"}),
        ({"fused_linear_cross_entropy": False}, ALL - {"linear_cross_entropy"}),
        ({"cross_entropy": True}, ALL - {"linear_cross_entropy"}),
        ({"rope": None, "rms_norm": None}, {"glu", "linear_cross_entropy"}),
        (dict.fromkeys(["rope", "rms_norm", "swiglu"], False), {"linear_cross_entropy"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_flags(flags: dict[str, Any], expected: set[str]) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance, apply_liger_kernel_to_llama

    model = build()
    apply_liger_kernel_to_llama(model=model, **flags)
    assert forms(model) == expected
    model = build()
    _apply_liger_kernel_to_instance(model=model, **flags)
    assert forms(model) == expected
    apply_liger_kernel_to_llama(**flags)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert forms(build()) == expected


def test_no_flags_do_nothing() -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    off = dict.fromkeys(["rope", "rms_norm", "swiglu", "fused_linear_cross_entropy"], False)
    assert apply_liger_kernel_to_llama(**off) == []
    assert apply_liger_kernel_to_llama(model=build(), **off) is None
    assert forms(build()) == set()


# ---- losses ----


def test_both_losses_are_refused_and_one_turns_the_other_off() -> None:
    from liger_kernel.transformers import (
        _apply_liger_kernel,
        _apply_liger_kernel_to_instance,
        apply_liger_kernel_to_granite,
        apply_liger_kernel_to_llama,
    )

    both = {"cross_entropy": True, "fused_linear_cross_entropy": True}
    for call in (
        lambda: apply_liger_kernel_to_llama(**both),
        lambda: apply_liger_kernel_to_llama(model=build(), **both),
        lambda: _apply_liger_kernel_to_instance(build(), **both),
        lambda: _apply_liger_kernel("llama", **both),
        lambda: _apply_liger_kernel_to_instance(build("Cohere"), **both),
    ):
        with pytest.raises(ValueError, match="cannot both be True"):
            call()
    # One of them is on by default, which is not asked for.
    model = build("Granite")
    apply_liger_kernel_to_granite(model=model, fused_linear_cross_entropy=True)
    assert "linear_cross_entropy" in forms(model)
    model = build("Granite")
    apply_liger_kernel_to_granite(model=model)
    assert "linear_cross_entropy" not in forms(model)
    assert model.loss_function.__name__ == "stored_logits_loss"
    assert_same_step(model, build("Granite"))


def test_cross_entropy_keeps_the_logits_and_the_loss() -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    native, model = build(), build()
    apply_liger_kernel_to_llama(model=model, cross_entropy=True, rope=False, rms_norm=False, swiglu=False)
    assert forms(model) == set()
    assert step(model)[2].logits.shape == (2, 9, 61)
    assert_same_step(model, native)
    for given in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for options in ({"num_items_in_batch": torch.tensor(31)}, {"num_items_in_batch": 7}, {}):
            torch.testing.assert_close(given(**batch(), **options).loss, native(**batch(), **options).loss)
        shifted = {**batch(), "shift_labels": batch()["labels"].roll(1, 1)}
        torch.testing.assert_close(given(**shifted).loss, native(**shifted).loss)
        # Trainers ask for it in evaluation, and a forward of transformers does not know it.
        assert given.eval()(**batch(), skip_logits=True).logits is not None
    ignored = {**batch(), "labels": torch.full((2, 9), -100)}
    assert model(**ignored).loss == 0


def test_unpatch_undoes_the_loss_and_the_hooks() -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from transformers.loss.loss_utils import ForCausalLMLoss

    for flags in ({}, {"cross_entropy": True}, {"fused_linear_cross_entropy": False}):
        for own in (None, ForCausalLMLoss):
            model = build()
            if own is not None:
                model.loss_function = own
            before = [dict(module.__dict__) for module in model.modules()]
            for _ in range(2):
                _apply_liger_kernel_to_instance(model, **flags)
            copies = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model)
            for each in copies:
                tigon.unpatch(each)
                assert forms(each) == set()
                assert each.loss_function is ForCausalLMLoss
                assert not any(module._forward_pre_hooks for module in each.modules())
            for module, attributes in zip(model.modules(), before, strict=True):
                assert module.__dict__.keys() == attributes.keys()
            assert_same_step(model, build())


def test_what_others_put_on_the_model_stays() -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    def loss(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return logits.sum()

    model, seen = build(), []
    _apply_liger_kernel_to_instance(model, cross_entropy=True)
    model.loss_function = loss
    model.register_forward_pre_hook(lambda *args: seen.append(args))
    tigon.unpatch(model)
    model(**batch())
    assert model.loss_function is loss
    assert len(seen) == len(model._forward_pre_hooks) == 1


def test_to_skip_logits_is_asked_of_any_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers ask in evaluation whatever was patched, and without labels when the loss is theirs."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    without = {name: value for name, value in batch().items() if name != "labels"}
    native = transformers.LlamaModel.forward

    def strict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        assert "skip_logits" not in kwargs
        return native(self, *args, **kwargs)

    monkeypatch.setattr(transformers.LlamaModel, "forward", strict)
    for flags in ({}, {"cross_entropy": True}, {"fused_linear_cross_entropy": False}):
        model = build().eval()
        expected = model(**batch())
        _apply_liger_kernel_to_instance(model, **flags)
        torch.testing.assert_close(model(**without, skip_logits=True).logits, expected.logits)
        out = model(**batch(), skip_logits=True)
        torch.testing.assert_close(out.loss, expected.loss)
        assert (out.logits is None) == (flags == {})
        # What refuses options is the loss; without it they are the model's own affair.
        if "fused_linear_cross_entropy" in flags:
            model(**batch(), label_smoothing=0.1)
    tigon.patch(model)
    tigon.unpatch(model)
    tigon.patch(model)
    with pytest.raises(ValueError, match="expected labels"):
        model(**without, skip_logits=True)


def test_cross_entropy_asked_of_what_has_none_or_another_warns() -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    with pytest.warns(UserWarning, match="has no causal language model loss"):
        _apply_liger_kernel_to_instance(transformers.LlamaModel(config_of("Llama")), cross_entropy=True)
    model = build()
    _apply_liger_kernel_to_instance(model)
    with pytest.warns(UserWarning, match="fused with its head already"):
        _apply_liger_kernel_to_instance(model, cross_entropy=True)


def test_the_fused_loss_takes_the_place_of_that_of_stored_logits() -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    model = build()
    for _ in range(2):
        apply_liger_kernel_to_llama(model=model, cross_entropy=True)
    report = apply_liger_kernel_to_llama(model=model)
    assert report.loss == "fused"
    assert forms(model) == ALL
    assert_same_step(model, build())
    tigon.unpatch(model)
    assert "_loss_function" not in model.__dict__
    apply_liger_kernel_to_llama(cross_entropy=True)
    apply_liger_kernel_to_llama()
    assert forms(build()) == ALL


@pytest.mark.parametrize("value", ["false", "True", 2, 0.5, []])
def test_flags_are_truth_values(value: Any) -> None:
    from liger_kernel.transformers import (
        AutoLigerKernelForCausalLM,
        _apply_liger_kernel,
        _apply_liger_kernel_to_instance,
        apply_liger_kernel_to_llama,
    )

    for call in (
        lambda: apply_liger_kernel_to_llama(rope=value),
        lambda: apply_liger_kernel_to_llama(model=build(), rope=value),
        lambda: _apply_liger_kernel("llama", rope=value),
        lambda: _apply_liger_kernel_to_instance(build("Cohere"), rope=value),
        lambda: AutoLigerKernelForCausalLM.from_config(config_of("Llama"), rope=value),
    ):
        with pytest.raises(ValueError, match="rope: expected True, False or None"):
            call()
    model = build()
    apply_liger_kernel_to_llama(model=model, rope=0, swiglu=1)
    assert forms(model) == ALL - {"rope"}


def test_what_is_no_model_is_refused() -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance, apply_liger_kernel_to_llama

    for given in ("a path", transformers.LlamaForCausalLM, config_of("Llama")):
        for flags in ({}, dict.fromkeys(["rope", "rms_norm", "swiglu", "fused_linear_cross_entropy"], False)):
            with pytest.raises(ValueError, match=r"expected a torch\.nn\.Module, got"):
                apply_liger_kernel_to_llama(model=given, **flags)
    with pytest.raises(ValueError, match=r"expected a torch\.nn\.Module, got NoneType"):
        _apply_liger_kernel_to_instance(None)


def test_the_function_of_another_family_patches_what_is_there() -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    model = build("Qwen3")
    apply_liger_kernel_to_llama(model=model)
    assert forms(model) == ALL
    assert_same_step(model, build("Qwen3"))


@pytest.mark.parametrize("option", ["use_token_scaling", "return_token_accuracy", "label_smoothing"])
def test_options_of_the_forward_are_refused_by_name(option: str) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    for flags in ({}, {"cross_entropy": True}):
        model = build()
        _apply_liger_kernel_to_instance(model, **flags)
        with pytest.raises(ValueError, match=option):
            model(**batch(), **{option: 0.1})
        model(**batch(), **{option: False})
        assert len(model._forward_pre_hooks) == 1
        _apply_liger_kernel_to_instance(model, **{**flags, "rope": False})
        assert len(model._forward_pre_hooks) == 1


def test_a_replaced_loss_function_is_refused() -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama, functional

    native = functional.liger_fused_linear_cross_entropy
    functional.liger_fused_linear_cross_entropy = lambda *args, **kwargs: native(*args, use_token_scaling=True)
    try:
        with pytest.raises(ValueError, match="use_token_scaling"):
            apply_liger_kernel_to_llama()
        apply_liger_kernel_to_llama(fused_linear_cross_entropy=False)
    finally:
        functional.liger_fused_linear_cross_entropy = native


def test_modules_call_a_replaced_function() -> None:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss, functional

    native = functional.liger_fused_linear_cross_entropy
    functional.liger_fused_linear_cross_entropy = lambda *args, **kwargs: "replaced"
    try:
        assert LigerFusedLinearCrossEntropyLoss()(None, None, None) == "replaced"
    finally:
        functional.liger_fused_linear_cross_entropy = native


# ---- instances ----


@pytest.mark.parametrize("family", ["Qwen3", "Gemma2", "Phi3", "Olmo2", "Glm4", "Cohere", "StableLm"])
def test_instances_of_known_and_unknown_types(family: str) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    native, model = build(family), build(family)
    report = _apply_liger_kernel_to_instance(model)
    assert report.loss == "fused"
    assert report.num_replaced > 2
    assert (model.config.model_type in MODEL_TYPE_TO_APPLY_LIGER_FN) == (family not in ("Cohere", "StableLm"))
    assert_same_step(model, native)
    tigon.unpatch(model)
    assert forms(model) == set()


def test_flags_that_liger_ignores_or_refuses_are_honoured() -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_glm4, apply_liger_kernel_to_qwen3

    model = build("Glm4")
    apply_liger_kernel_to_glm4(model=model)
    assert "rope" not in forms(model)
    apply_liger_kernel_to_glm4(model=model, rope=True)
    assert "rope" in forms(model)
    assert_same_step(model, build("Glm4"))
    with pytest.raises(TypeError, match="unknown"):
        apply_liger_kernel_to_qwen3(unknown=True)


def test_unknown_keywords_warn_by_name() -> None:
    from liger_kernel.transformers import (
        _apply_liger_kernel,
        _apply_liger_kernel_to_instance,
        apply_liger_kernel_to_llava,
    )

    for call in (
        lambda: _apply_liger_kernel_to_instance(build(), swish=True),
        lambda: _apply_liger_kernel_to_instance(build("Cohere"), swish=True),
        lambda: _apply_liger_kernel("llama", swish=True),
        lambda: apply_liger_kernel_to_llava(swish=True),
    ):
        with pytest.warns(UserWarning, match="swish=True is no flag"):
            call()


def test_flags_handed_on_to_models_within() -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llava
    from liger_kernel.transformers.monkey_patch import _chosen, _flags

    assert {name for name, on in _flags("llava").items() if on} == {
        "fused_linear_cross_entropy",
        *("rope", "rms_norm", "layer_norm", "swiglu", "geglu"),
    }
    assert _chosen("llava", {"swiglu": False})["geglu"] is False
    with pytest.raises(ValueError, match="one form"):
        _chosen("llava", {"swiglu": False, "geglu": True})
    assert list(inspect.signature(apply_liger_kernel_to_llava).parameters)[-1] == "kwargs"


def test_nemotron_says_that_its_mlp_stays() -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_nemotron

    model = build("Nemotron")
    with pytest.warns(UserWarning, match="relu_squared"):
        apply_liger_kernel_to_nemotron(model=model)
    apply_liger_kernel_to_nemotron(model=model, relu_squared=False)
    assert_same_step(model, build("Nemotron"))


# ---- by model type ----


def test_apply_by_type_reaches_models_that_exist() -> None:
    from liger_kernel.transformers import _apply_liger_kernel

    model, other = build(), build("Mistral")
    _apply_liger_kernel("llama", rope=False)
    assert forms(model) == forms(build()) == ALL - {"rope"}
    assert forms(other) == set()


def test_apply_by_type_that_liger_does_not_know() -> None:
    from liger_kernel.transformers import _apply_liger_kernel

    _apply_liger_kernel("cohere")
    assert forms(build("Cohere")) >= {"rope", "glu", "linear_cross_entropy"}
    with pytest.warns(UserWarning, match="no model type 'nothing'"):
        _apply_liger_kernel("nothing")
    assert _apply_liger_kernel("") is None


def test_every_function_finds_its_classes() -> None:
    from liger_kernel.transformers import monkey_patch

    assert len(monkey_patch.SIGNATURES) == 45
    assert len(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN) == 53
    for name in monkey_patch.SIGNATURES:
        folder = monkey_patch.FOLDERS.get(name, name)
        classes = list(monkey_patch._classes(folder))
        # The one is a vision model, which has no loss.
        assert any(not is_inner for _, is_inner in classes) == (name != "pixtral"), name
        assert all(issubclass(cls, transformers.PreTrainedModel) for cls, _ in classes)
    for model_type, function in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.items():
        assert function.__name__.removeprefix("apply_liger_kernel_to_") in model_type


@pytest.mark.parametrize("flags", [{}, {"cross_entropy": True}], ids=["fused", "stored"])
def test_one_graph(flags: dict[str, bool]) -> None:
    """Hooks and losses are traced, backward too."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    native, model = (build(num_hidden_layers=1) for _ in range(2))
    _apply_liger_kernel_to_instance(model, **flags)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(**batch()).loss
    loss.backward()
    expected, gradients, _ = step(native)
    torch.testing.assert_close(loss.detach(), expected)
    torch.testing.assert_close(model.lm_head.weight.grad, gradients["lm_head.weight"], rtol=1e-4, atol=1e-6)


# ---- models by path, and single modules ----


def test_auto_model(tmp_path: Any) -> None:
    from liger_kernel.transformers import AutoLigerKernelForCausalLM

    build().save_pretrained(tmp_path)
    model = AutoLigerKernelForCausalLM.from_pretrained(tmp_path, rope=False, dtype=torch.float32)
    assert type(model) is transformers.LlamaForCausalLM
    assert forms(model) == ALL - {"rope"}
    assert_same_step(model.train(), build())
    model, info = AutoLigerKernelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert forms(model) == ALL
    assert not info["missing_keys"]
    assert forms(AutoLigerKernelForCausalLM.from_config(config_of("Cohere"), swiglu=False)) >= {"rope"}
    assert forms(build()) == set()


def test_single_modules_are_patched_in_place() -> None:
    from liger_kernel.transformers import LigerSwiGLUMLP
    from liger_kernel.transformers.monkey_patch import (
        _patch_geglu_module,
        _patch_layer_norm_module,
        _patch_rms_norm_module,
        _patch_swiglu_module,
    )

    native, model = build(), build()
    for layer in model.model.layers:
        _patch_rms_norm_module(layer.input_layernorm)
        _patch_swiglu_module(layer.mlp, LigerSwiGLUMLP)
    assert repr(model.model.layers[0].input_layernorm).startswith("LigerRMSNorm((32,)")
    assert_same_step(model, native)
    assert_same_step(pickle.loads(pickle.dumps(model)), copy.deepcopy(model))

    native, model = build("Gemma2"), build("Gemma2")
    for layer in model.model.layers:
        _patch_rms_norm_module(layer.input_layernorm, offset=1.0, casting_mode="gemma", in_place=False)
        _patch_geglu_module(layer.mlp)
    assert_same_step(model, native)

    plain, norm, x = nn.LayerNorm(8, eps=1e-3), nn.LayerNorm(8, eps=1e-3), torch.randn(3, 8)
    _patch_layer_norm_module(norm)
    torch.testing.assert_close(norm(x), plain(x))


def test_modules_in_the_wrapper_of_adapters() -> None:
    peft = pytest.importorskip("peft")
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import _patch_rms_norm_module

    adapters = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"], init_lora_weights=False)
    torch.manual_seed(1)
    native = peft.get_peft_model(build(), adapters)
    for patch in (
        lambda model: _patch_rms_norm_module(model.base_model.model.model.norm),
        _apply_liger_kernel_to_instance,
    ):
        model = copy.deepcopy(native)
        patch(model)
        torch.testing.assert_close(model(**batch()).loss, native(**batch()).loss)
    assert "linear_cross_entropy" in forms(model)
    with pytest.raises(ValueError, match="use_token_scaling"):
        model(**batch(), use_token_scaling=True)
    assert model.eval()(**batch(), skip_logits=True).loss > 0


def test_signatures_do_not_depend_on_annotations() -> None:
    """Tools look flags up with inspect.signature, and call with what they find."""
    module = importlib.import_module("liger_kernel.transformers.monkey_patch")
    signature = inspect.signature(module.apply_liger_kernel_to_qwen2_vl)
    assert str(signature) == (
        "(rope=True, cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=True, layer_norm=True, swiglu=True,"
        " model=None)"
    )
    assert module.apply_liger_kernel_to_llama(True, False, False) != []
