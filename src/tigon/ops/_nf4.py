"""Weights of 4 bits: sixteen values, unevenly spaced, times a scale a block; the scales may be of 8 bits themselves.

    weight[i] = TABLE[nibble i] * scale[i // block_size]
    scale[j] = absmax[j],   or  nested_code[absmax[j]] * nested_absmax[j // nested_block_size] + nested_offset

The first of two elements is in the upper half of its byte. What needs a weight makes it anew, in memory that it gives
back at once: torch's allocator hands the same to the next one, as a buffer kept for this would be, but for each stream
and each CUDA graph its own.

Source: Dettmers et al. 2023, arXiv:2305.14314.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._check import require, require_floating, require_same_device
from ._device import why_no_kernels
from ._launch import cdiv, launch
from ._op import current_backend, define
from ._triton import tl, triton

TABLE = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_BLOCK_BYTES = 1024


class Scales(NamedTuple):
    """Of blocks of `block_size` elements; `nested_*` are None where `absmax` holds the scales themselves."""

    absmax: Tensor
    block_size: int
    nested_absmax: Tensor | None = None
    nested_code: Tensor | None = None
    nested_offset: Tensor | None = None
    nested_block_size: int = 256


# ---- reference ----


def dequantize_nf4_reference(packed: Tensor, scales: Scales, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    scale = scales.absmax
    if scales.nested_absmax is not None:
        outer = torch.arange(scale.numel(), device=scale.device) // scales.nested_block_size
        scale = scales.nested_code[scale.long()] * scales.nested_absmax[outer] + scales.nested_offset  # type: ignore[index, operator]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    both = packed.contiguous().view(torch.uint8).reshape(-1)
    nibbles = torch.stack((both >> 4, both & 15), dim=-1).reshape(-1)[: math.prod(shape)]
    table = torch.tensor(TABLE, dtype=wide, device=packed.device)
    block = torch.arange(nibbles.numel(), device=packed.device) // scales.block_size
    return (table[nibbles.long()] * scale.to(wide)[block]).to(dtype).reshape(tuple(shape))


# ---- kernels ----


@triton.jit
def _dequantize_nf4_kernel(
    packed_ptr,
    absmax_ptr,
    nested_absmax_ptr,
    nested_code_ptr,
    nested_offset_ptr,
    table_ptr,
    out_ptr,
    num_elements,
    block_bytes,
    nested_block_size,
    IS_NESTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK bytes."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    mask = 2 * at < num_elements
    both = tl.load(packed_ptr + at, mask=mask, other=0).to(tl.int32)
    block = at // block_bytes
    if IS_NESTED:
        code = tl.load(absmax_ptr + block, mask=mask, other=0).to(tl.int32)
        outer = tl.load(nested_absmax_ptr + block // nested_block_size, mask=mask, other=0.0).to(tl.float32)
        inner = tl.load(nested_code_ptr + code, mask=mask, other=0.0).to(tl.float32)
        scale = inner * outer + tl.load(nested_offset_ptr).to(tl.float32)
    else:
        scale = tl.load(absmax_ptr + block, mask=mask, other=0.0).to(tl.float32)
    first = tl.load(table_ptr + (both >> 4)) * scale
    second = tl.load(table_ptr + (both & 15)) * scale
    elements = 2 * start + tl.arange(0, 2 * BLOCK)
    tl.store(out_ptr + elements, tl.interleave(first, second), mask=elements < num_elements)


# ---- operators ----


@functools.cache
def _table(device: torch.device) -> Tensor:
    return torch.tensor(TABLE, dtype=torch.float32, device=device)


def _fake(
    packed: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None,
    nested_code: Tensor | None,
    nested_offset: Tensor | None,
    block_size: int,
    nested_block_size: int,
    shape: list[int],
    dtype: torch.dtype,
) -> Tensor:
    return absmax.new_empty(shape, dtype=dtype)


@define(
    "dequantize_nf4(Tensor packed, Tensor absmax, Tensor? nested_absmax, Tensor? nested_code, Tensor? nested_offset,"
    " int block_size, int nested_block_size, SymInt[] shape, ScalarType dtype) -> Tensor",
    fake=_fake,
)
def _dequantize(
    packed: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None,
    nested_code: Tensor | None,
    nested_offset: Tensor | None,
    block_size: int,
    nested_block_size: int,
    shape: list[int],
    dtype: torch.dtype,
) -> Tensor:
    out = absmax.new_empty(shape, dtype=dtype)
    _fill(out, packed, Scales(absmax, block_size, nested_absmax, nested_code, nested_offset, nested_block_size))
    return out


def _fill(out: Tensor, packed: Tensor, scales: Scales) -> None:
    packed = packed.contiguous()
    launch(
        _dequantize_nf4_kernel,
        (cdiv(cdiv(out.numel(), 2), _BLOCK_BYTES),),
        packed if packed.dtype == torch.uint8 else packed.view(torch.uint8),
        scales.absmax.contiguous(),
        *(None if t is None else t.contiguous() for t in scales[2:5]),
        packed.new_empty(0) if packed.is_meta else _table(out.device),
        out,
        out.numel(),
        scales.block_size // 2,
        scales.nested_block_size,
        IS_NESTED=scales.nested_absmax is not None,
        BLOCK=_BLOCK_BYTES,
        num_warps=4,
    )


def dequantized(packed: Tensor, scales: Scales, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The weight of `shape` and `dtype`, by the kernel."""
    sizes = scales.block_size, scales.nested_block_size
    return _dequantize(packed, scales.absmax, *scales[2:5], *sizes, list(shape), dtype)


