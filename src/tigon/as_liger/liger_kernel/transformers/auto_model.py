from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM

from ._models import SIGNATURES
from .monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

__all__ = ["MODEL_TYPE_TO_APPLY_LIGER_FN", "AutoLigerKernelForCausalLM"]

_FLAGS = {name for signature in SIGNATURES.values() for name in signature.parameters} - {"model", "kwargs"}


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """`AutoModelForCausalLM` whose models are patched. Keywords that are flags are not handed on."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        flags = {name: kwargs.pop(name) for name in _FLAGS & set(kwargs)}
        model = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        # With output_loading_info=True there is more than the model.
        _apply_liger_kernel_to_instance(model[0] if isinstance(model, tuple) else model, **flags)
        return model

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:
        flags = {name: kwargs.pop(name) for name in _FLAGS & set(kwargs)}
        model = super().from_config(config, **kwargs)
        _apply_liger_kernel_to_instance(model, **flags)
        return model
