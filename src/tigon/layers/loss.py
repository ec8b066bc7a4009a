"""The causal language model loss, of logits or of the hidden states before them."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.cross_entropy import cross_entropy
from ..ops.linear_cross_entropy import linear_cross_entropy


class ForCausalLMLoss(nn.Module):
    """Mean over the labels, or over `num_items_in_batch` of which these are a part; labels are of the next token."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        return causal_lm_loss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels)


class LinearForCausalLMLoss(nn.Module):
    """`ForCausalLMLoss` of hidden states and the weight of the head where both are given, without logits."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        logits: Tensor | None,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        hidden_states: Tensor | None = None,
        lm_head_weight: Tensor | None = None,
        lm_head_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if hidden_states is None or lm_head_weight is None:
            if logits is None:
                raise ValueError("LinearForCausalLMLoss: logits: expected a tensor without hidden_states, got None")
            return causal_lm_loss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels)
        return linear_cross_entropy(
            hidden_states,
            lm_head_weight,
            _targets(labels, shift_labels, ignore_index).to(hidden_states.device),
            bias=lm_head_bias,
            ignore_index=ignore_index,
            softcap=kwargs.get("final_logit_softcapping"),
            num_items=num_items_in_batch,
        )


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """What a model calls as its loss function."""
    rows = logits.reshape(-1, vocab_size)
    targets = _targets(labels, shift_labels, ignore_index).reshape(-1).to(rows.device)
    return cross_entropy(rows, targets, ignore_index=ignore_index, num_items=num_items_in_batch)


def _targets(labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    if shift_labels is not None:
        return shift_labels
    if labels is None:
        raise ValueError("ForCausalLMLoss: labels: expected a tensor without shift_labels, got None")
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
