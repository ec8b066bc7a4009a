"""RMS normalisation of the heads of queries and keys, and their rotary position embedding, in one launch.

For a head x of q with q_weight, and in the same way for one of k with k_weight:

    n = x * rstd,   rstd = 1 / sqrt(mean(x^2) + eps)
    z = n * (offset + weight)
    y1 = z1 * c1 - z2 * s1
    y2 = z2 * c2 + z1 * s2
    y[R:] = z[R:]

Pairs and tables are those of `rope`. Gradient, with g = dz * (offset + weight):

    dz1 = dy1 * c1 + dy2 * s2
    dz2 = dy2 * c2 - dy1 * s1
    dx = rstd * (g - n * mean(g * n))
    dweight = sum over heads and tokens of dz * n

B batch, S tokens of a sequence, Hq and Hk heads, D head dim, R rotary width, W columns of the tables.
Saved for backward: the inputs; rstd is computed again from the rows, which the backward reads anyway.
Source: Su et al. 2021, arXiv:2104.09864; Zhang & Sennrich 2019, arXiv:1910.07467; Henry et al. 2020, arXiv:2010.04245.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._check import require, require_floating, require_one_of, require_same_device
from ._launch import cdiv, launch, next_power_of_2, pipeline_stages
from ._op import apply, define, once_differentiable, op, runs_reference
from ._partials import sum_partials
from ._tl import load_pairs, store_pairs
from ._triton import tl, triton
from .rms_norm import CASTS, Cast, _out_dtype, _rounded, rms_norm_reference
from .rope import (
    _MAX_HEAD_DIM,
    LAYOUTS,
    Layout,
    Tables,
    _storage_order,
    _strides,
    _table_strides,
    _unit_columns,
    require_heads_and_tables,
    rope_reference,
)

# ---- reference ----


def qk_norm_rope_reference(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast: Cast = "cast_then_scale",
    layout: Layout = "half",
    tables: Tables = "full",
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    q = rms_norm_reference(q, q_weight, eps=eps, offset=offset, cast=cast)
    k = rms_norm_reference(k, k_weight, eps=eps, offset=offset, cast=cast)
    return rope_reference(q, k, cos, sin, layout=layout, tables=tables, unsqueeze_dim=unsqueeze_dim)


# ---- kernels ----


@triton.jit
def _pair_columns(PAIRS: tl.constexpr, HALF: tl.constexpr, BLOCK_R: tl.constexpr):
    cols = tl.arange(0, BLOCK_R)
    if PAIRS:
        first = 2 * cols
        second = 2 * cols + 1
    else:
        first = cols
        second = HALF + cols
    return first, second, cols < HALF


@triton.jit
def _load_table(
    ptr, stride_b, stride_s, stride_r, batch, tokens, mask,
    FULL: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    first, second, col_mask = _pair_columns(PAIRS and FULL, HALF, BLOCK_R)
    if not FULL:
        second = first
    rows = ptr + batch * stride_b + (tokens * stride_s)[:, None]
    mask = mask & col_mask[None, :]
    t1 = tl.load(rows + (first * stride_r)[None, :], mask=mask, other=0.0).to(tl.float32)
    t2 = tl.load(rows + (second * stride_r)[None, :], mask=mask, other=0.0).to(tl.float32)
    return t1, t2


@triton.jit
def _place(num_groups, num_tokens, BLOCK_T: tl.constexpr):
    group = tl.program_id(0) % num_groups
    block = tl.program_id(0) // num_groups
    blocks_per_sequence = tl.cdiv(num_tokens, BLOCK_T)
    batch = (block // blocks_per_sequence).to(tl.int64)
    tokens = (block % blocks_per_sequence).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    return group, batch, tokens, (tokens < num_tokens)[:, None]


@triton.jit
def _rstd(squares, mask, eps, HEAD_DIM: tl.constexpr):
    # Rows past the end are zero, which without an eps would be times infinity.
    return tl.rsqrt(tl.where(mask, squares[:, None] / HEAD_DIM + eps, 1.0))


@triton.jit
def _load_weight(
    w_ptr, offset,
    HAS_WEIGHT: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Scales of the first and the second elements of the pairs and of the rest; ones without a weight."""
    if HAS_WEIGHT:
        first, second, mask = _pair_columns(PAIRS, HALF, BLOCK_R)
        rest = tl.arange(0, BLOCK_REST)
        w1 = tl.load(w_ptr + first, mask=mask, other=0.0).to(tl.float32) + offset
        w2 = tl.load(w_ptr + second, mask=mask, other=0.0).to(tl.float32) + offset
        w3 = tl.load(w_ptr + 2 * HALF + rest, mask=rest < REST, other=0.0).to(tl.float32) + offset
    else:
        w1 = tl.full([BLOCK_R], 1.0, tl.float32)
        w2 = tl.full([BLOCK_R], 1.0, tl.float32)
        w3 = tl.full([BLOCK_REST], 1.0, tl.float32)
    return w1[None, :], w2[None, :], w3[None, :]


