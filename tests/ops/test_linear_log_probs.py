"""What the generic checks cannot say of `linear_log_probs`."""

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

import tigon
from tigon.ops import linear_log_probs_reference
from tigon.testing import assert_within_budget, poison

# `tigon.ops.linear_log_probs` as an attribute is the function.
module = importlib.import_module("tigon.ops.linear_log_probs")

NAN, INF = float("nan"), float("inf")
# The interpreter truncates to 16 bits where hardware rounds.
HALF = "torch" if os.environ["TIGON_TEST_DEVICE"] == "cpu" else "auto"
NAMES = ("log_probs", "entropy", "dhidden", "dweight", "dbias")


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
    upstream: tuple[Tensor | None, Tensor | None] | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Log-probabilities and entropies, then the gradients of hidden, weight and bias; random `upstream` by default."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in (hidden, weight, bias)]
    out = function(leaves[0], leaves[1], labels, bias=leaves[2], return_entropy=True, **options)
    if upstream is None:
        drawn = torch.randn(2, *labels.shape, generator=torch.Generator().manual_seed(3), device="cpu")
        upstream = tuple(drawn.to(labels.device))
    pairs = [(y, g.to(y.dtype)) for y, g in zip(out[:2], upstream, strict=True) if g is not None]
    torch.autograd.backward(*zip(*pairs, strict=True))
    return out.log_probs.detach(), out.entropy.detach(), *(t.grad for t in leaves if t is not None)


def _plain(hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None, return_entropy: bool) -> Any:
    """Torch's own distribution; no row may be ignored."""
    made = torch.distributions.Categorical(logits=F.linear(hidden, weight, bias))
    return module.LogProbsOutput(made.log_prob(labels), made.entropy(), None)


def _assert_within_budget(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, **options: Any
) -> None:
    """Results and gradients against the reference in the same dtype and in fp64."""
    plain = {k: v for k, v in options.items() if k != "max_logits_bytes"}
    wide = (hidden.double(), weight.double(), labels, None if bias is None else bias.double())
    actual = _run(tigon.linear_log_probs, hidden, weight, labels, bias, **options)
    low = _run(linear_log_probs_reference, hidden, weight, labels, bias, **plain)
    high = _run(linear_log_probs_reference, *wide, **plain)
    for name, a, b, c in zip(NAMES, actual, low, high, strict=False):
        assert_within_budget(name, a, b, c)


# Values and gradients.


@pytest.mark.parametrize("max_logits_bytes", [None, 4 * 70 * 8])
def test_everything_is_that_of_a_categorical_distribution(backend: str, max_logits_bytes: int | None) -> None:
    hidden, weight, bias = (torch.randn(*shape, dtype=torch.float64) for shape in ((11, 6), (70, 6), (70,)))
    labels = torch.randint(0, 70, (11,))
    expected = _run(_plain, hidden, weight, labels, bias)
    # fp64 is computed in plain torch, so that the chunks are seen to be exact.
    for dtype in (torch.float64, torch.float32):
        given = [t.to(dtype) for t in (hidden, weight)]
        actual = _run(tigon.linear_log_probs, *given, labels, bias.to(dtype), max_logits_bytes=max_logits_bytes)
        for name, a, b in zip(NAMES, actual, expected, strict=True):
            torch.testing.assert_close(a, b.to(dtype), msg=lambda m, name=name: f"{name}: {m}")


