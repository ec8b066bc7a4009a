"""Both cross entropies through every door, with every option: honoured as the plain form has it, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.compat.test_values import agree, draw, with_weight  # noqa: F401
from torch import Tensor

M, D, V = 11, 16, 37
HIDDEN, WEIGHT, BIAS = draw(M, D), draw(V, D, seed=1), draw(V, seed=2)
CLASSES = torch.rand(V, generator=torch.Generator().manual_seed(3)) + 0.5
LABELS = torch.randint(0, V, (M,), generator=torch.Generator().manual_seed(4))
LABELS[[1, 7]] = -100

OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.1},
    {"lse_square_scale": 1e-2},
    {"softcap": 3.0},
    {"ignore_index": int(LABELS[0])},
    {"label_smoothing": 0.1, "lse_square_scale": 1e-2, "softcap": 3.0, "reduction": "sum"},
]


def name_of(options: dict[str, Any]) -> str:
    return "-".join(options) or "plain"


def plain(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss with its z-loss, and the z-loss."""
    if ignore_index != -100:
        labels = labels.masked_fill(labels == -100, 0)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    ce = F.cross_entropy(logits, labels, weight, None, ignore_index, None, reduction, label_smoothing)
    valid = labels != ignore_index
    z = lse_square_scale * logits.logsumexp(-1).square() * valid
    if reduction != "none":
        z = z.sum() / (valid.sum() if reduction == "mean" else 1)
    return ce + z, z


def labels_for(options: dict[str, Any]) -> Tensor:
    return LABELS if "ignore_index" not in options else LABELS.masked_fill(LABELS == -100, 0)


@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
@pytest.mark.parametrize("classes", [None, CLASSES], ids=["", "weighted"])
def test_modules(options: dict[str, Any], classes: Tensor | None) -> None:
    from liger_kernel.transformers import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss

    labels = labels_for(options)

    def of_logits(logits: Tensor) -> Tensor:
        return plain(logits, labels, classes, **options)[0]

    agree(lambda x: LigerCrossEntropyLoss(classes, **options)(x, labels), of_logits, HIDDEN @ WEIGHT.T)
    module = LigerFusedLinearCrossEntropyLoss(classes, **options)
    agree(
        lambda h, w, b: module(w, h, labels, b),
        lambda h, w, b: of_logits(F.linear(h, w, b)),
        *(HIDDEN, WEIGHT, BIAS),
    )


def test_functions_take_their_arguments_in_order() -> None:
    from liger_kernel import functional
    from liger_kernel.ops import LigerCrossEntropyFunction, LigerFusedLinearCrossEntropyFunction
    from liger_kernel.transformers.functional import liger_cross_entropy, liger_fused_linear_cross_entropy

    labels, logits = LABELS.masked_fill(LABELS == -100, 0), HIDDEN @ WEIGHT.T
    # ignore_index, lse_square_scale, label_smoothing, reduction, softcap
    values = (int(LABELS[0]), 1e-2, 0.1, "sum", 3.0)
    names = ("ignore_index", "lse_square_scale", "label_smoothing", "reduction", "softcap")

    def of_logits(logits: Tensor) -> Tensor:
        return plain(logits, labels, CLASSES, **dict(zip(names, values, strict=True)))[0]

    ignore, scale, smoothing, reduction, cap = values
    for ours in (
        lambda x: liger_cross_entropy(x, labels, CLASSES, None, ignore, None, reduction, smoothing, scale, cap),
        lambda x: LigerCrossEntropyFunction.apply(x, labels, CLASSES, *values)[0],
        lambda x: functional.cross_entropy(x, labels, CLASSES, *values)[0],
    ):
        agree(ours, of_logits, logits)
    for function in (
        liger_fused_linear_cross_entropy,
        lambda *args: functional.fused_linear_cross_entropy(*args)[0],
        lambda *args: LigerFusedLinearCrossEntropyFunction.apply(*args)[0],
    ):
        agree(
            lambda h, w, b, f=function: f(h, w, labels, b, CLASSES, *values),
            lambda h, w, b: of_logits(F.linear(h, w, b)),
            *(HIDDEN, WEIGHT, BIAS),
        )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_what_is_returned_beside_the_loss(reduction: str) -> None:
    from liger_kernel.ops import LigerCrossEntropyFunction
    from liger_kernel.transformers import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss
    from liger_kernel.transformers.functional import CrossEntropyOutput

    logits = F.linear(HIDDEN, WEIGHT, BIAS)
    ask = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
    options = {"reduction": reduction, "lse_square_scale": 1e-2, "softcap": 3.0}
    loss, z_loss = plain(logits, LABELS, **options)
    tokens = logits.argmax(-1).masked_fill(LABELS == -100, -1)
    right = (tokens == LABELS).float()
    accuracy = right if reduction == "none" else right.sum() / (LABELS != -100).sum()
    # Labels of which some are predicted.
    assert 0 < LABELS.eq(-100).sum() < M
    for out in (
        LigerCrossEntropyLoss(**options, **ask)(logits, LABELS),
        LigerFusedLinearCrossEntropyLoss(**options, **ask)(WEIGHT, HIDDEN, LABELS, BIAS),
    ):
        assert isinstance(out, CrossEntropyOutput)
        torch.testing.assert_close(out.loss, loss)
        torch.testing.assert_close(out.z_loss, z_loss)
        torch.testing.assert_close(out.token_accuracy, accuracy)
        assert torch.equal(out.predicted_tokens, tokens)
        assert out.predicted_tokens.dtype == torch.int64
    assert LigerCrossEntropyFunction.apply(logits, LABELS, None)[1:] == (None, None, None)
    assert isinstance(LigerCrossEntropyLoss()(logits, LABELS), Tensor)


