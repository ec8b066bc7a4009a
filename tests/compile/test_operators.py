"""Every operator that is registered, and every public one, under the compiler.

What is registered is asked of torch, and calls are recorded from the cases of the specifications, so that an operator
that no case reaches fails here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.compile.samples import Sample, registered, samples, small
from torch import Tensor

import tigon
from tigon.ops import OPS
from tigon.specs import Make, OpSpec, all_specs
from tigon.testing.check import call

SPECS = all_specs()
UTILS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
# The size that changes between the calls of one graph: rows, positions, or samples.
ROWS = ("M", "S", "B")


def _unreached() -> set[str]:
    return set(registered()) - set(samples())


def _check(operator: Any, sample: Sample) -> None:
    torch.library.opcheck(operator, sample, test_utils=UTILS)


# Registered operators.


def test_every_registered_operator_is_reached_by_a_case() -> None:
    assert not _unreached()


def test_an_operator_without_a_case_is_found() -> None:
    with torch.library._scoped_library("tigon", "FRAGMENT") as library:
        library.define("planted(Tensor x) -> Tensor")
        assert _unreached() == {"planted"}
    assert not _unreached()


@pytest.mark.parametrize("name", registered())
def test_schema_fake_and_dispatch_are_right(name: str) -> None:
    for sample in samples()[name]:
        _check(getattr(torch.ops.tigon, name).default, sample)


def _first(out: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return change(out) if isinstance(out, Tensor) else (change(out[0]), *out[1:])


def _wider(y: Tensor) -> Tensor:
    return y.new_empty((*y.shape[:-1], y.shape[-1] + 1))


def _transposed(y: Tensor) -> Tensor:
    return y.new_empty(y.shape[::-1]).permute(*reversed(range(y.dim())))


def _writes(x: Tensor) -> None:
    x.add_(1)


# What is wrong, of the fake or of the implementation: how its first result differs, and what it does to its input.
FAULTS: dict[str, tuple[str, Callable[[Tensor], Tensor] | None, Callable[[Tensor], None] | None]] = {
    "nothing": ("fake", None, None),
    "shape of the fake": ("fake", _wider, None),
    "dtype of the fake": ("fake", lambda y: y.to(torch.bfloat16), None),
    "strides of the fake": ("fake", _transposed, None),
    "device of the fake": ("fake", lambda y: torch.empty_like(y, device="meta"), None),
    "input written without saying so": ("implementation", None, _writes),
    "input returned without saying so": ("implementation", None, None),
}


@pytest.mark.parametrize("name", ["rms_norm_fwd", "glu_bwd", "cross_entropy_bwd"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_fake_or_annotation_is_found(name: str, fault: str) -> None:
    original = getattr(torch.ops.tigon, name).default
    (sample, *_), (where, change, touch) = samples()[name], FAULTS[fault]
    sample = tuple(a.clone() if isinstance(a, Tensor) else a for a in sample)
    returns_input = fault.startswith("input returned")

    def implementation(*args: Any) -> Any:
        out = original(*args)
        if touch is not None:
            touch(args[0])
        return _first(out, lambda y: args[0].view(y.shape)) if returns_input else out

    def fake(*args: Any) -> Any:
        out = original(*args)
        return out if change is None or where != "fake" else _first(out, change)

    with torch.library._scoped_library("tigon_planted", "FRAGMENT") as library:
        library.define(str(original._schema).removeprefix("tigon::"))
        library.impl(name, implementation, "CPU")
        torch.library.register_fake(f"tigon_planted::{name}", fake, lib=library)
        planted = getattr(torch.ops.tigon_planted, name).default
        if fault == "nothing":
            _check(planted, sample)
        else:
            with pytest.raises(torch.testing._internal.optests.generate_tests.OpCheckError):
                _check(planted, sample)


# Public operators.


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_one_graph_serves_all_sizes(spec: OpSpec, backend: str) -> None:
    """Forward and backward, without a break and without a second trace: kernels, and references."""
    public = OPS[spec.name].public
    axis = next(name for name in ROWS if name in spec.cases[0].sizes)
    compiled = torch.compile(public, fullgraph=True, dynamic=True, backend="aot_eager")
    with tigon.backend(backend), torch._dynamo.config.patch(error_on_recompile=True):
        # Not a size of another axis, with which the compiler would take them for one.
        for size in (9, 11):
            case = small(spec.cases[0], **{axis: size})
            inputs = spec.inputs(case, Make(case, "cpu", torch.float32))
            assert (tigon.why_not(spec.name, **inputs, **case.options) == []) is (backend == "auto")
            eager = _step(public, spec, case, inputs)
            for name, value in _step(compiled, spec, case, inputs).items():
                torch.testing.assert_close(value, eager[name], msg=lambda text, name=name: f"{name}: {text}")


def _step(function: Callable[..., Any], spec: OpSpec, case: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    probe = call(OPS[spec.name].reference, inputs, case.options, [], None).outputs
    generator = torch.Generator().manual_seed(3)
    upstream = {k: torch.randn(v.shape, generator=generator) for k, v in probe.items() if v.is_floating_point()}
    run = call(function, inputs, case.options, spec.wanted(case, inputs), upstream)
    return run.named()
