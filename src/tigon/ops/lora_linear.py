"""A linear layer with a low-rank adapter.

    y = x @ weight.T + bias + scaling * drop(x) @ lora_a.T @ lora_b.T

Gradient, with low = scaling * drop(x) @ lora_a.T and dlow = scaling * dy @ lora_b:

    dx = dy @ weight + drop(dlow @ lora_a)                  (the mask of forward)
    dlora_a = dlow.T @ drop(x),   dlora_b = dy.T @ low
    dweight = dy.T @ x,   dbias = sum over rows of dy

drop(x) is x / (1 - dropout) where the mask keeps it, else 0. The mask is a function of a seed and of where an element
is, so that every kernel makes its part of it anew and nobody stores it or drop(x).

M rows (all leading axes), K columns of x, N of y, R the rank. Saved for backward: x, low (R numbers a row), weights.
Source: Hu et al. 2021, arXiv:2106.09685; Salmon et al. 2011, doi:10.1145/2063384.2063405 (the mask: Philox 4x32).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _device
from ._check import require, require_floating, require_number, require_same_device
from ._choice import take
from ._device import num_sms
from ._hopper_sum import can_sum_products, sum_products
from ._launch import as_rows, cdiv, launch, next_power_of_2
from ._op import apply, as_output, define, is_traced, once_differentiable, op, runs_reference
from ._partials import sum_partials
from ._projection import matmul_dtype, shared_matmul_dtype
from ._triton import tl, triton

# Rounds of Philox: fewest that pass the tests of its source. One call gives the bits of four elements, which are
# _LANE columns apart.
_ROUNDS, _LANE, _LANES = 7, 32, 4

# ---- reference ----


def lora_linear_reference(
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    *,
    bias: Tensor | None = None,
    scaling: float = 1.0,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    y = F.linear(x, weight, bias)
    return (y + adapter_reference(x, lora_a, lora_b, scaling, dropout, seed)).to(y.dtype)


def adapter_reference(
    x: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float, dropout: float, seed: Tensor | None
) -> Tensor:
    """What the adapter adds."""
    h = x.to(lora_a.dtype)
    if dropout > 0:
        wide = torch.promote_types(h.dtype, torch.float32)
        kept = kept_by(_seed_for(x) if seed is None else seed, x.shape, dropout)
        h = (h.to(wide) * kept / (1 - dropout)).to(h.dtype)
    return scaling * F.linear(F.linear(h, lora_a), lora_b)


def kept_by(seed: Tensor, shape: torch.Size, dropout: float) -> Tensor:
    """The mask of `drop`, True where an element of a tensor of this shape is kept."""
    num_rows, num_cols = math.prod(shape[:-1]), shape[-1]
    rows = torch.arange(num_rows, device=seed.device).unsqueeze(1)
    cols = torch.arange(num_cols, device=seed.device)
    four = _LANE * _LANES
    words = _philox(seed, (cols // four * _LANE + cols % _LANE).expand(num_rows, -1), rows.expand(-1, num_cols))
    lane = (cols // _LANE % _LANES).expand(num_rows, -1)
    bits = torch.stack(words).gather(0, lane.unsqueeze(0)).squeeze(0)
    return ((bits >> 1) >= _threshold(dropout)).reshape(shape)


def _philox(seed: Tensor, c0: Tensor, c1: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words for each pair of counters, in int64: what overflows there keeps its lower 64 bits."""
    low = 0xFFFFFFFF
    k0, k1 = seed & low, (seed >> 32) & low
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(_ROUNDS):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) & low ^ c1 ^ k0, b & low, (a >> 32) & low ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3


def _threshold(dropout: float) -> int:
    return round(dropout * 2**31)


def _seed_for(x: Tensor) -> Tensor:
    """A seed from torch's generator of the device, which nobody waits for."""
    return torch.randint(2**62, (), device=x.device)


# ---- kernels ----


@triton.jit
def _words(seed, rows, cols, ROUNDS: tl.constexpr):
    """The bits of four tiles, whose first has these rows and whose columns count up to these."""
    c0 = (tl.zeros_like(rows)[:, None] + cols[None, :]).to(tl.uint32)
    c1 = (rows[:, None] + tl.zeros_like(cols)[None, :]).to(tl.uint32)
    zero = tl.zeros_like(c0)
    return tl.philox(seed, c0, c1, zero, zero, ROUNDS)


