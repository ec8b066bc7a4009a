"""What the generic checks cannot say of `cross_entropy`."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tigon
from tigon.ops import _op, cross_entropy_reference
from tigon.testing import assert_within_budget

# `tigon.ops.cross_entropy` as an attribute is the function.
module = importlib.import_module("tigon.ops.cross_entropy")

NAN, INF = float("nan"), float("inf")
# Elsewhere labels are not read, and kernels are not interpreted.
cpu_only = pytest.mark.skipif(os.environ["TIGON_TEST_DEVICE"] != "cpu", reason="only on a CPU")


pytestmark = pytest.mark.usefixtures("on_device")


def _moved(options: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Options written before the device was known; a count may be anywhere."""
    return {k: v.to(device) if isinstance(v, Tensor) and k != "num_items" else v for k, v in options.items()}


def _run(
    function: Callable[..., Any], logits: Tensor, labels: Tensor, upstream: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of the logits."""
    options = _moved(options, logits.device)
    leaf = logits.detach().requires_grad_()
    loss = function(leaf, labels, **options)
    loss = loss if isinstance(loss, Tensor) else loss[0]
    loss.backward(torch.ones_like(loss) if upstream is None else upstream.to(loss.dtype))
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def _labels(rows: int, classes: int) -> Tensor:
    """Random classes with the third row ignored."""
    labels = torch.randint(0, classes, (rows,))
    labels[2] = -100
    return labels


def _torch(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    weight = options.pop("class_weight", None)
    return F.cross_entropy(logits, labels, weight=None if weight is None else weight.to(logits.dtype), **options)


# Values.


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_agrees_with_torch(backend: str, is_weighted: bool, label_smoothing: float, reduction: str) -> None:
    logits, labels = 4 * torch.randn(6, 129), _labels(6, 129)
    options = {"label_smoothing": label_smoothing, "reduction": reduction}
    if is_weighted:
        options["class_weight"] = torch.rand(129)
    actual = _run(tigon.cross_entropy, logits, labels, **options)
    low = _run(_torch, logits, labels, **options)
    high = _run(_torch, logits.double(), labels, **options)
    for name, a, b, c in zip(("loss", "dlogits"), actual, low, high, strict=True):
        assert_within_budget(name, a, b, c)


def test_agrees_with_torch_on_the_ignore_index(backend: str) -> None:
    logits, labels = torch.randn(5, 7), torch.tensor([3, 1, 3, 0, 6])
    actual = _run(tigon.cross_entropy, logits, labels, ignore_index=3)
    expected = _run(_torch, logits, labels, ignore_index=3)
    torch.testing.assert_close(actual, expected)
    assert (actual[1][labels == 3] == 0).all()


def test_mean_divides_once_by_what_is_given(backend: str) -> None:
    logits, labels = torch.zeros(4, 8), torch.tensor([1, 2, -100, 3])
    loss = tigon.cross_entropy(logits, labels)
    assert loss.item() == pytest.approx(2.079442, abs=1e-6)
    for num_items in (12, torch.tensor(12), torch.tensor([12]), torch.tensor([[12.0]])):
        loss = tigon.cross_entropy(logits, labels, num_items=num_items)
        assert loss.item() == pytest.approx(0.519860, abs=1e-6)
        assert loss.shape == ()


def test_num_items_divides_the_z_loss_too(backend: str) -> None:
    logits, labels = torch.randn(4, 8), torch.tensor([1, 2, -100, 3])
    kept = labels != -100
    squares = 0.1 * logits[kept].logsumexp(-1).square()
    loss, z_loss = tigon.cross_entropy(logits, labels, z_loss=0.1, num_items=12, return_z_loss=True)
    torch.testing.assert_close(z_loss, squares.sum() / 12)
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels, reduction="sum") / 12 + squares.sum() / 12)
    loss, z_loss = tigon.cross_entropy(logits, labels, z_loss=0.1, return_z_loss=True)
    torch.testing.assert_close(z_loss, squares.mean())
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels) + squares.mean())


def test_cap_is_the_cap(backend: str) -> None:
    """Of 124 the cap 30 leaves 29.984588, which is the loss of the class at 0 but for exp(-30)."""
    loss = tigon.cross_entropy(torch.tensor([[124.0, 0.0]]), torch.tensor([1]), softcap=30.0)
    assert loss.item() == pytest.approx(29.984588, abs=3e-6)


def test_smoothing_of_uniform_logits_changes_the_gradient_alone(backend: str) -> None:
    logits, labels = torch.zeros(3, 10), torch.tensor([1, 2, 3])
    plain = _run(tigon.cross_entropy, logits, labels)
    smooth = _run(tigon.cross_entropy, logits, labels, label_smoothing=0.1)
    assert smooth[0].item() == pytest.approx(math.log(10), abs=1e-6)
    torch.testing.assert_close(smooth[1], 0.9 * plain[1])


def test_every_output_on_and_off(backend: str) -> None:
    """Optional outputs have memory of their own."""
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, -100, 2])
    expected = F.cross_entropy(logits, labels)
    for z_loss in (0.0, 0.5):
        for reduction in ("mean", "none"):
            out = tigon.cross_entropy(logits, labels, z_loss=z_loss, reduction=reduction, return_z_loss=True)
            assert isinstance(out, tigon.CrossEntropyOutput)
            assert out.loss.data_ptr() != out.z_loss.data_ptr()
            assert out.loss.shape == out.z_loss.shape == (() if reduction == "mean" else (4,))
            if z_loss == 0:
                assert (out.z_loss == 0).all()
                if reduction == "mean":
                    torch.testing.assert_close(out.loss, expected)
            else:
                plain = tigon.cross_entropy(logits, labels, reduction=reduction)
                torch.testing.assert_close(out.loss, plain + out.z_loss)


def test_both_outputs_have_a_gradient(backend: str) -> None:
    logits, labels = torch.randn(4, 9), torch.tensor([0, 1, -100, 2])
    results = []
    for function in (tigon.cross_entropy, cross_entropy_reference):
        for used in ((1.0, 0.0), (0.0, 1.0), (2.0, 3.0)):
            leaf = logits.detach().requires_grad_()
            loss, z_loss = function(leaf, labels, z_loss=0.3, return_z_loss=True)
            terms = [factor * t for factor, t in zip(used, (loss, z_loss), strict=True) if factor]
            sum(terms).backward()
            results.append(leaf.grad)
    for actual, expected in zip(results[:3], results[3:], strict=True):
        torch.testing.assert_close(actual, expected)


# Rows that do not count.


@pytest.mark.parametrize("options", [{}, {"num_items": 12}, {"class_weight": torch.ones(8)}], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_ignored_is_zero(backend: str, reduction: str, options: dict[str, Any]) -> None:
    if reduction != "mean" and "num_items" in options:
        options = {}
    logits = torch.full((4, 8), NAN)
    loss, grad = _run(tigon.cross_entropy, logits, torch.full((4,), -100), reduction=reduction, z_loss=0.1, **options)
    assert loss.shape == ((4,) if reduction == "none" else ())
    assert (loss == 0).all()
    assert (grad == 0).all()


@pytest.mark.parametrize(
    "options", [{"num_items": 0}, {"num_items": torch.tensor(0)}, {"class_weight": torch.zeros(8)}]
)
def test_divisor_of_zero_gives_zero(backend: str, options: dict[str, Any]) -> None:
    loss, grad = _run(tigon.cross_entropy, torch.randn(4, 8), torch.tensor([1, 2, -100, 3]), **options)
    assert loss == 0
    assert (grad == 0).all()


@pytest.mark.parametrize("stored", [NAN, INF, -INF, 3e38])
def test_what_an_ignored_row_holds_does_not_matter(backend: str, stored: float) -> None:
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 20.0}
    logits, labels = torch.randn(5, 130), _labels(5, 130)
    expected = _run(tigon.cross_entropy, logits, labels, **options)
    logits[2] = stored
    actual = _run(tigon.cross_entropy, logits, labels, **options)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    assert (actual[1][2] == 0).all()


@pytest.mark.parametrize("num_rows", [0, 1])
def test_few_rows(backend: str, num_rows: int) -> None:
    loss, grad = _run(tigon.cross_entropy, torch.zeros(num_rows, 4), torch.ones(num_rows, dtype=torch.int64))
    assert loss.item() == pytest.approx(num_rows * math.log(4))
    assert grad.shape == (num_rows, 4)


# Upstream gradients.


def test_each_row_has_its_own_upstream_gradient(backend: str) -> None:
    logits, labels = torch.randn(5, 7), torch.tensor([-100, 1, 2, 3, 6])
    upstream = torch.tensor([0.0, 1.0, 2.0, 0.0, 0.5])
    loss, grad = _run(tigon.cross_entropy, logits, labels, upstream, reduction="none")
    expected_loss, expected = _run(_torch, logits, labels, upstream, reduction="none")
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(grad, expected)
    assert (grad[[0, 3]] == 0).all()
    assert (grad[[1, 2, 4]] != 0).all()


def test_rows_keep_the_shape_of_the_labels(backend: str) -> None:
    logits, labels = torch.randn(3, 4, 9), torch.randint(0, 9, (3, 4))
    labels[0, :3] = -100
    loss, z_loss = tigon.cross_entropy(logits, labels, reduction="none", z_loss=0.1, return_z_loss=True)
    assert loss.shape == z_loss.shape == (3, 4)
    assert (loss[0, :3] == 0).all()
    assert (z_loss[0, :3] == 0).all()
    assert (loss[1:] > 0).all()


def test_one_row_without_leading_axes(backend: str) -> None:
    logits = torch.randn(9)
    loss, grad = _run(tigon.cross_entropy, logits, torch.tensor(4))
    torch.testing.assert_close((loss, grad), _run(_torch, logits, torch.tensor(4)))


def test_gradient_of_a_row_sums_to_zero(backend: str) -> None:
    _, grad = _run(tigon.cross_entropy, 5 * torch.randn(6, 300), _labels(6, 300), label_smoothing=0.2)
    assert grad.sum(-1).abs().max() < 1e-6 * grad.abs().sum(-1).max()


def test_saved_tensors_of_others_stay_as_they_are(backend: str) -> None:
    """Softmax saves its output; a loss that stored its gradient there would corrupt the softmax's."""
    p, labels = torch.randn(3, 5), torch.tensor([0, 1, 2])
    grads = []
    for function in (tigon.cross_entropy, F.cross_entropy):
        leaf = p.detach().requires_grad_()
        q = leaf.softmax(-1)
        before = q.detach().clone()
        function(q, labels).backward()
        assert torch.equal(q, before)
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_changes_nothing(backend: str, use_reentrant: bool) -> None:
    logits, labels = torch.randn(5, 40), _labels(5, 40)
    expected = _run(tigon.cross_entropy, logits, labels)
    wrapped = _run(lambda x, y: checkpoint(tigon.cross_entropy, x, y, use_reentrant=use_reentrant), logits, labels)
    assert torch.equal(wrapped[0], expected[0])
    assert torch.equal(wrapped[1], expected[1])


# Numerics.


def test_few_finite_logits_among_infinite_ones(backend: str) -> None:
    logits = torch.full((2, 100_000), -INF)
    logits[0, 50_000] = 10.0
    logits[1, [50_000, 99_999]] = 10.0
    labels = torch.tensor([50_000, 99_999])
    loss, grad = _run(tigon.cross_entropy, logits, labels, reduction="none")
    torch.testing.assert_close(loss, torch.tensor([0.0, math.log(2)]))
    assert torch.isfinite(grad).all()
    torch.testing.assert_close(grad[1, [50_000, 99_999]], torch.tensor([0.5, -0.5]))
    assert grad[0].abs().max() == 0
    # The cap makes every logit finite: all but a few are exp(-2 cap) of the largest.
    options = {"reduction": "none", "softcap": 5.0}
    actual = _run(tigon.cross_entropy, logits, labels, **options)
    low = _run(cross_entropy_reference, logits, labels, **options)
    high = _run(cross_entropy_reference, logits.double(), labels, **options)
    for name, x, y, z in zip(("loss", "dlogits"), actual, low, high, strict=True):
        assert_within_budget(name, x, y, z)


def test_infinite_target_is_an_infinite_loss(backend: str) -> None:
    logits = torch.tensor([[-INF, 0.0, 0.0]])
    loss, grad = _run(tigon.cross_entropy, logits, torch.tensor([0]))
    assert loss == INF
    torch.testing.assert_close(grad, torch.tensor([[-1.0, 0.5, 0.5]]))


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_a_common_offset_does_not_swamp_the_row(backend: str, offset: float) -> None:
    """Smoothing sums over all logits, where an offset of the whole row would leave few digits of the rest."""
    logits = (torch.randint(-64, 64, (3, 20_000)) / 16).float()
    labels = torch.tensor([1, 2, 3])
    high = cross_entropy_reference(logits.double(), labels, label_smoothing=0.3)
    moved = tigon.cross_entropy(logits + offset, labels, label_smoothing=0.3)
    assert moved.item() == pytest.approx(high.item(), rel=2e-6)


def test_confident_rows_keep_their_gradient(backend: str) -> None:
    """A loss of 1e-4 with logits of 60: an lse rounded to fp32 would cost a hundredth of the gradient."""
    logits = torch.tensor([[60.0, 60.0 - 9.21]])
    _, grad = _run(tigon.cross_entropy, logits, torch.tensor([0]))
    _, high = _run(_torch, logits.double(), torch.tensor([0]))
    assert (grad.double() / high - 1).abs().max() < 5e-3


@pytest.mark.parametrize("classes", [3, 8191, 8193, 65537, 256_000])
def test_number_of_classes_is_not_limited(backend: str, classes: int) -> None:
    logits, labels = torch.randn(2, classes), torch.tensor([0, classes - 1])
    actual = _run(tigon.cross_entropy, logits, labels)
    low = _run(_torch, logits, labels)
    high = _run(_torch, logits.double(), labels)
    for name, a, b, c in zip(("loss", "dlogits"), actual, low, high, strict=True):
        assert_within_budget(name, a, b, c)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_of_half_precision_logits_is_fp32(dtype: torch.dtype) -> None:
    logits, labels = torch.randn(6, 40).to(dtype), _labels(6, 40)
    # The interpreter truncates where hardware rounds.
    with tigon.backend("torch" if logits.is_cpu else "auto"):
        loss, grad = _run(tigon.cross_entropy, logits, labels)
        with torch.autocast(logits.device.type, dtype=torch.bfloat16):
            cast = tigon.cross_entropy(logits, labels)
    assert loss.dtype == cast.dtype == torch.float32
    assert grad.dtype == dtype
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), labels))
    assert torch.equal(loss, cast)


