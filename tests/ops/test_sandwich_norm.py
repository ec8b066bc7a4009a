"""What is special to `sandwich_norm`; the rest is checked for every operator from its specification."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tigon
from tigon.ops.sandwich_norm import _MAX_BLOCK, _bwd_blocks, _fwd_blocks, sandwich_norm_reference


def _tensors(num_rows: int = 5, num_cols: int = 24, **kwargs: object) -> list[Tensor]:
    shapes = (num_rows, num_cols), (num_cols,), (num_rows, num_cols), (num_cols,)
    return [torch.randn(s, **kwargs) for s in shapes]  # type: ignore[arg-type]


def test_reference_gradient_is_exact() -> None:
    tensors = [t.requires_grad_() for t in _tensors(3, 5, dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda *t: tuple(sandwich_norm_reference(*t, offset=0.5)), tensors)


def test_equals_the_two_norms(device: torch.device) -> None:
    tensors = [t.requires_grad_() for t in _tensors(device=device)]
    twins = [t.detach().clone().requires_grad_() for t in tensors]
    y, s = tigon.sandwich_norm(*tensors)
    x, post_weight, residual, pre_weight = twins
    expected = tigon.rms_norm(tigon.rms_norm(x, post_weight), pre_weight, residual=residual)
    torch.testing.assert_close((y, s), tuple(expected), rtol=1e-5, atol=1e-6)
    (y.square().sum() + s.sin().sum()).backward()
    (expected.y.square().sum() + expected.residual.sin().sum()).backward()
    for a, b in zip(tensors, twins, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("used", [0, 1])
def test_one_result_may_stay_unused(used: int, device: torch.device) -> None:
    tensors = [t.requires_grad_() for t in _tensors(device=device)]
    twins = [t.detach().double().requires_grad_() for t in tensors]
    gradients = torch.autograd.grad(tigon.sandwich_norm(*tensors)[used].sum(), tensors, materialize_grads=True)
    expected = torch.autograd.grad(sandwich_norm_reference(*twins)[used].sum(), twins, materialize_grads=True)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_cols", [1, 3, 64, 768, 2304, 4096])
def test_blocks_fit_registers(num_cols: int) -> None:
    for block_m, block_n, num_warps in (_fwd_blocks(num_cols), _bwd_blocks(num_cols)):
        assert block_n >= num_cols
        assert num_cols <= _MAX_BLOCK
        assert num_warps in (4, 8)
        assert block_m * block_n == 16 * 32 * num_warps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: (t[0], t[1][:-1], t[2], t[3]), r"sandwich_norm: post_weight: expected shape \(24,\), got \(23,\)"),
        (lambda t: (t[0], t[1], t[2], t[3][:-1]), r"sandwich_norm: pre_weight: expected shape \(24,\), got \(23,\)"),
        (lambda t: (t[0], t[1], t[2][:-1], t[3]), r"sandwich_norm: residual: expected shape \(5, 24\), got \(4, 24\)"),
        (lambda t: (t[0].long(), *t[1:]), "sandwich_norm: x: expected a floating-point"),
        (lambda t: (t[0], t[1], t[2].to("meta"), t[3]), "sandwich_norm: residual: expected device cpu, got meta"),
    ],
)
def test_bad_input_is_named(change: Callable[[list[Tensor]], tuple[Tensor, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tigon.sandwich_norm(*change(_tensors()))


def test_unknown_cast_is_refused() -> None:
    with pytest.raises(ValueError, match="sandwich_norm: cast: expected"):
        tigon.sandwich_norm(*_tensors(), cast="sometimes")  # type: ignore[arg-type]