def test_gradcheck() -> None:
    """The closed form of the chunks, in fp64, with every option on."""
    hidden, weight, labels = _inputs(5, 3, 12, dtype=torch.float64)
    bias = torch.randn(12, dtype=torch.float64)
    options = {"softcap": 2.0, "logit_scale": 0.7, "max_logits_bytes": 256}

    def function(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return tigon.linear_log_probs(h, w, labels, bias=b, return_entropy=True, **options)[:2]

    assert torch.autograd.gradcheck(function, [t.requires_grad_() for t in (hidden, weight, bias)])


@pytest.mark.parametrize("used", [0, 1])
def test_one_output_may_be_used_alone(backend: str, used: int) -> None:
    hidden, weight, labels = _inputs(9, 8, 40)
    upstream = [None, None]
    upstream[used] = torch.randn(9)
    actual = _run(tigon.linear_log_probs, hidden, weight, labels, torch.zeros(40), tuple(upstream))
    expected = _run(linear_log_probs_reference, hidden, weight, labels, torch.zeros(40), tuple(upstream))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert actual[3].norm() > 0.1


def test_it_is_the_negative_cross_entropy(backend: str) -> None:
    hidden, weight, labels = _inputs(9, 8, 130)
    options = {"softcap": 2.0, "logit_scale": 1.5}
    log_probs = tigon.linear_log_probs(hidden, weight, labels, **options)
    assert isinstance(log_probs, Tensor)
    losses = tigon.linear_cross_entropy(hidden, weight, labels, reduction="none", **options)
    torch.testing.assert_close(log_probs, -losses)


@pytest.mark.parametrize(
    "options", [{"softcap": 1.0}, {"logit_scale": 0.5}, {"bias": 1.0}, {"ignore_index": 0}], ids=lambda o: next(iter(o))
)
def test_no_option_is_dropped(backend: str, options: dict[str, Any]) -> None:
    hidden, weight, labels = _inputs(9, 8, 40)
    labels[0], labels[2] = 0, 1
    options = dict(options)
    bias = torch.randn(40) if options.pop("bias", None) else None
    plain = tigon.linear_log_probs(hidden, weight, labels, return_entropy=True)
    changed = tigon.linear_log_probs(hidden, weight, labels, bias=bias, return_entropy=True, **options)
    for a, b in zip(changed[:2], plain[:2], strict=True):
        assert (a - b).abs().max() > 1e-3
    _assert_within_budget(hidden, weight, labels, bias, **options)


def test_rows_with_their_mass_on_one_class(backend: str) -> None:
    """A loss of 1e-4 and one of 30, of logits that the product keeps exact, and the entropy of a coin."""
    logits = torch.zeros(4, 1000)
    logits[0, 7] = math.log(999 / 1e-4)
    logits[1, 3] = -23.0
    logits[2, 5:7] = 40.0
    logits[3] = torch.linspace(-60, 60, 1000)
    labels = torch.tensor([7, 3, 6, 0])
    log_probs, entropy, dlogits, _ = _run(tigon.linear_log_probs, logits, torch.eye(1000), labels)
    exact = _run(linear_log_probs_reference, logits.double(), torch.eye(1000).double(), labels)
    # Of a probability near 1 the rounding of a sum next to 1 is left: an absolute error, of four roundings.
    torch.testing.assert_close(log_probs.double(), exact[0], rtol=3e-7, atol=5e-7)
    assert log_probs[0].item() == pytest.approx(-1e-4, abs=5e-7)
    assert log_probs[1].item() == pytest.approx(-23 - math.log(999), abs=4e-6)
    torch.testing.assert_close(entropy.double(), exact[1], rtol=3e-6, atol=5e-7)
    assert (entropy >= 0).all()
    assert entropy[2].item() == pytest.approx(math.log(2), abs=3e-7)
    torch.testing.assert_close(dlogits.double(), exact[2], rtol=1e-5, atol=5e-7)
    # The gradient of a class with probability 1e-13 has its own digits, not those of the row.
    unlikely = torch.ones(1000).bool()
    unlikely[[5, 6]] = False
    torch.testing.assert_close(dlogits.double()[2, unlikely], exact[2][2, unlikely], rtol=3e-5, atol=0.0)
    _assert_within_budget(logits, torch.eye(1000), labels)


def test_a_flat_distribution_has_the_largest_entropy(backend: str) -> None:
    """Classes beyond the last, with logits of 0, would add to it; its gradient is zero."""
    for classes in (1, 129, 10_001):
        hidden, weight = torch.ones(1, 1), torch.full((classes, 1), -20.0)
        upstream = None, torch.ones(1)
        _, entropy, _, dweight = _run(
            tigon.linear_log_probs, hidden, weight, torch.tensor([classes - 1]), upstream=upstream
        )
        assert entropy.item() == pytest.approx(math.log(classes), abs=2e-6)
        assert dweight.abs().max() < 1e-6 / classes


@pytest.mark.parametrize("excluded", [-INF, torch.finfo(torch.float32).min], ids=["infinite", "finite"])
@pytest.mark.parametrize("start", [0, 2])
def test_classes_that_are_taken_out(backend: str, start: int, excluded: float) -> None:
    """With a bias of -inf, or the lowest number, p * log(p) is 0, also while nothing else has been summed up."""
    hidden, weight, labels = _inputs(5, 4, 5000)
    bias = torch.randn(5000)
    bias[start:4500] = excluded
    labels[[0, 1]] = torch.tensor([4999, 4501])
    labels[3:] = 4700
    actual = _run(tigon.linear_log_probs, hidden, weight, labels, bias)
    kept = bias > excluded
    number = torch.cumsum(kept, 0) - 1
    few = torch.where(labels == -100, labels, number[labels])
    expected = _run(linear_log_probs_reference, hidden, weight[kept], few, bias[kept])
    for name, a, b in zip(NAMES, actual, expected, strict=True):
        if name in ("dweight", "dbias"):
            assert (a[~kept] == 0).all(), name
            a = a[kept]
        torch.testing.assert_close(a, b, msg=lambda m, name=name: f"{name}: {m}")


def test_label_that_is_taken_out(backend: str) -> None:
    hidden, weight, labels = _inputs(4, 4, 30)
    bias = torch.zeros(30)
    bias[labels[1]] = -INF
    actual = _run(tigon.linear_log_probs, hidden, weight, labels, bias)
    expected = _run(linear_log_probs_reference, hidden, weight, labels, bias)
    assert actual[0][1] == -INF
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)
        assert not a.isnan().any()