def test_token_accuracy_sees_right_tokens() -> None:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    labels = F.linear(HIDDEN, WEIGHT).argmax(-1)
    labels[:3] = (labels[:3] + 1) % V
    labels[3] = -100
    out = liger_fused_linear_cross_entropy(HIDDEN, WEIGHT, labels, return_token_accuracy=True)
    torch.testing.assert_close(out.token_accuracy, torch.tensor(7 / 10))
    assert out.predicted_tokens is None


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_token_scaling(reduction: str, smoothing: float) -> None:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    def expected(h: Tensor, w: Tensor) -> Tensor:
        logits = 5.0 * torch.tanh(F.linear(h, w) / 5.0)
        rows = F.cross_entropy(logits, LABELS, reduction="none", label_smoothing=smoothing)
        rows = rows * logits.softmax(-1).gather(1, LABELS.clamp(min=0)[:, None])[:, 0].detach()
        return {"none": rows, "sum": rows.sum(), "mean": rows.sum() / (LABELS != -100).sum()}[reduction]

    module = LigerFusedLinearCrossEntropyLoss(
        use_token_scaling=True, reduction=reduction, softcap=5.0, label_smoothing=smoothing
    )
    agree(lambda h, w: module(w, h, LABELS), expected, HIDDEN, WEIGHT)


def test_nothing_but_ignored_labels_is_zero() -> None:
    from liger_kernel.transformers import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss

    ignored, hidden = torch.full((M,), -100), HIDDEN.clone().requires_grad_()
    for scaling in (False, True):
        module = LigerFusedLinearCrossEntropyLoss(use_token_scaling=scaling, return_token_accuracy=True)
        out = module(WEIGHT, hidden, ignored)
        (gradient,) = torch.autograd.grad(out.loss, hidden)
        assert out.loss == 0
        assert out.token_accuracy == 0
        assert gradient.abs().max() == 0
    assert LigerCrossEntropyLoss()(HIDDEN @ WEIGHT.T, ignored) == 0


def test_backward_twice_and_a_frozen_trunk() -> None:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    weight = WEIGHT.clone().requires_grad_()
    loss = liger_fused_linear_cross_entropy(HIDDEN, weight, LABELS)
    first, second = (torch.autograd.grad(loss * 3, weight, retain_graph=True)[0] for _ in range(2))
    expected = torch.autograd.grad(3 * F.cross_entropy(HIDDEN @ weight.T, LABELS), weight)[0]
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(second, expected, rtol=1e-4, atol=1e-5)


def test_chunks() -> None:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    expected = F.cross_entropy(HIDDEN @ WEIGHT.T, LABELS)
    for constant in (0.01, 1, 2.5):
        loss = liger_fused_linear_cross_entropy(HIDDEN, WEIGHT, LABELS, chunk_mem_const=constant)
        torch.testing.assert_close(loss, expected)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"accum_dtype": torch.bfloat16}, "accum_dtype"),
    ({"use_token_scaling": True, "lse_square_scale": 1e-3}, "use_token_scaling"),
    ({"use_token_scaling": True, "ce_weight": CLASSES}, "use_token_scaling"),
    ({"chunk_mem_const": 0}, "chunk_mem_const"),
    ({"reduction": "median"}, "reduction"),
    ({"reduction": "median", "use_token_scaling": True}, "reduction"),
    ({"label_smoothing": 2.0}, "label_smoothing"),
    ({"softcap": -1.0}, "softcap"),
]


