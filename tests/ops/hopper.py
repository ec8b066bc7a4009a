"""What the product with an epilogue does, tile by tile in torch: it stands in where there is no such GPU."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tigon.ops import _hopper_cross_entropy, _hopper_glu, _hopper_sum
from tigon.ops.glu import glu_reference

TILE = 256


def multiply(
    a: Tensor,
    weight: Tensor,
    other: Tensor | None,
    outs: tuple[Tensor | None, ...],
    args: tuple[Any, ...],
    prologue: Any,
    epilogue: Any,
    *,
    ins: tuple[Tensor | None, ...] = (None, None),
    more: tuple[Tensor | None, ...] = (None, None),
    function: Any = None,
    flag: bool = False,
    transposed: bool = False,
) -> None:
    # What descriptors take, of 16-bit numbers.
    for t in (a, weight, other, *ins, *more, *outs):
        assert t is None or (t.stride(1) == 1 and t.stride(0) >= t.shape[1] and t.storage_offset() % 8 == 0)
    z = a @ (weight if transposed else weight.t())
    if epilogue is _hopper_sum._store_epilogue:
        _store(z, *more, outs[0], args, transposed)
        return
    assert more == (None, None)
    if epilogue is _hopper_glu._glu_bwd_epilogue:
        assert transposed
        assert prologue is _hopper_glu._glu_bwd_prologue
        _glu_bwd(z, *ins, outs, args)
        return
    assert not transposed
    if epilogue is _hopper_glu._glu_epilogue:
        _glu(z, a @ other.t(), outs, args)
    elif epilogue is _hopper_cross_entropy._anchored_epilogue:
        assert prologue is _hopper_cross_entropy._prologue
        _anchored(z, outs[0] if outs else None, *args)
    else:
        assert epilogue is _hopper_cross_entropy._gradient_epilogue
        assert prologue is _hopper_cross_entropy._gradient_prologue
        _gradient(z, outs[0], *args)


def _store(z: Tensor, b: Tensor, low: Tensor, out: Tensor, args: tuple[Any, ...], transposed: bool) -> None:
    bias, num_cols = args
    assert num_cols == z.shape[1]
    z += b @ (low if transposed else low.t())
    out.copy_(z if bias is None else z + bias)


def _glu(gate: Tensor, up: Tensor, outs: tuple[Tensor | None, ...], args: tuple[Any, ...]) -> None:
    gate_bias, up_bias, num_cols, *options = args
    assert num_cols == gate.shape[1]
    assert options == [None] * 4
    gate, up = (x if b is None else x + b for x, b in ((gate, gate_bias), (up, up_bias)))
    for out, value in zip(outs, (glu_reference(gate, up), gate, up), strict=True):
        if out is not None:
            out.copy_(value)


def _glu_bwd(
    dproduct: Tensor, gate: Tensor, up: Tensor, outs: tuple[Tensor | None, ...], args: tuple[Any, ...]
) -> None:
    assert args == (None,) * 4
    leaves = [t.detach().clone().requires_grad_() for t in (gate, up)]
    with torch.enable_grad():
        product = glu_reference(*leaves)
        gradients = torch.autograd.grad(product, leaves, dproduct)
    for out, value in zip(outs, (product.detach(), *gradients), strict=True):
        out.copy_(value)


def _flag(flags: Tensor, num_rows: int, column: int) -> Tensor:
    """One flag of each group of 64 rows, a row. Both groups of a tile of 128 are read."""
    assert len(flags) >= 2 * -(-num_rows // 128)
    return flags[:, column].repeat_interleave(64)[:num_rows].bool()


def _used(z: Tensor, labels: Tensor, flags: Tensor, ignore_index: int) -> Tensor:
    is_ignored = (labels == ignore_index) & _flag(flags, len(labels), -1)
    return z.masked_fill(is_ignored.unsqueeze(-1), float("-inf"))


def _anchored(
    z: Tensor,
    out: Tensor | None,
    labels: Tensor,
    label_info: Tensor,
    anchors: Tensor,
    sums: Tensor,
    flags: Tensor,
    first_col: int,
    num_rows: int,
    num_cols: int,
    first_tile: int,
    num_tiles: int,
    ignore_index: int,
    factor: float,
    max_rise: float,
) -> None:
    assert (num_rows, num_cols) == z.shape
    assert flags.shape[1] == num_tiles + 1 == anchors.shape[1] + 1
    z = _used(z, labels, flags, ignore_index) * (factor * math.log(2))
    for tile in range(-(-num_cols // TILE)):
        part = z[:, tile * TILE : (tile + 1) * TILE]
        top, anchor = part.amax(-1), label_info[:, 0]
        anchor = torch.where(top > anchor + max_rise, top, anchor)
        e = (part - anchor.masked_fill(anchor == float("-inf"), 0.0).unsqueeze(-1)).exp()
        columns = first_col + tile * TILE + torch.arange(part.shape[1])
        is_label = (columns == labels.unsqueeze(-1)) & _flag(flags, num_rows, first_tile + tile).unsqueeze(-1)
        anchors[:, first_tile + tile] = anchor
        sums[:, first_tile + tile] = e.masked_fill(is_label, 0.0).sum(-1)
        if out is not None:
            out[:, tile * TILE : (tile + 1) * TILE] = e


def _gradient(
    z: Tensor,
    out: Tensor,
    labels: Tensor,
    stats: Tensor,
    dce: Tensor,
    flags: Tensor,
    dce_stride: int,
    scale: float,
    first_col: int,
    num_rows: int,
    num_cols: int,
    num_tiles: int,
    ignore_index: int,
    factor: float,
) -> None:
    assert (num_rows, num_cols) == z.shape
    assert flags.shape[1] == num_tiles + 1
    z = _used(z, labels, flags, ignore_index) * (factor * math.log(2))
    d = (z - stats.sum(-1, keepdim=True)).exp()
    dce = torch.as_strided(dce, (num_rows,), (dce_stride,), dce.storage_offset()).masked_fill(
        labels == ignore_index, 0.0
    )
    for tile in range(-(-num_cols // TILE)):
        columns = first_col + tile * TILE + torch.arange(TILE)
        is_label = (columns == labels.unsqueeze(-1)) & _flag(flags, num_rows, first_col // TILE + tile).unsqueeze(-1)
        d[:, tile * TILE : (tile + 1) * TILE] -= is_label[:, : num_cols - tile * TILE].to(d.dtype)
    out.copy_(d * (dce * scale).unsqueeze(-1))
