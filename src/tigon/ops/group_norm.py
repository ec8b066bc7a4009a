"""Group normalisation.

    mean = mean(x),   rstd = 1 / sqrt(mean((x - mean)^2) + eps)      over each group of C / G channels of a sample
    y = (x - mean) * rstd * weight + bias                            weight and bias of the channel

Gradient, with g = dy * weight, n = (x - mean) * rstd and means over the group:

    dx = rstd * (g - mean(g) - n * mean(g * n))
    dweight = sum over samples and positions of dy * n
    dbias = sum over samples and positions of dy

B samples, C channels in G groups, S positions (all spatial axes). Both means are sums over channels of weight times
the sums over positions that dweight and dbias need too. Saved for backward: x, weight, mean, rstd (8 bytes a group).
Source: Wu & He 2018, arXiv:1803.08494; Chan et al. 1979 (joining the statistics of blocks).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ._check import require, require_floating, require_same_device
from ._device import num_sms
from ._launch import as_rows, cdiv, launch, next_power_of_2
from ._op import apply, define, once_differentiable, op, runs_reference
from ._partials import sum_partials
from ._triton import tl, triton

# ---- reference ----


def group_norm_reference(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    dtype = _out_dtype(x, weight, bias)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    n = x.to(wide).reshape(x.shape[0], num_groups, math.prod(x.shape[1:]) // num_groups)
    n = n - n.mean(-1, keepdim=True)
    n = n * torch.rsqrt(n.square().mean(-1, keepdim=True) + eps)
    y = n.reshape(x.shape)
    per_channel = (-1, *(1 for _ in x.shape[2:]))
    if weight is not None:
        y = y * weight.to(wide).reshape(per_channel)
    if bias is not None:
        y = y + bias.to(wide).reshape(per_channel)
    return y.to(dtype)


def _out_dtype(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> torch.dtype:
    dtype = x.dtype
    for t in (weight, bias):
        if t is not None:
            dtype = torch.promote_types(dtype, t.dtype)
    return dtype


# ---- kernels ----

# A tile is channels by positions, so that what belongs to a channel is a row and no element needs a division.


@triton.jit
def _load_channels(ptr, channels, mask):
    return tl.load(ptr + channels, mask=mask, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _tile_mask(channel, position, group_channels, num_positions, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    channel_mask = channel + tl.arange(0, BLOCK_C) < group_channels
    return channel_mask[:, None] & (position + tl.arange(0, BLOCK_S) < num_positions)[None, :]


@triton.jit
def _tile_offsets(channel, position, num_positions, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    """Offsets in a group of the tile that begins at `channel` and `position`."""
    first = tl.cast(channel, tl.int64) * num_positions + position
    return first + (tl.arange(0, BLOCK_C)[:, None] * num_positions + tl.arange(0, BLOCK_S)[None, :])


@triton.jit
def _group_norm_fwd_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    x_stride,
    num_groups,
    group_channels,
    num_positions,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One program per group, which it holds in registers."""
    group = tl.program_id(0).to(tl.int64)
    first = (group % num_groups) * group_channels
    channels = tl.arange(0, BLOCK_C)
    channel_mask = channels < group_channels
    mask = _tile_mask(0, 0, group_channels, num_positions, BLOCK_C, BLOCK_S)
    offsets = _tile_offsets(0, 0, num_positions, BLOCK_C, BLOCK_S)
    size = group_channels * num_positions
    x_ptr += (group // num_groups) * x_stride + first * num_positions
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(x, axis=1), axis=0) / size
    # Lanes beyond the group hold -mean after centring and must not count.
    centred = tl.where(mask, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(tl.sum(centred * centred, axis=1), axis=0) / size + eps)
    y = centred * rstd
    if HAS_WEIGHT:
        y *= _load_channels(w_ptr + first, channels, channel_mask)
    if HAS_BIAS:
        y += _load_channels(b_ptr + first, channels, channel_mask)
    tl.store(y_ptr + group * size + offsets, y, mask=mask)
    tl.store(mean_ptr + group, mean)
    tl.store(rstd_ptr + group, rstd)


