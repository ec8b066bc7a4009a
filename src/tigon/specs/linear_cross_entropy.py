"""Cases of `linear_cross_entropy`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.linear_cross_entropy import LinearCrossEntropyOutput, linear_cross_entropy_reference
from ._spec import Case, Cost, Make, Mutation, OpSpec
from .cross_entropy import draw_class_weight, draw_labels

_MANY_ROWS = {"M": 32768, "D": 4096, "V": 128256}
_HALVES = (torch.bfloat16, torch.float16)


def head_inputs(case: Case, make: Make) -> dict[str, Tensor | None]:
    dtype = torch.float32 if case.sizes.get("fp32") else None
    return {
        "hidden": make.randn(case.M, case.D, dtype=dtype),
        "weight": make.randn(case.V, case.D, scale=2.0 * case.D**-0.5, dtype=dtype),
        "labels": draw_labels(case, make),
        "bias": make.randn(case.V, scale=3.0, dtype=dtype) if case.sizes.get("bias") else None,
    }


def _inputs(case: Case, make: Make) -> dict[str, Tensor | None]:
    weighted = make.randn(case.M, dtype=torch.float32) if case.sizes.get("token_weight") else None
    return {**head_inputs(case, make), "class_weight": draw_class_weight(case, make), "token_weight": weighted}


def _no_token_weight(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, token_weight: Tensor | None = None, **options: Any
) -> Any:
    return linear_cross_entropy_reference(hidden, weight, labels, **options)


def head_cost(case: Case, itemsize: int) -> Cost:
    # Logits that stay within a chunk need not cross memory; a gradient of 1 leaves nothing to do in backward.
    product = 2 * case.M * case.D * case.V
    return Cost(
        forward_bytes=2 * (case.M + case.V) * case.D * itemsize + 20 * case.M,
        backward_bytes=4,
        forward_flops=3 * product,
    )


def _no_bias(hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, **options: Any) -> Any:
    bias = None if bias is None else 0 * bias
    return linear_cross_entropy_reference(hidden, weight, labels, bias=bias, **options)


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
    return linear_cross_entropy_reference(hidden, weight, labels, softcap=softcap, logit_scale=logit_scale, **options)


def _no_scale(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, logit_scale: float | None = None, **options: Any
) -> Any:
    return linear_cross_entropy_reference(hidden, weight, labels, **options)


def _no_smoothing(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, label_smoothing: float = 0.0, **options: Any
) -> Any:
    return linear_cross_entropy_reference(hidden, weight, labels, **options)


def _dweight_of_last_chunk(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Any:
    if not weight.requires_grad or labels.shape[0] < 2:
        return linear_cross_entropy_reference(hidden, weight, labels, **options)
    last = torch.arange(labels.shape[0], device=labels.device) >= labels.shape[0] // 2
    ones = torch.ones_like(weight)
    # The product rule: rows before the last chunk see a weight without a gradient.
    both = torch.cat((hidden * last.unsqueeze(-1), hidden * ~last.unsqueeze(-1)), -1)
    return linear_cross_entropy_reference(both, torch.cat((weight, weight.detach() * ones), -1), labels, **options)


def _chunks_averaged(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Any:
    half = labels.shape[0] // 2
    if options.get("reduction", "mean") != "mean" or options.get("return_z_loss") or half == 0:
        return linear_cross_entropy_reference(hidden, weight, labels, **options)
    first = linear_cross_entropy_reference(hidden[:half], weight, labels[:half], **options)
    return 0.5 * (first + linear_cross_entropy_reference(hidden[half:], weight, labels[half:], **options))


def _with_predictions(fault: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """The reference with `fault` applied to the predictions."""

    def faulty(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Any:
        out = linear_cross_entropy_reference(hidden, weight, labels, **options)
        if not isinstance(out, LinearCrossEntropyOutput):
            return out
        return out._replace(predictions=fault(out.predictions))

    return faulty


SPEC = OpSpec(
    name="linear_cross_entropy",
    cases=(
        Case("odd", {"M": 37, "D": 48, "V": 300}),
        Case("chunks", {"M": 37, "D": 32, "V": 129, "bias": 1}, {"max_logits_bytes": 10 * 129 * 4}),
        Case("one_class", {"M": 5, "D": 16, "V": 1}),
        Case("one_row", {"M": 1, "D": 8, "V": 130}),
        Case("blocks", {"M": 3, "D": 16, "V": 8200}, {"reduction": "sum"}),
        Case("rows", {"M": 17, "D": 24, "V": 65}, {"reduction": "none", "max_logits_bytes": 4 * 65 * 4}),
        Case("smoothing", {"M": 9, "D": 16, "V": 130, "bias": 1}, {"label_smoothing": 0.1}),
        Case(
            "class_weight",
            {"M": 19, "D": 16, "V": 33, "class_weight": 1},
            {"label_smoothing": 0.1, "max_logits_bytes": 5 * 33 * 4},
        ),
        Case("z_loss", {"M": 9, "D": 16, "V": 70}, {"z_loss": 1e-2, "return_z_loss": True}),
        Case("softcap_scale", {"M": 9, "D": 16, "V": 200}, {"softcap": 2.0, "logit_scale": 0.5}),
        Case("num_items", {"M": 9, "D": 16, "V": 31}, {"num_items": 100, "z_loss": 1e-3}),
        Case("all_ignored", {"M": 5, "D": 16, "V": 40, "bias": 1, "all_ignored": 1}),
        Case("fp32", {"M": 8, "D": 64, "V": 128, "fp32": 1}),
        Case(
            "tiles",
            {"M": 37, "D": 24, "V": 300, "bias": 1},
            {"memory": "min", "max_logits_bytes": 8000, "reduction": "none"},
        ),
        Case(
            "tiles_options",
            {"M": 19, "D": 16, "V": 515},
            {
                "memory": "min",
                "max_logits_bytes": 19 * 128 * 4,
                "label_smoothing": 0.1,
                "z_loss": 1e-2,
                "softcap": 3.0,
                "logit_scale": 0.5,
            },
        ),
        Case(
            "tiles_class_weight",
            {"M": 9, "D": 16, "V": 140, "class_weight": 1},
            {"memory": "min", "max_logits_bytes": 128 * 9 * 4, "reduction": "none"},
        ),
        Case("token_weight", {"M": 19, "D": 16, "V": 65, "token_weight": 1}, {"z_loss": 1e-2, "return_z_loss": True}),
        Case(
            "predictions",
            {"M": 37, "D": 16, "V": 515, "bias": 1},
            {"return_predictions": True, "max_logits_bytes": 10 * 528 * 4},
            dtypes=(torch.float32,),
            note="rounded to 16 bits, the largest logits are equal, and either product may have another one first",
        ),
        Case(
            "predictions_tiles",
            {"M": 37, "D": 16, "V": 515},
            {"return_predictions": True, "memory": "min", "max_logits_bytes": 20 * 256 * 4, "logit_scale": -0.5},
            dtypes=(torch.float32,),
            note="as of predictions",
        ),
        Case(
            "skip_ignored", {"M": 19, "D": 16, "V": 65, "token_weight": 1}, {"skip_ignored": True, "reduction": "none"}
        ),
        Case("hidden_4096", {"M": 8192, "D": 4096, "V": 128256}, models_only=True),
        Case("hidden_4096_min", {"M": 8192, "D": 4096, "V": 128256}, {"memory": "min"}, models_only=True),
        Case("rows_32768", _MANY_ROWS, models_only=True, dtypes=_HALVES, exact=torch.float32),
        Case("rows_32768_min", _MANY_ROWS, {"memory": "min"}, models_only=True, dtypes=_HALVES, exact=torch.float32),
        Case("hidden_2304", {"M": 8192, "D": 2304, "V": 256000}, models_only=True),
        Case("hidden_2304_min", {"M": 8192, "D": 2304, "V": 256000}, {"memory": "min"}, models_only=True),
        Case("softcap_2304", {"M": 8192, "D": 2304, "V": 256000}, {"softcap": 30.0}, models_only=True),
        Case("hidden_1024", {"M": 8192, "D": 1024, "V": 151936}, models_only=True),
        Case("hidden_1024_min", {"M": 8192, "D": 1024, "V": 151936}, {"memory": "min"}, models_only=True),
    ),
    inputs=_inputs,
    differentiable=("hidden", "weight", "bias"),
    empty=Case("empty", {"M": 0, "D": 8, "V": 64, "bias": 1}),
    cost=head_cost,
    mutations=(
        Mutation("bias left out", _no_bias),
        Mutation("cap before scale", _cap_before_scale),
        Mutation("scale ignored", _no_scale),
        Mutation("label smoothing ignored", _no_smoothing),
        Mutation("dweight of the last chunk alone", _dweight_of_last_chunk),
        Mutation("token_weight ignored", _no_token_weight),
        Mutation("mean of the means of chunks", _chunks_averaged),
        Mutation("predictions of ignored rows", _with_predictions(lambda classes: classes.clamp(min=0))),
        Mutation("predictions within their tile", _with_predictions(lambda classes: classes.fmod(256))),
        Mutation("predictions of the last row", _with_predictions(lambda classes: classes[-1:].expand_as(classes))),
    ),
    # The loss is one number from nine rows: the reference's own error in it is one draw, which may be next to zero.
    # One row's dweight is the rounding of its label's entry, one draw too.
    # dhidden sums over the vocabulary in fp32 in the order that the matrix library picks for a shape, and a chunk has
    # another shape than the reference: twice its error, measured, is that of the same product on fewer rows.
    # Six chunks add up a 16-bit dweight, each rounding it: 2.04 times the error of one product, measured.
    factor={"z_loss": 4.0, "one_row": 4.0, "hidden_4096": 3.0, "hidden_4096_min": 3.0, "rows_32768": 3.0},
    # fp32 launches what fp16 does not: its gradients wait for the upstream gradient instead of being multiplied.
    compile_cases=(
        "hidden_4096",
        "hidden_1024_min",
        "softcap_2304",
        "fp32",
        "softcap_scale",
        "class_weight",
        "z_loss",
        "tiles_options",
        "predictions",
    ),
)
