"""Shared pieces of kernels. All take and return fp32 tiles.

Only functions that the interpreter has too are used, so that every kernel also runs on a CPU.
"""

from __future__ import annotations

from ._triton import tl, triton


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    # The odd series below 1/4 keeps full relative accuracy where (1 - e) / (1 + e) would cancel.
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    x2 = x * x
    near = x * (1.0 + x2 * (-0.3333333333 + x2 * (0.1333333333 + x2 * (-0.05396825397 + x2 * 0.02186948854))))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))
