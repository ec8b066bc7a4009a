"""Every flag of the functions for a family, on a tiny model: what it turns off stays native, the rest is equal."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from tests.zoo import build as zoo
from torch import Tensor, nn

import tigon
from tigon.as_liger._model import FORMS_OF


@pytest.fixture(autouse=True)
def _plain_torch() -> Iterator[None]:
    with tigon.backend("torch"):
        yield


# The forms that are found with the flags that are on by default.
TEXT = {"rope", "rms_norm", "glu", "linear_cross_entropy"}
FAMILIES = {
    "qwen3": ("Qwen3ForCausalLM", TEXT),
    "phi3": ("Phi3ForCausalLM", TEXT),
    "gemma2": ("Gemma2ForCausalLM", TEXT),
    "gemma4_text": ("Gemma4ForCausalLM", TEXT - {"rope"}),
    "falcon_h1": ("FalconH1ForCausalLM", TEXT),
    "granite": ("GraniteForCausalLM", TEXT - {"linear_cross_entropy"}),
    "mixtral": ("MixtralForCausalLM", TEXT - {"glu"} | {"experts"}),
    "gpt_oss": ("GptOssForCausalLM", TEXT - {"glu"}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", TEXT - {"rope"} | {"experts"}),
    "qwen3_next": ("Qwen3NextForCausalLM", TEXT - {"rope"} | {"rms_norm_gated", "experts"}),
    "gemma3": ("Gemma3ForConditionalGeneration", TEXT | {"layer_norm"}),
    "paligemma": ("PaliGemmaForConditionalGeneration", TEXT | {"layer_norm"}),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", TEXT | {"layer_norm"}),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", TEXT - {"glu"}),
    "mllama": ("MllamaForConditionalGeneration", TEXT | {"layer_norm"}),
    "llama4": ("Llama4ForConditionalGeneration", TEXT | {"layer_norm"}),
    "llava": ("LlavaForConditionalGeneration", TEXT | {"layer_norm"}),
    "smolvlm": ("SmolVLMForConditionalGeneration", TEXT | {"layer_norm"}),
}


def counted(model: nn.Module) -> Counter[str]:
    """Number of patched modules by form, without those that only serve another."""
    marks = [module.__dict__.get("_tigon") for module in model.modules()]
    return Counter(mark.form for mark in marks if mark is not None and mark.variant)


def of_report(report: Any) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in report.replaced:
        found[row.form] += len(row.modules)
    return found


def step(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def without(flag: str, flags: list[str]) -> dict[str, bool]:
    """`flag` off, with the one that stands for the same forms where there are both."""
    gated = {"swiglu", "geglu"}
    return dict.fromkeys(gated if flag in gated and gated <= set(flags) else [flag], False)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family(family: str) -> None:
    from liger_kernel.transformers import monkey_patch

    cls, expected = FAMILIES[family]
    apply = getattr(monkey_patch, f"apply_liger_kernel_to_{family}")
    native = zoo.build(cls)
    batch = zoo.make_batch(cls, native)
    model = copy.deepcopy(native)
    report = apply(model=model)
    everything = counted(model)
    assert set(everything) == expected
    assert of_report(report) == everything

    loss, gradients = step(model, batch)
    wanted, wanted_gradients = step(native, batch)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
    for name, gradient in wanted_gradients.items():
        largest = 0.0 if gradient is None else float(gradient.abs().max())
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5 * max(largest, 1e-3), msg=name)

    flags = [flag for flag in monkey_patch._flags(family) if flag in FORMS_OF]
    on = [flag for flag in flags if monkey_patch._flags(family)[flag]]
    for flag in on:
        one = copy.deepcopy(native)
        off = without(flag, flags)
        report = apply(model=one, **off)
        left = {form: n for form, n in everything.items() if form not in FORMS_OF[flag]}
        assert counted(one) == left
        assert of_report(report) == left
        assert not {row.form for row in report} & set(FORMS_OF[flag])

    handles = apply()
    built = zoo.build(cls)
    assert counted(built) == everything
    for handle in handles:
        handle.remove()
    tigon.unpatch(model)
    assert counted(model) == {}


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "phi3", "mixtral", "gemma3"])
def test_from_pretrained(family: str, tmp_path: Any) -> None:
    from liger_kernel.transformers import AutoLigerKernelForCausalLM

    cls, expected = FAMILIES[family]
    native = zoo.build(cls)
    batch = zoo.make_batch(cls, native)
    native.save_pretrained(tmp_path)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoLigerKernelForCausalLM.from_pretrained(tmp_path, **options).train()
    assert type(model) is getattr(transformers, cls)
    assert set(counted(model)) == expected
    torch.testing.assert_close(step(model, batch)[0], step(native, batch)[0], rtol=1e-5, atol=0)
    unfused = AutoLigerKernelForCausalLM.from_pretrained(tmp_path, fused_linear_cross_entropy=False, **options)
    assert set(counted(unfused)) == expected - {"linear_cross_entropy"}


def test_pixtral_is_a_vision_model() -> None:
    from liger_kernel.transformers.monkey_patch import apply_liger_kernel_to_pixtral

    config = transformers.PixtralVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    native = transformers.PixtralVisionModel(config)
    model = copy.deepcopy(native)
    apply_liger_kernel_to_pixtral(model=model)
    assert set(counted(model)) == {"rope", "rms_norm", "glu"}
    pixels = torch.randn(1, 3, 16, 16)
    got, want = (each(pixels, image_sizes=[(16, 16)]).last_hidden_state for each in (model, native))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