# Rows that do not count.


@pytest.mark.parametrize("max_logits_bytes", [None, 2 * 48 * 4])
@pytest.mark.parametrize("stored", [NAN, INF])
def test_what_an_ignored_row_holds_does_not_matter(backend: str, stored: float, max_logits_bytes: int | None) -> None:
    hidden, weight, labels = _inputs(5, 8, 48)
    options = {"max_logits_bytes": max_logits_bytes, "return_predictions": True}
    upstream = torch.ones(5), torch.ones(5)
    expected = _run(tigon.linear_log_probs, hidden, weight, labels, torch.zeros(48), upstream, **options)
    hidden[2] = stored
    actual = _run(tigon.linear_log_probs, hidden, weight, labels, torch.zeros(48), upstream, **options)
    for name, a, b in zip(NAMES, actual, expected, strict=True):
        assert torch.equal(a, b), name
    assert actual[0][2] == actual[1][2] == 0
    assert (actual[2][2] == 0).all()
    assert tigon.linear_log_probs(hidden, weight, labels, **options).predictions[2] == -1
    reference = _run(linear_log_probs_reference, hidden, weight, labels, torch.zeros(48), upstream)
    assert all(torch.isfinite(t).all() for t in reference)


def test_all_ignored_is_zero(backend: str) -> None:
    hidden, weight, _ = _inputs(5, 8, 40)
    labels = torch.full((5,), -100)
    with poison():
        results = _run(tigon.linear_log_probs, hidden * NAN, weight, labels, torch.zeros(40))
        out = tigon.linear_log_probs(hidden, weight, labels, return_predictions=True)
    assert all((t == 0).all() for t in results)
    assert (out.predictions == -1).all()


# Predictions.


