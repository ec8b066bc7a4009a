"""The few facts about transformers that patching needs; it is looked up, never imported, here."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

# The attribute by which a part of a layer finds its place in a cache.
PLACE = "layer_idx"


def _module(name: str) -> Any:
    return sys.modules.get(f"transformers.{name}")


def is_pretrained_model(module: nn.Module) -> bool:
    modeling = _module("modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def native_loss() -> Callable[..., Any]:
    """The loss that the fused one stands for."""
    return _module("loss.loss_utils").ForCausalLMLoss


def output_layer(model: nn.Module) -> nn.Module | None:
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return head if isinstance(head, nn.Module) else None


def with_eager_attention(attributes: dict[str, Any]) -> dict[str, Any]:
    """The configurations among the attributes of a module, set to the attention that runs anywhere."""
    changed = {}
    for name, value in attributes.items():
        if hasattr(value, "_attn_implementation"):
            changed[name] = copy.copy(value)
            changed[name]._attn_implementation = "eager"
    return changed


def is_tensor_parallel(model: nn.Module) -> bool:
    return (getattr(model, "tp_size", None) or 1) > 1


def _names_in(forward: Callable[..., Any]) -> tuple[str, ...]:
    return inspect.unwrap(forward).__code__.co_names


def calls_loss_function(forward: Callable[..., Any]) -> bool:
    """Whether a forward, or the class's next one that it defers to, computes its loss with `loss_function`."""
    names = _names_in(forward)
    return "loss_function" in names or "super" in names


def calls_cross_entropy(forward: Callable[..., Any]) -> bool:
    """Whether a forward computes its loss with torch's cross entropy, whose mean is that of `loss_function`."""
    return bool({"CrossEntropyLoss", "cross_entropy"} & set(_names_in(forward)))


def computes_a_loss(forward: Callable[..., Any]) -> bool:
    """Whether a forward computes a loss in any way; one that only reads `loss` from an inner output does not."""
    names = [name.lower() for name in _names_in(forward)]
    return any(("loss" in name and name != "loss") or name in ("cross_entropy", "super") for name in names)
