"""A matrix product on compute capability 9.0 whose results pass through an epilogue before they reach memory.

    out = epilogue(a @ weight.T),    a `[M, K]`, weight `[N, K]` or two of `[N, K]` side by side

One program a multiprocessor takes tile after tile of 128 rows and 256 columns. One warp copies parts of both factors
into a ring of buffers; two groups of four warps multiply them, 64 rows each, and run the epilogue. The groups meet
only in the ring, so that one multiplies while the other is in its epilogue. With two weights a tile has 128 columns of
each, which lie in the registers of the same threads.

Source: triton-lang's Gluon tutorials on warp specialization and persistence (the instructions, not the design); Shah
et al. 2024, arXiv:2407.08608 (multiplying in one group behind the special functions of the other).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _device
from ._gluon import (
    HAS_GLUON,
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    store_tile,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ._launch import cdiv, launch

CAPABILITY = (9, 0)
TILE_M, TILE_N = 128, 256
# Depth of a step and of the ring: with the buffers of the epilogue, all of the shared memory there is.
_TILE_K, _STAGES = 64, 4
# Rows of tiles that are finished before the next columns begin: their factors stay in the cache.
_GROUP_M = 16


# ---- kernels ----


@gluon.jit
def _tile(index, num_m, num_n, GROUP_M: gl.constexpr):
    per_group = GROUP_M * num_n
    first = index // per_group * GROUP_M
    rest = index % per_group
    size = gl.minimum(num_m - first, GROUP_M)
    return first + rest % size, rest // size


@gluon.jit
def _produce(
    a_desc,
    weight_desc,
    other_desc,
    a_bufs,
    weight_bufs,
    ready,
    empty,
    num_m,
    num_n,
    num_k,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    TILE_K: gl.constexpr,
):
    step = 0
    for index in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m, n = _tile(index, num_m, num_n, GROUP_M)
        for k in range(num_k):
            slot = step % STAGES
            bar = ready.index(slot)
            mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
            mbarrier.expect(bar, (128 + 256) * TILE_K * 2)
            load_tile(a_desc, [m * 128, k * TILE_K], bar, a_bufs.index(slot))
            weight = weight_bufs.index(slot)
            if other_desc is None:
                load_tile(weight_desc, [n * 256, k * TILE_K], bar, weight)
            else:
                load_tile(weight_desc, [n * 128, k * TILE_K], bar, weight.slice(0, 128))
                load_tile(other_desc, [n * 128, k * TILE_K], bar, weight.slice(128, 128))
            step += 1


@gluon.jit
def _consume(
    a_bufs,
    weight_bufs,
    ready,
    empty,
    staging,
    num_m,
    num_n,
    num_k,
    outs,
    args,
    HALF: gl.constexpr,
    PROLOGUE: gl.constexpr,
    EPILOGUE: gl.constexpr,
    FUNCTION: gl.constexpr,
    FLAG: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    step = 0
    for index in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m, n = _tile(index, num_m, num_n, GROUP_M)
        row = m * 128 + HALF * 64
        # What the epilogue reads has arrived by the time it is needed.
        loaded = PROLOGUE(row, n, layout, args)
        acc = gl.zeros([64, 256], gl.float32, layout)
        for k in range(num_k):
            slot = step % STAGES
            mbarrier.wait(ready.index(slot), step // STAGES & 1)
            a = a_bufs.index(slot).slice(HALF * 64, 64)
            weight = weight_bufs.index(slot).permute((1, 0))
            acc = warpgroup_mma(a, weight, acc, is_async=True, use_acc=k > 0)
            # The product before this one is done, and its buffer free.
            acc = warpgroup_mma_wait(1, (acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        acc = warpgroup_mma_wait(0, (acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        EPILOGUE(acc, row, n, loaded, staging, outs, args, FUNCTION, FLAG)
    tma.store_wait(0)


# One kernel for all sizes.
@gluon.jit(do_not_specialize=["args", "num_m", "num_n", "num_k"])
def _matmul_kernel(
    a_desc,
    weight_desc,
    other_desc,
    out_desc,
    out1_desc,
    out2_desc,
    args,
    num_m,
    num_n,
    num_k,
    PROLOGUE: gl.constexpr,
    EPILOGUE: gl.constexpr,
    FUNCTION: gl.constexpr,
    FLAG: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    TILE_K: gl.constexpr,
):
    dtype: gl.constexpr = a_desc.dtype
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    outs = (out_desc, out1_desc, out2_desc)
    a_bufs = gl.allocate_shared_memory(dtype, [STAGES, 128, TILE_K], swizzled)
    weight_bufs = gl.allocate_shared_memory(dtype, [STAGES, 256, TILE_K], swizzled)
    staging0 = gl.allocate_shared_memory(dtype, [2, 64, 64], swizzled)
    staging1 = gl.allocate_shared_memory(dtype, [2, 64, 64], swizzled)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    a_bufs, weight_bufs, ready, empty, staging0, num_m, num_n, num_k, outs, args,
                    0, PROLOGUE, EPILOGUE, FUNCTION, FLAG, GROUP_M, STAGES,
                ),
            ),
            (
                _consume,
                (
                    a_bufs, weight_bufs, ready, empty, staging1, num_m, num_n, num_k, outs, args,
                    1, PROLOGUE, EPILOGUE, FUNCTION, FLAG, GROUP_M, STAGES,
                ),
            ),
            (
                _produce,
                (
                    a_desc, weight_desc, other_desc, a_bufs, weight_bufs, ready, empty, num_m, num_n, num_k,
                    GROUP_M, STAGES, TILE_K,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# ---- pieces of epilogues ----


@gluon.jit
def no_prologue(row, n, layout: gl.constexpr, args):
    return row


@gluon.jit
def rows_of(row, layout: gl.constexpr):
    """Rows of a group's part of a tile."""
    return row + gl.arange(0, 64, gl.SliceLayout(1, layout))