@pytest.mark.parametrize(("options", "name"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_refused_options(options: dict[str, Any], name: str) -> None:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    with pytest.raises(ValueError, match=name):
        liger_fused_linear_cross_entropy(HIDDEN, WEIGHT, LABELS, **options)


def test_other_refusals() -> None:
    from liger_kernel import functional as plain_functional
    from liger_kernel.transformers.functional import liger_cross_entropy, liger_fused_linear_cross_entropy

    logits = HIDDEN @ WEIGHT.T
    for option in ("size_average", "reduce"):
        with pytest.raises(ValueError, match=option):
            liger_cross_entropy(logits, LABELS, **{option: True})
    with pytest.raises(ValueError, match="two axes"):
        liger_cross_entropy(draw(2, V, V), torch.zeros(2, V, dtype=torch.long))
    with pytest.raises(ValueError, match="impl"):
        plain_functional.cross_entropy(logits, LABELS, impl="nvidia-triton")
    # What it is asked for is what it does.
    torch.testing.assert_close(
        liger_fused_linear_cross_entropy(HIDDEN, WEIGHT, LABELS, accum_dtype=torch.float32),
        F.cross_entropy(logits, LABELS),
    )


def test_forward_and_backward_by_themselves() -> None:
    from liger_kernel.ops.fused_linear_cross_entropy import (
        fused_linear_cross_entropy_backward,
        fused_linear_cross_entropy_forward,
    )

    leaves = [t.clone().requires_grad_() for t in (HIDDEN, WEIGHT, BIAS)]
    expected = F.cross_entropy(F.linear(*leaves), LABELS)
    wanted = torch.autograd.grad(2 * expected, leaves)
    with torch.no_grad():
        loss, *rest, dhidden, dweight, dbias = fused_linear_cross_entropy_forward(HIDDEN, WEIGHT, LABELS, bias=BIAS)
        once = dweight.clone()
        scaled = fused_linear_cross_entropy_backward(torch.tensor(2.0), dhidden, dweight, dbias)
    assert rest == [None, None, None]
    assert torch.equal(dweight, once)
    torch.testing.assert_close(loss, expected.detach())
    for got, want in zip(scaled, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert len(fused_linear_cross_entropy_forward(HIDDEN, WEIGHT, LABELS)) == 7
    for option in ({"token_grad_output": LABELS}, {"compute_gradients": False}, {"reduction": "none"}):
        with pytest.raises(ValueError, match=next(iter(option))):
            fused_linear_cross_entropy_forward(HIDDEN, WEIGHT, LABELS, **option)


@pytest.mark.parametrize("items", [None, 5, torch.tensor(5)])
def test_causal_language_model_loss(items: Any) -> None:
    from liger_kernel.transformers.functional import CrossEntropyOutput
    from liger_kernel.transformers.model.loss_utils import (
        LigerForCausalLMLoss,
        fixed_fused_linear_cross_entropy,
        unpack_cross_entropy_result,
    )

    hidden, labels = draw(2, 6, D), LABELS[:12].clone().resize_(1, 11)[:, :6].repeat(2, 1)
    logits = 4.0 * torch.tanh(hidden @ WEIGHT.T / 4.0)
    rows = F.cross_entropy(logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1), reduction="sum")
    expected = rows / ((labels[:, 1:] != -100).sum() if items is None else items)
    options = {"num_items_in_batch": items, "final_logit_softcapping": 4.0}
    loss = LigerForCausalLMLoss(hidden, WEIGHT, labels, D, **options, output_attentions=False)
    torch.testing.assert_close(loss, expected)
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    out = LigerForCausalLMLoss(hidden, WEIGHT, None, D, shift_labels=shifted, return_token_accuracy=True, **options)
    torch.testing.assert_close(out.loss, expected)
    assert unpack_cross_entropy_result(out)[2] is out.token_accuracy
    assert unpack_cross_entropy_result(loss) == (loss, None, None, None)
    assert unpack_cross_entropy_result((loss, None)) == (loss, None, None, None)
    assert isinstance(out, CrossEntropyOutput)
    torch.testing.assert_close(
        fixed_fused_linear_cross_entropy(hidden.reshape(-1, D), WEIGHT, shifted.reshape(-1), items, -100, 4.0), expected
    )


def test_output_classes() -> None:
    from liger_kernel.transformers.model import output_classes

    loss = torch.ones(())
    for name in ("LigerCausalLMOutputWithPast", "LigerMoeCausalLMOutputWithPast", "LigerQwen2VLCausalLMOutputWithPast"):
        cls = getattr(output_classes, name)
        out = cls(loss=loss, token_accuracy=loss)
        assert out["token_accuracy"] is loss
        assert out.predicted_tokens is None
        assert cls is getattr(output_classes, name)
        assert "Liger" not in cls.__mro__[1].__name__
    with pytest.raises(AttributeError):
        output_classes.LigerOtherCausalLMOutputWithPast  # noqa: B018