@triton.jit
def _fwd_heads(
    x_ptr, w_ptr, y_ptr, x_stride_b, x_stride_h, x_stride_s, y_stride_b, y_stride_h, y_stride_s, start, end,
    batch, tokens, mask, c1, s1, c2, s2, eps, offset,
    CAST: tl.constexpr, HAS_WEIGHT: tl.constexpr, PAIRS_IN: tl.constexpr, PAIRS_OUT: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    dtype = x_ptr.dtype.element_ty
    w1, w2, w3 = _load_weight(w_ptr, offset, HAS_WEIGHT, PAIRS_IN, HALF, REST, BLOCK_R, BLOCK_REST)
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    rest_mask = mask & (rest < 2 * HALF + REST)
    x_tokens = x_ptr + batch * x_stride_b + (tokens * x_stride_s)[:, None]
    y_tokens = y_ptr + batch * y_stride_b + (tokens * y_stride_s)[:, None]
    for head in tl.range(start, end, num_stages=STAGES):
        x_rows = x_tokens + tl.cast(head, tl.int64) * x_stride_h
        y_rows = y_tokens + tl.cast(head, tl.int64) * y_stride_h
        x1, x2 = load_pairs(x_rows, mask, "evict_first", PAIRS_IN, HALF, BLOCK_T, BLOCK_R)
        squares = tl.sum(x1 * x1 + x2 * x2, axis=1)
        if REST > 0:
            x3 = tl.load(x_rows + rest, mask=rest_mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            squares += tl.sum(x3 * x3, axis=1)
        rstd = _rstd(squares, mask, eps, 2 * HALF + REST)
        if CAST == "cast_rstd":
            rstd = rstd.to(dtype).to(tl.float32)
        z1 = _rounded(x1 * rstd, dtype, w_ptr, CAST) * w1
        z2 = _rounded(x2 * rstd, dtype, w_ptr, CAST) * w2
        if REST > 0:
            tl.store(y_rows + rest, _rounded(x3 * rstd, dtype, w_ptr, CAST) * w3, mask=rest_mask)
        store_pairs(y_rows, z1 * c1 - z2 * s1, z2 * c2 + z1 * s2, mask, PAIRS_OUT, HALF, BLOCK_T, BLOCK_R)


@triton.jit
def _qk_norm_rope_fwd_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr,
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s,
    q_out_stride_b, q_out_stride_h, q_out_stride_s, k_out_stride_b, k_out_stride_h, k_out_stride_s,
    cos_stride_b, cos_stride_s, cos_stride_r, sin_stride_b, sin_stride_s, sin_stride_r,
    num_tokens, num_q_heads, num_k_heads, q_groups, k_groups, eps, offset,
    CAST: tl.constexpr, HAS_WEIGHT: tl.constexpr, FULL_TABLES: tl.constexpr, PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK_T tokens of a sequence and group of heads of q or k, groups fastest; a head at a time."""
    group, batch, tokens, mask = _place(q_groups + k_groups, num_tokens, BLOCK_T)
    c1, c2 = _load_table(
        cos_ptr, cos_stride_b, cos_stride_s, cos_stride_r, batch, tokens, mask, FULL_TABLES, PAIRS_OUT, HALF, BLOCK_R
    )
    s1, s2 = _load_table(
        sin_ptr, sin_stride_b, sin_stride_s, sin_stride_r, batch, tokens, mask, FULL_TABLES, PAIRS_OUT, HALF, BLOCK_R
    )
    if group < q_groups:
        _fwd_heads(
            q_ptr, q_weight_ptr, q_out_ptr,
            q_stride_b, q_stride_h, q_stride_s, q_out_stride_b, q_out_stride_h, q_out_stride_s,
            group * num_q_heads // q_groups, (group + 1) * num_q_heads // q_groups,
            batch, tokens, mask, c1, s1, c2, s2, eps, offset,
            CAST, HAS_WEIGHT, PAIRS_IN, PAIRS_OUT, HALF, REST, BLOCK_T, BLOCK_R, BLOCK_REST, STAGES,
        )  # fmt: skip
    else:
        group -= q_groups
        _fwd_heads(
            k_ptr, k_weight_ptr, k_out_ptr,
            k_stride_b, k_stride_h, k_stride_s, k_out_stride_b, k_out_stride_h, k_out_stride_s,
            group * num_k_heads // k_groups, (group + 1) * num_k_heads // k_groups,
            batch, tokens, mask, c1, s1, c2, s2, eps, offset,
            CAST, HAS_WEIGHT, PAIRS_IN, PAIRS_OUT, HALF, REST, BLOCK_T, BLOCK_R, BLOCK_REST, STAGES,
        )  # fmt: skip


@triton.jit
def _bwd_heads(
    x_ptr, w_ptr, dy_ptr, dx_ptr, partial_ptr, x_stride_b, x_stride_h, x_stride_s, dy_stride_b, dy_stride_h,
    dy_stride_s, dx_stride_b, dx_stride_h, dx_stride_s, start, end, batch, tokens, mask, c1, s1, c2, s2, eps,
    offset,
    CAST: tl.constexpr, HAS_WEIGHT: tl.constexpr, NEEDS_DX: tl.constexpr, NEEDS_DW: tl.constexpr,
    PAIRS_IN: tl.constexpr, PAIRS_OUT: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    HEAD_DIM: tl.constexpr = 2 * HALF + REST
    dtype = x_ptr.dtype.element_ty
    w1, w2, w3 = _load_weight(w_ptr, offset, HAS_WEIGHT, PAIRS_IN, HALF, REST, BLOCK_R, BLOCK_REST)
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    rest_mask = mask & (rest < HEAD_DIM)
    x_tokens = x_ptr + batch * x_stride_b + (tokens * x_stride_s)[:, None]
    dy_tokens = dy_ptr + batch * dy_stride_b + (tokens * dy_stride_s)[:, None]
    dx_tokens = dx_ptr + batch * dx_stride_b + (tokens * dx_stride_s)[:, None]
    if NEEDS_DW:
        dw1 = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
        dw2 = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
        dw3 = tl.zeros([BLOCK_T, BLOCK_REST], dtype=tl.float32)
    for head in tl.range(start, end, num_stages=STAGES):
        x_rows = x_tokens + tl.cast(head, tl.int64) * x_stride_h
        dy_rows = dy_tokens + tl.cast(head, tl.int64) * dy_stride_h
        x1, x2 = load_pairs(x_rows, mask, "evict_first", PAIRS_IN, HALF, BLOCK_T, BLOCK_R)
        dy1, dy2 = load_pairs(dy_rows, mask, "evict_first", PAIRS_OUT, HALF, BLOCK_T, BLOCK_R)
        squares = tl.sum(x1 * x1 + x2 * x2, axis=1)
        if REST > 0:
            x3 = tl.load(x_rows + rest, mask=rest_mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            dz3 = tl.load(dy_rows + rest, mask=rest_mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            squares += tl.sum(x3 * x3, axis=1)
        rstd = _rstd(squares, mask, eps, HEAD_DIM)
        dz1 = dy1 * c1 + dy2 * s2
        dz2 = dy2 * c2 - dy1 * s1
        n1 = x1 * rstd
        n2 = x2 * rstd
        if NEEDS_DW:
            dw1 += dz1 * _rounded(n1, dtype, w_ptr, CAST)
            dw2 += dz2 * _rounded(n2, dtype, w_ptr, CAST)
        g1 = dz1 * w1
        g2 = dz2 * w2
        dot = tl.sum(g1 * n1 + g2 * n2, axis=1)
        if REST > 0:
            n3 = x3 * rstd
            if NEEDS_DW:
                dw3 += dz3 * _rounded(n3, dtype, w_ptr, CAST)
            g3 = dz3 * w3
            dot += tl.sum(g3 * n3, axis=1)
        if NEEDS_DX:
            dx_rows = dx_tokens + tl.cast(head, tl.int64) * dx_stride_h
            mean = (dot / HEAD_DIM)[:, None]
            dx1 = rstd * (g1 - n1 * mean)
            dx2 = rstd * (g2 - n2 * mean)
            store_pairs(dx_rows, dx1, dx2, mask, PAIRS_IN, HALF, BLOCK_T, BLOCK_R)
            if REST > 0:
                tl.store(dx_rows + rest, rstd * (g3 - n3 * mean), mask=rest_mask)
    if NEEDS_DW:
        first, second, col_mask = _pair_columns(PAIRS_IN, HALF, BLOCK_R)
        tl.store(partial_ptr + first, tl.sum(dw1, axis=0), mask=col_mask)
        tl.store(partial_ptr + second, tl.sum(dw2, axis=0), mask=col_mask)
        if REST > 0:
            cols = tl.arange(0, BLOCK_REST)
            tl.store(partial_ptr + 2 * HALF + cols, tl.sum(dw3, axis=0), mask=cols < REST)


@triton.jit
def _qk_norm_rope_bwd_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, dq_out_ptr, dk_out_ptr, dq_ptr, dk_ptr, partial_ptr, cos_ptr,
    sin_ptr,
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s,
    dq_out_stride_b, dq_out_stride_h, dq_out_stride_s, dk_out_stride_b, dk_out_stride_h, dk_out_stride_s,
    dq_stride_b, dq_stride_h, dq_stride_s, dk_stride_b, dk_stride_h, dk_stride_s,
    cos_stride_b, cos_stride_s, cos_stride_r, sin_stride_b, sin_stride_s, sin_stride_r,
    num_tokens, num_q_heads, num_k_heads, q_groups, k_groups, eps, offset,
    CAST: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_Q: tl.constexpr, HAS_K: tl.constexpr,
    NEEDS_DQ: tl.constexpr, NEEDS_DK: tl.constexpr, NEEDS_DQ_WEIGHT: tl.constexpr,
    NEEDS_DK_WEIGHT: tl.constexpr, FULL_TABLES: tl.constexpr, PAIRS_IN: tl.constexpr, PAIRS_OUT: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The grid of the forward; each program leaves one fp32 row of the gradient of its weight."""
    group, batch, tokens, mask = _place(q_groups + k_groups, num_tokens, BLOCK_T)
    c1, c2 = _load_table(
        cos_ptr, cos_stride_b, cos_stride_s, cos_stride_r, batch, tokens, mask, FULL_TABLES, PAIRS_OUT, HALF, BLOCK_R
    )
    s1, s2 = _load_table(
        sin_ptr, sin_stride_b, sin_stride_s, sin_stride_r, batch, tokens, mask, FULL_TABLES, PAIRS_OUT, HALF, BLOCK_R
    )
    # Rows of one group after the other, so that those of q and those of k are each a matrix.
    num_groups = q_groups + k_groups
    partial_row = group * (tl.num_programs(0) // num_groups) + tl.program_id(0) // num_groups
    partial_ptr += partial_row.to(tl.int64) * (2 * HALF + REST)
    if HAS_Q and group < q_groups:
        _bwd_heads(
            q_ptr, q_weight_ptr, dq_out_ptr, dq_ptr, partial_ptr,
            q_stride_b, q_stride_h, q_stride_s, dq_out_stride_b, dq_out_stride_h, dq_out_stride_s,
            dq_stride_b, dq_stride_h, dq_stride_s,
            group * num_q_heads // q_groups, (group + 1) * num_q_heads // q_groups,
            batch, tokens, mask, c1, s1, c2, s2, eps, offset,
            CAST, HAS_WEIGHT, NEEDS_DQ, NEEDS_DQ_WEIGHT,
            PAIRS_IN, PAIRS_OUT, HALF, REST, BLOCK_T, BLOCK_R, BLOCK_REST, STAGES,
        )  # fmt: skip
    if HAS_K and group >= q_groups:
        group -= q_groups
        _bwd_heads(
            k_ptr, k_weight_ptr, dk_out_ptr, dk_ptr, partial_ptr,
            k_stride_b, k_stride_h, k_stride_s, dk_out_stride_b, dk_out_stride_h, dk_out_stride_s,
            dk_stride_b, dk_stride_h, dk_stride_s,
            group * num_k_heads // k_groups, (group + 1) * num_k_heads // k_groups,
            batch, tokens, mask, c1, s1, c2, s2, eps, offset,
            CAST, HAS_WEIGHT, NEEDS_DK, NEEDS_DK_WEIGHT,
            PAIRS_IN, PAIRS_OUT, HALF, REST, BLOCK_T, BLOCK_R, BLOCK_REST, STAGES,
        )  # fmt: skip


# ---- operators ----

# Elements of a head's rows at a time and heads one after the other of a program (MEASURED.md). More at a time in the
# backward, since every program leaves a row of partial sums to be read again.
_FWD_SIZES = 512, 8
_BWD_SIZES = 2048, 8


def _blocks(num_elements: int, head_dim: int, half: int) -> tuple[int, int, int, int]:
    """BLOCK_T, BLOCK_R, BLOCK_REST, num_warps: `num_elements` or one row, 16 elements a thread.

    Short rows have a pointer for every few bytes, so no more than 64 tokens are taken, or the pointers alone would
    fill the registers.
    """
    rest = head_dim - 2 * half
    block_r, block_rest = next_power_of_2(half), next_power_of_2(rest)
    width = next_power_of_2(2 * block_r + (block_rest if rest else 0))
    block_t = max(1, min(64, num_elements // width))
    return block_t, block_r, block_rest, max(1, min(8, block_t * width // 512))


def _tile(num_elements: int, head_dim: int, width: int, layout: str, tables: str) -> dict[str, Any]:
    """What a kernel is compiled for."""
    half = width if tables == "half" else width // 2
    block_t, block_r, block_rest, num_warps = _blocks(num_elements, head_dim, half)
    pairs_in, pairs_out = LAYOUTS[layout]
    return {
        "FULL_TABLES": tables == "full",
        "PAIRS_IN": pairs_in,
        "PAIRS_OUT": pairs_out,
        "HALF": half,
        "REST": head_dim - 2 * half,
        "BLOCK_T": block_t,
        "BLOCK_R": block_r,
        "BLOCK_REST": block_rest,
        "num_warps": num_warps,
    }


def _fake_fwd(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    offset: float,
    cast: str,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    *_, q_order, k_order = options
    q_dtype = torch.promote_types(_out_dtype(q, q_weight, cast), cos.dtype)
    k_dtype = torch.promote_types(_out_dtype(k, k_weight, cast), cos.dtype)
    q_out = torch.empty_permuted(q.shape, q_order, dtype=q_dtype, device=q.device)
    return q_out, torch.empty_permuted(k.shape, k_order, dtype=k_dtype, device=k.device)


@define(
    "qk_norm_rope_fwd(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, float eps,"
    " float offset, str cast, str layout, str tables, int unsqueeze_dim, int[] q_order, int[] k_order)"
    " -> (Tensor, Tensor)",
    fake=_fake_fwd,
)
def _fwd(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    offset: float,
    cast: str,
    layout: str,
    tables: str,
    unsqueeze_dim: int,
    q_order: list[int],
    k_order: list[int],
) -> tuple[Tensor, Tensor]:
    q_out, k_out = _fake_fwd(
        q, k, q_weight, k_weight, cos, sin, eps, offset, cast, layout, tables, unsqueeze_dim, q_order, k_order
    )
    q, k = _unit_columns(q), _unit_columns(k)
    num_q_heads, num_k_heads = q.shape[unsqueeze_dim], k.shape[unsqueeze_dim]
    num_tokens, head_dim = q.shape[3 - unsqueeze_dim], q.shape[-1]
    num_elements, num_heads = _FWD_SIZES
    tile = _tile(num_elements, head_dim, cos.shape[-1], layout, tables)
    block_t = tile["BLOCK_T"]
    q_groups, k_groups = cdiv(num_q_heads, num_heads), cdiv(num_k_heads, num_heads)
    launch(
        _qk_norm_rope_fwd_kernel,
        (q.shape[0] * cdiv(num_tokens, block_t) * (q_groups + k_groups),),
        q,
        k,
        q_weight,
        k_weight,
        q_out,
        k_out,
        cos,
        sin,
        *_strides(q, unsqueeze_dim),
        *_strides(k, unsqueeze_dim),
        *_strides(q_out, unsqueeze_dim),
        *_strides(k_out, unsqueeze_dim),
        *_table_strides(cos),
        *_table_strides(sin),
        num_tokens,
        num_q_heads,
        num_k_heads,
        q_groups,
        k_groups,
        eps,
        offset,
        CAST=cast,
        HAS_WEIGHT=q_weight is not None,
        STAGES=pipeline_stages(block_t * head_dim * max(q.element_size(), k.element_size())),
        **tile,
    )
    return q_out, k_out


def _fake_bwd(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, q_order, k_order, needs = options

    def empty(x: Tensor | None, order: list[int], is_needed: bool) -> Tensor:
        if x is None or not is_needed:
            return q.new_empty(0)
        return torch.empty_permuted(x.shape, order, dtype=x.dtype, device=x.device)

    return (
        empty(q, q_order, needs[0]),
        empty(k, k_order, needs[1]),
        empty(q_weight, [0], needs[2]),
        empty(k_weight, [0], needs[3]),
    )


@define(
    "qk_norm_rope_bwd(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, Tensor? dq_out,"
    " Tensor? dk_out, float eps, float offset, str cast, str layout, str tables, int unsqueeze_dim, int[] q_order,"
    " int[] k_order, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_bwd,
)
def _bwd(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    eps: float,
    offset: float,
    cast: str,
    layout: str,
    tables: str,
    unsqueeze_dim: int,
    q_order: list[int],
    k_order: list[int],
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`needs`: of dq, dk, the gradient of q_weight and that of k_weight."""
    dq, dk, dq_weight, dk_weight = _fake_bwd(
        q, k, q_weight, k_weight, cos, sin, dq_out, dk_out,
        eps, offset, cast, layout, tables, unsqueeze_dim, q_order, k_order, needs,
    )  # fmt: skip
    q, k = _unit_columns(q), _unit_columns(k)
    dq_out, dk_out = (None if g is None else _unit_columns(g) for g in (dq_out, dk_out))
    num_q_heads, num_k_heads = q.shape[unsqueeze_dim], k.shape[unsqueeze_dim]
    num_tokens, head_dim = q.shape[3 - unsqueeze_dim], q.shape[-1]
    num_elements, num_heads = _BWD_SIZES
    tile = _tile(num_elements, head_dim, cos.shape[-1], layout, tables)
    block_t = tile["BLOCK_T"]
    q_groups = 0 if dq_out is None else cdiv(num_q_heads, num_heads)
    k_groups = 0 if dk_out is None else cdiv(num_k_heads, num_heads)
    num_groups, num_blocks = q_groups + k_groups, q.shape[0] * cdiv(num_tokens, block_t)
    needs_dw = needs[2] or needs[3]
    partial = q.new_empty((num_groups, num_blocks, head_dim) if needs_dw else (0,), dtype=torch.float32)
    no_strides = (0, 0, 0)
    bytes_of_q = q.element_size() + (0 if dq_out is None else dq_out.element_size())
    bytes_of_k = k.element_size() + (0 if dk_out is None else dk_out.element_size())
    launch(
        _qk_norm_rope_bwd_kernel,
        (num_blocks * num_groups,),
        q,
        k,
        q_weight,
        k_weight,
        dq_out,
        dk_out,
        dq,
        dk,
        partial,
        cos,
        sin,
        *_strides(q, unsqueeze_dim),
        *_strides(k, unsqueeze_dim),
        *(no_strides if dq_out is None else _strides(dq_out, unsqueeze_dim)),
        *(no_strides if dk_out is None else _strides(dk_out, unsqueeze_dim)),
        *(_strides(dq, unsqueeze_dim) if needs[0] else no_strides),
        *(_strides(dk, unsqueeze_dim) if needs[1] else no_strides),
        *_table_strides(cos),
        *_table_strides(sin),
        num_tokens,
        num_q_heads,
        num_k_heads,
        q_groups,
        k_groups,
        eps,
        offset,
        CAST=cast,
        HAS_WEIGHT=q_weight is not None,
        HAS_Q=dq_out is not None,
        HAS_K=dk_out is not None,
        NEEDS_DQ=needs[0],
        NEEDS_DK=needs[1],
        NEEDS_DQ_WEIGHT=needs[2],
        NEEDS_DK_WEIGHT=needs[3],
        STAGES=pipeline_stages(block_t * head_dim * max(bytes_of_q, bytes_of_k)),
        **tile,
    )
    if needs[2]:
        sum_partials(partial[:q_groups].view(-1, head_dim), dq_weight)
    if needs[3]:
        sum_partials(partial[q_groups:].view(-1, head_dim), dk_weight)
    return dq, dk, dq_weight, dk_weight


# ---- autograd ----


class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        *options: Any,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)
        ctx.set_materialize_grads(False)
        ctx.options = (*options, _storage_order(q), _storage_order(k))
        q_out, k_out = _fwd(q, k, q_weight, k_weight, cos, sin, *ctx.options)
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[2]):
            ctx.mark_non_differentiable(q_out)
        elif not (ctx.needs_input_grad[1] or ctx.needs_input_grad[3]):
            ctx.mark_non_differentiable(k_out)
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq_out: Tensor | None, dk_out: Tensor | None) -> tuple[Tensor | None, ...]:
        # Of q, k and their weights, in this order; what the other half of the result leads to has none.
        upstream = (dq_out, dk_out, dq_out, dk_out)
        needs = [g is not None and wanted for g, wanted in zip(upstream, ctx.needs_input_grad[:4], strict=True)]
        dq_out = dq_out if needs[0] or needs[2] else None
        dk_out = dk_out if needs[1] or needs[3] else None
        grads: tuple[Tensor | None, ...] = (None,) * 4
        if any(needs):
            computed = _bwd(*ctx.saved_tensors, dq_out, dk_out, *ctx.options, needs)
            grads = tuple(g if wanted else None for g, wanted in zip(computed, needs, strict=True))
        return (*grads, *(None,) * 8)


# ---- public ----


def _supports(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, **_: Any
) -> list[str]:
    reasons = []
    if any(t is not None and t.dtype == torch.float64 for t in (q, k, q_weight, k_weight, cos)):
        reasons.append("float64 is computed by the reference")
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        reasons.append("cos or sin requires a gradient, which only the reference computes")
    if q.shape[-1] > _MAX_HEAD_DIM:
        reasons.append(f"the head dim is above {_MAX_HEAD_DIM}")
    return reasons


@op(reference=qk_norm_rope_reference, supports=_supports)
def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast: Cast = "cast_then_scale",
    layout: Layout = "half",
    tables: Tables = "full",
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """RMS normalisation of each head of queries and keys, then their rotary position embedding.

        q, k = rope(rms_norm(q, q_weight), rms_norm(k, k_weight), cos, sin)       # the reference, in one line

    Args:
        q: `[B, Hq, S, D]`, floating point, any strides; copied only if its last axis is not contiguous.
        k: `[B, Hk, S, D]`, the same.
        q_weight: `[D]`, the scale of the heads of `q`; None, together with `k_weight`, for norms without a scale.
        k_weight: `[D]`, that of the heads of `k`.
        cos: `[S, W]`, or `[B or 1, S, W]`, as `rope` takes it; a head that is wider than it turns is normalised whole.
        sin: like `cos`.
        eps: added to the mean square.
        offset: added to the weights in fp32; 0 without weights.
        cast: where the norms round, as in `rms_norm`.
        layout: which elements form a pair, as in `rope`.
        tables: "full" or "half", as in `rope`.
        unsqueeze_dim: axis of the heads: 1, or 2 for `[B, S, H, D]`.

    Returns:
        The normalised and rotated `q` and `k`; new tensors, their axes stored in the order of the input's.

    Raises:
        ValueError: shapes, dtypes or devices disagree, W does not fit the head, or an option is unknown.

    Numerics: in fp32 but for the rounding before the weight that `cast` asks for, and rounded once at the end, to the
              dtype that the two operators one after the other would give: at least as exact as those. The gradients
              of the weights are summed in fp32 in a fixed order.
    Memory:   saves its inputs and nothing else.
    Differs from the reference: never in formula; the product of norm and weight is not rounded before it turns; order
              of summation.
    Source: Su et al. 2021, arXiv:2104.09864; Zhang & Sennrich 2019, arXiv:1910.07467; Henry et al. 2020,
    arXiv:2010.04245 (norms of queries and keys).
    """
    name = "qk_norm_rope"
    require_floating(name, q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin)
    require_one_of(name, "cast", cast, CASTS)
    require_heads_and_tables(name, q, k, cos, sin, layout, tables, unsqueeze_dim)
    if q_weight is None or k_weight is None:
        require(q_weight is k_weight, name, "k_weight", "a tensor with q_weight, None without", type(k_weight).__name__)
        require(offset == 0, name, "offset", "0 without weights", offset)
        require(cast != "cast_to_weight", name, "q_weight", "a tensor for this cast", None)
    else:
        for key, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
            require(weight.shape == q.shape[-1:], name, key, f"shape {tuple(q.shape[-1:])}", tuple(weight.shape))
    require_same_device(name, q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin)
    if runs_reference(name, q, k, q_weight, k_weight, cos, sin):
        return qk_norm_rope_reference(
            q, k, q_weight, k_weight, cos, sin,
            eps=eps, offset=offset, cast=cast, layout=layout, tables=tables, unsqueeze_dim=unsqueeze_dim,
        )  # fmt: skip
    if q_weight is not None and k_weight is not None:
        # The kernels read one row of weights, which is nothing beside q.
        q_weight, k_weight = q_weight.contiguous(), k_weight.contiguous()
    return apply(_QKNormRope, q, k, q_weight, k_weight, cos, sin, eps, offset, cast, layout, tables, unsqueeze_dim)
