"""Distillation: every divergence and option against the plain form on full logits, in fp64, and TRL's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from tests.losses.test_driver import ProductSpy
from torch import Tensor

from tigon import losses

ROWS, STUDENT, TEACHER, CLASSES = 7, 6, 9, 11
SIZES: dict[str, dict[str, Any]] = {
    "all": {},
    "some": {"max_logits_bytes": 3 * 2 * CLASSES * 8},
    "row": {"max_logits_bytes": 2 * CLASSES * 8},
    "valid": {"max_logits_bytes": 3 * 2 * CLASSES * 8, "skip_ignored": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 1.7},
    "mixed": {"soft_weight": 0.3, "hard_weight": 0.7, "temperature": 0.6},
    "hard": {"soft_weight": 0.0, "hard_weight": 1.0},
    "capped": {
        "softcap": 2.0,
        "logit_scale": 0.6,
        "teacher_softcap": 1.5,
        "teacher_logit_scale": 1.2,
        "hard_weight": 0.1,
    },
    "items": {"num_items": torch.tensor([12])},
}


def inputs() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)  # noqa: E731
    labels = torch.randint(0, CLASSES, (ROWS,), generator=g)
    labels[2] = labels[5] = -100
    return {
        "student_hidden": draw(ROWS, STUDENT),
        "student_weight": draw(CLASSES, STUDENT),
        "student_bias": draw(CLASSES),
        "teacher_hidden": draw(ROWS, TEACHER),
        "teacher_weight": draw(CLASSES, TEACHER),
        "teacher_bias": draw(CLASSES),
        "labels": labels,
    }


def plain(
    given: dict[str, Tensor],
    divergence: str,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    num_items: Any = None,
    **caps: float,
) -> dict[str, Tensor]:
    def logits(role: str, prefix: str) -> Tensor:
        z = F.linear(given[f"{role}_hidden"], given[f"{role}_weight"], given[f"{role}_bias"])
        z, cap = z * caps.get(f"{prefix}logit_scale", 1.0), caps.get(f"{prefix}softcap")
        return z if cap is None else cap * torch.tanh(z / cap)

    keep = given["labels"] != -100
    s, t = logits("student", "")[keep], logits("teacher", "teacher_")[keep].detach()
    q, p = (s / temperature).softmax(-1), (t / temperature).softmax(-1)
    kl = lambda a, b: (a * (a / b).log()).sum(-1)  # noqa: E731
    m = beta * p + (1 - beta) * q
    soft = {
        "kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "jsd": lambda: {0: kl(p, q), 1: kl(q, p)}.get(beta, beta * kl(p, m) + (1 - beta) * kl(q, m)),
        "tvd": lambda: (p - q).abs().sum(-1) / 2,
        "cosine": lambda: 1 - (s * t).sum(-1) / (s.square().sum(-1) * t.square().sum(-1)).sqrt(),
    }[divergence]()
    divisor = keep.sum() if num_items is None else num_items.squeeze()
    hard = F.cross_entropy(s, given["labels"][keep], reduction="sum") / divisor
    soft = soft.sum() / divisor
    return {"loss": soft_weight * soft + hard_weight * hard, "soft_loss": soft, "hard_loss": hard * bool(hard_weight)}


def compare(given: dict[str, Tensor], divergence: str, options: dict[str, Any], size: dict[str, Any]) -> None:
    names = "student_hidden", "student_weight", "student_bias"
    ours, theirs = ({k: v.clone().requires_grad_(v.is_floating_point()) for k, v in given.items()} for _ in range(2))
    out = losses.distill(**ours, divergence=divergence, **options, **size)
    expected = plain(theirs, divergence, **options)
    for name, value in expected.items():
        torch.testing.assert_close(getattr(out, name), value, msg=lambda m, n=name: f"{n}: {m}")
    assert not out.soft_loss.requires_grad
    assert not out.hard_loss.requires_grad
    out.loss.backward()
    expected["loss"].backward()
    for name in names:
        torch.testing.assert_close(ours[name].grad, theirs[name].grad, msg=lambda m, n=name: f"d{n}: {m}")
    assert all(ours[k].grad is None for k in given if k not in names)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("divergence", ["kl", "reverse_kl", "jsd", "tvd", "cosine"])
def test_distill_is_the_plain_form(divergence: str, options: str, size: str) -> None:
    compare(inputs(), divergence, OPTIONS[options], SIZES[size])


@pytest.mark.parametrize("beta", [0, 1e-6, 0.1, 0.5, 0.9, 1 - 1e-6, 1])
def test_weight_of_the_teacher(beta: float) -> None:
    compare(inputs(), "jsd", {"beta": beta}, {})
    trl = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    given = inputs()
    s, t = (
        F.linear(given[f"{r}_hidden"], given[f"{r}_weight"], given[f"{r}_bias"]).unsqueeze(0)
        for r in ("student", "teacher")
    )
    for num_items in (None, torch.tensor(12)):
        options = {"beta": beta, "temperature": 0.8}
        theirs = trl.GKDTrainer.generalized_jsd_loss(
            s, t, given["labels"].unsqueeze(0), num_items_in_batch=num_items, **options
        )
        torch.testing.assert_close(losses.distill(**given, num_items=num_items, **options).loss, theirs)


def test_direction_on_a_pair_that_is_not_symmetric() -> None:
    """Teacher (0.9, 0.1), student (0.5, 0.5): 0.368064 is KL(teacher || student), 0.510826 the other way."""
    one, eye = torch.eye(2)[:1], torch.eye(2)
    teacher = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log()
    call = one, torch.zeros(2, 2), one, teacher, torch.tensor([0])
    for options, wanted in (
        ({"divergence": "kl"}, 0.368064),
        ({"divergence": "reverse_kl"}, 0.510826),
        ({"beta": 0.0}, 0.368064),
        ({"beta": 1.0}, 0.510826),
    ):
        torch.testing.assert_close(losses.distill(*call, **options).loss.item(), wanted, rtol=1e-5, atol=0)
    same = losses.distill(one, eye, one, eye, torch.tensor([0]))
    assert same.loss == 0  # no part of the labels in it


def test_nothing_to_learn_from_and_second_backward() -> None:
    given = inputs()
    names = "student_hidden", "student_weight", "student_bias"
    for size in SIZES.values():
        empty = given | {"labels": torch.full((ROWS,), -100), "teacher_hidden": given["teacher_hidden"] * float("nan")}
        leaves = {k: empty[k].clone().requires_grad_() for k in names}
        out = losses.distill(**(empty | leaves), hard_weight=0.5, **size)
        assert out.loss == 0
        assert all((g == 0).all() for g in torch.autograd.grad(out.loss, list(leaves.values())))
        leaves = {k: given[k].clone().requires_grad_() for k in names}
        out = losses.distill(**(given | leaves), **size)
        first = torch.autograd.grad(2 * out.loss, list(leaves.values()), retain_graph=True)
        for a, b in zip(first, torch.autograd.grad(out.loss, list(leaves.values())), strict=True):
            torch.testing.assert_close(a, 2 * b)


def test_rows_that_are_skipped_take_no_product() -> None:
    given = inputs()
    leaves = {k: given[k].clone().requires_grad_() for k in ("student_hidden", "student_weight")}
    with ProductSpy() as spy:
        losses.distill(**(given | leaves), skip_ignored=True).loss.backward()
    assert spy.multiplications == (3 * STUDENT + TEACHER) * CLASSES * (ROWS - 2)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"divergence": "hellinger"}, "divergence"),
        ({"beta": 1.5}, "beta"),
        ({"temperature": 0}, "temperature"),
        ({"teacher_weight": torch.zeros(CLASSES + 1, TEACHER).double(), "teacher_bias": None}, "teacher_weight"),
        ({"teacher_hidden": torch.zeros(ROWS + 1, TEACHER).double()}, "teacher_hidden"),
        ({"student_bias": torch.zeros(3).double()}, "student_bias"),
        ({"max_logits_bytes": CLASSES * 8}, "max_logits_bytes"),
        ({"softcap": -1.0}, "softcap"),
        ({"num_items": -1}, "num_items"),
        ({"labels": torch.full((ROWS,), CLASSES)}, "labels"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(ValueError, match=f"linear_divergence: {argument}: expected"):
        losses.distill(**(inputs() | options))


def test_fp16_leaves_room_for_the_share_of_a_mean() -> None:
    """With the loss scaled, as fp16 is trained, and many tokens in the mean."""
    given, scale = inputs(), 2.0**16
    few = {k: v if k == "labels" else v.half() for k, v in given.items()}

    def gradients(given: dict[str, Tensor]) -> list[Tensor]:
        given = {k: v.clone().requires_grad_(k.startswith("student")) for k, v in given.items()}
        loss = losses.distill(**given, num_items=2**17).loss
        (loss * scale).backward()
        return [given[k].grad.double() for k in ("student_hidden", "student_weight", "student_bias")]

    wide = {k: v if k == "labels" else v.double() for k, v in few.items()}
    for actual, exact in zip(gradients(few), gradients(wide), strict=True):
        assert (actual - exact).norm() / exact.norm() < 5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_backward_twice_where_what_is_saved_is_computed_again(dtype: torch.dtype) -> None:
    given = {k: v if k == "labels" else v.to(dtype) for k, v in inputs().items()}
    leaf = given.pop("student_weight").requires_grad_()

    def step(weight: Tensor) -> Tensor:
        return losses.distill(student_weight=weight, **given).loss

    loss = torch.utils.checkpoint.checkpoint(step, leaf, use_reentrant=False)
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    first = first.clone()
    (second,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(second, first)
    torch.testing.assert_close(first, torch.autograd.grad(step(leaf), leaf)[0])
