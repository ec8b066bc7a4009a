"""What is done with models around a training step gives the same with a dozen architectures, native and patched."""

from __future__ import annotations

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.zoo import build as zoo
from torch import nn

import tigon
from tigon.patch._forms import FUSIONS

# With what each adds to the others.
NAMES = (
    "LlamaForCausalLM",  # the plain one
    "Gemma2ForCausalLM",  # capped logits, norms around each block
    "Qwen3MoeForCausalLM",  # experts
    "Phi3ForCausalLM",  # packed projections
    "GPT2LMHeadModel",  # layer norms, no rotation, transposed projections
    "CohereForCausalLM",  # scaled logits, interleaved rotation, parallel block
    "DeepseekV3ForCausalLM",  # latent attention, shared experts
    "GptOssForCausalLM",  # biases in experts, attention sinks
    "BambaForCausalLM",  # state space and attention
    "MambaForCausalLM",  # state space
    "OPTForCausalLM",  # learned positions
    "Qwen2_5_VLForConditionalGeneration",  # a language model within another, three-axis rotation
)
ARCHITECTURES = pytest.mark.parametrize("name", NAMES)
FUSE = pytest.mark.parametrize("fuse", [(), FUSIONS], ids=["apart", "fused"])


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """Tiny matrices are multiplied fastest by one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    model = zoo.build(name)
    return model, zoo.make_batch(name, model)


def train(model: nn.Module, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Loss and gradients by name."""
    model.train()
    model.zero_grad(set_to_none=True)
    output = model(**batch)
    output.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": output.loss.detach(), **grads}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Every gradient to 1e-4 of its largest element, or to the rounding that is left of one that cancels."""
    assert actual.keys() == expected.keys()
    rounding = 1e-7 * max(value.abs().max() for value in expected.values())
    for key, want in expected.items():
        error = (actual[key] - want).abs().max()
        assert error <= 1e-4 * want.abs().max() + rounding, f"{key}: {error:.1e} of {want.abs().max():.1e}"


@FUSE
@ARCHITECTURES
def test_greedy_generation_gives_the_same_tokens(name: str, fuse: Any) -> None:
    model, batch = made(name)
    model.eval()
    prompt = {key: value for key, value in batch.items() if key != "labels"}
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    native = model.generate(**prompt, **options)
    tigon.patch(model, fuse=fuse)
    assert torch.equal(model.generate(**prompt, **options), native)
    assert native.shape[1] > 5


@FUSE
@ARCHITECTURES
def test_gradient_checkpointing_changes_nothing(name: str, fuse: Any) -> None:
    model, batch = made(name)
    if not model.supports_gradient_checkpointing:
        pytest.skip("not natively")
    native = train(model, batch)
    tigon.patch(model, fuse=fuse)
    for use_reentrant in (True, False):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        assert_same(train(model, batch), native)
    assert "logits" not in model(**batch)


@ARCHITECTURES
def test_saved_and_loaded_models_train_alike_patched_again(name: str, tmp_path: Path) -> None:
    model, batch = made(name)
    native = train(model, batch)
    report = tigon.patch(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    model.save_pretrained(tmp_path)
    # Loaded natively too: a configuration does not hold all that a test may set.
    options = {"attn_implementation": "eager"}
    loaded = train(type(model).from_pretrained(tmp_path, **options), batch)
    with tigon.patch_on_build(type(model)):
        copies = [
            (torch.load(buffer, weights_only=False), native),
            (type(model).from_pretrained(tmp_path, **options), loaded),
        ]
    for each, expected in copies:
        assert tigon.patch(each).summary == report.summary
        assert_same(train(each, batch), expected)
        assert each.state_dict().keys() == model.state_dict().keys()


@ARCHITECTURES
@pytest.mark.parametrize("head", [False, True], ids=["blocks", "blocks and head"])
def test_adapters_train_alike(name: str, head: bool) -> None:
    peft = pytest.importorskip("peft")

    def adapted(base: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        options: dict[str, Any] = {"target_modules": "all-linear"}
        if head:
            output_layer = base.get_output_embeddings()
            names = [n for n, m in base.named_modules() if isinstance(m, nn.Linear) and m is not output_layer]
            own = next(n for n, m in base.named_modules() if m is output_layer)
            options = {"target_modules": [*names, own]}
        with warnings.catch_warnings():
            # That merging adapters of tied layers needs care.
            warnings.simplefilter("ignore")
            return peft.get_peft_model(
                base, peft.LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **options)
            )

    base, batch = made(name)
    earlier, later = copy.deepcopy(base), copy.deepcopy(base)
    try:
        native = train(adapted(base), batch)
    except ValueError as refusal:
        pytest.skip(f"not natively: {refusal}")
    assert any("lora" in key for key in native)
    tigon.patch(earlier)
    assert_same(train(adapted(earlier), batch), native)
    later = adapted(later)
    tigon.patch(later)
    assert_same(train(later, batch), native)


@ARCHITECTURES
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_head_may_be_tied_to_the_embedding(name: str, tied: bool) -> None:
    model, batch = made(name)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight.shape != embedding.weight.shape:
        pytest.skip("not natively")
    head.weight = embedding.weight if tied else nn.Parameter(head.weight.detach() * 0.9)
    native = train(model, batch)
    tigon.patch(model)
    assert_same(train(model, batch), native)
    assert (head.weight is embedding.weight) == tied
    assert "logits" not in model(**batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    patched = train(model, batch)
    tigon.unpatch(model)
    assert_same(patched, train(model, batch))
