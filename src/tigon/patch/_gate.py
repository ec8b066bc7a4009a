"""The gate: what an MLP or experts do with the two halves between their projections, and which candidate it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..ops.glu import ACTIVATIONS, LIMITS
from . import _probe
from ._probe import Refused


class Gate(NamedTuple):
    """What is done with gate and up. A name is that of an attribute, which is read at every call."""

    activation: str
    gate_first: bool = True
    interleaved: bool = False
    limit: str | None = None
    limit_on: str = "gate"
    alpha: str | None = None
    gate_scale: str | None = None
    up_offset: float = 0.0

    def call(self, op: Callable[..., Tensor], module: Any, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return op(
            gate,
            up,
            activation=self.activation,
            gate_first=self.gate_first,
            interleaved=self.interleaved,
            limit=None if self.limit is None else getattr(module, self.limit),
            limit_on=self.limit_on,
            alpha=1.0 if self.alpha is None else getattr(module, self.alpha),
            gate_scale=1.0 if self.gate_scale is None else getattr(module, self.gate_scale),
            up_offset=self.up_offset,
        )

    def notes(self, packed: bool) -> list[str]:
        clamp = {"gate": "clamped", "activation": "clamped activation"}[self.limit_on]
        return [
            self.activation,
            *(["packed"] if packed else []),
            *(["interleaved"] if self.interleaved else []),
            *([] if self.gate_first else ["gate second"]),
            *([] if self.limit is None else [clamp]),
            *([] if self.alpha is None else ["alpha"]),
            *([] if self.gate_scale is None else ["scaled gate"]),
            *([] if not self.up_offset else ["up + 1"]),
        ]


def gates(module: nn.Module, packed: bool) -> list[Gate]:
    """Every candidate for a module, those with the fewest options first."""
    names = numbers_of(module)
    limits = [(None, "gate"), *itertools.product(names, LIMITS)]
    orders = [(True, False), (False, False), (True, True), (False, True)] if packed else [(True, False)]
    candidates = [
        Gate(activation, first, interleaved, limit, limit_on, alpha, scale, offset)
        for (first, interleaved), activation, (limit, limit_on), alpha, scale, offset in itertools.product(
            orders, ACTIVATIONS, limits, (None, *names), (None, *names), (0.0, 1.0)
        )
        # No number has two meanings.
        if len({limit, alpha, scale} - {None}) == sum(name is not None for name in (limit, alpha, scale))
    ]
    return sorted(candidates, key=lambda gate: len(gate.notes(False)))


def numbers_of(module: nn.Module) -> list[str]:
    """Attributes that may be a limit or a factor; integers are sizes, but a limit may be one too."""
    numbers = {k: v for k, v in module.__dict__.items() if type(v) is float or (type(v) is int and "limit" in k)}
    # More than these are no limits and factors of a gate; each multiplies the candidates.
    return list(numbers)[:3]


def changed(module: nn.Module, generator: torch.Generator) -> dict[str, float]:
    """Other values for the numbers, at which a limit cuts and a factor of one shows."""
    return {name: 0.5 + float(torch.rand((), generator=generator)) for name in numbers_of(module)}


# ---- choosing ----

# The large scales show clamps, the small one what happens near zero.
SCALES = (1.0, 1e-2, 1e2, 1e4)
Candidate = TypeVar("Candidate")


class Subject(Protocol[Candidate]):
    """A module to be run, and what a candidate would compute in its place; `numbers` are values of its attributes."""

    module: nn.Module
    generator: torch.Generator

    def draw(self, scale: float = 1.0) -> Tensor: ...
    def native(self, x: Tensor, training: bool = False, **numbers: float) -> Any: ...
    def reference(self, x: Tensor, candidate: Candidate, **numbers: float) -> Tensor: ...
    def leaves(self) -> list[Tensor]: ...


def choose(subject: Subject[Candidate], candidates: list[Candidate]) -> tuple[Candidate, tuple[tuple[str, float], ...]]:
    """The candidate that computes the same, and attributes with the values at which alone it does."""
    for scale, training in itertools.product(SCALES, (False, True)):
        x = subject.draw(scale)
        y = subject.native(x, training)
        candidates = [each for each in candidates if _probe.same(subject.reference(x, each), y)]
        if not candidates:
            raise Refused("no candidate computes the same")
    left, numbers = _with_other_numbers(subject, candidates)
    chosen = (left or candidates)[0]
    x = subject.draw().to(torch.bfloat16)
    if not _probe.no_worse(subject.reference(x, chosen), subject.native(x), subject.native(x.float())):
        raise Refused("it computes bf16 inputs in another precision")
    alike = _trains_alike(subject, chosen) and _trains_alike(subject, chosen, training=False)
    if not alike or (left and not _trains_alike(subject, chosen, **numbers)):
        raise Refused("its gradient is not that of the formula it computes")
    return chosen, () if left else tuple((name, getattr(subject.module, name)) for name in numbers_of(subject.module))


def _with_other_numbers(
    subject: Subject[Candidate], candidates: list[Candidate]
) -> tuple[list[Candidate], dict[str, float]]:
    """Candidates that agree at other values of the module's numbers too, and such values."""
    numbers: dict[str, float] = {}
    for scale in SCALES:
        x, numbers = subject.draw(scale), changed(subject.module, subject.generator)
        try:
            y = subject.native(x, **numbers)
        except Refused:
            return [], {}
        candidates = [each for each in candidates if _probe.same(subject.reference(x, each, **numbers), y)]
    return candidates, numbers


def _trains_alike(subject: Subject[Candidate], candidate: Candidate, training: bool = True, **numbers: float) -> bool:
    inputs = [leaf.requires_grad_() for leaf in (subject.draw(), *subject.leaves())]
    wanted = subject.native(inputs[0], training, **numbers)
    upstream = torch.randn(wanted.shape, generator=subject.generator)
    got = _probe.gradients(subject.reference(inputs[0], candidate, **numbers), inputs, upstream)
    same = _probe.same_gradients(got, _probe.gradients(wanted, inputs, upstream))
    for leaf in inputs:
        leaf.requires_grad_(False)
    return same
