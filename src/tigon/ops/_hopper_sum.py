"""The sum of two matrix products, the second of a low rank for example, rounded once (compute capability 9.0).

The second is steps more over the ring of the first: the sum is written once, where adding to it afterwards reads and
writes it again.
"""

from __future__ import annotations

from torch import Tensor

from ._gluon import gl, gluon
from ._hopper import can_multiply, halves, multiply, no_prologue, put

# ---- kernels ----


@gluon.jit
def _quarter(x, row, col, own, outs, args, WHICH: gl.constexpr):
    bias_ptr, num_cols = args
    if bias_ptr is not None:
        cols = col + gl.arange(0, 64, gl.SliceLayout(0, x.type.layout))
        x += gl.expand_dims(gl.load(bias_ptr + cols, mask=cols < num_cols, other=0.0).to(gl.float32), 0)
    put(x, own, WHICH, outs[0], row, col)


@gluon.jit
def _store_epilogue(acc, row, n, loaded, own, ins, outs, args, FUNCTION: gl.constexpr, FLAG: gl.constexpr):
    left, right = halves(acc)
    x0, x1 = halves(left)
    x2, x3 = halves(right)
    _quarter(x0, row, n * 256, own, outs, args, 0)
    _quarter(x1, row, n * 256 + 64, own, outs, args, 1)
    _quarter(x2, row, n * 256 + 128, own, outs, args, 0)
    _quarter(x3, row, n * 256 + 192, own, outs, args, 1)


# ---- launch ----


def can_sum_products(a: Tensor, weight: Tensor, b: Tensor, low: Tensor) -> bool:
    """True where `sum_products` does these, transposed or not."""
    return can_multiply(a, weight, b, low)


def sum_products(
    a: Tensor, weight: Tensor, b: Tensor, low: Tensor, bias: Tensor | None, out: Tensor, *, transposed: bool = False
) -> None:
    """Fill `out` with `a @ weight.T + b @ low.T + bias`; `transposed`: with `a @ weight + b @ low`.

    `a` `[M, K]`, `b` `[M, R]`, `weight` `[N, K]` and `low` `[N, R]`, or `[K, N]` and `[R, N]`; `out` `[M, N]`, of rows
    of a multiple of 16 bytes.
    """
    args = bias, out.shape[1]
    multiply(a, weight, None, (out,), args, no_prologue, _store_epilogue, more=(b, low), transposed=transposed)
