"""Everything around the product with an epilogue, which itself is stood in for: kernels, labels, blocks and tiles."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from tests.ops import hopper
from torch import Tensor

import tigon
from tigon.ops import _anchored, _choice, _hopper
from tigon.ops.linear_cross_entropy import linear_cross_entropy_reference
from tigon.ops.rms_norm_mlp import rms_norm_mlp_reference
from tigon.testing import assert_within_budget


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("_hopper_cross_entropy", "_hopper_glu", "_hopper_sum"):
        monkeypatch.setattr(f"tigon.ops.{module}.multiply", hopper.multiply)
        monkeypatch.setattr(f"tigon.ops.{module}.can_multiply", lambda *_: True)
    _choice.offered.clear()


def _leaves(*tensors: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [t.detach().to(dtype).requires_grad_() for t in tensors]


def _compare(hidden: Tensor, weight: Tensor, labels: Tensor, factor: float = 3.0, **options: object) -> None:
    plain = {k: v for k, v in options.items() if k not in ("max_logits_bytes", "memory")}
    runs = []
    for function, dtype, given in (
        (tigon.linear_cross_entropy, torch.float32, options),
        (linear_cross_entropy_reference, torch.float32, plain),
        (linear_cross_entropy_reference, torch.float64, plain),
    ):
        leaves = _leaves(hidden, weight, dtype=dtype)
        loss = function(*leaves, labels, **given)
        upstream = torch.linspace(0.5, 2.0, loss.numel(), dtype=dtype).view(loss.shape)
        runs.append([loss.detach(), *torch.autograd.grad(loss, leaves, upstream)])
    for name, a, low, high in zip(("loss", "dhidden", "dweight"), *runs, strict=True):
        assert_within_budget(name, a, low, high, factor=factor)


def _case(num_rows: int, num_classes: int, spread: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = torch.randn(num_rows, 24), spread * torch.randn(num_classes, 24)
    labels = torch.randint(num_classes, (num_rows,))
    labels[3::5] = -100
    return hidden, weight, labels


@pytest.mark.parametrize("memory", ["default", "min"])
@pytest.mark.parametrize("logit_scale", [None, 0.7])
@pytest.mark.parametrize(("num_rows", "num_classes"), [(1, 3), (70, 256), (130, 700), (65, 2049)])
def test_loss_and_gradients(num_rows: int, num_classes: int, logit_scale: float | None, memory: str) -> None:
    _compare(*_case(num_rows, num_classes), memory=memory, logit_scale=logit_scale)
    expected = "anchored product" if memory == "default" else "product into dlogits"
    assert expected in _choice.offered


@pytest.mark.parametrize("options", [{"reduction": "none"}, {"reduction": "sum"}, {"num_items": 7}, {"z_loss": 1e-2}])
def test_options(options: dict[str, object]) -> None:
    for memory in ("default", "min"):
        _compare(*_case(70, 700), memory=memory, **options)


def test_every_label_is_found_wherever_it_lies() -> None:
    hidden, weight, _ = _case(64 * 3, 600)
    for shift in (0, 255, 256, 407):
        labels = (torch.arange(192) * 3 + shift) % 600
        for memory in ("default", "min"):
            _compare(hidden, weight, labels, memory=memory)


@pytest.mark.parametrize("memory", ["default", "min"])
@pytest.mark.parametrize("spread", [1e-3, 5.0, 200.0])
def test_any_spread_of_logits(spread: float, memory: str) -> None:
    """With 200 a logit of another tile is far above that of the label, and tiles before it are scaled.

    Logits of thousands times a constant lose digits of fp32, which are many more than those of a 16-bit gradient.
    """
    _compare(*_case(40, 900, spread), memory=memory, factor=3.0 if spread < 100 or memory == "default" else 32.0)


# The interpreter warns of 0 * inf before that is left out.
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("memory", ["default", "min"])
def test_ignored_rows_may_hold_anything(memory: str) -> None:
    hidden, weight, labels = _case(70, 700)
    for value in (float("nan"), float("inf")):
        leaves = _leaves(hidden, weight)
        rows = leaves[0].masked_fill((labels == -100).unsqueeze(-1), value)
        loss = tigon.linear_cross_entropy(rows, leaves[1], labels, memory=memory)
        assert all(torch.isfinite(t).all() for t in (loss, *torch.autograd.grad(loss, leaves)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("memory", ["default", "min"])
def test_upstream_gradients_of_ignored_rows_may_be_anything(memory: str, value: float) -> None:
    hidden, weight, labels = _case(70, 700)
    leaves = _leaves(hidden, weight)
    loss = tigon.linear_cross_entropy(*leaves, labels, reduction="none", memory=memory)
    upstream = torch.ones(70).masked_fill(labels == -100, value)
    assert all(torch.isfinite(t).all() for t in torch.autograd.grad(loss, leaves, upstream))


def test_expanded_and_overlapping_rows_are_not_for_descriptors() -> None:
    rows = torch.zeros(8, 16, dtype=torch.bfloat16)
    assert _hopper._is_loadable(rows)
    for t in (rows[:1].expand(8, 16), rows.view(-1).as_strided((4, 16), (8, 1)), rows.t(), rows[:0], rows.float()):
        assert not _hopper._is_loadable(t)
    assert not _hopper._is_loadable(rows.view(-1)[1:113].view(7, 16))


def test_blocks_in_the_memory_of_dweight_and_tiles_over_rows_and_classes() -> None:
    hidden, weight, labels = _case(48, 3000)
    plan = _anchored.plan_blocks(48, 24, 3000)
    assert len(plan.widths) > 2
    with mock.patch("tigon.ops._anchored._ROW_ALIGN", 16):
        _anchored.plan_rows.cache_clear()
        _compare(hidden, weight, labels, max_logits_bytes=4 * plan.num_outside)
    _anchored.plan_rows.cache_clear()
    _compare(hidden, weight, labels, memory="min", max_logits_bytes=4 * 3008)


def test_a_label_that_is_no_class_gives_nan() -> None:
    """A CPU refuses it before; a GPU cannot."""
    hidden, weight, labels = _case(70, 700)
    labels[:2] = torch.tensor([700, -1])
    for memory in ("default", "min"):
        with mock.patch("tigon.ops.linear_cross_entropy.checked_labels", lambda _, labels, *rest: labels):
            leaves = _leaves(hidden, weight)
            loss = tigon.linear_cross_entropy(*leaves, labels, reduction="none", memory=memory)
            (dhidden,) = torch.autograd.grad(loss.sum(), leaves[:1])
        assert torch.isnan(loss[:2]).all()
        assert torch.isfinite(loss[2:]).all()
        assert torch.isnan(dhidden[:2]).all()
        assert torch.isfinite(dhidden[2:]).all()


@pytest.mark.parametrize(
    "ways",
    [
        ("one kernel for gate and up", "one kernel through glu", "both products at once"),
        ("products, then glu", "product, then through glu", "one product after the other"),
    ],
)
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("frozen", [(), ("x", "norm_weight"), ("gate_weight",), ("down_weight",)])
def test_gate_and_up_at_once(
    frozen: tuple[str, ...], has_bias: bool, is_packed: bool, gate_first: bool, ways: tuple[str, ...]
) -> None:
    if not (is_packed or gate_first):
        return
    gate, up, biases = torch.randn(24, 16), torch.randn(24, 16), [torch.randn(24), torch.randn(24)]
    inputs = {"x": torch.randn(5, 3, 16), "norm_weight": 1 + 0.1 * torch.randn(16), "down_weight": torch.randn(16, 24)}
    inputs |= {"gate_weight": torch.cat((gate, up))} if is_packed else {"gate_weight": gate, "up_weight": up}
    if has_bias:
        inputs |= (
            {"gate_bias": torch.cat(biases)} if is_packed else dict(zip(("gate_bias", "up_bias"), biases, strict=True))
        )

    def run(function: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
        given = {k: v.to(dtype).requires_grad_(k not in frozen) for k, v in inputs.items()}
        leaves = [t for k, t in given.items() if k not in frozen]
        y = function(**{"up_weight": None, **given}, gate_first=gate_first, residual=True)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]

    with _choice.forced(*ways):
        actual = run(tigon.rms_norm_mlp)
    assert ways[0] in _choice.offered
    # Without a gradient of the down projection the product is not wanted.
    assert (ways[1] in _choice.offered) == ("down_weight" not in frozen)
    assert (ways[2] in _choice.offered) == ("x" not in frozen and not is_packed)
    low, high = run(rms_norm_mlp_reference), run(rms_norm_mlp_reference, torch.float64)
    for index, tensors in enumerate(zip(actual, low, high, strict=True)):
        assert_within_budget(str(index), *tensors, factor=3.0)