# Layouts.


def test_last_tokens_are_left_out_without_a_copy() -> None:
    """The usual shift: all tokens of a sequence but the last, whose rows are not evenly spaced."""
    logits, labels = torch.randn(3, 6, 40), torch.randint(0, 40, (3, 5))
    expected = _run(tigon.cross_entropy, logits[:, :-1].contiguous(), labels)
    read: list[int] = []
    launch = module.launch

    def spy(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if kernel is module._cross_entropy_kernel:
            read.append(args[0].data_ptr())
        launch(kernel, grid, *args, **constants)

    leaf = logits.detach().requires_grad_()
    with mock.patch.object(module, "launch", spy):
        loss = tigon.cross_entropy(leaf[:, :-1], labels)
        loss.backward()
    assert read == [leaf.data_ptr()] * 2
    assert torch.equal(loss, expected[0])
    assert leaf.grad is not None
    assert torch.equal(leaf.grad[:, :-1], expected[1])
    assert (leaf.grad[:, -1] == 0).all()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, 1:, :, :],
        lambda x: x[:, :, :1, :],
        lambda x: x[:, 1:, :2, :],
        lambda x: x.transpose(0, 2),
        lambda x: x[..., ::3],
        lambda x: x[:1].expand(4, -1, -1, -1),
        lambda x: x[:, :, :, :1],
    ],
)
def test_layouts(backend: str, view: Callable[[Tensor], Tensor]) -> None:
    logits = view(torch.randn(2, 3, 4, 30))
    labels = torch.randint(0, logits.shape[-1], logits.shape[:-1])
    labels.view(-1)[1] = -100
    strided = labels.unsqueeze(-1).repeat_interleave(2, -1)[..., 0]
    for reduction in ("mean", "none"):
        expected = _run(tigon.cross_entropy, logits.contiguous(), labels, reduction=reduction)
        actual = _run(tigon.cross_entropy, logits, strided, reduction=reduction)
        assert torch.equal(actual[0], expected[0])
        assert torch.equal(actual[1], expected[1])