def test_predictions_are_the_first_of_the_likeliest(backend: str) -> None:
    weight = torch.zeros(5000, 1)
    weight[[2047, 2049, 4095, 4100]] = 3.0
    weight[[1, 4999]] = -2.0
    hidden, labels = torch.tensor([[1.0], [-1.0], [0.0], [2.0]]), torch.tensor([0, 0, 0, -100])
    out = tigon.linear_log_probs(hidden, weight, labels, return_predictions=True)
    assert out.entropy is None
    assert out.predictions.dtype == torch.int64
    assert out.predictions.tolist() == [2047, 1, 0, -1]
    # Scaled by less than 0, the least logit is the likeliest.
    assert tigon.linear_log_probs(
        hidden, weight, labels, logit_scale=-1.0, return_predictions=True
    ).predictions.tolist() == [1, 2047, 0, -1]
    excluded = torch.full((5000,), -INF)
    excluded[4097] = -1e30
    out = tigon.linear_log_probs(hidden, weight, labels, bias=excluded, return_predictions=True)
    assert out.predictions.tolist() == [4097, 4097, 4097, -1]


def test_predictions_have_no_gradient_and_change_none(backend: str) -> None:
    hidden, weight, labels = _inputs(9, 8, 40)
    expected = _run(tigon.linear_log_probs, hidden, weight, labels)
    actual = _run(tigon.linear_log_probs, hidden, weight, labels, return_predictions=True)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    out = tigon.linear_log_probs(hidden.requires_grad_(), weight, labels, return_predictions=True)
    assert out.log_probs.requires_grad
    assert not out.predictions.requires_grad
    assert torch.equal(out.predictions.clamp(min=0), F.linear(hidden, weight).argmax(-1) * (labels != -100))


# Which gradients, from how many products.


@pytest.mark.parametrize("trainable", ["hidden", "weight", "bias"])
def test_frozen_inputs_cost_nothing(backend: str, trainable: str) -> None:
    hidden, weight, labels = _inputs(7, 8, 40)
    given = {"hidden": hidden, "weight": weight, "bias": torch.randn(40)}
    upstream = torch.ones(7), torch.ones(7)
    expected = _run(linear_log_probs_reference, hidden, weight, labels, given["bias"], upstream)
    given[trainable].requires_grad_()
    with ProductSpy() as spy:
        out = tigon.linear_log_probs(**given, labels=labels, return_entropy=True)
        (out.log_probs + out.entropy).sum().backward()
    torch.testing.assert_close(given[trainable].grad, expected[2 + list(given).index(trainable)])
    assert all(t.grad is None for name, t in given.items() if name != trainable)
    assert spy.products == 2 + (trainable != "bias")


def test_number_of_matrix_products(backend: str) -> None:
    hidden, weight, labels = _inputs(7, 8, 48)
    for limit, chunks in ((None, 1), (4 * 48 * 4, 2)):
        leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        with ProductSpy() as forward:
            out = tigon.linear_log_probs(*leaves, labels, return_entropy=True, max_logits_bytes=limit)
        with ProductSpy() as backward:
            (out.log_probs * out.entropy).sum().backward()
        assert (forward.products, backward.products) == (chunks, 3 * chunks)
        with torch.no_grad(), ProductSpy() as spy:
            tigon.linear_log_probs(*leaves, labels, return_entropy=True, max_logits_bytes=limit)
        assert spy.products == chunks


def test_what_is_saved_for_backward(backend: str) -> None:
    hidden, weight, labels = _inputs(7, 8, 40)
    for options, num_statistics in (({}, 2), ({"return_entropy": True}, 3)):
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            out = tigon.linear_log_probs(hidden.requires_grad_(), weight, labels, **options)
        assert [tuple(t.shape) for t in saved] == [(7, 8), (40, 8), (7,), (7, num_statistics)]
        if options:
            assert out.predictions is None


# Chunks.


def test_result_does_not_depend_on_chunks(backend: str) -> None:
    hidden, weight, labels = _inputs(150, 8, 33)
    bias = torch.randn(33)
    whole = _run(tigon.linear_log_probs, hidden, weight, labels, bias)
    for rows in (7, 128, 149):
        parts = _run(tigon.linear_log_probs, hidden, weight, labels, bias, max_logits_bytes=rows * 48 * 4)
        for name, a, b in zip(NAMES, parts, whole, strict=True):
            torch.testing.assert_close(
                a, b, atol=3e-6, rtol=1e-5, msg=lambda m, name=name, rows=rows: f"{name} {rows} {m}"
            )


