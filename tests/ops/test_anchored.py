"""The layout of logits over the memory of a gradient, and rows whose anchor has to be raised."""

from __future__ import annotations

from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch import Tensor

import tigon
from tigon.ops import _anchored
from tigon.ops._anchored import plan_blocks
from tigon.ops._linear_cross_entropy import drive_anchored
from tigon.ops.linear_cross_entropy import linear_cross_entropy_reference
from tigon.testing import assert_within_budget

pytestmark = pytest.mark.usefixtures("on_device")

SIZES = [
    (8192, 4096, 128256),
    (16384, 4096, 128256),
    (8192, 2304, 256000),
    (8192, 1024, 151936),
    (4096, 4096, 128256),
    (2048, 4096, 128256),
    (6000, 5120, 151937),
    (300, 200, 50257),
    (4099, 4104, 50257),
    (300, 64, 1000),
    (3, 5, 300),
    (500, 2, 129),
]


@pytest.mark.parametrize(("num_rows", "width", "num_classes"), SIZES)
def test_no_gradient_is_written_over_logits_that_are_still_read(num_rows: int, width: int, num_classes: int) -> None:
    plan = plan_blocks(num_rows, width, num_classes)
    assert sum(plan.widths) == num_classes
    assert len(plan.widths) == len(plan.inside) + (plan.num_outside > 0)
    spans = [(start, start + num_rows * w) for start, w in zip(plan.inside, plan.widths, strict=False)]
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(start >= 0 and end <= num_classes * width for start, end in spans)
    assert all(start % 16 == 0 for start, _ in spans)
    done = 0
    for index, num_cols in enumerate(plan.widths):
        written = width * done, width * (done + num_cols)
        done += num_cols
        for start, end in spans[index:]:
            assert written[1] <= start or end <= written[0]


def test_what_lies_outside_is_little_more_than_what_does_not_fit() -> None:
    for num_rows, width, num_classes in SIZES[:7]:
        plan = plan_blocks(num_rows, width, num_classes)
        excess = max(0, num_rows - width) * num_classes
        assert plan.num_outside <= excess + num_classes * width / 9


def _case(num_rows: int, width: int, num_classes: int, spread: float) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(num_rows, width)
    weight = spread * torch.randn(num_classes, width)
    labels = torch.randint(num_classes, (num_rows,))
    labels[1] = -100
    return hidden, weight, labels


def _compare(hidden: Tensor, weight: Tensor, labels: Tensor, **options: object) -> None:
    leaves = [t.requires_grad_() for t in (hidden.clone(), weight.clone())]
    loss = tigon.linear_cross_entropy(*leaves, labels, **options)
    actual = [loss.detach(), *torch.autograd.grad(loss, leaves)]
    plain = {k: v for k, v in options.items() if k not in ("max_logits_bytes", "memory")}
    references = []
    for dtype in (torch.float32, torch.float64):
        leaves = [t.to(dtype).requires_grad_() for t in (hidden, weight)]
        loss = linear_cross_entropy_reference(*leaves, labels, **plain)
        references.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for name, a, low, high in zip(("loss", "dhidden", "dweight"), actual, *references, strict=True):
        assert_within_budget(name, a, low, high)


@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize("logit_scale", [None, 0.7])
@pytest.mark.parametrize("rows", [16, 48])
def test_logits_in_the_memory_of_dweight(rows: int, logit_scale: float | None, softcap: float | None) -> None:
    hidden, weight, labels = _case(48, 20, 1500, 0.3)
    places = []
    place = _anchored.place_blocks
    with (
        mock.patch("tigon.ops._linear_cross_entropy.place_blocks", lambda *a: places.append(a) or place(*a)),
        mock.patch("tigon.ops._linear_cross_entropy._SUM_BYTES", 4 * 20 * rows),
        mock.patch("tigon.ops._linear_cross_entropy.TILE_ROWS", 16),
    ):
        plan = plan_blocks(48, 20, 1500)
        _compare(
            hidden, weight, labels, softcap=softcap, logit_scale=logit_scale, max_logits_bytes=4 * plan.num_outside
        )
        assert len(places) == 1
        assert len(plan.widths) > 2
        _compare(
            hidden, weight, labels, softcap=softcap, logit_scale=logit_scale, max_logits_bytes=4 * plan.num_outside - 4
        )
        assert len(places) == 1


