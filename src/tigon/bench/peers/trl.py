"""TRL's log-probabilities by tiles of logits, called as its own trainers call them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import Peer


def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float | None = None,
    **options: Any,
) -> Tensor:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    if options:
        raise NotImplementedError(f"no {', '.join(options)}")
    scale = 1.0 if logit_scale is None else logit_scale
    how = 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, softcap, scale, ("log_probs",)
    mask = labels != ignore_index
    log_probs, *_ = ChunkedLogProbFunction.apply(hidden[mask], weight, bias, labels[mask], *how)
    return -log_probs.sum() / mask.sum().clamp(min=1)


PEER = Peer(
    "trl",
    "trl",
    {"linear_cross_entropy": _linear_cross_entropy},
    distribution="trl",
    synchronises=frozenset({"linear_cross_entropy"}),
)
