"""Kernel pieces against fp64 torch: errors in units of fp32 rounding, and arguments of any size."""

from __future__ import annotations

import pytest
import torch

from tigon.ops import _tl
from tigon.ops._triton import tl, triton
from tigon.ops.glu import ACTIVATIONS

EPS = torch.finfo(torch.float32).eps


@triton.jit
def _value_kernel(x_ptr, y_ptr, n, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + cols, mask=cols < n, other=0.0)
    tl.store(y_ptr + cols, FUNCTION(x), mask=cols < n)


@triton.jit
def _slope_kernel(x_ptr, y_ptr, slope_ptr, n, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    y, slope = FUNCTION(tl.load(x_ptr + cols, mask=cols < n, other=0.0))
    tl.store(y_ptr + cols, y, mask=cols < n)
    tl.store(slope_ptr + cols, slope, mask=cols < n)


def _run(function: object, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y, slope = torch.empty_like(x), torch.empty_like(x)
    _slope_kernel[(1,)](x, y, slope, x.numel(), FUNCTION=function, BLOCK=triton.next_power_of_2(x.numel()))
    return y, slope


@pytest.mark.parametrize("name", ["sigmoid", "tanh"])
def test_relative_error_is_a_few_roundings(name: str, device: torch.device) -> None:
    x = torch.cat([torch.linspace(-200, 200, 4001), torch.linspace(-1, 1, 4001), torch.logspace(-30, 0, 100)])
    x = x.to(device)
    y = torch.empty_like(x)
    _value_kernel[(1,)](x, y, x.numel(), FUNCTION=getattr(_tl, name), BLOCK=8192)
    exact = getattr(torch, name)(x.double())
    relative = ((y - exact).abs() / exact.abs().clamp_min(1e-35)).max()
    # exp(x) itself is off by x roundings of its argument on a GPU.
    assert relative < (4 if device.type == "cpu" else 100) * EPS


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_value_and_slope_match_torch(name: str, device: torch.device) -> None:
    x = torch.linspace(-30, 30, 8001, device=device)
    y, slope = _run(ACTIVATIONS[name].kernel, x)
    wide = x.double().requires_grad_()
    exact = ACTIVATIONS[name].reference(wide)
    exact.sum().backward()
    assert ((y - exact).abs() <= 4 * EPS * (x.abs() + exact.abs() + 1)).all()
    assert ((slope - wide.grad).abs() <= 8 * EPS * (wide.grad.abs() + 1)).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_large_arguments_have_finite_slopes(name: str, device: torch.device) -> None:
    # 1e19 is the largest power of ten whose square is finite, which the value of relu2 needs.
    x = torch.tensor([-1e38, -1e19, -1000.0, -100.0, -50.0, 50.0, 100.0, 1000.0, 1e19, 1e38], device=device)
    x = x[x.abs() <= 1e19] if name == "relu2" else x
    y, slope = _run(ACTIVATIONS[name].kernel, x)
    wide = x.double().requires_grad_()
    exact = ACTIVATIONS[name].reference(wide)
    exact.sum().backward()
    # Below the tolerance fp64 is not exact either: 1 - sigmoid(50) is zero in it.
    torch.testing.assert_close(y.double(), exact.detach(), rtol=1e-6, atol=1e-20)
    torch.testing.assert_close(slope.double(), wide.grad, rtol=1e-6, atol=1e-20)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nan_passes_through(name: str, device: torch.device) -> None:
    y, _ = _run(ACTIVATIONS[name].kernel, torch.tensor([float("nan"), 1.0], device=device))
    assert y[0].isnan()
    assert not y[1].isnan()


def test_derivatives_at_zero_are_those_of_torch(device: torch.device) -> None:
    zero = torch.zeros(1, device=device)
    for name, activation in ACTIVATIONS.items():
        x = zero.double().requires_grad_()
        activation.reference(x).backward()
        assert _run(activation.kernel, zero)[1].item() == pytest.approx(x.grad.item(), abs=1e-12), name
