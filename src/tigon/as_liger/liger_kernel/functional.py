"""Operators as functions that return all their results. There is one implementation; tigon.backend chooses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _losses
from ._missing import missing_from
from ._options import require_default
from .ops import fused_add_rms_norm as _fused_add_rms_norm
from .ops import geglu as _geglu
from .ops import jsd as _jsd
from .ops import kl_div as _kl_div
from .ops import layer_norm as _layer_norm
from .ops import rms_norm as _rms_norm
from .ops import rope as _rope
from .ops import softmax as _softmax
from .ops import swiglu as _swiglu

__getattr__ = missing_from(__name__)


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = False,
    row_mode: bool | None = None,
    impl: Any = None,
    mode: Any = None,
    backend: Any = None,
) -> Tensor:
    require_default("rms_norm", impl=impl, mode=mode, backend=backend)
    return _rms_norm.LigerRMSNormFunction.apply(x, weight, eps, offset, casting_mode, in_place, row_mode)


def fused_add_rms_norm(
    X: Tensor,
    R: Tensor,
    W: Tensor,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = False,
    *,
    impl: Any = None,
    mode: Any = None,
    backend: Any = None,
) -> tuple[Tensor, Tensor]:
    require_default("fused_add_rms_norm", impl=impl, mode=mode, backend=backend)
    return _fused_add_rms_norm.LigerFusedAddRMSNormFunction.apply(X, R, W, eps, offset, casting_mode, in_place)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    impl: Any = None,
    mode: Any = None,
    backend: Any = None,
) -> Tensor:
    require_default("layer_norm", impl=impl, mode=mode, backend=backend)
    return _layer_norm.LigerLayerNormFunction.apply(x, weight, bias, eps)


def swiglu(
    a: Tensor,
    b: Tensor,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    *,
    impl: Any = None,
    mode: Any = None,
    backend: Any = None,
) -> Tensor:
    require_default("swiglu", impl=impl, mode=mode, backend=backend)
    return _swiglu.LigerSiLUMulFunction.apply(a, b, gate_multiplier, down_multiplier)


def geglu(a: Tensor, b: Tensor, *, impl: Any = None, mode: Any = None, backend: Any = None) -> Tensor:
    require_default("geglu", impl=impl, mode=mode, backend=backend)
    return _geglu.LigerGELUMulFunction.apply(a, b)


def softmax(x: Tensor, *, impl: Any = None, mode: Any = None, backend: Any = None) -> Tensor:
    require_default("softmax", impl=impl, mode=mode, backend=backend)
    return _softmax.LigerSoftmaxFunction.apply(x)


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    *,
    impl: Any = None,
    mode: Any = None,
    backend: Any = None,
) -> tuple[Tensor, Tensor]:
    require_default("rope", impl=impl, mode=mode, backend=backend)
    return _rope.LigerRopeFunction.apply(q, k, cos, sin, position_ids, unsqueeze_dim)


def jsd(
    _input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
    *,
    impl: Any = None,
    mode: Any = None,
    backend: Any = None,
) -> Tensor:
    require_default("jsd", impl=impl, mode=mode, backend=backend)
    return _jsd.LigerJSDFunction.apply(_input, target, shift_labels, beta, ignore_index)


def kl_div(
    y_pred: Tensor,
    y_true: Tensor,
    reduction: str = "batchmean",
    log_target: bool = False,
    eps: float = 1e-10,
    *,
    impl: Any = None,
    mode: Any = None,
    backend: Any = None,
) -> Tensor:
    require_default("kl_div", impl=impl, mode=mode, backend=backend)
    return _kl_div.LigerKLDivLossFunction.apply(y_pred, y_true, reduction, log_target, eps)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    *,
    impl: Any = None,
    mode: Any = None,
    backend: Any = None,
) -> _losses.Parts:
    require_default("cross_entropy", impl=impl, mode=mode, backend=backend)
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
    )


def fused_linear_cross_entropy(
    _input: Tensor,
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
    *,
    impl: Any = None,
    mode: Any = None,
    backend: Any = None,
) -> _losses.Parts:
    require_default("fused_linear_cross_entropy", impl=impl, mode=mode, backend=backend)
    return _losses.of_hidden(
        _input,
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
    )
