"""Faults planted in a patched model must be seen: the comparison of the zoo is tested before it is trusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tigon.patch import _experts, _glu, _glu_linear, _head, _norm_mlp, _norms, _rope
from tigon.patch._forms import FUSIONS

from .compare import examine

Fault = Callable[..., Any]


def _without(*names: str) -> Callable[[Fault], Fault]:
    """The operator with options of the caller ignored."""

    def plant(operator: Fault) -> Fault:
        return lambda *args, **kwargs: operator(*args, **{k: v for k, v in kwargs.items() if k not in names})

    return plant


def _changed(**options: Any) -> Callable[[Fault], Fault]:
    return lambda operator: lambda *args, **kwargs: operator(*args, **{**kwargs, **options})


def _swapped(operator: Fault) -> Fault:
    return lambda first, second, *args, **kwargs: operator(second, first, *args, **kwargs)


def _detached(operator: Fault) -> Fault:
    """Right forward, one gradient lost."""
    return lambda x, weight, *args, **kwargs: operator(x, weight.detach(), *args, **kwargs)


def _labels_off_by_one(operator: Fault) -> Fault:
    return lambda x, weight, labels, **kwargs: operator(x, weight, labels.roll(1, -1), **kwargs)


def _turned_back(operator: Fault) -> Fault:
    return lambda q, k, cos, sin, **kwargs: operator(q, k, cos, -sin, **kwargs)


FAULTS: dict[str, tuple[str, Any, str, Callable[[Fault], Fault]]] = {
    "softcap": ("Gemma2ForCausalLM", _head, "linear_cross_entropy", _without("softcap")),
    "scale": ("GraniteForCausalLM", _head, "linear_cross_entropy", _without("logit_scale")),
    "scale of a norm with bias": ("CohereForCausalLM", _head, "linear_cross_entropy", _without("logit_scale")),
    "bias of the head": ("PhiForCausalLM", _head, "linear_cross_entropy", _without("bias")),
    "number of items": ("LlamaForCausalLM", _head, "linear_cross_entropy", _without("num_items")),
    "labels": ("LlamaForCausalLM", _head, "linear_cross_entropy", _labels_off_by_one),
    "labels of a cross entropy in the forward": (
        "BartForCausalLM",
        _head,
        "linear_cross_entropy",
        _labels_off_by_one,
    ),
    "gradient of the head": ("LlamaForCausalLM", _head, "linear_cross_entropy", _detached),
    "offset": ("GemmaForCausalLM", _norms, "rms_norm", _without("offset")),
    "eps": ("Qwen3ForCausalLM", _norms, "rms_norm", _changed(eps=1e-3)),
    "gradient of a norm": ("LlamaForCausalLM", _norms, "rms_norm", _detached),
    "activation": ("Gemma3ForCausalLM", _glu, "glu", _changed(activation="gelu")),
    "gate and up": ("LlamaForCausalLM", _glu, "glu", _swapped),
    "clamp": ("DeepseekV4ForCausalLM", _glu, "glu", _without("limit")),
    "scale of the gate": ("FalconH1ForCausalLM", _glu, "glu", _without("gate_scale")),
    "clamp of the experts": ("GptOssForCausalLM", _experts, "glu", _without("limit")),
    "gate and up of the experts": ("Qwen3MoeForCausalLM", _experts, "glu", _changed(gate_first=False)),
    "groups": ("Qwen4ExpForCausalLM", _norms, "rms_norm", _without("group_size")),
    "gate of a norm": ("Mamba2ForCausalLM", _norms, "rms_norm_gated", _changed(activation="sigmoid")),
    "weight of a layer norm": ("GPT2LMHeadModel", _norms, "layer_norm", _detached),
    "direction": ("LlamaForCausalLM", _rope, "rope", _turned_back),
    "inverse": ("NanoChatForCausalLM", _rope, "rope", _without("inverse")),
    "tail": ("DeepseekV4ForCausalLM", _rope, "rope", _without("tail")),
    "layout": ("CohereForCausalLM", _rope, "rope", _changed(layout="half")),
}


def _sum_lost(operator: Fault) -> Fault:
    """The norm is that of the sum, but what goes on is the stream before it."""

    def call(*args: Any, residual: Any = None, **kwargs: Any) -> Any:
        y = operator(*args, residual=residual, **kwargs)
        return y if residual is None else (y.y, args[0])

    return call


def _stream_detached(operator: Fault) -> Fault:
    def call(x: Any, *args: Any, residual: Any = None, **kwargs: Any) -> Any:
        return operator(x if residual is None else x.detach(), *args, residual=residual, **kwargs)

    return call


def _weights_swapped(operator: Fault) -> Fault:
    return lambda q, k, qw, kw, *args, **kwargs: operator(q, k, kw, qw, *args, **kwargs)


def _projection_detached(operator: Fault) -> Fault:
    return lambda *args, weight, **kwargs: operator(*args, weight=weight.detach(), **kwargs)


def _halves_swapped(operator: Fault) -> Fault:
    return lambda x, norm, gate, up, **kwargs: operator(x, norm, up, gate, **kwargs)


def _down_detached(operator: Fault) -> Fault:
    return lambda *args, down_weight, **kwargs: operator(*args, down_weight=down_weight.detach(), **kwargs)


# With every fusion across modules; one of a whole MLP takes the place of others.
APART = tuple(name for name in FUSIONS if name != _norm_mlp.NAME)
FUSED_FAULTS: dict[str, tuple[str, Any, str, Callable[[Fault], Fault]]] = {
    "halves of an MLP": ("LlamaForCausalLM", _norm_mlp, "rms_norm_mlp", _halves_swapped),
    "order of packed halves of an MLP": ("Phi3ForCausalLM", _norm_mlp, "rms_norm_mlp", _changed(gate_first=False)),
    "offset before an MLP": ("Gemma2ForCausalLM", _norm_mlp, "rms_norm_mlp", _without("offset")),
    "gradient of an MLP's projection back": ("Qwen3ForCausalLM", _norm_mlp, "rms_norm_mlp", _down_detached),
    "sum lost": ("LlamaForCausalLM", _norms, "rms_norm", _sum_lost),
    "sum lost between norms": ("Gemma2ForCausalLM", _norms, "rms_norm", _sum_lost),
    "stream detached": ("MistralForCausalLM", _norms, "rms_norm", _stream_detached),
    "weights of queries and keys": ("Qwen3ForCausalLM", _rope, "qk_norm_rope", _weights_swapped),
    "offset of queries and keys": ("Gemma3ForCausalLM", _rope, "qk_norm_rope", _without("offset")),
    "eps of queries and keys": ("Qwen3MoeForCausalLM", _rope, "qk_norm_rope", _changed(eps=1e-2)),
    "factors of a product": ("LlamaForCausalLM", _glu_linear, "glu_linear", _swapped),
    "order of packed factors": ("Phi3ForCausalLM", _glu_linear, "glu_linear", _changed(gate_first=False)),
    "gradient of a projection back": ("Gemma2ForCausalLM", _glu_linear, "glu_linear", _projection_detached),
}


@pytest.mark.parametrize("fault", FUSED_FAULTS)
def test_a_fault_planted_in_a_fusion_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, module, operator, plant = FUSED_FAULTS[fault]
    fusions = FUSIONS if module is _norm_mlp else APART
    assert examine(name, fusions)["wrong"] == []
    monkeypatch.setattr(module, operator, plant(getattr(module, operator)))
    wrong = examine(name, fusions)["wrong"]
    assert wrong
    assert not [text for text in wrong if "Error: " in text]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, module, operator, plant = FAULTS[fault]
    monkeypatch.setattr(module, operator, plant(getattr(module, operator)))
    wrong = examine(name)["wrong"]
    assert wrong
    # Other numbers or a gradient that is missing, not a call that the operator refuses.
    assert not [text for text in wrong if "Error: " in text]


def test_without_a_fault_nothing_is_seen() -> None:
    for name in sorted({name for name, *_ in FAULTS.values()}):
        assert examine(name)["wrong"] == [], name
