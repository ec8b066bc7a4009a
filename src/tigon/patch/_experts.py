"""Mixtures of experts with stacked weights: the elementwise part between the two grouped products.

A configuration of transformers chooses how such a module multiplies; every way but the plain loop hands the packed
result of the first product to the method `_apply_gate`. That method is what is replaced, so that nothing else changes.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.glu import glu, glu_reference
from . import _probe
from ._form import Found, Match, are_as_probed, arguments_of, is_plain, own, passed_over
from ._gate import Gate, choose, gates
from ._probe import Refused

METHOD = "_apply_gate"
PLAIN_LOOP = "its experts implementation, the plain loop, does not call a method for what is between its products"


class ExpertsSettings(NamedTuple):
    how: Gate
    # Attributes with the values at which it was probed, if at others it computes something else.
    only_at: tuple[tuple[str, float], ...] = ()
    # Children that are not called any more.
    passed_over: tuple[tuple[str, type], ...] = ()


def match(module: nn.Module) -> Match:
    products = [child for child in own(module._modules).values() if _is_one_product(child)]
    stacked = [p for p in own(module._parameters).values() if _is_stack(_probe.shape_of(p))]
    named = any(argument.name == "top_k_index" for argument in arguments_of(module))
    return "sure" if len(stacked) >= 2 or len(products) >= 2 or named or _is_one_product(module) else "no"


def _is_one_product(module: nn.Module) -> bool:
    """Whether it multiplies by a stack of matrices; a convolution has such a weight too, but takes one input."""
    shapes = [_probe.shape_of(p) for p in own(module._parameters).values()]
    return len(shapes) == 1 and _is_stack(shapes[0]) and len(arguments_of(module)) >= 2


def _is_stack(shape: tuple[int, ...]) -> bool:
    """Whether a parameter is matrices of several experts; learned tokens and positions have a first axis of 1."""
    return len(shape) == 3 and shape[0] > 1


class _Experts:
    """Runs of the gate of one module, which needs none of its weights."""

    def __init__(self, module: nn.Module, generator: torch.Generator) -> None:
        self.module, self.generator = module, generator

    def draw(self, scale: float = 1.0) -> Tensor:
        return torch.randn(33, 24, generator=self.generator) * scale

    def native(self, x: Tensor, training: bool = False, **numbers: float) -> Any:
        copy = _probe.twin(self.module, attributes=numbers, training=training)
        return _probe.watched(copy, getattr(type(self.module), METHOD), copy, x)

    def reference(self, x: Tensor, gate: Gate, **numbers: float) -> Tensor:
        return gate.call(glu_reference, types.SimpleNamespace(**{**self.module.__dict__, **numbers}), x)

    def leaves(self) -> list[Tensor]:
        return []


def verify(module: nn.Module, generator: torch.Generator) -> Found:
    if _is_one_product(module):
        raise Refused("it is one of two products, and the gate between them is no part of it")
    if not callable(getattr(type(module), METHOD, None)):
        raise Refused("what stands between its products is computed in its forward, not in a method")
    if METHOD in module.__dict__:
        raise Refused(f"its {METHOD} was replaced on the instance already")
    if not getattr(module, "has_gate", True):
        raise Refused("its experts have no gate")
    if not _calls_the_method(module):
        raise Refused(PLAIN_LOOP)
    if any(True for child in own(module._modules).values() for _ in child.parameters()):
        raise Refused("its children have parameters, which the form does not know")
    gate, only_at = choose(_Experts(module, generator), gates(module, packed=True))
    notes = [note for note in gate.notes(packed=True) if note != "packed"]
    return Found(", ".join(notes), ExpertsSettings(gate, only_at, passed_over(module)))


def _calls_the_method(module: nn.Module) -> bool:
    """Whether the forward calls it, or hands over to the implementation that the configuration names."""
    if METHOD in inspect.unwrap(type(module).forward).__code__.co_names:
        return True
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return chosen not in (None, "eager")


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if METHOD in self.__dict__:
        # Somebody's own, put here since; or ours, in a call from within a call.
        return type(self).forward(self, *args, **kwargs)
    # For as long as the native forward runs: a module has one forward that is ours, and nothing else.
    gate = self.__dict__[METHOD] = functools.partial(apply_gate, self)
    try:
        return type(self).forward(self, *args, **kwargs)
    finally:
        if self.__dict__.get(METHOD) is gate:
            del self.__dict__[METHOD]


def apply_gate(self: nn.Module, x: Tensor) -> Tensor:
    experts = self._tigon.settings
    changed = any(getattr(self, name) != value for name, value in experts.only_at)
    if not is_plain(x) or changed or not are_as_probed(self, experts.passed_over):
        return getattr(type(self), METHOD)(self, x)
    return experts.how.call(glu, self, x)
