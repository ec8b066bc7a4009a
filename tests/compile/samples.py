"""Calls of the registered operators: what public operators make of small cases, so that no list has to be kept."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tigon import ops
from tigon.ops import OPS
from tigon.specs import Case, Make, OpSpec, all_specs
from tigon.testing.check import call, flatten

# Calls of one operator that are checked: those that differ most in which arguments are there.
_MAX_SAMPLES = 2
# Cases of an operator that are run for them, enough to reach every operator.
_MAX_CASES = 5

Sample = tuple[Any, ...]


def registered() -> list[str]:
    """Names of all operators in `torch.ops.tigon`."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix("tigon::") for name in names if name.startswith("tigon::"))


def small(case: Case, **sizes: int) -> Case:
    """`case` with no size above 5, but those given."""
    return Case(case.name, {**{k: min(v, 5) for k, v in case.sizes.items()}, **sizes}, case.options)


class _Recorder(TorchDispatchMode):
    """Notes every operator of `torch.ops.tigon` that is called, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Sample]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tigon":
            self.calls.append((func._opname, tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in args)))
        return func(*args, **(kwargs or {}))


def calls_of(spec: OpSpec, case: Case, device: str = "cpu") -> list[tuple[str, Sample]]:
    """What forward and backward of one case call, as while a compiler traces."""
    inputs = spec.inputs(case, Make(case, device, torch.float32))
    with contextlib.ExitStack() as stack:
        # Operators are called through the dispatcher only where something traces.
        for name, module in list(sys.modules.items()):
            if name.startswith(ops.__name__) and hasattr(module, "is_traced"):
                stack.enter_context(mock.patch.object(module, "is_traced", return_value=True))
        recorder = stack.enter_context(_Recorder())
        outputs = flatten(OPS[spec.name].public(**inputs, **case.options))
        upstream = {k: torch.ones_like(v) for k, v in outputs.items() if v.is_floating_point()}
        call(OPS[spec.name].public, inputs, case.options, spec.wanted(case, inputs), upstream)
    return recorder.calls


def _presence(sample: Sample) -> tuple[Any, ...]:
    return tuple(a is not None if a is None or isinstance(a, Tensor) else a if type(a) is bool else 0 for a in sample)


def _unlike(spec: OpSpec) -> list[Case]:
    """Cases that differ in which sizes and options they name: the first, and a few more."""
    kinds: dict[tuple[Any, ...], Case] = {}
    for case in spec.cases:
        kinds.setdefault((tuple(case.sizes), *sorted(case.options)), case)
    return list(kinds.values())[:_MAX_CASES]


@functools.cache
def samples() -> dict[str, list[Sample]]:
    """Calls of every registered operator that the cases of all specifications reach, by its name."""
    found: dict[str, dict[tuple[Any, ...], Sample]] = {}
    for spec in all_specs().values():
        for case in _unlike(spec):
            # What waits for the device is refused while something traces.
            is_traceable = not case.options.get("skip_ignored")
            if is_traceable and not case.models_only and (case.dtypes is None or torch.float32 in case.dtypes):
                for name, sample in calls_of(spec, small(case)):
                    found.setdefault(name, {}).setdefault(_presence(sample), sample)
    # The most arguments and the fewest.
    return {name: _ends(sorted(kinds.values(), key=lambda s: sum(_presence(s)))) for name, kinds in found.items()}


def _ends(kinds: list[Sample]) -> list[Sample]:
    return [kinds[-1], *kinds[:-1][: _MAX_SAMPLES - 1]]