def test_padding_between_rows_of_logits_is_left_out(backend: str) -> None:
    """Accelerators get rows of a multiple of 16 logits; what lies between them is never read."""
    hidden, weight, labels = _inputs(9, 8, 33)
    options = {"max_logits_bytes": 4 * 48 * 4}
    expected = _run(tigon.linear_log_probs, hidden, weight, labels, torch.ones(33), **options)
    with mock.patch.object(module, "row_stride", return_value=48), poison():
        actual = _run(tigon.linear_log_probs, hidden, weight, labels, torch.ones(33), **options)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.skipif(os.environ["TIGON_TEST_DEVICE"] != "cpu", reason="counts the bytes of unpadded rows")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_memory_stays_within_the_promise(rows: int, dtype: torch.dtype) -> None:
    """No tensor over the classes is larger than asked for, neither in forward nor in backward."""
    hidden, weight, labels = _inputs(64, 8, 1000, dtype=dtype)
    limit = rows * 1000 * dtype.itemsize
    with tigon.backend("torch"), mock.patch.object(module, "CPU_SLICE_LOGITS", 1000), ProductSpy() as spy:
        _run(
            tigon.linear_log_probs,
            hidden,
            weight,
            labels,
            softcap=3.0,
            return_predictions=True,
            max_logits_bytes=limit,
        )
    logits = [size for shape, size in spy.made if shape[-1:] == (1000,) and len(shape) == 2 and shape[0] != 8]
    assert logits
    # Slices of one row in fp32 are what the fallback computes with, and int64 for none of them.
    assert max(logits) <= max(limit, 4000)
    assert max(size for shape, size in spy.made) <= max(limit, 1000 * 8 * 4)


def test_error_of_dweight_does_not_grow_with_chunks() -> None:
    """bf16 chunks are added up in fp32; a bf16 total would be ten times as wrong after 128 of them."""
    hidden, weight, labels = _inputs(2048, 32, 64, dtype=torch.bfloat16)
    exact = _run(linear_log_probs_reference, hidden.double(), weight.double(), labels)[3]
    errors = {}
    with tigon.backend(HALF):
        for chunks in (1, 16, 128):
            limit = 2048 // chunks * 64 * 2
            dweight = _run(tigon.linear_log_probs, hidden, weight, labels, max_logits_bytes=limit)[3]
            assert dweight.dtype == torch.bfloat16
            errors[chunks] = ((dweight.double() - exact).norm() / exact.norm()).item()
    assert errors[1] < 5e-3
    assert max(errors.values()) < 1.3 * errors[1]


# Dtypes.


def test_fp16_takes_gradients_as_small_as_a_mean_gives() -> None:
    """1 / N of a probability is below the range of fp16; the loss scale comes before it is rounded."""
    hidden, weight, labels = _inputs(2048, 8, 512, dtype=torch.float16)
    upstream = torch.full((2048,), 65536 / 2048), torch.full((2048,), -65536 / 2048 / 100)
    with tigon.backend(HALF):
        actual = _run(tigon.linear_log_probs, hidden, weight, labels, upstream=upstream)
    exact = _run(linear_log_probs_reference, hidden.double(), weight.double(), labels, upstream=upstream)
    low = _run(linear_log_probs_reference, hidden, weight, labels, upstream=upstream)
    for name, a, b, c in zip(NAMES, actual, low, exact, strict=False):
        assert_within_budget(name, a, b, c)


