"""Cases of `qk_norm_rope`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.qk_norm_rope import qk_norm_rope_reference
from ..ops.rms_norm import rms_norm_reference
from ..ops.rope import rope_reference
from ._spec import Case, Cost, Make, Mutation, OpSpec

Result = tuple[Tensor, Tensor]


def _inputs(case: Case, make: Make) -> dict[str, Tensor | None]:
    heads_axis = case.options.get("unsqueeze_dim", 1)
    # Even also where a test cuts all sizes down.
    half = case.R // 2

    def rows(*shape: int) -> Tensor:
        # The models' sizes are drawn on the device, at one scale.
        return make.randn(*shape) if case.models_only else make.rows(*shape, spread=0.5)

    if case.sizes.get("packed"):
        # Queries, keys and values of one projection: the rows of two neighbouring heads lie side by side.
        heads = rows(case.B, case.S, case.Hq + 2 * case.Hk, case.D)
        q, k = heads[:, :, : case.Hq], heads[:, :, case.Hq : case.Hq + case.Hk]
    else:
        q, k = rows(case.B, case.S, case.Hq, case.D), rows(case.B, case.S, case.Hk, case.D)
    if heads_axis == 1:
        # As attention makes them: a projection of each token, seen with the heads in front.
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if case.sizes.get("heads_first"):
            q, k = q.contiguous(), k.contiguous()

    # As in the cases of `rope`: values that are no angles, but for the repeated halves of models in models_only cases.
    table_shape = (case.S, 2 * half if case.options.get("tables", "full") == "full" else half)
    if case.sizes.get("table_batch"):
        table_shape = (case.table_batch, *table_shape)
    table_dtype = torch.float32 if case.sizes.get("fp32_tables") else None

    def table() -> Tensor:
        drawn = make.randn(*table_shape, dtype=table_dtype)
        if not case.models_only or table_shape[-1] == half:
            return drawn
        return torch.cat((drawn[..., :half],) * 2, -1)

    def weight() -> Tensor | None:
        dtype = torch.float32 if case.sizes.get("fp32_weight") else None
        return None if case.sizes.get("weightless") else make.randn(case.D, mean=0.5, dtype=dtype)

    return {"q": q, "k": k, "q_weight": weight(), "k_weight": weight(), "cos": table(), "sin": table()}


def _cost(case: Case, itemsize: int) -> Cost:
    elements = case.B * case.S * (case.Hq + case.Hk) * case.D
    weights = 0 if case.sizes.get("weightless") else 2 * case.D * (4 if case.sizes.get("fp32_weight") else itemsize)
    table_size = 4 if case.sizes.get("fp32_tables") else itemsize
    width = case.R if case.options.get("tables", "full") == "full" else case.R // 2
    tables = 2 * case.sizes.get("table_batch", 1) * case.S * width * table_size
    # fp32 tables or weights make an fp32 result, and so an fp32 upstream gradient.
    promoted = case.sizes.get("fp32_weight") and case.options.get("cast") != "scale_then_cast"
    out = max(itemsize, table_size, 4 if promoted else 0)
    return Cost(
        forward_bytes=elements * (itemsize + out) + tables + weights,
        backward_bytes=elements * (2 * itemsize + out) + tables + 2 * weights,
    )


def _with(**changed: Any) -> Callable[..., Result]:
    """The reference with options replaced."""

    def mutant(*args: Tensor | None, **kwargs: Any) -> Result:
        return qk_norm_rope_reference(*args, **{**kwargs, **changed})  # type: ignore[arg-type]

    return mutant


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the norm and of the rotation."""
    return {k: v for k, v in options.items() if k in ("eps", "offset", "cast")}, {
        k: v for k, v in options.items() if k in ("layout", "tables", "unsqueeze_dim")
    }


