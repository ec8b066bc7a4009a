"""QuACK (github.com/Dao-AILab/quack), called through its functions with autograd, with their defaults."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import Peer


def _rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast: str = "cast_then_scale",
    residual: Tensor | None = None,
) -> Any:
    from quack.rmsnorm import rmsnorm

    # It rounds once, after the weight: at least as exact as each of our casts.
    return rmsnorm(x, weight, residual=residual, eps=eps, prenorm=residual is not None, weight_offset=offset)


def _rope(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **options: Any) -> Any:
    from quack.rotary import apply_rotary_emb

    if k is None or options or (cos.dim() == 3 and cos.shape[0] != 1):
        raise NotImplementedError("only the half layout with full tables, one for all sequences")
    # [B, S, H, D], tables [S, D / 2].
    cos, sin = (t.reshape(t.shape[-2:])[:, : t.shape[-1] // 2] for t in (cos, sin))
    turned = (apply_rotary_emb(x.transpose(1, 2), cos, sin) for x in (q, k))
    return tuple(x.transpose(1, 2) for x in turned)


def _cross_entropy(logits: Tensor, labels: Tensor, *, ignore_index: int = -100, **options: Any) -> Tensor:
    from quack.cross_entropy import cross_entropy

    if options:
        raise NotImplementedError(f"no {', '.join(options)}")
    return cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=ignore_index)


def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    **options: Any,
) -> Tensor:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    if options or bias is not None:
        raise NotImplementedError(f"no {', '.join(options) or 'bias'}")
    return chunked_linear_cross_entropy(hidden.flatten(0, -2), weight, labels.flatten(), ignore_index=ignore_index)


PEER = Peer(
    "quack",
    "quack",
    {
        "rms_norm": _rms_norm,
        "rope": _rope,
        "cross_entropy": _cross_entropy,
        "linear_cross_entropy": _linear_cross_entropy,
    },
    distribution="quack-kernels",
)
