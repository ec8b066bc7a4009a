"""What every operator must do, over all specifications: kernels under the interpreter and the torch backend."""

from __future__ import annotations

import pytest
import torch

import tigon
from tigon.ops import OPS
from tigon.specs import Case, Make, OpSpec, all_specs
from tigon.testing import STAGES, cases_for, check_case
from tigon.testing.check import call, flatten

SPECS = all_specs()
CASES = [
    pytest.param(spec, case, id=f"{name}[{case.name}]")
    for name, spec in SPECS.items()
    for case in cases_for(spec, "cpu", torch.float32)
]
# Compiling takes seconds; the first case of an operator stands for the plumbing, which all cases share.
SLOW_STAGES = ("compiled",)
# What the plumbing of gradients decides, and not the sizes and options of a case: tried in the first case of each set
# of inputs. `tigon check` tries everything in every case.
SHARED_STAGES = ("subsets", "expanded_grad", "deterministic", "twice")


def _first_of_each_set_of_inputs() -> set[tuple[str, str]]:
    found: dict[tuple[str, ...], str] = {}
    for name, spec in SPECS.items():
        for case in cases_for(spec, "cpu", torch.float32):
            wanted = spec.wanted(case, spec.inputs(case, Make(case, "meta", torch.float32)))
            found.setdefault((name, *wanted), case.name)
    return {(name, case) for (name, *_), case in found.items()}


FULL = _first_of_each_set_of_inputs()


def _failures(results: list) -> str:
    return "\n".join(f"{r.stage}: {r.message or f'{r.used:.2f} of the budget'}" for r in results if not r.passed)


def test_every_op_has_a_spec() -> None:
    assert set(SPECS) == set(OPS)


@pytest.mark.parametrize(("spec", "case"), CASES)
def test_kernels_keep_the_budget(spec: OpSpec, case: Case) -> None:
    inputs = spec.inputs(case, Make(case, "cpu", torch.float32))
    assert tigon.why_not(spec.name, **inputs, **case.options) == [], "this case does not test a kernel"
    is_full = (spec.name, case.name) in FULL
    stages = [s for s in STAGES if s not in SLOW_STAGES and (is_full or s not in SHARED_STAGES)]
    results = check_case(spec, case, stages=stages)
    assert len(results) == len(stages)
    assert not _failures(results), _failures(results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("spec", "case"), CASES)
def test_torch_backend_keeps_the_budget(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    with tigon.backend("torch"):
        results = check_case(spec, case, dtype=dtype, stages=("budget", "strided", "unchanged", "twice", "empty"))
    assert not _failures(results), _failures(results)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_compiles_without_a_break(spec: OpSpec, backend: str) -> None:
    with tigon.backend(backend):
        results = check_case(spec, spec.cases[0], stages=("compiled",))
    assert not _failures(results), _failures(results)


@pytest.mark.parametrize(("spec", "case"), CASES)
def test_reference_gradient_is_exact(spec: OpSpec, case: Case) -> None:
    """gradcheck of the reference in fp64, on the first elements of each axis so that it stays small."""
    small = Case(case.name, {k: min(v, 5) for k, v in case.sizes.items()}, case.options)
    inputs = {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in spec.inputs(small, Make(small, "cpu", torch.float64)).items()
    }
    wanted = [k for k in spec.differentiable if inputs.get(k) is not None]
    leaves = [inputs[k].clone().requires_grad_() for k in wanted]

    def function(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = OPS[spec.name].reference(**{**inputs, **dict(zip(wanted, values, strict=True))}, **case.options)
        tensors = (out,) if isinstance(out, torch.Tensor) else tuple(t for t in out if isinstance(t, torch.Tensor))
        return tuple(t for t in tensors if t.requires_grad)

    assert all(t.dtype == torch.float64 for t in function(*leaves))
    assert torch.autograd.gradcheck(function, leaves, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_only_wanted_gradients_are_returned(spec: OpSpec) -> None:
    case = spec.cases[0]
    inputs = spec.inputs(case, Make(case, "cpu", torch.float32))
    wanted = [k for k in spec.differentiable if inputs.get(k) is not None]
    for name in wanted:
        given = {
            k: v.clone().requires_grad_(k == name) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for k, v in inputs.items()
        }
        out = OPS[spec.name].public(**given, **case.options)
        sum(y.float().sum() for y in flatten(out).values() if y.requires_grad).backward()
        assert given[name].grad is not None
        assert all(v.grad is None for k, v in given.items() if k != name and isinstance(v, torch.Tensor))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_forced_backend_never_falls_back(spec: OpSpec) -> None:
    case = spec.cases[0]
    inputs = spec.inputs(case, Make(case, "cpu", torch.float64))
    with tigon.backend("triton"), pytest.raises(ValueError, match="backend 'triton' is forced"):
        OPS[spec.name].public(**inputs, **case.options)
    with tigon.backend("torch"):
        assert tigon.why_not(spec.name, **inputs, **case.options) == ["the backend is set to torch"]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_cost_counts_bytes(spec: OpSpec) -> None:
    for case in spec.cases:
        cost = spec.cost(case, 2)
        assert cost.forward_bytes > 0
        assert cost.backward_bytes > 0
        assert spec.cost(case, 4).forward_bytes > cost.forward_bytes


def test_call_returns_gradients_by_name() -> None:
    """The harness itself: what it compares are the gradients of the named inputs."""
    x = torch.randn(3)
    run = call(lambda x: 2 * x, {"x": x}, {}, ["x"], {"y": torch.ones(3)})
    assert torch.equal(run.gradients["x"], torch.full((3,), 2.0))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_second_derivative_is_refused_by_kernels_and_given_by_torch(spec: OpSpec) -> None:
    case = spec.cases[0]
    inputs = spec.inputs(case, Make(case, "cpu", torch.float32))
    name = spec.differentiable[0]
    inputs[name] = inputs[name].clone().requires_grad_()

    def gradient() -> torch.Tensor:
        out = flatten(OPS[spec.name].public(**inputs, **case.options))
        total = sum(y.square().sum() for y in out.values() if y.requires_grad)
        return torch.autograd.grad(total, inputs[name], create_graph=True)[0]

    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient()
    # The chunked forms have none on any backend.
    if not spec.name.endswith(("linear_cross_entropy", "linear_log_probs", "linear_divergence")):
        with tigon.backend("torch"):
            assert gradient().requires_grad


def test_tensor_subclass_runs_on_the_reference() -> None:
    class Wrapped(torch.Tensor):
        pass

    x = torch.randn(3, 8).as_subclass(Wrapped)
    assert tigon.why_not(tigon.rms_norm, x) == ["a Wrapped is not a plain tensor"]
    assert isinstance(tigon.rms_norm(x), Wrapped)
