"""The driver of losses of pairs and of single responses, and the functions that users call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops._check import require, require_number, require_one_of
from ._driver import Data, Head, check_count, check_head, check_rows, count, head_loss, wide_zeros
from .preference import CPO, DIVERGENCES, DPO, KTO, ORPO, Form, Options, Pairs, log_odds, odds_ratio, sft

LossType = str | Mapping[str, float]

# ---- the driver's terms ----


class _PairTerms(NamedTuple):
    """One call: forms and weights, options, and how log-probabilities become scores."""

    forms: tuple[tuple[Form, float], ...]
    options: Options
    nll_weight: float
    averages: bool = False
    divergence: str = "reverse_kl"
    alpha: float = 0.5

    def pairs(self, log_probs: Tensor, data: Data) -> Pairs:
        logs = of_sequences(log_probs, data, self.averages)
        ref = torch.zeros_like(logs) if data["ref"] is None else data["ref"]
        (chosen, rejected), (ref_chosen, ref_rejected) = logs.chunk(2), ref.chunk(2)
        tokens = data["tokens"].chunk(2)  # type: ignore[union-attr]
        score = DIVERGENCES[self.divergence]
        scores = (score(t, self.alpha) for t in (chosen - ref_chosen, rejected - ref_rejected))
        clamped = (t.clamp(min=1) for t in tokens)
        has_tokens = (tokens[0] > 0) & (tokens[1] > 0)
        nll = -(log_probs * data["nll_share"]).sum(1).chunk(2)[0]  # type: ignore[operator]
        return Pairs(*scores, chosen, rejected, ref_chosen, ref_rejected, *clamped, has_tokens, nll)

    def __call__(self, log_probs: Tensor, entropy: Tensor, data: Data) -> Tensor:
        p = self.pairs(log_probs, data)
        loss = self.nll_weight * p.chosen_nll.sum()
        for form, weight in self.forms:
            # Of `sft` each pair has its part already.
            share = 1.0 if form.function is sft else data["share"]
            loss = loss + weight * (form.function(p, self.options) * share).sum()
        return loss


def of_sequences(log_probs: Tensor, data: Data, averages: bool) -> Tensor:
    """Log-probabilities of sequences: sums over their tokens, or means."""
    total = (log_probs * data["token_weight"]).sum(1)  # type: ignore[operator]
    return total / data["tokens"].clamp(min=1) if averages else total  # type: ignore[union-attr]


class _KtoTerms(NamedTuple):
    loss_type: str
    beta: float
    averages: bool

    def scores(self, log_probs: Tensor, data: Data) -> Tensor:
        logs = of_sequences(log_probs, data, self.averages)
        return logs if data["ref"] is None else logs - data["ref"]

    def __call__(self, log_probs: Tensor, entropy: Tensor, data: Data) -> Tensor:
        score, is_wanted, kl = self.scores(log_probs, data), data["is_wanted"], data["kl"]
        loss_of = KTO[self.loss_type]
        loss = loss_of(score, is_wanted, kl, self.beta)  # type: ignore[arg-type]
        return (loss * data["share"]).sum()  # type: ignore[operator]


# ---- public ----


class PreferenceOutput(NamedTuple):
    """A loss of pairs; all but the loss are metrics without a gradient.

    Attributes:
        loss: scalar.
        chosen_log_probs, rejected_log_probs: `[pairs]`, sums over tokens or means, as the loss takes them.
        chosen_rewards, rejected_rewards: `[pairs]`, `beta` times the log-ratio to the reference.
        accuracy: share of pairs whose chosen reward is the larger one.
        margin: mean of chosen less rejected rewards.
        nll_loss: mean over the chosen tokens (those of `nll_labels`), whatever its weight in the loss.
        entropy: mean over the tokens of all responses, in nats.
        log_odds: `[pairs]`, of `orpo`, else None.
    """

    loss: Tensor
    chosen_log_probs: Tensor
    rejected_log_probs: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor
    accuracy: Tensor
    margin: Tensor
    nll_loss: Tensor
    entropy: Tensor
    log_odds: Tensor | None


class KtoOutput(NamedTuple):
    """A loss of single responses; all but the loss are metrics without a gradient.

    Attributes:
        loss: scalar.
        log_probs, rewards: `[responses]`; `beta` times the log-ratio to the reference.
        wanted_reward, unwanted_reward: means over the responses of either class, 0 where there is none.
        wanted_log_prob, unwanted_log_prob: likewise.
        entropy: mean over the tokens of all responses, in nats.
    """

    loss: Tensor
    log_probs: Tensor
    rewards: Tensor
    wanted_reward: Tensor
    unwanted_reward: Tensor
    wanted_log_prob: Tensor
    unwanted_log_prob: Tensor
    entropy: Tensor


def _check_reference(
    head: Head,
    hidden: Tensor,
    ref_log_probs: Tensor | None,
    ref_hidden: Tensor | None,
    ref_weight: Tensor | None,
    ref_bias: Tensor | None,
    reference_free: bool,
) -> None:
    name, rows = head.name, tuple(hidden.shape[:2])
    require(hidden.dim() == 3, name, "hidden", "[sequences, tokens, width]", f"shape {tuple(hidden.shape)}")
    given = [ref_log_probs is not None, ref_hidden is not None, reference_free]
    one = "one of ref_log_probs, ref_hidden and reference_free=True"
    require(sum(given) == 1, name, "ref_log_probs", one, f"{sum(given)} of them")
    is_alone = ref_weight is None and ref_bias is None
    require(ref_hidden is not None or is_alone, name, "ref_weight", "None without ref_hidden", "a tensor")
    require(ref_bias is None or ref_weight is not None, name, "ref_bias", "None without ref_weight", "a tensor")
    check_rows(name, hidden, ref_log_probs=(ref_log_probs, [rows, rows[:1]]))
    if ref_hidden is not None:
        shape = tuple(ref_hidden.shape[:2])
        require(shape == rows, name, "ref_hidden", f"{rows} sequences and tokens", tuple(ref_hidden.shape))


def _reference(
    head: Head,
    hidden: Tensor,
    labels: Tensor,
    data: Data,
    averages: bool,
    ref_log_probs: Tensor | None,
    ref_hidden: Tensor | None,
    ref_weight: Tensor | None,
    ref_bias: Tensor | None,
) -> Tensor | None:
    """Log-probabilities of sequences under the reference."""
    if ref_hidden is not None:
        ref_log_probs = head.frozen_log_probs(ref_hidden, labels, ref_weight, ref_bias)
    if ref_log_probs is None:
        return None
    like = data["token_weight"]
    ref_log_probs = ref_log_probs.detach().to(like.dtype)  # type: ignore[union-attr]
    if ref_log_probs.dim() == 1:
        return ref_log_probs
    return of_sequences(torch.where(labels != head.ignore_index, ref_log_probs, 0.0), data, averages)


def _as_tensor(kl: float | Tensor, zero: Tensor) -> Tensor:
    if not isinstance(kl, Tensor):
        return zero + kl
    kl = kl.detach().to(zero.device, zero.dtype)
    return kl.reshape(()) if kl.numel() == 1 else kl


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0.0).sum() / mask.sum().clamp(min=1)


def _of_pairs(
    head: Head,
    hidden: Tensor,
    labels: Tensor,
    terms: _PairTerms,
    *,
    reference: tuple[Tensor | None, ...] = (None,) * 4,
    nll_labels: Tensor | None = None,
    length_alpha: float | None = None,
    num_items: float | Tensor | None = None,
    nll_num_items: float | Tensor | None = None,
    rewards_are_scores: bool = False,
) -> PreferenceOutput:
    """The driver of all losses of pairs, after their own checks."""
    name, ignore = head.name, head.ignore_index
    labels = check_head(head, hidden, labels)
    num_sequences = labels.shape[0]
    require(num_sequences % 2 == 0, name, "hidden", "chosen, then as many rejected responses", f"{num_sequences}")
    check_count(name, "num_items", num_items)
    check_count(name, "nll_num_items", nll_num_items)
    num_pairs = num_sequences // 2
    zero = wide_zeros(head, hidden)
    valid = labels != ignore
    token_weight = valid.to(zero.dtype)
    tokens = valid.sum(1)
    if length_alpha is not None:
        require_number(name, "length_alpha", length_alpha)
        shared = torch.minimum(*tokens.chunk(2)).repeat(2).unsqueeze(1)
        token_weight = token_weight * torch.where(valid.cumsum(1) <= shared, zero + 1.0, zero + length_alpha)
    asked = labels
    of_nll = torch.cat((valid[:num_pairs], torch.zeros_like(valid[num_pairs:])))
    if nll_labels is not None:
        check_rows(name, hidden, nll_labels=(nll_labels, [(num_pairs, *labels.shape[1:])]))
        nll_labels = nll_labels.long()
        is_nll = nll_labels != ignore
        is_both = is_nll & valid[:num_pairs]
        differs = (is_both & (nll_labels != labels[:num_pairs])).any()
        if not torch.compiler.is_compiling() and labels.device.type == "cpu":
            require(not bool(differs), name, "nll_labels", "the label of each token that has one", "others")
        token_weight = token_weight + torch.where(differs, float("nan"), 0.0)
        asked = torch.cat((torch.where(is_nll, nll_labels, labels[:num_pairs]), labels[num_pairs:]))
        of_nll = torch.cat((is_nll, torch.zeros_like(is_nll)))
    num_nll = of_nll.sum().clamp(min=1) if nll_num_items is None else nll_num_items
    data: dict[str, Tensor | None] = {
        "token_weight": token_weight,
        "tokens": tokens.to(zero.dtype),
        "share": count(max(num_pairs, 1) if num_items is None else num_items, zero).reciprocal(),
        "nll_share": of_nll.to(zero.dtype) / count(num_nll, zero),
    }
    data["ref"] = _reference(head, hidden, labels, data, terms.averages, *reference)
    unit = "batch" if any(form.unit == "batch" for form, _ in terms.forms) else "pair"
    loss, log_probs, entropy = head_loss(head, hidden, asked, terms, data, unit)  # type: ignore[arg-type]
    with torch.no_grad():
        p = terms.pairs(log_probs, data)
        if rewards_are_scores:
            rewards = p.chosen, p.rejected
        else:
            rewards = p.chosen_log_probs - p.ref_chosen_log_probs, p.rejected_log_probs - p.ref_rejected_log_probs
        chosen, rejected = (terms.options.beta * t for t in rewards)
        return PreferenceOutput(
            loss,
            p.chosen_log_probs,
            p.rejected_log_probs,
            chosen,
            rejected,
            (chosen > rejected).to(zero.dtype).sum() / max(num_pairs, 1),
            (chosen - rejected).sum() / max(num_pairs, 1),
            p.chosen_nll.sum(),
            _mean(entropy, valid),
            log_odds(p) if terms.forms[0][0].function is odds_ratio else None,
        )


def _forms(name: str, loss_type: LossType, table: Mapping[str, Form], smoothing: float) -> list[tuple[Form, float]]:
    """Forms and weights that `loss_type` names.

    Raises:
        ValueError: a type is unknown, or does not take this smoothing.
    """
    weights = loss_type if isinstance(loss_type, Mapping) else {loss_type: 1.0}
    require(len(weights) > 0, name, "loss_type", "at least one type", "none")
    require_number(name, "label_smoothing", smoothing, low=0, high=1)
    forms = []
    for each, weight in weights.items():
        require_one_of(name, "loss_type", each, tuple(table))
        require_number(name, "loss_type", weight)
        form = table[each]
        fits = {"none": smoothing == 0, "any": True, "below_half": smoothing < 0.5, "needed": 0 < smoothing < 1}
        expected = {"none": "0", "below_half": "below 0.5", "needed": "in (0, 1)"}.get(form.smoothing)
        # Beside a type that takes it, it is not meant for one that does not.
        others = any(table[k].smoothing != "none" for k in weights if k in table)
        is_right = fits[form.smoothing] or (form.smoothing == "none" and others)
        require(is_right, name, "label_smoothing", f"{expected} for loss_type {each!r}", smoothing)
        forms.append((form, float(weight)))
    return forms


def dpo(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    reference_free: bool = False,
    loss_type: LossType = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    f_divergence: str = "reverse_kl",
    f_alpha: float = 0.5,
    average_log_probs: bool = False,
    length_alpha: float | None = None,
    nll_weight: float = 0.0,
    num_items: float | Tensor | None = None,
    nll_num_items: float | Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float | None = None,
    max_logits_bytes: int | None = None,
    skip_ignored: bool = False,
) -> PreferenceOutput:
    """Direct preference optimisation and its relatives, without storing the logits.

        log_probs = log_softmax(F.linear(hidden, weight, bias)).gather(labels).sum over tokens
        c, r = the two halves of log_probs - ref_log_probs;  loss = mean of -log s(beta * (c - r))     # "sigmoid"

    Args:
        hidden: `[2 * pairs, T, D]`, all chosen responses, then the rejected ones in the same order: what `weight` is
            applied to at the position before each token.
        weight: `[V, D]`, same dtype as `hidden`, or cast with it by autocast.
        labels: `[2 * pairs, T]`: the tokens, `ignore_index` where they are no response. Position t is the label of
            `hidden[:, t]`: shifted already.
        bias: `[V]` or None.
        ref_log_probs: `[2 * pairs]` of whole responses, or `[2 * pairs, T]` of tokens, under the reference.
        ref_hidden, ref_weight, ref_bias: hidden states of the reference, whose width may be another, and its head;
            `ref_weight` None is this head. One matrix product, no gradient.
        reference_free: without a reference; exactly one of the three is asked for.
        loss_type: a key of `tigon.losses.DPO`, or several with weights, `{"sigmoid": 0.8, "sft": 1.0}`.
        beta: of the formulae in `tigon.losses.preference`; 1 / temperature of the rewards.
        label_smoothing: probability that a label is wrong; of "sigmoid", "robust", "exo_pair", "aot", "aot_unpaired".
        discopop_tau: of "discopop".
        f_divergence: "reverse_kl", "forward_kl", "js_divergence" or "alpha_divergence" (with `f_alpha`), for the
            losses of c - r.
        average_log_probs: means over tokens in place of sums; not with "ipo" and "sigmoid_norm", which divide by them.
        length_alpha: weight of the tokens beyond the shorter response of a pair; None for 1.
        nll_weight: of the negative log-likelihood of the chosen tokens, which is added.
        num_items: pairs to divide by in place of those of this call, for a batch that is part of a larger one: a number
            or a tensor of one element on any device. `nll_num_items` likewise, chosen tokens.
        softcap, logit_scale: logits become `softcap * tanh(logit_scale * logits / softcap)`; the reference's too.
        max_logits_bytes: most bytes of logits at once, None for 1.25 GiB on accelerators and 64 MiB on a CPU.
        skip_ignored: compute only the rows that are not ignored. The host waits for their number.

    Returns:
        `PreferenceOutput`: the loss, and metrics without a gradient. Pairs without a token have log-probabilities 0
        and no gradient, and count in the mean, as in the plain form.

    Raises:
        ValueError: shapes, dtypes, devices or options disagree.

    Numerics: logits in the dtype of the product, everything after them in fp32.
    Memory:   `max_logits_bytes` and the gradients. Three matrix products where a pair fits into it (the batch, for
              "aot" and "aot_unpaired"), else four; one more for `ref_hidden`. Four in fp16 and under a compiler.
    Source: Rafailov et al. 2023, arXiv:2305.18290; of the other types in their docstrings.
    """
    head = Head("dpo", weight, bias, ignore_index, softcap, logit_scale, max_logits_bytes, skip_ignored)
    forms = _forms("dpo", loss_type, DPO, label_smoothing)
    require_number("dpo", "beta", beta, low=0, above=True)
    require_number("dpo", "discopop_tau", discopop_tau, low=0, above=True)
    require_number("dpo", "nll_weight", nll_weight)
    require_one_of("dpo", "f_divergence", f_divergence, tuple(k for k in DIVERGENCES if k != "alpha_po"))
    takes = f_divergence == "reverse_kl" or all(form.takes_divergence for form, _ in forms)
    require(takes, "dpo", "f_divergence", f"'reverse_kl' for loss_type {loss_type!r}", repr(f_divergence))
    divides = [name for name, form in DPO.items() if any(form is each for each, _ in forms) and form.divides]
    expected = f"False for {', '.join(map(repr, divides))}, which divides by the tokens itself"
    require(not (average_log_probs and divides), "dpo", "average_log_probs", expected, True)
    reference = ref_log_probs, ref_hidden, ref_weight, ref_bias
    _check_reference(head, hidden, *reference, reference_free)
    options = Options(beta, label_smoothing, discopop_tau)
    terms = _PairTerms(tuple(forms), options, nll_weight, average_log_probs, f_divergence, f_alpha)
    return _of_pairs(
        head,
        hidden,
        labels,
        terms,
        reference=reference,
        length_alpha=length_alpha,
        num_items=num_items,
        nll_num_items=nll_num_items,
    )


def cpo(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    loss_type: LossType = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    gamma: float = 0.5,
    alpha: float = 0.0,
    average_log_probs: bool | None = None,
    nll_weight: float = 1.0,
    num_items: float | Tensor | None = None,
    nll_num_items: float | Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float | None = None,
    max_logits_bytes: int | None = None,
    skip_ignored: bool = False,
) -> PreferenceOutput:
    """Contrastive preference optimisation: pairs without a reference, and the chosen tokens' likelihood.

        loss = mean of -log s(beta * (c - r)) + nll_weight * mean of -log p over the chosen tokens         # "sigmoid"

    Args:
        loss_type: "sigmoid", "hinge", "ipo" or "simpo".
        label_smoothing: of "sigmoid" and "simpo".
        gamma: margin of "simpo".
        alpha: of the rewards (1 - P^-alpha) / alpha in place of log P (AlphaPO); 0 is log P.
        average_log_probs: means over tokens; None is what the type does, means for "ipo" and "simpo", else sums.
        others: as in `dpo`, of which returns, errors, numerics and memory are those too.

    Source: Xu et al. 2024, arXiv:2401.08417.
    """
    head = Head("cpo", weight, bias, ignore_index, softcap, logit_scale, max_logits_bytes, skip_ignored)
    forms = _forms("cpo", loss_type, CPO, label_smoothing)
    for argument, value in {"gamma": gamma, "alpha": alpha, "nll_weight": nll_weight}.items():
        require_number("cpo", argument, value)
    require_number("cpo", "beta", beta, low=0, above=True)
    averages = {form.averages for form, _ in forms}
    wants_one = average_log_probs is not None or len(averages) == 1
    require(wants_one, "cpo", "average_log_probs", "True or False for these types", None)
    if average_log_probs is None:
        average_log_probs = averages.pop()
    options, divergence = Options(beta, label_smoothing, gamma=gamma), "alpha_po" if alpha else "reverse_kl"
    terms = _PairTerms(tuple(forms), options, nll_weight, average_log_probs, divergence, alpha)
    counts: dict[str, Any] = {"num_items": num_items, "nll_num_items": nll_num_items}
    return _of_pairs(head, hidden, labels, terms, rewards_are_scores=True, **counts)


def simpo(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    beta: float = 0.1,
    gamma: float = 0.5,
    label_smoothing: float = 0.0,
    nll_weight: float = 0.0,
    num_items: float | Tensor | None = None,
    nll_num_items: float | Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float | None = None,
    max_logits_bytes: int | None = None,
    skip_ignored: bool = False,
) -> PreferenceOutput:
    """Simple preference optimisation: pairs of mean log-probabilities with a margin, without a reference.

        loss = mean of -log s(beta * (c - r) - gamma)

    Args:
        beta, gamma: the paper recommends a `beta` of 2 or more and a `gamma` of about half of it; the defaults are
            those of TRL.
        others: as in `cpo` and `dpo`.

    Source: Meng et al. 2024, arXiv:2405.14734.
    """
    head = Head("simpo", weight, bias, ignore_index, softcap, logit_scale, max_logits_bytes, skip_ignored)
    forms = _forms("simpo", "simpo", CPO, label_smoothing)
    require_number("simpo", "beta", beta, low=0, above=True)
    for argument, value in {"gamma": gamma, "nll_weight": nll_weight}.items():
        require_number("simpo", argument, value)
    terms = _PairTerms(tuple(forms), Options(beta, label_smoothing, gamma=gamma), nll_weight, averages=True)
    counts: dict[str, Any] = {"num_items": num_items, "nll_num_items": nll_num_items}
    return _of_pairs(head, hidden, labels, terms, rewards_are_scores=True, **counts)


def orpo(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    nll_labels: Tensor | None = None,
    beta: float = 0.1,
    nll_weight: float = 1.0,
    num_items: float | Tensor | None = None,
    nll_num_items: float | Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float | None = None,
    max_logits_bytes: int | None = None,
    skip_ignored: bool = False,
) -> PreferenceOutput:
    """Odds-ratio preference optimisation: the likelihood of the chosen tokens, and the odds of pairs.

        loss = nll_weight * mean of -log p over the chosen tokens - beta * mean of log s(log_odds(c) - log_odds(r))

    Args:
        nll_labels: `[pairs, T]`: the chosen tokens whose likelihood is meant, those of the prompt too for example. None
            is those of `labels`. Where both have one it must be the same: a CPU raises, on a GPU the loss is NaN.
        others: as in `dpo`, of which returns, errors, numerics and memory are those too. Log-probabilities are means.

    Source: Hong et al. 2024, arXiv:2403.07691.
    """
    head = Head("orpo", weight, bias, ignore_index, softcap, logit_scale, max_logits_bytes, skip_ignored)
    require_number("orpo", "beta", beta, low=0)
    require_number("orpo", "nll_weight", nll_weight)
    terms = _PairTerms(((ORPO["orpo"], 1.0),), Options(beta), nll_weight, averages=True)
    counts: dict[str, Any] = {"num_items": num_items, "nll_num_items": nll_num_items}
    return _of_pairs(head, hidden, labels, terms, nll_labels=nll_labels, rewards_are_scores=True, **counts)


def kto_kl(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The reference point of `kto`: the mean log-ratio of responses to other prompts, at least 0, without a gradient.

    Of several ranks, take the mean of the log-ratios over all of them instead.
    """
    return (log_probs.detach() - ref_log_probs.detach()).mean().clamp(min=0)


