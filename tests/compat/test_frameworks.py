"""How training frameworks find, import and call Liger-Kernel, imitated: they must find what they look for."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from tests.compat.conftest import batch, config_of
from tests.compat.test_apply import ALL, assert_same_step, build, forms

import tigon


@pytest.fixture(autouse=True)
def _plain_torch() -> Iterator[None]:
    with tigon.backend("torch"):
        yield


@pytest.mark.parametrize("name", ["liger_kernel", "liger-kernel", "Liger.Kernel"])
def test_metadata_answers_to_every_spelling(name: str) -> None:
    assert Version(importlib.metadata.version(name)) >= Version("0.8.2")
    assert importlib.metadata.distribution(name).metadata["Name"] == "liger_kernel"


def test_gates_of_transformers_and_trl() -> None:
    assert transformers.utils.is_liger_kernel_available()
    assert importlib.metadata.packages_distributions()["liger_kernel"] == ["liger_kernel"]
    trl = pytest.importorskip("trl.import_utils")
    assert trl.is_liger_kernel_available(min_version="0.8.2")


def test_axolotl() -> None:
    """A plugin before the model is loaded: flags by signature, of which those not set are None."""
    from liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss
    from liger_kernel.transformers.functional import liger_cross_entropy
    from liger_kernel.transformers.geglu import LigerGEGLUMLP
    from liger_kernel.transformers.layer_norm import LigerLayerNorm
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    from liger_kernel.transformers.rms_norm import LigerRMSNorm
    from liger_kernel.transformers.rope import liger_rotary_pos_emb
    from liger_kernel.transformers.swiglu import LigerSwiGLUMLP

    assert all(
        (LigerCrossEntropyLoss, liger_cross_entropy, LigerGEGLUMLP, LigerLayerNorm, LigerRMSNorm, LigerSwiGLUMLP)
    )
    assert callable(liger_rotary_pos_emb)
    # With its torch_compile, two functions are wrapped so that they are not compiled.
    module = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    for name in ("fused_linear_cross_entropy_forward", "fused_linear_cross_entropy_backward"):
        assert callable(getattr(module, name))
    settings = {"rope": True, "rms_norm": True, "glu_activation": True, "fused_linear_cross_entropy": True}
    function = MODEL_TYPE_TO_APPLY_LIGER_FN["mistral"]
    flags = {
        name: settings.get("glu_activation" if name in ("swiglu", "geglu") else name)
        for name in inspect.signature(function).parameters
        if name not in ("model", "kwargs")
    }
    assert flags["cross_entropy"] is None
    native = build("Mistral")
    function(**flags)
    assert forms(build("Mistral")) == ALL
    assert_same_step(build("Mistral"), native)


def test_axolotl_for_a_model_of_its_own() -> None:
    """Symbols of a modeling file are replaced by hand."""
    from liger_kernel.transformers.rms_norm import LigerRMSNorm
    from liger_kernel.transformers.rope import liger_rotary_pos_emb
    from liger_kernel.transformers.swiglu import LigerSwiGLUMLP
    from transformers.models.mistral import modeling_mistral as mistral

    native = build("Mistral")
    saved = (mistral.MistralRMSNorm, mistral.MistralMLP, mistral.apply_rotary_pos_emb)
    try:
        mistral.MistralRMSNorm, mistral.MistralMLP = LigerRMSNorm, LigerSwiGLUMLP
        mistral.apply_rotary_pos_emb = liger_rotary_pos_emb
        model = build("Mistral")
        assert type(model.model.norm) is LigerRMSNorm
        model.load_state_dict(native.state_dict())
        assert_same_step(model, native)
    finally:
        mistral.MistralRMSNorm, mistral.MistralMLP, mistral.apply_rotary_pos_emb = saved


@pytest.mark.parametrize("requires_logits", [False, True])
def test_llama_factory(requires_logits: bool, tmp_path: Any) -> None:
    """Classes first, then the model from a path."""
    from liger_kernel.transformers import apply_liger_kernel_to_qwen2 as apply_liger_kernel

    if requires_logits and "fused_linear_cross_entropy" in inspect.signature(apply_liger_kernel).parameters:
        flags = {"fused_linear_cross_entropy": False, "cross_entropy": True}
    else:
        flags = {}
    native = build("Qwen2")
    native.save_pretrained(tmp_path)
    apply_liger_kernel(**flags)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).train()
    assert ("linear_cross_entropy" in forms(model)) != requires_logits
    assert (model(**batch()).logits is not None) == requires_logits
    assert_same_step(model, native)


def test_ms_swift() -> None:
    assert importlib.util.find_spec("liger_kernel") is not None
    assert Version(importlib.metadata.version("liger-kernel")) >= Version("0.7.0")
    module = importlib.import_module("liger_kernel.transformers.model.loss_utils")
    assert callable(module.LigerForCausalLMLoss)
    losses = importlib.import_module("liger_kernel.chunked_loss")
    assert issubclass(losses.LigerFusedLinearGRPOLoss, torch.nn.Module)


@pytest.mark.parametrize("name", ["DPO", "KTO", "GRPO", "JSD", "ORPO", "CPO", "SimPO"])
def test_trl_to_1_10(name: str) -> None:
    """Its trainers but the supervised one import a chunked loss where they find liger_kernel."""
    exec(f"from liger_kernel.chunked_loss import LigerFusedLinear{name}Loss")
    module = importlib.import_module("liger_kernel.transformers.monkey_patch")
    model = build("Qwen2")
    module._apply_liger_kernel_to_instance(model=model)
    with pytest.raises(ValueError, match="return_token_accuracy: the loss of a patched model has no such option"):
        model(**batch(), return_token_accuracy=True)


def test_verl() -> None:
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    model = build("Qwen2")
    _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, swiglu=True)
    assert forms(model) == ALL - {"linear_cross_entropy"}
    assert_same_step(model, build("Qwen2"))


def test_oumi() -> None:
    """After the model was built, by its type."""
    import liger_kernel.transformers

    model = build("Qwen3")
    liger_kernel.transformers._apply_liger_kernel(model.config.model_type)
    assert forms(model) == ALL


def test_openrlhf(tmp_path: Any) -> None:
    from liger_kernel.transformers import AutoLigerKernelForCausalLM

    build("Qwen2").save_pretrained(tmp_path)
    model = AutoLigerKernelForCausalLM.from_pretrained(
        str(tmp_path),
        trust_remote_code=True,
        attn_implementation="eager",
        quantization_config=None,
        dtype=torch.bfloat16,
        device_map=None,
    )
    assert forms(model) == ALL
    assert model.config._attn_implementation == "eager"
    assert next(model.parameters()).dtype == torch.bfloat16


def test_nemo() -> None:
    found = importlib.util.find_spec("liger_kernel")
    assert found is not None
    module = importlib.import_module("liger_kernel.transformers")
    model = build("Llama")
    module._apply_liger_kernel_to_instance(model=model)
    assert forms(model) == ALL
    assert isinstance(model, transformers.LlamaForCausalLM)
    assert type(model).__name__ == "LlamaForCausalLM"


def test_old_trainers_import_by_their_old_paths() -> None:
    from liger_kernel.transformers.trainer_integration import _apply_liger_kernel

    _apply_liger_kernel("llama")
    assert forms(build()) == ALL


def test_models_written_with_the_modules() -> None:
    """Own model code: norm, MLP and loss taken one by one, the loss with the weight first."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss, LigerRMSNorm, LigerSwiGLUMLP

    config = config_of("Llama")
    norm, mlp, head = LigerRMSNorm(32, eps=1e-5), LigerSwiGLUMLP(config), torch.nn.Linear(32, 61, bias=False)
    x, labels = torch.randn(7, 32), torch.randint(0, 61, (7,))
    loss = LigerFusedLinearCrossEntropyLoss()(head.weight, norm(x) + mlp(x), labels)
    loss.backward()
    plain = torch.nn.functional.rms_norm(x, (32,), norm.weight, 1e-5) + mlp.down_proj(
        torch.nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
    )
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(head(plain), labels))
    assert norm.variance_epsilon == 1e-5
    assert all(p.grad is not None for module in (norm, mlp, head) for p in module.parameters())


def test_the_benchmark_does_not_take_it_for_liger() -> None:
    from tigon.bench.peers import liger

    with pytest.raises(NotImplementedError, match="tigon's own"):
        liger._ops()
