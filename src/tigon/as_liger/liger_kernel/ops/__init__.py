"""What Liger-Kernel calls its autograd functions: classes with an `apply`, which here calls the operator of tigon."""

from .._missing import missing_from
from .cross_entropy import LigerCrossEntropyFunction
from .fused_add_rms_norm import LigerFusedAddRMSNormFunction
from .fused_linear_cross_entropy import (
    LigerFusedLinearCrossEntropyFunction,
    fused_linear_cross_entropy_backward,
    fused_linear_cross_entropy_forward,
)
from .geglu import LigerGELUMulFunction
from .group_norm import LigerGroupNormFunction
from .jsd import LigerJSDFunction
from .kl_div import LigerKLDivLossFunction
from .layer_norm import LigerLayerNormFunction
from .llama4_rope import LigerLlama4RopeFunction
from .modulated_rms_norm import LigerModulatedRMSNormFunction
from .qwen2vl_mrope import LigerQwen2VLMRopeFunction
from .relu_squared import LigerReLUSquaredFunction
from .rms_norm import LigerRMSNormFunction
from .rope import LigerRopeFunction
from .softmax import LigerSoftmaxFunction
from .sparsemax import LigerSparsemaxFunction
from .swiglu import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction
from .tvd import LigerTVDLossFunction

__all__ = [
    "LigerCrossEntropyFunction",
    "LigerFusedAddRMSNormFunction",
    "LigerFusedGateUpSiLUMulFunction",
    "LigerFusedLinearCrossEntropyFunction",
    "LigerGELUMulFunction",
    "LigerGroupNormFunction",
    "LigerJSDFunction",
    "LigerKLDivLossFunction",
    "LigerLayerNormFunction",
    "LigerLlama4RopeFunction",
    "LigerModulatedRMSNormFunction",
    "LigerQwen2VLMRopeFunction",
    "LigerRMSNormFunction",
    "LigerReLUSquaredFunction",
    "LigerRopeFunction",
    "LigerSiLUMulFunction",
    "LigerSoftmaxFunction",
    "LigerSparsemaxFunction",
    "LigerTVDLossFunction",
    "fused_linear_cross_entropy_backward",
    "fused_linear_cross_entropy_forward",
]
__getattr__ = missing_from(__name__)