def test_axes_of_one_row_cost_no_copy() -> None:
    x = torch.empty(2, 3, 4, 5, 30)
    for view, layout in (
        (x, (1, 30, 0)),
        (x[:, :1, :3], (15, 1800, 30)),
        (x[:, :1, :, :1], (4, 1800, 150)),
        (x[1, 1, 1, 1], (1, 30, 0)),
        (x[:1].expand(6, -1, -1, -1, -1), (60, 0, 30)),
    ):
        rows, *found = module._row_layout(view)
        assert tuple(found) == layout
        assert rows.data_ptr() == view.data_ptr()
    rows, *found = module._row_layout(x[:, :2, :3, :4])
    assert tuple(found) == (1, 30, 0)
    assert rows.is_contiguous()


FAR_ROWS = """
import mmap, torch, tigon
stride, n = 2**30 + 64, 8
# Linux only: pages that are reserved but not counted against memory.
pages = mmap.mmap(-1, 2 * (2 * stride + n), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
far = torch.frombuffer(pages, dtype=torch.float16).as_strided((3, n), (stride, 1))
far.copy_(torch.randn(3, n))
assert tigon.why_not("cross_entropy", far) == []
results = []
for x in (far, far.contiguous()):
    x = x.detach().requires_grad_()
    loss = tigon.cross_entropy(x, torch.tensor([1, 2, 3]), reduction="none")
    results.append((loss.detach(), *torch.autograd.grad(loss.sum(), x)))
assert all(torch.equal(a, b) for a, b in zip(*results)), results
"""


