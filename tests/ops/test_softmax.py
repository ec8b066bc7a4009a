"""What the generic checks cannot say of `softmax` and `log_softmax`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tigon
from tigon.testing import assert_within_budget

NAN, INF = float("nan"), float("inf")
PAIRS = [(tigon.softmax, torch.softmax), (tigon.log_softmax, torch.log_softmax)]
both = pytest.mark.parametrize(("function", "plain"), PAIRS, ids=["softmax", "log_softmax"])


pytestmark = pytest.mark.usefixtures("on_device")


def _run(function: Callable[..., Tensor], x: Tensor, dy: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """The result and the gradient."""
    leaf = x.detach().requires_grad_()
    y = function(leaf, **options)
    y.backward(torch.ones_like(y) if dy is None else dy.to(y.dtype))
    assert leaf.grad is not None
    return y.detach(), leaf.grad


@both
@pytest.mark.parametrize("columns", [1, 3, 17, 127, 129, 1023, 32768, 32769, 65537, 256_000])
def test_number_of_columns_is_not_limited(backend: str, function: Any, plain: Any, columns: int) -> None:
    x, dy = 3 * torch.randn(3, columns), torch.randn(3, columns)
    actual = _run(function, x, dy)
    low, high = (_run(lambda t: plain(t, -1), t, dy) for t in (x, x.double()))
    for name, a, b, c in zip(("y", "dx"), actual, low, high, strict=True):
        # One column has no gradient, and torch's sum of so few terms is sometimes exact.
        assert_within_budget(name, a, b, c, floor=1e-7 if columns < 1000 else 0.0)


@both
# NumPy warns where the interpreter computes what torch computes silently.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("columns", [5, 32790])
def test_values_that_are_not_finite_are_torchs(backend: str, function: Any, plain: Any, columns: int) -> None:
    x = torch.randn(7, columns)
    x[0] = -INF
    x[1, 2] = INF
    x[2, [1, 2]] = INF
    x[3, 4] = NAN
    x[4, 0] = -INF
    x[5, :-1] = -INF
    x[6] = 3e38
    dy = torch.randn(7, columns)
    actual, expected = _run(function, x, dy), _run(lambda t: plain(t, -1), x, dy)
    torch.testing.assert_close(actual, expected, equal_nan=True)
    assert actual[0].isnan().any(-1).tolist() == [True, True, True, True, False, False, False]


@both
@pytest.mark.parametrize("columns", [50, 33_000])
def test_first_finite_element_may_come_late(backend: str, function: Any, plain: Any, columns: int) -> None:
    x = torch.full((2, columns), -INF)
    x[:, -1] = 1e4
    x[1, -2] = 1e4
    actual, expected = _run(function, x, x.isfinite()), _run(lambda t: plain(t, -1), x, x.isfinite())
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(tigon.softmax(x)[:, -1], torch.tensor([1.0, 0.5]))


@pytest.mark.parametrize("offset", [-3e4, 3e4])
def test_a_common_offset_changes_nothing(backend: str, offset: float) -> None:
    x = torch.randint(-64, 64, (3, 300)) / 16
    for function, _ in PAIRS:
        assert torch.equal(function(x + offset), function(x))


@both
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, 1:],
        lambda x: x.transpose(0, 2),
        lambda x: x.transpose(1, 3),
        lambda x: x[..., ::3],
        lambda x: x[:1].expand(4, -1, -1, -1),
        lambda x: x[..., :1].expand(-1, -1, -1, 5),
        lambda x: x[0, 0, 0],
        lambda x: x[..., :0],
        lambda x: x[:0],
    ],
)
def test_layouts(backend: str, function: Any, plain: Any, view: Callable[[Tensor], Tensor]) -> None:
    x, dy = view(torch.randn(2, 3, 4, 30)), view(torch.randn(2, 3, 4, 30))
    actual = _run(function, x, dy)
    expected = _run(function, x.contiguous(), dy.contiguous())
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    torch.testing.assert_close(actual, _run(lambda t: plain(t, -1), x, dy))


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_result_may_be_wider_than_the_input(function: Any, plain: Any, dtype: torch.dtype) -> None:
    x, dy = torch.randn(4, 40).to(dtype), torch.randn(4, 40)
    # The interpreter truncates where hardware rounds.
    with tigon.backend("torch" if x.is_cpu else "auto"):
        y, dx = _run(function, x, dy, dtype=torch.float32)
        narrow, _ = _run(function, x, dy)
    assert (y.dtype, dx.dtype, narrow.dtype) == (torch.float32, dtype, dtype)
    torch.testing.assert_close((y, dx), _run(lambda t: plain(t, -1, dtype=torch.float32), x, dy))


@both
def test_wider_result_of_the_kernel(function: Any, plain: Any) -> None:
    """fp16 goes through the interpreter, which rounds it as hardware does."""
    x, dy = torch.randn(4, 40).half(), torch.randn(4, 40)
    assert tigon.why_not(function, x, dtype=torch.float32) == []
    actual = _run(function, x, dy, dtype=torch.float32)
    torch.testing.assert_close(actual, _run(lambda t: plain(t, -1, dtype=torch.float32), x, dy))


def test_logarithm_in_fp32_keeps_small_probabilities() -> None:
    x = torch.tensor([[10.0, 0.3, -1.1]]).half()
    exact = torch.log_softmax(x.double(), -1)
    assert (tigon.log_softmax(x, dtype=torch.float32) - exact).abs().max() < 2e-6
    assert (tigon.log_softmax(x) - exact).abs().max() > 1e-4


@both
def test_gradients_of_logits_sum_to_zero(backend: str, function: Any, plain: Any) -> None:
    _, dx = _run(function, 2 * torch.randn(6, 1000), torch.randn(6, 1000))
    assert dx.sum(-1).abs().max() < 1e-5 * dx.abs().sum(-1).max()


@both
def test_saves_its_result_only(function: Any, plain: Any) -> None:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = function(torch.randn(3, 5).requires_grad_())
    assert [t.data_ptr() for t in saved] == [y.data_ptr()]


@both
@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.zeros(2, dtype=torch.int64), {}, "x: expected a floating-point dtype, got torch.int64"),
        (torch.tensor(1.0), {}, "x: expected at least one axis, got a scalar"),
        ([1.0], {}, "x: expected a tensor, got list"),
        (
            torch.zeros(2),
            {"dtype": torch.float16},
            "dtype: expected None or one that holds all values of torch.float32",
        ),
        (torch.zeros(2).half(), {"dtype": torch.bfloat16}, "dtype: expected None or one that holds all values"),
        (torch.zeros(2), {"dtype": torch.int64}, "dtype: expected None or one that holds all values"),
    ],
)
def test_arguments_are_checked(function: Any, plain: Any, x: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{function.__name__}: {message}"):
        function(x, **options)


@both
@pytest.mark.parametrize("options", [{}, {"dtype": torch.float32}], ids=str)
def test_compiles_with_changing_shapes(backend: str, function: Any, plain: Any, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for rows in (5, 6, 8):
        x, dy = torch.randn(rows, 40), torch.randn(rows, 40)
        torch.testing.assert_close(_run(compiled, x, dy, **options), _run(function, x, dy, **options))


@pytest.mark.parametrize("log", [False, True])
def test_registered_operators_are_sound(log: bool) -> None:
    x = torch.randn(4, 9)
    torch.library.opcheck(torch.ops.tigon.softmax_fwd, (x, torch.float32, log))
    y = torch.ops.tigon.softmax_fwd(x, torch.float32, log)
    torch.library.opcheck(torch.ops.tigon.softmax_bwd, (y, torch.randn(9, 4).mT, torch.float32, log))
