"""The driver of policy losses, and the function that users call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops._check import require, require_floating, require_number, require_one_of
from ._driver import Data, Head, Unit, check_count, check_head, check_rows, count, head_loss, wide_zeros
from .policy import KL, TERMS, TYPES, Options, Tokens, entropy_mask, off_policy_mask, vespo_weight


class PolicyOutput(NamedTuple):
    """A policy loss; all but the loss are metrics without a gradient.

    Attributes:
        loss: scalar.
        policy_loss: the loss without the entropy bonus.
        log_probs, entropies: `[B, T]`, of all tokens that are not masked, 0 elsewhere. What the next update calls old.
        kl: mean over tokens of the divergence from the reference; 0 without one.
        entropy: mean over tokens, in nats.
        clip_low, clip_high, clip_ratio: share of the tokens (of the sequences, for a ratio of sequences and advantages
            of sequences) whose ratio is beyond a bound that their advantage minds: below and a < 0, above and a > 0,
            either. Of "cispo" above `epsilon_high`; 0 where nothing is clipped.
        weight: of "vespo" the mean of phi, else of the ratio.
    """

    loss: Tensor
    policy_loss: Tensor
    log_probs: Tensor
    entropies: Tensor
    kl: Tensor
    entropy: Tensor
    clip_low: Tensor
    clip_high: Tensor
    clip_ratio: Tensor
    weight: Tensor


class _PolicyTerms(NamedTuple):
    """One call."""

    options: Options

    def tokens(self, log_probs: Tensor, data: Data) -> Tokens:
        mask, old = data["mask"], data["old"]
        gap = log_probs - (log_probs.detach() if old is None else old)
        # Removed before exp, not multiplied away after it.
        log_ratio = torch.where(mask, gap, 0.0)  # type: ignore[arg-type]
        log_weight = log_ratio
        if self.options.level == "sequence":
            log_weight = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)  # type: ignore[union-attr]
        given = data["advantages"], data["sampler_ratio"], mask
        return Tokens(log_probs, log_ratio, log_weight.exp(), *given)  # type: ignore[arg-type]

    def kl(self, t: Tokens, data: Data) -> Tensor:
        """Per token, as it enters the loss."""
        x = torch.where(t.mask, data["ref"] - t.log_probs, 0.0)  # type: ignore[operator]
        estimate = KL[self.options.kl]
        kl = estimate(x)
        return kl * t.ratio if self.options.kl_takes_ratio else kl

    def mask(self, entropy: Tensor, data: Data) -> Tensor:
        """The tokens whose entropy is high enough, which are all if nothing is asked."""
        mask, quantile = data["mask"], self.options.entropy_quantile
        return mask if quantile >= 1 else entropy_mask(entropy.detach(), mask, quantile)  # type: ignore[return-value, arg-type]

    def __call__(self, log_probs: Tensor, entropy: Tensor, data: Data) -> Tensor:
        o = self.options
        t = self.tokens(log_probs, data)
        term_of = TERMS[TYPES[o.loss_type].term]
        term = term_of(t, o)
        if o.off_policy_threshold is not None:
            sampled = data["sampled"] if data["sampled"] is not None else data["old"]
            sampled = log_probs.detach() if sampled is None else sampled
            keeps = off_policy_mask(log_probs, sampled, t.advantages, t.mask, o.off_policy_threshold)
            term = term * keeps
        mask = self.mask(entropy, data)
        if o.entropy_quantile < 1:
            term = term * mask
        if t.sampler_ratio is not None and o.loss_type != "vespo":
            term = term * t.sampler_ratio
        if o.beta:
            term = term + o.beta * self.kl(t, data)
        loss = (term * data["token_weight"]).sum()
        if o.entropy_coef:
            share = data["entropy_share"]
            if o.entropy_quantile < 1:
                share = mask.to(entropy.dtype) / mask.sum().clamp(min=1) * share  # type: ignore[operator]
            loss = loss - o.entropy_coef * (entropy * share).sum()
        return loss


def _check_options(name: str, o: Options, max_completion_length: int | None, num_items: float | Tensor | None) -> None:
    """Raise for options that disagree or that nothing would heed."""
    require_one_of(name, "loss_type", o.loss_type, tuple(TYPES))
    kind, is_clip = TYPES[o.loss_type], TYPES[o.loss_type].term == "clip"
    require_one_of(name, "importance_level", o.level, ("token", "sequence"))
    fits = o.level == "token" or kind.takes_sequences
    require(fits, name, "importance_level", f"'token' for loss_type {o.loss_type!r}", repr(o.level))
    require_number(name, "epsilon_low", o.epsilon_low, low=0)
    require_number(name, "epsilon_high", o.epsilon_high, low=0)
    if o.delta is not None:
        require_number(name, "delta", o.delta, low=0, above=True)
        require(is_clip, name, "delta", f"None for loss_type {o.loss_type!r}", o.delta)
    require_number(name, "beta", o.beta, low=0)
    require_one_of(name, "kl_estimator", o.kl, tuple(KL))
    for argument, value in {"sapo_temperature_pos": 0, "sapo_temperature_neg": 1}.items():
        require_number(name, argument, o.sapo_temperatures[value], low=0, above=True)
    names = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
    for argument, number in zip(names, (*o.vespo_positive, *o.vespo_negative), strict=True):
        require_number(name, argument, number)
    require_number(name, "entropy_coef", o.entropy_coef)
    require_number(name, "entropy_quantile", o.entropy_quantile, low=0, high=1, above=True)
    if o.off_policy_threshold is not None:
        require_number(name, "off_policy_threshold", o.off_policy_threshold)
    is_fixed, is_counted = o.loss_type == "dr_grpo", kind.weights is TYPES["dapo"].weights
    if is_fixed:
        require_number(name, "max_completion_length", max_completion_length, low=1)
    else:
        expected = f"None for loss_type {o.loss_type!r}"
        require(max_completion_length is None, name, "max_completion_length", expected, max_completion_length)
    check_count(name, "num_items", num_items)
    expected = f"None for loss_type {o.loss_type!r}"
    require(num_items is None or is_counted, name, "num_items", expected, num_items)


def grpo(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    advantages: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    sampler_log_probs: Tensor | None = None,
    sampler_ratio: Tensor | None = None,
    loss_type: str = "dapo",
    importance_level: str | None = None,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    kl_takes_ratio: bool = False,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    entropy_coef: float = 0.0,
    entropy_quantile: float = 1.0,
    off_policy_threshold: float | None = None,
    temperature: float = 1.0,
    max_completion_length: int | None = None,
    num_items: float | Tensor | None = None,
    accumulation_steps: float = 1,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float | None = None,
    max_logits_bytes: int | None = None,
    skip_ignored: bool = False,
) -> PolicyOutput:
    """Group-relative policy optimisation and its relatives, without storing the logits.

        log_probs = log_softmax(F.linear(hidden, weight, bias) / temperature).gather(labels)
        loss = sum over tokens of weight * -min(r * a, clip(r) * a),  r = exp(log_probs - old_log_probs)     # "dapo"

    Args:
        hidden: `[B, T, D]`: what `weight` is applied to at the position before each token of a completion.
        weight: `[V, D]`, same dtype as `hidden`, or cast with it by autocast.
        labels: `[B, T]`: the tokens of the completions. Position t is the label of `hidden[:, t]`: shifted already.
        advantages: `[B]` or `[B, T]`.
        bias: `[V]` or None.
        mask: `[B, T]`, any dtype, 0 where a token does not count; with `labels` of `ignore_index` likewise. What the
            other tensors hold there does not matter.
        old_log_probs: `[B, T]` before the first update on these samples; None is this policy's own.
        ref_log_probs: `[B, T]` under the reference; or `ref_hidden` with `ref_weight` and `ref_bias`, which None makes
            those of this head. Needed where `beta` is not 0, refused where it is.
        sampler_log_probs: `[B, T]` of what sampled, for `off_policy_threshold`; None is the old ones.
        sampler_ratio: `[B, T]` or `[B, 1]`, factor of the term: the old policy over what sampled. In "vespo" it enters
            the ratio of the sequence.
        loss_type: a key of `tigon.losses.POLICY`: "grpo", "bnpo", "ppo" (as "bnpo"), "dr_grpo", "dapo", "gspo",
            "luspo", "cispo", "sapo", "vespo".
        importance_level: "token", or "sequence" for the mean ratio of the sequence; None is what the type says.
        epsilon_low, epsilon_high: the ratio is clipped to [1 - low, 1 + high]; of "cispo" to `epsilon_high` itself.
        delta: bound of the ratio that is not clipped.
        beta, kl_estimator: factor and form, "k1", "k2" or "k3", of the divergence from the reference.
        kl_takes_ratio: multiply the divergence by the ratio, which makes its gradient that of its mean.
        entropy_coef: of the mean entropy, which is subtracted from the loss, and has its gradient.
        entropy_quantile: the share of tokens, those with the highest entropy, that the term is of.
        off_policy_threshold: drop a term with a negative advantage where the mean log-ratio of what sampled to this
            policy, over the sequence, is larger.
        temperature: logits are divided by it, after scale and cap; the reference's too.
        max_completion_length: of "dr_grpo".
        num_items: tokens to divide by, of "dapo", "cispo" and "vespo": those of the whole step, divided by the ranks
            that average their gradients. None is those of this call. A number or a tensor of one element.
        accumulation_steps: what is not divided by `num_items` is divided by this.
        softcap, logit_scale: logits become `softcap * tanh(logit_scale * logits / softcap)`.
        max_logits_bytes: most bytes of logits at once, None for 1.25 GiB on accelerators and 64 MiB on a CPU.
        skip_ignored: compute only the rows that count. The host waits for their number.

    Returns:
        `PolicyOutput`: the loss, and metrics without a gradient. Without a token that counts loss and gradients are 0.

    Raises:
        ValueError: shapes, dtypes, devices or options disagree, or an option is given that the type does not heed.

    Numerics: logits in the dtype of the product, everything after them in fp32.
    Memory:   `max_logits_bytes` and the gradients. Three matrix products where what has to be seen at once fits into
              it: a token; a sequence, for a ratio of sequences, "vespo" and `off_policy_threshold`; the batch, for
              `entropy_quantile`. Else four; one more for `ref_hidden`. Four in fp16 and under a compiler.
    Source: Shao et al. 2024, arXiv:2402.03300; of the other types in `tigon.losses.policy`.
    """
    name = "grpo"
    head = Head(name, weight, bias, ignore_index, softcap, logit_scale, max_logits_bytes, skip_ignored, temperature)
    if importance_level is None:
        importance_level = "sequence" if loss_type == "gspo" else "token"
    o = Options(
        loss_type,
        importance_level,
        epsilon_low,
        epsilon_high,
        delta,
        beta,
        kl_estimator,
        kl_takes_ratio,
        (sapo_temperature_pos, sapo_temperature_neg),
        (vespo_k_pos, vespo_lambda_pos),
        (vespo_k_neg, vespo_lambda_neg),
        entropy_coef,
        entropy_quantile,
        off_policy_threshold,
    )
    _check_options(name, o, max_completion_length, num_items)
    require_number(name, "accumulation_steps", accumulation_steps, low=0, above=True)
    require(loss_type != "gspo" or importance_level == "sequence", name, "importance_level", "'sequence' for gspo", "")
    if mask is not None and isinstance(labels, Tensor):
        # What stands where nothing counts need be no class.
        check_rows(name, hidden, mask=(mask, [tuple(labels.shape)]))
        labels = labels.masked_fill(mask == 0, ignore_index)
    labels = check_head(head, hidden, labels)
    rows = tuple(labels.shape)
    check_rows(
        name,
        hidden,
        advantages=(advantages, [rows[:1], rows, (rows[0], 1)]),
        old_log_probs=(old_log_probs, [rows]),
        ref_log_probs=(ref_log_probs, [rows]),
        sampler_log_probs=(sampler_log_probs, [rows]),
        sampler_ratio=(sampler_ratio, [rows, (rows[0], 1)]),
    )
    require_floating(name, advantages=advantages)
    num_references = (ref_log_probs is not None) + (ref_hidden is not None)
    expected = "None where beta is 0" if not beta else "one of ref_log_probs and ref_hidden where beta is not 0"
    require(num_references == (1 if beta else 0), name, "ref_log_probs", expected, f"{num_references} of them")
    is_alone = ref_weight is None and ref_bias is None
    require(ref_hidden is not None or is_alone, name, "ref_weight", "None without ref_hidden", "a tensor")
    require(ref_bias is None or ref_weight is not None, name, "ref_bias", "None without ref_weight", "a tensor")
    takes = sampler_log_probs is None or off_policy_threshold is not None
    require(takes, name, "sampler_log_probs", "None without off_policy_threshold", "a tensor")
    require(not kl_takes_ratio or beta != 0, name, "kl_takes_ratio", "False where beta is 0", True)

    zero = wide_zeros(head, hidden)
    valid = labels != ignore_index
    a = advantages.to(zero.dtype)
    # Of a sequence, or of tokens, of which those that do not count may hold anything.
    a = a.unsqueeze(1) if a.dim() == 1 else a
    ratio = None if sampler_ratio is None else sampler_ratio.to(zero.dtype)
    counts = {True: valid, False: valid.any(1, keepdim=True)}
    a = torch.where(counts[a.shape == valid.shape], a, 0.0)
    ratio = None if ratio is None else torch.where(counts[ratio.shape == valid.shape], ratio, 1.0)
    kind, counted = TYPES[loss_type], valid.to(zero.dtype)
    items = counted.sum().clamp(min=1) if num_items is None else num_items
    steps = 1.0 if kind.weights is TYPES["dapo"].weights and num_items is not None else accumulation_steps
    if ref_hidden is not None:
        ref_log_probs = head.frozen_log_probs(ref_hidden, labels, ref_weight, ref_bias)
    plain = o.entropy_quantile >= 1
    data: dict[str, Tensor | None] = {
        "mask": valid,
        "advantages": a,
        "old": None if old_log_probs is None else old_log_probs.to(zero.dtype),
        "ref": None if ref_log_probs is None else ref_log_probs.to(zero.dtype),
        "sampled": None if sampler_log_probs is None else sampler_log_probs.to(zero.dtype),
        "sampler_ratio": ratio,
        "token_weight": kind.weights(counted, count(items, zero), max_completion_length) / steps,
        "entropy_share": (counted / counted.sum().clamp(min=1) if plain else zero + 1.0) / accumulation_steps,
    }
    meets = importance_level == "sequence" or loss_type == "vespo" or off_policy_threshold is not None
    unit: Unit = "batch" if not plain else "sequence" if meets else "token"
    terms = _PolicyTerms(o)
    made = head_loss(head, hidden, labels, terms, data, unit, uses_entropy=bool(entropy_coef))
    return _with_metrics(terms, *made, data, accumulation_steps)


@torch.no_grad()
def _metrics(terms: _PolicyTerms, log_probs: Tensor, entropy: Tensor, data: Data) -> dict[str, Tensor]:
    o, t = terms.options, terms.tokens(log_probs, data)
    is_clip = TYPES[o.loss_type].term == "clip"

    def mean(x: Tensor) -> Tensor:
        if x.shape != t.mask.shape or (o.level == "sequence" and x.shape[1] == 1):
            return x.sum() / max(x.shape[0], 1)
        return torch.where(t.mask, x, 0.0).sum() / t.mask.sum().clamp(min=1)

    low = high = torch.zeros_like(t.ratio, dtype=torch.bool)
    if is_clip:
        ratio = t.ratio if o.delta is None else t.ratio.clamp(max=o.delta)
        low = (ratio < 1 - o.epsilon_low) & (t.advantages < 0)
        high = (ratio > 1 + o.epsilon_high) & (t.advantages > 0)
    elif o.loss_type == "cispo":
        high = (t.ratio > o.epsilon_high) & (t.advantages > 0)
    weight = vespo_weight(t, o) if o.loss_type == "vespo" else t.ratio
    shares = {"clip_low": low, "clip_high": high, "clip_ratio": low | high}
    return {
        "kl": mean(terms.kl(t, data)) if o.beta else t.ratio.new_zeros(()),
        "entropy": mean(entropy),
        **{k: mean(v.to(entropy.dtype)) for k, v in shares.items()},
        "weight": mean(weight),
        "bonus": mean(entropy) if o.entropy_quantile >= 1 else _mean_of(entropy, terms.mask(entropy, data)),
    }


def _mean_of(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0.0).sum() / mask.sum().clamp(min=1)


def _with_metrics(
    terms: _PolicyTerms, loss: Tensor, log_probs: Tensor, entropy: Tensor, data: Data, steps: float
) -> PolicyOutput:
    found = _metrics(terms, log_probs, entropy, data)
    bonus = found.pop("bonus") * terms.options.entropy_coef / steps
    return PolicyOutput(loss, loss.detach() + bonus, log_probs, entropy, **found)
