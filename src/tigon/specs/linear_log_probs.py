"""Cases of `linear_log_probs`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.linear_log_probs import LogProbsOutput, linear_log_probs_reference
from ._spec import Case, Cost, Mutation, OpSpec
from .linear_cross_entropy import head_inputs


def _cost(case: Case, itemsize: int) -> Cost:
    # Logits that stay within a chunk need not cross memory.
    product, inputs = 2 * case.M * case.D * case.V, (case.M + case.V) * case.D * itemsize
    return Cost(
        forward_bytes=inputs + 24 * case.M,
        backward_bytes=2 * inputs + 24 * case.M,
        forward_flops=product,
        backward_flops=3 * product,
    )


def _no_bias(hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, **options: Any) -> Any:
    bias = None if bias is None else 0 * bias
    return linear_log_probs_reference(hidden, weight, labels, bias=bias, **options)


def _cap_before_scale(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    softcap: float | None = None,
    logit_scale: float | None = None,
    **options: Any,
) -> Any:
    if softcap is not None and logit_scale is not None:
        softcap = softcap * logit_scale
    return linear_log_probs_reference(hidden, weight, labels, softcap=softcap, logit_scale=logit_scale, **options)


def _no_scale(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, logit_scale: float | None = None, **options: Any
) -> Any:
    return linear_log_probs_reference(hidden, weight, labels, **options)


def _padding_counted(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, **options: Any
) -> Any:
    bias = None if bias is None else F.pad(bias, (0, 1))
    return linear_log_probs_reference(hidden, F.pad(weight, (0, 0, 0, 1)), labels, bias=bias, **options)


def _with_entropy(fault: Any) -> Any:
    """The reference with `fault` applied to the entropies."""

    def faulty(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Any:
        out = linear_log_probs_reference(hidden, weight, labels, **options)
        if isinstance(out, Tensor) or out.entropy is None:
            return out
        return out._replace(entropy=fault(out.entropy))

    return faulty


def _dentropy_for_all(entropy: Tensor) -> Tensor:
    """Values of rows, with the upstream gradient of the first row for all of them."""
    if not entropy.numel():
        return entropy
    total = entropy.sum()
    return entropy.detach() + (total - total.detach()) * entropy.new_ones(entropy.shape).cumsum(0).eq(1)


def _ignored_rows_counted(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Any:
    ignored = labels == -100
    out = linear_log_probs_reference(hidden, weight, labels.masked_fill(ignored, 0), **options)
    if isinstance(out, Tensor):
        return out
    return LogProbsOutput(out.log_probs.masked_fill(ignored, 0.0), out.entropy, out.predictions)


def _dweight_of_last_chunk(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Any:
    if not weight.requires_grad or labels.shape[0] < 2:
        return linear_log_probs_reference(hidden, weight, labels, **options)
    last = (torch.arange(labels.shape[0], device=labels.device) >= labels.shape[0] // 2).unsqueeze(-1)
    # The product rule: rows before the last chunk see a weight without a gradient.
    both = torch.cat((hidden * last, hidden * ~last), -1)
    return linear_log_probs_reference(both, torch.cat((weight, weight.detach()), -1), labels, **options)


SPEC = OpSpec(
    name="linear_log_probs",
    cases=(
        Case("odd", {"M": 37, "D": 48, "V": 300}, {"return_entropy": True}),
        Case("chunks", {"M": 37, "D": 32, "V": 129, "bias": 1}, {"return_entropy": True, "max_logits_bytes": 5160}),
        Case("one_class", {"M": 5, "D": 16, "V": 1}, {"return_entropy": True}),
        Case("one_row", {"M": 1, "D": 8, "V": 130}, {"return_entropy": True}),
        Case("blocks", {"M": 3, "D": 16, "V": 8200}, {"return_entropy": True}),
        Case("log_probs", {"M": 17, "D": 24, "V": 65, "bias": 1}, {"max_logits_bytes": 4 * 65 * 4}),
        Case("log_probs_softcap", {"M": 9, "D": 16, "V": 127}, {"softcap": 3.0}),
        Case(
            "softcap_scale", {"M": 9, "D": 16, "V": 200}, {"softcap": 2.0, "logit_scale": 0.5, "return_entropy": True}
        ),
        Case("temperature", {"M": 9, "D": 16, "V": 31, "bias": 1}, {"logit_scale": 1 / 0.7, "return_entropy": True}),
        Case(
            "predictions",
            {"M": 19, "D": 16, "V": 4100},
            {"return_entropy": True, "return_predictions": True},
            dtypes=(torch.float32,),
            note="rounded to 16 bits, the largest logits are equal, and either product may have another one first",
        ),
        Case("all_ignored", {"M": 5, "D": 16, "V": 40, "bias": 1, "all_ignored": 1}, {"return_entropy": True}),
        Case("fp32", {"M": 8, "D": 64, "V": 128, "fp32": 1}, {"return_entropy": True}),
        Case("hidden_4096", {"M": 8192, "D": 4096, "V": 128256}, {"return_entropy": True}, models_only=True),
    ),
    inputs=head_inputs,
    differentiable=("hidden", "weight", "bias"),
    empty=Case("empty", {"M": 0, "D": 8, "V": 64, "bias": 1}, {"return_entropy": True, "return_predictions": True}),
    cost=_cost,
    mutations=(
        Mutation("bias left out", _no_bias),
        Mutation("cap before scale", _cap_before_scale),
        Mutation("scale ignored", _no_scale),
        Mutation("a padded lane enters the sum", _padding_counted),
        Mutation("entropy without gradient", _with_entropy(Tensor.detach)),
        Mutation("entropy in bits", _with_entropy(lambda entropy: entropy / 0.6931471805599453)),
        Mutation("one upstream gradient of the entropy for all rows", _with_entropy(_dentropy_for_all)),
        Mutation("entropy of ignored rows", _ignored_rows_counted),
        Mutation("dweight of the last chunk alone", _dweight_of_last_chunk),
    ),
    # As for linear_cross_entropy: dhidden sums over the vocabulary in the order that the matrix library picks.
    factor={"hidden_4096": 3.0},
    compile_cases=("hidden_4096", "predictions", "softcap_scale", "log_probs", "log_probs_softcap", "temperature"),
)
