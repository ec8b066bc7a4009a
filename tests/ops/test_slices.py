"""Tiles of rows and classes: that they cover everything, fit, and leave no trace in the result."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import tigon
from tigon.ops import _slices
from tigon.ops._slices import plan_tiles
from tigon.ops.linear_cross_entropy import linear_cross_entropy_reference

pytestmark = pytest.mark.usefixtures("on_device")

NAN, INF = float("nan"), float("inf")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "logit_scale": 0.7},
    {"reduction": "none", "softcap": 2.0},
    {"label_smoothing": 0.2, "z_loss": 1e-2, "num_items": 7},
]


def _inputs(num_rows: int, width: int, num_classes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    labels = torch.randint(num_classes, (num_rows,))
    labels[0] = -100
    return torch.randn(num_rows, width), torch.randn(num_classes, width), labels, torch.randn(num_classes)


def _run(function: Any, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor, **options: Any) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    loss = function(*leaves[:2], labels, bias=leaves[2], **options)
    upstream = torch.linspace(-1, 2, loss.numel()).view_as(loss) if loss.dim() else loss.new_tensor(1.5)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, upstream)]


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("num_rows", [0, 1, 100, 8192, 32768, 100_000, 1_000_000])
@pytest.mark.parametrize("num_classes", [1, 129, 32_000, 256_000])
def test_tiles_fit(num_rows: int, num_classes: int, itemsize: int) -> None:
    for max_bytes in (64 << 20, 1 << 20):
        tiles = plan_tiles(num_rows, num_classes, itemsize, max_bytes)
        assert tiles.num_rows >= 1
        assert tiles.num_cols >= 1
        assert tiles.num_rows * tiles.num_cols * itemsize <= max_bytes
    # Enough work a product, and few sums of dweight.
    tiles = plan_tiles(num_rows, num_classes, itemsize, 64 << 20)
    assert num_rows <= 8 * tiles.num_rows or num_rows > 8 * (64 << 20) // itemsize // 256


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_result_does_not_depend_on_tiles(options: dict[str, Any], backend: str) -> None:
    inputs = _inputs(21, 8, 300)
    expected = _run(linear_cross_entropy_reference, *inputs, **options)
    for tile in ((21, 128), (5, 128), (3, 256), (21, 304)):
        with mock.patch.object(_slices, "plan_tiles", lambda *_, tile=tile: _slices._Tiles(*tile)):
            actual = _run(tigon.linear_cross_entropy, *inputs, memory="min", **options)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def test_what_ignored_rows_hold_goes_nowhere(backend: str) -> None:
    hidden, weight, labels, bias = _inputs(21, 8, 300)
    expected = _run(tigon.linear_cross_entropy, hidden, weight, labels, bias, memory="min")
    hidden[0] = NAN
    for value in (NAN, INF):
        hidden[0] = value
        for a, b in zip(
            _run(tigon.linear_cross_entropy, hidden, weight, labels, bias, memory="min"), expected, strict=True
        ):
            assert torch.equal(a, b)
    labels[:] = -100
    assert all((t == 0).all() for t in _run(tigon.linear_cross_entropy, hidden, weight, labels, bias, memory="min"))


def test_excluded_classes(backend: str) -> None:
    """All classes of a tile."""
    hidden, weight, labels, bias = _inputs(9, 8, 400)
    bias[:256], labels[1:] = -INF, labels[1:] % 144 + 256
    with mock.patch.object(_slices, "plan_tiles", return_value=_slices._Tiles(9, 128)):
        actual = _run(tigon.linear_cross_entropy, hidden, weight, labels, bias, memory="min")
    expected = _run(linear_cross_entropy_reference, hidden, weight, labels, bias)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype: torch.dtype) -> None:
    hidden, weight, labels, bias = _inputs(21, 16, 300)
    for cast in (True, False):
        given = [t if cast or not t.is_floating_point() else t.to(dtype) for t in (hidden, weight, labels, bias)]
        with torch.autocast("cpu" if hidden.device.type == "cpu" else "cuda", dtype, enabled=cast):
            actual = _run(tigon.linear_cross_entropy, *given, memory="min")
            expected = _run(linear_cross_entropy_reference, *given)
        for a, b in zip(actual, expected, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)


def test_losses_alone_make_no_gradients_and_few_logits() -> None:
    hidden, weight, labels, bias = _inputs(21, 8, 300)
    with (
        torch.no_grad(),
        mock.patch("tigon.ops._linear_cross_entropy.sliced_statistics", wraps=_slices.sliced_statistics) as spy,
    ):
        loss = tigon.linear_cross_entropy(hidden, weight, labels, bias=bias)
    assert spy.call_count == 1
    torch.testing.assert_close(loss, linear_cross_entropy_reference(hidden, weight, labels, bias=bias))


def test_arguments_are_checked() -> None:
    hidden, weight, labels, _ = _inputs(3, 8, 30)
    with pytest.raises(ValueError, match="linear_cross_entropy: memory: expected one of 'default', 'min', got 'least'"):
        tigon.linear_cross_entropy(hidden, weight, labels, memory="least")
    with pytest.raises(ValueError, match="memory: expected 'default' with smoothing and class_weight, got min"):
        tigon.linear_cross_entropy(
            hidden, weight, labels, memory="min", label_smoothing=0.1, class_weight=torch.ones(30)
        )


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_compiles(is_dynamic: bool, backend: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(tigon.linear_cross_entropy, fullgraph=True, dynamic=is_dynamic, backend="aot_eager")
    for num_rows in (5, 9):
        inputs = _inputs(num_rows, 8, 300)
        for a, b in zip(
            _run(compiled, *inputs, memory="min"), _run(linear_cross_entropy_reference, *inputs), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def test_fp16_keeps_the_loss_scale_out_of_hidden(backend: str) -> None:
    hidden = (10 * torch.eye(16)[:8]).half().requires_grad_()
    weight = torch.eye(16).half().requires_grad_()
    loss = tigon.linear_cross_entropy(hidden, weight, torch.arange(8), memory="min")
    assert all(g.isfinite().all() for g in torch.autograd.grad(65536.0 * loss, (hidden, weight)))


def test_backward_inside_autocast(backend: str) -> None:
    inputs = _inputs(40, 16, 300)
    expected = _run(tigon.linear_cross_entropy, *inputs, memory="min", max_logits_bytes=20_000)
    leaves = [t.clone().requires_grad_() for t in (inputs[0], inputs[1], inputs[3])]
    loss = tigon.linear_cross_entropy(*leaves[:2], inputs[2], bias=leaves[2], memory="min", max_logits_bytes=20_000)
    with torch.autocast("cpu" if inputs[0].device.type == "cpu" else "cuda", torch.bfloat16):
        actual = torch.autograd.grad(loss, leaves, loss.new_tensor(1.5))
    for a, b in zip(actual, expected[1:], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("tile", [(21, 128), (5, 128)])
def test_main_grad_is_added_to(tile: tuple[int, int], options: dict[str, Any], backend: str) -> None:
    inputs = _inputs(21, 8, 300)
    expected = _run(linear_cross_entropy_reference, *inputs, **options)
    leaves = [t.clone().requires_grad_() for t in (inputs[0], inputs[1], inputs[3])]
    main_grad = torch.randn(300, 8)
    before = main_grad.clone()
    with mock.patch.object(_slices, "plan_tiles", return_value=_slices._Tiles(*tile)):
        loss = tigon.linear_cross_entropy(
            *leaves[:2], inputs[2], bias=leaves[2], memory="min", main_grad=main_grad, **options
        )
        assert torch.equal(main_grad, before)
        upstream = torch.linspace(-1, 2, loss.numel()).view_as(loss) if loss.dim() else loss.new_tensor(1.5)
        loss.backward(upstream)
    assert leaves[1].grad is None
    for a, b in zip((leaves[0].grad, main_grad - before, leaves[2].grad), expected[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=4e-6)


def test_main_grad_of_half_precision_sums_in_fp32() -> None:
    hidden, weight, labels, _ = _inputs(64, 16, 300)
    leaves = [t.bfloat16().requires_grad_() for t in (hidden, weight)]
    main_grad = torch.zeros(300, 16)
    for _ in range(2):
        tigon.linear_cross_entropy(*leaves, labels, memory="min", main_grad=main_grad, skip_ignored=True).backward()
    wide = [t.detach().double().requires_grad_() for t in leaves]
    (2 * linear_cross_entropy_reference(*wide, labels)).backward()
    assert main_grad.dtype == torch.float32
    assert (main_grad - wide[1].grad).norm() < 0.01 * wide[1].grad.norm()
    # 16 bits of 1 would swallow what is added.
    offset = torch.ones(300, 16)
    tigon.linear_cross_entropy(*leaves, labels, memory="min", main_grad=offset, skip_ignored=True).backward()
    torch.testing.assert_close(offset - 1, main_grad / 2, rtol=0, atol=1e-6)


def test_main_grad_of_the_reference() -> None:
    hidden, weight, labels, _ = _inputs(9, 8, 30)
    main_grad = torch.ones(30, 8)
    linear_cross_entropy_reference(hidden, weight.requires_grad_(), labels, main_grad=main_grad).backward()
    assert weight.grad is None
    (expected,) = torch.autograd.grad(linear_cross_entropy_reference(hidden, weight, labels), weight)
    torch.testing.assert_close(main_grad, 1 + expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"main_grad": torch.zeros(30, 8)}, "memory: expected 'min' with main_grad, got default"),
        ({"memory": "min", "main_grad": torch.zeros(8, 30)}, r"main_grad: expected contiguous fp32 \(30, 8\)"),
        ({"memory": "min", "main_grad": torch.zeros(30, 8).half()}, "main_grad: expected contiguous fp32"),
    ],
)
def test_main_grad_is_checked(options: dict[str, Any], message: str) -> None:
    hidden, weight, labels, _ = _inputs(3, 8, 30)
    options = {k: v.to(hidden.device) if isinstance(v, Tensor) else v for k, v in options.items()}
    with pytest.raises(ValueError, match=message):
        tigon.linear_cross_entropy(hidden, weight.requires_grad_(), labels, **options)
    with pytest.raises(ValueError, match="weight: expected requires_grad with main_grad"):
        tigon.linear_cross_entropy(
            hidden, weight.detach(), labels, memory="min", main_grad=torch.zeros(30, 8, device=hidden.device)
        )
