"""What the generic checks cannot say of `sparsemax`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tigon
from tigon.ops import sparsemax_reference
from tigon.testing import assert_within_budget

NAN, INF = float("nan"), float("inf")


pytestmark = pytest.mark.usefixtures("on_device")


def _run(function: Callable[..., Tensor], x: Tensor, dy: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The result and the gradient."""
    leaf = x.detach().requires_grad_()
    y = function(leaf)
    y.backward(torch.ones_like(y) if dy is None else dy.to(y.dtype))
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def _project(x: Tensor) -> Tensor:
    """The projection by bisection of tau, which shares nothing with either implementation."""
    x = x.double()
    low, high = x.amax(-1, keepdim=True) - 1, x.amax(-1, keepdim=True)
    for _ in range(80):
        middle = (low + high) / 2
        is_low = (x - middle).clamp(min=0).sum(-1, keepdim=True) > 1
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    return (x - low).clamp(min=0)


def test_values(backend: str) -> None:
    for x, expected in (
        ([0.5, 0.0], [0.75, 0.25]),
        ([1.0, 0.0], [1.0, 0.0]),
        ([3.0, 1.0, -2.0], [1.0, 0.0, 0.0]),
        ([2.0, 2.0, 2.0, -INF], [1 / 3, 1 / 3, 1 / 3, 0.0]),
        ([-INF, 5.0], [0.0, 1.0]),
        ([-1e30, 1e30], [0.0, 1.0]),
    ):
        torch.testing.assert_close(tigon.sparsemax(torch.tensor([x])), torch.tensor([expected]))


@pytest.mark.parametrize("columns", [2, 17, 1000, 20_000])
@pytest.mark.parametrize("spread", [1e-5, 1e-2, 1.0, 100.0])
def test_is_the_projection(backend: str, spread: float, columns: int) -> None:
    x = spread * torch.randn(3, columns)
    y = tigon.sparsemax(x)
    assert (y >= 0).all()
    torch.testing.assert_close(y.sum(-1), torch.ones(3), rtol=2e-6, atol=0)
    torch.testing.assert_close(y.double(), _project(x), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("columns", [300, 17_000])
@pytest.mark.parametrize(
    "row",
    [
        lambda i: -i / 64,
        lambda i: -(i.double() ** 0.5) / 10,
        lambda i: -1 + 2.0 ** -i.double(),
        lambda i: -1 + 1 / (i + 1),
        lambda i: -(i % 2) * 0.25,
    ],
)
def test_rows_that_take_many_steps(row: Callable[[Tensor], Tensor], columns: int) -> None:
    """Elements that leave the support few at a time, or sit at its edge."""
    x = row(torch.arange(columns)).float()[None]
    torch.testing.assert_close(tigon.sparsemax(x).double(), _project(x), rtol=1e-5, atol=1e-6)


def test_gradient_is_that_of_the_support(backend: str) -> None:
    x = torch.tensor([[0.5, 0.0, -3.0], [9.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    _, dx = _run(tigon.sparsemax, x, torch.tensor([[1.0, 2.0, 30.0], [4.0, 5.0, 6.0], [3.0, 6.0, 9.0]]))
    torch.testing.assert_close(dx, torch.tensor([[-0.5, 0.5, 0.0], [0.0, 0.0, 0.0], [-3.0, 0.0, 3.0]]))


@pytest.mark.parametrize("columns", [1, 3, 129, 8193, 16385, 65537])
def test_number_of_columns_is_not_limited(columns: int) -> None:
    x, dy = torch.randn(3, columns), torch.randn(3, columns)
    actual = _run(tigon.sparsemax, x, dy)
    low, high = (_run(sparsemax_reference, t, dy) for t in (x, x.double()))
    for name, a, b, c in zip(("y", "dx"), actual, low, high, strict=True):
        assert_within_budget(name, a, b, c, floor=1e-7)


# NumPy warns where the interpreter computes what torch computes silently.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("columns", [5, 16_390])
def test_values_that_are_not_finite(backend: str, columns: int) -> None:
    x = torch.randn(6, columns)
    x[0] = -INF
    x[1, 2] = INF
    x[2, [1, 2]] = INF
    x[3, 4] = NAN
    x[4, :-1] = -INF
    x[5] = 3e38
    y = tigon.sparsemax(x)
    assert y[:4].isnan().all()
    assert y[4].tolist() == [0.0] * (columns - 1) + [1.0]
    torch.testing.assert_close(y[5], torch.full((columns,), 1 / columns))


@pytest.mark.parametrize("offset", [-3e4, 3e4])
def test_a_common_offset_changes_nothing(backend: str, offset: float) -> None:
    x = torch.randint(-64, 64, (3, 300)) / 64
    assert torch.equal(tigon.sparsemax(x + offset), tigon.sparsemax(x))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, 1:],
        lambda x: x.transpose(0, 2),
        lambda x: x.mT,
        lambda x: x[..., ::3],
        lambda x: x[:1].expand(4, -1, -1, -1),
        lambda x: x[..., :1].expand(-1, -1, -1, 5),
        lambda x: x[0, 0, 0],
        lambda x: x[:0],
    ],
)
def test_layouts(backend: str, view: Callable[[Tensor], Tensor]) -> None:
    x, dy = view(torch.randn(2, 3, 4, 30)), view(torch.randn(2, 3, 4, 30))
    actual, expected = _run(tigon.sparsemax, x, dy), _run(tigon.sparsemax, x.contiguous(), dy.contiguous())
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    assert x.numel() == 0 or actual[0].sum().item() == pytest.approx(x.numel() / x.shape[-1], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    x = torch.randn(4, 40).to(dtype)
    # The interpreter truncates where hardware rounds.
    with tigon.backend("torch" if x.is_cpu else "auto"):
        y, dx = _run(tigon.sparsemax, x, torch.randn(4, 40))
    assert (y.dtype, dx.dtype) == (dtype, dtype)
    torch.testing.assert_close(y, _project(x).to(dtype))


def test_saves_its_result_only() -> None:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = tigon.sparsemax(torch.randn(3, 5).requires_grad_())
    assert [t.data_ptr() for t in saved] == [y.data_ptr()]


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, dtype=torch.int64), "x: expected a floating-point dtype, got torch.int64"),
        (torch.tensor(1.0), "x: expected at least one axis, got a scalar"),
        (torch.zeros(2, 0), r"x: expected at least one column, got \(2, 0\)"),
        ([1.0], "x: expected a tensor, got list"),
    ],
)
def test_arguments_are_checked(x: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^sparsemax: {message}"):
        tigon.sparsemax(x)


def test_compiles_with_changing_shapes(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(tigon.sparsemax, fullgraph=True, backend="aot_eager")
    for rows in (5, 6, 8):
        x, dy = torch.randn(rows, 40), torch.randn(rows, 40)
        torch.testing.assert_close(_run(compiled, x, dy), _run(tigon.sparsemax, x, dy))


def test_registered_operators_are_sound() -> None:
    x = torch.randn(4, 9)
    torch.library.opcheck(torch.ops.tigon.sparsemax_fwd, (x,))
    torch.library.opcheck(torch.ops.tigon.sparsemax_bwd, (torch.ops.tigon.sparsemax_fwd(x), torch.randn(9, 4).mT))
