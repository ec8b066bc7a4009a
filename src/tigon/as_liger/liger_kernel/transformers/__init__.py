"""Modules, functions, and what applies them to models; loaded when first asked for."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from .._missing import missing_from
from ._models import APPLY_NAMES

_WHERE = {
    "cross_entropy": ("LigerCrossEntropyLoss",),
    "fused_add_rms_norm": ("LigerFusedAddRMSNorm",),
    "fused_linear_cross_entropy": ("LigerFusedLinearCrossEntropyLoss",),
    "geglu": ("LigerGEGLUMLP",),
    "jsd": ("LigerJSD",),
    "kl_div": ("LigerKLDIVLoss",),
    "layer_norm": ("LigerLayerNorm",),
    "llama4_rope": ("liger_llama4_text_rotary_pos_emb", "liger_llama4_vision_rotary_pos_emb"),
    "mlp": ("LigerFalconH1MLP", "LigerMLP"),
    "modulated_rms_norm": ("LigerModulatedRMSNorm",),
    "relu_squared": ("LigerReLUSquared",),
    "rms_norm": ("LigerRMSNorm", "LigerRMSNormForMuseGlimmer", "LigerRMSNormForMuseGlimmerTextCentered"),
    "rope": ("liger_rotary_pos_emb",),
    "softmax": ("LigerSoftmax",),
    "sparsemax": ("LigerSparsemax",),
    "swiglu": (
        "LigerBlockSparseTop2MLP",
        "LigerFalconH1SwiGLUMLP",
        "LigerPhi3SwiGLUMLP",
        "LigerQwen3MoeSwiGLUMLP",
        "LigerSwiGLUMLP",
        "LigerSwiGLUMLPForMuseGlimmer",
    ),
    "tvd": ("LigerTVDLoss",),
}
_OF_TRANSFORMERS = {
    "auto_model": ("AutoLigerKernelForCausalLM",),
    "monkey_patch": ("_apply_liger_kernel", "_apply_liger_kernel_to_instance", *APPLY_NAMES),
}
_MODULE_OF = {name: module for table in (_WHERE, _OF_TRANSFORMERS) for module, names in table.items() for name in names}
# Modules that are attributes of the package without having been imported.
_SUBMODULES = (*_WHERE, *_OF_TRANSFORMERS, "functional", "group_norm", "model", "qwen2vl_mrope", "trainer_integration")
_missing = missing_from(__name__)


def is_transformers_available() -> bool:
    return importlib.util.find_spec("transformers") is not None


__all__ = ["is_transformers_available", *(name for names in _WHERE.values() for name in names)]
if is_transformers_available():
    __all__ += [name for names in _OF_TRANSFORMERS.values() for name in names]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _MODULE_OF:
        return _missing(name)
    if _MODULE_OF[name] in _OF_TRANSFORMERS and not is_transformers_available():
        raise ImportError(f"{__name__}.{name} needs transformers: pip install 'tigon[hf]'", name=name)
    return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF, *_SUBMODULES})