@pytest.mark.parametrize(
    ("num_rows", "width", "num_classes", "room"),
    [(8192, 2304, 256000, 1.25), (32768, 4096, 128256, 1.25), (16384, 2048, 128256, 1.25), (5000, 1000, 50257, 0.15)],
)
def test_the_first_rows_in_the_memory_of_dweight_spare_a_chunk(
    num_rows: int, width: int, num_classes: int, room: float
) -> None:
    max_elements = int(room * 2**29)
    row = _anchored.padded(num_classes)
    plan = _anchored.plan_rows(num_rows, width, num_classes, max_elements)
    assert plan is not None
    assert plan.num_outside <= max_elements
    assert plan.num_outside >= max(plan.blocks.num_outside, row * plan.step)
    rest = num_rows - plan.num_first
    assert plan.num_chunks == 1 + -(-rest // plan.step) < -(-num_rows // (max_elements // row // 256 * 256))


def test_first_rows_in_the_memory_of_dweight_and_the_others_in_chunks() -> None:
    hidden, weight, labels = _case(74, 20, 1500, 0.3)
    places = []
    place = _anchored.place_blocks
    _anchored.plan_rows.cache_clear()
    with (
        mock.patch("tigon.ops._linear_cross_entropy.place_blocks", lambda *a: places.append(a) or place(*a)),
        mock.patch("tigon.ops._linear_cross_entropy._FREE_SUM_BYTES", 0),
        mock.patch("tigon.ops._anchored._ROW_ALIGN", 16),
    ):
        _compare(hidden, weight, labels, max_logits_bytes=4 * 1504 * 36)
    _anchored.plan_rows.cache_clear()
    ((plan, _, num_first, outside),) = places
    assert 16 <= num_first < 74
    assert len(plan.widths) > 1
    assert outside.numel() <= 1504 * 36


@pytest.mark.parametrize("spread", [1e-3, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize("num_classes", [300, 9000])
def test_any_spread_of_logits(num_classes: int, spread: float) -> None:
    _compare(*_case(6, 8, num_classes, spread))


@pytest.mark.parametrize("max_logits_bytes", [None, 4 * 20 * 9000 - 4])
@pytest.mark.parametrize("loss", [1e-4, 0.1, 30.0, 500.0])
def test_the_label_anywhere_far_above_or_below(loss: float, max_logits_bytes: int | None) -> None:
    """One large logit in each tile, in rising and falling order."""
    hidden, weight, _ = _case(20, 8, 9000, 0.01)
    labels = torch.tensor([0, 4095, 4096, 8191, 8192, 8999, 5, -100, 4097, 17] * 2)
    for column in range(20):
        hidden[column] = 0
        hidden[column, column % 8] = 1
    for column in range(8):
        steps = torch.tensor([1.0, 90.0, 200.0]) * (1 if column % 2 else -1)
        for tile, step in enumerate(steps):
            weight[tile * 4096 + 100 + column, column] = step
    top = (hidden @ weight.T).logsumexp(-1)
    # The loss of each row is about `loss`.
    weight[labels[labels >= 0]] = 0
    target = top + (-torch.log(torch.expm1(torch.tensor(loss, dtype=torch.float64)))).float()
    bias_like = torch.zeros(9000)
    for row, label in enumerate(labels.tolist()):
        if label >= 0:
            bias_like[label] = target[row]
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    out = tigon.linear_cross_entropy(
        *leaves, labels, bias=bias_like, reduction="sum", max_logits_bytes=max_logits_bytes
    )
    actual = [out.detach(), *torch.autograd.grad(out, leaves)]
    references = []
    for dtype in (torch.float32, torch.float64):
        wide = [t.detach().to(dtype).requires_grad_() for t in leaves]
        plain = linear_cross_entropy_reference(*wide, labels, bias=bias_like.to(dtype), reduction="sum")
        references.append([plain.detach(), *torch.autograd.grad(plain, wide)])
    for name, a, low, high in zip(("loss", "dhidden", "dweight"), actual, *references, strict=True):
        assert_within_budget(name, a, low, high)


def test_classes_that_are_excluded() -> None:
    hidden, weight, labels = _case(20, 8, 9000, 1.0)
    bias = torch.zeros(9000)
    bias[:4200] = float("-inf")
    labels = labels.clamp(min=4200).masked_fill(labels == -100, -100)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    loss = tigon.linear_cross_entropy(*leaves, labels, bias=bias)
    expected = linear_cross_entropy_reference(hidden[:], weight[4200:], labels - 4200 * (labels >= 0))
    torch.testing.assert_close(loss, expected)
    for a, b in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_takes_this_path() -> None:
    hidden, weight, labels = _case(5, 8, 40, 1.0)
    for options, count in (({}, 1), ({"label_smoothing": 0.1}, 0), ({"z_loss": 0.1}, 0), ({"reduction": "none"}, 0)):
        with mock.patch("tigon.ops.linear_cross_entropy.drive_anchored", wraps=drive_anchored) as spy:
            tigon.linear_cross_entropy(hidden.requires_grad_(), weight, labels, **options)
        assert spy.call_count == count


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_the_entry_of_the_label_is_not_rounded(softcap: float | None) -> None:
    """It is most of the gradient; the factor of its row makes up for the 16 bits that it is stored in."""
    logits, labels = torch.randn(16, 1500, dtype=torch.float16), torch.randint(1500, (16,))
    ce, stats, one = torch.empty(16), torch.empty(16, 2), torch.ones(())
    stored = logits.clone()
    factors = _anchored.anchor_rows([stored], labels, ce, stats, one, -100, softcap, None)
    z = logits.double().requires_grad_()
    capped = z if softcap is None else softcap * torch.tanh(z / softcap)
    (exact,) = torch.autograd.grad(torch.nn.functional.cross_entropy(capped, labels, reduction="sum"), z)
    actual = factors.double().unsqueeze(-1) * stored.double()
    at = labels.unsqueeze(-1)
    torch.testing.assert_close(actual.gather(-1, at), exact.gather(-1, at), rtol=3e-6, atol=0)
    torch.testing.assert_close(actual, exact, rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("memory", ["default", "min"])
def test_a_scale_of_zero(memory: str) -> None:
    _compare(*_case(6, 8, 300, 1.0), logit_scale=0.0, memory=memory)
