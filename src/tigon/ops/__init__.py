"""The operators. Each file holds one: reference, kernels, launchers, autograd, public function."""

from ._nf4 import dequantize_nf4, dequantize_nf4_reference
from ._op import OPS, Op, backend, current_backend, why_not
from .cross_entropy import CrossEntropyOutput, cross_entropy, cross_entropy_reference
from .divergence import jsd, jsd_reference, kl_div, kl_div_reference, tvd, tvd_reference
from .glu import geglu, geglu_reference, glu, glu_reference, swiglu, swiglu_reference
from .glu_linear import glu_linear, glu_linear_reference
from .group_norm import group_norm, group_norm_reference
from .layer_norm import layer_norm, layer_norm_reference
from .linear_cross_entropy import LinearCrossEntropyOutput, linear_cross_entropy, linear_cross_entropy_reference
from .linear_divergence import LinearDivergenceOutput, linear_divergence, linear_divergence_reference
from .linear_log_probs import LogProbsOutput, linear_log_probs, linear_log_probs_reference
from .lora_linear import lora_linear, lora_linear_reference
from .modulated_norm import ModulatedResidual, modulated_norm, modulated_norm_reference
from .nf4_lora_linear import nf4_lora_linear, nf4_lora_linear_reference
from .qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
from .rms_norm import NormResidual, rms_norm, rms_norm_reference
from .rms_norm_gated import rms_norm_gated, rms_norm_gated_reference
from .rms_norm_glu import rms_norm_glu, rms_norm_glu_reference
from .rms_norm_mlp import rms_norm_mlp, rms_norm_mlp_reference
from .rope import rope, rope_reference
from .sandwich_norm import sandwich_norm, sandwich_norm_reference
from .softmax import log_softmax, log_softmax_reference, softmax, softmax_reference
from .sparsemax import sparsemax, sparsemax_reference
from .vocab_parallel_linear_cross_entropy import (
    vocab_parallel_linear_cross_entropy,
    vocab_parallel_linear_cross_entropy_reference,
)

__all__ = [
    "OPS",
    "CrossEntropyOutput",
    "LinearCrossEntropyOutput",
    "LinearDivergenceOutput",
    "LogProbsOutput",
    "ModulatedResidual",
    "NormResidual",
    "Op",
    "backend",
    "cross_entropy",
    "cross_entropy_reference",
    "current_backend",
    "dequantize_nf4",
    "dequantize_nf4_reference",
    "geglu",
    "geglu_reference",
    "glu",
    "glu_linear",
    "glu_linear_reference",
    "glu_reference",
    "group_norm",
    "group_norm_reference",
    "jsd",
    "jsd_reference",
    "kl_div",
    "kl_div_reference",
    "layer_norm",
    "layer_norm_reference",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "linear_divergence",
    "linear_divergence_reference",
    "linear_log_probs",
    "linear_log_probs_reference",
    "log_softmax",
    "log_softmax_reference",
    "lora_linear",
    "lora_linear_reference",
    "modulated_norm",
    "modulated_norm_reference",
    "nf4_lora_linear",
    "nf4_lora_linear_reference",
    "qk_norm_rope",
    "qk_norm_rope_reference",
    "rms_norm",
    "rms_norm_gated",
    "rms_norm_gated_reference",
    "rms_norm_glu",
    "rms_norm_glu_reference",
    "rms_norm_mlp",
    "rms_norm_mlp_reference",
    "rms_norm_reference",
    "rope",
    "rope_reference",
    "sandwich_norm",
    "sandwich_norm_reference",
    "softmax",
    "softmax_reference",
    "sparsemax",
    "sparsemax_reference",
    "swiglu",
    "swiglu_reference",
    "tvd",
    "tvd_reference",
    "vocab_parallel_linear_cross_entropy",
    "vocab_parallel_linear_cross_entropy_reference",
    "why_not",
]