def _turned_then_normalised(
    q: Tensor, k: Tensor, q_weight: Any, k_weight: Any, cos: Tensor, sin: Tensor, **options: Any
) -> Result:
    norm, rotation = _split(options)
    q, k = rope_reference(q, k, cos, sin, **rotation)
    return rms_norm_reference(q, q_weight, **norm), rms_norm_reference(k, k_weight, **norm)


def _weights_left_out(
    q: Tensor, k: Tensor, q_weight: Any, k_weight: Any, cos: Tensor, sin: Tensor, **options: Any
) -> Result:
    ones = (None, None) if q_weight is None else (1 + 0 * q_weight, 1 + 0 * k_weight)
    return qk_norm_rope_reference(q, k, *ones, cos, sin, **{**options, "offset": 0.0})


def _weight_of_q_for_both(
    q: Tensor, k: Tensor, q_weight: Any, k_weight: Any, cos: Tensor, sin: Tensor, **options: Any
) -> Result:
    both = q_weight if q_weight is None else q_weight + 0 * k_weight
    return qk_norm_rope_reference(q, k, q_weight, both, cos, sin, **options)


def _turned_the_other_way(
    q: Tensor, k: Tensor, q_weight: Any, k_weight: Any, cos: Tensor, sin: Tensor, **options: Any
) -> Result:
    return qk_norm_rope_reference(q, k, q_weight, k_weight, cos, -sin, **options)


def _angles_of_the_first_sample(
    q: Tensor, k: Tensor, q_weight: Any, k_weight: Any, cos: Tensor, sin: Tensor, **options: Any
) -> Result:
    cos, sin = (t[:1] if t.dim() == 3 else t for t in (cos, sin))
    return qk_norm_rope_reference(q, k, q_weight, k_weight, cos, sin, **options)


def _first_half_of_tables_twice(
    q: Tensor, k: Tensor, q_weight: Any, k_weight: Any, cos: Tensor, sin: Tensor, **options: Any
) -> Result:
    if options.get("tables", "full") == "full":
        cos, sin = (torch.cat((t.chunk(2, -1)[0],) * 2, -1) for t in (cos, sin))
    return qk_norm_rope_reference(q, k, q_weight, k_weight, cos, sin, **options)


def _only_what_turns_is_normalised(
    q: Tensor, k: Tensor, q_weight: Any, k_weight: Any, cos: Tensor, sin: Tensor, **options: Any
) -> Result:
    """The statistics of the rotated part, applied to the whole head."""
    rotary = cos.shape[-1] * (1 if options.get("tables", "full") == "full" else 2)
    norm, rotation = _split(options)
    eps, offset = norm.get("eps", 1e-6), norm.get("offset", 0.0)

    def normalised(x: Tensor, weight: Tensor | None) -> Tensor:
        n = x * torch.rsqrt(x[..., :rotary].pow(2).mean(-1, keepdim=True) + eps)
        return n if weight is None else n * (offset + weight)

    return rope_reference(normalised(q, q_weight), normalised(k, k_weight), cos, sin, **rotation)


def _mean_over_all_heads(
    q: Tensor, k: Tensor, q_weight: Any, k_weight: Any, cos: Tensor, sin: Tensor, **options: Any
) -> Result:
    norm, rotation = _split(options)
    axis = rotation.get("unsqueeze_dim", 1)
    eps, offset = norm.get("eps", 1e-6), norm.get("offset", 0.0)

    def normalised(x: Tensor, weight: Tensor | None) -> Tensor:
        n = x * torch.rsqrt(x.pow(2).mean((axis, -1), keepdim=True) + eps)
        return n if weight is None else n * (offset + weight)

    return rope_reference(normalised(q, q_weight), normalised(k, k_weight), cos, sin, **rotation)


