"""Fused kernels for training large language models with PyTorch, and the patcher that installs them."""

__version__ = "0.1.0"

import importlib
from typing import Any

from . import losses
from .ops import (
    OPS,
    CrossEntropyOutput,
    LinearCrossEntropyOutput,
    LinearDivergenceOutput,
    LogProbsOutput,
    ModulatedResidual,
    NormResidual,
    backend,
    cross_entropy,
    current_backend,
    dequantize_nf4,
    geglu,
    glu,
    glu_linear,
    group_norm,
    jsd,
    kl_div,
    layer_norm,
    linear_cross_entropy,
    linear_divergence,
    linear_log_probs,
    log_softmax,
    lora_linear,
    modulated_norm,
    nf4_lora_linear,
    qk_norm_rope,
    rms_norm,
    rms_norm_gated,
    rms_norm_glu,
    rms_norm_mlp,
    rope,
    sandwich_norm,
    softmax,
    sparsemax,
    swiglu,
    tvd,
    vocab_parallel_linear_cross_entropy,
    why_not,
)

__all__ = [
    "OPS",
    "CrossEntropyOutput",
    "KernelConfig",
    "LinearCrossEntropyOutput",
    "LinearDivergenceOutput",
    "LogProbsOutput",
    "ModulatedResidual",
    "NormResidual",
    "Report",
    "__version__",
    "backend",
    "cross_entropy",
    "current_backend",
    "dequantize_nf4",
    "geglu",
    "glu",
    "glu_linear",
    "group_norm",
    "jsd",
    "kl_div",
    "layer_norm",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_log_probs",
    "log_softmax",
    "lora_linear",
    "losses",
    "modulated_norm",
    "nf4_lora_linear",
    "patch",
    "patch_on_build",
    "qk_norm_rope",
    "register_kernels",
    "rms_norm",
    "rms_norm_gated",
    "rms_norm_glu",
    "rms_norm_mlp",
    "rope",
    "sandwich_norm",
    "softmax",
    "sparsemax",
    "swiglu",
    "tvd",
    "unpatch",
    "unregister_kernels",
    "vocab_parallel_linear_cross_entropy",
    "warmup",
    "why_not",
]


def __getattr__(name: str) -> Any:
    # Patching is loaded when it is first asked for: the operators alone need none of it.
    if name in ("Report", "patch", "patch_on_build", "unpatch"):
        module = importlib.import_module(".patch", __name__)
        return module if name == "patch" else getattr(module, name)
    if name in ("KernelConfig", "register_kernels", "unregister_kernels"):
        return getattr(importlib.import_module(".hub", __name__), name)
    if name == "warmup":
        return importlib.import_module("._warmup", __name__).warmup
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