def kto(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    is_wanted: Tensor,
    *,
    bias: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    reference_free: bool = False,
    kl: float | Tensor | None = None,
    loss_type: str = "kto",
    beta: float = 0.1,
    wanted_weight: float = 1.0,
    unwanted_weight: float = 1.0,
    average_log_probs: bool = False,
    num_items: float | Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float | None = None,
    max_logits_bytes: int | None = None,
    skip_ignored: bool = False,
) -> KtoOutput:
    """Kahneman-Tversky optimisation: responses that are wanted or not, each for itself.

        loss = mean of w * (1 - s(beta * (c - kl))) over wanted, w * (1 - s(beta * (kl - r))) over other responses

    Args:
        hidden, labels: `[responses, T, D]` and `[responses, T]`.
        is_wanted: `[responses]` bool. A batch of one class is as good as any.
        kl: reference point, see `kto_kl`: a scalar, or one a response; None is 0. Gets no gradient.
        loss_type: "kto" or "apo_zero_unpaired", which has no `kl`.
        wanted_weight, unwanted_weight: factors of the classes. They change no divisor.
        num_items: responses to divide by in place of those of this call.
        others: as in `dpo`, of which errors, numerics and memory are those too; a response takes the place of a pair.

    Returns:
        `KtoOutput`.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306.
    """
    name = "kto"
    head = Head(name, weight, bias, ignore_index, softcap, logit_scale, max_logits_bytes, skip_ignored)
    require_one_of(name, "loss_type", loss_type, tuple(KTO))
    require(kl is None or loss_type == "kto", name, "kl", f"None for loss_type {loss_type!r}", kl)
    require_number(name, "beta", beta, low=0, above=True)
    for argument, value in {"wanted_weight": wanted_weight, "unwanted_weight": unwanted_weight}.items():
        require_number(name, argument, value, low=0)
    labels = check_head(head, hidden, labels)
    reference = ref_log_probs, ref_hidden, ref_weight, ref_bias
    _check_reference(head, hidden, *reference, reference_free)
    num_responses = labels.shape[0]
    check_rows(name, hidden, is_wanted=(is_wanted, [(num_responses,)]))
    check_count(name, "num_items", num_items)
    if isinstance(kl, Tensor):
        is_fit = kl.numel() == 1 or tuple(kl.shape) == (num_responses,)
        require(is_fit, name, "kl", f"one element or {num_responses}", f"shape {tuple(kl.shape)}")
    elif kl is not None:
        require_number(name, "kl", kl)
    zero = wide_zeros(head, hidden)
    is_wanted, valid = is_wanted.bool(), labels != ignore_index
    factor = count(max(num_responses, 1) if num_items is None else num_items, zero).reciprocal()
    data: dict[str, Tensor | None] = {
        "token_weight": valid.to(zero.dtype),
        "tokens": valid.sum(1).to(zero.dtype),
        "is_wanted": is_wanted,
        "share": torch.where(is_wanted, zero + wanted_weight, zero + unwanted_weight) * factor,
        "kl": zero if kl is None else _as_tensor(kl, zero),
    }
    data["ref"] = _reference(head, hidden, labels, data, average_log_probs, *reference)
    terms = _KtoTerms(loss_type, beta, average_log_probs)
    loss, log_probs, entropy = head_loss(head, hidden, labels, terms, data, "sequence")
    with torch.no_grad():
        logs = of_sequences(log_probs, data, average_log_probs)
        rewards = beta * terms.scores(log_probs, data)
        of_classes = (_mean(t, mask) for t in (rewards, logs) for mask in (is_wanted, ~is_wanted))
        return KtoOutput(loss, logs, rewards, *of_classes, _mean(entropy, valid))
