"""Matrix products of a language-model head in chunks of rows: what the operators on its logits share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _op
from ._check import require
from ._launch import cdiv, launch, next_power_of_2
from ._triton import tl, triton
from .cross_entropy import wide_dtype

# Bytes of logits at once where the caller names none; without a kernel, logits whose fp32 intermediates exist at once.
LOGITS_BYTES, CPU_LOGITS_BYTES = 5 << 28, 64 << 20
SLICE_LOGITS, CPU_SLICE_LOGITS = 1 << 25, 1 << 20
# Rows of a chunk are a multiple of this where they can be: the height of a tile of a matrix product.
TILE_ROWS = 128


# ---- kernels ----


@triton.jit
def _scale_kernel(x_ptr, factor_ptr, num_elements, BLOCK: tl.constexpr):
    """One program per BLOCK elements, multiplied in place by a scalar on the device; nothing to do if that is 1."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < num_elements
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(x_ptr + offsets, x * factor, mask=mask)


@triton.jit
def _scale_rows_kernel(
    x_ptr, labels_ptr, factors_ptr, factor_ptr, y_ptr, x_stride, y_stride, num_cols, ignore_index, BLOCK: tl.constexpr
):
    """One program per row: y = factor * x, and zeros, whatever x holds, where the label is ignored."""
    row = tl.program_id(0).to(tl.int64)
    is_valid = tl.load(labels_ptr + row) != ignore_index
    factor = 1.0
    if factor_ptr is not None:
        factor = tl.load(factor_ptr).to(tl.float32)
    if factors_ptr is not None:
        factor = factor * tl.load(factors_ptr + row)
    for start in range(0, num_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < num_cols
        x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * y_stride + cols, tl.where(is_valid, x * factor, 0.0), mask=mask)


# ---- operators ----

_SCALE_BLOCK = 8192


def padded(num_cols: int) -> int:
    """Elements between rows of logits: a multiple of 16, which matrix products on accelerators need."""
    return cdiv(num_cols, 16) * 16


def row_stride(num_classes: int, device: torch.device) -> int:
    """Elements between rows of the logits: a multiple of 16 on accelerators, which their matrix products need."""
    return num_classes if device.type == "cpu" else padded(num_classes)


