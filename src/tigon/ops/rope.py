"""Rotary position embedding of queries and keys, in one launch.

Each pair (x1, x2) of a head turns by the angle of its position; R of the D elements of a head take part:

    y1 = x1 * c1 - x2 * s1
    y2 = x2 * c2 + x1 * s2
    y[R:] = x[R:]                                 (bit for bit)

With layout "half" x1 and x2 are the halves of x[:R], with "interleaved" its even and odd elements. A full table has
a column for each element of y, so c1 belongs to y1 and c2 to y2; a half table is both. Likewise s1, s2 of sin.
Rows of the tables are those of the tokens, or those that `position_ids` name; with `sections` a pair takes them from
the table of its section.

Gradient, the transposed map:

    dx1 = dy1 * c1 + dy2 * s2
    dx2 = dy2 * c2 - dy1 * s1
    dx[R:] = dy[R:]

B batch, S tokens of a sequence, Hq and Hk heads, D head dim, R rotary width, W columns of the tables.
Saved for backward: cos, sin and position_ids.
Source: Su et al. 2021, arXiv:2104.09864; Wang et al. 2024, arXiv:2409.12191 (sections).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ._check import require, require_floating, require_one_of, require_same_device
from ._launch import cdiv, launch, next_power_of_2
from ._op import accept, apply, call_key, define, is_accepted, once_differentiable, op, runs_reference
from ._tl import load_pairs, store_pairs
from ._triton import tl, triton

Layout = Literal["half", "interleaved", "interleaved_to_half"]
Tables = Literal["full", "half"]
# Where the two elements of a pair are read from and written to: True for neighbours, False for the two halves.
LAYOUTS = {"half": (False, False), "interleaved": (True, True), "interleaved_to_half": (True, False)}
TABLES = ("full", "half")


# ---- reference ----


def rope_reference(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    layout: Layout = "half",
    tables: Tables = "full",
    unsqueeze_dim: int = 1,
    inverse: bool = False,
    tail: bool = False,
    position_ids: Tensor | None = None,
    sections: Sequence[int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    pairs_in, pairs_out = LAYOUTS[layout]
    if position_ids is not None:
        cos, sin = cos[position_ids.long()], sin[position_ids.long()]
    if sections is not None:
        plane = torch.repeat_interleave(torch.arange(len(sections)), torch.tensor(sections)).to(cos.device)
        if tables == "full":
            plane = plane.repeat_interleave(2) if pairs_out else plane.repeat(2)
        columns = torch.arange(cos.shape[-1], device=cos.device)
        cos, sin = (t[plane, :, :, columns].movedim(0, -1) for t in (cos, sin))

    def two(t: Tensor, pairs: bool) -> tuple[Tensor, Tensor]:
        return (t[..., 0::2], t[..., 1::2]) if pairs else t.chunk(2, -1)

    def rotate(x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, cos.dtype)
        wide = torch.promote_types(dtype, torch.float32)
        # [B or 1, 1, S, W] for heads on axis 1, [B or 1, S, 1, W] for heads on axis 2.
        c, s = (t.to(wide).unsqueeze(unsqueeze_dim - 4) for t in (cos, sin))
        s = -s if inverse else s
        (c1, c2), (s1, s2) = ((t, t) if tables == "half" else two(t, pairs_out) for t in (c, s))
        rotary = 2 * c1.shape[-1]
        start = x.shape[-1] - rotary if tail else 0
        turned = x[..., start : start + rotary].to(wide)
        x1, x2 = two(turned, pairs_in)
        y1 = x1 * c1 - x2 * s1
        y2 = x2 * c2 + x1 * s2
        y = torch.stack((y1, y2), -1).flatten(-2) if pairs_out else torch.cat((y1, y2), -1)
        before, after = x[..., :start].to(dtype), x[..., start + rotary :].to(dtype)
        return torch.cat((before, y.to(dtype), after), -1)

    return rotate(q) if k is None else (rotate(q), rotate(k))


# ---- kernels ----


@triton.jit
def _rotate_heads(
    x_ptr,
    y_ptr,
    x_stride_b,
    x_stride_h,
    x_stride_s,
    y_stride_b,
    y_stride_h,
    y_stride_s,
    batch,
    first_head,
    last_head,
    tokens,
    token_mask,
    c1,
    s1,
    c2,
    s2,
    PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    STAGES: tl.constexpr,
):
    x_tokens = x_ptr + batch * x_stride_b + (tokens * x_stride_s)[:, None]
    y_tokens = y_ptr + batch * y_stride_b + (tokens * y_stride_s)[:, None]
    for head in tl.range(first_head, last_head, num_stages=STAGES):
        x_rows = x_tokens + tl.cast(head, tl.int64) * x_stride_h
        y_rows = y_tokens + tl.cast(head, tl.int64) * y_stride_h
        if REST > 0:
            rest = tl.arange(0, BLOCK_REST)[None, :] + (0 if TAIL else 2 * HALF)
            rest_mask = token_mask & (rest < REST + (0 if TAIL else 2 * HALF))
            # Not through fp32, which would change the payload of a NaN.
            kept = tl.load(x_rows + rest, mask=rest_mask)
            tl.store(y_rows + rest, kept, mask=rest_mask)
            if TAIL:
                x_rows += REST
                y_rows += REST
        x1, x2 = load_pairs(x_rows, token_mask, "", PAIRS_IN, HALF, BLOCK_T, BLOCK_R)
        y1 = x1 * c1 - x2 * s1
        y2 = x2 * c2 + x1 * s2
        store_pairs(y_rows, y1, y2, token_mask, PAIRS_OUT, HALF, BLOCK_T, BLOCK_R)


@triton.jit
def _rope_kernel(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    cos_ptr,
    sin_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_s,
    k_stride_b,
    k_stride_h,
    k_stride_s,
    q_out_stride_b,
    q_out_stride_h,
    q_out_stride_s,
    k_out_stride_b,
    k_out_stride_h,
    k_out_stride_s,
    cos_stride_b,
    cos_stride_s,
    cos_stride_r,
    sin_stride_b,
    sin_stride_s,
    sin_stride_r,
    cos_stride_p,
    sin_stride_p,
    position_ptr,
    position_stride_b,
    position_stride_s,
    num_positions,
    num_tokens,
    num_q_heads,
    num_k_heads,
    HAS_POSITIONS: tl.constexpr,
    HAS_SECTIONS: tl.constexpr,
    END_1: tl.constexpr,
    END_2: tl.constexpr,
    END_3: tl.constexpr,
    HAS_K: tl.constexpr,
    FULL_TABLES: tl.constexpr,
    TABLE_PAIRS: tl.constexpr,
    INVERSE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per BLOCK_T tokens of a sequence and BLOCK_H heads of q or of k, head groups fastest.

    The tables stay in registers from head to head, while the next heads are on their way.
    """
    q_groups = tl.cdiv(num_q_heads, BLOCK_H)
    num_groups = q_groups
    if HAS_K:
        num_groups += tl.cdiv(num_k_heads, BLOCK_H)
    group = tl.program_id(0) % num_groups
    token_block = tl.program_id(0) // num_groups
    blocks_per_sequence = tl.cdiv(num_tokens, BLOCK_T)
    batch = (token_block // blocks_per_sequence).to(tl.int64)

    tokens = (token_block % blocks_per_sequence).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_mask = (tokens < num_tokens)[:, None]
    token_rows = tokens
    table_mask = token_mask
    if HAS_POSITIONS:
        position = tl.load(
            position_ptr + batch * position_stride_b + tokens * position_stride_s, mask=tokens < num_tokens, other=0
        ).to(tl.int64)
        # A row outside the tables makes NaN below, not a read out of bounds.
        is_row = (position >= 0) & (position < num_positions)
        token_rows = tl.where(is_row, position, 0)
        table_mask = token_mask & is_row[:, None]
    cos_rows = cos_ptr + batch * cos_stride_b + (token_rows * cos_stride_s)[:, None]
    sin_rows = sin_ptr + batch * sin_stride_b + (token_rows * sin_stride_s)[:, None]
    if TABLE_PAIRS:
        both = tl.arange(0, 2 * BLOCK_R)[None, :]
        both_mask = table_mask & (both < 2 * HALF)
        if HAS_SECTIONS:
            pair = both // 2
            plane = ((pair >= END_1).to(tl.int64) + (pair >= END_2).to(tl.int64)) + (pair >= END_3).to(tl.int64)
            cos_rows += plane * cos_stride_p
            sin_rows += plane * sin_stride_p
        c = tl.load(cos_rows + both * cos_stride_r, mask=both_mask, other=0.0).to(tl.float32)
        s = tl.load(sin_rows + both * sin_stride_r, mask=both_mask, other=0.0).to(tl.float32)
        c1, c2 = tl.split(tl.reshape(c, (BLOCK_T, BLOCK_R, 2)))
        s1, s2 = tl.split(tl.reshape(s, (BLOCK_T, BLOCK_R, 2)))
    else:
        cols = tl.arange(0, BLOCK_R)[None, :]
        mask = table_mask & (cols < HALF)
        if HAS_SECTIONS:
            plane = ((cols >= END_1).to(tl.int64) + (cols >= END_2).to(tl.int64)) + (cols >= END_3).to(tl.int64)
            cos_rows += plane * cos_stride_p
            sin_rows += plane * sin_stride_p
        c1 = tl.load(cos_rows + cols * cos_stride_r, mask=mask, other=0.0).to(tl.float32)
        s1 = tl.load(sin_rows + cols * sin_stride_r, mask=mask, other=0.0).to(tl.float32)
        if FULL_TABLES:
            c2 = tl.load(cos_rows + (HALF + cols) * cos_stride_r, mask=mask, other=0.0).to(tl.float32)
            s2 = tl.load(sin_rows + (HALF + cols) * sin_stride_r, mask=mask, other=0.0).to(tl.float32)
        else:
            c2 = c1
            s2 = s1
    if HAS_POSITIONS:
        c1 = tl.where(is_row[:, None], c1, float("nan"))
        c2 = tl.where(is_row[:, None], c2, float("nan"))
    if INVERSE:
        s1, s2 = -s1, -s2
    if TRANSPOSED:
        s1, s2 = -s2, -s1

    if group < q_groups:
        first_head = group * BLOCK_H
        _rotate_heads(
            q_ptr, q_out_ptr,
            q_stride_b, q_stride_h, q_stride_s, q_out_stride_b, q_out_stride_h, q_out_stride_s,
            batch, first_head, tl.minimum(first_head + BLOCK_H, num_q_heads), tokens, token_mask, c1, s1, c2, s2,
            PAIRS_IN, PAIRS_OUT, HALF, REST, TAIL, BLOCK_T, BLOCK_R, BLOCK_REST, STAGES,
        )  # fmt: skip
    elif HAS_K:
        first_head = (group - q_groups) * BLOCK_H
        _rotate_heads(
            k_ptr, k_out_ptr,
            k_stride_b, k_stride_h, k_stride_s, k_out_stride_b, k_out_stride_h, k_out_stride_s,
            batch, first_head, tl.minimum(first_head + BLOCK_H, num_k_heads), tokens, token_mask, c1, s1, c2, s2,
            PAIRS_IN, PAIRS_OUT, HALF, REST, TAIL, BLOCK_T, BLOCK_R, BLOCK_REST, STAGES,
        )  # fmt: skip


# ---- operators ----

# Widest head of which one program can hold a row of several heads in registers.
_MAX_HEAD_DIM = 2048


# Heads of a program: enough to read the tables seldom, and few enough for many programs. Loads of three in flight.
_BLOCK_H, _STAGES = 4, 3


@functools.cache
def _blocks(half: int, rest: int) -> tuple[int, int, int]:
    """BLOCK_T, BLOCK_R, BLOCK_REST: 512 pairs a head, 8 for each thread of two warps (MEASURED.md).

    Short rows have a pointer for every few bytes, so no more than 64 tokens are taken, or the pointers alone would
    fill the registers.
    """
    block_r, block_rest = next_power_of_2(half), next_power_of_2(rest)
    return max(1, min(64, 1024 // max(2 * block_r, block_rest))), block_r, block_rest


def _storage_order(x: Tensor) -> list[int]:
    """Axes of `x` from the outermost in memory to the innermost, which is always the last."""
    order: list[int] = []
    strides = x.stride()
    # Sorted by hand: the compiler traces comparisons of symbolic strides, but not `sorted` over them.
    for axis in range(3):
        at = len(order)
        while at > 0 and strides[order[at - 1]] < strides[axis]:
            at -= 1
        order.insert(at, axis)
    return [*order, 3]


def _unit_columns(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(x: Tensor, unsqueeze_dim: int) -> tuple[int, int, int]:
    """Strides of batch, heads and tokens."""
    strides = x.stride()
    return strides[0], strides[unsqueeze_dim], strides[3 - unsqueeze_dim]


def _table_strides(table: Tensor) -> tuple[int, int, int]:
    """Strides of batch, 0 where one table serves all, tokens and columns."""
    strides = table.stride()
    return strides[-3] if len(strides) >= 3 and table.shape[-3] > 1 else 0, strides[-2], strides[-1]


def _fake_rotate(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    layout: str,
    tables: str,
    unsqueeze_dim: int,
    inverse: bool,
    tail: bool,
    sections: Sequence[int] | None,
    transposed: bool,
    q_order: list[int],
    k_order: list[int],
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    q_out = torch.empty_permuted(q.shape, q_order, dtype=q_dtype, device=q.device)
    if k is None:
        return q_out, q.new_empty(0)
    return q_out, torch.empty_permuted(k.shape, k_order, dtype=k_dtype, device=k.device)


@define(
    "rope_rotate(Tensor q, Tensor? k, Tensor cos, Tensor sin, Tensor? position_ids, str layout, str tables,"
    " int unsqueeze_dim, bool inverse, bool tail, int[]? sections, bool transposed, int[] q_order, int[] k_order,"
    " ScalarType q_dtype, ScalarType k_dtype) -> (Tensor, Tensor)",
    fake=_fake_rotate,
)
def _rotate(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    layout: str,
    tables: str,
    unsqueeze_dim: int,
    inverse: bool,
    tail: bool,
    sections: Sequence[int] | None,
    transposed: bool,
    q_order: list[int],
    k_order: list[int],
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Both directions: the backward is the rotation of the gradients with the transposed matrix."""
    options = layout, tables, unsqueeze_dim, inverse, tail, sections, transposed
    q_out, k_out = _fake_rotate(q, k, cos, sin, position_ids, *options, q_order, k_order, q_dtype, k_dtype)
    q = _unit_columns(q)
    k = None if k is None else _unit_columns(k)
    num_q_heads = q.shape[unsqueeze_dim]
    num_k_heads = 0 if k is None else k.shape[unsqueeze_dim]
    num_tokens = q.shape[3 - unsqueeze_dim]
    half = cos.shape[-1] if tables == "half" else cos.shape[-1] // 2
    rest = q.shape[-1] - 2 * half
    block_t, block_r, block_rest = _blocks(half, rest)
    num_groups = cdiv(num_q_heads, _BLOCK_H) + cdiv(num_k_heads, _BLOCK_H)
    pairs_in, pairs_out = reversed(LAYOUTS[layout]) if transposed else LAYOUTS[layout]
    no_strides = (0, 0, 0)
    # Columns at which the second to fourth section begin; a missing one begins behind the last column.
    ends = [sum(sections[: i + 1]) if sections is not None and i + 1 < len(sections) else half for i in range(3)]
    launch(
        _rope_kernel,
        (q.shape[0] * cdiv(num_tokens, block_t) * num_groups,),
        q,
        k,
        q_out,
        k_out,
        cos,
        sin,
        *_strides(q, unsqueeze_dim),
        *(no_strides if k is None else _strides(k, unsqueeze_dim)),
        *_strides(q_out, unsqueeze_dim),
        *(no_strides if k is None else _strides(k_out, unsqueeze_dim)),
        *_table_strides(cos),
        *_table_strides(sin),
        0 if sections is None else cos.stride(0),
        0 if sections is None else sin.stride(0),
        position_ids,
        0 if position_ids is None or position_ids.dim() == 1 or position_ids.shape[0] == 1 else position_ids.stride(0),
        0 if position_ids is None else position_ids.stride(-1),
        cos.shape[-2],
        num_tokens,
        num_q_heads,
        num_k_heads,
        HAS_POSITIONS=position_ids is not None,
        HAS_SECTIONS=sections is not None,
        END_1=ends[0],
        END_2=ends[1],
        END_3=ends[2],
        HAS_K=k is not None,
        FULL_TABLES=tables == "full",
        # By the result of the forward, whichever way the kernel runs.
        TABLE_PAIRS=tables == "full" and LAYOUTS[layout][1],
        INVERSE=inverse,
        TRANSPOSED=transposed,
        PAIRS_IN=pairs_in,
        PAIRS_OUT=pairs_out,
        HALF=half,
        REST=rest,
        TAIL=tail,
        BLOCK_H=_BLOCK_H,
        BLOCK_T=block_t,
        BLOCK_R=block_r,
        BLOCK_REST=block_rest,
        STAGES=_STAGES,
        num_warps=2,
    )
    return q_out, k_out


# ---- autograd ----


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        position_ids: Tensor | None,
        options: tuple[Any, ...],
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin, position_ids)
        ctx.set_materialize_grads(False)
        ctx.options = options
        ctx.orders = _storage_order(q), [] if k is None else _storage_order(k)
        ctx.dtypes = q.dtype, q.dtype if k is None else k.dtype
        dtypes = [torch.promote_types(dtype, cos.dtype) for dtype in ctx.dtypes]
        q_out, k_out = _rotate(q, k, cos, sin, position_ids, *ctx.options, False, *ctx.orders, *dtypes)
        if k is None:
            return q_out
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(q_out)
        elif not ctx.needs_input_grad[1]:
            ctx.mark_non_differentiable(k_out)
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq_out: Tensor | None, dk_out: Tensor | None = None) -> tuple[Tensor | None, ...]:
        tables, options = ctx.saved_tensors, (*ctx.options, True)
        (q_order, k_order), (q_dtype, k_dtype) = ctx.orders, ctx.dtypes
        has_dq = dq_out is not None and ctx.needs_input_grad[0]
        has_dk = dk_out is not None and ctx.needs_input_grad[1]
        dq = dk = None
        if has_dq and has_dk:
            dq, dk = _rotate(dq_out, dk_out, *tables, *options, q_order, k_order, q_dtype, k_dtype)
        elif has_dq:
            dq, _ = _rotate(dq_out, None, *tables, *options, q_order, [], q_dtype, q_dtype)
        elif has_dk:
            dk, _ = _rotate(dk_out, None, *tables, *options, k_order, [], k_dtype, k_dtype)
        return dq, dk, None, None, None, None


# ---- public ----


def require_heads_and_tables(
    name: str,
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    layout: str,
    tables: str,
    unsqueeze_dim: int,
    position_ids: Tensor | None = None,
    sections: Sequence[int] | None = None,
) -> int:
    """That heads, tables and options fit each other; the rotary width."""
    require_one_of(name, "layout", layout, tuple(LAYOUTS))
    require_one_of(name, "tables", tables, TABLES)
    require_one_of(name, "unsqueeze_dim", unsqueeze_dim, (1, 2))
    require(q.dim() == 4, name, "q", "four axes", tuple(q.shape))
    # Sizes are handed over as they are: formatting one on the way would make the compiler specialise on it.
    num_tokens = q.shape[3 - unsqueeze_dim]
    if k is not None:
        heads = k.shape[unsqueeze_dim] if k.dim() == 4 else "Hk"
        expected = (*q.shape[:unsqueeze_dim], heads, *q.shape[unsqueeze_dim + 1 :])
        require(tuple(k.shape) == expected, name, "k", expected, tuple(k.shape))
    _require_table_rows(name, q, cos, num_tokens, position_ids, sections)
    width = cos.shape[-1]
    if tables == "full":
        require(width % 2 == 0, name, "cos", "an even number of columns for tables 'full'", width)
    rotary = width if tables == "full" else 2 * width
    require(0 < rotary <= q.shape[-1], name, "cos", "a rotary width of 2 to the head dim", rotary)
    require(tuple(sin.shape) == tuple(cos.shape), name, "sin", tuple(cos.shape), tuple(sin.shape))
    require(sin.dtype == cos.dtype, name, "sin", cos.dtype, sin.dtype)
    return rotary


def _require_table_rows(
    name: str,
    q: Tensor,
    cos: Tensor,
    num_tokens: int,
    position_ids: Tensor | None,
    sections: Sequence[int] | None,
) -> None:
    """That `cos` has a row for each token, or `position_ids` one for each and all in the table."""
    width = cos.shape[-1] if cos.dim() else 0
    if position_ids is not None:
        require(sections is None, name, "sections", "None together with position_ids", sections)
        require(cos.dim() == 2, name, "cos", "two axes together with position_ids", tuple(cos.shape))
        no_integer = position_ids.is_floating_point() or position_ids.is_complex() or position_ids.dtype == torch.bool
        require(not no_integer, name, "position_ids", "an integer dtype", position_ids.dtype)
        if position_ids.dim() == 1 or (position_ids.dim() == 2 and position_ids.shape[0] == 1):
            shape = (*position_ids.shape[:-1], num_tokens)
        else:
            shape = (q.shape[0], num_tokens)
        require(tuple(position_ids.shape) == shape, name, "position_ids", shape, tuple(position_ids.shape))
        if position_ids.device.type == "cpu" and position_ids.numel() and not torch.compiler.is_compiling():
            low, high = (int(t) for t in position_ids.aminmax())
            expected = f"rows from 0 to {cos.shape[0] - 1}"
            require(low >= 0 and high < cos.shape[0], name, "position_ids", expected, f"{low} to {high}")
        return
    if sections is not None:
        require(cos.dim() == 4, name, "cos", "four axes together with sections", tuple(cos.shape))
        require(cos.shape[0] == len(sections), name, "cos", f"{len(sections)} tables, one a section", cos.shape[0])
    else:
        require(cos.dim() in (2, 3), name, "cos", "two or three axes", tuple(cos.shape))
    if cos.dim() == 2 or cos.shape[-3] == 1:
        require(cos.shape[-2] == num_tokens, name, "cos", (num_tokens, width), tuple(cos.shape))
    else:
        expected = (*cos.shape[:-3], q.shape[0], num_tokens, width)
        require(tuple(cos.shape) == expected, name, "cos", expected, tuple(cos.shape))


def _supports(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **_: Any) -> list[str]:
    reasons = []
    if any(t is not None and t.dtype == torch.float64 for t in (q, k, cos)):
        reasons.append("float64 is computed by the reference")
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        reasons.append("cos or sin requires a gradient, which only the reference computes")
    if q.shape[-1] > _MAX_HEAD_DIM:
        reasons.append(f"the head dim is above {_MAX_HEAD_DIM}")
    return reasons


@op(reference=rope_reference, supports=_supports)
def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    layout: Layout = "half",
    tables: Tables = "full",
    unsqueeze_dim: int = 1,
    inverse: bool = False,
    tail: bool = False,
    position_ids: Tensor | None = None,
    sections: Sequence[int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rotary position embedding of queries and keys.

        y = cat(x1 * c1 - x2 * s1, x2 * c2 + x1 * s2, x[R:]),   x1, x2 = x[:R].chunk(2)   # the reference, in one line

    Args:
        q: `[B, Hq, S, D]`, floating point, any strides; copied only if its last axis is not contiguous.
        k: `[B, Hk, S, D]`, or None to rotate `q` alone.
        cos: `[S, W]`, or `[B or 1, S, W]` for angles of each sample; any strides. W sets the rotary width R.
        sin: like `cos`.
        layout: which elements form a pair: "half" those at distance R/2; "interleaved" neighbours;
            "interleaved_to_half" reads neighbours and writes the pair at distance R/2.
        tables: "full" when W = R and column j belongs to element j of the result; "half" when W = R/2 and both
            elements of a pair use the same column. A view such as `cos[..., ::2]` or `cos[..., : R // 2]` makes
            half tables of full ones that repeat their columns.
        unsqueeze_dim: axis of the heads: 1, or 2 for `[B, S, H, D]`.
        inverse: turn by minus the angle, as with `-sin`.
        tail: turn the last R elements of a head and copy those before them.
        position_ids: `[S]`, or `[B or 1, S]`, any integer dtype: the rows of `cos` and `sin`, `[P, W]`, that the
            tokens take, as for sequences packed into one row; None for one row a token, in order.
        sections: numbers of pairs that take their angles from each of up to four tables, which `cos` and `sin` then
            hold as `[len(sections), B or 1, S, W]` (time, height and width of multimodal positions); their sum is R/2.
            Not together with `position_ids`.

    Returns:
        The rotated `q` and `k`, or `q` alone without `k`; new tensors, their axes stored in the order of the input's.

    Raises:
        ValueError: shapes, dtypes or devices disagree, W does not fit the head, or an option is unknown. A position
            outside the tables raises on a CPU; on a GPU its token becomes NaN.

    Numerics: in fp32, rounded once to the promoted dtype of the input and the tables; gradients likewise to
              the dtype of the input; elements that do not turn are copied bit for bit.
    Memory:   saves `cos`, `sin` and `position_ids`.
    Differs from the reference: never in formula; a product and a sum may be fused into one rounding.
    Source: Su et al. 2021, arXiv:2104.09864; Wang et al. 2024, arXiv:2409.12191 (sections).
    """
    name = "rope"
    key = None
    # On a CPU every call looks at the positions.
    if sections is None and (position_ids is None or getattr(position_ids, "is_cuda", False)):
        has_gradient = [torch.is_grad_enabled() and getattr(t, "requires_grad", False) for t in (cos, sin)]
        key = call_key(name, (q, k, cos, sin, position_ids), layout, tables, unsqueeze_dim, *has_gradient)
    if not is_accepted(key):
        require_floating(name, q=q, k=k, cos=cos, sin=sin)
        rotary = require_heads_and_tables(
            name, q, k, cos, sin, layout, tables, unsqueeze_dim, position_ids=position_ids, sections=sections
        )
        if sections is not None:
            sections = list(sections)
            expected = f"up to four numbers of pairs, in sum {rotary // 2}"
            valid = 0 < len(sections) <= 4 and all(isinstance(n, int) and n > 0 for n in sections)
            require(valid and sum(sections) == rotary // 2, name, "sections", expected, sections)
        require_same_device(name, q=q, k=k, cos=cos, sin=sin, position_ids=position_ids)
        if runs_reference(name, q, k, cos, sin):
            options = {
                "layout": layout,
                "tables": tables,
                "unsqueeze_dim": unsqueeze_dim,
                "inverse": inverse,
                "tail": tail,
            }
            return rope_reference(q, k, cos, sin, **options, position_ids=position_ids, sections=sections)
        accept(key, q)
    options = layout, tables, unsqueeze_dim, inverse, tail, sections
    return apply(_Rope, q, k, cos, sin, position_ids, options)