@triton.jit
def _group_norm_fwd_wide_stats_kernel(
    x_ptr,
    partial_ptr,
    x_stride,
    num_groups,
    group_channels,
    num_positions,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Program (g, p) leaves mean, sum of squares about it and count of tiles p, p + P, ... of group g."""
    group = tl.program_id(0).to(tl.int64)
    x_ptr += (group // num_groups) * x_stride + (group % num_groups) * group_channels * num_positions
    row_tiles = tl.cdiv(num_positions, BLOCK_S)
    mean = tl.zeros([1], dtype=tl.float32)
    squares = tl.zeros([1], dtype=tl.float32)
    count = tl.zeros([1], dtype=tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(group_channels, BLOCK_C) * row_tiles, tl.num_programs(1)):
        channel = tile // row_tiles * BLOCK_C
        position = tile % row_tiles * BLOCK_S
        mask = _tile_mask(channel, position, group_channels, num_positions, BLOCK_C, BLOCK_S)
        offsets = _tile_offsets(channel, position, num_positions, BLOCK_C, BLOCK_S)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tile_count = tl.minimum(group_channels - channel, BLOCK_C) * tl.minimum(num_positions - position, BLOCK_S)
        tile_mean = tl.sum(tl.sum(x, axis=1), axis=0) / tile_count
        centred = tl.where(mask, x - tile_mean, 0.0)
        # Joins two sets of samples without the cancellation of mean(x^2) - mean(x)^2.
        delta = tile_mean - mean
        share = tile_count / (count + tile_count)
        mean += delta * share
        squares += tl.sum(tl.sum(centred * centred, axis=1), axis=0) + delta * delta * (count * share)
        count += tile_count
    plane = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    out = partial_ptr + group * tl.num_programs(1) + tl.program_id(1) + tl.arange(0, 1)
    tl.store(out, mean)
    tl.store(out + plane, squares)
    tl.store(out + 2 * plane, count)


@triton.jit
def _group_norm_fwd_wide_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    partial_ptr,
    x_stride,
    num_groups,
    group_channels,
    num_positions,
    num_partials,
    eps,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Program (g, p) joins the statistics of group g and writes its tiles p, p + P, ..."""
    group = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, BLOCK_P)
    part_mask = parts < num_partials
    partial_ptr += group * num_partials
    plane = tl.num_programs(0).to(tl.int64) * num_partials
    means = tl.load(partial_ptr + parts, mask=part_mask, other=0.0)
    squares = tl.load(partial_ptr + plane + parts, mask=part_mask, other=0.0)
    counts = tl.load(partial_ptr + 2 * plane + parts, mask=part_mask, other=0.0)
    size = tl.sum(counts, axis=0)
    # About one of the means, so that large ones do not lose the digits in which they differ.
    origin = tl.load(partial_ptr)
    mean = origin + tl.sum(counts * (means - origin), axis=0) / size
    delta = means - mean
    rstd = tl.rsqrt(tl.sum(squares + counts * delta * delta, axis=0) / size + eps)
    tl.store(mean_ptr + group, mean, mask=tl.program_id(1) == 0)
    tl.store(rstd_ptr + group, rstd, mask=tl.program_id(1) == 0)

    first = (group % num_groups) * group_channels
    x_ptr += (group // num_groups) * x_stride + first * num_positions
    y_ptr += group * group_channels * num_positions
    row_tiles = tl.cdiv(num_positions, BLOCK_S)
    for tile in range(tl.program_id(1), tl.cdiv(group_channels, BLOCK_C) * row_tiles, tl.num_programs(1)):
        channel = tile // row_tiles * BLOCK_C
        position = tile % row_tiles * BLOCK_S
        channels = channel + tl.arange(0, BLOCK_C)
        mask = _tile_mask(channel, position, group_channels, num_positions, BLOCK_C, BLOCK_S)
        offsets = _tile_offsets(channel, position, num_positions, BLOCK_C, BLOCK_S)
        y = (tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
        if HAS_WEIGHT:
            y *= _load_channels(w_ptr + first, channels, channels < group_channels)
        if HAS_BIAS:
            y += _load_channels(b_ptr + first, channels, channels < group_channels)
        tl.store(y_ptr + offsets, y, mask=mask)


@triton.jit
def _group_norm_bwd_kernel(
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    dy_ptr,
    dx_ptr,
    partial_ptr,
    x_stride,
    dy_stride,
    num_groups,
    group_channels,
    num_positions,
    HAS_WEIGHT: tl.constexpr,
    NEEDS_DX: tl.constexpr,
    NEEDS_DW: tl.constexpr,
    NEEDS_DB: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One program per group, which it holds in registers; a row of partial sums per sample."""
    group = tl.program_id(0).to(tl.int64)
    sample = group // num_groups
    first = (group % num_groups) * group_channels
    channels = tl.arange(0, BLOCK_C)
    channel_mask = channels < group_channels
    mask = _tile_mask(0, 0, group_channels, num_positions, BLOCK_C, BLOCK_S)
    offsets = _tile_offsets(0, 0, num_positions, BLOCK_C, BLOCK_S)
    size = group_channels * num_positions
    x = tl.load(x_ptr + sample * x_stride + first * num_positions + offsets, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + sample * dy_stride + first * num_positions + offsets, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + group)
    n = tl.where(mask, (x - tl.load(mean_ptr + group)) * rstd, 0.0)
    dw = tl.sum(dy * n, axis=1)
    db = tl.sum(dy, axis=1)
    out = partial_ptr + group * group_channels + channels
    if NEEDS_DW:
        tl.store(out, dw, mask=channel_mask)
    if NEEDS_DB:
        tl.store(out + tl.num_programs(0).to(tl.int64) * group_channels, db, mask=channel_mask)
    if NEEDS_DX:
        g = dy
        if HAS_WEIGHT:
            w = tl.load(w_ptr + first + channels, mask=channel_mask, other=0.0).to(tl.float32)
            g = dy * w[:, None]
            dw *= w
            db *= w
        dx = rstd * (g - tl.sum(db, axis=0) / size - n * (tl.sum(dw, axis=0) / size))
        tl.store(dx_ptr + group * size + offsets, dx, mask=mask)


@triton.jit
def _group_norm_bwd_wide_sums_kernel(
    x_ptr,
    mean_ptr,
    rstd_ptr,
    dy_ptr,
    partial_ptr,
    x_stride,
    dy_stride,
    num_groups,
    group_channels,
    num_positions,
    NEEDS_DW: tl.constexpr,
    NEEDS_DB: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Program (g, c, p) sums channel block c of group g over position blocks p, p + P, ... into row (sample, p)."""
    group = tl.program_id(0).to(tl.int64)
    sample = group // num_groups
    first = (group % num_groups) * group_channels
    channel = tl.program_id(1) * BLOCK_C
    x_ptr += sample * x_stride + first * num_positions
    dy_ptr += sample * dy_stride + first * num_positions
    mean = tl.load(mean_ptr + group)
    rstd = tl.load(rstd_ptr + group)
    dw = tl.zeros([BLOCK_C, BLOCK_S], dtype=tl.float32)
    db = tl.zeros([BLOCK_C, BLOCK_S], dtype=tl.float32)
    for block in range(tl.program_id(2), tl.cdiv(num_positions, BLOCK_S), tl.num_programs(2)):
        position = block * BLOCK_S
        mask = _tile_mask(channel, position, group_channels, num_positions, BLOCK_C, BLOCK_S)
        offsets = _tile_offsets(channel, position, num_positions, BLOCK_C, BLOCK_S)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if NEEDS_DW:
            x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            dw += tl.where(mask, dy * ((x - mean) * rstd), 0.0)
        if NEEDS_DB:
            db += dy
    channels = channel + tl.arange(0, BLOCK_C)
    num_channels = num_groups * group_channels
    out = partial_ptr + (sample * tl.num_programs(2) + tl.program_id(2)) * num_channels + first + channels
    if NEEDS_DW:
        tl.store(out, tl.sum(dw, axis=1), mask=channels < group_channels)
    if NEEDS_DB:
        plane = tl.num_programs(0).to(tl.int64) * tl.num_programs(2) * group_channels
        tl.store(out + plane, tl.sum(db, axis=1), mask=channels < group_channels)


@triton.jit
def _group_norm_bwd_wide_dx_kernel(
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    dy_ptr,
    dx_ptr,
    partial_ptr,
    x_stride,
    dy_stride,
    num_groups,
    group_channels,
    num_positions,
    num_splits,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Program (g, p) adds up the sums of the channels of group g and writes its tiles p, p + P, ..."""
    group = tl.program_id(0).to(tl.int64)
    sample = group // num_groups
    first = (group % num_groups) * group_channels
    num_channels = num_groups * group_channels
    plane = tl.num_programs(0).to(tl.int64) * num_splits * group_channels
    sum_g = tl.zeros([BLOCK_K], dtype=tl.float32)
    sum_gn = tl.zeros([BLOCK_K], dtype=tl.float32)
    for start in range(0, group_channels, BLOCK_K):
        channels = start + tl.arange(0, BLOCK_K)
        channel_mask = channels < group_channels
        dw = tl.zeros([BLOCK_K], dtype=tl.float32)
        db = tl.zeros([BLOCK_K], dtype=tl.float32)
        for split in range(num_splits):
            row = partial_ptr + (sample * num_splits + split) * num_channels + first
            dw += tl.load(row + channels, mask=channel_mask, other=0.0)
            db += tl.load(row + plane + channels, mask=channel_mask, other=0.0)
        if HAS_WEIGHT:
            w = tl.load(w_ptr + first + channels, mask=channel_mask, other=0.0).to(tl.float32)
            dw *= w
            db *= w
        sum_gn += dw
        sum_g += db
    size = group_channels * num_positions
    mean_g = tl.sum(sum_g, axis=0) / size
    mean_gn = tl.sum(sum_gn, axis=0) / size

    mean = tl.load(mean_ptr + group)
    rstd = tl.load(rstd_ptr + group)
    x_ptr += sample * x_stride + first * num_positions
    dy_ptr += sample * dy_stride + first * num_positions
    dx_ptr += group * group_channels * num_positions
    row_tiles = tl.cdiv(num_positions, BLOCK_S)
    for tile in range(tl.program_id(1), tl.cdiv(group_channels, BLOCK_C) * row_tiles, tl.num_programs(1)):
        channel = tile // row_tiles * BLOCK_C
        position = tile % row_tiles * BLOCK_S
        channels = channel + tl.arange(0, BLOCK_C)
        mask = _tile_mask(channel, position, group_channels, num_positions, BLOCK_C, BLOCK_S)
        offsets = _tile_offsets(channel, position, num_positions, BLOCK_C, BLOCK_S)
        n = (tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) - mean) * rstd
        g = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            g *= _load_channels(w_ptr + first, channels, channels < group_channels)
        tl.store(dx_ptr + offsets, rstd * (g - mean_g - n * mean_gn), mask=mask)


# ---- operators ----

# Largest group that one program holds in registers, forward and backward, and the tile in which larger ones are read.
_MAX_FWD_BLOCK = 16384
_MAX_BWD_BLOCK = 8192
_WIDE_BLOCK = 4096
# Programs per multiprocessor that share out the tiles of large groups, and statistics that a program joins at most.
_PROGRAMS_PER_SM = 16
_MAX_PARTIALS = 256


def _sizes(x: Tensor, num_groups: int) -> tuple[int, int, int]:
    """Groups of all samples, channels of a group, positions of a channel."""
    return x.shape[0] * num_groups, x.shape[1] // num_groups, math.prod(x.shape[2:])


def _as_samples(x: Tensor) -> Tensor:
    """`x` as `[B, C * S]` with unit stride in a sample; a view where the strides allow it, else a copy."""
    return as_rows(x.reshape(x.shape[0], math.prod(x.shape[1:])))


def _one_block(group_channels: int, num_positions: int) -> tuple[int, int]:
    """BLOCK_C, BLOCK_S of a tile that holds a whole group."""
    return next_power_of_2(group_channels), next_power_of_2(num_positions)


def _wide_blocks(group_channels: int, num_positions: int) -> tuple[int, int]:
    """BLOCK_C, BLOCK_S of one tile of many."""
    block_s = min(next_power_of_2(num_positions), _WIDE_BLOCK)
    return min(next_power_of_2(group_channels), _WIDE_BLOCK // block_s), block_s


def _num_programs(x: Tensor, groups: int, num_tiles: int) -> int:
    """Programs that share the tiles of one group."""
    return min(num_tiles, cdiv(num_sms(x.device) * _PROGRAMS_PER_SM, groups))


def _fake_fwd(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=_out_dtype(x, weight, bias))
    mean, rstd = (x.new_empty((x.shape[0], num_groups), dtype=torch.float32) for _ in range(2))
    return y, mean, rstd


@define(
    "group_norm_fwd(Tensor x, int num_groups, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    fake=_fake_fwd,
)
def _fwd(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, rstd = _fake_fwd(x, num_groups, weight, bias, eps)
    if x.numel() == 0:
        return y, mean.zero_(), rstd.zero_()
    samples = _as_samples(x)
    groups, group_channels, num_positions = _sizes(x, num_groups)
    sizes = (samples.stride(0), num_groups, group_channels, num_positions)
    block_c, block_s = _one_block(group_channels, num_positions)
    block = block_c * block_s
    if block <= _MAX_FWD_BLOCK:
        launch(
            _group_norm_fwd_kernel,
            (groups,),
            samples,
            weight,
            bias,
            y,
            mean,
            rstd,
            *sizes,
            eps,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            BLOCK_C=block_c,
            BLOCK_S=block_s,
            num_warps=max(1, min(8, block // 512), block // 1024),
        )
        return y, mean, rstd
    block_c, block_s = _wide_blocks(group_channels, num_positions)
    num_tiles = cdiv(group_channels, block_c) * cdiv(num_positions, block_s)
    num_programs = _num_programs(x, groups, num_tiles)
    num_partials = min(num_programs, _MAX_PARTIALS)
    partial = x.new_empty((3, groups, num_partials), dtype=torch.float32)
    launch(
        _group_norm_fwd_wide_stats_kernel,
        (groups, num_partials),
        samples,
        partial,
        *sizes,
        BLOCK_C=block_c,
        BLOCK_S=block_s,
        num_warps=8,
    )
    launch(
        _group_norm_fwd_wide_kernel,
        (groups, num_programs),
        samples,
        weight,
        bias,
        y,
        mean,
        rstd,
        partial,
        *sizes,
        num_partials,
        eps,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        BLOCK_P=next_power_of_2(num_partials),
        BLOCK_C=block_c,
        BLOCK_S=block_s,
        num_warps=8,
    )
    return y, mean, rstd


def _fake_bwd(
    dy: Tensor,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    needs_dx: bool,
    needs_dw: bool,
    needs_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx = x.new_empty(x.shape if needs_dx else (0,))
    dw = x.new_empty(0) if weight is None or not needs_dw else weight.new_empty(weight.shape)
    db = x.new_empty(0) if bias is None or not needs_db else bias.new_empty(bias.shape)
    return dx, dw, db


@define(
    "group_norm_bwd(Tensor dy, Tensor x, int num_groups, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd,"
    " bool needs_dx, bool needs_dw, bool needs_db) -> (Tensor, Tensor, Tensor)",
    fake=_fake_bwd,
)
def _bwd(
    dy: Tensor,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    needs_dx: bool,
    needs_dw: bool,
    needs_db: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dw, db = _fake_bwd(dy, x, num_groups, weight, bias, mean, rstd, needs_dx, needs_dw, needs_db)
    if x.numel() == 0:
        return dx, dw.zero_(), db.zero_()
    samples, dy_samples = _as_samples(x), _as_samples(dy)
    groups, group_channels, num_positions = _sizes(x, num_groups)
    sizes = (samples.stride(0), dy_samples.stride(0), num_groups, group_channels, num_positions)
    block_c, block_s = _one_block(group_channels, num_positions)
    block = block_c * block_s
    if block <= _MAX_BWD_BLOCK:
        partial = x.new_empty((2, *x.shape[:2]), dtype=torch.float32)
        launch(
            _group_norm_bwd_kernel,
            (groups,),
            samples,
            weight,
            mean,
            rstd,
            dy_samples,
            dx,
            partial,
            *sizes,
            HAS_WEIGHT=weight is not None,
            NEEDS_DX=needs_dx,
            NEEDS_DW=needs_dw,
            NEEDS_DB=needs_db,
            BLOCK_C=block_c,
            BLOCK_S=block_s,
            num_warps=max(1, block // 512),
        )
    else:
        block_c, block_s = _wide_blocks(group_channels, num_positions)
        row_blocks, column_blocks = cdiv(group_channels, block_c), cdiv(num_positions, block_s)
        num_splits = _num_programs(x, groups * row_blocks, column_blocks)
        partial = x.new_empty((2, x.shape[0] * num_splits, x.shape[1]), dtype=torch.float32)
        launch(
            _group_norm_bwd_wide_sums_kernel,
            (groups, row_blocks, num_splits),
            samples,
            mean,
            rstd,
            dy_samples,
            partial,
            *sizes,
            NEEDS_DW=needs_dx or needs_dw,
            NEEDS_DB=needs_dx or needs_db,
            BLOCK_C=block_c,
            BLOCK_S=block_s,
            num_warps=8,
        )
        if needs_dx:
            launch(
                _group_norm_bwd_wide_dx_kernel,
                (groups, _num_programs(x, groups, row_blocks * column_blocks)),
                samples,
                weight,
                mean,
                rstd,
                dy_samples,
                dx,
                partial,
                *sizes,
                num_splits,
                HAS_WEIGHT=weight is not None,
                BLOCK_K=min(next_power_of_2(group_channels), 1024),
                BLOCK_C=block_c,
                BLOCK_S=block_s,
                num_warps=8,
            )
    if needs_dw:
        sum_partials(partial[0], dw)
    if needs_db:
        sum_partials(partial[1], db)
    return dx, dw, db


# ---- autograd ----


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y, mean, rstd = _fwd(x, num_groups, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.num_groups = num_groups
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs_dx, _, needs_dw, needs_db, _ = ctx.needs_input_grad
        x, *saved = ctx.saved_tensors
        dx, dw, db = _bwd(dy, x, ctx.num_groups, *saved, needs_dx, needs_dw, needs_db)
        return dx if needs_dx else None, None, dw if needs_dw else None, db if needs_db else None, None


# ---- public ----


def _supports(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, **_: Any
) -> list[str]:
    reasons = []
    if any(t is not None and t.dtype == torch.float64 for t in (x, weight, bias)):
        reasons.append("float64 is computed by the reference")
    return reasons


@op(reference=group_norm_reference, supports=_supports)
def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Group normalisation: over the channels of a group and all positions of a sample.

        y = (x - mean) * rsqrt(var + eps) * weight + bias       # the reference, in one line

    Args:
        x: `[B, C, ...]`, floating point, any number of spatial axes; copied unless the samples are contiguous.
        num_groups: of the channels, which are divided in their order; a divisor of C.
        weight: `[C]`, or None for a norm without a scale.
        bias: `[C]`, or None for a norm without a shift.
        eps: added to the variance, which is divided by the number of elements.

    Returns:
        The shape of `x`, contiguous, in the promoted dtype of the three, which for one dtype is that of F.group_norm.

    Raises:
        ValueError: shapes or devices disagree, or `num_groups` does not divide C.

    Numerics: computed in fp32 and rounded once; `dweight` and `dbias` are summed in fp32 in a fixed order.
    Memory:   saves `x`, `weight` and 8 bytes a group.
    Differs from the reference: never in formula; order of summation over a group.
    Source: Wu & He 2018, arXiv:1803.08494.
    """
    name = "group_norm"
    require_floating(name, x=x, weight=weight, bias=bias)
    require(x.dim() >= 2, name, "x", "at least two axes", f"{x.dim()}")
    num_channels = x.shape[1]
    # Worded for an error alone: a compiler would fix the number of channels to write it.
    if num_groups <= 0 or num_channels % num_groups != 0:
        require(False, name, "num_groups", f"a divisor of {num_channels}", num_groups)
    for argument, t in (("weight", weight), ("bias", bias)):
        if t is not None:
            require(t.shape == (num_channels,), name, argument, f"shape {(num_channels,)}", tuple(t.shape))
    require_same_device(name, x=x, weight=weight, bias=bias)
    if runs_reference(name, x, num_groups, weight, bias):
        return group_norm_reference(x, num_groups, weight, bias, eps=eps)
    # The kernels read one row of each, which is nothing beside x.
    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    return apply(_GroupNorm, x, num_groups, weight, bias, eps)
