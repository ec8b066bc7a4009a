"""Cases of `cross_entropy`."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..ops.cross_entropy import CrossEntropyOutput, cross_entropy_reference
from ._spec import Case, Cost, Make, Mutation, OpSpec


def draw_labels(case: Case, make: Make) -> Tensor:
    """Classes, a fifth of them ignored, or all."""
    labels = make.integers(0, case.V, case.M)
    return labels.masked_fill(make.mask(2.0 if case.sizes.get("all_ignored") else 0.2, case.M), -100)


def draw_class_weight(case: Case, make: Make) -> Tensor | None:
    return make.randn(case.V).abs() if case.sizes.get("class_weight") else None


def _inputs(case: Case, make: Make) -> dict[str, Tensor | None]:
    logits = make.randn(case.M, case.V, scale=3.0) if case.models_only else make.rows(case.M, case.V, spread=1.0)
    return {
        "logits": logits,
        "labels": draw_labels(case, make),
        "class_weight": draw_class_weight(case, make),
    }


def _cost(case: Case, itemsize: int) -> Cost:
    logits = case.M * case.V * itemsize
    return Cost(forward_bytes=logits + 20 * case.M, backward_bytes=2 * logits + 16 * case.M)


def _no_smoothing(logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0, **options: Any) -> Any:
    return cross_entropy_reference(logits, labels, **options)


def _no_cap(logits: Tensor, labels: Tensor, *, softcap: float | None = None, **options: Any) -> Any:
    return cross_entropy_reference(logits, labels, **options)


def _no_z_loss(logits: Tensor, labels: Tensor, *, z_loss: float = 0.0, **options: Any) -> Any:
    return cross_entropy_reference(logits, labels, **options)


def _no_class_weight(logits: Tensor, labels: Tensor, *, class_weight: Tensor | None = None, **options: Any) -> Any:
    return cross_entropy_reference(logits, labels, **options)


def _ignored_rows_counted(logits: Tensor, labels: Tensor, **options: Any) -> Any:
    return cross_entropy_reference(logits, labels, **{"num_items": labels.numel(), **options})


def _num_items_ignored(logits: Tensor, labels: Tensor, *, num_items: Any = None, **options: Any) -> Any:
    return cross_entropy_reference(logits, labels, **options)


def _padding_counted(logits: Tensor, labels: Tensor, **options: Any) -> Any:
    options["class_weight"] = None
    return cross_entropy_reference(F.pad(logits, (0, 1)), labels, **options)


def _first_upstream_for_all(logits: Tensor, labels: Tensor, **options: Any) -> Any:
    out = cross_entropy_reference(logits, labels, **options)
    if isinstance(out, CrossEntropyOutput) or out.dim() == 0:
        return out
    shared = out.sum()
    return out.detach() + (shared - shared.detach()) * out.new_ones(out.shape).cumsum(0).eq(1)


SPEC = OpSpec(
    name="cross_entropy",
    cases=(
        Case("odd", {"M": 37, "V": 300}),
        Case("one_class", {"M": 5, "V": 1}),
        Case("one_row", {"M": 1, "V": 129}),
        Case("blocks", {"M": 4, "V": 16385}),
        Case("sum", {"M": 9, "V": 127}, {"reduction": "sum"}),
        Case("rows", {"M": 17, "V": 64}, {"reduction": "none"}),
        Case("smoothing", {"M": 9, "V": 130}, {"label_smoothing": 0.1}),
        Case("class_weight", {"M": 19, "V": 33, "class_weight": 1}),
        Case("z_loss", {"M": 9, "V": 70}, {"z_loss": 1e-2, "return_z_loss": True}),
        Case("softcap", {"M": 9, "V": 200}, {"softcap": 5.0}),
        Case("num_items", {"M": 9, "V": 31}, {"num_items": 100, "z_loss": 1e-3}),
        Case("all_ignored", {"M": 5, "V": 40, "all_ignored": 1}, {"z_loss": 1e-2}),
        Case(
            "all_options",
            {"M": 11, "V": 8200, "class_weight": 1},
            {"label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 10.0, "reduction": "none"},
        ),
        Case("vocab_128256", {"M": 8192, "V": 128256}, models_only=True),
        Case("vocab_32000", {"M": 16384, "V": 32000}, models_only=True),
        Case("vocab_151936", {"M": 8192, "V": 151936}, models_only=True),
        Case("vocab_50257", {"M": 8192, "V": 50257}, models_only=True),
        Case("vocab_256000", {"M": 4096, "V": 256000}, {"softcap": 30.0}, models_only=True),
    ),
    inputs=_inputs,
    differentiable=("logits",),
    empty=Case("empty", {"M": 0, "V": 64}),
    cost=_cost,
    mutations=(
        Mutation("label smoothing ignored", _no_smoothing),
        Mutation("softcap ignored", _no_cap),
        Mutation("z-loss ignored", _no_z_loss),
        Mutation("class weight ignored", _no_class_weight),
        Mutation("mean over ignored rows too", _ignored_rows_counted),
        Mutation("num_items ignored", _num_items_ignored),
        Mutation("a padded lane enters the sum", _padding_counted),
        Mutation("one upstream gradient for all rows", _first_upstream_for_all),
    ),
    compile_cases=("vocab_128256", "vocab_256000", "all_options", "z_loss", "smoothing", "odd"),
)
