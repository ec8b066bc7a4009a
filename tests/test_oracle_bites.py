"""Wrong implementations must fail: each mutation of each specification, and faults planted in the checks' path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tigon.specs import Mutation, OpSpec, all_specs
from tigon.testing import assert_within_budget, cases_for, check_case, measure
from tigon.testing.poison import poison

SPECS = all_specs()
MUTATIONS = [
    pytest.param(spec, mutation, id=f"{name}[{mutation.name}]")
    for name, spec in SPECS.items()
    for mutation in spec.mutations
]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_at_least_three_mutations(spec: OpSpec) -> None:
    assert len(spec.mutations) >= 3


@pytest.mark.parametrize(("spec", "mutation"), MUTATIONS)
def test_budget_catches_mutation(spec: OpSpec, mutation: Mutation) -> None:
    for case in cases_for(spec, "cpu", torch.float32):
        results = check_case(spec, case, stages=("budget",), function=mutation.function)
        # A mutation that raises is not caught by the budget, it merely does not run.
        if any(not r.passed and r.message.startswith("AssertionError") for r in results):
            return
    pytest.fail(f"no case of {spec.name} notices: {mutation.name}")


def _double(x: torch.Tensor, weight: Any = None, **_: Any) -> torch.Tensor:
    return 2 * x


@pytest.mark.parametrize(
    ("stage", "function"),
    [
        ("unchanged", lambda x, weight=None, **_: x.detach().mul_(2) * 1.0),
        ("deterministic", lambda x, weight=None, **_: x * torch.rand(())),
        ("empty", lambda x, weight=None, **_: x.new_ones(3, 64) + 0 * x.sum()),
        ("budget", _double),
        ("subsets", _double),
        ("strided", lambda x, weight=None, **_: x.as_strided(x.shape, (x.shape[1], 1)) * 1.0),
        ("expanded_grad", _double),
    ],
)
def test_stage_can_fail(stage: str, function: Any) -> None:
    spec = SPECS["rms_norm"]
    (result,) = check_case(spec, spec.case("weightless"), stages=(stage,), function=function)
    assert not result.passed


def test_unwritten_elements_are_seen() -> None:
    """An implementation that leaves part of its output to the allocator fails under poison."""

    def half_written(x: torch.Tensor, weight: Any = None, **_: Any) -> torch.Tensor:
        y = torch.empty_like(x)
        y[:, 0] = x[:, 0]
        return y

    spec = SPECS["rms_norm"]
    (result,) = check_case(spec, spec.case("weightless"), stages=("budget",), function=half_written)
    assert not result.passed
    assert "not finite" in result.message


def test_poison_fills_every_allocator() -> None:
    x = torch.ones(3, 4)
    with poison():
        made = [torch.empty(5), torch.empty_like(x), x.new_empty(2, 2), torch.empty_strided((2, 3), (3, 1))]
        whole = torch.empty(4, dtype=torch.int64)
    assert all(t.isnan().all() for t in made)
    assert (whole == torch.iinfo(torch.int64).max).all()
    assert not torch.zeros(3).isnan().any()


def test_budget_rejects_shape_dtype_and_non_finite() -> None:
    low = high = torch.ones(4)
    with pytest.raises(AssertionError, match="shape"):
        measure(torch.ones(5), low, high)
    with pytest.raises(AssertionError, match="dtype"):
        measure(torch.ones(4, dtype=torch.bfloat16), low, high)
    with pytest.raises(AssertionError, match="not finite"):
        assert_within_budget("y", torch.tensor([1.0, float("nan"), 1.0, 1.0]), low, high)
    with pytest.raises(AssertionError, match="non-finite values differ"):
        measure(torch.ones(4), torch.tensor([1.0, float("inf"), 1.0, 1.0]), high)


def test_one_bad_row_cannot_hide_in_the_mean() -> None:
    high = torch.randn(1000, dtype=torch.float64)
    low = high.to(torch.bfloat16)
    actual = low.clone()
    assert_within_budget("y", actual, low, high)
    actual[3] += 0.1
    with pytest.raises(AssertionError, match="largest error"):
        assert_within_budget("y", actual, low, high)