# ---- public ----


def require_nf4(name: str, packed: Tensor, scales: Scales, num_elements: int) -> None:
    """Raise unless these are `num_elements` numbers of 4 bits."""
    require(isinstance(packed, Tensor), name, "packed", "a tensor", type(packed).__name__)
    num_bytes = packed.numel() * packed.element_size()
    require(num_bytes == cdiv(num_elements, 2), name, "packed", f"{cdiv(num_elements, 2)} bytes", f"{num_bytes}")
    is_size = scales.block_size > 0 and scales.block_size % 2 == 0 and scales.nested_block_size > 0
    require(is_size, name, "block_size", "a positive even number", scales.block_size)
    num_blocks = cdiv(num_elements, scales.block_size)
    require(scales.absmax.numel() == num_blocks, name, "absmax", f"{num_blocks} elements", scales.absmax.numel())
    nested = scales[2:5]
    is_nested = scales.absmax.dtype == torch.uint8
    expected = "tensors" if is_nested else "None for scales that are no bytes"
    require(
        all((t is not None) == is_nested for t in nested),
        name,
        "nested_absmax, nested_code, nested_offset",
        expected,
        [None if t is None else tuple(t.shape) for t in nested],
    )
    if is_nested:
        require_floating(name, nested_absmax=nested[0], nested_code=nested[1], nested_offset=nested[2])
        num_outer = cdiv(num_blocks, scales.nested_block_size)
        require(nested[0].numel() == num_outer, name, "nested_absmax", f"{num_outer} elements", nested[0].numel())  # type: ignore[union-attr]
        require(nested[1].numel() == 256, name, "nested_code", "256 elements", nested[1].numel())  # type: ignore[union-attr]
        require(nested[2].numel() == 1, name, "nested_offset", "one element", nested[2].numel())  # type: ignore[union-attr]
    else:
        require_floating(name, absmax=scales.absmax)
    tensors: dict[str, Any] = dict(zip(("nested_absmax", "nested_code", "nested_offset"), nested, strict=True))
    require_same_device(name, packed=packed, absmax=scales.absmax, **tensors)


def dequantize_nf4(
    packed: Tensor,
    absmax: Tensor,
    shape: Sequence[int],
    *,
    block_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    nested_absmax: Tensor | None = None,
    nested_code: Tensor | None = None,
    nested_offset: Tensor | None = None,
    nested_block_size: int = 256,
    out: Tensor | None = None,
) -> Tensor:
    """The numbers of a tensor of 4 bits with sixteen unevenly spaced values (NF4), scales of 8 bits included.

    Args:
        packed: two numbers a byte, the first in its upper half; any dtype that holds the bytes.
        absmax: the scale of each `block_size` numbers, or, with `nested_*`, a byte that stands for it:
            `nested_code[absmax] * nested_absmax + nested_offset`, one `nested_absmax` for `nested_block_size` scales.
        shape: of the result.
        dtype: of the result; that of `out` where it is given.
        out: contiguous, of `shape`: filled and returned, so that one buffer serves many weights.

    Returns:
        A tensor of `shape`, without a gradient.

    Raises:
        ValueError: sizes, dtypes or devices disagree.

    Numerics: scales and products in fp32, rounded once.
    Source: Dettmers et al. 2023, arXiv:2305.14314.
    """
    scales = Scales(absmax, block_size, nested_absmax, nested_code, nested_offset, nested_block_size)
    require_nf4("dequantize_nf4", packed, scales, math.prod(shape))
    if out is not None:
        is_fit = out.shape == torch.Size(shape) and out.is_contiguous() and out.device == packed.device
        require(is_fit, "dequantize_nf4", "out", f"contiguous, shape {tuple(shape)}", f"shape {tuple(out.shape)}")
        dtype = out.dtype
    with torch.no_grad():
        if current_backend() == "torch" or dtype == torch.float64 or why_no_kernels(packed.device, dtype):
            weight = dequantize_nf4_reference(packed, scales, shape, dtype)
            return weight if out is None else out.copy_(weight)
        if out is None:
            return dequantized(packed, scales, shape, dtype)
        _fill(out, packed, scales)
        return out
