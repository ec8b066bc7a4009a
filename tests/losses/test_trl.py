"""The losses of TRL's trainers, which are plain functions of log-probabilities: value, gradient and logged metrics."""

from __future__ import annotations

import functools
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.losses import plain, test_policy, test_preference
from torch import Tensor

from tigon import losses

pytest.importorskip("trl", minversion="1.16")
TIGHT = {"rtol": 1e-8, "atol": 1e-10}


def accelerator() -> Any:
    same = lambda t, *_, **__: t  # noqa: E731
    return SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        sync_gradients=True,
        gather=same,
        gather_for_metrics=same,
        reduce=same,
        pad_across_processes=same,
    )


def trainer(**attributes: Any) -> Any:
    return SimpleNamespace(
        accelerator=accelerator(),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **attributes,
    )


def assert_gradients(
    ours: Tensor, mine: list[Tensor], theirs: Tensor, yours: list[Tensor], *, is_rounded: bool = False
) -> None:
    """`is_rounded`: its numbers go through fp32."""
    tolerance = {"rtol": 1e-6, "atol": 1e-7} if is_rounded else TIGHT
    torch.testing.assert_close(ours, theirs, check_dtype=False, **tolerance)
    pairs = zip(torch.autograd.grad(ours, mine), torch.autograd.grad(theirs, yours), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, **tolerance)


# ---- DPO ----


@pytest.mark.parametrize("options", [{}, {"beta": 0.4, "discopop_tau": 0.5}], ids=["defaults", "other"])
@pytest.mark.parametrize("kind", [k for k in losses.DPO if k != "aot_pair"])
def test_dpo(kind: str, options: dict[str, float]) -> None:
    from trl.trainer.dpo_trainer import DPOTrainer

    given = test_preference.inputs()
    smoothing = test_preference.SMOOTHING.get(kind, (0.0,))[-1] if kind != "sigmoid" else 0.0
    mine, yours = test_preference.leaves(given), test_preference.leaves(given)
    out = losses.dpo(
        *mine[:2],
        given["labels"],
        bias=mine[2],
        ref_log_probs=given["ref"],
        loss_type=kind,
        label_smoothing=smoothing,
        **options,
    )
    log_probs, entropy = plain.token_log_probs(yours[0], yours[1], given["labels"], yours[2])
    completion = torch.nn.functional.pad((given["labels"] != -100).long(), (1, 0))
    inputs = {"input_ids": torch.nn.functional.pad(given["labels"], (1, 0)), "attention_mask": completion}
    inputs |= {
        "completion_mask": completion,
        "ref_chosen_logps": given["ref"][:3],
        "ref_rejected_logps": given["ref"][3:],
    }
    beta = options.get("beta", 0.1)
    its = trainer(
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[kind],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=smoothing,
        use_weighting=False,
        args=SimpleNamespace(discopop_tau=options.get("discopop_tau", 0.05)),
    )
    made = {"log_probs": log_probs, "entropy": entropy, "mean_logits": entropy, "is_top1": entropy > 0}
    theirs = DPOTrainer._compute_loss(its, lambda **_: SimpleNamespace(**made), inputs, False)
    assert_gradients(out.loss, mine, theirs, yours, is_rounded=kind == "exo_pair")
    logged = {k: v[0] for k, v in its._metrics["train"].items() if k != "num_tokens"}
    for name, value in {
        "rewards/chosen": out.chosen_rewards.mean(),
        "rewards/rejected": out.rejected_rewards.mean(),
        "rewards/accuracies": out.accuracy,
        "rewards/margins": out.margin,
        "logps/chosen": out.chosen_log_probs.mean(),
        "logps/rejected": out.rejected_log_probs.mean(),
        "entropy": out.entropy,
    }.items():
        assert value.item() == pytest.approx(logged[name], rel=1e-6), name


