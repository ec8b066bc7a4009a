"""Fused kernels for training large language models with PyTorch, and the patcher that installs them."""

__version__ = "0.1.0"

from .ops import OPS, NormResidual, backend, current_backend, geglu, glu, layer_norm, rms_norm, swiglu, why_not

__all__ = [
    "OPS",
    "NormResidual",
    "__version__",
    "backend",
    "current_backend",
    "geglu",
    "glu",
    "layer_norm",
    "rms_norm",
    "swiglu",
    "why_not",
]
