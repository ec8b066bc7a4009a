"""Losses of a policy that is trained on its own samples, as functions of the log-probabilities of their tokens.

    loss = sum over tokens of weight * (term * correction + beta * kl) - entropy_coef * mean entropy

`term` is a row of `TERMS`, `weight` one of `WEIGHTS`; a loss type is one of each, in `TYPES`. With a the advantage and
r the ratio exp(log_prob - old_log_prob) of a token, or of its sequence: exp(mean over tokens of the same).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Options(NamedTuple):
    """What the formulae take beside tensors."""

    loss_type: str = "dapo"
    level: str = "token"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    kl: str = "k3"
    kl_takes_ratio: bool = False
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)
    vespo_positive: tuple[float, float] = (2.0, 3.0)
    vespo_negative: tuple[float, float] = (3.0, 2.0)
    entropy_coef: float = 0.0
    entropy_quantile: float = 1.0
    off_policy_threshold: float | None = None


class Tokens(NamedTuple):
    """What a term may look at: `[n, T]`, or `[n, 1]` where it is one for a sequence.

    Log-probabilities and log-ratios to the old policy, 0 where masked; ratios at the level asked for; advantages, the
    ratio of the old policy to what sampled, or None; and the mask.
    """

    log_probs: Tensor
    log_ratio: Tensor
    ratio: Tensor
    advantages: Tensor
    sampler_ratio: Tensor | None
    mask: Tensor


# ---- terms ----


def _where(condition: Tensor, a: float, b: float, like: Tensor) -> Tensor:
    """Numbers in the dtype of `like`; torch would take its default."""
    return torch.where(condition, like.new_full((), a), like.new_full((), b))


def clip(t: Tokens, o: Options) -> Tensor:
    """-min(min(r, delta) a, clip(r, 1 - low, 1 + high) a).   Schulman et al. 2017, arXiv:1707.06347.

    `delta` bounds what a negative advantage can cost: INTELLECT-2, arXiv:2505.07291. At the level of sequences this is
    GSPO: Zheng et al. 2025, arXiv:2507.18071.
    """
    ratio = t.ratio if o.delta is None else t.ratio.clamp(max=o.delta)
    clipped = t.ratio.clamp(1 - o.epsilon_low, 1 + o.epsilon_high)
    return -torch.min(ratio * t.advantages, clipped * t.advantages)


def cispo(t: Tokens, o: Options) -> Tensor:
    """-min(r, high) a log_prob, the ratio without a gradient.   MiniMax 2025, arXiv:2506.13585."""
    return -t.ratio.clamp(max=o.epsilon_high).detach() * t.advantages * t.log_probs


def sapo(t: Tokens, o: Options) -> Tensor:
    """-4 / tau s(tau (r - 1)) a, s the logistic function, tau by the sign of a.   Gao et al. 2025, arXiv:2511.20347."""
    positive, negative = o.sapo_temperatures
    tau = _where(t.advantages > 0, positive, negative, t.ratio)
    return -torch.sigmoid(tau * (t.ratio - 1)) * 4 / tau * t.advantages


def vespo(t: Tokens, o: Options) -> Tensor:
    """-phi a log_prob, phi = exp(lambda + k log w - lambda w) without a gradient, k and lambda by the sign of a.

    w is the ratio of the whole sequence, to what sampled it where that is given, between 1e-8 and exp(20).
    Source: the implementation of TRL 1.16, whose bounds these are.
    """
    return -vespo_weight(t, o) * t.advantages * t.log_probs


@torch.no_grad()
def vespo_weight(t: Tokens, o: Options) -> Tensor:
    """phi of `vespo`."""
    low, high = math.log(1e-8), 20.0
    log_w = (t.log_ratio.clamp(-high, high) * t.mask).sum(-1, keepdim=True)
    if t.sampler_ratio is not None:
        log_w = log_w + t.sampler_ratio.log().clamp(low, high).sum(-1, keepdim=True)
    log_w = log_w.clamp(low, high)
    is_positive = t.advantages >= 0
    k, rate = (_where(is_positive, a, b, log_w) for a, b in zip(o.vespo_positive, o.vespo_negative, strict=True))
    rate = rate.clamp(min=1e-4)
    return (rate + k * log_w - rate * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


TERMS: dict[str, Callable[[Tokens, Options], Tensor]] = {"clip": clip, "cispo": cispo, "sapo": sapo, "vespo": vespo}


# ---- weights of tokens ----


def of_sequences(mask: Tensor, num_items: Tensor, max_length: int | None) -> Tensor:
    """Mean over the tokens of a sequence, then over sequences."""
    return mask / mask.sum(1, keepdim=True).clamp(min=1) / max(mask.shape[0], 1)


def of_batch(mask: Tensor, num_items: Tensor, max_length: int | None) -> Tensor:
    """Mean over the tokens of this call."""
    return mask / mask.sum().clamp(min=1)


def of_length(mask: Tensor, num_items: Tensor, max_length: int | None) -> Tensor:
    """Sum over tokens, over sequences times the longest length there may be."""
    return mask / (max(mask.shape[0], 1) * (max_length or 1))


def of_items(mask: Tensor, num_items: Tensor, max_length: int | None) -> Tensor:
    """Sum over tokens, over the number of tokens that the caller gives."""
    return mask / num_items


def of_sums(mask: Tensor, num_items: Tensor, max_length: int | None) -> Tensor:
    """Sum over the tokens of a sequence, then mean over sequences."""
    return mask / max(mask.shape[0], 1)


class Type(NamedTuple):
    """A loss type: its term, its weights, and whether a ratio of sequences makes sense in it."""

    term: str
    weights: Callable[[Tensor, Tensor, int | None], Tensor]
    takes_sequences: bool = True


TYPES = {
    "grpo": Type("clip", of_sequences),  # Shao et al. 2024, arXiv:2402.03300
    "bnpo": Type("clip", of_batch),
    "ppo": Type("clip", of_batch),  # Schulman et al. 2017, arXiv:1707.06347
    "dr_grpo": Type("clip", of_length),  # Liu et al. 2025, arXiv:2503.20783
    "dapo": Type("clip", of_items),  # Yu et al. 2025, arXiv:2503.14476
    "gspo": Type("clip", of_sequences),  # Zheng et al. 2025, arXiv:2507.18071; its level is "sequence"
    "luspo": Type("clip", of_sums),
    "cispo": Type("cispo", of_items, False),
    "sapo": Type("sapo", of_sequences, False),
    "vespo": Type("vespo", of_items, False),
}


# ---- divergence from the reference ----

# Estimates of KL(policy || reference) from samples of the policy, with x = ref_log_prob - log_prob.   Schulman 2020,
# "Approximating KL divergence".
KL: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda x: -x,
    "k2": lambda x: 0.5 * x.square(),
    "k3": lambda x: torch.exp(x) - x - 1,
}


# ---- masks ----


def entropy_mask(entropy: Tensor, mask: Tensor, quantile: float) -> Tensor:
    """The share `quantile` of the tokens with the highest entropy.   Wang et al. 2025, arXiv:2506.01939."""
    flat = entropy.masked_fill(~mask, float("inf")).reshape(-1).sort().values
    # The (1 - quantile)-quantile of those that count, linear between neighbours, without asking for their number.
    last = (mask.sum() - 1).clamp(min=0).double()
    rank = (1 - quantile) * last
    # By `take`: an index would be read by the host.
    low, high = flat.take(rank.floor().long()), flat.take(rank.ceil().long())
    threshold = torch.where(low == high, low, torch.lerp(low, high, (rank - rank.floor()).to(low.dtype)))
    return mask & (entropy >= threshold)


def off_policy_mask(
    log_probs: Tensor, sampler_log_probs: Tensor, advantages: Tensor, mask: Tensor, most: float
) -> Tensor:
    """False where a token has a negative advantage and its sequence has drifted: mean log-ratio above `most`.

    Source: arXiv:2512.02556, section 3.1. A sampler's NaN is no evidence.
    """
    gap = torch.where(mask, sampler_log_probs - log_probs.detach(), 0.0).nan_to_num(nan=0.0)
    drift = gap.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return (advantages >= 0) | (drift <= most)