def _gradient_of_the_statistics_lost(
    q: Tensor, k: Tensor, q_weight: Any, k_weight: Any, cos: Tensor, sin: Tensor, **options: Any
) -> Result:
    """Right values, but the gradient of q is the one at a fixed rstd."""
    eps = options.get("eps", 1e-6)
    rstd = torch.rsqrt(q.detach().pow(2).mean(-1, keepdim=True) + eps)
    norm, rotation = _split(options)
    n = q * rstd
    z = n if q_weight is None else n * (norm.get("offset", 0.0) + q_weight)
    return rope_reference(z, rms_norm_reference(k, k_weight, **norm), cos, sin, **rotation)


def _last_key_head_left_out(
    q: Tensor, k: Tensor, q_weight: Any, k_weight: Any, cos: Tensor, sin: Tensor, **options: Any
) -> Result:
    y, turned = qk_norm_rope_reference(q, k, q_weight, k_weight, cos, sin, **options)
    axis = options.get("unsqueeze_dim", 1)
    kept = k.shape[axis] - 1
    left = k.narrow(axis, kept, 1).to(turned.dtype)
    return y, torch.cat((turned.narrow(axis, 0, kept), left), axis)


_LARGE = {"B": 4, "S": 4096, "Hq": 32, "Hk": 8, "D": 128, "R": 128, "table_batch": 1}