@cpu_only
@pytest.mark.skipif(sys.platform != "linux", reason="reserves address space the way Linux does")
def test_rows_beyond_two_to_the_31() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", FAR_ROWS], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:] or f"status {done.returncode}"


# Labels and arguments.


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_any_integer_labels(backend: str, dtype: torch.dtype) -> None:
    # 156 is -100 in eight bits.
    classes = 100 if dtype == torch.int8 else 200
    labels = torch.tensor([0, classes - 1, 5 if dtype == torch.int8 else 156])
    logits = torch.randn(3, classes)
    actual = _run(tigon.cross_entropy, logits, labels.to(dtype))
    expected = _run(tigon.cross_entropy, logits, labels)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


@cpu_only
@pytest.mark.parametrize("label", [8, -1, -101, 2**40])
def test_label_that_is_no_class_raises(backend: str, label: int) -> None:
    labels = torch.tensor([[1, 2], [-100, label]])
    with pytest.raises(
        ValueError,
        match=rf"cross_entropy: labels: expected a class below 8 or ignore_index -100, got {label} in row 3",
    ):
        tigon.cross_entropy(torch.randn(2, 2, 8), labels)


@pytest.mark.parametrize(
    "options", [{}, {"z_loss": 0.1, "label_smoothing": 0.1, "class_weight": torch.linspace(0.1, 2, 8)}]
)
def test_label_that_is_no_class_is_nan_where_it_is_not_read(backend: str, options: dict[str, Any]) -> None:
    """Compiled code reads no labels; neither may a GPU be waited for."""
    logits, labels = torch.randn(4, 8), torch.tensor([1, 8, -100, -5])
    with mock.patch.object(module, "checked_labels", lambda name, labels, *_: labels):
        loss, grad = _run(tigon.cross_entropy, logits, labels, reduction="none", **options)
    assert loss.isnan().tolist() == [False, True, False, True]
    assert grad.isnan().all(-1).tolist() == [False, True, False, True]
    assert torch.isfinite(grad[[0, 2]]).all()


