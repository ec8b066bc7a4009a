"""What the generic checks cannot say of `linear_cross_entropy`."""

from __future__ import annotations

import importlib
import math
import os
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tests.ops.conftest import ProductSpy
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import tigon
from tigon.ops import _linear_cross_entropy as drivers
from tigon.ops import linear_cross_entropy_reference
from tigon.ops._projection import chunk_rows, row_stride
from tigon.testing import assert_within_budget, poison

# `tigon.ops.linear_cross_entropy` as an attribute is the function.
module = importlib.import_module("tigon.ops.linear_cross_entropy")

NAN, INF = float("nan"), float("inf")
# The interpreter truncates to 16 bits where hardware rounds.
HALF = "torch" if os.environ["TIGON_TEST_DEVICE"] == "cpu" else "auto"
NAMES = ("loss", "dhidden", "dweight", "dbias")


pytestmark = pytest.mark.usefixtures("on_device")


def _inputs(rows: int, width: int, classes: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and labels, of which the third is ignored."""
    labels = torch.randint(0, classes, (rows,))
    if rows > 2:
        labels[2] = -100
    return torch.randn(rows, width, **options), torch.randn(classes, width, **options) * width**-0.5, labels


def _run(
    function: Callable[..., Any],
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    upstream: Tensor | float = 1.0,
    **options: Any,
) -> tuple[Tensor, ...]:
    """The loss, then the gradients of hidden, weight and bias."""
    # Options may have been written before the device was known; a count may be anywhere.
    options = {k: v.to(hidden.device) if k == "class_weight" else v for k, v in options.items()}
    leaves = [None if t is None else t.detach().requires_grad_() for t in (hidden, weight, bias)]
    loss = function(leaves[0], leaves[1], labels, bias=leaves[2], **options)
    loss.backward(torch.as_tensor(upstream, dtype=loss.dtype).expand(loss.shape))
    return loss.detach(), *(t.grad for t in leaves if t is not None)


def _assert_within_budget(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, **options: Any
) -> None:
    """Loss and gradients against the reference in the same dtype and in fp64."""
    plain = {k: v for k, v in options.items() if k != "max_logits_bytes"}
    wide = (hidden.double(), weight.double(), labels, None if bias is None else bias.double())
    actual = _run(tigon.linear_cross_entropy, hidden, weight, labels, bias, **options)
    low = _run(linear_cross_entropy_reference, hidden, weight, labels, bias, **plain)
    high = _run(linear_cross_entropy_reference, *wide, **plain)
    for name, a, b, c in zip(NAMES, actual, low, high, strict=False):
        assert_within_budget(name, a, b, c)


# Values.


def test_upstream_gradient_of_each_row(backend: str) -> None:
    hidden, weight, bias = (torch.randn(*shape, dtype=torch.float64) for shape in ((5, 4), (7, 4), (7,)))
    labels, upstream = torch.tensor([-100, 1, 2, 3, 6]), torch.tensor([0.0, 1.0, 2.0, 0.0, 0.5])
    for dtype in (torch.float64, torch.float32):
        given = [t.to(dtype) for t in (hidden, weight)]
        actual = _run(
            tigon.linear_cross_entropy, *given, labels, bias.to(dtype), upstream, reduction="none", max_logits_bytes=256
        )
        leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
        loss = F.cross_entropy(F.linear(*leaves), labels, reduction="none")
        expected = (loss.detach(), *torch.autograd.grad(loss, leaves, upstream.double()))
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b.to(dtype))
        assert (actual[1][[0, 3]] == 0).all()
        assert (actual[1][[1, 2, 4]] != 0).any(-1).all()


def test_padding_of_the_vocabulary_does_not_enter(backend: str) -> None:
    """Classes beyond the last, with logits of 0, would raise log V to 24.84."""
    for classes in (129, 151_937):
        hidden, weight = torch.ones(1, 1), torch.full((classes, 1), -20.0)
        loss = tigon.linear_cross_entropy(hidden, weight, torch.tensor([classes - 1]))
        assert loss.item() == pytest.approx(math.log(classes), abs=2e-5)


def test_large_bias_over_chunks(backend: str) -> None:
    hidden, weight, labels = _inputs(11, 8, 133)
    bias = 5 + 5 * torch.rand(133)
    _assert_within_budget(hidden, weight, labels, bias, max_logits_bytes=3 * 133 * 4)
    rows = tigon.linear_cross_entropy(hidden, weight, labels, bias=bias, reduction="none")
    assert (rows >= 0).all()
    torch.testing.assert_close(rows, F.cross_entropy(F.linear(hidden, weight, bias), labels, reduction="none"))


def test_scale_comes_before_the_cap(backend: str) -> None:
    """100 * 0.5 under a cap of 30 is 27.933288; the other order gives 14.961870."""
    hidden, weight = torch.ones(1, 1), torch.tensor([[100.0], [0.0]])
    loss = tigon.linear_cross_entropy(hidden, weight, torch.tensor([1]), logit_scale=0.5, softcap=30.0)
    assert loss.item() == pytest.approx(27.933288, abs=3e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 0.1},
        {"z_loss": 0.1},
        {"softcap": 1.0},
        {"class_weight": torch.linspace(0.1, 2, 40)},
        {"ignore_index": 0},
        {"reduction": "sum"},
        {"num_items": 100},
        {"num_items": torch.tensor([100])},
        {"logit_scale": 0.5},
        {"bias": torch.linspace(-2, 2, 40)},
    ],
    ids=str,
)
def test_no_option_is_dropped(backend: str, options: dict[str, Any]) -> None:
    hidden, weight, labels = _inputs(9, 8, 40)
    labels[0], bias = 0, options.get("bias")
    bias = None if bias is None else bias.to(hidden.device)
    options = {k: v.to(hidden.device) if k == "class_weight" else v for k, v in options.items() if k != "bias"}
    plain = tigon.linear_cross_entropy(hidden, weight, labels.clamp(min=-100))
    if "ignore_index" in options:
        labels = labels.clamp(min=0)
    changed = tigon.linear_cross_entropy(hidden, weight, labels, bias=bias, **options)
    assert (changed - plain).abs() > 1e-3
    _assert_within_budget(hidden, weight, labels, bias, **options)


def test_zero_divisor_gives_zero(backend: str) -> None:
    hidden, weight, labels = _inputs(4, 8, 10)
    for count in (0, torch.tensor(0)):
        assert all((t == 0).all() for t in _run(tigon.linear_cross_entropy, hidden, weight, labels, num_items=count))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("max_logits_bytes", [None, 2 * 40 * 4])
@pytest.mark.parametrize("stored", [NAN, INF])
def test_what_an_ignored_row_holds_does_not_matter(
    backend: str, stored: float, max_logits_bytes: int | None, reduction: str
) -> None:
    hidden, weight, labels = _inputs(5, 8, 40)
    options = {"reduction": reduction, "max_logits_bytes": max_logits_bytes, "z_loss": 0.1}
    expected = _run(tigon.linear_cross_entropy, hidden, weight, labels, torch.randn(40).mul_(0), **options)
    hidden[2] = stored
    actual = _run(tigon.linear_cross_entropy, hidden, weight, labels, torch.zeros(40), **options)
    for name, a, b in zip(NAMES, actual, expected, strict=True):
        assert torch.equal(a, b), name
    assert (actual[1][2] == 0).all()
    reference = _run(linear_cross_entropy_reference, hidden, weight, labels, torch.zeros(40), reduction=reduction)
    assert all(torch.isfinite(t).all() for t in reference)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_ignored_is_zero(backend: str, reduction: str) -> None:
    hidden, weight, _ = _inputs(5, 8, 40)
    labels = torch.full((5,), -100)
    results = _run(tigon.linear_cross_entropy, hidden * NAN, weight, labels, torch.zeros(40), reduction=reduction)
    assert all((t == 0).all() for t in results)


# Gradients: which, how often, in which memory.


def test_gradcheck() -> None:
    """The closed form of the chunks, in fp64, with every option on."""
    hidden, weight, labels = _inputs(5, 3, 12, dtype=torch.float64)
    bias = torch.randn(12, dtype=torch.float64)
    for reduction in ("mean", "sum", "none"):
        options = {
            "label_smoothing": 0.2,
            "z_loss": 0.3,
            "softcap": 2.0,
            "class_weight": torch.rand(12),
            "logit_scale": 0.7,
            "reduction": reduction,
            "max_logits_bytes": 256,
        }

        def function(h: Tensor, w: Tensor, b: Tensor, options: Any = options) -> tuple[Tensor, ...]:
            return tuple(tigon.linear_cross_entropy(h, w, labels, bias=b, return_z_loss=True, **options))

        assert torch.autograd.gradcheck(function, [t.requires_grad_() for t in (hidden, weight, bias)])


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_grad_no_gradient_is_computed(backend: str, context: Callable[[], Any]) -> None:
    hidden, weight, labels = _inputs(7, 8, 48)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    expected = tigon.linear_cross_entropy(*leaves, labels)
    with context(), ProductSpy() as spy:
        loss = tigon.linear_cross_entropy(*leaves, labels, max_logits_bytes=4 * 48 * 4)
    torch.testing.assert_close(loss, expected.detach())
    assert not loss.requires_grad
    assert spy.products == 2
    assert not any(shape[-1:] == (8,) for shape, size in spy.made)


@pytest.mark.parametrize("trainable", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen_inputs_cost_nothing(backend: str, reduction: str, trainable: str) -> None:
    hidden, weight, labels = _inputs(7, 8, 40)
    given = {"hidden": hidden, "weight": weight, "bias": torch.randn(40)}
    expected = _run(linear_cross_entropy_reference, hidden, weight, labels, given["bias"], reduction=reduction)
    given[trainable].requires_grad_()
    with ProductSpy() as spy:
        loss = tigon.linear_cross_entropy(**given, labels=labels, reduction=reduction)
        loss.sum().backward()
    torch.testing.assert_close(given[trainable].grad, expected[1 + list(given).index(trainable)])
    assert all(t.grad is None for name, t in given.items() if name != trainable)
    assert spy.products == (1 if reduction == "mean" else 2) + (trainable != "bias")


def test_number_of_matrix_products(backend: str) -> None:
    hidden, weight, labels = _inputs(7, 8, 48)

    def products(use: Callable[[Any], Tensor], **options: Any) -> tuple[int, int]:
        leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        with ProductSpy() as forward:
            out = tigon.linear_cross_entropy(*leaves, labels, **options)
        with ProductSpy() as backward:
            use(out).backward()
        return forward.products, backward.products

    assert products(lambda loss: 3 * loss) == (3, 0)
    assert products(lambda loss: 3 * loss, max_logits_bytes=4 * 48 * 4) == (6, 0)
    assert products(lambda loss: loss.sum(), reduction="none") == (1, 3)
    # A z-loss that is only looked at costs nothing more.
    assert products(lambda out: out.loss, z_loss=0.1, return_z_loss=True) == (3, 0)
    assert products(lambda out: out.loss + out.z_loss, z_loss=0.1, return_z_loss=True) == (3, 3)


def test_both_outputs_have_a_gradient(backend: str) -> None:
    hidden, weight, labels = _inputs(6, 8, 20)
    for used in ((1.0, 0.0), (0.0, 1.0), (2.0, 3.0)):
        grads = []
        for function in (tigon.linear_cross_entropy, linear_cross_entropy_reference):
            leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            loss, z_loss = function(*leaves, labels, z_loss=0.3, return_z_loss=True)
            sum(factor * t for factor, t in zip(used, (loss, z_loss), strict=True) if factor).backward()
            grads.append([t.grad for t in leaves])
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("upstream", [1.0, 3.7])
def test_backward_may_run_again(backend: str, upstream: float, reduction: str) -> None:
    hidden, weight, labels = _inputs(9, 8, 48)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    loss = tigon.linear_cross_entropy(*leaves, labels, reduction=reduction, z_loss=0.1, max_logits_bytes=4 * 48 * 4)
    grads = [
        torch.autograd.grad(loss, leaves, torch.full_like(loss, factor * upstream), retain_graph=factor != 4)
        for factor in (1, 2, 3, 4)
    ]
    for factor, found in enumerate(grads, start=1):
        for a, b in zip(found, grads[0], strict=True):
            torch.testing.assert_close(a, factor * b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves, torch.ones_like(loss))


def test_gradients_are_handed_over_without_a_copy(backend: str) -> None:
    """The memory that forward filled becomes `.grad`, scaled in place; the upstream gradient is left alone."""
    hidden, weight, labels = _inputs(9, 8, 40)
    leaves = [hidden.requires_grad_(), weight.requires_grad_(), torch.zeros(40, requires_grad=True)]
    forward, made = module._fwd, []

    def spy(*args: Any) -> Any:
        out = forward(*args)
        made.extend(t.data_ptr() for t in out[3:6])
        return out

    with mock.patch.object(module, "_fwd", spy):
        loss = tigon.linear_cross_entropy(leaves[0], leaves[1], labels, bias=leaves[2])
    upstream = torch.tensor(2.0)
    loss.backward(upstream)
    assert [t.grad.data_ptr() for t in leaves] == made
    assert upstream == 2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_changes_nothing(backend: str, use_reentrant: bool) -> None:
    hidden, weight, labels = _inputs(5, 8, 40)

    def wrapped(h: Tensor, w: Tensor, y: Tensor, *, bias: None) -> Tensor:
        return checkpoint(tigon.linear_cross_entropy, h, w, y, use_reentrant=use_reentrant)

    expected = _run(tigon.linear_cross_entropy, hidden, weight, labels, upstream=0.3)
    actual = _run(wrapped, hidden, weight, labels, upstream=0.3)
    # Without a gradient the loss comes from tiles, whose sums have another order.
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-6, atol=0)
    for a, b in zip(actual[1:], expected[1:], strict=True):
        assert torch.equal(a, b)


def test_tied_weight_gets_both_gradients(backend: str) -> None:
    _, weight, labels = _inputs(9, 8, 40)
    ids, grads = torch.randint(0, 40, (9,)), []
    for function in (tigon.linear_cross_entropy, linear_cross_entropy_reference):
        tied = weight.detach().requires_grad_()
        (2 * function(F.embedding(ids, tied), tied, labels)).backward()
        grads.append(tied.grad)
    torch.testing.assert_close(*grads)


# Chunks.


def test_chunks_are_even_and_fit() -> None:
    rows = chunk_rows
    assert rows(8192, 128_256 * 2, 1 << 30) == 4096
    assert rows(8192, 256_000 * 2, 1 << 30) == 2048
    assert rows(8192, 32_000 * 2, 1 << 30) == 8192
    assert rows(0, 100, 100) == 0
    assert rows(7, 100, 399) == 3
    for num_rows in (1, 127, 128, 129, 1000, 4097, 10_000):
        for fit in (1, 3, 127, 128, 200, 5000):
            step = rows(num_rows, 10, 10 * fit + 9)
            assert 1 <= step <= max(fit, 1)
            assert step >= num_rows or fit < 128 or step % 128 == 0
            num_chunks = -(-num_rows // step)
            whole = fit if fit < 128 else fit // 128 * 128
            assert num_chunks <= -(-num_rows // whole)
            # The last chunk is no tail: it differs from the others by less than a tile a chunk.
            assert step * num_chunks - num_rows < (1 if fit < 128 else 128) * num_chunks


def test_result_does_not_depend_on_chunks(backend: str) -> None:
    hidden, weight, labels = _inputs(150, 8, 33)
    bias, options = torch.randn(33), {"z_loss": 0.01, "label_smoothing": 0.1}
    whole = _run(tigon.linear_cross_entropy, hidden, weight, labels, bias, **options)
    for rows in (7, 128, 149):
        parts = _run(tigon.linear_cross_entropy, hidden, weight, labels, bias, max_logits_bytes=rows * 132, **options)
        for name, a, b in zip(NAMES, parts, whole, strict=True):
            torch.testing.assert_close(
                a, b, atol=1e-7, rtol=1e-5, msg=lambda m, name=name, rows=rows: f"{name} {rows} {m}"
            )


def test_padding_between_rows_of_logits_is_left_out(backend: str) -> None:
    """Accelerators get rows of a multiple of 16 logits; what lies between them is never read."""
    assert row_stride(129, torch.device("cuda")) == 144
    assert row_stride(129, torch.device("cpu")) == 129
    hidden, weight, labels = _inputs(9, 8, 33)
    expected = _run(tigon.linear_cross_entropy, hidden, weight, labels, torch.ones(33), max_logits_bytes=4 * 48 * 4)
    with mock.patch.object(module, "row_stride", return_value=48), poison():
        actual = _run(tigon.linear_cross_entropy, hidden, weight, labels, torch.ones(33), max_logits_bytes=4 * 48 * 4)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.skipif(os.environ["TIGON_TEST_DEVICE"] != "cpu", reason="counts the bytes of unpadded rows")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_memory_stays_within_the_promise(rows: int, dtype: torch.dtype) -> None:
    """No tensor over the classes is larger than asked for, neither with gradients nor without."""
    hidden, weight, labels = _inputs(64, 8, 1000, dtype=dtype)
    limit = rows * 1000 * dtype.itemsize
    with tigon.backend("torch"), mock.patch.object(drivers, "CPU_SLICE_LOGITS", 1000), ProductSpy() as spy:
        tigon.linear_cross_entropy(
            hidden.requires_grad_(),
            weight.requires_grad_(),
            labels,
            softcap=3.0,
            label_smoothing=0.1,
            max_logits_bytes=limit,
        ).backward()
        tigon.linear_cross_entropy(
            hidden.detach(), weight, labels, reduction="none", max_logits_bytes=limit
        ).sum().backward()
    logits = [size for shape, size in spy.made if shape[-1:] == (1000,) and len(shape) == 2 and shape[0] != 8]
    assert logits
    # Slices of one row in fp32 are what the fallback computes with.
    assert max(logits) <= max(limit, 4000)
    assert max(size for shape, size in spy.made) <= max(limit, 1000 * 8 * 4)


def test_error_of_dweight_does_not_grow_with_chunks() -> None:
    """bf16 chunks are added up in fp32; a bf16 total would be ten times as wrong after 128 of them."""
    hidden, weight, labels = _inputs(2048, 32, 64, dtype=torch.bfloat16)
    exact = _run(linear_cross_entropy_reference, hidden.double(), weight.double(), labels)[2]
    errors = {}
    with tigon.backend(HALF):
        for chunks in (1, 16, 128):
            limit = 2048 // chunks * 64 * 2
            dweight = _run(tigon.linear_cross_entropy, hidden, weight, labels, max_logits_bytes=limit)[2]
            assert dweight.dtype == torch.bfloat16
            errors[chunks] = ((dweight.double() - exact).norm() / exact.norm()).item()
    assert errors[1] < 4e-3
    assert max(errors.values()) < 1.3 * errors[1]


@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_flat_distributions_keep_their_gradient(backend: str, scale: float) -> None:
    """No probability is too small to count: with all of them near 1 / V the gradient is that of torch."""
    hidden, weight, labels = _inputs(64, 16, 4096)
    _assert_within_budget(scale * hidden, scale * weight, labels, max_logits_bytes=20 * 4096 * 4)
    with tigon.backend(HALF):
        _assert_within_budget(scale * hidden.bfloat16(), scale * weight.bfloat16(), labels)


def test_fp16_gradients_survive_small_divisors() -> None:
    """1 / N of a probability is below the range of fp16; the loss scale must come first, as it does in torch."""
    hidden, weight, labels = _inputs(2048, 8, 512, dtype=torch.float16)
    with tigon.backend(HALF):
        actual = _run(tigon.linear_cross_entropy, hidden, weight, labels, upstream=65536.0)
    exact = _run(linear_cross_entropy_reference, hidden.double(), weight.double(), labels, upstream=65536.0)
    low = _run(linear_cross_entropy_reference, hidden, weight, labels, upstream=65536.0)
    for name, a, b, c in zip(NAMES, actual, low, exact, strict=False):
        assert_within_budget(name, a, b, c)


# Dtypes.


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("max_logits_bytes", [None, 16 * 40 * 2])
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_is_that_of_linear(hidden_dtype: torch.dtype, max_logits_bytes: int | None, reduction: str) -> None:
    hidden, weight, labels = _inputs(33, 8, 48)
    hidden, bias = hidden.to(hidden_dtype), torch.randn(48)
    wide = _run(
        linear_cross_entropy_reference, hidden.double(), weight.double(), labels, bias.double(), reduction=reduction
    )

    def cast(function: Callable[..., Any], **options: Any) -> tuple[Tensor, ...]:
        def inner(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(hidden.device.type, dtype=torch.bfloat16):
                return function(*args, **kwargs)

        return _run(inner, hidden, weight, labels, bias, reduction=reduction, **options)

    with tigon.backend(HALF):
        actual = cast(tigon.linear_cross_entropy, max_logits_bytes=max_logits_bytes)
    low = cast(linear_cross_entropy_reference)
    assert actual[0].dtype == torch.float32
    assert [t.dtype for t in actual[1:]] == [hidden_dtype, torch.float32, torch.float32]
    for name, a, b, c in zip(NAMES, actual, low, wide, strict=True):
        assert_within_budget(name, a, b, c)


def test_dtypes_that_linear_refuses_are_refused(backend: str) -> None:
    hidden, weight, labels = _inputs(4, 8, 10)
    message = r"weight: expected dtype torch.bfloat16 of hidden, got torch.float32"
    with pytest.raises(ValueError, match=message):
        tigon.linear_cross_entropy(hidden.bfloat16(), weight, labels)
    with pytest.raises(ValueError, match=r"bias: expected dtype torch.float32 of hidden, got torch.float64"):
        tigon.linear_cross_entropy(hidden, weight, labels, bias=torch.zeros(10, dtype=torch.float64))
    with (
        torch.autocast(hidden.device.type, dtype=torch.bfloat16),
        pytest.raises(ValueError, match="weight: expected dtype"),
    ):
        tigon.linear_cross_entropy(hidden, weight.double(), labels)


# Layouts and arguments.


def test_leading_axes_and_strides(backend: str) -> None:
    hidden, weight = torch.randn(2, 6, 8), torch.randn(8, 30).t()
    labels = torch.randint(0, 30, (2, 5))
    labels[1, 3] = -100
    flat = hidden[:, :-1].reshape(10, 8)
    for reduction in ("mean", "none"):
        actual = _run(tigon.linear_cross_entropy, hidden[:, :-1], weight, labels, reduction=reduction)
        expected = _run(tigon.linear_cross_entropy, flat, weight.contiguous(), labels.view(-1), reduction=reduction)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b.view(a.shape))
    one = tigon.linear_cross_entropy(hidden[0, 0], weight, labels[0, 0])
    torch.testing.assert_close(one, F.cross_entropy(F.linear(hidden[0, 0], weight), labels[0, 0]))


HIDDEN, WEIGHT, LABELS = torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("hidden", "weight", "labels", "options", "message"),
    [
        (HIDDEN.long(), WEIGHT, LABELS, {}, "hidden: expected a floating-point dtype, got torch.int64"),
        (HIDDEN, WEIGHT[0], LABELS, {}, r"weight: expected two axes, got shape \(4,\)"),
        (HIDDEN[:, :3], WEIGHT, LABELS, {}, r"hidden: expected last axis 4, got shape \(2, 3\)"),
        (HIDDEN, WEIGHT, LABELS[:1], {}, r"labels: expected shape \(2,\), got \(1,\)"),
        (HIDDEN, WEIGHT, LABELS + 3, {}, "labels: expected a class below 3 or ignore_index -100, got 3 in row 0"),
        (HIDDEN, WEIGHT, LABELS, {"bias": torch.zeros(4)}, r"bias: expected shape \(3,\), got \(4,\)"),
        (HIDDEN, WEIGHT.to("meta"), LABELS, {}, "weight: expected device cpu, got meta"),
        (HIDDEN, WEIGHT, LABELS, {"max_logits_bytes": 11}, "max_logits_bytes: expected at least 12, one row of logits"),
        (HIDDEN, WEIGHT, LABELS, {"logit_scale": torch.ones(())}, "logit_scale: expected a finite number in"),
        (HIDDEN, WEIGHT, LABELS, {"softcap": -1}, "softcap: expected a finite number above 0, got -1"),
        (HIDDEN, WEIGHT, LABELS, {"reduction": "none", "num_items": 2}, "num_items: expected None unless"),
    ],
)
def test_arguments_are_checked(
    backend: str, hidden: Tensor, weight: Tensor, labels: Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^linear_cross_entropy: {message}"):
        tigon.linear_cross_entropy(hidden, weight, labels, **options)


@pytest.mark.gpu
def test_label_that_is_no_class_on_a_gpu(device: torch.device) -> None:
    hidden, weight, labels = (t.to(device) for t in _inputs(5, 8, 40))
    labels[1] = 40
    loss, dhidden, dweight = _run(tigon.linear_cross_entropy, hidden, weight, labels, reduction="none")
    assert loss.isnan().tolist() == [False, True, False, False, False]
    assert dhidden.isnan().any(-1).tolist() == loss.isnan().tolist()
    assert dweight.isnan().all()


# Compiled.


@pytest.mark.parametrize(
    "options",
    [{"max_logits_bytes": 4 * 40 * 4}, {"z_loss": 0.1, "return_z_loss": True}, {"reduction": "none", "softcap": 3.0}],
    ids=str,
)
def test_compiles_with_changing_shapes(backend: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()

    def step(hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None) -> Tensor:
        out = tigon.linear_cross_entropy(hidden.sin(), weight, labels, bias=bias, **options)
        return out.sum() if isinstance(out, Tensor) else out.loss + 2 * out.z_loss

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for rows in (5, 6, 9):
        hidden, weight, labels = _inputs(rows, 8, 40)
        actual, expected = (_run(f, hidden, weight, labels, torch.ones(40), upstream=1.5) for f in (compiled, step))
        torch.testing.assert_close(actual, expected)


def test_compiled_for_one_trainable_input(backend: str) -> None:
    torch._dynamo.reset()
    hidden, weight, labels = _inputs(5, 8, 40)
    expected = _run(tigon.linear_cross_entropy, hidden, weight, labels)
    compiled = torch.compile(tigon.linear_cross_entropy, fullgraph=True, backend="aot_eager")
    weight.requires_grad_()
    compiled(hidden, weight, labels).backward()
    torch.testing.assert_close(weight.grad, expected[2])
    with torch.no_grad():
        torch.testing.assert_close(compiled(hidden, weight, labels), expected[0])


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.1, "return_z_loss": True}, {"reduction": "sum"}], ids=str)
def test_fake_tensors_have_shapes(backend: str, options: dict[str, Any]) -> None:
    """What estimates memory or exports a step runs it on tensors without values."""
    with FakeTensorMode():
        hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
        out = tigon.linear_cross_entropy(hidden, weight, torch.zeros(5, dtype=torch.int64), **options)
        (out if isinstance(out, Tensor) else out.loss).backward()
        assert hidden.grad.shape == (5, 8)
        assert weight.grad.shape == (40, 8)


def test_other_tensor_subclasses_go_to_plain_torch(backend: str) -> None:
    class Sharded(Tensor):
        pass

    hidden, weight, labels = _inputs(5, 8, 40)
    leaf = hidden.as_subclass(Sharded).requires_grad_()
    with mock.patch.object(module, "_fwd", side_effect=AssertionError):
        loss = tigon.linear_cross_entropy(leaf, weight, labels)
    loss.backward()
    torch.testing.assert_close(loss.as_subclass(Tensor).detach(), F.cross_entropy(hidden @ weight.t(), labels))


def test_registered_operators_are_sound() -> None:
    hidden, weight, labels = _inputs(5, 8, 48)
    inputs, factor = (hidden, weight, torch.zeros(48), labels, None), torch.tensor(0.2)
    for needs, is_sliced in (((True, True, True), False), ((False, True, False), False), ((True, True, True), True)):
        settings = (needs, torch.float32, 0.1, 4 * 48 * 4, True, -100, 0.1, 3.0, None, is_sliced)
        forward, backward = torch.ops.tigon.linear_cross_entropy_fwd, torch.ops.tigon.linear_cross_entropy_bwd
        torch.library.opcheck(forward, (*inputs, factor, factor, factor, False, *settings))
        torch.library.opcheck(forward, (*inputs, None, None, None, True, *settings))
        out = forward(*inputs, factor, factor, factor, True, *settings)
        torch.library.opcheck(backward, (*inputs, out[2], torch.ones(5), torch.ones(5), *settings))
        pointers = Counter(t.data_ptr() for t in (*out, hidden, weight) if t.numel())
        assert max(pointers.values()) == 1


@pytest.mark.parametrize("divisor", [3, 7, 5001])
def test_the_divisor_costs_no_precision(divisor: int) -> None:
    # Entries of labels next to -1 / divisor would all be rounded the same way: an error that no sum averages out.
    hidden, weight, labels = _inputs(64, 32, 8192)
    hidden, weight = hidden.to(torch.bfloat16), (weight / 100).to(torch.bfloat16)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    tigon.linear_cross_entropy(*leaves, labels, num_items=divisor).backward()
    tigon.linear_cross_entropy(*wide, labels, num_items=divisor).backward()
    for leaf, exact in zip(leaves, wide, strict=True):
        # The projection of the error on the gradient itself: zero but for what systematic rounding leaves.
        bias = ((leaf.grad.double() - exact.grad) * exact.grad).sum() / exact.grad.square().sum()
        assert abs(bias) < 4e-4


# Weights of rows, and rows that are skipped.


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("memory", ["default", "min"])
@pytest.mark.parametrize("skip_ignored", [False, True])
def test_token_weight(reduction: str, memory: str, skip_ignored: bool, backend: str) -> None:
    hidden, weight, labels = _inputs(9, 8, 40)
    factors, bias = torch.linspace(-1, 2, 9), torch.randn(40)
    factors[labels == -100] = NAN
    options = {"reduction": reduction, "token_weight": factors, "num_items": 5 if reduction == "mean" else None}
    expected = _run(linear_cross_entropy_reference, hidden, weight, labels, bias, **options)
    ways = {"memory": memory, "skip_ignored": skip_ignored}
    for a, b in zip(
        _run(tigon.linear_cross_entropy, hidden, weight, labels, bias, **options, **ways), expected, strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_token_weight_is_the_weight_of_a_rows_loss(backend: str) -> None:
    hidden, weight, labels = _inputs(9, 8, 40)
    factors = torch.rand(9)
    for z_loss in (0.0, 0.1):
        rows = tigon.linear_cross_entropy(hidden, weight, labels, reduction="none", z_loss=z_loss)
        total = tigon.linear_cross_entropy(hidden, weight, labels, token_weight=factors, z_loss=z_loss)
        torch.testing.assert_close(total, (rows * factors).sum() / (labels != -100).sum())


@pytest.mark.parametrize("shape", [(9,), (3, 3)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_skipped_rows_are_not_computed(reduction: str, shape: tuple[int, ...], backend: str) -> None:
    hidden, weight, labels = _inputs(9, 8, 40)
    labels[5:] = -100
    hidden[labels == -100] = NAN
    given = hidden.view(*shape, 8), weight, labels.view(shape)
    options = {"reduction": reduction, "z_loss": 0.1, "return_z_loss": True}
    expected = tigon.linear_cross_entropy(*given, **options)
    forward, rows = module._fwd, []
    with mock.patch.object(module, "_fwd", lambda h, *rest: rows.append(h.shape[0]) or forward(h, *rest)):
        actual = tigon.linear_cross_entropy(*given, skip_ignored=True, **options)
    assert rows == [4]
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)
    leaves = given[0].clone().requires_grad_(), weight.clone().requires_grad_()
    loss = tigon.linear_cross_entropy(*leaves, given[2], skip_ignored=True, reduction="sum")
    dhidden, dweight = torch.autograd.grad(loss, leaves)
    assert (dhidden[given[2] == -100] == 0).all()
    kept = labels != -100
    exact = _run(linear_cross_entropy_reference, hidden[kept], weight, labels[kept], reduction="sum")
    torch.testing.assert_close(dhidden[given[2] != -100], exact[1])
    torch.testing.assert_close(dweight, exact[2])


def test_all_rows_skipped(backend: str) -> None:
    hidden, weight, labels = _inputs(5, 8, 40)
    for a in _run(tigon.linear_cross_entropy, hidden, weight, torch.full_like(labels, -100), skip_ignored=True):
        assert (a == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_weight": torch.ones(4)}, r"token_weight: expected shape \(5,\), got \(4,\)"),
        ({"token_weight": torch.ones(5, requires_grad=True)}, "token_weight: expected no requires_grad"),
        (
            {"token_weight": torch.ones(5), "class_weight": torch.ones(40)},
            "token_weight: expected None with class_weight",
        ),
        ({"token_weight": torch.ones(5, dtype=torch.int64)}, "token_weight: expected"),
        ({"max_logits_bytes": 1e5}, "max_logits_bytes: expected a positive int, got 100000.0"),
        ({"ignore_index": None}, "ignore_index: expected an int, got None"),
    ],
)
def test_weights_of_rows_are_checked(options: dict[str, Any], message: str) -> None:
    hidden, weight, labels = _inputs(5, 8, 40)
    options = {
        k: v.to(hidden.device) if isinstance(v, Tensor) and not v.requires_grad else v for k, v in options.items()
    }
    with pytest.raises(ValueError, match=message):
        tigon.linear_cross_entropy(hidden, weight, labels, **options)


def test_skipping_is_refused_while_compiling() -> None:
    torch._dynamo.reset()
    hidden, weight, labels = _inputs(5, 8, 40)
    compiled = torch.compile(tigon.linear_cross_entropy, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="skip_ignored: expected False while a compiler or a graph records"):
        compiled(hidden, weight, labels, skip_ignored=True)


def test_no_columns() -> None:
    with pytest.raises(ValueError, match="linear_cross_entropy: weight: expected at least one column"):
        tigon.linear_cross_entropy(torch.zeros(3, 0), torch.zeros(9, 0), torch.zeros(3, dtype=torch.long))
