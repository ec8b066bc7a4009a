"""Preference, policy and distillation losses of hidden states and a head, without its logits."""

from ._pairs import KtoOutput, PreferenceOutput, cpo, dpo, kto, kto_kl, orpo, simpo
from ._policy import PolicyOutput, grpo
from .distillation import distill
from .policy import TYPES as POLICY
from .preference import CPO, DPO, KTO

__all__ = [
    "CPO",
    "DPO",
    "KTO",
    "POLICY",
    "KtoOutput",
    "PolicyOutput",
    "PreferenceOutput",
    "cpo",
    "distill",
    "dpo",
    "grpo",
    "kto",
    "kto_kl",
    "orpo",
    "simpo",
]
