"""The operators as functions in Liger-Kernel's argument orders."""

from __future__ import annotations

import torch
from torch import Tensor

from tigon.ops._check import require

from .. import _losses
from .._losses import CrossEntropyOutput
from .._missing import missing_from
from ..ops import (
    LigerFusedAddRMSNormFunction,
    LigerGELUMulFunction,
    LigerGroupNormFunction,
    LigerJSDFunction,
    LigerKLDivLossFunction,
    LigerLayerNormFunction,
    LigerModulatedRMSNormFunction,
    LigerQwen2VLMRopeFunction,
    LigerReLUSquaredFunction,
    LigerRMSNormFunction,
    LigerRopeFunction,
    LigerSiLUMulFunction,
    LigerSoftmaxFunction,
    LigerSparsemaxFunction,
    LigerTVDLossFunction,
)

__all__ = [
    "CrossEntropyOutput",
    "liger_cross_entropy",
    "liger_fused_add_rms_norm",
    "liger_fused_linear_cross_entropy",
    "liger_geglu",
    "liger_group_norm",
    "liger_jsd",
    "liger_kl_div",
    "liger_layer_norm",
    "liger_modulated_rms_norm",
    "liger_qwen2vl_mrope",
    "liger_relu_squared",
    "liger_rms_norm",
    "liger_rope",
    "liger_softmax",
    "liger_sparsemax",
    "liger_swiglu",
    "liger_tvd",
]
__getattr__ = missing_from(__name__)


def liger_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput:
    require(input.dim() <= 2, "liger_cross_entropy", "input", "classes on the last of at most two axes", input.shape)
    for option, value in (("size_average", size_average), ("reduce", reduce)):
        require(value is None, "liger_cross_entropy", option, "None; `reduction` says it", value)
    return _losses.of_logits(
        input,
        target,
        weight,
        ignore_index,
        lse_square_scale,
        label_smoothing,
        reduction,
        softcap,
        return_z_loss,
        return_token_accuracy,
        return_predicted_tokens,
    ).as_asked()


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: float = 1,
) -> Tensor | CrossEntropyOutput:
    return _losses.of_hidden(
        input,
        weight,
        target,
        bias,
        ce_weight,
        ignore_index,
        lse_square_scale,
        label_smoothing,
        reduction,
        softcap,
        return_z_loss,
        accum_dtype,
        use_token_scaling,
        return_token_accuracy,
        return_predicted_tokens,
        chunk_mem_const,
    ).as_asked()


def liger_jsd(
    input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
) -> Tensor:
    return LigerJSDFunction.apply(input, target, shift_labels, beta, ignore_index)


def liger_kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = True,
    reduce: bool | None = True,
    reduction: str = "mean",
    log_target: bool = False,
    eps: float = 1e-10,
) -> Tensor:
    for option, value in (("size_average", size_average), ("reduce", reduce)):
        require(value is None or value is True, "liger_kl_div", option, "True or None; `reduction` says it", value)
    return LigerKLDivLossFunction.apply(input, target, reduction, log_target, eps)


def liger_tvd(
    input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:
    return LigerTVDLossFunction.apply(input, target, shift_labels, reduction, ignore_index)


def liger_rms_norm(
    X: Tensor,
    W: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> Tensor:
    return LigerRMSNormFunction.apply(X, W, eps, offset, casting_mode, in_place)


def liger_fused_add_rms_norm(
    X: Tensor,
    R: Tensor,
    W: Tensor,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> tuple[Tensor, Tensor]:
    return LigerFusedAddRMSNormFunction.apply(X, R, W, eps, offset, casting_mode, in_place)


def liger_modulated_rms_norm(
    X: Tensor,
    W: Tensor | None,
    scale: Tensor,
    shift: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> Tensor:
    return LigerModulatedRMSNormFunction.apply(X, W, scale, shift, eps, offset, casting_mode, in_place)


def liger_layer_norm(X: Tensor, W: Tensor, B: Tensor | None, eps: float) -> Tensor:
    return LigerLayerNormFunction.apply(X, W, B, eps)


def liger_group_norm(
    X: Tensor,
    affine_scaling_weight: Tensor | None,
    affine_shifting_bias: Tensor | None,
    num_channels: int,
    num_groups: int,
    eps: float,
) -> Tensor:
    return LigerGroupNormFunction.apply(X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps)


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    return LigerSiLUMulFunction.apply(a, b)


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    return LigerGELUMulFunction.apply(a, b)


def liger_relu_squared(x: Tensor) -> Tensor:
    return LigerReLUSquaredFunction.apply(x)


def liger_softmax(x: Tensor) -> Tensor:
    return LigerSoftmaxFunction.apply(x)


def liger_sparsemax(input: Tensor, dim: int = -1) -> Tensor:
    return LigerSparsemaxFunction.apply(input, dim)


def liger_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    return LigerRopeFunction.apply(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim)


def liger_qwen2vl_mrope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: list[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    return LigerQwen2VLMRopeFunction.apply(q, k, cos, sin, mrope_section, unsqueeze_dim)