@pytest.mark.parametrize("wanted", [(1, 0, 1, 1, 0, 0), (1,) * 6, (0,) * 6], ids=["both", "wanted", "unwanted"])
@pytest.mark.parametrize("kind", losses.KTO)
def test_kto(kind: str, wanted: tuple[int, ...]) -> None:
    from trl.trainer.kto_trainer import KTOTrainer

    given, is_wanted = test_preference.inputs(), torch.tensor(wanted).bool()
    kl_log_probs, ref_kl = given["ref"] + 1.5, given["ref"] + torch.arange(6) * 0.2
    mine, yours = test_preference.leaves(given), test_preference.leaves(given)
    out = losses.kto(
        *mine[:2],
        given["labels"],
        is_wanted,
        bias=mine[2],
        ref_log_probs=given["ref"],
        kl=losses.kto_kl(kl_log_probs, ref_kl) if kind == "kto" else None,
        loss_type=kind,
        wanted_weight=1.2,
        unwanted_weight=0.8,
    )
    log_probs, entropy = plain.token_log_probs(yours[0], yours[1], given["labels"], yours[2])
    completion = torch.nn.functional.pad((given["labels"] != -100).long(), (1, 0))
    inputs = {"input_ids": torch.nn.functional.pad(given["labels"], (1, 0)), "attention_mask": completion}
    inputs |= {"completion_mask": completion, "label": is_wanted, "ref_logps": given["ref"], "ref_KL_logps": ref_kl}
    its = trainer(
        precompute_ref_logps=True,
        calculate_KL=kind == "kto",
        loss_type=kind,
        beta=0.1,
        desirable_weight=1.2,
        undesirable_weight=0.8,
        _compute_kl_logps=lambda *_: kl_log_probs,
    )
    made = {"log_probs": log_probs, "entropy": entropy, "mean_logits": entropy}
    theirs = KTOTrainer._compute_loss(its, lambda **_: SimpleNamespace(**made), inputs, False)
    assert_gradients(out.loss, mine, theirs, yours)
    logged = {k: v[0] for k, v in its._metrics["train"].items() if k != "num_tokens"}
    for name, value in {
        "rewards/chosen": out.wanted_reward,
        "rewards/rejected": out.unwanted_reward,
        "logps/chosen": out.wanted_log_prob,
        "logps/rejected": out.unwanted_log_prob,
        "entropy": out.entropy,
    }.items():
        assert value.item() == pytest.approx(logged.get(name, 0.0), rel=1e-6), name


@pytest.mark.parametrize("alpha", [0.0, 0.3])
@pytest.mark.parametrize("kind", losses.CPO)
def test_cpo(kind: str, alpha: float) -> None:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    given = test_preference.inputs()
    e = 0.1 if kind in ("sigmoid", "simpo") else 0.0
    mine, yours = test_preference.leaves(given), test_preference.leaves(given)
    out = losses.cpo(*mine[:2], given["labels"], bias=mine[2], loss_type=kind, label_smoothing=e, alpha=alpha)
    log_probs, _ = plain.token_log_probs(yours[0], yours[1], given["labels"], yours[2])
    valid = given["labels"] != -100
    sums = log_probs.sum(1) / (valid.sum(1) if kind in ("ipo", "simpo") else 1)
    its = trainer(alpha=alpha, loss_type=kind, simpo_gamma=0.5, beta=0.1, label_smoothing=e)
    each, chosen, rejected = CPOTrainer.cpo_loss(its, sums[:3], sums[3:])
    nll = -log_probs[:3].sum() / valid[:3].sum()
    assert_gradients(out.loss, mine, each.mean() + 1.0 * nll, yours)
    torch.testing.assert_close(out.chosen_rewards, chosen, **TIGHT)
    torch.testing.assert_close(out.rejected_rewards, rejected, **TIGHT)


def test_orpo() -> None:
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    given = test_preference.inputs()
    # Its formula is in fp32.
    given = {k: v.float() if v.is_floating_point() else v for k, v in given.items()}
    mine, yours = test_preference.leaves(given), test_preference.leaves(given)
    out = losses.orpo(*mine[:2], given["labels"], bias=mine[2])
    log_probs, _ = plain.token_log_probs(yours[0], yours[1], given["labels"], yours[2])
    valid = given["labels"] != -100
    means = log_probs.sum(1) / valid.sum(1)
    each, chosen, _, _, log_odds = ORPOTrainer.odds_ratio_loss(trainer(beta=0.1), means[:3], means[3:])
    theirs = -log_probs[:3].sum() / valid[:3].sum() - each.mean()
    torch.testing.assert_close(out.loss, theirs)
    torch.testing.assert_close(out.chosen_rewards, chosen)
    torch.testing.assert_close(out.log_odds.mean(), log_odds)
    for a, b in zip(torch.autograd.grad(out.loss, mine), torch.autograd.grad(theirs, yours), strict=True):
        torch.testing.assert_close(a, b)


