"""Quantised projections, whose weights are no matrices to multiply with, bare and with adapters on top."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon

FUSIONS = ("add_rms_norm", "qk_norm_rope")
# The last one must leave such a projection alone.
ASKED = (*FUSIONS, "glu_linear")
BEFORE_AFTER = pytest.mark.parametrize("when", ["before", "after"])


class Packed(nn.Module):
    """A projection whose numbers are packed into bytes. Who asks for its weight is wrong to."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self.scale = nn.Buffer(weight.abs().amax(1, keepdim=True) / 7)
        self.nibbles = nn.Buffer((weight / self.scale).round().add(8).to(torch.uint8))

    @property
    def weight(self) -> Tensor:
        raise RuntimeError("the weight of a packed projection was asked for")

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, (self.nibbles.to(x.dtype) - 8) * self.scale.to(x.dtype))


class Adapter(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.in_features, self.out_features = base, base.in_features, base.out_features
        self.down = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, 2) * 0.1)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def exchanged(model: nn.Module, make: Callable[[Any], nn.Module], kind: type, head: bool = False) -> nn.Module:
    """The model with every projection of a kind exchanged, but for the output layer unless it is asked for."""
    output_layer = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if type(module) is kind and (head or module is not output_layer):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, make(module))
    return model


@BEFORE_AFTER
@pytest.mark.parametrize("head", [False, True])
def test_packed_projections_with_adapters_train_as_without_patching(
    head: bool, when: str, build: Any, batch: Any, step: Any, assert_same_step: Any
) -> None:
    model = build("Qwen3").requires_grad_(False)
    packed = exchanged(model, Packed, nn.Linear, head)
    native_model, later = copy.deepcopy(packed), copy.deepcopy(packed)
    torch.manual_seed(3)
    native = step(exchanged(native_model, Adapter, Packed, head), batch)
    assert any(float(grad.abs().max()) > 0 for grad in native["grads"].values())
    torch.manual_seed(3)
    if when == "before":
        tigon.patch(later, fuse=ASKED)
    later = exchanged(later, Adapter, Packed, head)
    if when == "after":
        report = tigon.patch(later, fuse=ASKED)
        forms = {"rms_norm", "glu", "rope", *FUSIONS, *([] if head else ["linear_cross_entropy"])}
        assert {row.form for row in report.replaced} == forms
    actual = step(later, batch)
    assert_same_step(actual, native)
    assert (actual["output"].logits is None) == (not head)


def in_4_bits(model: nn.Module, head: bool = False) -> nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def quantised(linear: nn.Linear) -> nn.Module:
        options = {"compute_dtype": torch.float32, "quant_type": "nf4"}
        module = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, linear.bias is not None, **options)
        module.load_state_dict(linear.state_dict())
        # This is when it is packed.
        return module.to("cpu")

    model = exchanged(model.requires_grad_(False), quantised, nn.Linear, head)
    model.is_loaded_in_4bit = True
    return model


@pytest.mark.filterwarnings("ignore")
@BEFORE_AFTER
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2", "Phi3"])
def test_4_bit_models_with_adapters_train_as_without_patching(
    family: str, head: bool, when: str, build: Any, batch: Any, step: Any, assert_same_step: Any
) -> None:
    peft = pytest.importorskip("peft")

    def adapted(model: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        # The adapters that are added to projections are themselves no projections of 4 bits.
        config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(model, config).train()

    sizes = {"hidden_size": 64, "intermediate_size": 128}
    native = step(adapted(in_4_bits(build(family, **sizes), head)), batch)
    assert native["grads"]
    assert all("lora" in name for name in native["grads"])
    model = in_4_bits(build(family, **sizes), head)
    if when == "before":
        tigon.patch(model, fuse=ASKED)
    model = adapted(model)
    if when == "after":
        report = tigon.patch(model, fuse=ASKED)
        assert {row.form for row in report.replaced} >= {"rms_norm", "glu", "rope", "add_rms_norm"}
    actual = step(model, batch)
    assert_same_step(actual, native)
    assert (actual["output"].logits is None) == (not head)
    tigon.unpatch(model)
    assert_same_step(step(model, batch), native)
