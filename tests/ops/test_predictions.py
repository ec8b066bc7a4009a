"""`return_predictions` of `linear_cross_entropy`, on each of the ways over its logits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from tigon.ops import _linear_cross_entropy as drivers
from tigon.ops import _slices

NAN, INF = float("nan"), float("inf")

pytestmark = pytest.mark.usefixtures("on_device")


def _inputs(rows: int, width: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and labels, of which the third is ignored."""
    labels = torch.randint(0, classes, (rows,))
    labels[2] = -100
    return torch.randn(rows, width), torch.randn(classes, width) * width**-0.5, labels


# Of both kinds: rows at a time, and with 6 rows and 256 classes a tile, tiles of both.
PREDICTED = {"return_predictions": True, "max_logits_bytes": 4 * 6 * 272}


def _ties() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each row has its largest logit twice, in two tiles."""
    hidden, weight, labels = _inputs(13, 8, 300)
    bias = torch.randn(300)
    weight[270:300], bias[270:300] = weight[:30], bias[:30]
    weight[30:270] *= 0.1
    bias[30:270] = 0
    return hidden, weight, labels, bias


def _gradients(loss: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, leaves, torch.linspace(-1, 2, loss.numel()).view_as(loss))


@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 3.0}, {"logit_scale": -0.5}, {"logit_scale": 0.0}, {"z_loss": 0.1, "return_z_loss": True}],
    ids=str,
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("memory", ["default", "min"])
def test_predictions_are_the_first_of_the_largest_logits(
    backend: str, memory: str, reduction: str, options: dict[str, Any]
) -> None:
    hidden, weight, labels, bias = _ties()
    logits = F.linear(hidden, weight, bias) * options.get("logit_scale", 1.0)
    expected = (logits if "softcap" not in options else 3 * torch.tanh(logits / 3)).argmax(-1)
    assert (expected < 30).all() or "logit_scale" in options
    expected[labels == -100] = -1
    hidden[labels == -100] = NAN
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
    options = {"reduction": reduction, "memory": memory, "bias": bias, "max_logits_bytes": 4 * 6 * 272, **options}
    plain = tigon.linear_cross_entropy(hidden, weight, labels, **options)
    for skip_ignored in (False, True):
        out = tigon.linear_cross_entropy(
            hidden, weight, labels, skip_ignored=skip_ignored, return_predictions=True, **options
        )
        assert isinstance(out, tigon.LinearCrossEntropyOutput)
        assert torch.equal(out.predictions, expected)
        assert out.predictions.dtype == torch.int64
        assert not out.predictions.requires_grad
    with torch.no_grad():
        assert torch.equal(
            tigon.linear_cross_entropy(hidden, weight, labels, return_predictions=True, **options).predictions, expected
        )
    # Asking for them changes nothing else.
    out = tigon.linear_cross_entropy(hidden, weight, labels, return_predictions=True, **options)
    losses = (plain, None) if isinstance(plain, Tensor) else plain
    assert torch.equal(out.loss, losses[0])
    assert out.z_loss is losses[1] or torch.equal(out.z_loss, losses[1])
    for a, b in zip(_gradients(out.loss, leaves), _gradients(losses[0], leaves), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("memory", ["default", "min"])
def test_predictions_without_a_finite_logit(backend: str, memory: str) -> None:
    hidden, weight, labels = _inputs(5, 8, 300)
    for excluded, expected in ((290, 290), (300, 0)):
        bias = torch.zeros(300)
        bias[:excluded] = -INF
        out = tigon.linear_cross_entropy(hidden * 0, weight, labels, bias=bias, memory=memory, **PREDICTED)
        assert out.predictions.tolist() == [expected, expected, -1, expected, expected]


@pytest.mark.parametrize("skip_ignored", [False, True])
@pytest.mark.parametrize("rows", [0, 4])
def test_predictions_without_a_valid_row(backend: str, rows: int, skip_ignored: bool) -> None:
    labels = torch.full((2, rows), -100)
    hidden, weight = torch.full((2, rows, 8), NAN), torch.randn(300, 8, requires_grad=True)
    out = tigon.linear_cross_entropy(hidden, weight, labels, skip_ignored=skip_ignored, return_predictions=True)
    assert torch.equal(out.predictions, torch.full((2, rows), -1))


def test_predictions_of_blocks_in_the_memory_of_dweight() -> None:
    hidden, weight, labels = _inputs(48, 20, 1500)
    with mock.patch.object(drivers, "place_blocks", wraps=drivers.place_blocks) as spy:
        out = tigon.linear_cross_entropy(
            hidden, weight.requires_grad_(), labels, return_predictions=True, max_logits_bytes=4 * 1504 * 47
        )
    assert spy.call_count == 1
    assert torch.equal(out.predictions, F.linear(hidden, weight).argmax(-1).masked_fill(labels == -100, -1))


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("returns", [False, True])
def test_predictions_take_no_way_that_has_no_logits(returns: bool, context: Callable[[], Any]) -> None:
    hidden, weight, labels = _inputs(5, 8, 300)
    offered: list[str] = []

    def spy(_: Any, ways: dict[str, Callable[[], Any]], device: torch.device) -> Any:
        offered.extend(ways)
        return list(ways.values())[-1]()

    with contextlib.ExitStack() as stack:
        for file in (drivers, _slices):
            stack.enter_context(mock.patch.object(file, "can_anchor", return_value=True))
            stack.enter_context(mock.patch.object(file, "take", spy))
        stack.enter_context(context())
        tigon.linear_cross_entropy(hidden, weight.requires_grad_(), labels, return_predictions=returns)
    assert len(offered) == (1 if returns else 2)


@pytest.mark.parametrize("options", [{}, {"memory": "min"}, {"z_loss": 0.1, "return_z_loss": True}], ids=str)
def test_predictions_compile(backend: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(tigon.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    for rows in (5, 6, 9):
        hidden, weight, labels = _inputs(rows, 8, 300)
        leaves = [t.requires_grad_() for t in (hidden, weight)]
        plain = tigon.linear_cross_entropy(hidden, weight, labels, **options)
        out = compiled(hidden, weight, labels, **PREDICTED, **options)
        expected = F.linear(hidden, weight).argmax(-1).masked_fill(labels == -100, -1)
        assert torch.equal(out.predictions, expected)
        loss = plain if isinstance(plain, Tensor) else plain.loss
        for a, b in zip(torch.autograd.grad(out.loss, leaves), torch.autograd.grad(loss, leaves), strict=True):
            torch.testing.assert_close(a, b)
        with torch.no_grad():
            assert torch.equal(compiled(hidden, weight, labels, **PREDICTED, **options).predictions, expected)
