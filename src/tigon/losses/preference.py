"""Losses of pairs of responses, a chosen and a rejected one, and of single responses that are wanted or not.

Each is a function of log-probabilities of whole responses, with its formula and its source. Their rows in `DPO`, `CPO`
and `KTO` say which options they take. In the formulae c and r are the scores of the chosen and the rejected response:
log-probabilities less those of the reference model, if there is one; s is the logistic function, b is `beta`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Pairs(NamedTuple):
    """What a loss of pairs may look at, each `[pairs]`.

    Scores, log-probabilities, those of the reference, numbers of tokens (1 for none), whether both responses have any,
    and the part of the pair in the negative log-likelihood of a chosen token.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_log_probs: Tensor
    rejected_log_probs: Tensor
    ref_chosen_log_probs: Tensor
    ref_rejected_log_probs: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    has_tokens: Tensor
    chosen_nll: Tensor


class Options(NamedTuple):
    """What the formulae take beside the pairs."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05
    gamma: float = 0.0


# ---- losses of pairs ----


def _smoothed(margin: Tensor, smoothing: float) -> Tensor:
    return -F.logsigmoid(margin) * (1 - smoothing) - F.logsigmoid(-margin) * smoothing


def sigmoid(p: Pairs, o: Options) -> Tensor:
    """-(1 - e) log s(b (c - r)) - e log s(-b (c - r)).   Rafailov et al. 2023, arXiv:2305.18290.

    With label smoothing e, for labels that are wrong with this probability: Mitchell 2023, "A note on DPO with noisy
    preferences".
    """
    return _smoothed(o.beta * (p.chosen - p.rejected), o.label_smoothing)


def sigmoid_norm(p: Pairs, o: Options) -> Tensor:
    """-log s(b (c / tokens of c - r / tokens of r)).   Lambert et al. 2024, arXiv:2411.15124."""
    return -F.logsigmoid(o.beta * (p.chosen / p.chosen_tokens - p.rejected / p.rejected_tokens))


def hinge(p: Pairs, o: Options) -> Tensor:
    """max(0, 1 - b (c - r)).   Zhao et al. 2023, arXiv:2305.10425 (SLiC)."""
    return torch.relu(1 - o.beta * (p.chosen - p.rejected))


def ipo(p: Pairs, o: Options) -> Tensor:
    """(c / tokens of c - r / tokens of r - 1 / (2 b))^2.   Azar et al. 2023, arXiv:2310.12036."""
    return (p.chosen / p.chosen_tokens - p.rejected / p.rejected_tokens - 1 / (2 * o.beta)).square()


def exo_pair(p: Pairs, o: Options) -> Tensor:
    """s(m) (log s(m) - log(1 - e)) + s(-m) (log s(-m) - log e), m = b (c - r): a KL to the smoothed label.

    Ji et al. 2024, arXiv:2402.00856, equation 16.
    """
    margin, e = o.beta * (p.chosen - p.rejected), o.label_smoothing
    right, wrong = F.logsigmoid(margin), F.logsigmoid(-margin)
    return right.exp() * (right - math.log1p(-e)) + wrong.exp() * (wrong - math.log(e))


def nca_pair(p: Pairs, o: Options) -> Tensor:
    """-log s(b c) - log s(-b c) / 2 - log s(-b r) / 2.   Chen et al. 2024, arXiv:2402.05369."""
    c, r = o.beta * p.chosen, o.beta * p.rejected
    return -F.logsigmoid(c) - 0.5 * F.logsigmoid(-c) - 0.5 * F.logsigmoid(-r)


def robust(p: Pairs, o: Options) -> Tensor:
    """(-(1 - e) log s(m) + e log s(-m)) / (1 - 2 e), m = b (c - r).   Chowdhury et al. 2024, arXiv:2403.00409."""
    margin, e = o.beta * (p.chosen - p.rejected), o.label_smoothing
    return (-(1 - e) * F.logsigmoid(margin) + e * F.logsigmoid(-margin)) / (1 - 2 * e)


def bco_pair(p: Pairs, o: Options) -> Tensor:
    """-log s(b c) - log s(-b r).   Jung et al. 2024, arXiv:2404.04656, without its running mean of rewards."""
    return -F.logsigmoid(o.beta * p.chosen) - F.logsigmoid(-o.beta * p.rejected)


def sppo_hard(p: Pairs, o: Options) -> Tensor:
    """(c - 1 / (2 b))^2 + (r + 1 / (2 b))^2.   Wu et al. 2024, arXiv:2405.00675, with probabilities 1 and 0."""
    return (p.chosen - 0.5 / o.beta).square() + (p.rejected + 0.5 / o.beta).square()


def aot(p: Pairs, o: Options) -> Tensor:
    """`sigmoid` of the i-th smallest log-ratio of the model less the i-th smallest of the reference, over the batch.

    Melnyk et al. 2024, arXiv:2406.05882, for pairs.
    """
    ours = (p.chosen_log_probs - p.rejected_log_probs).sort().values
    theirs = (p.ref_chosen_log_probs - p.ref_rejected_log_probs).sort().values
    return _smoothed(o.beta * (ours - theirs), o.label_smoothing)


def aot_unpaired(p: Pairs, o: Options) -> Tensor:
    """`sigmoid` of the i-th smallest c less the i-th smallest r, over the batch.   Melnyk et al. 2024, 2406.05882."""
    return _smoothed(o.beta * (p.chosen.sort().values - p.rejected.sort().values), o.label_smoothing)


def apo_zero(p: Pairs, o: Options) -> Tensor:
    """1 - s(b c) + s(b r).   D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 7."""
    return 1 - torch.sigmoid(o.beta * p.chosen) + torch.sigmoid(o.beta * p.rejected)


def apo_down(p: Pairs, o: Options) -> Tensor:
    """s(b c) + 1 - s(b (c - r)).   D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 8."""
    return torch.sigmoid(o.beta * p.chosen) + 1 - torch.sigmoid(o.beta * (p.chosen - p.rejected))


def discopop(p: Pairs, o: Options) -> Tensor:
    """-log s(m) (1 - g) + exp(-m) g, m = b (c - r), g = s(m / tau).   Lu et al. 2024, arXiv:2406.08414."""
    margin = o.beta * (p.chosen - p.rejected)
    share = torch.sigmoid(margin / o.discopop_tau)
    return -F.logsigmoid(margin) * (1 - share) + torch.exp(-margin) * share


def sft(p: Pairs, o: Options) -> Tensor:
    """Negative log-likelihood of the chosen tokens, whose mean over tokens is that over the pairs here."""
    return p.chosen_nll


def simpo(p: Pairs, o: Options) -> Tensor:
    """`sigmoid` of b (c - r) - gamma, of means over tokens, without a reference.   Meng et al. 2024, 2405.14734."""
    return _smoothed(o.beta * (p.chosen - p.rejected) - o.gamma, o.label_smoothing)


def plain_ipo(p: Pairs, o: Options) -> Tensor:
    """(c - r - 1 / (2 b))^2, of means over tokens.   Azar et al. 2023, arXiv:2310.12036."""
    return (p.chosen - p.rejected - 1 / (2 * o.beta)).square()


def odds_ratio(p: Pairs, o: Options) -> Tensor:
    """-b log s(log_odds), see `log_odds`.   Hong et al. 2024, arXiv:2403.07691."""
    return -o.beta * F.logsigmoid(log_odds(p))


def log_odds(p: Pairs) -> Tensor:
    """log of odds(chosen) / odds(rejected), odds = P / (1 - P), of mean log-probabilities.

    0 for a pair of which one response has no token: it says nothing.
    """
    c, r = (torch.where(p.has_tokens, t, -1.0) for t in (p.chosen, p.rejected))
    return (c - r) - (_log1mexp(c) - _log1mexp(r))


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)), x < 0; by the form of it that does not cancel."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    is_near = x > -math.log(2)
    near, far = (torch.where(mask, x, -1.0) for mask in (is_near, ~is_near))
    return torch.where(is_near, torch.log(-torch.expm1(near)), torch.log1p(-torch.exp(far)))


class Form(NamedTuple):
    """A loss and the options that it takes."""

    function: Callable[[Pairs, Options], Tensor]
    smoothing: Literal["none", "any", "below_half", "needed"] = "none"
    takes_divergence: bool = False
    unit: Literal["pair", "batch"] = "pair"
    # Whether scores are to be means over tokens, and whether the loss makes them so itself.
    averages: bool = False
    divides: bool = False


DPO = {
    "sigmoid": Form(sigmoid, "any", True),
    "sigmoid_norm": Form(sigmoid_norm, "none", True, divides=True),
    "hinge": Form(hinge, "none", True),
    "ipo": Form(ipo, "none", True, divides=True),
    "exo_pair": Form(exo_pair, "needed", True),
    "nca_pair": Form(nca_pair),
    "robust": Form(robust, "below_half", True),
    "bco_pair": Form(bco_pair),
    "sppo_hard": Form(sppo_hard),
    "aot": Form(aot, "any", unit="batch"),
    "aot_pair": Form(aot, "any", unit="batch"),
    "aot_unpaired": Form(aot_unpaired, "any", unit="batch"),
    "apo_zero": Form(apo_zero),
    "apo_down": Form(apo_down),
    "discopop": Form(discopop, "none", True),
    "sft": Form(sft, "none", True),
}
CPO = {
    "sigmoid": Form(sigmoid, "any"),
    "hinge": Form(hinge),
    "ipo": Form(plain_ipo, averages=True),
    "simpo": Form(simpo, "any", averages=True),
}
ORPO = {"orpo": Form(odds_ratio, averages=True)}


# ---- scores of log-ratios ----

# exp of this is finite in fp32.
_MAX_EXPONENT = 80.0


def _alpha_divergence(ratio: Tensor, alpha: float) -> Tensor:
    if abs(alpha - 1) < 1e-6:
        return ratio
    return torch.expm1(((alpha - 1) * ratio).clamp(max=_MAX_EXPONENT)) / (alpha - 1)


# f'(t) of the divergence to the reference that is meant, log t the log-ratio.   Wang et al. 2023, arXiv:2309.16240.
DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": lambda ratio, _: ratio,
    "forward_kl": lambda ratio, _: 1 - torch.exp(-ratio),
    "js_divergence": lambda ratio, _: math.log(2) + F.logsigmoid(ratio),
    "alpha_divergence": _alpha_divergence,
    # Rewards (1 - P^-alpha) / alpha of AlphaPO.   Gupta et al. 2025, arXiv:2501.03884.
    "alpha_po": lambda log_prob, alpha: -torch.expm1(-alpha * log_prob) / alpha,
}


# ---- losses of single responses ----


def kto(score: Tensor, is_wanted: Tensor, kl: Tensor, beta: float) -> Tensor:
    """1 - s(b (c - kl)) of wanted responses, 1 - s(b (kl - r)) of others.   Ethayarajh et al. 2024, 2402.01306."""
    sign = torch.where(is_wanted, 1.0, -1.0).to(score.dtype)
    return 1 - torch.sigmoid(beta * sign * (score - kl))


def apo_zero_unpaired(score: Tensor, is_wanted: Tensor, kl: Tensor, beta: float) -> Tensor:
    """1 - s(b c) of wanted responses, s(b r) of others.   D'Oosterlinck et al. 2024, arXiv:2408.06266, equation 7."""
    return kto(score, is_wanted, torch.zeros_like(kl), beta)


KTO = {"kto": kto, "apo_zero_unpaired": apo_zero_unpaired}
