"""Cases of `vocab_parallel_linear_cross_entropy` in one process; several are in its test."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.vocab_parallel_linear_cross_entropy import vocab_parallel_linear_cross_entropy_reference as reference
from ._spec import Case, Mutation, OpSpec
from .linear_cross_entropy import head_cost, head_inputs


def _of_two_shards(fault: str) -> Any:
    """The loss from the statistics of two shards of the classes, with one fault in how these become those of a row."""

    def loss_of(
        hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, **options: Any
    ) -> Tensor:
        half, plain = weight.shape[0] // 2, {"label_smoothing", "max_logits_bytes"}
        if half == 0 or set(options) - plain:
            return reference(hidden, weight, labels, bias=bias, **options)
        valid, y = labels != -100, labels.clamp(min=0)
        hidden = hidden.masked_fill(~valid.unsqueeze(-1), 0.0)
        logits = [
            torch.nn.functional.linear(hidden, weight[part], None if bias is None else bias[part])
            for part in (slice(half), slice(half, None))
        ]
        if fault == "dhidden of one shard":
            logits[1] = torch.nn.functional.linear(
                hidden.detach(), weight[half:], None if bias is None else bias[half:]
            )
        z = [part.to(torch.promote_types(part.dtype, torch.float32)) for part in logits]
        own = [part.amax(-1, keepdim=True) for part in z]
        peak = torch.maximum(*own).detach()
        base = own if fault == "sums from the maximum of each shard" else [peak, peak]
        total = sum((part - m).exp().sum(-1) for part, m in zip(z, base, strict=True))
        here = y < half
        target = [
            torch.where(here, z[0].gather(-1, y.clamp(max=half - 1).unsqueeze(-1)).squeeze(-1), 0.0),
            torch.where(here, 0.0, z[1].gather(-1, (y - half).clamp(min=0).unsqueeze(-1)).squeeze(-1)),
        ]
        if fault == "first logit where the label is of another shard":
            target = [target[0] + torch.where(here, 0.0, z[0][:, 0]), target[1] + torch.where(here, z[1][:, 0], 0.0)]
        lse = total.log() + peak.squeeze(-1)
        eps = options.get("label_smoothing", 0.0)
        num_classes = half if fault == "smoothing over the classes of one shard" else weight.shape[0]
        distance = sum((lse.unsqueeze(-1) - part).sum(-1) for part in z)
        losses = (1 - eps) * (lse - sum(target)) + eps / num_classes * distance
        return torch.where(valid, losses, 0.0).sum() / valid.sum().clamp(min=1)

    return loss_of


SPEC = OpSpec(
    name="vocab_parallel_linear_cross_entropy",
    cases=(
        Case("odd", {"M": 37, "D": 48, "V": 300}),
        Case("chunks", {"M": 37, "D": 32, "V": 129, "bias": 1}, {"max_logits_bytes": 10 * 129 * 4}),
        Case("one_class", {"M": 5, "D": 16, "V": 1}),
        Case("blocks", {"M": 3, "D": 16, "V": 8200}, {"reduction": "sum"}),
        Case("rows", {"M": 17, "D": 24, "V": 65}, {"reduction": "none", "max_logits_bytes": 4 * 65 * 4}),
        Case("smoothing", {"M": 9, "D": 16, "V": 130, "bias": 1}, {"label_smoothing": 0.1}),
        Case("z_loss", {"M": 9, "D": 16, "V": 70}, {"z_loss": 1e-2}),
        Case("softcap_scale", {"M": 9, "D": 16, "V": 200}, {"softcap": 2.0, "logit_scale": 0.5}),
        Case("num_items", {"M": 9, "D": 16, "V": 31}, {"num_items": 100, "z_loss": 1e-3}),
        Case("all_ignored", {"M": 5, "D": 16, "V": 40, "bias": 1, "all_ignored": 1}),
        Case("hidden_4096", {"M": 8192, "D": 4096, "V": 32064}, models_only=True),
    ),
    inputs=head_inputs,
    differentiable=("hidden", "weight", "bias"),
    empty=Case("empty", {"M": 0, "D": 8, "V": 64, "bias": 1}),
    cost=head_cost,
    mutations=tuple(
        Mutation(fault, _of_two_shards(fault))
        for fault in (
            "sums from the maximum of each shard",
            "first logit where the label is of another shard",
            "smoothing over the classes of one shard",
            "dhidden of one shard",
        )
    ),
    # As for linear_cross_entropy.
    factor={"z_loss": 4.0, "hidden_4096": 3.0},
    compile_cases=("hidden_4096", "smoothing", "softcap_scale", "z_loss"),
)
