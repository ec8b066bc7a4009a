"""Cases of `rope`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.rope import rope_reference
from ._spec import Case, Cost, Make, Mutation, OpSpec


def _inputs(case: Case, make: Make) -> dict[str, Tensor | None]:
    heads_axis = case.options.get("unsqueeze_dim", 1)
    # Even also where a test cuts all sizes down.
    sections = case.options.get("sections")
    half = sum(sections) if sections else case.R // 2
    head_dim = max(case.D, 2 * half) if sections else case.D

    def heads(number: int) -> Tensor:
        if heads_axis == 1 and case.sizes.get("heads_first"):
            return make.randn(case.B, number, case.S, head_dim)
        x = make.randn(case.B, case.S, number, head_dim)
        # As attention makes them: a projection of each token, seen with the heads in front.
        return x if heads_axis == 2 else x.transpose(1, 2)

    # Normal values, not angles: a kernel that takes one half of a table for the other cannot hide. The cases of
    # models have the repeated halves of models, which is all that some peers read.
    table_shape = (case.S, 2 * half if case.options.get("tables", "full") == "full" else half)
    if case.sizes.get("table_batch"):
        table_shape = (case.table_batch, *table_shape)
    if sections:
        table_shape = (len(sections), *table_shape)
    table_dtype = torch.float32 if case.sizes.get("fp32_tables") else None

    def table() -> Tensor:
        drawn = make.randn(*table_shape, dtype=table_dtype)
        if not case.models_only or table_shape[-1] == half:
            return drawn
        if case.options.get("layout") == "interleaved":
            return drawn[..., :half].repeat_interleave(2, -1)
        return torch.cat((drawn[..., :half],) * 2, -1)

    # Any row for any token, some of them more than once.
    positions = make.integers(0, case.S, case.position_batch, case.S) if case.sizes.get("position_batch") else None
    return {
        "q": heads(case.Hq),
        "k": None if case.sizes.get("alone") else heads(case.Hk),
        "cos": table(),
        "sin": table(),
        "position_ids": positions,
    }


def _cost(case: Case, itemsize: int) -> Cost:
    heads = case.Hq + (0 if case.sizes.get("alone") else case.Hk)
    elements = case.B * case.S * heads * case.D
    table_size = 4 if case.sizes.get("fp32_tables") else itemsize
    width = case.R if case.options.get("tables", "full") == "full" else case.R // 2
    tables = 2 * case.sizes.get("table_batch", 1) * case.S * width * table_size
    # fp32 tables make an fp32 result, and so an fp32 upstream gradient.
    moved = elements * (itemsize + max(itemsize, table_size)) + tables
    return Cost(forward_bytes=moved, backward_bytes=moved)


def _turned_back(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **options: Any) -> Any:
    return rope_reference(q, k, cos, sin, **{**options, "inverse": not options.get("inverse", False)})


def _angles_of_first_sample(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **options: Any) -> Any:
    cos, sin = (t.narrow(-3, 0, 1) if t.dim() >= 3 else t for t in (cos, sin))
    return rope_reference(q, k, cos, sin, **options)


def _first_half_of_tables_twice(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **options: Any) -> Any:
    if options.get("tables", "full") == "full":
        cos, sin = (torch.cat((t.chunk(2, -1)[0],) * 2, -1) for t in (cos, sin))
    return rope_reference(q, k, cos, sin, **options)


def _layout_ignored(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **options: Any) -> Any:
    return rope_reference(q, k, cos, sin, **{**options, "layout": "half"})


def _other_end_of_the_head(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **options: Any) -> Any:
    return rope_reference(q, k, cos, sin, **{**options, "tail": not options.get("tail", False)})


def _halves_of_tables_for_neighbours(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **options: Any) -> Any:
    if options.get("tables", "full") == "full" and options.get("layout") == "interleaved":
        cos, sin = (torch.stack(t.chunk(2, -1), -1).flatten(-2) for t in (cos, sin))
    return rope_reference(q, k, cos, sin, **options)


def _last_key_head_left_out(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **options: Any) -> Any:
    y = rope_reference(q, k, cos, sin, **options)
    if isinstance(y, Tensor):
        return y
    axis = options.get("unsqueeze_dim", 1)
    turned, left = y[1].narrow(axis, 0, k.shape[axis] - 1), k.narrow(axis, k.shape[axis] - 1, 1)
    return y[0], torch.cat((turned, left.to(y[1].dtype)), axis)


def _positions_ignored(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, position_ids: Tensor | None = None, **options: Any
) -> Any:
    return rope_reference(q, k, cos, sin, **options)


def _first_table_for_all_sections(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, sections: Any = None, **options: Any
) -> Any:
    cos, sin = (t[0] if sections else t for t in (cos, sin))
    return rope_reference(q, k, cos, sin, **options)


_LARGE = {"B": 4, "S": 4096, "Hq": 32, "Hk": 8, "D": 128, "R": 128, "table_batch": 1}

SPEC = OpSpec(
    name="rope",
    cases=(
        Case("odd", {"B": 2, "S": 37, "Hq": 5, "Hk": 3, "D": 20, "R": 20}),
        Case("heads_first", {"B": 2, "S": 19, "Hq": 4, "Hk": 2, "D": 16, "R": 16, "heads_first": 1}),
        Case("tokens_first", {"B": 2, "S": 9, "Hq": 6, "Hk": 2, "D": 32, "R": 32}, {"unsqueeze_dim": 2}),
        Case("batch_tables", {"B": 3, "S": 7, "Hq": 2, "Hk": 2, "D": 12, "R": 12, "table_batch": 3}),
        Case("one_table", {"B": 3, "S": 7, "Hq": 2, "Hk": 1, "D": 12, "R": 12, "table_batch": 1}),
        Case("partial", {"B": 2, "S": 11, "Hq": 3, "Hk": 2, "D": 20, "R": 6}),
        Case("partial_odd_head", {"B": 1, "S": 5, "Hq": 3, "Hk": 1, "D": 7, "R": 2}),
        Case("half_tables", {"B": 2, "S": 17, "Hq": 4, "Hk": 4, "D": 24, "R": 16}, {"tables": "half"}),
        Case(
            "interleaved",
            {"B": 2, "S": 13, "Hq": 3, "Hk": 2, "D": 20, "R": 12, "table_batch": 2},
            {"layout": "interleaved", "tables": "half"},
        ),
        Case(
            "interleaved_to_half",
            {"B": 2, "S": 13, "Hq": 3, "Hk": 1, "D": 12, "R": 12},
            {"layout": "interleaved_to_half", "tables": "half"},
        ),
        Case(
            "interleaved_full_tables",
            {"B": 2, "S": 11, "Hq": 3, "Hk": 2, "D": 14, "R": 10, "table_batch": 2},
            {"layout": "interleaved"},
        ),
        Case(
            "interleaved_to_half_full_tables",
            {"B": 2, "S": 7, "Hq": 3, "Hk": 1, "D": 12, "R": 12},
            {"layout": "interleaved_to_half"},
        ),
        Case("inverse", {"B": 2, "S": 5, "Hq": 2, "Hk": 1, "D": 16, "R": 12}, {"inverse": True}),
        Case("tail", {"B": 2, "S": 9, "Hq": 3, "Hk": 2, "D": 15, "R": 6}, {"tail": True}),
        Case(
            "tail_interleaved",
            {"B": 2, "S": 9, "Hq": 2, "Hk": 1, "D": 21, "R": 8},
            {"layout": "interleaved", "tables": "half", "tail": True, "inverse": True},
        ),
        Case("alone", {"B": 2, "S": 6, "Hq": 3, "Hk": 0, "D": 16, "R": 16, "alone": 1}),
        Case("one_token", {"B": 3, "S": 1, "Hq": 8, "Hk": 2, "D": 64, "R": 64, "table_batch": 3}),
        Case("fp32_tables", {"B": 2, "S": 5, "Hq": 2, "Hk": 1, "D": 16, "R": 8, "fp32_tables": 1}),
        Case("positions", {"B": 2, "S": 9, "Hq": 3, "Hk": 2, "D": 20, "R": 12, "position_batch": 2}),
        Case("one_row_of_positions", {"B": 2, "S": 6, "Hq": 2, "Hk": 1, "D": 16, "R": 16, "position_batch": 1}),
        Case(
            "sections",
            {"B": 2, "S": 9, "Hq": 3, "Hk": 2, "D": 20, "R": 16, "table_batch": 2},
            {"sections": (2, 3, 3)},
        ),
        Case(
            "sections_interleaved",
            {"B": 2, "S": 5, "Hq": 2, "Hk": 1, "D": 12, "R": 12, "table_batch": 1},
            {"sections": (4, 2), "layout": "interleaved"},
        ),
        Case("heads_32_8", _LARGE, models_only=True),
        Case("heads_32_8_first", {**_LARGE, "heads_first": 1}, models_only=True),
        Case("heads_28_4", {**_LARGE, "Hq": 28, "Hk": 4}, models_only=True),
        Case("head_dim_64", {**_LARGE, "B": 8, "D": 64, "R": 64}, models_only=True),
        Case("head_dim_80", {**_LARGE, "Hk": 32, "D": 80, "R": 32}, models_only=True),
        Case("head_dim_96", {**_LARGE, "Hk": 32, "D": 96, "R": 96}, models_only=True),
        Case("head_dim_256", {**_LARGE, "Hq": 16, "Hk": 2, "D": 256, "R": 64, "table_batch": 4}, models_only=True),
        Case("wide_head_256", {**_LARGE, "Hq": 8, "Hk": 4, "D": 256, "R": 256}, models_only=True),
        Case("fp32_tables_32_8", {**_LARGE, "fp32_tables": 1}, models_only=True),
        Case("half_tables_64_8", {**_LARGE, "Hq": 64, "D": 64, "R": 64}, {"tables": "half"}, models_only=True),
        Case(
            "interleaved_32_2",
            {**_LARGE, "Hk": 2, "R": 64},
            {"layout": "interleaved", "tables": "half"},
            models_only=True,
        ),
        Case("interleaved_full_64_8", {**_LARGE, "Hq": 64}, {"layout": "interleaved"}, models_only=True),
        Case(
            "tail_64_1",
            {**_LARGE, "Hq": 64, "Hk": 1, "D": 512, "R": 64},
            {"layout": "interleaved", "tables": "half", "tail": True, "inverse": True},
            models_only=True,
        ),
        Case("packed_32_8", {**_LARGE, "B": 1, "S": 16384, "position_batch": 1, "table_batch": 0}, models_only=True),
        Case("sections_28_4", {**_LARGE, "Hq": 28, "Hk": 4}, {"sections": (16, 24, 24)}, models_only=True),
        Case(
            "shared_key_128_1",
            {**_LARGE, "Hq": 128, "Hk": 1, "D": 64, "R": 64},
            {"layout": "interleaved_to_half", "tables": "half"},
            models_only=True,
        ),
    ),
    inputs=_inputs,
    differentiable=("q", "k"),
    empty=Case("empty", {"B": 2, "S": 0, "Hq": 4, "Hk": 2, "D": 16, "R": 16}),
    cost=_cost,
    mutations=(
        Mutation("turned the other way", _turned_back),
        Mutation("angles of the first sample for all", _angles_of_first_sample),
        Mutation("first half of a full table used for both halves", _first_half_of_tables_twice),
        Mutation("pairs of neighbours taken for halves", _layout_ignored),
        Mutation("the other end of a head turned", _other_end_of_the_head),
        Mutation("halves of a full table used for neighbours", _halves_of_tables_for_neighbours),
        Mutation("last key head left out", _last_key_head_left_out),
        Mutation("positions ignored", _positions_ignored),
        Mutation("the first table for all sections", _first_table_for_all_sections),
    ),
    # Of heads and tables that make the same kernel, one.
    compile_cases=(
        "heads_32_8",
        "head_dim_80",
        "head_dim_256",
        "fp32_tables_32_8",
        "interleaved_32_2",
        "interleaved_full_64_8",
        "tail_64_1",
        "shared_key_128_1",
        "packed_32_8",
        "sections_28_4",
    ),
)