@triton.jit
def _dropped(t, words, LANE: tl.constexpr, threshold, keep_scale):
    bits = words[LANE]
    return tl.where((bits >> 1).to(tl.int32) >= threshold, t.to(tl.float32) * keep_scale, 0.0)


@triton.jit
def _lora_linear_low_kernel(
    t_ptr,
    factor_ptr,
    low_ptr,
    seed_ptr,
    out_ptr,
    grad_ptr,
    t_stride,
    factor_stride_k,
    factor_stride_r,
    grad_stride_k,
    grad_stride_r,
    num_rows,
    num_cols,
    rank,
    cols_a_program,
    scale,
    threshold,
    keep_scale,
    HAS_FACTOR: tl.constexpr,
    HAS_LOW: tl.constexpr,
    LANES: tl.constexpr,
    ROUNDS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Program (r, m, k) reads BLOCK_M rows of some columns of t once, for BLOCK_R columns of its parts of `t @ factor`
    and of `t.T @ low`; those of other r find them in the cache."""
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = (rows < num_rows)[:, None]
    wide_rows = rows.to(tl.int64)[:, None]
    ranks = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    rank_mask = (ranks < rank)[None, :]
    offsets = wide_rows * rank + ranks[None, :]
    if HAS_FACTOR:
        dtype = factor_ptr.dtype.element_ty
        acc = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
    else:
        dtype = low_ptr.dtype.element_ty
    if HAS_LOW:
        low = tl.load(low_ptr + offsets, mask=row_mask & rank_mask, other=0.0)
        grad_ptr += tl.program_id(1).to(tl.int64) * num_cols * rank
    if LANES > 1:
        seed = tl.load(seed_ptr)
    first = tl.program_id(2) * cols_a_program
    for start in range(first, tl.minimum(first + cols_a_program, num_cols), LANES * BLOCK_K):
        if LANES > 1:
            words = _words(seed, rows, start // LANES + tl.arange(0, BLOCK_K), ROUNDS)
        for lane in tl.static_range(LANES):
            cols = start + lane * BLOCK_K + tl.arange(0, BLOCK_K)
            col_mask = cols < num_cols
            t = tl.load(t_ptr + wide_rows * t_stride + cols[None, :], mask=row_mask & col_mask[None, :], other=0.0)
            if LANES > 1:
                t = _dropped(t, words, lane, threshold, keep_scale)
            t = t.to(dtype)
            part = col_mask[:, None] & rank_mask
            if HAS_FACTOR:
                at = cols.to(tl.int64)[:, None] * factor_stride_k + ranks[None, :] * factor_stride_r
                factor = tl.load(factor_ptr + at, mask=part, other=0.0)
                acc = tl.dot(t, factor, acc, input_precision=PRECISION)
            if HAS_LOW:
                at = cols.to(tl.int64)[:, None] * grad_stride_k + ranks[None, :] * grad_stride_r
                tl.store(grad_ptr + at, tl.dot(tl.trans(t), low, input_precision=PRECISION), mask=part)
    if HAS_FACTOR:
        out = out_ptr + tl.program_id(2).to(tl.int64) * num_rows * rank + offsets
        tl.store(out, acc * scale, mask=row_mask & rank_mask)


@triton.jit
def _lora_linear_add_kernel(
    y_ptr,
    low_ptr,
    factor_ptr,
    seed_ptr,
    factor_stride_r,
    factor_stride_n,
    num_rows,
    num_cols,
    rank,
    threshold,
    keep_scale,
    LANES: tl.constexpr,
    ROUNDS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Program (m, n) adds to LANES tiles of y what they get of `drop(low @ factor)`."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = (rows < num_rows)[:, None]
    wide_rows = rows.to(tl.int64)[:, None]
    first = tl.program_id(1) * (LANES * BLOCK_N)
    if LANES > 1:
        words = _words(tl.load(seed_ptr), rows, first // LANES + tl.arange(0, BLOCK_N), ROUNDS)
    for lane in tl.static_range(LANES):
        cols = first + lane * BLOCK_N + tl.arange(0, BLOCK_N)
        col_mask = (cols < num_cols)[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for start in range(0, rank, BLOCK_R):
            ranks = start + tl.arange(0, BLOCK_R)
            low = tl.load(
                low_ptr + wide_rows * rank + ranks[None, :], mask=row_mask & (ranks < rank)[None, :], other=0.0
            )
            at = ranks[:, None] * factor_stride_r + cols.to(tl.int64)[None, :] * factor_stride_n
            factor = tl.load(factor_ptr + at, mask=(ranks < rank)[:, None] & col_mask, other=0.0)
            acc = tl.dot(low, factor, acc, input_precision=PRECISION)
        if LANES > 1:
            acc = _dropped(acc, words, lane, threshold, keep_scale)
        sums = y_ptr + wide_rows * num_cols + cols[None, :]
        mask = row_mask & col_mask
        tl.store(sums, tl.load(sums, mask=mask, other=0.0).to(tl.float32) + acc, mask=mask)


# ---- operators ----


def _tallest(device: torch.device) -> int:
    """Rows of a tile of 16-bit numbers; more where the product over them need not have its factors in registers."""
    if device.type not in ("cuda", "meta"):
        return 128
    found = _device.capability(device.index or 0)
    if found[0] in (9, 10):
        # The former is 9.0; what else begins with 9 is of another maker.
        return 256 if found[1] < 4 else 64
    return 128 if found[0] >= 8 else 32


def _low_blocks(num_rows: int, rank: int, is_wide: bool, drops: bool, tallest: int) -> tuple[int, int, int]:
    """BLOCK_M, BLOCK_R and num_warps. Tall tiles leave few partial sums of `t.T @ low`."""
    block_r = 16 if is_wide or rank <= 16 else 32
    tallest = 64 if is_wide else tallest
    tallest //= 2 if drops or block_r > 16 else 1
    block_m = max(16, min(tallest, next_power_of_2(num_rows)))
    return block_m, block_r, 8 if block_m >= 128 else 4


def _fake_low(
    t: Tensor,
    factor: Tensor | None,
    low: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout: float,
    is_transposed: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    product = t.new_empty(0) if factor is None else factor.new_empty(t.shape[0], factor.shape[1])
    if low is None:
        return product, t.new_empty(0, dtype=dtype)
    shape = (low.shape[1], t.shape[1]) if is_transposed else (t.shape[1], low.shape[1])
    return product, low.new_empty(shape, dtype=dtype)


@define(
    "lora_linear_low(Tensor t, Tensor? factor, Tensor? low, Tensor? seed, float scale, float dropout,"
    " bool is_transposed, ScalarType dtype) -> (Tensor, Tensor)",
    fake=_fake_low,
)
def _low(
    t: Tensor,
    factor: Tensor | None,
    low: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout: float,
    is_transposed: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """`scale * drop(t) @ factor` in the dtype of `factor`, and `drop(t).T @ low` or its transpose in `dtype`."""
    used = factor if low is None else low
    if used is None:
        raise ValueError("lora_linear_low: expected factor or low")
    if t.numel() == 0:
        return tuple(each.zero_() for each in _fake_low(t, factor, low, seed, scale, dropout, is_transposed, dtype))  # type: ignore[return-value]

    def one_pass() -> tuple[Tensor, Tensor]:
        return _low_by_kernel(t, factor, low, seed, scale, dropout, is_transposed, dtype)

    def products() -> tuple[Tensor, Tensor]:
        made = _fake_low(t, factor, low, seed, scale, dropout, is_transposed, dtype)
        rows = t.to(used.dtype)
        product = made[0] if factor is None else torch.addmm(made[0], rows, factor, beta=0, alpha=scale)
        gradient = made[1]
        if low is not None:
            gradient = (low.t() @ rows if is_transposed else rows.t() @ low).to(dtype)
        return product, gradient

    if dropout > 0:
        return one_pass()
    size = next_power_of_2(t.shape[0]), t.shape[1], used.shape[1], factor is None, low is None, is_transposed
    key = "lora_linear", *size, t.dtype, used.dtype
    return take(key, {"one pass for both products": one_pass, "two products of few columns": products}, t.device)


def _low_by_kernel(
    t: Tensor,
    factor: Tensor | None,
    low: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout: float,
    is_transposed: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    product, gradient = _fake_low(t, factor, low, seed, scale, dropout, is_transposed, dtype)
    t = as_rows(t)
    used = factor if low is None else low
    num_rows, num_cols = t.shape
    rank = used.shape[1]  # type: ignore[union-attr]
    is_wide = used.dtype == torch.float32  # type: ignore[union-attr]
    block_m, block_r, num_warps = _low_blocks(num_rows, rank, is_wide, dropout > 0, _tallest(t.device))
    tiles = cdiv(num_rows, block_m)
    lanes = _LANES if dropout > 0 else 1
    # Enough programs for all multiprocessors, each with some columns.
    parts = max(1, min(cdiv(2 * num_sms(t.device), tiles), num_cols // 256))
    cols_a_program = cdiv(cdiv(num_cols, parts), lanes * _LANE) * lanes * _LANE
    parts = cdiv(num_cols, cols_a_program)
    out, grad = product, gradient
    if factor is not None and parts > 1:
        out = t.new_empty((parts, num_rows * rank), dtype=torch.float32)
    if low is not None and tiles > 1:
        grad = t.new_empty((tiles, num_cols * rank), dtype=torch.float32)
    launch(
        _lora_linear_low_kernel,
        (cdiv(rank, block_r), tiles, parts),
        t,
        factor,
        low,
        seed if dropout > 0 else None,
        out,
        grad,
        t.stride(0),
        *((0, 0) if factor is None else factor.stride()),
        *((1, num_cols) if is_transposed else (rank, 1)),
        num_rows,
        num_cols,
        rank,
        cols_a_program,
        scale,
        _threshold(dropout),
        1 / (1 - dropout),
        HAS_FACTOR=factor is not None,
        HAS_LOW=low is not None,
        LANES=lanes,
        ROUNDS=_ROUNDS,
        PRECISION="ieee" if is_wide else "tf32",
        BLOCK_M=block_m,
        BLOCK_K=_LANE,
        BLOCK_R=block_r,
        num_warps=num_warps,
        num_stages=2 if is_wide or dropout > 0 else 3,
    )
    if out is not product:
        sum_partials(out, product)
    if grad is not gradient:
        sum_partials(grad, gradient)
    return product, gradient


def _fake_add(y: Tensor, low: Tensor, factor: Tensor, seed: Tensor | None, dropout: float) -> None:
    return None


@define("lora_linear_add(Tensor(a!) y, Tensor low, Tensor factor, Tensor? seed, float dropout) -> ()", fake=_fake_add)
def _add(y: Tensor, low: Tensor, factor: Tensor, seed: Tensor | None, dropout: float) -> None:
    """`y += drop(low @ factor)`, of any dtypes."""
    rows = y.contiguous()
    num_rows, num_cols = y.shape
    rank = low.shape[1]
    is_wide = low.dtype == torch.float32
    lanes, block_n = (_LANES, _LANE) if dropout > 0 else (1, 64 if is_wide else 128)
    block_m = max(16, min(32 if dropout > 0 else 64, next_power_of_2(num_rows)))
    launch(
        _lora_linear_add_kernel,
        (cdiv(num_rows, block_m), cdiv(num_cols, lanes * block_n)),
        rows,
        low.contiguous(),
        factor,
        seed if dropout > 0 else None,
        *factor.stride(),
        num_rows,
        num_cols,
        rank,
        _threshold(dropout),
        1 / (1 - dropout),
        LANES=lanes,
        ROUNDS=_ROUNDS,
        PRECISION="ieee" if is_wide else "tf32",
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_R=max(16, min(32, next_power_of_2(rank))),
        num_warps=4,
        num_stages=2,
    )
    if rows is not y:
        y.copy_(rows)


def sum_with_low(x: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor, lora_b: Tensor) -> Tensor:
    """`x @ weight.T + bias + low @ lora_b.T`, in the dtype of `x`, `weight` and `bias`."""

    def in_turn() -> Tensor:
        return _added(F.linear(x, weight, bias), low, lora_b.t())

    def at_once() -> Tensor:
        y = x.new_empty(x.shape[0], weight.shape[0])
        sum_products(x, weight, low, lora_b, bias, y)
        return y

    if is_traced(x) or weight.shape[0] % 8 or not can_sum_products(x, weight, low, lora_b):
        return in_turn()
    return _faster("y", in_turn, at_once, x, weight, low)


def input_gradient(
    dy: Tensor, weight: Tensor, dlow: Tensor, lora_a: Tensor, seed: Tensor | None, dropout: float
) -> Tensor:
    """`dy @ weight + drop(dlow @ lora_a)`, in the dtype of `dy` and `weight`."""

    def in_turn() -> Tensor:
        return _added(torch.mm(dy, weight), dlow, lora_a, seed, dropout)

    def at_once() -> Tensor:
        dx = dy.new_empty(dy.shape[0], weight.shape[1])
        sum_products(dy, weight, dlow, lora_a, None, dx, transposed=True)
        return dx

    if dropout > 0 or is_traced(dy) or weight.shape[1] % 8 or not can_sum_products(dy, weight, dlow, lora_a):
        return in_turn()
    return _faster("dx", in_turn, at_once, dy, weight, dlow)


def _added(total: Tensor, low: Tensor, factor: Tensor, seed: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """`total + drop(low @ factor)`, in `total`."""
    if dropout == 0 and low.dtype == total.dtype:
        return total.addmm_(low, factor)
    if total.numel():
        _add(total, low, factor, seed, dropout)
    return total


def _faster(kind: str, in_turn: Any, at_once: Any, a: Tensor, weight: Tensor, low: Tensor) -> Tensor:
    key = "lora_linear", kind, next_power_of_2(a.shape[0]), *weight.shape, low.shape[1], a.dtype
    return take(key, {"one product after the other": in_turn, "both products at once": at_once}, a.device)


def adapter_gradients(
    dy: Tensor,
    rows: Tensor | None,
    lora_b: Tensor | None,
    low: Tensor | None,
    seed: Tensor | None,
    low_dtype: torch.dtype,
    scaling: float,
    dropout: float,
    needs: tuple[bool, bool, bool],
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`dlow` and the gradients of `lora_a` and `lora_b`; `needs` those of x, `lora_a` and `lora_b`."""
    dlow = da = db = None
    factor = lora_b.to(low_dtype) if lora_b is not None and (needs[0] or needs[1]) else None
    if factor is not None or needs[2]:
        dlow, db = _low(dy, factor, low, None, scaling, 0.0, False, b_dtype)
    if needs[1]:
        _, da = _low(rows, None, dlow, seed, 1.0, dropout, True, a_dtype)  # type: ignore[arg-type]
    return dlow, da, db if needs[2] else None


# ---- autograd ----


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_a: Tensor,
        lora_b: Tensor,
        seed: Tensor | None,
        dtype: torch.dtype,
        low_dtype: torch.dtype,
        scaling: float,
        dropout: float,
    ) -> Tensor:
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        cast = rows.to(dtype)
        # What is dropped out is scaled before it is rounded.
        seen = rows if dropout > 0 else cast
        low, _ = _low(seen, lora_a.to(low_dtype).t(), None, seed, scaling, dropout, False, dtype)
        y = sum_with_low(cast, weight.to(dtype), None if bias is None else bias.to(dtype), low, lora_b.to(low_dtype))
        needs_dx, needs_dweight, _, needs_da, needs_db = ctx.needs_input_grad[:5]
        ctx.save_for_backward(
            x if needs_dweight or needs_da else None,
            weight if needs_dx else None,
            lora_a if needs_dx else None,
            lora_b if needs_dx or needs_da else None,
            low if needs_db else None,
            seed,
        )
        ctx.options = low_dtype, scaling, dropout, x.shape
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (x, weight, bias, lora_a, lora_b))
        return as_output(y, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, lora_a, lora_b, low, seed = ctx.saved_tensors
        low_dtype, scaling, dropout, shape = ctx.options
        needs_dx, needs_dweight, needs_dbias, needs_da, needs_db = ctx.needs_input_grad[:5]
        x_dtype, weight_dtype, bias_dtype, a_dtype, b_dtype = ctx.dtypes
        dy = dy.reshape(math.prod(dy.shape[:-1]), dy.shape[-1])
        rows = None if x is None else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        dx = dweight = dbias = None
        needs = needs_dx, needs_da, needs_db
        dlow, da, db = adapter_gradients(
            dy, rows, lora_b, low, seed, low_dtype, scaling, dropout, needs, a_dtype, b_dtype
        )
        if needs_dx:
            dx = input_gradient(dy, weight.to(dy.dtype), dlow, lora_a.to(low_dtype), seed, dropout)
            dx = dx.to(x_dtype).view(shape)
        if needs_dweight:
            dweight = torch.mm(dy.t(), rows.to(dy.dtype)).to(weight_dtype)
        if needs_dbias:
            # torch adds 16-bit numbers in fp32.
            dbias = dy.sum(0).to(bias_dtype)
        return dx, dweight, dbias, da, db, None, None, None, None, None


# ---- public ----


def _supports(
    x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, *, bias: Tensor | None = None, **_: Any
) -> list[str]:
    if any(t is not None and t.dtype == torch.float64 for t in (x, weight, lora_a, lora_b, bias)):
        return ["float64 is computed by the reference"]
    return []


def require_adapter(
    name: str,
    x: Tensor,
    num_outputs: int,
    lora_a: Tensor,
    lora_b: Tensor,
    bias: Tensor | None,
    scaling: float,
    dropout: float,
    seed: Tensor | None,
) -> None:
    """Raise unless this is an adapter of a layer from the columns of `x` to `num_outputs`."""
    num_cols = x.shape[-1]
    is_low = lora_a.dim() == 2 and lora_a.shape[0] >= 1 and lora_a.shape[1] == num_cols
    require(is_low, name, "lora_a", f"shape (rank, {num_cols})", tuple(lora_a.shape))
    shape = num_outputs, lora_a.shape[0]
    require(lora_b.shape == shape, name, "lora_b", f"shape {shape}", tuple(lora_b.shape))
    if bias is not None:
        require(bias.shape == shape[:1], name, "bias", f"shape {shape[:1]}", tuple(bias.shape))
    require_number(name, "scaling", scaling)
    require(0 <= dropout < 1, name, "dropout", "a number in [0, 1)", dropout)
    require_same_device(name, x=x, lora_a=lora_a, lora_b=lora_b, bias=bias, seed=seed)
    if seed is not None:
        is_scalar = seed.dtype == torch.int64 and seed.numel() == 1
        require(is_scalar, name, "seed", "an int64 scalar", f"{seed.dtype} of shape {tuple(seed.shape)}")


@op(reference=lora_linear_reference, supports=_supports)
def lora_linear(
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    *,
    bias: Tensor | None = None,
    scaling: float = 1.0,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """A linear layer and a low-rank adapter of it, with gradients for adapter, input and, if wanted, the layer.

        y = F.linear(x, weight, bias) + scaling * F.linear(F.linear(drop(x), lora_a), lora_b)    # the reference

    Args:
        x: `[..., K]`, floating point, any strides.
        weight: `[N, K]`, dtype of `x`, or cast with it by autocast; frozen or trained.
        lora_a: `[R, K]`, of any rank and any floating dtype, in which `x` is multiplied with it.
        lora_b: `[N, R]`, same dtype as `lora_a`.
        bias: `[N]`, same dtype as `weight`, or None.
        scaling: factor of the adapter.
        dropout: share of `x` that the adapter does not see, in [0, 1); for an evaluation 0.
        seed: int64 scalar on the device of `x` that decides what is dropped; None draws one from torch's generator, so
            that `torch.manual_seed` repeats it.

    Returns:
        `[..., N]` in the dtype that `F.linear(x, weight)` gives.

    Raises:
        ValueError: shapes, dtypes or devices disagree, or `scaling` or `dropout` is out of range.

    Numerics: `drop(x) @ lora_a.T` is scaled, then rounded to the dtype of `lora_a` or of autocast; both summands of `y`
              and of `dx` are added in fp32, or rounded once before. Gradients of the adapter are sums in fp32, rounded
              once.
    Memory:   saves `x` and R numbers a row; neither `drop(x)` nor a mask. Under autocast no cast weight is kept.
    Differs from the reference: never in formula; in the order of sums.
    Source: Hu et al. 2021, arXiv:2106.09685; Salmon et al. 2011 (the mask).
    """
    name = "lora_linear"
    require_floating(name, x=x, weight=weight, lora_a=lora_a, lora_b=lora_b, bias=bias)
    require(x.dim() >= 1, name, "x", "at least one axis", "a scalar")
    require(weight.dim() == 2, name, "weight", "two axes", f"shape {tuple(weight.shape)}")
    shape = weight.shape[0], x.shape[-1]
    require(weight.shape == shape, name, "weight", f"shape {shape}", tuple(weight.shape))
    require_adapter(name, x, shape[0], lora_a, lora_b, bias, scaling, dropout, seed)
    require_same_device(name, x=x, weight=weight)
    dtype = matmul_dtype(name, "x", x.dtype, weight, bias)
    low_dtype = shared_matmul_dtype(name, "lora_a", lora_a.dtype, lora_b=lora_b)
    if dropout == 0:
        seed = None
    elif seed is None:
        seed = _seed_for(x)
    if runs_reference(name, x, weight, lora_a, lora_b, bias=bias):
        return lora_linear_reference(x, weight, lora_a, lora_b, bias=bias, scaling=scaling, dropout=dropout, seed=seed)
    return apply(_LoraLinear, x, weight, bias, lora_a, lora_b, seed, dtype, low_dtype, float(scaling), float(dropout))
