from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional
from ..functional import CrossEntropyOutput


def unpack_cross_entropy_result(result: Any) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Loss, z-loss, token accuracy and predicted tokens of whatever a loss returned."""
    if isinstance(result, CrossEntropyOutput):
        return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens
    parts = tuple(result) if isinstance(result, tuple) else (result,)
    return (*parts, *[None] * (4 - len(parts)))[:4]  # type: ignore[return-value]


def fixed_fused_linear_cross_entropy(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    target: Tensor,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    final_logit_softcapping: float | None = None,
    accum_dtype: torch.dtype | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **kwargs: Any,
) -> Tensor | CrossEntropyOutput:
    """The mean over the rows, or over `num_items_in_batch` of which these are a part."""
    result = functional.liger_fused_linear_cross_entropy(
        hidden_states,
        lm_head_weight,
        target,
        reduction="mean" if num_items_in_batch is None else "sum",
        ignore_index=ignore_index,
        softcap=final_logit_softcapping,
        accum_dtype=accum_dtype,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        **kwargs,
    )
    loss, _, accuracy, tokens = unpack_cross_entropy_result(result)
    if num_items_in_batch is not None:
        loss = loss / num_items_in_batch
    if not (return_token_accuracy or return_predicted_tokens):
        return loss
    return CrossEntropyOutput(loss, token_accuracy=accuracy, predicted_tokens=tokens)


def LigerForCausalLMLoss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor | None,
    hidden_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    final_logit_softcapping: float | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **kwargs: Any,
) -> Tensor | CrossEntropyOutput:
    """The causal language model loss of hidden states; keywords of attention and the like may stand among others."""
    options = inspect.signature(functional.liger_fused_linear_cross_entropy).parameters
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return fixed_fused_linear_cross_entropy(
        hidden_states.reshape(-1, hidden_size),
        lm_head_weight,
        shift_labels.reshape(-1).to(hidden_states.device),
        num_items_in_batch,
        ignore_index,
        final_logit_softcapping,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        **{name: value for name, value in kwargs.items() if name in options},
    )