SPEC = OpSpec(
    name="qk_norm_rope",
    # Heads of a program are computed one after the other, which is slow where kernels are interpreted: few of them.
    cases=(
        Case("odd", {"B": 2, "S": 37, "Hq": 3, "Hk": 2, "D": 20, "R": 20}),
        Case("groups", {"B": 1, "S": 67, "Hq": 9, "Hk": 1, "D": 16, "R": 16}),
        Case("heads_first", {"B": 2, "S": 19, "Hq": 2, "Hk": 1, "D": 16, "R": 16, "heads_first": 1}),
        Case("tokens_first", {"B": 2, "S": 9, "Hq": 2, "Hk": 1, "D": 32, "R": 32}, {"unsqueeze_dim": 2}),
        Case("packed", {"B": 2, "S": 9, "Hq": 2, "Hk": 1, "D": 16, "R": 16, "packed": 1}),
        Case("batch_tables", {"B": 2, "S": 7, "Hq": 1, "Hk": 1, "D": 12, "R": 12, "table_batch": 2}),
        Case("one_table", {"B": 2, "S": 7, "Hq": 1, "Hk": 1, "D": 12, "R": 12, "table_batch": 1}),
        Case("half_tables", {"B": 2, "S": 17, "Hq": 2, "Hk": 1, "D": 24, "R": 24}, {"tables": "half"}),
        Case("partial", {"B": 2, "S": 11, "Hq": 2, "Hk": 1, "D": 20, "R": 6}, {"offset": 1.0, "eps": 1e-5}),
        Case("partial_odd_head", {"B": 1, "S": 5, "Hq": 3, "Hk": 1, "D": 7, "R": 2}),
        Case(
            "offset", {"B": 1, "S": 9, "Hq": 3, "Hk": 1, "D": 16, "R": 16}, {"offset": 1.0, "cast": "scale_then_cast"}
        ),
        Case("large_eps", {"B": 1, "S": 5, "Hq": 2, "Hk": 1, "D": 16, "R": 8}, {"eps": 0.1, "cast": "none"}),
        Case("weightless", {"B": 2, "S": 9, "Hq": 2, "Hk": 1, "D": 20, "R": 16, "weightless": 1}),
        Case("fp32_weight", {"B": 1, "S": 5, "Hq": 2, "Hk": 1, "D": 16, "R": 16, "fp32_weight": 1}),
        Case("cast_rstd", {"B": 1, "S": 5, "Hq": 2, "Hk": 1, "D": 16, "R": 16}, {"cast": "cast_rstd"}),
        Case(
            "cast_to_weight",
            {"B": 1, "S": 5, "Hq": 2, "Hk": 1, "D": 16, "R": 16, "fp32_weight": 1},
            {"cast": "cast_to_weight"},
        ),
        Case(
            "interleaved",
            {"B": 2, "S": 13, "Hq": 2, "Hk": 1, "D": 20, "R": 12, "table_batch": 2},
            {"layout": "interleaved", "tables": "half"},
        ),
        Case(
            "interleaved_full_tables", {"B": 1, "S": 11, "Hq": 3, "Hk": 2, "D": 14, "R": 10}, {"layout": "interleaved"}
        ),
        Case(
            "interleaved_to_half",
            {"B": 1, "S": 13, "Hq": 3, "Hk": 1, "D": 12, "R": 12},
            {"layout": "interleaved_to_half", "tables": "half"},
        ),
        Case("one_token", {"B": 2, "S": 1, "Hq": 2, "Hk": 1, "D": 64, "R": 64, "table_batch": 2}),
        Case("fp32_tables", {"B": 1, "S": 5, "Hq": 2, "Hk": 1, "D": 16, "R": 8, "fp32_tables": 1}),
        Case("heads_32_8", _LARGE, models_only=True),
        Case("heads_32_8_first", {**_LARGE, "heads_first": 1}, models_only=True),
        Case("heads_32_8_packed", {**_LARGE, "packed": 1}, models_only=True),
        Case("heads_16_8", {**_LARGE, "B": 8, "Hq": 16}, models_only=True),
        Case("heads_64_4", {**_LARGE, "Hq": 64, "Hk": 4}, models_only=True),
        Case("half_tables_32_8", _LARGE, {"tables": "half"}, models_only=True),
        Case(
            "head_dim_256",
            {**_LARGE, "Hq": 8, "Hk": 4, "D": 256, "R": 256},
            {"offset": 1.0, "cast": "scale_then_cast"},
            models_only=True,
        ),
        Case(
            "head_dim_256_partial",
            {**_LARGE, "Hq": 16, "Hk": 2, "D": 256, "R": 64},
            {"offset": 1.0, "cast": "scale_then_cast"},
            models_only=True,
        ),
        Case("head_dim_128_partial", {**_LARGE, "Hq": 96, "R": 64}, models_only=True),
        Case("head_dim_80", {**_LARGE, "Hk": 32, "D": 80, "R": 32}, models_only=True),
        Case("head_dim_64", {**_LARGE, "B": 8, "D": 64, "R": 64}, models_only=True),
        Case("fp32_tables_32_8", {**_LARGE, "fp32_tables": 1}, models_only=True),
        Case("weightless_32_8", {**_LARGE, "weightless": 1}, models_only=True),
        Case("interleaved_32_8", _LARGE, {"layout": "interleaved", "tables": "half"}, models_only=True),
    ),
    inputs=_inputs,
    differentiable=("q", "k", "q_weight", "k_weight"),
    empty=Case("empty", {"B": 2, "S": 0, "Hq": 4, "Hk": 2, "D": 16, "R": 16}),
    cost=_cost,
    mutations=(
        Mutation("turned, then normalised", _turned_then_normalised),
        Mutation("weights left out", _weights_left_out),
        Mutation("weight of q for k too", _weight_of_q_for_both),
        Mutation("turned the other way", _turned_the_other_way),
        Mutation("eps left out", _with(eps=0.0)),
        Mutation("offset ignored", _with(offset=0.0)),
        Mutation("pairs of neighbours taken for halves", _with(layout="half")),
        Mutation("angles of the first sample for all", _angles_of_the_first_sample),
        Mutation("first half of a full table used for both halves", _first_half_of_tables_twice),
        Mutation("statistics of what turns only", _only_what_turns_is_normalised),
        Mutation("mean over all heads", _mean_over_all_heads),
        Mutation("gradient of the statistics lost", _gradient_of_the_statistics_lost),
        Mutation("last key head left out", _last_key_head_left_out),
    ),
    compile_cases=(
        "heads_32_8",
        "head_dim_256",
        "head_dim_128_partial",
        "head_dim_80",
        "fp32_tables_32_8",
        "weightless_32_8",
        "interleaved_32_8",
    ),
)
