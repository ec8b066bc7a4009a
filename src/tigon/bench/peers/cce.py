"""Cut cross-entropy (github.com/apple/ml-cross-entropy), called through its function, without its gradient filter."""

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
    **options: Any,
) -> Tensor:
    from cut_cross_entropy import LinearCrossEntropyImpl, linear_cross_entropy

    if options:
        raise NotImplementedError(f"no {', '.join(options)}")
    # Up to 25.1.1, the last on PyPI, the filter can be turned off, but gradients add up in their dtype.
    is_exact = "CCE_EXACT" in LinearCrossEntropyImpl.__members__
    how: dict[str, Any] = {"impl": "cce_exact"} if is_exact else {"impl": "cce", "filter_eps": None}
    if bias is not None:
        if not is_exact:
            raise NotImplementedError("no bias")
        how["bias"] = bias
    rows = hidden.flatten(0, -2), weight, labels.flatten()
    return linear_cross_entropy(*rows, ignore_index=ignore_index, softcap=softcap, reduction="mean", **how)


PEER = Peer(
    "cce",
    "cut_cross_entropy",
    {"linear_cross_entropy": _linear_cross_entropy},
    distribution="cut-cross-entropy",
    synchronises=frozenset({"linear_cross_entropy"}),
)