@pytest.mark.parametrize("max_logits_bytes", [None, 16 * 48 * 2])
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_is_that_of_linear(hidden_dtype: torch.dtype, max_logits_bytes: int | None) -> None:
    hidden, weight, labels = _inputs(33, 8, 48)
    hidden, bias = hidden.to(hidden_dtype), torch.randn(48)
    wide = _run(linear_log_probs_reference, hidden.double(), weight.double(), labels, bias.double())

    def cast(function: Callable[..., Any], **options: Any) -> tuple[Tensor, ...]:
        def inner(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(hidden.device.type, dtype=torch.bfloat16):
                return function(*args, **kwargs)

        return _run(inner, hidden, weight, labels, bias, **options)

    with tigon.backend(HALF):
        actual = cast(tigon.linear_log_probs, max_logits_bytes=max_logits_bytes)
    low = cast(linear_log_probs_reference)
    assert [t.dtype for t in actual] == [torch.float32] * 2 + [hidden_dtype, torch.float32, torch.float32]
    for name, a, b, c in zip(NAMES, actual, low, wide, strict=True):
        assert_within_budget(name, a, b, c)


# Layouts and arguments.


def test_leading_axes_and_strides(backend: str) -> None:
    hidden, weight = torch.randn(2, 6, 8), torch.randn(8, 30).t()
    labels = torch.randint(0, 30, (2, 5))
    labels[1, 3] = -100
    upstream = torch.randn(5, 2).t(), torch.randn(()).expand(2, 5)
    flat = hidden[:, :-1].reshape(10, 8), weight.contiguous(), labels.view(-1)
    actual = _run(tigon.linear_log_probs, hidden[:, :-1], weight, labels, upstream=upstream)
    expected = _run(tigon.linear_log_probs, *flat, upstream=tuple(t.reshape(-1) for t in upstream))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b.view(a.shape))
    one = tigon.linear_log_probs(hidden[0, 0], weight, labels[0, 0], return_entropy=True, return_predictions=True)
    logits = F.linear(hidden[0, 0], weight)
    torch.testing.assert_close(one.log_probs, logits.log_softmax(-1)[labels[0, 0]])
    torch.testing.assert_close(one.entropy, torch.distributions.Categorical(logits=logits).entropy())
    assert one.predictions == logits.argmax()