@pytest.mark.gpu
def test_label_that_is_no_class_on_a_gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = torch.randn(3, 8, device=device), torch.tensor([1, 8, -100], device=device)
    loss, grad = _run(tigon.cross_entropy, logits, labels, reduction="none")
    assert loss.isnan().tolist() == [False, True, False]
    assert torch.isfinite(grad[0]).all()
    monkeypatch.setattr(_op, "DEBUG", True)
    with pytest.raises(ValueError, match="got 8 in row 1"):
        tigon.cross_entropy(logits, labels)


LOGITS, LABELS = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("logits", "labels", "options", "message"),
    [
        (LOGITS.long(), LABELS, {}, "logits: expected a floating-point dtype, got torch.int64"),
        (torch.tensor(1.0), LABELS, {}, "logits: expected at least one axis, got a scalar"),
        (torch.zeros(2, 0), LABELS, {}, "classes: expected at least one, got 0"),
        (LOGITS, LABELS[:1], {}, r"labels: expected shape \(2,\), got \(1,\)"),
        (LOGITS, LABELS.float(), {}, "labels: expected an integer dtype, got torch.float32"),
        (LOGITS, LABELS.bool(), {}, "labels: expected an integer dtype, got torch.bool"),
        (LOGITS, [0, 1], {}, "labels: expected a tensor, got list"),
        (LOGITS, LABELS.to("meta"), {}, "labels: expected device cpu, got meta"),
        (LOGITS, LABELS, {"reduction": "avg"}, "reduction: expected one of 'mean', 'sum', 'none', got 'avg'"),
        (LOGITS, LABELS, {"label_smoothing": 1.5}, r"label_smoothing: expected a finite number in \[0, 1\], got 1.5"),
        (LOGITS, LABELS, {"softcap": 0.0}, "softcap: expected a finite number above 0, got 0.0"),
        (LOGITS, LABELS, {"class_weight": torch.ones(4)}, r"class_weight: expected shape \(3,\), got \(4,\)"),
        (LOGITS, LABELS, {"class_weight": torch.ones(3).requires_grad_()}, "class_weight: expected no requires_grad"),
        (LOGITS, LABELS, {"reduction": "sum", "num_items": 3}, "num_items: expected None unless reduction is 'mean'"),
        (LOGITS, LABELS, {"num_items": torch.ones(2)}, r"num_items: expected one element, got shape \(2,\)"),
        (LOGITS, LABELS, {"num_items": "3"}, "num_items: expected a finite number in"),
    ],
)
def test_arguments_are_checked(backend: str, logits: Any, labels: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^cross_entropy: {message}"):
        tigon.cross_entropy(logits, labels, **options)


@pytest.mark.parametrize("options", [{"num_items": 9}, {"z_loss": 0.1, "return_z_loss": True, "softcap": 4.0}], ids=str)
def test_compiles_with_changing_shapes(backend: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(tigon.cross_entropy, fullgraph=True, backend="aot_eager")
    for rows in (5, 6, 8):
        logits, labels = torch.randn(rows, 40), _labels(rows, 40)
        actual, expected = (_run(f, logits, labels, **options) for f in (compiled, tigon.cross_entropy))
        torch.testing.assert_close(actual, expected)


def test_registered_operators_are_sound() -> None:
    logits, labels = torch.randn(4, 9), torch.tensor([0, -100, 8, 3])
    options = (0.1, -100, 0.1, 5.0)
    forward, backward = torch.ops.tigon.cross_entropy_fwd, torch.ops.tigon.cross_entropy_bwd
    torch.library.opcheck(forward, (logits, labels, None, *options))
    _, _, stats = forward(logits, labels, None, *options)
    torch.library.opcheck(backward, (logits, labels, None, stats, torch.ones(4), torch.ones(4), *options))


@pytest.mark.parametrize("form", [12, 12.0, np.int64(12), torch.tensor(12), torch.tensor([12.0])], ids=str)
def test_num_items_takes_any_number(form: object) -> None:
    logits, labels = torch.zeros(4, 8), torch.tensor([1, 2, -100, 3])
    loss = tigon.cross_entropy(logits, labels, num_items=form)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(3 * math.log(8) / 12, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_items": -1}, "num_items: expected a finite number in"),
        ({"num_items": True}, "num_items: expected a finite number in"),
        ({"num_items": float("nan")}, "num_items: expected a finite number in"),
        ({"softcap": float("inf")}, "softcap: expected a finite number above 0"),
        ({"softcap": "3"}, "softcap: expected a finite number above 0"),
        ({"z_loss": None}, "z_loss: expected a finite number"),
        ({"z_loss": float("nan")}, "z_loss: expected a finite number"),
        ({"label_smoothing": "a"}, "label_smoothing: expected a finite number in"),
    ],
)
def test_numbers_that_are_none_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tigon.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1]), **options)


