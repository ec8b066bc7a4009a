"""Mixtures of experts with stacked weights: the method between the two products is replaced, and nothing else."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from tigon.patch import _experts


class Experts(nn.Module):
    """Three experts, of which each row goes to one. The traps below change one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(3, 40, 12) / 3)
        self.second = nn.Parameter(torch.randn(3, 12, 20) / 4)
        self.act_fn = nn.SiLU()

    def _apply_gate(self, gate_up_out: Tensor) -> Tensor:
        gate, up = gate_up_out.chunk(2, -1)
        return self.act_fn(gate) * up

    def forward(self, x: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
        y = torch.einsum("eih,nh->nei", self.first, x)
        y = torch.einsum("ehi,nei->neh", self.second, self._apply_gate(y))
        return (y * F.one_hot(expert, 3)[..., None] * weight[:, None, None]).sum(1)


class GateSecond(Experts):
    def _apply_gate(self, gate_up_out: Tensor) -> Tensor:
        up, gate = gate_up_out.chunk(2, -1)
        return self.act_fn(gate) * up


class Limited(Experts):
    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit, self.alpha = limit, 1.702

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


class LimitedActivation(Limited):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


class HardCodedLimit(Experts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate.clamp(max=50)) * up


class Sparse(Experts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate - gate.mean(-1, keepdim=True)) * up


class RoundsInBetween(Experts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return (self.act_fn(gate) * up).to(torch.float64)


class ReadsItsWeights(Experts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return super()._apply_gate(gate_up) * self.first.abs().mean()


class DetachedGate(Experts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return self.act_fn(gate.detach()) * up


class NoGate(Experts):
    has_gate = False


class Inline(Experts):
    _apply_gate = None

    def forward(self, x: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
        return x


class UnusedMethod(Experts):
    """As in a plain loop, whose class has the method for the other implementations."""

    def forward(self, x: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
        gate, up = (x @ self.first[0].T).chunk(2, -1)
        return (self.act_fn(gate) * up) @ self.second[0].T


class Product(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, outputs, inputs))

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        return torch.cat([rows @ w.T for rows, w in zip(x.split(sizes), self.weight, strict=True)])


class TwoProducts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Product(12, 40), Product(20, 12)

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        gate, up = self.up(x, sizes).chunk(2, -1)
        return self.down(F.silu(gate) * up, sizes)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(7, 12), torch.tensor([0, 2, 1, 1, 0, 2, 2]), torch.rand(7)


ACCEPTED = [
    (Experts(), "silu"),
    (GateSecond(), "silu, gate second"),
    (Limited(7.0), "silu, interleaved, clamped, alpha, up + 1"),
    (Limited(0.3), "silu, interleaved, clamped, alpha, up + 1"),
    (LimitedActivation(float("inf")), "silu, clamped activation"),
]


@pytest.mark.parametrize(("experts", "variant"), ACCEPTED, ids=lambda value: type(value).__name__)
def test_the_gate_is_replaced_and_trains_the_same(
    experts: nn.Module, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = inputs()
    native = experts(*batch)
    upstream = torch.randn_like(native)
    wanted = torch.autograd.grad(native, list(experts.parameters()), upstream)
    attributes = set(experts.__dict__)
    (row,) = tigon.patch(experts)
    assert (row.form, row.verdict, row.variant) == ("experts", "replaced", variant), row.reason
    calls, glu = [], _experts.glu
    monkeypatch.setattr(_experts, "glu", lambda *a, **k: calls.append("glu") or glu(*a, **k))
    patched = experts(*batch)
    assert calls == ["glu"]
    torch.testing.assert_close(patched, native, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad(patched, list(experts.parameters()), upstream), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    tigon.unpatch(experts)
    assert set(experts.__dict__) == attributes
    assert torch.equal(experts(*batch), native)


REFUSED = [
    (HardCodedLimit(), "no candidate computes the same"),
    (Sparse(), "no candidate computes the same"),
    (RoundsInBetween(), "no candidate computes the same"),
    (ReadsItsWeights(), "its forward raised AttributeError in the probe"),
    (DetachedGate(), "its gradient is not that of the formula"),
    (NoGate(), "its experts have no gate"),
    (Inline(), "computed in its forward, not in a method"),
    (UnusedMethod(), "the plain loop, does not call a method"),
    (Product(12, 40), "it is one of two products"),
    (TwoProducts(), "computed in its forward, not in a method"),
]


@pytest.mark.parametrize(("experts", "reason"), REFUSED, ids=lambda value: type(value).__name__)
def test_other_experts_are_kept_with_a_reason(experts: nn.Module, reason: str) -> None:
    with pytest.warns(UserWarning, match="replaced nothing"):
        rows = tigon.patch(experts).rows
    assert reason in next(row for row in rows if row.modules == ("",)).reason
    assert "forward" not in experts.__dict__


def test_convolutions_have_no_row() -> None:
    with pytest.warns(UserWarning, match="nothing recognised"):
        assert tigon.patch(nn.Sequential(nn.Conv1d(4, 4, 3), nn.Bilinear(4, 4, 4))).rows == []


def test_a_method_that_was_replaced_on_the_instance_is_left_alone() -> None:
    experts = Experts()
    experts._apply_gate = lambda x: x[..., :20]  # type: ignore[method-assign]
    native = experts(*(batch := inputs()))
    with pytest.warns(UserWarning, match="replaced on the instance already"):
        tigon.patch(experts)
    assert torch.equal(experts(*batch), native)


@pytest.mark.parametrize("limit", [0.2, float("inf")])
def test_a_limit_that_changes_later_is_read(limit: float) -> None:
    experts, batch = Limited(7.0), inputs()
    tigon.patch(experts)
    experts.limit = limit
    torch.testing.assert_close(experts(*batch), Limited.forward(experts, *batch), rtol=1e-5, atol=1e-5)


def test_an_error_in_the_forward_leaves_the_module_as_it_was() -> None:
    experts = Experts()
    tigon.patch(experts)
    attributes = set(experts.__dict__)
    with pytest.raises(RuntimeError):
        experts(torch.randn(7, 5), *inputs()[1:])
    assert set(experts.__dict__) == attributes


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_compute_with_their_own_numbers(copied: Any) -> None:
    experts, batch = Limited(7.0), inputs()
    tigon.patch(experts)
    other = copied(experts)
    other.limit = 0.2
    torch.testing.assert_close(other(*batch), Limited.forward(other, *batch), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(other(*batch), experts(*batch))


def test_patched_experts_compile_into_one_graph() -> None:
    experts, batch = Limited(7.0), inputs()
    native = experts(*batch)
    tigon.patch(experts)
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*batch), native, rtol=1e-5, atol=1e-5)
    compiled(*batch).sum().backward()
    assert _experts.METHOD not in experts.__dict__


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_every_way_to_multiply_gives_what_it_gave(implementation: str, build: Any, batch: Any, step: Any) -> None:
    model = build("Mixtral", num_local_experts=4, num_experts_per_tok=2)
    model.set_experts_implementation(implementation)
    native = step(model, batch)
    with warnings.catch_warnings(action="ignore"):
        report = tigon.patch(model, only=["experts"])
    patched = step(model, batch)
    torch.testing.assert_close(patched["loss"], native["loss"], rtol=1e-5, atol=1e-5)
    for name, want in native["grads"].items():
        torch.testing.assert_close(patched["grads"][name], want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    (row,) = report
    if implementation == "eager":
        assert (row.verdict, row.reason) == ("kept", _experts.PLAIN_LOOP)
    else:
        assert (row.verdict, row.variant, row.count) == ("replaced", "silu", 2)


def test_the_implementation_can_be_changed_after_patching(build: Any, batch: Any) -> None:
    model = build("Mixtral", num_local_experts=4, num_experts_per_tok=2).eval()
    native = model(**batch).logits
    tigon.patch(model, only=["experts"])
    for implementation in ("batched_mm", "eager", "grouped_mm"):
        model.set_experts_implementation(implementation)
        torch.testing.assert_close(model(**batch).logits, native, rtol=1e-4, atol=1e-4)