HIDDEN, WEIGHT, LABELS = torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("hidden", "weight", "labels", "options", "message"),
    [
        (HIDDEN.long(), WEIGHT, LABELS, {}, "hidden: expected a floating-point dtype, got torch.int64"),
        (HIDDEN, WEIGHT[0], LABELS, {}, r"weight: expected two axes, got shape \(4,\)"),
        (HIDDEN, WEIGHT.bfloat16(), LABELS, {}, "weight: expected dtype torch.float32 of hidden, got torch.bfloat16"),
        (HIDDEN[:, :3], WEIGHT, LABELS, {}, r"hidden: expected last axis 4, got shape \(2, 3\)"),
        (HIDDEN, WEIGHT, LABELS[:1], {}, r"labels: expected shape \(2,\), got \(1,\)"),
        (HIDDEN, WEIGHT, LABELS + 3, {}, "labels: expected a class below 3 or ignore_index -100, got 3 in row 0"),
        (HIDDEN, WEIGHT, LABELS.float(), {}, "labels: expected an integer dtype, got torch.float32"),
        (HIDDEN, WEIGHT, LABELS, {"bias": torch.zeros(4)}, r"bias: expected shape \(3,\), got \(4,\)"),
        (HIDDEN, WEIGHT.to("meta"), LABELS, {}, "weight: expected device cpu, got meta"),
        (HIDDEN, WEIGHT, LABELS, {"max_logits_bytes": 11}, "max_logits_bytes: expected at least 12, one row of logits"),
        (HIDDEN, WEIGHT, LABELS, {"logit_scale": torch.ones(())}, "logit_scale: expected a finite number in"),
        (HIDDEN, WEIGHT, LABELS, {"softcap": -1}, "softcap: expected a finite number above 0, got -1"),
    ],
)
def test_arguments_are_checked(
    backend: str, hidden: Tensor, weight: Tensor, labels: Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^linear_log_probs: {message}"):
        tigon.linear_log_probs(hidden, weight, labels, **options)


def test_label_that_is_no_class_makes_its_row_nan(backend: str) -> None:
    """Where labels are not looked at, as on a GPU."""
    hidden, weight, labels = _inputs(5, 8, 40)
    labels[1], labels[3] = 40, -1
    with mock.patch.object(module, "checked_labels", lambda name, labels, *_: labels):
        log_probs, entropy, dhidden, dweight = _run(tigon.linear_log_probs, hidden, weight, labels)
    assert log_probs.isnan().tolist() == entropy.isnan().tolist() == [False, True, False, True, False]
    assert dhidden.isnan().any(-1).tolist() == log_probs.isnan().tolist()
    assert dweight.isnan().all()


# Compiled.


@pytest.mark.parametrize(
    "options",
    [{"max_logits_bytes": 4 * 48 * 4}, {"return_predictions": True, "softcap": 3.0, "logit_scale": 0.5}],
    ids=["chunks", "predictions"],
)
def test_compiles_with_changing_shapes(backend: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()

    def step(hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None, return_entropy: bool) -> Any:
        out = tigon.linear_log_probs(hidden.sin(), weight, labels, bias=bias, return_entropy=return_entropy, **options)
        return out._replace(log_probs=2 * out.log_probs)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for rows in (5, 6, 9):
        inputs = *_inputs(rows, 8, 48), torch.ones(48)
        actual, expected = (_run(f, *inputs) for f in (compiled, step))
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("options", [{}, {"return_entropy": True}], ids=["log_probs", "entropy_unused"])
def test_compiled_for_one_trainable_input(backend: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    hidden, weight, labels = _inputs(5, 8, 40)
    upstream = torch.ones(5), None
    expected = _run(tigon.linear_log_probs, hidden, weight, labels, upstream=upstream)

    def step(*args: Tensor) -> Tensor:
        out = tigon.linear_log_probs(*args, **options)
        return (out if isinstance(out, Tensor) else out.log_probs).sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    weight.requires_grad_()
    compiled(hidden, weight, labels).backward()
    torch.testing.assert_close(weight.grad, expected[3])
    assert hidden.grad is None
    with torch.no_grad():
        torch.testing.assert_close(compiled(hidden, weight, labels), expected[0].sum())


def test_fake_tensors_have_shapes(backend: str) -> None:
    """What estimates memory or exports a step runs it on tensors without values."""
    with FakeTensorMode():
        hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
        labels = torch.zeros(5, dtype=torch.int64)
        out = tigon.linear_log_probs(hidden, weight, labels, return_entropy=True, return_predictions=True)
        assert [t.shape for t in out] == [(5,)] * 3
        assert out.predictions.dtype == torch.int64
        (out.log_probs + out.entropy).sum().backward()
        assert hidden.grad.shape == (5, 8)
        assert weight.grad.shape == (40, 8)


def test_other_tensor_subclasses_go_to_plain_torch(backend: str) -> None:
    class Sharded(Tensor):
        pass

    hidden, weight, labels = _inputs(5, 8, 40)
    leaf = hidden.as_subclass(Sharded).requires_grad_()
    options = {"softcap": 2.0, "logit_scale": 0.5, "return_entropy": True, "return_predictions": True}
    with mock.patch.object(module, "_fwd", side_effect=AssertionError):
        out = tigon.linear_log_probs(leaf, weight, labels, bias=torch.ones(40), **options)
    out.log_probs.sum().backward()
    assert leaf.grad is not None
    expected = tigon.linear_log_probs(hidden, weight, labels, bias=torch.ones(40), **options)
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a.as_subclass(Tensor).detach(), b)


def test_registered_operators_are_sound() -> None:
    hidden, weight, labels = _inputs(5, 8, 48)
    inputs, settings = (hidden, weight, torch.zeros(48), labels), (torch.float32, 4 * 48 * 4, True, -100, 3.0, None)
    forward, backward = torch.ops.tigon.linear_log_probs_fwd, torch.ops.tigon.linear_log_probs_bwd
    for asked in ((True, True), (False, False)):
        torch.library.opcheck(forward, (*inputs, *asked, *settings))
        out = forward(*inputs, *asked, *settings)
        dentropy = torch.ones(5) if asked[0] else None
        for needs in ((True, True, True), (False, True, False)):
            torch.library.opcheck(backward, (*inputs, out[3], torch.ones(5), dentropy, needs, *settings))
        pointers = Counter(t.data_ptr() for t in (*out, hidden, weight) if t.numel())
        assert max(pointers.values()) == 1
