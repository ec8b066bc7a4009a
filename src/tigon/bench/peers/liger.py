"""Liger-Kernel, called as its own modules call it, with its defaults."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from . import Peer


def _ops() -> Any:
    # Imported when measured: importing it touches CUDA.
    import liger_kernel.ops as ops

    if hasattr(ops.LigerRMSNormFunction, "forward"):
        return ops
    raise NotImplementedError("the liger_kernel installed here is tigon's own")


_CASTING = {"cast_then_scale": "llama", "scale_then_cast": "gemma", "none": "none"}


def _rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast: str = "cast_then_scale",
    residual: Tensor | None = None,
) -> Any:
    if residual is not None:
        return _ops().LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, offset, _CASTING[cast])
    return _ops().LigerRMSNormFunction.apply(x, weight, eps, offset, _CASTING[cast])


def _layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    if weight is None or bias is None:
        raise NotImplementedError("weight and bias are required")
    return _ops().LigerLayerNormFunction.apply(x, weight, bias, eps)


def _group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    if weight is None or bias is None:
        raise NotImplementedError("weight and bias are required")
    # Its backward takes one spatial axis.
    y = _ops().LigerGroupNormFunction.apply(x.flatten(2), weight, bias, x.shape[1], num_groups, eps)
    return y.view(x.shape)


def _modulated_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    norm: str = "rms",
    eps: float = 1e-6,
    residual: Tensor | None = None,
    **_: Any,
) -> Tensor:
    if norm != "rms" or residual is not None:
        raise NotImplementedError("only the RMS norm, without a residual")
    # Rounded once, as ours; in place would overwrite the upstream gradient.
    return _ops().LigerModulatedRMSNormFunction.apply(x, weight, scale, shift, eps, 0.0, "none", False)


def _glu(gate: Tensor, up: Tensor | None = None, *, activation: str = "silu", **options: Any) -> Tensor:
    if up is None or options:
        raise NotImplementedError("only separate gate and up")
    if activation == "silu":
        return _ops().LigerSiLUMulFunction.apply(gate, up)
    if activation == "gelu_tanh":
        return _ops().LigerGELUMulFunction.apply(gate, up)
    raise NotImplementedError(f"no activation {activation}")


def _rms_norm_glu(
    x: Tensor,
    norm_weight: Tensor | None,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast: str = "cast_then_scale",
    **options: Any,
) -> Tensor:
    if norm_weight is None or up_weight is None or cast not in _CASTING:
        raise NotImplementedError("only norms with weights, and separate gate and up")
    n = _rms_norm(x, norm_weight, eps=eps, offset=offset, cast=cast)
    return _glu(F.linear(n, gate_weight, gate_bias), F.linear(n, up_weight, up_bias), **options)


def _rms_norm_mlp(
    x: Tensor,
    *first: Any,
    down_weight: Tensor,
    down_bias: Tensor | None = None,
    residual: bool = False,
    **options: Any,
) -> Tensor:
    """Its modules for the norm and the MLP one after the other, as its patched models have them."""
    y = F.linear(_rms_norm_glu(x, *first, **options), down_weight, down_bias)
    return x + y if residual else y


def _rope(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **options: Any) -> Any:
    if k is None or options:
        raise NotImplementedError("only the half layout with full tables")
    return _ops().LigerRopeFunction.apply(q, k, cos, sin)


def _qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast: str = "cast_then_scale",
    **options: Any,
) -> Any:
    if options or q_weight is None or cast not in _CASTING:
        raise NotImplementedError("only the half layout with full tables, and norms with weights")

    def norm(x: Tensor, weight: Tensor | None) -> Tensor:
        # As models call it, on tokens before heads and tokens change places, where it needs no copy.
        if x.stride(1) < x.stride(2):
            return _rms_norm(x.transpose(1, 2), weight, eps=eps, offset=offset, cast=cast).transpose(1, 2)
        return _rms_norm(x, weight, eps=eps, offset=offset, cast=cast)

    return _rope(norm(q, q_weight), norm(k, k_weight), cos, sin)


def _cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    **options: Any,
) -> Tensor:
    if options:
        raise NotImplementedError(f"no {', '.join(options)}")
    out = _ops().LigerCrossEntropyFunction.apply(
        logits.flatten(0, -2), labels.flatten(), None, ignore_index, z_loss, label_smoothing, "mean", softcap
    )
    return out[0] if isinstance(out, tuple) else out


def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    **options: Any,
) -> Tensor:
    if options:
        raise NotImplementedError(f"no {', '.join(options)}")
    out = _ops().LigerFusedLinearCrossEntropyFunction.apply(
        hidden.flatten(0, -2),
        weight,
        labels.flatten(),
        bias,
        None,
        ignore_index,
        z_loss,
        label_smoothing,
        "mean",
        softcap,
    )
    return out[0] if isinstance(out, tuple) else out


def _softmax(x: Tensor, **options: Any) -> Tensor:
    if options:
        raise NotImplementedError(f"no {', '.join(options)}")
    return _ops().LigerSoftmaxFunction.apply(x)


def _kl_div(
    log_probs: Tensor, target: Tensor, *, log_target: bool = False, reduction: str = "batchmean", **options: Any
) -> Tensor:
    if options or reduction == "rows":
        raise NotImplementedError("no rows, labels or num_items")
    return _ops().LigerKLDivLossFunction.apply(log_probs, target, reduction, log_target)


def _jsd(
    student_log_probs: Tensor,
    teacher_log_probs: Tensor,
    *,
    beta: float = 0.5,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    **options: Any,
) -> Tensor:
    if options:
        raise NotImplementedError("only the mean of rows")
    return _ops().LigerJSDFunction.apply(student_log_probs, teacher_log_probs, labels, beta, ignore_index)


def _tvd(
    p: Tensor,
    q: Tensor,
    *,
    reduction: str = "batchmean",
    labels: Tensor | None = None,
    ignore_index: int = -100,
    **options: Any,
) -> Tensor:
    if options or reduction == "rows":
        raise NotImplementedError("no rows or num_items")
    return _ops().LigerTVDLossFunction.apply(p, q, labels, reduction, ignore_index)


PEER = Peer(
    "liger",
    "liger_kernel",
    {
        "rms_norm": _rms_norm,
        "layer_norm": _layer_norm,
        "group_norm": _group_norm,
        "modulated_norm": _modulated_norm,
        "glu": _glu,
        "rms_norm_glu": _rms_norm_glu,
        "rms_norm_mlp": _rms_norm_mlp,
        "rope": _rope,
        "qk_norm_rope": _qk_norm_rope,
        "cross_entropy": _cross_entropy,
        "linear_cross_entropy": _linear_cross_entropy,
        "softmax": _softmax,
        "sparsemax": lambda x: _ops().LigerSparsemaxFunction.apply(x, -1),
        "kl_div": _kl_div,
        "jsd": _jsd,
        "tvd": _tvd,
    },
    distribution="liger-kernel",
    synchronises=frozenset({"cross_entropy", "linear_cross_entropy"}),
)