@gluon.jit
def halves(x):
    """Left and right half of the columns, which are registers of the same threads."""
    rows: gl.constexpr = x.shape[0]
    cols: gl.constexpr = x.shape[1]
    return gl.split(x.reshape([rows, 2, cols // 2]).permute(0, 2, 1))


@gluon.jit
def by_row(values, like):
    """A value a row as a column beside `like`."""
    return gl.expand_dims(gl.convert_layout(values, gl.SliceLayout(1, like.type.layout)), 1)


@gluon.jit
def put(x, staging, WHICH: gl.constexpr, desc, row, col):
    """Store 64 columns by way of one of two buffers, while the other is on its way; rows and columns beyond are cut."""
    buf = staging.index(WHICH)
    tma.store_wait(1)
    buf.store(x.to(buf.dtype))
    fence_async_shared()
    store_tile(desc, [row, col], buf)


# ---- launch ----


def can_multiply(a: Tensor, *weights: Tensor) -> bool:
    """True where `multiply` takes these: 16-bit rows of a multiple of 16 bytes on compute capability 9.0."""
    if not HAS_GLUON or a.device.type not in ("cuda", "meta") or torch.version.hip is not None:
        return False
    if _device.capability(a.device.index or 0) != CAPABILITY:
        return False
    return all(_is_loadable(t) and t.dtype == a.dtype for t in (a, *weights))


def _is_loadable(t: Tensor) -> bool:
    is_16_bit = t.dtype in (torch.bfloat16, torch.float16)
    is_aligned = t.dim() == 2 and t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0
    return is_16_bit and is_aligned and t.numel() > 0


def _described(t: Tensor | None, num_rows: int) -> Any:
    if t is None:
        return None
    return TensorDescriptor.from_tensor(t, [num_rows, _TILE_K], gl.NVMMASharedLayout(128, 16, 2))


def multiply(
    a: Tensor,
    weight: Tensor,
    other: Tensor | None,
    outs: tuple[Tensor | None, ...],
    args: tuple[Any, ...],
    prologue: Any,
    epilogue: Any,
    *,
    function: Any = None,
    flag: bool = False,
) -> None:
    """Run `epilogue` on every tile of `a @ weight.T`, and of `a @ other.T` beside it.

    `epilogue(acc, row, n, loaded, staging, outs, args, FUNCTION, FLAG)` gets what `prologue(row, n, layout, args)` gave
    before the products of the tile; `function` and `flag` are known to the compiler.
    """
    tile_n = TILE_N if other is None else TILE_N // 2
    num_m, num_n = cdiv(a.shape[0], TILE_M), cdiv(weight.shape[0], tile_n)
    outs = (*outs, *(None,) * (3 - len(outs)))
    launch(
        _matmul_kernel,
        (min(_device.num_sms(a.device), num_m * num_n),),
        _described(a, TILE_M),
        _described(weight, tile_n),
        _described(other, tile_n),
        *(_described(out, 64) for out in outs),
        args,
        num_m,
        num_n,
        cdiv(a.shape[1], _TILE_K),
        PROLOGUE=prologue,
        EPILOGUE=epilogue,
        FUNCTION=function,
        FLAG=flag,
        GROUP_M=_GROUP_M,
        STAGES=_STAGES,
        TILE_K=_TILE_K,
        num_warps=4,
    )