def chunk_rows(num_rows: int, row_bytes: int, max_bytes: int) -> int:
    """Rows of a chunk: as few chunks as `max_bytes` allows, and these about equal."""
    fit = max_bytes // row_bytes
    if fit >= num_rows:
        return num_rows
    step = TILE_ROWS if fit >= TILE_ROWS else 1
    num_chunks = cdiv(num_rows, fit // step * step)
    return cdiv(cdiv(num_rows, num_chunks), step) * step


def accumulate(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """`total + a @ b`, in `total` if there is one; fp32 for 16-bit factors."""
    wide = wide_dtype(a.dtype)
    if a.dtype == wide:
        return torch.mm(a, b) if total is None else total.addmm_(a, b)
    if has_wide_product(a):
        if total is None:
            return torch.mm(a, b, out_dtype=wide)
        return torch.addmm(total, a, b, out_dtype=wide, out=total)
    product = torch.mm(a, b)
    return product.to(wide) if total is None else total.add_(product)


_wide_product: dict[tuple[torch.device, torch.dtype], bool] = {}


def has_wide_product(a: Tensor) -> bool:
    """True where torch adds a product of 16-bit matrices into an fp32 matrix; tried once, which waits for nothing."""
    if a.device.type not in ("cuda", "meta"):
        return False
    key = a.device, a.dtype
    if key not in _wide_product:
        x = a.new_zeros(16, 16)
        total = x.to(torch.float32)
        try:
            torch.addmm(total, x, x, out_dtype=torch.float32, out=total)
            _wide_product[key] = True
        except (RuntimeError, TypeError, NotImplementedError):
            _wide_product[key] = False
    return _wide_product[key]


def scale_rows(
    x: Tensor, labels: Tensor, factors: Tensor | None, factor: Tensor | None, ignore_index: int, out: Tensor
) -> Tensor:
    """`out = x * factors * factor`, a factor a row and one for all; zeros in ignored rows."""
    block = min(next_power_of_2(x.shape[1]), _SCALE_BLOCK)
    sizes = x.stride(0), out.stride(0), x.shape[1]
    launch(_scale_rows_kernel, (x.shape[0],), x, labels, factors, factor, out, *sizes, ignore_index, BLOCK=block)
    return out


def scaled_rows(h: Tensor, labels: Tensor, factor: Tensor | None, ignore_index: int, has_kernel: bool) -> Tensor:
    """`factor * h` with zeros in ignored rows: whatever these hold must not meet their dlogits, 0 * inf is NaN."""
    ignored = labels == ignore_index
    if has_kernel:
        return scale_rows(h, labels, None, factor, ignore_index, h.new_empty(h.shape))
    if factor is not None:
        # `out` rounds once; a product with a scalar tensor would round the scalar first.
        h = torch.mul(h, factor.expand(h.shape[0], 1), out=h.new_empty(h.shape))
    elif h.device.type == "cpu" and not ignored.any():
        return h
    return h.masked_fill(ignored.unsqueeze(-1), 0.0)


def multiply_(x: Tensor, factor: Tensor, has_kernel: bool) -> None:
    """`x *= factor`, a scalar tensor that stays on its device, with one rounding."""
    if x.numel() == 0:
        return
    if has_kernel:
        grid = (cdiv(x.numel(), _SCALE_BLOCK),)
        launch(_scale_kernel, grid, x, factor, x.numel(), BLOCK=_SCALE_BLOCK, num_warps=8)
    elif x.device.type == "cpu":
        if factor != 1:
            x.mul_(factor.item())
    else:
        # In parts, because a 16-bit product with a scalar tensor would round the scalar first.
        for part in x.view(-1).split(SLICE_LOGITS):
            part.copy_(part.to(factor.dtype) * factor)


def finished(total: Tensor | None, like: Tensor, is_needed: bool) -> Tensor:
    """A gradient in the dtype of its input: zeros where there were no rows, without elements where not needed."""
    if not is_needed:
        return like.new_empty(0)
    return like.new_zeros(like.shape) if total is None else total.to(like.dtype)


def fake_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    b = weight[:, 0] if bias is None else bias
    inputs = zip((hidden, weight, b), needs, strict=True)
    return tuple(t.new_empty(t.shape if is_needed else (0,)) for t, is_needed in inputs)  # type: ignore[return-value]


def matmul_dtype(name: str, argument: str, dtype: torch.dtype, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """`shared_matmul_dtype` of a weight and its bias."""
    return shared_matmul_dtype(name, argument, dtype, weight=weight, bias=bias)


def shared_matmul_dtype(name: str, argument: str, dtype: torch.dtype, **factors: Tensor | None) -> torch.dtype:
    """The dtype in which `F.linear` would multiply what `argument` names, of `dtype`, autocast included.

    Raises:
        ValueError: the dtypes differ and autocast does not make them one.
    """
    cast = _op.autocast_dtype(next(t for t in factors.values() if t is not None).device.type)

    def used(dtype: torch.dtype) -> torch.dtype:
        return dtype if cast is None or dtype == torch.float64 else cast

    for other, tensor in factors.items():
        if tensor is not None:
            require(used(tensor.dtype) == used(dtype), name, other, f"dtype {dtype} of {argument}", tensor.dtype)
    return used(dtype)


def is_foreign(t: Tensor | None) -> bool:
    """A tensor subclass with rules of its own, such as a sharded tensor: only plain torch knows what to do with it."""
    return t is not None and type(t) not in _op._PLAIN_TENSORS and type(t).__name__ not in _op._TRACED
