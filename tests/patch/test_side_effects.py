"""Modules that do more than return what a form returns: at random, in training alone, or to themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon


class Norm(nn.Module):
    """A plain RMS norm; each of the others does one thing more."""

    def __init__(self, size: int = 24) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.eps = 1e-5
        self.register_buffer("count", None)

    def forward(self, x: Tensor) -> Tensor:
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.scale * n.to(x.dtype)


class NoisyInTraining(Norm):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + 0.3 * torch.randn_like(y) if self.training else y


class SeldomNoisy(Norm):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if self.training and torch.rand(()) < 1e-6 else y


class StraightThrough(Norm):
    """Fake quantisation: other values, the same gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + ((y * 4).round() / 4 - y).detach() if self.training else y


class CutInEvaluation(Norm):
    """The same values, another gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.training else y.detach() + 0 * y


class Recording(Norm):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.seen = y.pow(2).mean()
        return y


class Stale(Recording):
    """It has run before, so that the attribute is there."""

    def __init__(self) -> None:
        super().__init__()
        self(torch.ones(1, 24))


class Appending(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(x)
        return super().forward(x)


class Counting(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class CountingOnTheClass(Norm):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return super().forward(x)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class SparsityMlp(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.act(self.gate(x))
        self.sparsity = gate.abs().mean()
        return self.down(gate * self.up(x))


class RecordingActivation(nn.SiLU):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


class MlpOfRecording(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.act = RecordingActivation()


class NoisyMlp(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if torch.rand(()) < 1e-6 else y


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 16, 48))
        self.down_proj = nn.Parameter(torch.randn(4, 24, 16))

    def _apply_gate(self, packed: Tensor) -> Tensor:
        gate, up = packed.chunk(2, -1)
        return F.silu(gate) * up

    def forward(self, x: Tensor, top_k_index: Any = None, top_k_weights: Any = None) -> Tensor:
        return self._apply_gate(x @ self.gate_up_proj[0]) @ self.down_proj[0]


class RecordingExperts(Experts):
    def _apply_gate(self, packed: Tensor) -> Tensor:
        self.largest = packed.detach().amax()
        return super()._apply_gate(packed)


@pytest.mark.parametrize("module", [Norm(), Mlp(), Experts()], ids=lambda module: type(module).__name__)
def test_without_such_a_thing_they_are_replaced(module: nn.Module) -> None:
    assert [row.verdict for row in tigon.patch(module)] == ["replaced"]


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (NoisyInTraining(), "draws random numbers"),
        (SeldomNoisy(), "draws random numbers"),
        (StraightThrough(), "no candidate computes the same"),
        (CutInEvaluation(), "no candidate computes the same"),
        (Recording(), "keeps a record in seen"),
        (Stale(), "keeps a record in seen"),
        (Appending(), "keeps a record in log"),
        (Counting(), "keeps a record in calls"),
        (CountingOnTheClass(), "keeps a record in calls"),
        (SparsityMlp(), "keeps a record in sparsity"),
        (MlpOfRecording(), "keeps a record in act.calls"),
        (NoisyMlp(), "draws random numbers"),
        (RecordingExperts(), "keeps a record in largest"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
@pytest.mark.filterwarnings("ignore:tigon.patch replaced nothing")
def test_what_would_be_lost_is_kept_with_a_reason(module: nn.Module, reason: str) -> None:
    report = tigon.patch(module)
    assert [row.verdict for row in report] == ["kept"]
    assert reason in report.rows[0].reason


@pytest.mark.filterwarnings("ignore:tigon.patch replaced nothing")
def test_the_probe_writes_into_no_record_of_the_module() -> None:
    module = Counting()
    tigon.patch(module)
    assert float(module.calls) == 0


def test_a_gate_that_is_put_on_the_experts_later_is_called_and_stays() -> None:
    experts, x = Experts(), torch.randn(5, 16)
    tigon.patch(experts)
    experts._apply_gate = lambda packed: packed.chunk(2, -1)[0]
    want = (x @ experts.gate_up_proj[0])[:, :24] @ experts.down_proj[0]
    for _ in range(2):
        torch.testing.assert_close(experts(x), want)
    assert "_apply_gate" in experts.__dict__


def test_experts_within_a_call_of_themselves_leave_the_outer_call_its_gate() -> None:
    class Twice(Experts):
        def forward(self, x: Tensor, top_k_index: Any = None, top_k_weights: Any = None) -> Tensor:
            if top_k_index is None:
                self(x, 1)
                assert "_apply_gate" in self.__dict__
            return self._apply_gate(x @ self.gate_up_proj[0]) @ self.down_proj[0]

    experts, x = Twice(), torch.randn(5, 16)
    want = experts(x, 1)
    tigon.patch(experts)
    torch.testing.assert_close(experts(x), want)
    assert "_apply_gate" not in experts.__dict__
