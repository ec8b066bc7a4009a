"""What the specifications of the divergences share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ._spec import Case, Cost, Make, Mutation


def logarithms(case: Case, make: Make) -> Tensor:
    """Log-probabilities; a few classes of wide rows have probability 0, but not where peers are measured."""
    drawn = make.randn(case.M, case.N, scale=2.0, dtype=torch.float32)
    if case.N > 64 and not case.models_only:
        drawn = drawn.masked_fill(make.mask(0.05, case.M, case.N), float("-inf"))
    return drawn.log_softmax(-1).to(make.dtype)


def probabilities(case: Case, make: Make) -> Tensor:
    return logarithms(case, make).float().exp().to(make.dtype)


def labels(case: Case, make: Make) -> Tensor | None:
    """None, or labels of which two fifths are ignored, or all."""
    if not case.sizes.get("labels"):
        return None
    drawn = make.integers(0, case.N, case.M)
    return drawn.masked_fill(make.mask(2.0 if case.sizes.get("all_ignored") else 0.4, case.M), -100)


def cost(backward_reads: int) -> Callable[[Case, int], Cost]:
    """Both inputs are read once; backward reads as many of them as the gradient of the first needs."""

    def of(case: Case, itemsize: int) -> Cost:
        tensor = case.M * case.N * itemsize
        reads, writes = (backward_reads, 1) if case.frozen else (2, 2)
        return Cost(forward_bytes=2 * tensor + 4 * case.M, backward_bytes=(reads + writes) * tensor + 4 * case.M)

    return of


def cases(teacher: str, *options: tuple[str, Mapping[str, Any]]) -> tuple[Case, ...]:
    """The cases of every divergence, with those of its own `options` after the small ones."""
    return (
        Case("odd", {"M": 37, "N": 300}),
        Case("one_column", {"M": 5, "N": 1}),
        Case("one_row", {"M": 1, "N": 129}),
        Case("blocks", {"M": 5, "N": 8193}),
        Case("mean", {"M": 9, "N": 127}, {"reduction": "mean"}),
        Case("sum", {"M": 9, "N": 127}, {"reduction": "sum"}),
        Case("rows", {"M": 17, "N": 64, "labels": 1}, {"reduction": "rows"}),
        Case("none", {"M": 17, "N": 64, "labels": 1}, {"reduction": "none"}),
        Case("ignored", {"M": 19, "N": 70, "labels": 1}),
        Case("all_ignored", {"M": 5, "N": 40, "labels": 1, "all_ignored": 1}, {"reduction": "mean"}),
        Case("num_items", {"M": 9, "N": 31, "labels": 1}, {"num_items": 100}),
        *(Case(name, {"M": 19, "N": 130}, given) for name, given in options),
        Case("vocab_128256", {"M": 4096, "N": 128256}, models_only=True, frozen=(teacher,)),
        Case("vocab_32000", {"M": 8192, "N": 32000}, models_only=True, frozen=(teacher,)),
    )


EMPTY = Case("empty", {"M": 0, "N": 64})
COMPILED = ("vocab_128256", "odd", "blocks", "none", "ignored")


def mutations(reference: Callable[..., Tensor]) -> tuple[Mutation, ...]:
    """Faults that every divergence could have, from its reference."""

    def ignored_rows_counted(first: Tensor, second: Tensor, labels: Tensor | None, **options: Any) -> Tensor:
        if labels is not None and options.get("reduction", "batchmean") == "batchmean":
            options = {"num_items": labels.numel(), **options}
        return reference(first, second, labels=labels, **options)

    def labels_unused(first: Tensor, second: Tensor, labels: Tensor | None, **options: Any) -> Tensor:
        return reference(first, second, **options)

    def num_items_unused(first: Tensor, second: Tensor, labels: Tensor | None, **options: Any) -> Tensor:
        return reference(first, second, labels=labels, **{**options, "num_items": None})

    def always_batchmean(first: Tensor, second: Tensor, labels: Tensor | None, **options: Any) -> Tensor:
        if options.get("reduction") == "mean":
            options["reduction"] = "batchmean"
        return reference(first, second, labels=labels, **options)

    def last_column_lost(first: Tensor, second: Tensor, labels: Tensor | None, **options: Any) -> Tensor:
        if first.shape[-1] == 1 or options.get("reduction") in ("none", "mean"):
            return reference(first, second, labels=labels, **options)
        return reference(first[..., :-1], second[..., :-1], labels=labels, **options)

    def first_upstream_for_all(first: Tensor, second: Tensor, labels: Tensor | None, **options: Any) -> Tensor:
        out = reference(first, second, labels=labels, **options)
        if out.dim() == 0:
            return out
        shared = out.sum()
        first_alone = torch.zeros_like(out)
        first_alone.view(-1)[0] = 1.0
        return out.detach() + (shared - shared.detach()) * first_alone

    def second_detached(first: Tensor, second: Tensor, labels: Tensor | None, **options: Any) -> Tensor:
        out = reference(first, second.detach(), labels=labels, **options)
        return out + 0 * second.masked_fill(~second.isfinite(), 0.0).sum().to(out.dtype)

    found = (
        ("mean over ignored rows too", ignored_rows_counted),
        ("labels unused", labels_unused),
        ("num_items unused", num_items_unused),
        ("mean of rows for mean of elements", always_batchmean),
        ("last column lost", last_column_lost),
        ("one upstream gradient for all", first_upstream_for_all),
        ("no gradient of the second distribution", second_detached),
    )
    return tuple(Mutation(name, _by_name(function)) for name, function in found)


def _by_name(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` of two distributions and labels, called with the names that an operator gives them."""

    def called(**given: Any) -> Tensor:
        labels = given.pop("labels", None)
        first, second = (given.pop(name) for name in [k for k, v in given.items() if isinstance(v, Tensor)])
        return function(first, second, labels, **given)

    return called
