"""What only a GPU shows: kernels inside compiled graphs and CUDA graphs, and what goes straight to a kernel."""

from __future__ import annotations

import pytest
import torch
from tests.compile.graphs import check_operator, check_step, graph_cases
from tests.compile.samples import calls_of, registered, small

import tigon
from tigon.ops import _launch, _op
from tigon.specs import OpSpec, all_specs
from tigon.testing import check_case

pytestmark = pytest.mark.cuda
SPECS = all_specs()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_compiles_with_inductor(spec: OpSpec) -> None:
    (result,) = check_case(spec, spec.cases[0], device="cuda", stages=("compiled",))
    assert result.passed, result.message


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_schema_fake_and_dispatch_are_right(spec: OpSpec) -> None:
    calls = calls_of(spec, small(spec.cases[0]), "cuda")
    assert {name for name, _ in calls} <= set(registered())
    for name, sample in dict(calls).items():
        torch.library.opcheck(
            getattr(torch.ops.tigon, name).default, sample, test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.parametrize(("spec", "case"), [pytest.param(s, c, id=f"{s.name}[{c.name}]") for s, c in graph_cases()])
def test_operator_is_captured(spec: OpSpec, case: object) -> None:
    check_operator(spec, case)


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_step_is_captured(family: str) -> None:
    check_step(family)


def test_kernels_are_remembered_and_are_the_right_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(65, 33, device="cuda")
    tigon.rms_norm(x)
    assert _launch._remembers
    known = len(_launch._compiled)
    tigon.rms_norm(x + 1)
    assert len(_launch._compiled) == known
    # Other alignment, other numbers of rows: raises where another kernel would be taken.
    monkeypatch.setattr(_op, "DEBUG", True)
    for y in (x, x.view(-1)[1:-32].view(-1, 33), x[:64], x[:1], x[:, :32], x.bfloat16(), x.bfloat16().view(-1)[1:33]):
        torch.testing.assert_close(tigon.rms_norm(y), tigon.ops.rms_norm_reference(y), rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_launches_on_the_device_of_the_tensors() -> None:
    for _ in range(2):
        x = torch.randn(4, 64, device="cuda:1")
        torch.testing.assert_close(tigon.rms_norm(x), tigon.ops.rms_norm_reference(x))
    assert torch.cuda.current_device() == 0
