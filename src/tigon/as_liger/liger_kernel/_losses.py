"""Both cross entropies with all that Liger-Kernel returns of them: loss, z-loss, token accuracy, predicted tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tigon.ops import cross_entropy, linear_cross_entropy
from tigon.ops._check import require, require_one_of

# Bytes of logits that exist at once while the largest of each row is looked for.
_ARGMAX_BYTES = 64 * 2**20


@dataclass
class CrossEntropyOutput:
    """What a loss returns when more than the loss is asked for."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


class Parts(NamedTuple):
    """The four results of Liger-Kernel's functions; None for those not asked for."""

    loss: Tensor
    z_loss: Tensor | None
    token_accuracy: Tensor | None
    predicted_tokens: Tensor | None

    def as_asked(self) -> Tensor | CrossEntropyOutput:
        """The loss alone, if nothing else was asked for."""
        return self.loss if self[1:] == (None, None, None) else CrossEntropyOutput(*self)


def of_logits(
    logits: Tensor,
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
) -> Parts:
    options = _options(weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap)
    loss, z_loss = _with_z_loss(cross_entropy(logits, target, return_z_loss=return_z_loss, **options))
    metrics = _metrics(
        lambda: logits.detach().argmax(-1),
        target,
        ignore_index,
        reduction,
        return_token_accuracy,
        return_predicted_tokens,
    )
    return Parts(loss, z_loss, *metrics)


def of_hidden(
    hidden: Tensor,
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
) -> Parts:
    name = "liger_fused_linear_cross_entropy"
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    require(accum_dtype in (None, wide), name, "accum_dtype", f"None or {wide}, in which it always adds", accum_dtype)
    options = _options(ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap)
    if chunk_mem_const != 1:
        require(chunk_mem_const > 0, name, "chunk_mem_const", "a positive number", chunk_mem_const)
        # Twice a row of logits is room for one that is aligned.
        row = 2 * (weight.shape[0] + 64) * hidden.element_size()
        options["max_logits_bytes"] = max(int(chunk_mem_const * hidden.numel() * hidden.element_size()), row)
    if use_token_scaling:
        require(lse_square_scale == 0, name, "use_token_scaling", "lse_square_scale 0 with it", lse_square_scale)
        require(ce_weight is None, name, "use_token_scaling", "no ce_weight with it", "a tensor")
        loss, z_loss = _token_scaled(hidden, weight, target, bias, return_z_loss, options)
    else:
        loss, z_loss = _with_z_loss(
            linear_cross_entropy(hidden, weight, target, bias=bias, return_z_loss=return_z_loss, **options)
        )
    metrics = _metrics(
        lambda: _largest(hidden, weight, bias),
        target,
        ignore_index,
        reduction,
        return_token_accuracy,
        return_predicted_tokens,
    )
    return Parts(loss, z_loss, *metrics)


def _options(
    class_weight: Tensor | None,
    ignore_index: int,
    lse_square_scale: float,
    label_smoothing: float,
    reduction: str,
    softcap: float | None,
) -> dict[str, Any]:
    return {
        "class_weight": class_weight,
        "ignore_index": ignore_index,
        "z_loss": lse_square_scale,
        "label_smoothing": label_smoothing,
        "reduction": reduction,
        "softcap": softcap,
    }


def _with_z_loss(out: Any) -> tuple[Tensor, Tensor | None]:
    return (out, None) if isinstance(out, Tensor) else tuple(out)


def _token_scaled(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, return_z_loss: bool, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Each row's loss times the probability of its label, which gets no gradient."""
    reduction = options.pop("reduction")
    require_one_of("liger_fused_linear_cross_entropy", "reduction", reduction, ("mean", "sum", "none"))
    rows = linear_cross_entropy(hidden, weight, target, bias=bias, reduction="none", **options)
    plain = rows.detach()
    if options["label_smoothing"]:
        with torch.no_grad():
            plain = linear_cross_entropy(
                hidden, weight, target, bias=bias, reduction="none", **{**options, "label_smoothing": 0.0}
            )
    rows = rows * torch.exp(-plain)
    zero = torch.zeros_like(rows) if reduction == "none" else rows.new_zeros(())
    z_loss = zero if return_z_loss else None
    if reduction == "none":
        return rows, z_loss
    if reduction == "sum":
        return rows.sum(), z_loss
    return rows.sum() / (target != options["ignore_index"]).sum().clamp(min=1), z_loss


@torch.no_grad()
def _largest(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The class of the largest logit of each row. A soft cap does not change which it is."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    size = max(1, _ARGMAX_BYTES // (weight.shape[0] * hidden.element_size()))
    found = [F.linear(chunk, weight, bias).argmax(-1) for chunk in rows.split(size)]
    return torch.cat(found).reshape(hidden.shape[:-1])


@torch.no_grad()
def _metrics(
    largest: Callable[[], Tensor], target: Tensor, ignore_index: int, reduction: str, accuracy: bool, tokens: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Token accuracy, of rows for reduction "none", and predicted tokens, -1 where the label is ignored."""
    if not (accuracy or tokens):
        return None, None
    predicted, valid = largest(), target != ignore_index
    right = ((predicted == target) & valid).float()
    if reduction != "none":
        right = right.sum() / valid.sum().clamp(min=1)
    return right if accuracy else None, predicted.masked_fill(~valid, -1) if tokens else None
