"""What the generic checks cannot say of `group_norm`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from tigon.ops.group_norm import _MAX_BWD_BLOCK, _wide_blocks, group_norm_reference
from tigon.testing import assert_within_budget

# `tigon.ops.group_norm` as an attribute is the function.
module = importlib.import_module("tigon.ops.group_norm")


def _run(
    function: Callable[..., Tensor],
    x: Tensor,
    num_groups: int,
    *vectors: Tensor | None,
    upstream: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The output, then the gradient of `x` and of each of `vectors`; the gradient of the sum without an `upstream`."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, *vectors)]
    y = function(leaves[0], num_groups, *leaves[1:])
    y.sum().backward() if upstream is None else y.backward(upstream)
    return y.detach(), *(t.grad for t in leaves if t is not None)


def _assert_within_budget(x: Tensor, num_groups: int, *vectors: Tensor) -> None:
    """Output and gradients of the kernels against F.group_norm in fp64."""
    upstream = torch.randn(x.shape, device=x.device)
    actual = _run(tigon.group_norm, x, num_groups, *vectors, upstream=upstream)
    low = _run(group_norm_reference, x, num_groups, *vectors, upstream=upstream)
    wide = (t.double() for t in vectors)
    high = _run(F.group_norm, x.double(), num_groups, *wide, upstream=upstream.double())
    for name, a, b, c in zip(("y", "dx", "dweight", "dbias"), actual, low, high, strict=False):
        assert_within_budget(name, a, b, c)


def _vectors(num_channels: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.randn(num_channels, device=device), torch.randn(num_channels, device=device)


@pytest.mark.parametrize("shape", [(2, 12), (2, 12, 15), (2, 12, 3, 5), (2, 12, 2, 3, 5), (1, 12, 1, 1)])
@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_any_rank_is_that_of_torch(shape: tuple[int, ...], num_groups: int, device: torch.device) -> None:
    _assert_within_budget(torch.randn(shape, device=device), num_groups, *_vectors(12, device))


@pytest.mark.parametrize(
    ("shape", "num_groups"),
    [((1, 3, 9000), 3), ((2, 130, 70), 1), ((1, 6, 4097), 2), ((2, 1100, 16), 1), ((1, 4, 90, 91), 2)],
)
def test_groups_of_many_tiles(shape: tuple[int, ...], num_groups: int, device: torch.device) -> None:
    """Tiles of one channel and of several, the last of them partial along either axis."""
    x = torch.randn(shape, device=device) * 3 + 5
    _assert_within_budget(x, num_groups, *_vectors(shape[1], device))


def test_programs_share_the_tiles_of_a_group(launches: list[Any], device: torch.device) -> None:
    """With one program per multiprocessor, every loop over tiles runs more than once."""
    x = torch.randn(2, 6, 40, 230, device=device) + 3
    with mock.patch.object(module, "_PROGRAMS_PER_SM", 1), mock.patch.object(module, "num_sms", return_value=4):
        _assert_within_budget(x, 2, *_vectors(6, device))
    grids = {name: grid for name, grid, *_ in launches}
    assert grids["_group_norm_fwd_wide_kernel"] == (4, 1)
    assert grids["_group_norm_bwd_wide_dx_kernel"] == (4, 1)
    assert grids["_group_norm_bwd_wide_sums_kernel"] == (4, 3, 1)


def test_statistics_of_more_programs_than_are_joined(launches: list[Any], device: torch.device) -> None:
    x = torch.randn(1, 5, 9000, device=device) + 3
    with mock.patch.object(module, "_MAX_PARTIALS", 2):
        _assert_within_budget(x, 1, *_vectors(5, device))
    grids = {name: grid for name, grid, *_ in launches}
    assert grids["_group_norm_fwd_wide_stats_kernel"] == (1, 2)
    assert grids["_group_norm_fwd_wide_kernel"] == (1, 15)
    assert grids["_group_norm_bwd_wide_sums_kernel"] == (1, 5, 3)


@pytest.mark.parametrize("positions", [7, 9000])
def test_lanes_beyond_the_group_do_not_count(positions: int, device: torch.device) -> None:
    x = torch.randn(2, 3, positions, device=device) + 1000
    y = tigon.group_norm(x, 3)
    # A mean that is wrong by its rounding, 3e-5, and no more.
    assert y.mean(-1).abs().max() < 2e-4
    torch.testing.assert_close(y.var(-1, correction=0).cpu(), torch.ones(2, 3), rtol=1e-4, atol=0)


@pytest.mark.parametrize("positions", [5, 9000])
def test_only_what_is_needed_is_computed(positions: int, launches: list[Any], device: torch.device) -> None:
    tensors = torch.randn(2, 4, positions, device=device), *_vectors(4, device)
    dy = torch.randn(2, 4, positions, device=device)
    expected = _run(tigon.group_norm, tensors[0], 2, *tensors[1:], upstream=dy)[1:]
    for wanted in range(3):
        launches.clear()
        leaves = [t.clone().requires_grad_(i == wanted) for i, t in enumerate(tensors)]
        tigon.group_norm(leaves[0], 2, *leaves[1:]).backward(dy)
        assert [t.grad is not None for t in leaves] == [i == wanted for i in range(3)]
        assert torch.equal(leaves[wanted].grad, expected[wanted])
        backward = [(name, constants) for name, *_, constants in launches if "_bwd_" in name]
        assert backward[0][1]["NEEDS_DW"] == (wanted == 1 or (wanted == 0 and positions > 5))
        assert backward[0][1]["NEEDS_DB"] == (wanted == 2 or (wanted == 0 and positions > 5))
        assert len(backward) == (2 if wanted == 0 and 2 * positions > _MAX_BWD_BLOCK else 1)


@pytest.mark.parametrize("vectors", ["both", "weight", "bias", "none"])
@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 5), (3, 4, 5, 2)])
def test_any_strides_give_the_bits_of_the_contiguous_copy(
    shape: tuple[int, ...], vectors: str, device: torch.device
) -> None:
    weight = torch.randn(4, device=device) if vectors in ("both", "weight") else None
    bias = torch.randn(4, device=device) if vectors in ("both", "bias") else None
    reverse = tuple(reversed(range(len(shape))))
    layouts = (
        torch.randn(3, 9, *shape[2:], device=device)[:, 2:6],
        torch.randn(*shape[:-1], 2 * shape[-1], device=device)[..., ::2],
        torch.randn(tuple(reversed(shape)), device=device).permute(reverse),
        torch.randn(1, *shape[1:], device=device).expand(shape),
    )
    for x in layouts:
        for dy in (None, torch.randn(tuple(reversed(shape)), device=device).permute(reverse)):
            strided = _run(tigon.group_norm, x, 2, weight, bias, upstream=dy)
            dense = None if dy is None else dy.contiguous()
            copied = _run(tigon.group_norm, x.contiguous(), 2, weight, bias, upstream=dense)
            for a, b in zip(strided, copied, strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reference_is_that_of_torch(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(3, 6, 11).to(dtype), torch.randn(6).to(dtype), torch.randn(6).to(dtype)
    expected = F.group_norm(x.float(), 3, weight.float(), bias.float(), 1e-3).to(dtype)
    actual = group_norm_reference(x, 3, weight, bias, eps=1e-3)
    assert actual.dtype == F.group_norm(x, 3, weight, bias).dtype == dtype
    # Both compute in fp32 and round once; a tie may fall either way.
    torch.testing.assert_close(actual, expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_mixed_dtypes_promote(backend: str, device: torch.device) -> None:
    x, weight = torch.randn(3, 4, 5, device=device, dtype=torch.float16), torch.randn(4, device=device)
    with tigon.backend(backend):
        y, dx, dweight = _run(tigon.group_norm, x, 2, weight)
    assert (y.dtype, dx.dtype, dweight.dtype) == (torch.float32, torch.float16, torch.float32)


def test_constant_group_is_the_bias(device: torch.device) -> None:
    x, bias = torch.full((2, 4, 7), 1234.0, device=device), torch.randn(4, device=device)
    y, dx, dbias = _run(tigon.group_norm, x, 2, None, bias)
    assert torch.equal(y, bias[:, None].expand(2, 4, 7))
    assert dx.isfinite().all()
    assert torch.equal(dbias, torch.full_like(bias, 14.0))


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 4, 0), (2, 4, 3, 0)])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_nothing_to_normalise(backend: str, shape: tuple[int, ...], device: torch.device) -> None:
    with tigon.backend(backend):
        y, dx, dweight, dbias = _run(tigon.group_norm, torch.empty(shape, device=device), 2, *_vectors(4, device))
    assert y.shape == dx.shape == shape
    assert not dweight.any()
    assert not dbias.any()


def test_reference_gradient_is_exact() -> None:
    tensors = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 4, 3), (4,), (4,))]
    assert torch.autograd.gradcheck(lambda x, *v: group_norm_reference(x, 2, *v), tensors)
    assert torch.autograd.gradgradcheck(lambda x, *v: group_norm_reference(x, 2, *v), tensors)


@pytest.mark.parametrize("positions", [6, 9000])
def test_opcheck(positions: int, device: torch.device) -> None:
    x, dy = torch.randn(2, 4, positions, device=device), torch.randn(2, 4, positions, device=device)
    weight, bias = _vectors(4, device)
    _, mean, rstd = torch.ops.tigon.group_norm_fwd(x, 2, weight, bias, 1e-5)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.tigon.group_norm_fwd.default, (x, 2, weight, bias, 1e-5), test_utils=tests)
    backward = (dy, x, 2, weight, bias, mean, rstd, True, True, True)
    torch.library.opcheck(torch.ops.tigon.group_norm_bwd.default, backward, test_utils=tests)


def test_compiles_with_dynamic_shapes(device: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(tigon.group_norm, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for shape in ((3, 4, 10, 2), (5, 8, 6, 3)):
            x, vectors = torch.randn(shape, device=device), _vectors(shape[1], device)
            for a, b in zip(_run(compiled, x, 2, *vectors), _run(tigon.group_norm, x, 2, *vectors), strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("positions", [1, 16, 17, 1000, 4096, 5000, 10**6])
@pytest.mark.parametrize("channels", [1, 3, 40, 5000])
def test_wide_tiles_have_one_size(channels: int, positions: int) -> None:
    block_c, block_s = _wide_blocks(channels, positions)
    assert block_c * block_s <= module._WIDE_BLOCK
    assert block_s >= positions or block_s == module._WIDE_BLOCK
    assert block_c >= channels or block_c * block_s == module._WIDE_BLOCK


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tigon.group_norm(torch.ones(2, 6), 4), r"group_norm: num_groups: expected a divisor of 6, got 4"),
        (lambda: tigon.group_norm(torch.ones(2, 6), 0), r"group_norm: num_groups: expected a divisor of 6, got 0"),
        (lambda: tigon.group_norm(torch.ones(6), 2), r"group_norm: x: expected at least two axes, got 1"),
        (
            lambda: tigon.group_norm(torch.ones(2, 6), 2, torch.ones(2)),
            r"group_norm: weight: expected shape \(6,\), got \(2,\)",
        ),
        (
            lambda: tigon.group_norm(torch.ones(2, 6), 2, None, torch.ones(1, 6)),
            r"group_norm: bias: expected shape \(6,\), got \(1, 6\)",
        ),
        (
            lambda: tigon.group_norm(torch.ones(2, 6, dtype=torch.int32), 2),
            "group_norm: x: expected a floating-point",
        ),
        (
            lambda: tigon.group_norm(torch.ones(2, 6), 2, torch.ones(6, device="meta")),
            "group_norm: weight: expected device cpu, got meta",
        ),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
