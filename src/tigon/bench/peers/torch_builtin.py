"""The fused functions that torch itself ships."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from . import Peer


def _rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    residual: Tensor | None = None,
    **_: Any,
) -> Any:
    s = x if residual is None else x + residual
    y = F.rms_norm(s, s.shape[-1:], weight if weight is None or offset == 0 else weight + offset, eps)
    return y if residual is None else (y, s)


def _layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    return F.group_norm(x, num_groups, weight, bias, eps)


def _cross_entropy(
    logits: Tensor, labels: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0, **options: Any
) -> Tensor:
    if options:
        raise NotImplementedError(f"torch's cross entropy has no {', '.join(options)}")
    return F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=ignore_index, label_smoothing=label_smoothing
    )


def _kl_div(
    log_probs: Tensor, target: Tensor, *, log_target: bool = False, reduction: str = "batchmean", **options: Any
) -> Tensor:
    if options or reduction == "rows":
        raise NotImplementedError("torch's kl_div has no rows, labels or num_items")
    return F.kl_div(log_probs, target, reduction=reduction, log_target=log_target)


PEER = Peer(
    "torch_builtin",
    "torch",
    {
        "rms_norm": _rms_norm,
        "layer_norm": _layer_norm,
        "group_norm": _group_norm,
        "cross_entropy": _cross_entropy,
        "softmax": lambda x, **options: F.softmax(x, -1, **options),
        "log_softmax": lambda x, **options: F.log_softmax(x, -1, **options),
        "kl_div": _kl_div,
    },
)
