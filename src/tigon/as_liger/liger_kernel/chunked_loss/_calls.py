"""What all of these losses share: Liger-Kernel's metrics of logits, and options that say how and not what.

`compiled` and `chunk_size` choose how Liger-Kernel computes; they are taken and change nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.losses import PreferenceOutput
from tigon.ops._check import require


@torch.no_grad()
def mean_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`[sequences]`: the mean of all logits of each, which is a product of two means; in fp32."""
    if not hidden.shape[1]:
        return hidden.new_zeros(hidden.shape[0], dtype=torch.float32)
    mean = hidden.mean(1, dtype=torch.float32) @ weight.mean(0, dtype=torch.float32)
    return mean if bias is None else mean + bias.mean(dtype=torch.float32)


def of_pairs(
    out: PreferenceOutput, hidden: Tensor, weight: Tensor, bias: Tensor | None, nll: bool, *more: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Loss and metrics in Liger-Kernel's order."""
    logits = (half.mean() for half in mean_logits(hidden, weight, bias).chunk(2))
    nll_loss = out.nll_loss if nll else torch.zeros_like(out.nll_loss)
    rewards = out.chosen_rewards, out.rejected_rewards
    return out.loss, (out.chosen_log_probs, out.rejected_log_probs, *logits, nll_loss, *rewards, *more)


def reference(name: str, use_ref_model: bool, ref_input: Any, ref_weight: Any, ref_bias: Any) -> dict[str, Any]:
    """The reference's part of a call."""
    if not use_ref_model:
        return {"reference_free": True}
    require(ref_input is not None, name, "ref_input", "a tensor with use_ref_model", None)
    require(ref_weight is not None, name, "ref_weight", "a tensor with use_ref_model", None)
    return {"ref_hidden": ref_input, "ref_weight": ref_weight, "ref_bias": ref_bias}