def test_reference_takes_any_integer_dtype() -> None:
    logits = torch.randn(3, 5)
    expected = cross_entropy_reference(logits, torch.tensor([0, 4, 2]))
    assert torch.equal(cross_entropy_reference(logits, torch.tensor([0, 4, 2], dtype=torch.uint8)), expected)


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.1, "label_smoothing": 0.1, "softcap": 20.0}])
@pytest.mark.parametrize("is_held", [False, True])
def test_gradient_takes_the_place_of_logits_that_only_the_graph_holds(is_held: bool, options: dict[str, Any]) -> None:
    leaf, labels = torch.randn(2, 3, 4100, requires_grad=True), torch.tensor([[1, -100, 4099], [0, 4, 2]])
    logits = leaf.clone()
    place, seen = logits.data_ptr(), []
    logits.register_hook(lambda g: seen.append(g.data_ptr()))
    held = [logits] if is_held else []
    loss = tigon.cross_entropy(logits, labels, **options)
    del logits
    (actual,) = torch.autograd.grad(loss, leaf)
    (expected,) = torch.autograd.grad(cross_entropy_reference(leaf, labels, **options), leaf)
    torch.testing.assert_close(actual, expected)
    assert (seen == [place]) is not is_held
    assert all(torch.equal(t, leaf) for t in held)
