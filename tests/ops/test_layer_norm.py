"""What the generic checks cannot say of `layer_norm`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from tigon.ops._launch import pipeline_stages
from tigon.ops.layer_norm import _MAX_BWD_BLOCK, _bwd_blocks, _fwd_blocks, layer_norm_reference
from tigon.testing import assert_within_budget

# `tigon.ops.layer_norm` as an attribute is the function.
module = importlib.import_module("tigon.ops.layer_norm")


def _run(
    function: Callable[..., Tensor], *tensors: Tensor | None, upstream: Tensor | None = None, **options: Any
) -> tuple[Tensor, ...]:
    """The output, then the gradient of each of `tensors`; the gradient of the sum without an `upstream`."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    y = function(*leaves, **options)
    y.sum().backward() if upstream is None else y.backward(upstream)
    return y.detach(), *(t.grad for t in leaves if t is not None)


def _assert_within_budget(*tensors: Tensor, upstream: Tensor) -> None:
    """Output and gradients of the kernels against F.layer_norm in fp64."""

    def torch_layer_norm(x: Tensor, *vectors: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], *vectors)

    actual = _run(tigon.layer_norm, *tensors, upstream=upstream)
    low = _run(layer_norm_reference, *tensors, upstream=upstream)
    high = _run(torch_layer_norm, *(t.double() for t in tensors), upstream=upstream.double())
    for name, a, b, c in zip(("y", "dx", "dweight", "dbias"), actual, low, high, strict=False):
        assert_within_budget(name, a, b, c)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_lanes_beyond_the_row_do_not_count(backend: str, device: torch.device) -> None:
    x = torch.tensor([[999.0, 1000.0, 1001.0]], device=device)
    with tigon.backend(backend):
        y = tigon.layer_norm(x)
    torch.testing.assert_close(y.cpu(), torch.tensor([[-1.224736, 0.0, 1.224736]]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_cols", [1, 3, 17, 127, 129, 768, 1025, 1536, 4097, 8192])
def test_large_mean_at_odd_widths(num_cols: int, device: torch.device) -> None:
    # The mean of a row is rounded once or more, so the errors of few rows would be a matter of luck.
    x = torch.randn(40, num_cols, device=device) + 300
    weight, bias = torch.randn(num_cols, device=device), torch.randn(num_cols, device=device)
    _assert_within_budget(x, weight, bias, upstream=torch.randn(40, num_cols, device=device))


@pytest.mark.parametrize("num_cols", [65536, 70000])
def test_very_wide_rows(num_cols: int, device: torch.device) -> None:
    x, dy = torch.randn(2, num_cols, device=device) - 7, torch.randn(2, num_cols, device=device)
    _assert_within_budget(x, torch.randn(num_cols, device=device), torch.randn(num_cols, device=device), upstream=dy)


@pytest.mark.parametrize("num_cols", [24, 8200])
def test_programs_that_sum_several_tiles(num_cols: int, device: torch.device) -> None:
    """More row tiles than programs, the last of them partial."""
    num_rows = 5 * _bwd_blocks(num_cols)[0] * 2 + 3 if num_cols <= _MAX_BWD_BLOCK else 37
    x, dy = torch.randn(num_rows, num_cols, device=device), torch.randn(num_rows, num_cols, device=device)
    vectors = torch.randn(num_cols, device=device), torch.randn(num_cols, device=device)
    _assert_within_budget(x, *vectors, upstream=dy)


@pytest.mark.parametrize("num_cols", [40, 8200])
def test_gradient_ignores_shift_and_scale(num_cols: int, device: torch.device) -> None:
    """dx is orthogonal to the constant row and, up to eps, to the normalised row."""
    x, dy = torch.randn(3, num_cols, device=device), torch.randn(3, num_cols, device=device)
    y, dx = _run(tigon.layer_norm, x, upstream=dy)
    norm = dx.norm(dim=-1)
    assert (dx.sum(-1).abs() < 1e-5 * norm * num_cols**0.5).all()
    assert ((dx * y).sum(-1).abs() < 1e-4 * norm * num_cols**0.5).all()
    assert (norm > 0.1).all()


def test_constant_row_is_the_bias(device: torch.device) -> None:
    x, bias = torch.full((2, 40), 1234.0, device=device), torch.randn(40, device=device)
    y, dx, dbias = _run(lambda x, b: tigon.layer_norm(x, None, b), x, bias)
    assert torch.equal(y, bias.expand(2, 40))
    assert dx.isfinite().all()
    assert torch.equal(dbias, torch.full_like(bias, 2.0))


@pytest.mark.parametrize("num_cols", [12, 8200])
def test_only_what_is_needed_is_computed(num_cols: int, launches: list[Any], device: torch.device) -> None:
    tensors = torch.randn(6, num_cols, device=device), *torch.randn(2, num_cols, device=device)
    dy = torch.randn(6, num_cols, device=device)
    expected = _run(tigon.layer_norm, *tensors, upstream=dy)[1:]
    for wanted in (0, 1, 2):
        launches.clear()
        leaves = [t.clone().requires_grad_(i == wanted) for i, t in enumerate(tensors)]
        tigon.layer_norm(*leaves).backward(dy)
        assert [t.grad is not None for t in leaves] == [i == wanted for i in range(3)]
        assert torch.equal(leaves[wanted].grad, expected[wanted])
        backward = launches[-1].constants
        assert backward.get("NEEDS_DW", False) == (wanted == 1)
        assert backward.get("NEEDS_DB", False) == (wanted == 2)
        assert len(launches) == 2
    launches.clear()
    with torch.no_grad():
        tigon.layer_norm(tensors[0].requires_grad_())
    assert len(launches) == 1


@pytest.mark.parametrize("vectors", ["both", "weight", "bias", "none"])
@pytest.mark.parametrize("shape", [(9,), (4, 9), (2, 3, 2, 9)])
def test_any_strides_give_the_bits_of_the_contiguous_copy(
    shape: tuple[int, ...], vectors: str, device: torch.device
) -> None:
    weight = torch.randn(9, device=device) if vectors in ("both", "weight") else None
    bias = torch.randn(9, device=device) if vectors in ("both", "bias") else None
    reverse = tuple(reversed(range(len(shape))))
    layouts = (
        torch.randn(*shape[:-1], 18, device=device)[..., ::2],
        torch.randn(tuple(reversed(shape)), device=device).permute(reverse),
        torch.randn(*shape[:-1], 1, device=device).expand(shape),
        torch.randn(9, device=device).expand(shape),
    )
    for x in layouts:
        for dy in (None, torch.randn(tuple(reversed(shape)), device=device).permute(reverse)):
            strided = _run(tigon.layer_norm, x, weight, bias, upstream=dy)
            dense = None if dy is None else dy.contiguous()
            for a, b in zip(strided, _run(tigon.layer_norm, x.contiguous(), weight, bias, upstream=dense), strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reference_is_that_of_torch(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(7, 33).to(dtype), torch.randn(33).to(dtype), torch.randn(33).to(dtype)
    expected = F.layer_norm(x, (33,), weight, bias, 1e-3)
    actual = layer_norm_reference(x, weight, bias, eps=1e-3)
    assert actual.dtype == expected.dtype
    # Both compute in fp32 and round once; a tie may fall either way.
    torch.testing.assert_close(actual, expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_mixed_dtypes_promote(backend: str, device: torch.device) -> None:
    x, weight = torch.randn(3, 5, device=device, dtype=torch.float16), torch.randn(5, device=device)
    with tigon.backend(backend):
        y, dx, dweight = _run(tigon.layer_norm, x, weight)
    assert (y.dtype, dx.dtype, dweight.dtype) == (torch.float32, torch.float16, torch.float32)


def test_reference_gradient_is_exact() -> None:
    tensors = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 5), (5,), (5,))]
    for n in (1, 2, 3):
        assert torch.autograd.gradcheck(layer_norm_reference, tensors[:n])
        assert torch.autograd.gradgradcheck(layer_norm_reference, tensors[:n])


def test_what_kernels_refuse(device: torch.device) -> None:
    x = torch.randn(3, 4, device=device)
    assert "float64 is computed by the reference" in tigon.why_not(tigon.layer_norm, x.double())


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_strided_weight_and_bias(backend: str, device: torch.device) -> None:
    x, both = torch.randn(3, 4, device=device), torch.randn(8, device=device)
    with tigon.backend(backend):
        strided = _run(tigon.layer_norm, x, both[::2], both[1::2])
        dense = _run(tigon.layer_norm, x, both[::2].clone(), both[1::2].clone())
    assert all(torch.equal(a, b) for a, b in zip(strided, dense, strict=True))


def test_compiles_with_dynamic_shapes(device: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(tigon.layer_norm, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for shape in ((3, 4, 10), (5, 2, 18)):
            tensors = [torch.randn(s, device=device) for s in (shape, shape[-1:], shape[-1:])]
            for a, b in zip(_run(compiled, *tensors), _run(tigon.layer_norm, *tensors), strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("num_cols", [1, 5, 64, 768, 1024, 4096, 5120, 8192, 16384, 16385, 100000])
def test_blocks_fit_registers_and_shared_memory(num_cols: int) -> None:
    block_m, block_n, num_warps = _fwd_blocks(num_cols)
    assert block_m * block_n <= 32 * 32 * num_warps
    assert block_n >= num_cols or num_cols > 16384
    if num_cols <= _MAX_BWD_BLOCK:
        block_m, block_n, num_warps, per_sm = _bwd_blocks(num_cols)
        assert block_n >= num_cols
        assert block_m * block_n <= (32 if num_cols <= 4096 else 16) * 32 * num_warps
        # With all registers that a thread can have, all programs are resident: a second wave undoes the balance.
        assert per_sm * num_warps * 32 * (256 if num_warps <= 8 else 128) <= 65536
        for itemsize in (2, 4):
            tile = 2 * itemsize * block_m * block_n
            assert (pipeline_stages(tile) - 1) * tile <= 96 * 1024


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: tigon.layer_norm(torch.ones(2, 3), torch.ones(4)),
            r"layer_norm: weight: expected shape \(3,\), got \(4,\)",
        ),
        (
            lambda: tigon.layer_norm(torch.ones(2, 3), None, torch.ones(1, 3)),
            r"layer_norm: bias: expected shape \(3,\), got \(1, 3\)",
        ),
        (lambda: tigon.layer_norm(torch.ones(())), "layer_norm: x: expected at least one axis, got a scalar"),
        (lambda: tigon.layer_norm(torch.ones(3, dtype=torch.int32)), "layer_norm: x: expected a floating-point"),
        (
            lambda: tigon.layer_norm(torch.ones(3), torch.ones(3, device="meta")),
            "layer_norm: weight: expected device cpu, got meta",
        ),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
