"""What is answered computes what the plain torch form computes, forward and backward, in the same argument order."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from tigon.ops import layer_norm_reference, rms_norm_reference, rope_reference

D = 24


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tensors(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else [t for t in out if isinstance(t, Tensor) and t.is_floating_point()]


def run(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t.clone() for t in inputs]
    before = [t.detach().clone() for t in leaves]
    out = tensors(function(*leaves))
    loss = sum((t * draw(*t.shape, seed=9)).sum() for t in out if t.requires_grad)
    wanted = [t for t in leaves if t.is_floating_point()]
    gradients = torch.autograd.grad(loss, wanted)
    for t, was in zip(leaves, before, strict=True):
        assert torch.equal(t.detach(), was), "an input was written to"
    return out, list(gradients)


def agree(ours: Callable[..., Any], plain: Callable[..., Any], *inputs: Tensor) -> None:
    """Same values and gradients, in fp32 where only the order of sums differs."""
    (out, gradients), (expected, expected_gradients) = run(ours, inputs), run(plain, inputs)
    assert len(out) == len(expected)
    for got, want in zip([*out, *gradients], [*expected, *expected_gradients], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


# ---- norms ----

X, R, W, B = draw(3, 5, D), draw(3, 5, D, seed=1), draw(D, seed=2) + 1, draw(D, seed=3)


def rms(x: Tensor, w: Tensor | None, offset: float = 0.0, eps: float = 1e-6) -> Tensor:
    return rms_norm_reference(x, w, offset=offset, eps=eps)


def with_weight(module: nn.Module, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """A module as a function of its input and its weight."""
    return lambda x, w: torch.func.functional_call(module, {"weight": w}, (x,))


def test_rms_norm() -> None:
    from liger_kernel import functional as plain
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.transformers import LigerRMSNorm
    from liger_kernel.transformers.functional import liger_rms_norm

    expected = lambda x, w: rms(x, w, 1.0, 1e-5)  # noqa: E731
    agree(lambda x, w: liger_rms_norm(x, w, 1e-5, 1.0, "gemma", True), expected, X, W)
    agree(lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-5, 1.0, "gemma", True, None), expected, X, W)
    agree(lambda x, w: plain.rms_norm(x, w, 1e-5, offset=1.0, casting_mode="gemma"), expected, X, W)
    agree(with_weight(LigerRMSNorm(D, 1e-5, 1.0, "gemma"), W), expected, X, W)
    agree(lambda x: LigerRMSNorm(D, elementwise_affine=False)(x), lambda x: rms(x, None), X)


@pytest.mark.parametrize(
    ("name", "offset", "begins_at"),
    [
        ("LigerRMSNormForGemma", 1.0, 0.0),
        ("LigerRMSNormForGemma2", 1.0, 0.0),
        ("LigerRMSNormForGemma3", 1.0, 0.0),
        ("LigerRMSNormForQwen3Next", 1.0, 0.0),
        ("LigerRMSNormForMuseGlimmerTextCentered", 1.0, 0.0),
        ("LigerRMSNormForGemma4", 0.0, 1.0),
        ("LigerRMSNormForMuseGlimmer", 0.0, 1.0),
        ("LigerRMSNormForOlmo2", 0.0, 1.0),
        ("LigerRMSNormForGlm4", 0.0, 1.0),
    ],
)
def test_norms_of_families(name: str, offset: float, begins_at: float) -> None:
    from liger_kernel.transformers import rms_norm

    module = getattr(rms_norm, name)(D)
    assert module.weight.unique().tolist() == [begins_at]
    assert (module.variance_epsilon, module.offset) == (1e-6, offset)
    agree(with_weight(module, W), lambda x, w: rms(x, w, offset), X, W)
    if name in ("LigerRMSNormForGemma4", "LigerRMSNormForMuseGlimmer"):
        agree(getattr(rms_norm, name)(D, with_scale=False), lambda x: rms(x, None), X)


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32])
def test_rms_norm_keeps_the_dtype_of_the_input(weight: torch.dtype) -> None:
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm, liger_rms_norm

    x, w = X.bfloat16(), W.to(weight)
    with tigon.backend("torch"):
        y = liger_rms_norm(x, w, 1e-6)
        y2, total = liger_fused_add_rms_norm(x, x, w, 1e-6)
    assert y.dtype == y2.dtype == total.dtype == torch.bfloat16
    torch.testing.assert_close(y, (rms(x, None) * w).to(torch.bfloat16), rtol=0, atol=0)


def test_casting_modes_by_name_and_number() -> None:
    from liger_kernel.transformers.functional import liger_rms_norm

    for name, number in (("llama", 0), ("gemma", 1), ("none", -1)):
        torch.testing.assert_close(liger_rms_norm(X, W, 1e-6, 0.0, name), liger_rms_norm(X, W, 1e-6, 0.0, number))
    with pytest.raises(ValueError, match="casting_mode"):
        liger_rms_norm(X, W, 1e-6, 0.0, "other")
    x, w = X.bfloat16(), W.bfloat16()
    normed = rms(x.float(), None)
    rounded = {"llama": normed.bfloat16().float() * w, "gemma": normed * w.float(), "none": normed * w.float()}
    with tigon.backend("torch"):
        for name, wanted in rounded.items():
            torch.testing.assert_close(liger_rms_norm(x, w, 1e-6, 0.0, name), wanted.bfloat16(), rtol=0, atol=0)
    assert not torch.equal(rounded["llama"].bfloat16(), rounded["gemma"].bfloat16())


def test_fused_add_rms_norm() -> None:
    from liger_kernel import functional as plain
    from liger_kernel.ops import LigerFusedAddRMSNormFunction
    from liger_kernel.transformers import LigerFusedAddRMSNorm
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    def expected(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return rms(x + r, w, 0.0, 1e-5), x + r

    agree(lambda x, r, w: liger_fused_add_rms_norm(x, r, w, 1e-5), expected, X, R, W)
    agree(lambda x, r, w: LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-5), expected, X, R, W)
    agree(lambda x, r, w: plain.fused_add_rms_norm(x, r, w, 1e-5), expected, X, R, W)
    module = LigerFusedAddRMSNorm(D, 1e-5)
    agree(lambda x, r, w: torch.func.functional_call(module, {"weight": w}, (x, r)), expected, X, R, W)


def modulated(x: Tensor, w: Tensor | None, scale: Tensor, shift: Tensor | None, offset: float, eps: float) -> Tensor:
    """The rows of a modulation are for equal shares of those of `x`, in their order."""

    def rows(t: Tensor) -> Tensor:
        t = t.reshape(-1, D)
        return t.repeat_interleave(x.numel() // t.numel(), 0).reshape(x.shape)

    y = rms(x, w, offset, eps) * (1 + rows(scale))
    return y if shift is None else y + rows(shift)


@pytest.mark.parametrize("shape", [(D,), (1, D), (3, D), (3, 1, D), (3, 5, D), (15, D)])
def test_modulated_rms_norm(shape: tuple[int, ...]) -> None:
    from liger_kernel.ops import LigerModulatedRMSNormFunction
    from liger_kernel.transformers import LigerModulatedRMSNorm
    from liger_kernel.transformers.functional import liger_modulated_rms_norm

    scale, shift = draw(*shape, seed=4), draw(*shape, seed=5)

    def expected(x: Tensor, w: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return modulated(x, w, scale, shift, 1.0, 1e-5)

    for ours in (liger_modulated_rms_norm, LigerModulatedRMSNormFunction.apply):
        agree(lambda x, w, *of, ours=ours: ours(x, w, *of, 1e-5, 1.0, "gemma"), expected, X, W, scale, shift)
    module = LigerModulatedRMSNorm(D, 1e-5, 1.0, "gemma", "zeros")
    assert module.weight.abs().max() == 0
    agree(lambda x, w, *of: torch.func.functional_call(module, {"weight": w}, (x, *of)), expected, X, W, scale, shift)
    plain = LigerModulatedRMSNorm(D, elementwise_affine=False)
    agree(plain, lambda x, scale: modulated(x, None, scale, None, 0.0, 1e-6), X, scale)


def test_modulated_rms_norm_rounds_once() -> None:
    from liger_kernel.transformers import LigerModulatedRMSNorm
    from liger_kernel.transformers.functional import liger_modulated_rms_norm

    x, w, scale, shift = (t.bfloat16() for t in (X, W, draw(3, D, seed=4), draw(3, D, seed=5)))
    for mode in ("llama", "gemma", "none"):
        with tigon.backend("torch"):
            y = liger_modulated_rms_norm(x, w, scale, shift, 1e-6, 1.0, mode)
        wanted = modulated(*(t.float() for t in (x, w, scale, shift)), 1.0, 1e-6).bfloat16()
        torch.testing.assert_close(y, wanted, rtol=0, atol=0)
    for function in (
        LigerModulatedRMSNorm,
        lambda _, casting_mode: liger_modulated_rms_norm(x, w, scale, None, 1e-6, 0.0, casting_mode),
    ):
        with pytest.raises(ValueError, match="casting_mode"):
            function(D, casting_mode="other")
    with pytest.raises(ValueError, match="scale"):
        liger_modulated_rms_norm(x, w, scale[:2])
    with pytest.raises(ValueError, match="shift"):
        liger_modulated_rms_norm(x, w, scale, shift[:1])


def test_layer_norm() -> None:
    from liger_kernel import functional as plain
    from liger_kernel.ops import LigerLayerNormFunction
    from liger_kernel.transformers import LigerLayerNorm
    from liger_kernel.transformers.functional import liger_layer_norm

    def expected(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return layer_norm_reference(x, w, b, eps=1e-5)

    agree(lambda x, w, b: liger_layer_norm(x, w, b, 1e-5), expected, X, W, B)
    agree(lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-5), expected, X, W, B)
    agree(lambda x, w, b: plain.layer_norm(x, w, b, 1e-5), expected, X, W, B)
    module = LigerLayerNorm(D, 1e-5, bias=True)
    agree(lambda x, w, b: torch.func.functional_call(module, {"weight": w, "bias": b}, (x,)), expected, X, W, B)


def test_layer_norm_without_a_bias_has_none() -> None:
    from liger_kernel.transformers import LigerLayerNorm

    module = LigerLayerNorm(D)
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    assert LigerLayerNorm(D, bias=True).bias.abs().max() == 0
    assert (module.hidden_size, module.eps, module.variance_epsilon) == (D, 1e-6, 1e-6)
    with pytest.raises(ValueError, match="impl"):
        LigerLayerNorm(D, impl="nvidia-triton")


def test_group_norm() -> None:
    from liger_kernel.ops import LigerGroupNormFunction
    from liger_kernel.transformers.functional import liger_group_norm
    from liger_kernel.transformers.group_norm import LigerGroupNorm

    x, w, b = draw(2, 6, 3, 5), draw(6, seed=2) + 1, draw(6, seed=3)

    def expected(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.group_norm(x, 3, w, b, 1e-5)

    agree(lambda x, w, b: liger_group_norm(x, w, b, 6, 3, 1e-5), expected, x, w, b)
    agree(lambda x, w, b: LigerGroupNormFunction.apply(x, w, b, 6, 3, 1e-5), expected, x, w, b)
    module = LigerGroupNorm(6, 3, 1e-5, bias=True)
    agree(lambda x, w, b: torch.func.functional_call(module, {"weight": w, "bias": b}, (x,)), expected, x, w, b)
    agree(with_weight(LigerGroupNorm(6, 2), w), lambda x, w: F.group_norm(x, 2, w, None, 1e-6), x, w)
    assert liger_group_norm(x.bfloat16(), w, b, 6, 3, 1e-5).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="num_channels"):
        liger_group_norm(x, w, b, 3, 3, 1e-5)
    with pytest.raises(ValueError, match="num_channels"):
        module(draw(2, 3, 4))


def test_group_norm_without_a_bias_has_none() -> None:
    from liger_kernel.transformers.group_norm import LigerGroupNorm

    module = LigerGroupNorm(6, 3)
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    assert LigerGroupNorm(6, 3, bias=True).bias.abs().max() == 0
    assert LigerGroupNorm(6, 3, init_fn="zeros").weight.abs().max() == 0
    assert (module.num_channels, module.num_groups, module.eps, module.variance_epsilon) == (6, 3, 1e-6, 1e-6)
    with pytest.raises(ValueError, match="divisor"):
        LigerGroupNorm(6, 4)
    with pytest.raises(ValueError, match="init_fn"):
        LigerGroupNorm(6, 3, init_fn="randn")


# ---- softmax ----


def test_softmax() -> None:
    from liger_kernel import functional as plain
    from liger_kernel.ops import LigerSoftmaxFunction
    from liger_kernel.transformers import LigerSoftmax
    from liger_kernel.transformers.functional import liger_softmax

    for ours in (liger_softmax, plain.softmax, LigerSoftmax(), LigerSoftmaxFunction.apply):
        agree(ours, lambda x: torch.softmax(x, -1), 4 * X)
        assert ours(X.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="impl"):
        plain.softmax(X, impl="nvidia-triton")


def sparsemax(x: Tensor, dim: int) -> Tensor:
    """The projection: of the k largest, for the largest k that leaves all of them above 0, what exceeds their tau."""
    x = x.movedim(dim, -1)
    largest = x.sort(-1, descending=True).values
    taus = (largest.cumsum(-1) - 1) / torch.arange(1, x.shape[-1] + 1)
    tau = taus.gather(-1, (largest > taus).sum(-1, keepdim=True) - 1)
    return F.relu(x - tau).movedim(-1, dim)


@pytest.mark.parametrize("dim", [-1, 2, 1, 0, -3])
def test_sparsemax(dim: int) -> None:
    from liger_kernel.ops import LigerSparsemaxFunction
    from liger_kernel.transformers import LigerSparsemax
    from liger_kernel.transformers.functional import liger_sparsemax

    module = LigerSparsemax(dim)
    for ours in (lambda x: liger_sparsemax(x, dim), module, lambda x: LigerSparsemaxFunction.apply(x, dim)):
        agree(ours, lambda x: sparsemax(x, dim), X)
    y = module(X)
    torch.testing.assert_close(y.sum(dim), torch.ones_like(y.sum(dim)))
    assert (y == 0).any()
    if dim == -1:
        assert torch.equal(LigerSparsemax()(X), y)
        assert torch.equal(liger_sparsemax(X), y)
    assert module(X.bfloat16()).dtype == torch.bfloat16


# ---- divergences ----

STUDENT, TEACHER = (draw(6, D, seed=seed).log_softmax(-1) for seed in (5, 6))
LABELS = torch.tensor([0, 7, 3, 7, 7, 1])
COUNTS = LABELS != 7


def jsd(x: Tensor, y: Tensor, beta: float) -> Tensor:
    """Of each row; the student comes first."""
    if beta in (0, 1):
        return F.kl_div(*((x, y) if beta == 0 else (y, x)), reduction="none", log_target=True).sum(-1)
    m = (beta * y.exp() + (1 - beta) * x.exp()).log()
    of_teacher, of_student = (F.kl_div(m, log, reduction="none", log_target=True).sum(-1) for log in (y, x))
    return beta * of_teacher + (1 - beta) * of_student


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_jsd(beta: float) -> None:
    from liger_kernel import functional as plain
    from liger_kernel.ops import LigerJSDFunction
    from liger_kernel.transformers import LigerJSD
    from liger_kernel.transformers.functional import liger_jsd

    module = LigerJSD(beta, 7)
    assert (module.beta, module.ignore_index) == (beta, 7)
    for ours in (liger_jsd, plain.jsd, LigerJSDFunction.apply):
        agree(lambda x, y, ours=ours: ours(x, y, None, beta), lambda x, y: jsd(x, y, beta).mean(), STUDENT, TEACHER)
        of_labels = lambda x, y, ours=ours: ours(x, y, LABELS, beta, 7)  # noqa: E731
        for each in (of_labels, lambda x, y: module(x, y, LABELS)):
            agree(each, lambda x, y: jsd(x, y, beta)[COUNTS].mean(), STUDENT, TEACHER)


def plain_kl_div(x: Tensor, y: Tensor, reduction: str, log_target: bool) -> Tensor:
    each = F.kl_div(x, y, reduction="none", log_target=log_target)
    # torch warns of its "mean".
    return {"none": each, "sum": each.sum(), "mean": each.mean(), "batchmean": each.sum() / len(x)}[reduction]


def test_kl_div() -> None:
    from liger_kernel import functional as plain
    from liger_kernel.ops import LigerKLDivLossFunction
    from liger_kernel.transformers import LigerKLDIVLoss
    from liger_kernel.transformers.functional import liger_kl_div

    for log_target in (False, True):
        target = TEACHER if log_target else TEACHER.exp()
        for reduction in ("batchmean", "mean", "sum", "none"):
            options = {"reduction": reduction, "log_target": log_target}
            expected = lambda x, y, options=options: plain_kl_div(x, y, **options)  # noqa: E731
            for ours in (liger_kl_div, plain.kl_div, LigerKLDivLossFunction.apply):
                agree(lambda x, y, ours=ours, options=options: ours(x, y, **options), expected, STUDENT, target)
            agree(LigerKLDIVLoss(**options), expected, STUDENT, target)
    per_element = F.kl_div(STUDENT, TEACHER.exp(), reduction="none").mean()
    for ours in (liger_kl_div, LigerKLDIVLoss(), LigerKLDIVLoss(1e-10, None, None, "mean")):
        torch.testing.assert_close(ours(STUDENT, TEACHER.exp()), per_element)
    with pytest.warns(UserWarning, match="size_average"):
        assert LigerKLDIVLoss(1e-10, False).reduction == "sum"
    torch.testing.assert_close(plain.kl_div(STUDENT, TEACHER.exp()), per_element * D)


def test_kl_div_has_no_least_target() -> None:
    from liger_kernel.transformers import LigerKLDIVLoss
    from liger_kernel.transformers.functional import liger_kl_div

    eps = 1e-10
    target = torch.logspace(-20, 0, 64, dtype=torch.float64).reshape(2, 32)
    x = draw(2, 32).double()
    bounded = target * (target.clamp(min=eps).log() - x)
    difference = (LigerKLDIVLoss(eps, reduction="none")(x, target) - bounded).abs()
    assert 0 < difference.max() <= eps / math.e
    # Of probability 0 nothing is left, whatever its logarithm is.
    x = torch.tensor([[-torch.inf, 0.0]], requires_grad=True)
    loss = liger_kl_div(x, torch.tensor([[0.0, 1.0]]), reduction="sum")
    assert loss == 0
    assert torch.autograd.grad(loss, x)[0].tolist() == [[0.0, -1.0]]
    assert liger_kl_div(STUDENT, TEACHER.exp(), eps=0.0) == liger_kl_div(STUDENT, TEACHER.exp())
    assert liger_kl_div(STUDENT, TEACHER, log_target=True, eps=1.0) == liger_kl_div(STUDENT, TEACHER, log_target=True)
    with pytest.raises(ValueError, match="eps"):
        liger_kl_div(STUDENT, TEACHER.exp(), eps=1e-6)


def test_tvd() -> None:
    from liger_kernel.ops import LigerTVDLossFunction
    from liger_kernel.transformers import LigerTVDLoss
    from liger_kernel.transformers.functional import liger_tvd

    p, q = STUDENT.exp(), TEACHER.exp()

    def expected(p: Tensor, q: Tensor, reduction: str, counts: Tensor) -> Tensor:
        each = 0.5 * (p - q).abs() * counts[:, None]
        rows = counts.sum()
        return {"none": each, "sum": each.sum(), "mean": each.sum() / rows / D, "batchmean": each.sum() / rows}[
            reduction
        ]

    for reduction in ("batchmean", "mean", "sum", "none"):
        for labels, counts in ((None, torch.ones(6)), (LABELS, COUNTS.float())):
            wanted = lambda p, q, how=(reduction, counts): expected(p, q, *how)  # noqa: E731
            module = LigerTVDLoss(reduction, 7)
            agree(lambda p, q, module=module, labels=labels: module(p, q, labels), wanted, p, q)
            for ours in (liger_tvd, LigerTVDLossFunction.apply):
                agree(lambda p, q, ours=ours, how=(labels, reduction, 7): ours(p, q, *how), wanted, p, q)
    assert liger_tvd(p, q) == liger_tvd(p, q, None, "mean")
    assert LigerTVDLoss()(p, q) == LigerTVDLossFunction.apply(p, q) == liger_tvd(p, q, None, "batchmean")


def test_divergences_of_no_row_that_counts_are_zero() -> None:
    from liger_kernel.transformers.functional import liger_jsd, liger_tvd

    labels = torch.full((6,), -100)
    for ours, *inputs in ((liger_jsd, STUDENT, TEACHER), (liger_tvd, STUDENT.exp(), TEACHER.exp())):
        (loss,), gradients = run(lambda x, y, ours=ours: ours(x, y, labels), tuple(inputs))
        assert loss == 0
        assert all(t.abs().max() == 0 for t in gradients)


def test_divergences_refuse_what_they_would_pass_over() -> None:
    from liger_kernel import functional as plain
    from liger_kernel.ops import LigerJSDFunction, LigerTVDLossFunction
    from liger_kernel.transformers.functional import liger_jsd, liger_kl_div, liger_tvd

    for function in (liger_jsd, liger_kl_div, liger_tvd):
        with pytest.raises(ValueError, match="two axes"):
            function(STUDENT[None], TEACHER[None])
    for function in (liger_kl_div, liger_tvd):
        with pytest.raises(ValueError, match="reduction"):
            function(STUDENT, TEACHER, reduction="rows")
    for option in ("size_average", "reduce"):
        with pytest.raises(ValueError, match=option):
            liger_kl_div(STUDENT, TEACHER, **{option: False})
    for option in ("jsd_impl", "jsd_mode"):
        with pytest.raises(ValueError, match=option):
            LigerJSDFunction.apply(STUDENT, TEACHER, **{option: "nvidia-triton"})
    for function in (plain.jsd, plain.kl_div):
        with pytest.raises(ValueError, match="impl"):
            function(STUDENT, TEACHER, impl="nvidia-triton")
    with pytest.raises(ValueError, match="beta"):
        liger_jsd(STUDENT, TEACHER, beta=2.0)
    with pytest.raises(ValueError, match="labels"):
        LigerTVDLossFunction.apply(STUDENT, TEACHER, LABELS[1:])


# ---- gated units ----


def test_gated_products() -> None:
    from liger_kernel import functional as plain
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction, LigerGELUMulFunction, LigerSiLUMulFunction
    from liger_kernel.transformers.functional import liger_geglu, liger_swiglu

    def silu(a: Tensor, b: Tensor) -> Tensor:
        return F.silu(a) * b

    def scaled(a: Tensor, b: Tensor) -> Tensor:
        return F.silu(a * 0.5) * b * 3

    def gelu(a: Tensor, b: Tensor) -> Tensor:
        return F.gelu(a, approximate="tanh") * b

    agree(liger_swiglu, silu, X, R)
    agree(plain.swiglu, silu, X, R)
    agree(lambda a, b: plain.swiglu(a, b, 0.5, 3.0), scaled, X, R)
    agree(lambda a, b: LigerSiLUMulFunction.apply(a, b, 0.5, 3.0), scaled, X, R)
    packed = torch.cat((X, R), -1)
    agree(LigerFusedGateUpSiLUMulFunction.apply, lambda y: silu(*y.chunk(2, -1)), packed)
    for geglu in (liger_geglu, plain.geglu, LigerGELUMulFunction.apply):
        agree(geglu, gelu, X, R)


def test_relu_squared() -> None:
    from liger_kernel.ops import LigerReLUSquaredFunction
    from liger_kernel.transformers import LigerReLUSquared
    from liger_kernel.transformers.functional import liger_relu_squared

    for ours in (liger_relu_squared, LigerReLUSquared(), LigerReLUSquaredFunction.apply):
        agree(ours, lambda x: F.relu(x).square(), X)


CONFIG = types.SimpleNamespace(hidden_size=D, intermediate_size=40, hidden_act="silu", mlp_multipliers=(0.5, 3.0))


def gated(mlp: nn.Module, x: Tensor, activation: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    return mlp.down_proj(activation(mlp.gate_proj(x)) * mlp.up_proj(x))


MLPS = {
    "LigerSwiGLUMLP": gated,
    "LigerMLP": gated,
    "LigerQwen3MoeSwiGLUMLP": gated,
    "swiglu.LigerHunyuanV1SwiGLUMLP": gated,
    "LigerSwiGLUMLPForMuseGlimmer": gated,
    "LigerFalconH1SwiGLUMLP": lambda mlp, x: gated(mlp, x, lambda gate: F.silu(gate * 0.5)) * 3,
    "LigerFalconH1MLP": lambda mlp, x: gated(mlp, x, lambda gate: F.silu(gate * 0.5)) * 3,
    "LigerBlockSparseTop2MLP": lambda mlp, x: mlp.w2(F.silu(mlp.w1(x)) * mlp.w3(x)),
    "LigerPhi3SwiGLUMLP": lambda mlp, x: mlp.down_proj(
        F.silu(mlp.gate_up_proj(x)[..., :40]) * mlp.gate_up_proj(x)[..., 40:]
    ),
    "LigerGEGLUMLP": lambda mlp, x: gated(mlp, x, lambda gate: F.gelu(gate, approximate="tanh")),
    "geglu.LigerGEGLUMLPForGemma4": lambda mlp, x: gated(mlp, x, lambda gate: F.gelu(gate, approximate="tanh")),
}


@pytest.mark.parametrize("name", MLPS)
def test_mlps(name: str) -> None:
    import liger_kernel.transformers as module

    *path, cls = name.split(".")
    for part in path:
        module = getattr(module, part)
    config = types.SimpleNamespace(**{**vars(CONFIG), **({"hidden_act": None} if "GEGLU" in name else {})})
    mlp = getattr(module, cls)(config)
    agree(mlp, lambda x: MLPS[name](mlp, x), X)
    if "GEGLU" not in name:
        config.hidden_act = "relu"
        with pytest.raises(ValueError, match="relu"):
            getattr(module, cls)(config)


def test_geglu_mlps_take_the_form_of_gelu_from_the_configuration() -> None:
    from liger_kernel.transformers import LigerSwiGLUMLP
    from liger_kernel.transformers.geglu import LigerGEGLUMLP, LigerGEGLUMLPForGemma4

    exact = LigerGEGLUMLP(types.SimpleNamespace(**{**vars(CONFIG), "hidden_act": "gelu"}))
    agree(exact, lambda x: gated(exact, x, F.gelu), X)
    with pytest.raises(ValueError, match="silu"):
        LigerGEGLUMLP(CONFIG)
    shared = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_act": None}
    config = types.SimpleNamespace(**{**vars(CONFIG), **shared})
    assert [LigerGEGLUMLPForGemma4(config, layer).gate_proj.out_features for layer in (0, 1, 2)] == [40, 40, 80]
    assert LigerSwiGLUMLP(CONFIG, 56).up_proj.out_features == 56


# ---- rotations ----

Q, K = draw(2, 4, 6, 16), draw(2, 2, 6, 16, seed=1)
ANGLES = draw(2, 6, 8, seed=2)
COS, SIN = (torch.cat((t, t), -1) for t in (ANGLES.cos(), ANGLES.sin()))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1] // 2
    x, rest = x[..., : 2 * half], x[..., 2 * half :]
    return torch.cat((x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin, rest), -1)


def both(q: Tensor, k: Tensor, cos: Tensor = COS, sin: Tensor = SIN) -> tuple[Tensor, Tensor]:
    return rotated(q, cos.unsqueeze(1), sin.unsqueeze(1)), rotated(k, cos.unsqueeze(1), sin.unsqueeze(1))


def test_rope() -> None:
    from liger_kernel import functional as plain
    from liger_kernel.ops import LigerRopeFunction
    from liger_kernel.transformers import liger_rotary_pos_emb
    from liger_kernel.transformers.functional import liger_rope
    from liger_kernel.transformers.rope import liger_rotary_pos_emb_gpt_oss

    for ours in (liger_rotary_pos_emb, liger_rope, plain.rope, LigerRopeFunction.apply):
        agree(lambda q, k, ours=ours: ours(q, k, COS, SIN), both, Q, K)
    agree(lambda q, k: liger_rotary_pos_emb(q, k, COS.unsqueeze(1), SIN.unsqueeze(1)), both, Q, K)
    agree(lambda q, k: liger_rotary_pos_emb_gpt_oss(q, k, COS[..., :8], SIN[..., :8]), both, Q, K)
    # One table for all positions, and which of them each token has.
    table, positions = draw(20, 8, seed=3), torch.tensor([[3, 4, 5, 6, 7, 8], [0, 2, 4, 6, 8, 19]])
    cos, sin = (torch.cat((t, t), -1) for t in (table.cos(), table.sin()))
    agree(
        lambda q, k: liger_rotary_pos_emb(q, k, cos, sin, positions),
        lambda q, k: both(q, k, cos[positions], sin[positions]),
        Q,
        K,
    )


def test_rope_of_a_part_and_of_another_axis() -> None:
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    cos, sin = (torch.cat((t[..., :4], t[..., :4]), -1) for t in (ANGLES.cos(), ANGLES.sin()))
    agree(lambda q, k: liger_rotary_pos_emb(q, k, cos, sin), lambda q, k: both(q, k, cos, sin), Q, K)
    agree(
        lambda q, k: liger_rotary_pos_emb(q, k, cos[..., :4], sin[..., :4], rotary_dim=8),
        lambda q, k: both(q, k, cos, sin),
        Q,
        K,
    )
    swapped = [t.transpose(1, 2).contiguous() for t in (Q, K)]
    agree(
        lambda q, k: liger_rotary_pos_emb(q, k, COS, SIN, unsqueeze_dim=2),
        lambda q, k: tuple(t.transpose(1, 2) for t in both(q.transpose(1, 2), k.transpose(1, 2))),
        *swapped,
    )
    with pytest.raises(ValueError, match="rotary_dim"):
        liger_rotary_pos_emb(Q, K, COS, SIN, rotary_dim=12)


def test_rope_of_images_and_of_three_axes() -> None:
    from liger_kernel.ops import LigerQwen2VLMRopeFunction
    from liger_kernel.transformers.functional import liger_qwen2vl_mrope
    from liger_kernel.transformers.qwen2vl_mrope import liger_multimodal_rotary_pos_emb
    from liger_kernel.transformers.rope import liger_rotary_pos_emb_vision

    q, k = Q[0].transpose(0, 1), K[0].transpose(0, 1)
    agree(
        lambda q, k: liger_rotary_pos_emb_vision(q, k, COS[0], SIN[0]),
        lambda q, k: (rotated(q, COS[0][:, None], SIN[0][:, None]), rotated(k, COS[0][:, None], SIN[0][:, None])),
        q,
        k,
    )
    angles = draw(3, 2, 6, 8, seed=4)
    cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
    mixed = [torch.cat([t[0][..., :2], t[1][..., 2:5], t[2][..., 5:8]] * 2, -1) for t in (cos[..., :8], sin[..., :8])]
    for ours in (liger_multimodal_rotary_pos_emb, liger_qwen2vl_mrope, LigerQwen2VLMRopeFunction.apply):
        agree(lambda q, k, ours=ours: ours(q, k, cos, sin, [2, 3, 3]), lambda q, k: both(q, k, *mixed), Q, K)


def test_rope_of_complex_tables() -> None:
    from liger_kernel.ops import LigerLlama4RopeFunction
    from liger_kernel.transformers import liger_llama4_text_rotary_pos_emb, liger_llama4_vision_rotary_pos_emb
    from liger_kernel.transformers.llama4_rope import apply_liger_llama4_rope_full

    q, k = Q.transpose(1, 2).contiguous(), K.transpose(1, 2).contiguous()
    table = torch.polar(torch.ones_like(ANGLES), ANGLES)

    def turned(x: Tensor, table: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * table[:, :, None, :]).flatten(3)

    def plain(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return turned(q, table), turned(k, table)

    agree(lambda q, k: liger_llama4_text_rotary_pos_emb(q, k, table), plain, q, k)
    agree(lambda q, k: LigerLlama4RopeFunction.apply(q, k, table.unsqueeze(2)), plain, q, k)
    one = table[:1]
    for shape in ((6, 8), (6, 1, 8), (1, 6, 1, 8)):
        agree(
            lambda q, k, shape=shape: liger_llama4_vision_rotary_pos_emb(q, k, one.reshape(shape)),
            lambda q, k: (turned(q, one), turned(k, one)),
            q,
            k,
        )
    with pytest.raises(ValueError, match="complex"):
        liger_llama4_text_rotary_pos_emb(q, k, table.real)
    module = types.SimpleNamespace()
    apply_liger_llama4_rope_full(module)
    assert module.apply_rotary_emb is liger_llama4_text_rotary_pos_emb
    assert module.vision_apply_rotary_emb is liger_llama4_vision_rotary_pos_emb


def test_rope_agrees_with_the_reference_of_tigon() -> None:
    """The plain form of these tests is itself right."""
    expected = rope_reference(Q, K, COS, SIN)
    for got, want in zip(both(Q, K), expected, strict=True):
        torch.testing.assert_close(got, want)
