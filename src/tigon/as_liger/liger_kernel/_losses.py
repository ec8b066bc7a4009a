"""Both cross entropies with all that Liger-Kernel returns of them: loss, z-loss, token accuracy, predicted tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tigon.ops import LinearCrossEntropyOutput, cross_entropy, linear_cross_entropy
from tigon.ops._check import require, require_one_of


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
    loss, z_loss, predicted = _parts(cross_entropy(logits, target, return_z_loss=return_z_loss, **options))
    if return_token_accuracy or return_predicted_tokens:
        predicted = logits.detach().argmax(-1).masked_fill(target == ignore_index, -1)
    metrics = _metrics(predicted, target, ignore_index, reduction, return_token_accuracy, return_predicted_tokens)
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
    options["return_predictions"] = return_token_accuracy or return_predicted_tokens
    if use_token_scaling:
        require(lse_square_scale == 0, name, "use_token_scaling", "lse_square_scale 0 with it", lse_square_scale)
        require(ce_weight is None, name, "use_token_scaling", "no ce_weight with it", "a tensor")
        loss, z_loss, predicted = _token_scaled(hidden, weight, target, bias, return_z_loss, options)
    else:
        out = linear_cross_entropy(hidden, weight, target, bias=bias, return_z_loss=return_z_loss, **options)
        loss, z_loss, predicted = _parts(out)
    metrics = _metrics(predicted, target, ignore_index, reduction, return_token_accuracy, return_predicted_tokens)
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


def _parts(out: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Loss, z-loss and predictions; None for what `out` has not."""
    if isinstance(out, Tensor):
        return out, None, None
    return tuple(out) if isinstance(out, LinearCrossEntropyOutput) else (*out, None)


def _token_scaled(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, return_z_loss: bool, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Each row's loss times the probability of its label, which gets no gradient."""
    reduction = options.pop("reduction")
    require_one_of("liger_fused_linear_cross_entropy", "reduction", reduction, ("mean", "sum", "none"))
    out = linear_cross_entropy(hidden, weight, target, bias=bias, reduction="none", **options)
    rows, _, predicted = _parts(out)
    plain = rows.detach()
    if options["label_smoothing"]:
        with torch.no_grad():
            unsmoothed = {**options, "label_smoothing": 0.0, "return_predictions": False}
            plain = linear_cross_entropy(hidden, weight, target, bias=bias, reduction="none", **unsmoothed)
    rows = rows * torch.exp(-plain)
    zero = torch.zeros_like(rows) if reduction == "none" else rows.new_zeros(())
    z_loss = zero if return_z_loss else None
    if reduction == "none":
        return rows, z_loss, predicted
    if reduction == "sum":
        return rows.sum(), z_loss, predicted
    return rows.sum() / (target != options["ignore_index"]).sum().clamp(min=1), z_loss, predicted


@torch.no_grad()
def _metrics(
    predicted: Tensor | None, target: Tensor, ignore_index: int, reduction: str, accuracy: bool, tokens: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Token accuracy, of rows for reduction "none", and the predicted tokens; None for what is not asked for."""
    if predicted is None:
        return None, None
    valid = target != ignore_index
    right = ((predicted == target) & valid).float()
    if reduction != "none":
        right = right.sum() / valid.sum().clamp(min=1)
    return right if accuracy else None, predicted if tokens else None
