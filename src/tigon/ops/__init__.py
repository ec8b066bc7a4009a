"""The operators. Each file holds one: reference, kernels, launchers, autograd, public function."""

from ._op import OPS, Op, backend, current_backend, why_not
from .rms_norm import NormResidual, rms_norm, rms_norm_reference

__all__ = [
    "OPS",
    "NormResidual",
    "Op",
    "backend",
    "current_backend",
    "rms_norm",
    "rms_norm_reference",
    "why_not",
]
