"""Losses of pairs and of single responses: every type and option against the plain form on full logits, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.losses import plain
from torch import Tensor

from tigon import losses

PAIRS, LENGTH, WIDTH, CLASSES = 3, 5, 6, 11
ROW = CLASSES * 8
# A pair at a time, two of three, all at once, none at once (log-probabilities first), a pair without ignored rows.
SIZES: dict[str, dict[str, Any]] = {
    "all": {},
    "pair": {"max_logits_bytes": 2 * LENGTH * ROW},
    "two_pairs": {"max_logits_bytes": 4 * LENGTH * ROW + 7},
    "row": {"max_logits_bytes": ROW},
    "valid": {"max_logits_bytes": 2 * LENGTH * ROW, "skip_ignored": True},
    "valid_row": {"max_logits_bytes": ROW, "skip_ignored": True},
}
SMOOTHING = {"sigmoid": (0.0, 0.2), "robust": (0.0, 0.2), "exo_pair": (0.1,), "aot": (0.0, 0.2), "aot_unpaired": (0.2,)}


def inputs(sequences: int = 2 * PAIRS, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    labels = torch.randint(0, CLASSES, (sequences, LENGTH), generator=g)
    labels[0, 3:] = labels[1, :2] = labels[-1, 4:] = -100
    given = {"hidden": draw(sequences, LENGTH, WIDTH), "weight": draw(CLASSES, WIDTH), "bias": draw(CLASSES)}
    return {**given, "labels": labels, "ref": 3 * draw(sequences) - 8}


def leaves(given: dict[str, Any]) -> list[Tensor]:
    return [given[k].detach().clone().requires_grad_() for k in ("hidden", "weight", "bias")]


def assert_same(out: Any, expected: dict[str, Tensor], ours: list[Tensor], theirs: list[Tensor], **tolerance) -> None:
    tolerance = tolerance or {"rtol": 1e-9, "atol": 1e-11}
    for name, value in expected.items():
        made = getattr(out, name)
        torch.testing.assert_close(made.detach(), value.detach(), **tolerance, msg=lambda m, n=name: f"{n}: {m}")
        assert made.requires_grad == (name == "loss"), name
    wanted = torch.autograd.grad(expected["loss"], theirs)
    for name, a, b in zip(("hidden", "weight", "bias"), torch.autograd.grad(out.loss, ours), wanted, strict=True):
        torch.testing.assert_close(a, b, **tolerance, msg=lambda m, n=name: f"d{n}: {m}")


def cases() -> list[Any]:
    found = []
    for kind in losses.DPO:
        for smoothing in SMOOTHING.get(kind, (0.0,)):
            found += [pytest.param(kind, smoothing, size, id=f"{kind}-{smoothing}-{size}") for size in SIZES]
    return found


@pytest.mark.parametrize(("kind", "smoothing", "size"), cases())
def test_dpo_is_the_plain_form(kind: str, smoothing: float, size: str) -> None:
    given = inputs()
    for options in ({}, {"averages": True, "nll_weight": 0.3, "beta": 0.7, "tau": 0.5}):
        ours, theirs = leaves(given), leaves(given)
        log_probs, entropy = plain.token_log_probs(theirs[0], theirs[1], given["labels"], theirs[2])
        if losses.DPO[kind].divides:
            # Their scores are means already.
            options = {k: v for k, v in options.items() if k != "averages"}
        expected = plain.dpo(log_probs, given["labels"], given["ref"], kind, e=smoothing, **options)
        expected["entropy"] = entropy.sum() / (given["labels"] != -100).sum()
        names = {"averages": "average_log_probs", "tau": "discopop_tau"}
        out = losses.dpo(
            *ours[:2],
            given["labels"],
            bias=ours[2],
            ref_log_probs=given["ref"],
            loss_type=kind,
            label_smoothing=smoothing,
            **{names.get(k, k): v for k, v in options.items()},
            **SIZES[size],
        )
        assert_same(out, expected, ours, theirs)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cap", [{}, {"softcap": 2.0, "logit_scale": 0.7}], ids=["", "capped"])
def test_reference_of_another_width(size: str, cap: dict[str, float]) -> None:
    """Hidden states of a reference, its log-probabilities of tokens, and those of responses are one and the same."""
    given, other = inputs(), inputs(seed=1)
    ref_hidden, ref_weight = other["hidden"][..., :4].contiguous(), other["weight"][:, :4].contiguous()
    ref_hidden.requires_grad_(), ref_weight.requires_grad_()
    ref, _ = plain.token_log_probs(ref_hidden, ref_weight, given["labels"], other["bias"], **cap)
    for reference in (
        {"ref_hidden": ref_hidden, "ref_weight": ref_weight, "ref_bias": other["bias"]},
        {"ref_log_probs": ref.detach().masked_fill(given["labels"] == -100, float("nan"))},
        {"ref_log_probs": ref.sum(1)},
    ):
        ours, theirs = leaves(given), leaves(given)
        log_probs, _ = plain.token_log_probs(theirs[0], theirs[1], given["labels"], theirs[2], **cap)
        expected = plain.dpo(log_probs, given["labels"], ref.detach().sum(1), "sigmoid")
        out = losses.dpo(*ours[:2], given["labels"], bias=ours[2], **reference, **cap, **SIZES[size])
        assert_same(out, expected, ours, theirs)
        assert ref_hidden.grad is ref_weight.grad is None


def test_no_reference_and_this_head_as_reference() -> None:
    given = inputs()
    ours = leaves(given)
    free = losses.dpo(*ours[:2], given["labels"], reference_free=True)
    zeros = losses.dpo(*ours[:2], given["labels"], ref_log_probs=torch.zeros(2 * PAIRS))
    assert free.loss == zeros.loss
    same = losses.dpo(*ours[:2], given["labels"], bias=ours[2], ref_hidden=given["hidden"])
    torch.testing.assert_close(same.loss, torch.tensor(2.0, dtype=torch.float64).log())
    assert same.chosen_rewards.abs().max() < 1e-12


def test_types_are_mixed_by_weight() -> None:
    given = inputs()
    mixed, *single = (
        losses.dpo(given["hidden"], given["weight"], given["labels"], ref_log_probs=given["ref"], loss_type=kind).loss
        for kind in ({"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.5}, "sigmoid", "bco_pair", "sft")
    )
    torch.testing.assert_close(mixed, 0.8 * single[0] + 0.2 * single[1] + 1.5 * single[2])


@pytest.mark.parametrize("divergence", ["forward_kl", "js_divergence", "alpha_divergence"])
def test_divergences(divergence: str) -> None:
    given = inputs()
    ours, theirs = leaves(given), leaves(given)
    log_probs, _ = plain.token_log_probs(theirs[0], theirs[1], given["labels"], theirs[2])
    ratio = log_probs.sum(1) - given["ref"]
    score = {
        "forward_kl": lambda: 1 - torch.exp(-ratio),
        "js_divergence": lambda: torch.log(2 * ratio.exp() / (1 + ratio.exp())),
        "alpha_divergence": lambda: (ratio.exp() ** (0.3 - 1) - 1) / (0.3 - 1),
    }[divergence]()
    expected = {"loss": -plain.log_sigmoid(0.2 * (score[:PAIRS] - score[PAIRS:])).mean()}
    expected["chosen_rewards"] = 0.2 * ratio[:PAIRS]
    out = losses.dpo(
        *ours[:2],
        given["labels"],
        bias=ours[2],
        ref_log_probs=given["ref"],
        beta=0.2,
        f_divergence=divergence,
        f_alpha=0.3,
    )
    assert_same(out, expected, ours, theirs)


def test_tokens_beyond_the_shorter_response() -> None:
    given = inputs()
    labels = given["labels"]
    valid = labels != -100
    log_probs, _ = plain.token_log_probs(given["hidden"], given["weight"], labels)
    shared = torch.minimum(valid[:PAIRS].sum(1), valid[PAIRS:].sum(1)).repeat(2)
    position = valid.cumsum(1)
    sums = torch.stack(
        [(lp * torch.where(p <= n, 1.0, 0.4)).sum() for lp, p, n in zip(log_probs, position, shared, strict=True)]
    )
    out = losses.dpo(given["hidden"], given["weight"], labels, reference_free=True, length_alpha=0.4)
    torch.testing.assert_close(torch.cat((out.chosen_log_probs, out.rejected_log_probs)), sums)
    assert (sums != log_probs.sum(1)).sum() == 3


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", losses.CPO)
@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_cpo(kind: str, alpha: float, size: str) -> None:
    given = inputs()
    ours, theirs = leaves(given), leaves(given)
    log_probs, _ = plain.token_log_probs(theirs[0], theirs[1], given["labels"], theirs[2])
    valid = given["labels"] != -100
    sums = log_probs.sum(1) / (valid.sum(1) if kind in ("ipo", "simpo") else 1)
    score = (1 - torch.exp(sums) ** -alpha) / alpha if alpha else sums
    c, r = score[:PAIRS], score[PAIRS:]
    m = 0.3 * (c - r) - (0.9 if kind == "simpo" else 0.0)
    e = 0.1 if kind in ("sigmoid", "simpo") else 0.0
    each = {"hinge": (1 - m).clamp(min=0), "ipo": (c - r - 1 / 0.6) ** 2}.get(
        kind, -(1 - e) * plain.log_sigmoid(m) - e * plain.log_sigmoid(-m)
    )
    nll = -log_probs[:PAIRS].sum() / valid[:PAIRS].sum()
    expected = {"loss": each.mean() + 0.4 * nll, "nll_loss": nll, "chosen_log_probs": sums[:PAIRS]}
    expected |= {"chosen_rewards": 0.3 * c, "rejected_rewards": 0.3 * r, "margin": 0.3 * (c - r).mean()}
    options = {"beta": 0.3, "label_smoothing": e, "nll_weight": 0.4, "bias": ours[2], **SIZES[size]}
    out = losses.cpo(*ours[:2], given["labels"], loss_type=kind, gamma=0.9, alpha=alpha, **options)
    assert_same(out, expected, ours, theirs)
    if kind == "simpo" and not alpha:
        ours = leaves(given)
        out = losses.simpo(*ours[:2], given["labels"], gamma=0.9, **(options | {"bias": ours[2]}))
        torch.testing.assert_close(out.loss, expected["loss"])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("with_prompt", [False, True])
def test_orpo(size: str, with_prompt: bool) -> None:
    given = inputs()
    labels = given["labels"]
    nll_labels = labels[:PAIRS].clone()
    nll_labels[0, 4], nll_labels[1, 0], nll_labels[2, 1] = 7, 3, -100
    ours, theirs = leaves(given), leaves(given)
    log_probs, _ = plain.token_log_probs(theirs[0], theirs[1], labels, theirs[2])
    p = torch.exp(log_probs.sum(1) / (labels != -100).sum(1))
    odds = p / (1 - p)
    log_odds = torch.log(odds[:PAIRS] / odds[PAIRS:])
    asked = nll_labels if with_prompt else labels[:PAIRS]
    nll = -plain.token_log_probs(theirs[0][:PAIRS], theirs[1], asked, theirs[2])[0].sum() / (asked != -100).sum()
    expected = {"loss": 0.7 * nll - 0.2 * plain.log_sigmoid(log_odds).mean(), "nll_loss": nll, "log_odds": log_odds}
    expected["chosen_rewards"] = 0.2 * p[:PAIRS].log()
    out = losses.orpo(
        *ours[:2],
        labels,
        bias=ours[2],
        beta=0.2,
        nll_weight=0.7,
        nll_labels=nll_labels if with_prompt else None,
        **SIZES[size],
    )
    assert_same(out, expected, ours, theirs)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wanted", [(1, 0, 1, 1, 0, 0), (1,) * 6, (0,) * 6], ids=["both", "wanted", "unwanted"])
@pytest.mark.parametrize("kind", losses.KTO)
def test_kto(kind: str, wanted: tuple[int, ...], size: str) -> None:
    """Also of one class, and of weights, which change no divisor."""
    given = inputs()
    is_wanted = torch.tensor(wanted).bool()
    kl = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    ours, theirs = leaves(given), leaves(given)
    log_probs, _ = plain.token_log_probs(theirs[0], theirs[1], given["labels"], theirs[2])
    expected = plain.kto(log_probs, given["ref"], is_wanted, 0.4 if kind == "kto" else 0.0, 0.3, (1.0, 1.33))
    out = losses.kto(
        *ours[:2],
        given["labels"],
        is_wanted,
        bias=ours[2],
        ref_log_probs=given["ref"],
        kl=kl if kind == "kto" else None,
        loss_type=kind,
        beta=0.3,
        unwanted_weight=1.33,
        **SIZES[size],
    )
    assert_same(out, expected, ours, theirs)
    assert kl.grad is None


def test_chosen_sum_is_that_of_the_chosen_alone() -> None:
    """Classes times responses, not times each other: B = T is where a broadcast would go unseen."""
    hidden = torch.zeros(3, 3, 2)
    labels = torch.tensor([[0, -100, -100], [0, 0, -100], [0, 0, 0]])
    out = losses.kto(hidden, torch.zeros(4, 2), labels, torch.tensor([1, 0, 1]), reference_free=True)
    torch.testing.assert_close(out.wanted_log_prob * 2, -4 * torch.tensor(4.0).log())


def test_kl_of_kto_is_not_negative_and_has_no_gradient() -> None:
    ours = torch.tensor([-1.0, -2.0], requires_grad=True)
    assert losses.kto_kl(ours, torch.tensor([-2.0, -2.5])).item() == 0.75
    assert losses.kto_kl(ours, torch.tensor([0.0, 0.0])).item() == 0.0
    assert not losses.kto_kl(ours, torch.zeros(2)).requires_grad


def test_log_probs_are_summed_unless_asked_otherwise() -> None:
    """Sums -6 and -9 over three tokens, -5 and -6 of the reference."""
    hidden, labels = torch.zeros(2, 3, 1), torch.zeros(2, 3, dtype=torch.long)
    hidden[0], hidden[1] = 1.0, 2.0
    # log p = -2 and -3: two classes, whose logits differ by log(e^2 - 1) and log(e^3 - 1).
    gap = [float(torch.tensor(x).exp().sub(1).log()) for x in (2.0, 3.0)]
    hidden[0] *= gap[0]
    hidden[1] *= gap[1] / 2
    weight, ref = torch.tensor([[0.0], [1.0]]), torch.tensor([-5.0, -6.0])
    out = losses.dpo(hidden, weight, labels, ref_log_probs=ref)
    torch.testing.assert_close(out.loss, torch.tensor(0.598139), rtol=1e-5, atol=0)
    averaged = losses.dpo(hidden, weight, labels, ref_log_probs=ref / 3, average_log_probs=True)
    torch.testing.assert_close(averaged.loss, torch.tensor(0.660369), rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", SIZES)
def test_order_of_pairs_does_not_matter(size: str) -> None:
    given, order = inputs(), torch.tensor([2, 0, 1])
    order = torch.cat((order, order + PAIRS))
    ours, theirs = leaves(given), leaves(given)
    for kind in ("sigmoid", "aot"):
        a = losses.dpo(*ours[:2], given["labels"], ref_log_probs=given["ref"], loss_type=kind, **SIZES[size])
        b = losses.dpo(
            theirs[0][order],
            theirs[1],
            given["labels"][order],
            ref_log_probs=given["ref"][order],
            loss_type=kind,
            **SIZES[size],
        )
        torch.testing.assert_close(a.loss, b.loss)
        torch.testing.assert_close(a.chosen_rewards[order[:PAIRS]], b.chosen_rewards)
        for x, y in zip(torch.autograd.grad(a.loss, ours[:2]), torch.autograd.grad(b.loss, theirs[:2]), strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("size", SIZES)
def test_nothing_to_learn_from(size: str) -> None:
    """All masked: finite losses and gradients that are exactly 0, whatever the rows hold."""
    given = inputs()
    ours = leaves(given | {"hidden": torch.full_like(given["hidden"], float("nan"))})
    labels = torch.full_like(given["labels"], -100)
    made = {
        **{kind: losses.dpo(*ours[:2], labels, bias=ours[2], ref_log_probs=given["ref"], loss_type=kind, **e)
           for kind in losses.DPO for e in [{"label_smoothing": 0.1 if kind == "exo_pair" else 0.0, **SIZES[size]}]},
        "cpo": losses.cpo(*ours[:2], labels, bias=ours[2], **SIZES[size]),
        "simpo": losses.simpo(*ours[:2], labels, bias=ours[2], **SIZES[size]),
        "orpo": losses.orpo(*ours[:2], labels, bias=ours[2], **SIZES[size]),
        "kto": losses.kto(*ours[:2], labels, torch.ones(6), bias=ours[2], reference_free=True, **SIZES[size]),
    }  # fmt: skip
    for name, out in made.items():
        assert all(t is None or t.isfinite().all() for t in out), name
        for gradient in torch.autograd.grad(out.loss, ours):
            assert (gradient == 0).all(), name


def test_a_pair_with_an_empty_response_and_one_class() -> None:
    given = inputs()
    given["labels"][0] = -100
    ours = leaves(given)
    out = losses.orpo(*ours[:2], given["labels"], bias=ours[2])
    assert out.log_odds[0] == 0
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.loss, ours))
    hidden, weight = given["hidden"].clone().requires_grad_(), given["weight"][:1].clone().requires_grad_()
    labels = torch.where(given["labels"] == -100, -100, 0)
    for out in (
        losses.orpo(hidden, weight, labels),
        losses.simpo(hidden, weight, labels),
        losses.dpo(hidden, weight, labels, reference_free=True),
    ):
        assert out.loss.isfinite()
        assert all((g == 0).all() for g in torch.autograd.grad(out.loss, (hidden, weight)))


def test_window_of_several_calls() -> None:
    """With `num_items` the sum over micro-batches is the loss of all of them; of any kind of number."""
    given = inputs()
    parts = [torch.tensor([0, PAIRS]), torch.tensor([1, 2, PAIRS + 1, PAIRS + 2])]
    tokens = int((given["labels"][:PAIRS] != -100).sum())
    whole = losses.dpo(
        given["hidden"], given["weight"], given["labels"], ref_log_probs=given["ref"], nll_weight=0.5
    ).loss
    for num in (PAIRS, torch.tensor(PAIRS), torch.tensor([PAIRS])):
        total = sum(
            losses.dpo(
                given["hidden"][i],
                given["weight"],
                given["labels"][i],
                ref_log_probs=given["ref"][i],
                nll_weight=0.5,
                num_items=num,
                nll_num_items=tokens,
            ).loss
            for i in parts
        )
        torch.testing.assert_close(total, whole)


def test_upstream_gradient_second_backward_and_frozen_inputs() -> None:
    given = inputs()
    for size in SIZES.values():
        ours = leaves(given)
        out = losses.dpo(*ours[:2], given["labels"], bias=ours[2], ref_log_probs=given["ref"], **size)
        first = torch.autograd.grad(3 * out.loss, ours, retain_graph=True)
        second = torch.autograd.grad(out.loss, ours)
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(a, 3 * b)
        for i in range(3):
            some = [t.detach().requires_grad_(j == i) for j, t in enumerate(leaves(given))]
            out = losses.dpo(*some[:2], given["labels"], bias=some[2], ref_log_probs=given["ref"], **size)
            torch.testing.assert_close(torch.autograd.grad(out.loss, some[i])[0], second[i])
        with torch.no_grad():
            assert not losses.dpo(*ours[:2], given["labels"], ref_log_probs=given["ref"], **size).loss.requires_grad


REFUSED = [
    ({"loss_type": "none"}, "loss_type"),
    ({"loss_type": "exo_pair"}, "label_smoothing"),
    ({"loss_type": "hinge", "label_smoothing": 0.1}, "label_smoothing"),
    ({"loss_type": "robust", "label_smoothing": 0.5}, "label_smoothing"),
    ({"loss_type": "apo_zero", "f_divergence": "forward_kl"}, "f_divergence"),
    ({"f_divergence": "tvd"}, "f_divergence"),
    ({"beta": 0.0}, "beta"),
    ({"reference_free": True}, "ref_log_probs"),
    ({"ref_log_probs": None}, "ref_log_probs"),
    ({"ref_weight": torch.zeros(CLASSES, WIDTH)}, "ref_weight"),
    ({"ref_log_probs": torch.zeros(3)}, "ref_log_probs"),
    ({"num_items": -1}, "num_items"),
    ({"loss_type": "ipo", "average_log_probs": True}, "average_log_probs"),
    ({"loss_type": "sigmoid_norm", "average_log_probs": True}, "average_log_probs"),
    ({"softcap": 0.0}, "softcap"),
    ({"logit_scale": torch.ones(())}, "logit_scale"),
    ({"bias": torch.zeros(1)}, "bias"),
    ({"weight": torch.zeros(CLASSES, WIDTH + 1)}, "hidden"),
    ({"max_logits_bytes": 0}, "max_logits_bytes"),
    ({"max_logits_bytes": 1e6}, "max_logits_bytes"),
    ({"labels": torch.zeros(6, 4, dtype=torch.long)}, "labels"),
    ({"labels": torch.full((6, 5), CLASSES)}, "labels"),
    ({"hidden": torch.zeros(30, WIDTH, dtype=torch.float64)}, "hidden"),
    ({"loss_type": {}}, "loss_type"),
]


@pytest.mark.parametrize(("options", "argument"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_does_not_go_together_is_refused(options: dict[str, Any], argument: str) -> None:
    given = inputs()
    # In training, where gradients are made in forward.
    call = {"hidden": given["hidden"].requires_grad_(), "weight": given["weight"], "labels": given["labels"]}
    with pytest.raises(ValueError, match=f"dpo: {argument}: expected"):
        losses.dpo(**(call | {"ref_log_probs": given["ref"]} | options))


def test_other_functions_refuse_too() -> None:
    given = inputs()
    call = given["hidden"], given["weight"], given["labels"]
    odd = given["hidden"][:5], given["weight"], given["labels"][:5]
    conflict = (given["labels"][:PAIRS] + 1) % CLASSES
    for function, error in (
        (lambda: losses.cpo(*call, loss_type="hinge", label_smoothing=0.1), "label_smoothing"),
        (lambda: losses.cpo(*odd), "hidden"),
        (lambda: losses.cpo(*call, loss_type={"ipo": 1.0, "sigmoid": 1.0}), "average_log_probs"),
        (lambda: losses.orpo(*call, nll_labels=conflict), "nll_labels"),
        (lambda: losses.kto(*call, torch.ones(6), reference_free=True, loss_type="bco"), "loss_type"),
        (lambda: losses.kto(*call, torch.ones(5), reference_free=True), "is_wanted"),
        (lambda: losses.kto(*call, torch.ones(6), reference_free=True, kl=torch.ones(5)), "kl"),
        (lambda: losses.kto(*call, torch.ones(6), reference_free=True, kl=1.0, loss_type="apo_zero_unpaired"), "kl"),
    ):
        with pytest.raises(ValueError, match=f": {error}: expected"):
            function()


def test_defaults_are_those_of_the_plain_trainers() -> None:
    import inspect

    for function, wanted in {
        losses.dpo: {"loss_type": "sigmoid", "beta": 0.1, "label_smoothing": 0.0, "average_log_probs": False},
        losses.cpo: {"loss_type": "sigmoid", "beta": 0.1, "gamma": 0.5, "nll_weight": 1.0, "alpha": 0.0},
        losses.simpo: {"beta": 0.1, "gamma": 0.5, "nll_weight": 0.0},
        losses.orpo: {"beta": 0.1, "nll_weight": 1.0},
        losses.kto: {"loss_type": "kto", "beta": 0.1, "wanted_weight": 1.0, "unwanted_weight": 1.0},
    }.items():
        given = inspect.signature(function).parameters
        assert {k: given[k].default for k in wanted} == wanted
