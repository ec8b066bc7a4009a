"""Shared pieces of kernels. All take and return fp32 tiles.

Only functions that the interpreter has too are used, so that every kernel also runs on a CPU. Exponents are
never positive and powers are clamped, so that no finite argument meets `inf * 0`.
"""

from __future__ import annotations

from ._triton import tl, triton


@triton.jit
def sigmoid(x):
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def tanh(x):
    a = tl.abs(x)
    e = tl.exp(-2.0 * a)
    far = (1.0 - e) / (1.0 + e)
    # The odd series below 1/4 keeps full relative accuracy where 1 - e would cancel.
    x2 = tl.minimum(a, 0.25) * tl.minimum(a, 0.25)
    near = x * (1.0 + x2 * (-0.3333333333 + x2 * (0.1333333333 + x2 * (-0.05396825397 + x2 * 0.02186948854))))
    return tl.where(a < 0.25, near, tl.where(x < 0, -far, far))


# Activations return their value and their derivative; the compiler drops what a kernel does not use.


@triton.jit
def sigmoid_and_slope(x):
    e = tl.exp(-tl.abs(x))
    r = 1.0 / (1.0 + e)
    # e r^2 = s (1 - s) without the cancellation of 1 - s.
    return tl.where(x < 0, e * r, r), e * r * r


@triton.jit
def silu_and_slope(x):
    s, slope = sigmoid_and_slope(x)
    return x * s, s + x * slope


@triton.jit
def gelu_and_slope(x):
    cdf = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
    # exp(-0.5 * 16^2) is already zero in fp32.
    a = tl.minimum(tl.abs(x), 16.0)
    return x * cdf, cdf + x * (0.3989422804014327 * tl.exp(-0.5 * a * a))


@triton.jit
def gelu_tanh_and_slope(x):
    # 0.5 (1 + tanh(u)) = sigmoid(2u), which does not cancel for negative u. Beyond 16 it is 0 or 1 in fp32.
    a = tl.minimum(tl.abs(x), 16.0)
    a = tl.where(x < 0, -a, a)
    a2 = a * a
    s, slope = sigmoid_and_slope(a * (1.5957691216057308 + 0.07135481627260025 * a2))
    return x * s, s + x * slope * (1.5957691216057308 + 0.21406444881780076 * a2)


@triton.jit
def relu_and_slope(x):
    # Both comparisons are false for NaN, which passes through.
    return tl.where(x <= 0, 0.0, x), tl.where(x <= 0, 0.0, 1.0)


@triton.jit
def relu2_and_slope(x):
    r = tl.where(x <= 0, 0.0, x)
    return r * r, 2.0 * r


@triton.jit
def identity_and_slope(x):
    return x, tl.full(x.shape, 1.0, tl.float32)


# Pairs of a rotation: neighbours, or elements at the distance HALF. `rows` are the pointers to the first element of
# each row, `mask` those rows that there are, `[ROWS, 1]` both; the tiles are `[ROWS, BLOCK_R]`.


@triton.jit
def load_pairs(
    rows,
    mask,
    EVICTION: tl.constexpr,
    PAIRS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    if PAIRS:
        both = tl.arange(0, 2 * BLOCK_R)[None, :]
        x = tl.load(rows + both, mask=mask & (both < 2 * HALF), other=0.0, eviction_policy=EVICTION).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(x, (ROWS, BLOCK_R, 2)))
    else:
        cols = tl.arange(0, BLOCK_R)[None, :]
        mask = mask & (cols < HALF)
        x1 = tl.load(rows + cols, mask=mask, other=0.0, eviction_policy=EVICTION).to(tl.float32)
        x2 = tl.load(rows + HALF + cols, mask=mask, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    return x1, x2


@triton.jit
def store_pairs(rows, x1, x2, mask, PAIRS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK_R: tl.constexpr):
    if PAIRS:
        both = tl.arange(0, 2 * BLOCK_R)[None, :]
        tl.store(rows + both, tl.reshape(tl.join(x1, x2), (ROWS, 2 * BLOCK_R)), mask=mask & (both < 2 * HALF))
    else:
        cols = tl.arange(0, BLOCK_R)[None, :]
        mask = mask & (cols < HALF)
        tl.store(rows + cols, x1, mask=mask)
        tl.store(rows + HALF + cols, x2, mask=mask)


@triton.jit
def label_loss(anchor, others, z_label):
    """Loss of a row, the logarithm of its whole sum relative to `anchor`, and that sum."""
    shift = tl.where(anchor == float("-inf"), 0.0, anchor)
    e_label = tl.exp(z_label - shift)
    total = others + e_label
    log_sum = tl.log(total)
    # log(1 + ratio) with the digits of a small ratio.
    is_likely = others < e_label
    ratio = tl.where(is_likely, others, 0.0) / tl.where(is_likely, e_label, 1.0)
    one_more = 1.0 + ratio
    small = tl.where(
        one_more == 1.0, ratio, tl.log(one_more) * (ratio / tl.where(one_more == 1.0, 1.0, one_more - 1.0))
    )
    return tl.where(is_likely, small, log_sum - (z_label - shift)), log_sum, total
