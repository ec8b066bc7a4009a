"""What the generic checks cannot say of `rms_norm`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tigon
from tigon.ops.rms_norm import rms_norm, rms_norm_reference

both_backends = pytest.mark.usefixtures("backend")


@both_backends
@pytest.mark.parametrize("with_residual", [False, True])
def test_groups_are_norms_of_their_own(with_residual: bool, device: torch.device) -> None:
    x, weight = torch.randn(4, 3, 24, device=device), torch.randn(24, device=device)
    residual = torch.randn_like(x) if with_residual else None
    y = rms_norm(x, weight, residual=residual, group_size=6, offset=1.0)
    y = y.y if with_residual else y
    for i in range(0, 24, 6):
        part = slice(i, i + 6)
        of_part = None if residual is None else residual[..., part]
        alone = rms_norm(x[..., part], weight[part], residual=of_part, offset=1.0)
        torch.testing.assert_close(y[..., part], alone.y if with_residual else alone, rtol=1e-6, atol=1e-6)


@both_backends
def test_one_group_is_the_plain_norm(device: torch.device) -> None:
    x, weight = torch.randn(5, 12, device=device), torch.randn(12, device=device)
    assert torch.equal(rms_norm(x, weight, group_size=12), rms_norm(x, weight))
    assert not torch.equal(rms_norm(x, weight, group_size=6), rms_norm(x, weight))


@pytest.mark.parametrize("options", [{"group_size": 8200}, {"group_size": 17}, {}], ids=str)
def test_groups_of_any_width(options: dict[str, int], device: torch.device) -> None:
    """Groups wider than the registers hold take another path; 150 rows make more tiles than there are programs."""
    num_cols = 2 * options.get("group_size", 20)
    num_rows = 3 if num_cols > 1000 else 150
    x, residual = (torch.randn(num_rows, num_cols, device=device) for _ in range(2))
    weight = torch.randn(num_cols, device=device)
    upstream = torch.randn_like(x), torch.randn_like(x)
    results = []
    for function in (rms_norm, rms_norm_reference):
        leaves = [t.clone().requires_grad_() for t in (x, weight, residual)]
        out = function(leaves[0], leaves[1], residual=leaves[2], **options)
        results.append((*out, *torch.autograd.grad(out, leaves, upstream)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("cast", "x_dtype", "weight_dtype", "expected"),
    [
        ("cast_then_scale", torch.bfloat16, torch.float32, torch.float32),
        ("scale_then_cast", torch.bfloat16, torch.float32, torch.bfloat16),
        ("cast_to_weight", torch.float32, torch.bfloat16, torch.bfloat16),
        ("cast_to_weight", torch.bfloat16, torch.float32, torch.float32),
        ("cast_to_weight", torch.float16, torch.bfloat16, torch.bfloat16),
        ("cast_rstd", torch.bfloat16, torch.bfloat16, torch.bfloat16),
        ("none", torch.bfloat16, torch.float32, torch.float32),
    ],
)
@both_backends
def test_dtype_of_the_result(
    cast: str, x_dtype: torch.dtype, weight_dtype: torch.dtype, expected: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(3, 8, device=device, dtype=x_dtype, requires_grad=True)
    weight = torch.randn(8, device=device, dtype=weight_dtype, requires_grad=True)
    y = rms_norm(x, weight, cast=cast)
    assert y.dtype == expected
    y.float().sum().backward()
    assert (x.grad.dtype, weight.grad.dtype) == (x_dtype, weight_dtype)


def _cast_rstd(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)


def _cast_to_weight(x: Tensor, weight: Tensor) -> Tensor:
    n = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    if weight.dtype in (torch.float16, torch.bfloat16):
        n = n.to(weight.dtype)
    return weight * n


@pytest.mark.parametrize(
    ("cast", "formula", "has_weight"),
    [("cast_rstd", _cast_rstd, False), ("cast_to_weight", _cast_to_weight, True)],
)
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_casts_are_those_of_models_bit_for_bit(
    cast: str, formula: Callable[[Tensor, Tensor], Tensor], has_weight: bool, x_dtype: torch.dtype
) -> None:
    """On plain torch, since the interpreter does not round to bf16 as devices do."""
    x, weight = torch.randn(64, 96).to(x_dtype), torch.randn(96).bfloat16()
    with tigon.backend("torch"):
        y = rms_norm(x, weight if has_weight else None, cast=cast)
        assert torch.equal(y, formula(x, weight))
        if x_dtype == torch.bfloat16:
            assert not torch.equal(y, rms_norm(x, weight if has_weight else None, cast="scale_then_cast"))


def test_groups_compile_with_dynamic_shapes(device: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(rms_norm, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((3, 4, 24), (5, 2, 36)):
        x, weight = torch.randn(shape, device=device), torch.randn(shape[-1], device=device)
        assert torch.equal(compiled(x, weight, group_size=12), rms_norm(x, weight, group_size=12))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 5}, "rms_norm: group_size: expected a divisor of 12, got 5"),
        ({"group_size": 0}, "rms_norm: group_size: expected a divisor of 12, got 0"),
        ({"cast": "cast_to_weight"}, "rms_norm: weight: expected a tensor for this cast, got None"),
        ({"cast": "cast"}, "rms_norm: cast: expected one of 'cast_then_scale', "),
        ({"offset": 1.0}, "rms_norm: offset: expected 0 without a weight, got 1.0"),
    ],
)
def test_wrong_arguments_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rms_norm(torch.ones(2, 12), **options)
