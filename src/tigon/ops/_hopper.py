"""A matrix product on compute capability 9.0 whose results pass through an epilogue before they reach memory.

    out = epilogue(a @ weight.T),    a `[M, K]`, weight `[N, K]` or two of `[N, K]` side by side
    out = epilogue(a @ weight.T + b @ low.T),    b `[M, R]`, low `[N, R]`: a few steps more

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
    more_descs,
    a_bufs,
    weight_bufs,
    ready,
    empty,
    num_m,
    num_n,
    num_k,
    num_more,
    TRANSPOSED: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    TILE_K: gl.constexpr,
):
    b_desc, low_desc = more_descs
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
            if TRANSPOSED:
                load_tile(weight_desc, [k * TILE_K, n * 256], bar, weight)
            elif other_desc is None:
                load_tile(weight_desc, [n * 256, k * TILE_K], bar, weight)
            else:
                load_tile(weight_desc, [n * 128, k * TILE_K], bar, weight.slice(0, 128))
                load_tile(other_desc, [n * 128, k * TILE_K], bar, weight.slice(128, 128))
            step += 1
        if b_desc is not None:
            for k in range(num_more):
                slot = step % STAGES
                bar = ready.index(slot)
                mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
                # Columns and rows beyond arrive as zeros, which are counted too.
                mbarrier.expect(bar, (128 + 256) * TILE_K * 2)
                load_tile(b_desc, [m * 128, k * TILE_K], bar, a_bufs.index(slot))
                if TRANSPOSED:
                    load_tile(low_desc, [k * TILE_K, n * 256], bar, weight_bufs.index(slot))
                else:
                    load_tile(low_desc, [n * 256, k * TILE_K], bar, weight_bufs.index(slot))
                step += 1


@gluon.jit
def _consume(
    a_bufs,
    weight_bufs,
    ready,
    empty,
    own,
    num_m,
    num_n,
    num_k,
    ins,
    outs,
    args,
    HALF: gl.constexpr,
    PROLOGUE: gl.constexpr,
    EPILOGUE: gl.constexpr,
    FUNCTION: gl.constexpr,
    FLAG: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    step = 0
    for index in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        m, n = _tile(index, num_m, num_n, GROUP_M)
        row = m * 128 + HALF * 64
        # What the epilogue reads has arrived by the time it is needed.
        loaded = PROLOGUE(row, n, layout, own, ins, args)
        acc = gl.zeros([64, 256], gl.float32, layout)
        for k in range(num_k):
            slot = step % STAGES
            mbarrier.wait(ready.index(slot), step // STAGES & 1)
            a = a_bufs.index(slot).slice(HALF * 64, 64)
            weight = weight_bufs.index(slot)
            if not TRANSPOSED:
                weight = weight.permute((1, 0))
            acc = warpgroup_mma(a, weight, acc, is_async=True, use_acc=k > 0)
            # The product before this one is done, and its buffer free.
            acc = warpgroup_mma_wait(1, (acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        acc = warpgroup_mma_wait(0, (acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        EPILOGUE(acc, row, n, loaded, own, ins, outs, args, FUNCTION, FLAG)
    tma.store_wait(0)


@gluon.jit
def _own_buffers(dtype: gl.constexpr, HAS_INPUT: gl.constexpr):
    """What a group has for itself: buffers on the way out, buffers on the way in, and a barrier for these."""
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # With inputs there is a stage less, of which the memory is left for a third buffer.
    COUNT: gl.constexpr = 3 if HAS_INPUT else 2
    staging = gl.allocate_shared_memory(dtype, [COUNT, 64, 64], swizzled)
    bar = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    inputs = staging
    if HAS_INPUT:
        inputs = gl.allocate_shared_memory(dtype, [2, 64, 64], swizzled)
        mbarrier.init(bar.index(0), count=1)
    return staging, inputs, bar


# One kernel for all sizes.
@gluon.jit(do_not_specialize=["args", "num_m", "num_n", "num_k", "num_more"])
def _matmul_kernel(
    a_desc,
    weight_desc,
    other_desc,
    out_desc,
    out1_desc,
    out2_desc,
    in_desc,
    in1_desc,
    b_desc,
    low_desc,
    args,
    num_m,
    num_n,
    num_k,
    num_more,
    PROLOGUE: gl.constexpr,
    EPILOGUE: gl.constexpr,
    FUNCTION: gl.constexpr,
    FLAG: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    TILE_K: gl.constexpr,
):
    dtype: gl.constexpr = a_desc.dtype
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    outs = (out_desc, out1_desc, out2_desc)
    ins = (in_desc, in1_desc)
    a_bufs = gl.allocate_shared_memory(dtype, [STAGES, 128, TILE_K], swizzled)
    if TRANSPOSED:
        weight_bufs = gl.allocate_shared_memory(dtype, [STAGES, TILE_K, 256], swizzled)
    else:
        weight_bufs = gl.allocate_shared_memory(dtype, [STAGES, 256, TILE_K], swizzled)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    own0 = _own_buffers(dtype, in_desc is not None)
    own1 = _own_buffers(dtype, in_desc is not None)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    a_bufs, weight_bufs, ready, empty, own0, num_m, num_n, num_k + num_more, ins, outs, args,
                    0, PROLOGUE, EPILOGUE, FUNCTION, FLAG, TRANSPOSED, GROUP_M, STAGES,
                ),
            ),
            (
                _consume,
                (
                    a_bufs, weight_bufs, ready, empty, own1, num_m, num_n, num_k + num_more, ins, outs, args,
                    1, PROLOGUE, EPILOGUE, FUNCTION, FLAG, TRANSPOSED, GROUP_M, STAGES,
                ),
            ),
            (
                _produce,
                (
                    a_desc, weight_desc, other_desc, (b_desc, low_desc), a_bufs, weight_bufs, ready, empty, num_m,
                    num_n, num_k, num_more, TRANSPOSED, GROUP_M, STAGES, TILE_K,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# ---- pieces of epilogues ----


@gluon.jit
def no_prologue(row, n, layout: gl.constexpr, own, ins, args):
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
def put(x, own, WHICH: gl.constexpr, desc, row, col):
    """Store 64 columns by way of one of the buffers, taken in turn; rows and columns beyond are cut."""
    buf = own[0].index(WHICH)
    PENDING: gl.constexpr = own[0].shape[0] - 1
    tma.store_wait(PENDING)
    buf.store(x.to(buf.dtype))
    fence_async_shared()
    store_tile(desc, [row, col], buf)


@gluon.jit
def ask(own, ins, row, col):
    """Have 64 columns of both inputs brought to the buffers of a group, which has read what was there."""
    _, inputs, bar = own
    mbarrier.expect(bar.index(0), 2 * 64 * 64 * 2)
    load_tile(ins[0], [row, col], bar.index(0), inputs.index(0))
    load_tile(ins[1], [row, col], bar.index(0), inputs.index(1))


@gluon.jit
def receive(own, PHASE: gl.constexpr, like):
    """What was asked for, in the layout of `like`; `PHASE` alternates from one to the next, from 0 on."""
    _, inputs, bar = own
    layout: gl.constexpr = like.type.layout
    mbarrier.wait(bar.index(0), PHASE)
    both = inputs.index(0).load(layout), inputs.index(1).load(layout)
    fence_async_shared()
    return both


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
    if not is_16_bit or t.dim() != 2 or t.numel() == 0:
        return False
    # Rows of expanded tensors lie on each other, which descriptors do not take.
    is_apart = t.stride(1) == 1 and t.stride(0) >= t.shape[1]
    return is_apart and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0


def _described(t: Tensor | None, num_rows: int, num_cols: int = _TILE_K) -> Any:
    if t is None:
        return None
    return TensorDescriptor.from_tensor(t, [num_rows, num_cols], gl.NVMMASharedLayout(128, 16, 2))


def multiply(
    a: Tensor,
    weight: Tensor,
    other: Tensor | None,
    outs: tuple[Tensor | None, ...],
    args: tuple[Any, ...],
    prologue: Any,
    epilogue: Any,
    *,
    ins: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
    more: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
    function: Any = None,
    flag: bool = False,
    transposed: bool = False,
) -> None:
    """Run `epilogue` on every tile of `a @ weight.T`, and of `a @ other.T` beside it; `transposed`: of `a @ weight`.

    With `more`, `b @ low.T` is added, or `b @ low` to what is transposed; not beside `other`.

    `epilogue(acc, row, n, loaded, own, ins, outs, args, FUNCTION, FLAG)` gets what
    `prologue(row, n, layout, own, ins, args)` gave before the products of the tile, `own` for `put`, `ask` and
    `receive`, and `function` and `flag`, which are known to the compiler.
    """
    num_cols = weight.shape[1] if transposed else weight.shape[0]
    num_m, num_n = cdiv(a.shape[0], TILE_M), cdiv(num_cols, TILE_N if other is None else TILE_N // 2)
    tile = (_TILE_K, TILE_N) if transposed else (TILE_N if other is None else TILE_N // 2, _TILE_K)
    outs = (*outs, *(None,) * (3 - len(outs)))
    launch(
        _matmul_kernel,
        (min(_device.num_sms(a.device), num_m * num_n),),
        _described(a, TILE_M),
        _described(weight, *tile),
        _described(other, TILE_N // 2),
        *(_described(t, 64) for t in (*outs, *ins)),
        _described(more[0], TILE_M),
        _described(more[1], *tile),
        args,
        num_m,
        num_n,
        cdiv(a.shape[1], _TILE_K),
        0 if more[0] is None else cdiv(more[0].shape[1], _TILE_K),
        PROLOGUE=prologue,
        EPILOGUE=epilogue,
        FUNCTION=function,
        FLAG=flag,
        TRANSPOSED=transposed,
        GROUP_M=_GROUP_M,
        # The buffers of inputs take the place of one stage.
        STAGES=_STAGES if ins[0] is None else _STAGES - 1,
        TILE_K=_TILE_K,
        num_warps=4,
    )
