"""Norms with a gate as their second argument, and those whose offset rounds with the weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from tigon.patch import _norms


def rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class After(nn.Module):
    """Norm, weight, gate. The others change one thing."""

    def __init__(self, size: int = 24) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(size))
        self.tiny, self.layers, self.columns = 1e-5, 3, 8

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        y = self.scale * rms(x.float(), self.tiny).to(x.dtype)
        return (y * F.silu(z.float())).to(x.dtype)


class AfterInFp32(After):
    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        return (self.scale.float() * rms(x.float(), self.tiny) * torch.sigmoid(z.float())).to(x.dtype)


class Before(After):
    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        y = x.float() if z is None else x.float() * F.silu(z.float())
        return self.scale * rms(y, self.tiny).to(x.dtype)


class BeforeInGroups(After):
    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        y = x.float() if z is None else x.float() * F.silu(z.float())
        return self.scale * rms(y.unflatten(-1, (-1, self.columns)), self.tiny).flatten(-2).to(x.dtype)


class OnePlus(After):
    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return ((1 + self.scale.float()) * rms(x.float(), self.tiny) * F.silu(z.float())).to(x.dtype)


class GateIn16Bits(After):
    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.scale * rms(x.float(), self.tiny).to(x.dtype) * F.silu(z)


class Swapped(After):
    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return super().forward(z, x)


class Reused(After):
    """The gate is normalised too."""

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return super().forward(x, rms(z.float(), self.tiny))


class ClampedGate(After):
    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return super().forward(x, z.clamp(-50, 50))


class DetachedGate(After):
    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return super().forward(x, z.detach())


class GateThatAdds(After):
    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return super().forward(x, z) + 1e-3 * z


class TwoQueries(After):
    """Two tensors in, two out."""

    def forward(self, q: Tensor, k: Tensor) -> Any:
        return self.scale * rms(q, self.tiny), self.scale * rms(k, self.tiny)


ACCEPTED = [
    (After(), "cast_then_scale, silu after"),
    (AfterInFp32(), "scale_then_cast, sigmoid after"),
    (Before(), "cast_then_scale, silu before"),
    (BeforeInGroups(), "cast_then_scale, silu before, groups"),
    (OnePlus(), "scale_then_cast, offset 1, silu after"),
]


@pytest.mark.parametrize(("norm", "variant"), ACCEPTED, ids=lambda value: type(value).__name__)
def test_accepted_norms_compute_the_same_and_train_the_same(
    norm: nn.Module, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = tigon.patch(norm)
    assert (row.form, row.verdict, row.variant) == ("rms_norm_gated", "replaced", variant), row.reason
    calls, op = [], _norms.rms_norm_gated
    monkeypatch.setattr(_norms, "rms_norm_gated", lambda *a, **k: calls.append(1) or op(*a, **k))
    for dtype in (torch.float32, torch.bfloat16):
        x, z = (torch.randn(2, 5, 24, requires_grad=True) for _ in range(2))
        leaves = [x, z, norm.scale]
        native = type(norm).forward(norm, x.to(dtype), z.to(dtype))
        patched = norm(x.to(dtype), z=z.to(dtype))
        assert patched.dtype == native.dtype
        upstream = torch.randn_like(native)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(patched, native, rtol=tolerance, atol=tolerance)
        wanted = torch.autograd.grad(native, leaves, upstream)
        got = torch.autograd.grad(patched, leaves, upstream)
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=10 * tolerance, atol=10 * tolerance * float(b.abs().max()))
    assert len(calls) == 2
    tigon.unpatch(norm)


REFUSED = [
    (GateIn16Bits(), "rounds to 16 bits"),
    (Swapped(), "no candidate computes the same"),
    (Reused(), "no candidate computes the same"),
    (ClampedGate(), "no candidate computes the same"),
    (DetachedGate(), "no candidate computes the same"),
    (GateThatAdds(), "no candidate computes the same"),
    (TwoQueries(), "it makes tuple of (85, 24), the form a tensor of the same shape"),
]


@pytest.mark.parametrize(("norm", "reason"), REFUSED, ids=lambda value: type(value).__name__)
def test_traps_are_refused_with_a_reason(norm: nn.Module, reason: str) -> None:
    with pytest.warns(UserWarning, match="replaced nothing"):
        (row,) = tigon.patch(norm)
    assert reason in row.reason
    assert "forward" not in norm.__dict__


def test_without_a_gate_and_with_one_that_broadcasts_the_native_forward_runs() -> None:
    norm, x = Before(), torch.randn(2, 5, 24)
    tigon.patch(norm)
    for gate in ((), (None,), (torch.randn(1, 5, 24),)):
        assert torch.equal(norm(x, *gate), Before.forward(norm, x, *gate))


def test_eps_and_groups_are_read_at_every_call() -> None:
    norm, x, z = BeforeInGroups(), torch.randn(3, 24), torch.randn(3, 24)
    tigon.patch(norm)
    norm.tiny, norm.columns = 0.4, 6
    torch.testing.assert_close(norm(x, z), BeforeInGroups.forward(norm, x, z), rtol=1e-5, atol=1e-5)


class RoundedOffset(nn.Module):
    """One is added in the dtype of the weight: in bf16 a small weight is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(24) * 0.01), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return (rms(x.float(), self.eps) * (1.0 + self.weight).float()).type_as(x)


class RoundedTwice(RoundedOffset):
    def forward(self, x: Tensor) -> Tensor:
        return (1.0 + self.weight) * rms(x.float(), self.eps).to(x.dtype)


@pytest.mark.parametrize("norm", [RoundedOffset(), RoundedTwice()], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
def test_an_offset_that_rounds_with_the_weight_does_so(norm: nn.Module, weight: torch.dtype) -> None:
    norm = norm.to(weight)
    (row,) = tigon.patch(norm)
    assert row.verdict == "replaced", row.reason
    assert row.variant.endswith("offset 1, rounded with the weight")
    with tigon.backend("torch"):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(50, 24, requires_grad=True, dtype=dtype)
            native, patched = type(norm).forward(norm, x), norm(x)
            assert patched.dtype == native.dtype
            assert float(((patched - native).abs() > 1e-5 * native.abs()).float().mean()) < 0.01
            upstream = torch.randn_like(native)
            wanted = torch.autograd.grad(native, [x, norm.weight], upstream)
            got = torch.autograd.grad(patched, [x, norm.weight], upstream)
            tolerance = 1e-4 if weight == dtype == torch.float32 else 2e-2
            for a, b in zip(got, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))
    tigon.unpatch(norm)