# ---- GRPO ----

GRPO = {
    "plain": {},
    "fresh": {"old": None},
    "kl": {"beta": 0.3},
    "kl_ratio": {"beta": 0.3, "kl_ratio": True},
    "sequence": {"level": "sequence", "beta": 0.1, "kl_ratio": True},
    "delta": {"delta": 1.4, "low": 0.1},
    "sampler": {"is_ratio": "tokens", "beta": 0.2},
    "of_tokens": {"advantages": "tokens"},
    "quantile": {"quantile": 0.45, "entropy_coef": 0.2},
    "off_policy": {"threshold": 0.05},
    "steps": {"steps": 4, "entropy_coef": 0.3},
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [(k, o) for k in losses.POLICY if k not in ("ppo", "gspo") for o in GRPO if not test_policy.is_refused(k, GRPO[o])],
)
def test_grpo(kind: str, options: str) -> None:
    from trl.trainer.grpo_trainer import GRPOTrainer

    o, given = GRPO[options], test_policy.inputs()
    given["ratios"]["tokens"] = torch.where(given["mask"], given["ratios"]["tokens"], 1.0)
    out, _, mine, _ = test_policy.call(given, kind, o)
    yours = test_policy.leaves(given)
    of_mask = torch.where(given["mask"], given["labels"], -100)
    log_probs, entropy = plain.token_log_probs(yours[0], yours[1], of_mask, yours[2])
    coef, quantile = o.get("entropy_coef", 0.0), o.get("quantile", 1.0)
    is_counted = kind in ("dapo", "cispo", "vespo")
    steps = o.get("steps", 1)
    its = trainer(
        top_entropy_quantile=quantile,
        off_policy_mask_threshold=o.get("threshold"),
        importance_sampling_level=o.get("level", "token"),
        beta=o.get("beta", 0.0),
        loss_type=kind,
        epsilon_low=o.get("low", 0.2),
        epsilon_high=0.2,
        use_vllm="is_ratio" in o,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=steps,
        max_completion_length=9,
        _entropy_bonus_enabled=coef != 0,
        use_adaptive_entropy=False,
        entropy_coef=coef,
        args=SimpleNamespace(
            delta=o.get("delta"),
            use_bias_correction_kl=o.get("kl_ratio", False),
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
            # What a generation batch has more of than a step.
            steps_per_generation=steps,
        ),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, entropy, None),
    )
    its.get_high_entropy_mask = functools.partial(GRPOTrainer.get_high_entropy_mask, its)
    ids = given["labels"]
    inputs = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] * 0 + 1, "completion_ids": ids}
    inputs |= {"completion_mask": given["mask"].long(), "num_items_in_batch": torch.tensor(17)}
    inputs |= {"advantages": given["advantages"][o.get("advantages", "sequences")], "ref_per_token_logps": given["ref"]}
    inputs["old_per_token_logps"] = o.get("old", given["old"])
    if "threshold" in o:
        inputs["sampling_per_token_logps"] = given["sampled"]
    if "is_ratio" in o:
        inputs["importance_sampling_ratio"] = given["ratios"]["tokens"]
    theirs = GRPOTrainer._compute_loss(its, None, inputs)
    assert_gradients(out.loss, mine, theirs, yours, is_rounded=kind == "sapo")
    logged = {k: v[0] for k, v in its._metrics["train"].items()}
    wanted = {"entropy": out.entropy, "kl": out.kl, "clip_ratio/low_mean": out.clip_low}
    wanted |= {"clip_ratio/high_mean": out.clip_high, "clip_ratio/region_mean": out.clip_ratio}
    wanted |= {"cispo_clip_ratio": out.clip_ratio, "vespo/phi_seq_mean": out.weight}
    seen = [name for name in wanted if name in logged]
    assert len(seen) >= (2 if is_counted and kind != "dapo" else 1)
    for name in seen:
        assert wanted[name].item() == pytest.approx(logged[name], rel=1e-6, abs=1e-9), name
