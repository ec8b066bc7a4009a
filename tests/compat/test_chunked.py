"""The losses of `liger_kernel.chunked_loss`: orders of arguments and metrics, and what they are made of."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tigon import losses

PAIRS, LENGTH, WIDTH, CLASSES = 3, 4, 6, 9


@pytest.fixture
def module(liger: Any) -> Any:
    return importlib.import_module("liger_kernel.chunked_loss")


@pytest.fixture
def given() -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=g)  # noqa: E731
    target = torch.randint(0, CLASSES, (2 * PAIRS, LENGTH), generator=g)
    target[0, 2:] = target[4, :1] = -100
    hidden = {k: draw(2 * PAIRS, LENGTH, WIDTH) for k in ("_input", "ref_input")}
    weights = {k: draw(CLASSES, WIDTH) for k in ("weight", "ref_weight")}
    biases = {k: draw(CLASSES) for k in ("bias", "ref_bias")}
    return {**hidden, **weights, **biases, "target": target}


def _all(given: dict[str, Any], *names: str) -> list[Any]:
    return [given[name] for name in names]


def _logits_mean(given: dict[str, Any]) -> torch.Tensor:
    return F.linear(given["_input"], given["weight"], given["bias"])


def test_dpo(module: Any, given: dict[str, Any]) -> None:
    order = "weight", "_input", "target", "bias", "ref_input", "ref_weight", "ref_bias"
    loss, metrics = module.LigerFusedLinearDPOLoss(beta=0.3, loss_type="apo_zero", compiled=False)(*_all(given, *order))
    reference = {k: given[k] for k in ("ref_weight", "ref_bias")} | {"ref_hidden": given["ref_input"]}
    out = losses.dpo(
        *_all(given, "_input", "weight", "target"), bias=given["bias"], beta=0.3, loss_type="apo_zero", **reference
    )
    assert loss == out.loss
    logits = _logits_mean(given)
    wanted = out.chosen_log_probs, out.rejected_log_probs, logits[:PAIRS].mean(), logits[PAIRS:].mean(), 0.0
    wanted = *wanted, out.chosen_rewards, out.rejected_rewards
    assert len(metrics) == 7
    for a, b in zip(metrics, wanted, strict=True):
        torch.testing.assert_close(a, torch.as_tensor(b))
    function = importlib.import_module("liger_kernel.chunked_loss.functional").liger_fused_linear_dpo
    again, _ = function(
        *_all(given, "_input", "weight", "target", *order[3:]), -100, 0.3, False, True, True, False, 1, "apo_zero"
    )
    assert again == loss
    with pytest.raises(ValueError, match="LigerFusedLinearDPOLoss: ref_input: expected"):
        module.LigerFusedLinearDPOLoss()(*_all(given, *order[:4]))
    with pytest.raises(ValueError, match="dpo: label_smoothing: expected"):
        module.LigerFusedLinearDPOLoss(loss_type="hinge", label_smoothing=0.1, use_ref_model=False)(
            *_all(given, *order[:4])
        )


@pytest.mark.parametrize("name", ["CPO", "SimPO", "ORPO"])
def test_pairs_without_a_reference(module: Any, given: dict[str, Any], name: str) -> None:
    loss, metrics = getattr(module, f"LigerFusedLinear{name}Loss")()(*_all(given, "weight", "_input", "target", "bias"))
    call = _all(given, "_input", "weight", "target")
    options = {"nll_weight": 1.0, "bias": given["bias"]}
    out = {"CPO": losses.cpo, "SimPO": losses.simpo, "ORPO": losses.orpo}[name](*call, **options)
    assert loss == out.loss
    assert len(metrics) == (9 if name == "ORPO" else 7)
    assert metrics[4] == out.nll_loss
    torch.testing.assert_close(metrics[5], out.chosen_rewards)
    if name == "ORPO":
        torch.testing.assert_close(metrics[7], F.logsigmoid(out.log_odds).mean())
        torch.testing.assert_close(metrics[8], out.log_odds.mean())
        nll_target = given["target"].clone()
        nll_target[1, 0] = -100
        other, _ = module.LigerFusedLinearORPOLoss()(*_all(given, "weight", "_input", "target", "bias"), nll_target)
        assert other != loss


def test_kto(module: Any, given: dict[str, Any]) -> None:
    """Hidden states come before the weight, and metrics are sums."""
    labels = torch.tensor([1, 0, 1, 1, 0, 0]).bool()
    order = "ref_input", "ref_weight", "ref_bias"
    call = *_all(given, "_input", "weight", "target", "bias"), labels, *_all(given, *order), torch.tensor(0.2)
    loss, metrics = module.LigerFusedLinearKTOLoss(use_ref_model=True)(*call)
    out = losses.kto(
        *_all(given, "_input", "weight", "target"),
        labels,
        bias=given["bias"],
        ref_hidden=given["ref_input"],
        ref_weight=given["ref_weight"],
        ref_bias=given["ref_bias"],
        kl=0.2,
    )
    assert loss == out.loss
    logits = _logits_mean(given)
    wanted = (
        *(out.log_probs[m].sum() for m in (labels, ~labels)),
        *(logits[m].sum() for m in (labels, ~labels)),
        *(out.rewards[m].sum() for m in (labels, ~labels)),
    )
    for a, b in zip(metrics, wanted, strict=True):
        torch.testing.assert_close(a, b)
    a_row_each, _ = module.LigerFusedLinearKTOLoss(use_ref_model=True)(*call[:-1], torch.full((6,), 0.2))
    torch.testing.assert_close(a_row_each, loss)


@pytest.mark.parametrize("name", ["JSD", "CosineSimilarity"])
def test_distillation(module: Any, given: dict[str, Any], name: str) -> None:
    student, teacher = (given[k].flatten(0, 1) for k in ("_input", "ref_input"))
    labels = given["target"].flatten()
    call = student, given["weight"], teacher, given["ref_weight"], labels
    loss, soft, hard = getattr(module, f"LigerFusedLinear{name}Loss")(beta=0.2, return_soft_hard_loss=True)(*call)
    factor = 1.0 if name == "JSD" else 0.2
    divergence = {"divergence": "jsd", "beta": 0.2} if name == "JSD" else {"divergence": "cosine"}
    out = losses.distill(*call, soft_weight=0.5 * factor, hard_weight=0.5, **divergence)
    for a, b in ((loss, out.loss), (soft, factor * out.soft_loss), (hard, out.hard_loss)):
        torch.testing.assert_close(a, b)
    # Classes that only the teacher has.
    more = F.pad(given["ref_weight"], (0, 0, 0, 2), value=0.3)
    loss, soft, hard = getattr(module, f"LigerFusedLinear{name}Loss")(beta=0.2, return_soft_hard_loss=True)(
        *call[:3], more, labels
    )
    torch.testing.assert_close(hard, out.hard_loss)
    padded = losses.distill(student, F.pad(given["weight"], (0, 0, 0, 2)), teacher, more, labels, **divergence)
    torch.testing.assert_close(soft, factor * padded.soft_loss)
    torch.testing.assert_close(loss, 0.5 * soft + 0.5 * hard)


def test_grpo(module: Any, given: dict[str, Any]) -> None:
    mask, ids = (given["target"] != -100).long(), given["target"].clamp(min=0)
    advantages = torch.randn(2 * PAIRS)
    old, ref = torch.randn(2, 2 * PAIRS, LENGTH) * 0.3 - 2
    call = *_all(given, "_input", "weight"), ids, mask, advantages, given["bias"]
    options = {"old_log_probs": old, "mask": mask, "bias": given["bias"]}
    for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo"):
        made = module.LigerFusedLinearGRPOLoss(loss_type=kind, max_completion_length=7)
        loss, metrics = made(*call, ref, old, num_items_in_batch=31)
        own = {"max_completion_length": 7} if kind == "dr_grpo" else {}
        own |= {"num_items": 31} if kind in ("dapo", "cispo", "vespo") else {}
        out = losses.grpo(*call[:3], advantages, beta=0.04, ref_log_probs=ref, loss_type=kind, **options, **own)
        assert loss == out.loss
        assert metrics == (out.kl, out.clip_ratio)
    # As the trainers of others call it, by name, with a reference that nobody asked for.
    loss, metrics = module.LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, importance_sampling_level="sequence"
    )(
        _input=call[0],
        lin_weight=call[1],
        selected_token_ids=ids,
        attention_mask=mask,
        advantages=advantages,
        bias=given["bias"],
        old_per_token_logps=old,
        ref_per_token_logps=None,
        vllm_is_ratio=torch.ones(2 * PAIRS, 1),
    )
    out = losses.grpo(*call[:3], advantages, importance_level="sequence", **options)
    torch.testing.assert_close(loss, out.loss)
    assert len(metrics) == 1
    # Of tokens, though the ratio is that of a sequence.
    counts = mask.sum(1)
    clipped = losses.grpo(*call[:3], advantages.unsqueeze(1).expand(mask.shape), importance_level="sequence", **options)
    torch.testing.assert_close(metrics[0], clipped.clip_ratio)
    assert counts.unique().numel() > 1
    with pytest.raises(ValueError, match="luspo"):
        module.LigerFusedLinearGRPOLoss(loss_type="luspo", use_ref_model=False)(*call)
    with pytest.raises(ValueError, match="ref_per_token_logps"):
        module.LigerFusedLinearGRPOLoss()(*call)


def test_policy_is_its_own_reference_without_one(module: Any, given: dict[str, Any]) -> None:
    mask, ids = (given["target"] != -100).long(), given["target"].clamp(min=0)
    call = *_all(given, "_input", "weight"), ids, mask, torch.randn(2 * PAIRS)
    loss, metrics = module.LigerFusedLinearGRPOLoss(use_ref_model=False)(*call)
    plain, _ = module.LigerFusedLinearGRPOLoss(use_ref_model=False, beta=0.0)(*call)
    assert loss == plain
    assert metrics[0] == 0
