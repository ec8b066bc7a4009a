"""The operators. Each file holds one: reference, kernels, launchers, autograd, public function."""

from ._op import OPS, Op, backend, current_backend, why_not
from .glu import geglu, geglu_reference, glu, glu_reference, swiglu, swiglu_reference
from .layer_norm import layer_norm, layer_norm_reference
from .rms_norm import NormResidual, rms_norm, rms_norm_reference
from .rope import rope, rope_reference

__all__ = [
    "OPS",
    "NormResidual",
    "Op",
    "backend",
    "current_backend",
    "geglu",
    "geglu_reference",
    "glu",
    "glu_reference",
    "layer_norm",
    "layer_norm_reference",
    "rms_norm",
    "rms_norm_reference",
    "rope",
    "rope_reference",
    "swiglu",
    "swiglu_reference",
    "why_not",
]
