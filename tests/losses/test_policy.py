"""Policy losses: every type and option against the plain form on full logits, in fp64."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from tests.losses import plain
from tests.losses.test_preference import assert_same, leaves
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tigon import losses
from tigon.losses import policy

BATCH, LENGTH, WIDTH, CLASSES = 4, 5, 6, 11
ROW = CLASSES * 8
# A sequence at a time, two of four with a row to spare, parts of one, single rows, all at once, those that count.
SIZES: dict[str, dict[str, Any]] = {
    "all": {},
    "sequence": {"max_logits_bytes": LENGTH * ROW},
    "two": {"max_logits_bytes": (2 * LENGTH + 1) * ROW},
    "part": {"max_logits_bytes": 3 * ROW},
    "row": {"max_logits_bytes": ROW},
    "valid": {"max_logits_bytes": LENGTH * ROW, "skip_ignored": True},
}
# What each type may be asked beside what all may.
OWN: dict[str, dict[str, Any]] = {
    "dr_grpo": {"max_completion_length": 9},
    "dapo": {"num_items": 17},
    "cispo": {"num_items": torch.tensor([17])},
    "vespo": {"num_items": torch.tensor(17)},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fresh": {"old": None},
    "k3": {"beta": 0.3},
    "k2_ratio": {"beta": 0.3, "kl": "k2", "kl_ratio": True},
    "k1": {"beta": 0.3, "kl": "k1"},
    "sequence": {"level": "sequence", "beta": 0.1},
    "sequence_ratio": {"level": "sequence", "beta": 0.1, "kl_ratio": True},
    "delta": {"delta": 1.4},
    "bounds": {"low": 0.1, "high": 0.4},
    "is_ratio": {"is_ratio": "tokens"},
    "is_ratio_sequence": {"is_ratio": "sequences", "beta": 0.2},
    "of_tokens": {"advantages": "tokens"},
    "entropy": {"entropy_coef": 0.4},
    "quantile": {"quantile": 0.4},
    "quantile_entropy": {"quantile": 0.6, "entropy_coef": 0.4, "is_ratio": "tokens", "beta": 0.1},
    "off_policy": {"threshold": 0.05},
    "temperature": {"temperature": 0.7, "beta": 0.2, "entropy_coef": 0.1},
    "capped": {"temperature": 1.3, "softcap": 2.0, "logit_scale": 0.6},
    "steps": {"steps": 4, "entropy_coef": 0.3},
    "all": {"threshold": 0.05, "is_ratio": "tokens", "beta": 0.2, "entropy_coef": 0.1, "quantile": 0.7, "steps": 2},
}
NAMES = {
    "low": "epsilon_low",
    "high": "epsilon_high",
    "level": "importance_level",
    "kl": "kl_estimator",
    "kl_ratio": "kl_takes_ratio",
    "quantile": "entropy_quantile",
    "threshold": "off_policy_threshold",
    "steps": "accumulation_steps",
    "old": "old_log_probs",
    "ref": "ref_log_probs",
    "sampled": "sampler_log_probs",
    "is_ratio": "sampler_ratio",
    "max_length": "max_completion_length",
}


def inputs(seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)  # noqa: E731
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    mask[0, 3:] = mask[1, :1] = mask[3, 4:] = False
    given = {"hidden": draw(BATCH, LENGTH, WIDTH), "weight": draw(CLASSES, WIDTH), "bias": draw(CLASSES)}
    given["labels"] = torch.randint(0, CLASSES, (BATCH, LENGTH), generator=g)
    given["mask"] = mask
    log_probs, _ = plain.token_log_probs(given["hidden"], given["weight"], given["labels"], given["bias"])
    given["old"], given["ref"], given["sampled"] = (log_probs + s * draw(BATCH, LENGTH) for s in (0.3, 0.5, 0.4))
    given["ratios"] = {"tokens": draw(BATCH, LENGTH).exp(), "sequences": draw(BATCH, 1).exp()}
    given["advantages"] = {"sequences": torch.tensor([1.0, -0.7, 0.4, -1.3]).double(), "tokens": draw(BATCH, LENGTH)}
    return given


def call(given: dict[str, Any], kind: str, asked: dict[str, Any], spoil: Any = None, **size: Any) -> tuple:
    """Ours and the plain form, and the leaves of both. `spoil` is put where the mask is 0."""
    asked = dict(asked)
    mask, labels = given["mask"], given["labels"]
    advantages = given["advantages"][asked.pop("advantages", "sequences")]
    head = {k: asked.pop(k) for k in ("softcap", "logit_scale") if k in asked}
    head["temperature"] = asked.pop("temperature", 1.0)
    asked.setdefault("old", given["old"])
    if asked.get("beta"):
        asked["ref"] = given["ref"]
    if asked.get("threshold") is not None:
        asked["sampled"] = given["sampled"]
    if isinstance(asked.get("is_ratio"), str):
        asked["is_ratio"] = given["ratios"][asked["is_ratio"]]
    ours, theirs = leaves(given), leaves(given)
    of_mask = torch.where(mask, labels, -100)
    log_probs, entropy = plain.token_log_probs(theirs[0], theirs[1], of_mask, theirs[2], **head)
    own = OWN.get(kind, {})
    also = {"num_items": own.get("num_items"), "max_length": own.get("max_completion_length"), "loss_type": kind}
    expected = plain.policy(log_probs, entropy, mask, advantages, asked | also)
    if spoil is not None:
        asked = {k: v.masked_fill(~mask, spoil) if isinstance(v, Tensor) and v.shape == mask.shape else v
                 for k, v in asked.items()}  # fmt: skip
        if advantages.shape == mask.shape:
            advantages = advantages.masked_fill(~mask, spoil)
        with torch.no_grad():
            ours[0][~mask] = spoil
    options = {NAMES.get(k, k): v for k, v in asked.items()}
    out = losses.grpo(
        *ours[:2], labels, advantages, bias=ours[2], mask=mask, loss_type=kind, **options, **own, **head, **size
    )
    return out, expected, ours, theirs


def is_refused(kind: str, asked: dict[str, Any]) -> bool:
    row = losses.POLICY[kind]
    return (asked.get("level") == "sequence" and not row.takes_sequences) or ("delta" in asked and row.term != "clip")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", losses.POLICY)
def test_grpo_is_the_plain_form(kind: str, options: str, size: str) -> None:
    asked = OPTIONS[options]
    if is_refused(kind, asked):
        with pytest.raises(ValueError, match=r"grpo: (importance_level|delta): expected"):
            call(inputs(), kind, asked, **SIZES[size])
        return
    assert_same(*call(inputs(), kind, asked, **SIZES[size]))


@pytest.mark.parametrize("spoil", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("size", ["all", "part", "row", "valid"])
@pytest.mark.parametrize("kind", losses.POLICY)
def test_what_is_masked_does_not_matter(kind: str, size: str, spoil: float) -> None:
    for options in ("k3", "is_ratio", "of_tokens", "all"):
        assert_same(*call(inputs(), kind, OPTIONS[options], spoil, **SIZES[size]))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", losses.POLICY)
def test_nothing_that_counts(kind: str, size: str) -> None:
    """Loss 0 and gradients of exactly 0, with any count of items, and of none at all."""
    given = inputs() | {"mask": torch.zeros(BATCH, LENGTH)}
    own = OWN.get(kind, {})
    counts = [own] if "num_items" not in own else [{}, own, {"num_items": 0}, {"num_items": torch.tensor(0)}]
    for more in counts:
        ours = leaves(given)
        out = losses.grpo(
            *ours[:2],
            given["labels"],
            torch.full((BATCH,), float("nan")),
            mask=given["mask"],
            ref_log_probs=given["ref"],
            beta=0.1,
            entropy_coef=0.1,
            loss_type=kind,
            **more,
            **SIZES[size],
        )
        assert out.loss == 0
        assert all(t.isfinite().all() for t in out)
        for gradient in torch.autograd.grad(out.loss, ours[:2]):
            assert (gradient == 0).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", losses.POLICY)
def test_order_of_the_batch_does_not_matter(kind: str, size: str) -> None:
    given, order = inputs(), torch.tensor([2, 0, 3, 1])
    permuted = {k: v[order] if isinstance(v, Tensor) and v.shape[0] == BATCH else v for k, v in given.items()}
    permuted["advantages"] = {k: v[order] for k, v in given["advantages"].items()}
    permuted["ratios"] = {k: v[order] for k, v in given["ratios"].items()}
    a, _, ours, _ = call(given, kind, OPTIONS["all"], **SIZES[size])
    b, _, theirs, _ = call(permuted, kind, OPTIONS["all"], **SIZES[size])
    for name in ("loss", "kl", "entropy", "clip_ratio", "weight", "policy_loss"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name))
    dhidden, dweight = (torch.autograd.grad(out.loss, t[:2]) for out, t in ((a, ours), (b, theirs)))
    torch.testing.assert_close(dhidden[0][order], dweight[0])
    torch.testing.assert_close(dhidden[1], dweight[1])


def test_reference_from_hidden_states() -> None:
    given, other = inputs(), inputs(seed=1)
    head = {"temperature": 0.8, "softcap": 3.0}
    of_mask = torch.where(given["mask"], given["labels"], -100)
    ref, _ = plain.token_log_probs(other["hidden"], other["weight"], of_mask, other["bias"], **head)
    call_ = given["hidden"], given["weight"], given["labels"], given["advantages"]["sequences"]
    options = {"mask": given["mask"], "beta": 0.2, **head}
    wanted = losses.grpo(*call_, ref_log_probs=ref, **options)
    own = {"ref_hidden": other["hidden"], "ref_weight": other["weight"], "ref_bias": other["bias"]}
    made = losses.grpo(*call_, **own, **options)
    torch.testing.assert_close(made.loss, wanted.loss)
    torch.testing.assert_close(made.kl, wanted.kl)
    same = losses.grpo(*call_, ref_hidden=given["hidden"], **options)
    assert same.kl.abs() < 1e-12


def test_normalisers_of_each_type() -> None:
    """Terms [[2, ...], [1, 1, 1, ...]], of which 1 and 3 count; ten items, a longest length of 4."""
    hidden, labels = torch.zeros(2, 4, 1), torch.zeros(2, 4, dtype=torch.long)
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0]])
    terms = torch.tensor([[2.0, 9.0, 9.0, 9.0], [1.0, 1.0, 1.0, 9.0]])
    for kind, options, wanted in (
        ("grpo", {}, 1.5),
        ("bnpo", {}, 1.25),
        ("dr_grpo", {"max_completion_length": 4}, 0.625),
        ("dapo", {"num_items": 10}, 0.5),
        ("dapo", {"num_items": torch.tensor([10])}, 0.5),
        ("dapo", {"num_items": 10, "accumulation_steps": 5}, 0.5),
        ("grpo", {"accumulation_steps": 5}, 0.3),
        ("dapo", {}, 1.25),
        ("luspo", {}, 2.5),
    ):
        out = losses.grpo(hidden, torch.zeros(3, 1), labels, -terms, mask=mask, loss_type=kind, **options)
        torch.testing.assert_close(out.loss, torch.tensor(wanted), msg=lambda m, k=kind: f"{k}: {m}")


def test_window_of_several_calls() -> None:
    """With `num_items` the sum over micro-batches is the loss of all of them."""
    given = inputs()

    def of(i: Tensor, num_items: int | None) -> Tensor:
        hidden, labels, mask, old = (given[k][i] for k in ("hidden", "labels", "mask", "old"))
        advantages, options = given["advantages"]["sequences"][i], {"old_log_probs": old, "num_items": num_items}
        return losses.grpo(hidden, given["weight"], labels, advantages, mask=mask, **options).loss

    items = int(given["mask"].sum())
    parts = [torch.tensor([0]), torch.tensor([1, 3]), torch.tensor([2])]
    torch.testing.assert_close(sum(of(i, items) for i in parts), of(torch.arange(BATCH), None))


def test_only_what_should_has_a_gradient() -> None:
    given = inputs()
    extra = {NAMES[k]: given[k].clone().requires_grad_() for k in ("old", "ref", "sampled")}
    ratio = given["ratios"]["tokens"].clone().requires_grad_()
    advantages = given["advantages"]["sequences"].clone().requires_grad_()
    for size in SIZES.values():
        ours = leaves(given)
        out = losses.grpo(
            *ours[:2],
            given["labels"],
            advantages,
            mask=given["mask"],
            sampler_ratio=ratio,
            beta=0.1,
            off_policy_threshold=0.1,
            **extra,
            **size,
        )
        out.loss.backward()
        assert ours[0].grad is not None
        assert all(t.grad is None for t in (*extra.values(), ratio, advantages))


REFUSED = [
    ({"loss_type": "none"}, "loss_type"),
    ({"importance_level": "batch"}, "importance_level"),
    ({"loss_type": "gspo", "importance_level": "token"}, "importance_level"),
    ({"loss_type": "grpo", "num_items": 3}, "num_items"),
    ({"loss_type": "dr_grpo"}, "max_completion_length"),
    ({"max_completion_length": 3}, "max_completion_length"),
    ({"beta": 0.1}, "ref_log_probs"),
    ({"ref_log_probs": torch.zeros(BATCH, LENGTH)}, "ref_log_probs"),
    ({"kl_estimator": "k4"}, "kl_estimator"),
    ({"kl_takes_ratio": True}, "kl_takes_ratio"),
    ({"temperature": 0.0}, "temperature"),
    ({"entropy_quantile": 0.0}, "entropy_quantile"),
    ({"old_log_probs": torch.zeros(BATCH)}, "old_log_probs"),
    ({"mask": torch.zeros(BATCH)}, "mask"),
    ({"advantages": torch.zeros(LENGTH)}, "advantages"),
    ({"advantages": torch.zeros(BATCH, dtype=torch.long)}, "advantages"),
    ({"sampler_log_probs": torch.zeros(BATCH, LENGTH)}, "sampler_log_probs"),
    ({"sapo_temperature_pos": 0.0}, "sapo_temperature_pos"),
    ({"accumulation_steps": 0}, "accumulation_steps"),
    ({"ref_weight": torch.zeros(1)}, "ref_weight"),
]


@pytest.mark.parametrize(("options", "argument"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_does_not_go_together_is_refused(options: dict[str, Any], argument: str) -> None:
    given = inputs()
    base = {k: given[k] for k in ("hidden", "weight", "labels")} | {"advantages": given["advantages"]["sequences"]}
    with pytest.raises(ValueError, match=f"grpo: {argument}: expected"):
        losses.grpo(**(base | options))


def test_defaults_are_those_of_the_plain_trainer() -> None:
    wanted = {"loss_type": "dapo", "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "delta": None}
    wanted |= {"temperature": 1.0, "entropy_quantile": 1.0, "kl_takes_ratio": False, "off_policy_threshold": None}
    given = inspect.signature(losses.grpo).parameters
    assert {k: given[k].default for k in wanted} == wanted


def test_a_masked_token_need_be_no_class() -> None:
    given = inputs()
    call = {k: given[k] for k in ("hidden", "weight")} | {"advantages": given["advantages"]["sequences"]}
    mask = given["mask"].clone()
    mask[0, 1] = 0
    labels = given["labels"].clone()
    wanted = losses.grpo(**call, labels=labels, mask=mask).loss
    labels[0, 1] = -1
    torch.testing.assert_close(losses.grpo(**call, labels=labels, mask=mask).loss, wanted)


def test_a_quantile_of_entropies_compiles_whole_and_asks_for_no_number() -> None:
    given = inputs()
    call = {k: given[k] for k in ("hidden", "weight", "labels")} | {"advantages": given["advantages"]["sequences"]}

    class Asked(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert "_local_scalar_dense" not in str(function)
            return function(*args, **(kwargs or {}))

    mask = given["entropy_mask"] if "entropy_mask" in given else given["mask"] != 0
    entropy = torch.rand(mask.shape)
    with Asked():
        wanted = policy.entropy_mask(entropy, mask, 0.4)
    assert 0 < wanted.sum() < mask.sum()
    torch._dynamo.reset()
    step = torch.compile(lambda **k: losses.grpo(**k, entropy_quantile=0.4).loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(**call), losses.grpo(**call, entropy_quantile=0.4).loss)
