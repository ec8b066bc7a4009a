"""The losses as anybody would write them on full logits: what the grid tests compare with."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    softcap: float | None = None,
    logit_scale: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`[S, T]` log-probabilities of labels, 0 where these are -100, and entropies."""
    z = F.linear(hidden, weight, bias) * (logit_scale or 1.0)
    z = (softcap * torch.tanh(z / softcap) if softcap else z) / temperature
    log_p = z.log_softmax(-1)
    valid = labels != -100
    at = log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(valid, at, 0.0), torch.where(valid, -(log_p.exp() * log_p).sum(-1), 0.0)


def log_sigmoid(x: Tensor) -> Tensor:
    return x.clamp(max=0) - torch.log1p(torch.exp(-x.abs()))


def pair_loss(kind: str, c: Tensor, r: Tensor, beta: float, e: float, tau: float, nc: Tensor, nr: Tensor) -> Tensor:
    """Of scores `c` and `r` of responses of `nc` and `nr` tokens, `[pairs]`."""
    m = beta * (c - r)
    smooth = lambda x: -(1 - e) * log_sigmoid(x) - e * log_sigmoid(-x)  # noqa: E731
    g = torch.sigmoid(m / tau)
    return {
        "sigmoid": lambda: smooth(m),
        "sigmoid_norm": lambda: -log_sigmoid(beta * (c / nc - r / nr)),
        "hinge": lambda: (1 - m).clamp(min=0),
        "ipo": lambda: (c / nc - r / nr - 1 / (2 * beta)) ** 2,
        "exo_pair": lambda: (
            torch.sigmoid(m) * (log_sigmoid(m) - math.log(1 - e)) + torch.sigmoid(-m) * (log_sigmoid(-m) - math.log(e))
        ),
        "nca_pair": lambda: -log_sigmoid(beta * c) - 0.5 * log_sigmoid(-beta * c) - 0.5 * log_sigmoid(-beta * r),
        "robust": lambda: (-(1 - e) * log_sigmoid(m) + e * log_sigmoid(-m)) / (1 - 2 * e),
        "bco_pair": lambda: -log_sigmoid(beta * c) - log_sigmoid(-beta * r),
        "sppo_hard": lambda: (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2,
        "aot_unpaired": lambda: smooth(beta * (c.sort()[0] - r.sort()[0])),
        "apo_zero": lambda: 1 - torch.sigmoid(beta * c) + torch.sigmoid(beta * r),
        "apo_down": lambda: torch.sigmoid(beta * c) + 1 - torch.sigmoid(m),
        "discopop": lambda: -log_sigmoid(m) * (1 - g) + torch.exp(-m) * g,
    }[kind]()


def dpo(
    log_probs: Tensor,
    labels: Tensor,
    ref: Tensor,
    kind: str,
    *,
    beta: float = 0.1,
    e: float = 0.0,
    tau: float = 0.05,
    averages: bool = False,
    nll_weight: float = 0.0,
) -> dict[str, Tensor]:
    """Loss and metrics of `[2n, T]` log-probabilities and `[2n]` of the reference."""
    n, counts = labels.shape[0] // 2, (labels != -100).sum(1).clamp(min=1)
    sums = log_probs.sum(1) / (counts if averages else 1)
    c, r = (sums - ref)[:n], (sums - ref)[n:]
    nll = -log_probs[:n].sum() / (labels[:n] != -100).sum().clamp(min=1)
    if kind in ("aot", "aot_pair"):
        d = beta * ((sums[:n] - sums[n:]).sort()[0] - (ref[:n] - ref[n:]).sort()[0])
        losses = -(1 - e) * log_sigmoid(d) - e * log_sigmoid(-d)
    else:
        losses = nll if kind == "sft" else pair_loss(kind, c, r, beta, e, tau, counts[:n], counts[n:])
    return {
        "loss": losses.mean() + nll_weight * nll,
        "chosen_log_probs": sums[:n],
        "rejected_log_probs": sums[n:],
        "chosen_rewards": beta * c,
        "rejected_rewards": beta * r,
        "accuracy": (c > r).to(c.dtype).mean(),
        "margin": beta * (c - r).mean(),
        "nll_loss": nll,
    }


def kto(
    log_probs: Tensor, ref: Tensor, wanted: Tensor, kl: float, beta: float, weights: tuple[float, float]
) -> dict[str, Tensor]:
    ratio = log_probs.sum(1) - ref
    good = weights[0] * (1 - torch.sigmoid(beta * (ratio[wanted] - kl)))
    bad = weights[1] * (1 - torch.sigmoid(beta * (kl - ratio[~wanted])))
    mean = lambda t: t.mean() if t.numel() else t.new_zeros(())  # noqa: E731
    return {
        "loss": torch.cat((good, bad)).mean(),
        "log_probs": log_probs.sum(1),
        "rewards": beta * ratio,
        "wanted_reward": mean(beta * ratio[wanted]),
        "unwanted_reward": mean(beta * ratio[~wanted]),
        "wanted_log_prob": mean(log_probs.sum(1)[wanted]),
        "unwanted_log_prob": mean(log_probs.sum(1)[~wanted]),
    }


def policy(lp: Tensor, ent: Tensor, mask: Tensor, a: Tensor, o: dict[str, Any]) -> dict[str, Tensor]:
    """Loss and metrics of `[B, T]` log-probabilities and entropies, bool mask and advantages `[B]` or `[B, T]`."""
    a = a.unsqueeze(1) if a.dim() == 1 else a
    m, counts = mask.to(lp.dtype), mask.sum(1, keepdim=True).clamp(min=1)
    old = o["old"] if o.get("old") is not None else lp.detach()
    log_ratio = (lp - old) * m
    kind, low, high, delta = o["loss_type"], o.get("low", 0.2), o.get("high", 0.2), o.get("delta")
    is_sequence = o.get("level") == "sequence" or kind == "gspo"
    r = torch.exp(log_ratio.sum(1, keepdim=True) / counts if is_sequence else log_ratio)
    bounded = r if delta is None else r.clamp(max=delta)
    is_ratio = o.get("is_ratio")
    phi = r.detach()
    if kind == "cispo":
        term = -r.clamp(max=high).detach() * a * lp
    elif kind == "sapo":
        tau = torch.where(a > 0, lp.new_tensor(1.0), lp.new_tensor(1.05))
        term = -torch.sigmoid(tau * (r - 1)) * 4 / tau * a
    elif kind == "vespo":
        log_w = log_ratio.clamp(-20, 20).sum(1, keepdim=True)
        if is_ratio is not None:
            log_w = log_w + (is_ratio.log() * (m if is_ratio.shape == m.shape else 1)).sum(1, keepdim=True)
        log_w = log_w.clamp(math.log(1e-8), 20).detach()
        k, lam = torch.where(a >= 0, 2.0, 3.0), torch.where(a >= 0, 3.0, 2.0)
        phi = torch.exp(lam + k * log_w - lam * log_w.exp())
        term = -phi * a * lp
    else:
        term = -torch.min(bounded * a, r.clamp(1 - low, 1 + high) * a)
    kl = 0.0 * lp
    if o.get("beta"):
        x = (o["ref"] - lp) * m
        kl = {"k1": -x, "k2": x**2 / 2, "k3": x.exp() - x - 1}[o.get("kl", "k3")] * (r if o.get("kl_ratio") else 1)
    if o.get("threshold") is not None:
        gap = ((o["sampled"] - lp.detach()) * m).sum(1, keepdim=True) / counts
        term = term * ((a >= 0) | (gap <= o["threshold"]))
    chosen = mask
    if o.get("quantile", 1.0) < 1:
        chosen = mask & (ent >= torch.quantile(ent[mask], 1 - o["quantile"])) if mask.any() else mask
        term = term * chosen
    if is_ratio is not None and kind != "vespo":
        term = term * is_ratio
    term = (term + o.get("beta", 0.0) * kl) * m
    total = mask.sum().clamp(min=1)
    steps, items = o.get("steps", 1), o.get("num_items")
    loss = {
        "grpo": lambda: (term.sum(1, keepdim=True) / counts).mean() / steps,
        "bnpo": lambda: term.sum() / total / steps,
        "dr_grpo": lambda: term.sum() / (term.shape[0] * o["max_length"]) / steps,
        "dapo": lambda: term.sum() / (total * steps if items is None else max(float(items), 1)),
        "luspo": lambda: term.sum(1).mean() / steps,
    }
    same = {"ppo": "bnpo", "gspo": "grpo", "sapo": "grpo", "cispo": "dapo", "vespo": "dapo"}
    policy_loss = loss[same.get(kind, kind)]()
    coef = o.get("entropy_coef", 0.0)
    bonus = (ent * chosen).sum() / chosen.sum().clamp(min=1) / steps
    below, above = (bounded < 1 - low) & (a < 0), (bounded > 1 + high) & (a > 0)
    if same.get(kind, kind) not in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo") or kind in ("cispo", "sapo", "vespo"):
        below, above = below & False, (r > high) & (a > 0) if kind == "cispo" else above & False

    def mean(x: Tensor) -> Tensor:
        x = x.to(lp.dtype)
        return x.sum() / x.shape[0] if x.shape[1] == 1 else (x * m).sum() / total

    return {
        "loss": policy_loss - coef * bonus,
        "policy_loss": policy_loss,
        "log_probs": lp,
        "entropies": ent,
        "kl": mean(kl),
        "entropy": mean(ent),
        "clip_low": mean(below),
        "clip_high": mean(above),
        "clip_ratio": mean(below | above),
        "weight": mean(phi),
    }
