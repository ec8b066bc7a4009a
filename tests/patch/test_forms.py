"""What the probe accepts and what it refuses, on modules made for the purpose."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon


class Norm(nn.Module):
    """A plain RMS norm; the traps below change one thing."""

    def __init__(self, size: int = 24) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.tiny = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.tiny)
        return self.scale * n.to(x.dtype)


class ClampedNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-100, 100)


class HardCodedEps(Norm):
    def forward(self, x: Tensor) -> Tensor:
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.scale * n.to(x.dtype)


class EpsOutside(Norm):
    """1e-5 is added to the root, not below it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x.float() / (x.float().pow(2).mean(-1, keepdim=True).sqrt() + 3e-3)).to(x.dtype)


class EpsAsFloor(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x.float() * x.float().pow(2).mean(-1, keepdim=True).clamp_min(1e-5).rsqrt()).to(x.dtype)


class EpsOfTheDtype(Norm):
    def forward(self, x: Tensor) -> Tensor:
        eps = torch.finfo(x.dtype).eps
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        return self.scale * n.to(x.dtype)


class OnlyTheInverse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps).to(x.dtype)


class RoundedWithoutWeight(OnlyTheInverse):
    def forward(self, x: Tensor) -> Tensor:
        return x * super().forward(x)


class UnusedBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6
        self.register_buffer("ones", torch.ones(24), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


class FrozenScale(UnusedBuffer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.ones


class UnusedWeight(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return x.float().mul(torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.tiny)).to(x.dtype)


class NothingToLearn(nn.Module):
    """A layer norm without weights, its eps hard-coded."""

    def __init__(self, size: int = 24) -> None:
        super().__init__()
        self.normalized_shape = (size,)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.normalized_shape, None, None, eps=1e-5).to(x.dtype)


class OnePlus(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class Unbiased(nn.LayerNorm):
    """Divides by n - 1, as `std` does."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + self.eps).sqrt() * self.weight + self.bias


class ByHead(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__((3, 24))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (24,), None, None, self.eps) * self.weight + self.bias


class ManyHeads(Norm):
    """Of [B, S, H, D], with weights for all heads in one vector."""

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _, _ = x.shape
        x = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.tiny)
        return x.reshape(batch, tokens, -1) * self.scale


class OverChannels(nn.LayerNorm):
    """Of images [B, C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class DetachedNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        n = x.float() * torch.rsqrt(x.detach().float().pow(2).mean(-1, keepdim=True) + self.tiny)
        return self.scale * n.to(x.dtype)


class RoundedStatistics(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.tiny).to(x.dtype))


class RoundedSquares(Norm):
    """Its statistics are of 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.tiny))


class ToTheWeight(Norm):
    """What is normalised takes the dtype of a weight in 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.tiny)
        return self.scale * (x.to(self.scale.dtype) if self.scale.dtype == torch.bfloat16 else x)


class Grouped(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.columns = 3, 8

    def forward(self, x: Tensor) -> Tensor:
        groups = x.float().unflatten(-1, (-1, self.columns))
        n = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + self.tiny)
        return ((1 + self.scale.float()) * n.flatten(-2)).to(x.dtype)


class GroupsInTurns(Grouped):
    """A group is every third column."""

    def forward(self, x: Tensor) -> Tensor:
        groups = x.float().unflatten(-1, (self.columns, -1))
        n = groups * torch.rsqrt(groups.pow(2).mean(-2, keepdim=True) + self.tiny)
        return ((1 + self.scale.float()) * n.flatten(-2)).to(x.dtype)


class TwoFloats(Norm):
    """The eps is not the first float attribute, and both have the same value."""

    def __init__(self) -> None:
        super().__init__()
        del self.tiny
        self.decoy = 1e-5
        self.tiny = 1e-5


class NoWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


class Mlp(nn.Module):
    """A gated MLP with unusual names; the traps below change one thing."""

    def __init__(self, hidden: int = 12, inner: int = 20, bias: bool = True) -> None:
        super().__init__()
        self.c = nn.Linear(inner, hidden, bias=bias)
        self.a = nn.Linear(hidden, inner, bias=bias)
        self.b = nn.Linear(hidden, inner, bias=bias)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x) * self.act(self.b(x)))


class Multiplier(Mlp):
    multiplier = 1.01

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x) * self.act(self.b(x) * self.multiplier))


class ClampedGate(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x).clamp(-50, 50) * self.act(self.b(x)))


class ClampedActivation(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x) * self.act(self.b(x)).clamp(max=1000))


class Limited(Mlp):
    """Clamped as many mixtures of experts are; the limit is an integer, as configurations have it."""

    def __init__(self, limit: float = 7) -> None:
        super().__init__()
        self.some_limit = limit

    def forward(self, x: Tensor) -> Tensor:
        gate = self.b(x).clamp(max=self.some_limit)
        return self.c(self.a(x).clamp(-self.some_limit, self.some_limit) * self.act(gate))


class LimitedActivation(Limited):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.act(self.b(x)).clamp(max=self.some_limit)
        return self.c(self.a(x).clamp(-self.some_limit, self.some_limit) * gate)


class LimitedBothWays(Limited):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.b(x).clamp(-self.some_limit, self.some_limit)
        return self.c(self.a(x).clamp(-self.some_limit, self.some_limit) * self.act(gate))


class LimitedUp(Limited):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x).clamp(-self.some_limit, self.some_limit) * self.act(self.b(x)))


class LimitedAfterTheOffset(Limited):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.b(x).clamp(max=self.some_limit)
        return self.c((self.a(x) + 1).clamp(-self.some_limit, self.some_limit) * self.act(gate))


class TwoMultipliers(Mlp):
    """Both are 1 unless a configuration says otherwise."""

    def __init__(self, first: float = 1.0, second: float = 1.0) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x) * self.act(self.b(x) * self.first)) * self.second


class ThreeMultipliers(TwoMultipliers):
    """The third multiplies `up`, which the operator does not."""

    def __init__(self) -> None:
        super().__init__()
        self.third = 1.5

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.third * self.a(x) * self.act(self.b(x) * self.first)) * self.second


class Packed(nn.Module):
    """One projection to gate and up, and an activation that is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(12, 40), nn.Linear(20, 12)
        self.alpha, self.limit = 1.702, 7.0

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.out((up + 1) * gate * torch.sigmoid(gate * self.alpha))


class InTurns(Packed):
    def forward(self, x: Tensor) -> Tensor:
        y = self.both(x)
        gate, up = y[..., ::2].clamp(max=self.limit), y[..., 1::2].clamp(-self.limit, self.limit)
        return self.out((up + 1) * gate * torch.sigmoid(gate * self.alpha))


class SparseGate(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.b(x)
        gate = F.relu(gate - gate.mean(-1, keepdim=True))
        return self.c(self.a(x) * self.act(gate))


class InnerNorm(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm(20)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.norm(self.a(x) * self.act(self.b(x))))


class InnerNormFirst(InnerNorm):
    """The same children, but the norm comes before the product."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.norm(self.a(x)) * self.act(self.b(x)))


class InnerNormTwice(InnerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.norm(self.norm(self.a(x) * self.act(self.b(x)))))


class CastsToTheWeight(Mlp):
    """Its last projection may be kept in fp32 while the others are not."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) * self.act(self.b(x))
        if isinstance(self.c.weight, Tensor) and y.dtype != self.c.weight.dtype != torch.int8:
            y = y.to(self.c.weight.dtype)
        return self.c(y)


class UsesTheSizeOfAWeight(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.a.weight.abs().mean()


class OptionalIndex(Mlp):
    def forward(self, x: Tensor, index: int | None = None) -> Tensor:
        y = super().forward(x)
        return y if index is None else y * index


class FlagIsSet(Mlp):
    def forward(self, x: Tensor, double: bool = True) -> Tensor:
        return super().forward(x) * (2 if double else 1)


class OwnBias(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


class WithDropout(Mlp):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x))


class FunctionalDropout(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


class ReadsWeight(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.linear(x, self.a.weight, self.a.bias) * self.act(self.b(x)))


class Residual(Mlp):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return super().forward(x) + residual


class GateSecond(nn.Module):
    """Packed, the gate in the second half, split at an attribute that is a size."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = 20
        self.both = nn.Linear(12, 40)
        self.out = nn.Linear(20, 12)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.both(x).split(self.inner, -1)
        return self.out(up * self.act(gate))


class FunctionActivation(Mlp):
    """All three projections are square, so that only the numbers tell which is which."""

    def __init__(self) -> None:
        super().__init__(12, 12)
        del self.act
        self.act = F.relu

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.c(x)) * self.a(x))


def only_row(module: nn.Module, **kwargs: Any) -> Any:
    report = tigon.patch(nn.Sequential(module), **kwargs)
    (row,) = report.rows
    return row


ACCEPTED = [
    (Norm(), "rms_norm", "cast_then_scale"),
    (TwoFloats(), "rms_norm", "cast_then_scale"),
    (NoWeight(), "rms_norm", "no weight"),
    (nn.RMSNorm(24, eps=1e-6), "rms_norm", None),
    (nn.LayerNorm(24), "layer_norm", "weight, bias"),
    (nn.LayerNorm(24, bias=False), "layer_norm", "weight"),
    (Mlp(), "glu", "silu"),
    (Mlp(bias=False), "glu", "silu"),
    (WithDropout(0.0), "glu", "silu"),
    (GateSecond(), "glu", "gelu, packed, gate second"),
    (FunctionActivation(), "glu", "relu"),
    (HardCodedEps(), "rms_norm", "cast_then_scale"),
    (RoundedStatistics(), "rms_norm", "cast_rstd"),
    (RoundedWithoutWeight(), "rms_norm", "no weight, cast_rstd"),
    (ToTheWeight(), "rms_norm", "cast_to_weight"),
    (Grouped(), "rms_norm", "scale_then_cast, offset 1, groups"),
    (nn.RMSNorm(24), "rms_norm", None),
    (UnusedBuffer(), "rms_norm", "no weight"),
    (FrozenScale(), "rms_norm", "cast_then_scale"),
    (NothingToLearn(), "layer_norm", "no weight"),
    (OnePlus(24), "layer_norm", "weight, bias, offset 1"),
    (OnePlus(24, bias=False), "layer_norm", "weight, offset 1"),
    (InnerNorm(), "glu", "silu, inner module"),
    (CastsToTheWeight(), "glu", "silu"),
    (OptionalIndex(), "glu", "silu"),
    (Limited(), "glu", "silu, clamped"),
    (Limited(0.5), "glu", "silu, clamped"),
    (LimitedActivation(0.5), "glu", "silu, clamped activation"),
    (LimitedActivation(float("inf")), "glu", "silu, clamped activation"),
    (TwoMultipliers(), "glu", "silu, scaled gate, scaled"),
    (TwoMultipliers(0.7, 1.3), "glu", "silu, scaled gate, scaled"),
    (Packed(), "glu", "silu, packed, clamped, alpha, up + 1"),
    (InTurns(), "glu", "silu, packed, interleaved, clamped, alpha, up + 1"),
]


@pytest.mark.parametrize(("module", "form", "variant"), ACCEPTED, ids=lambda value: type(value).__name__)
def test_accepted_modules_compute_the_same_and_train_the_same(module: nn.Module, form: str, variant: str) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
    width = getattr(module, "a", getattr(module, "both", None))
    x = torch.randn(5, 7, 24 if width is None else width.in_features, requires_grad=True)
    leaves = [x, *module.parameters()]
    native = module(x)
    # Of the square of a norm the gradient is rounding.
    upstream = torch.randn_like(native)
    wanted = torch.autograd.grad(native, leaves, upstream)
    row = next(row for row in tigon.patch(module) if row.form == form)
    try:
        assert (row.form, row.verdict) == (form, "replaced"), row.reason
        assert variant is None or row.variant == variant
        patched = module(x)
        torch.testing.assert_close(patched, native, rtol=1e-5, atol=1e-5)
        for a, b in zip(torch.autograd.grad(patched, leaves, upstream), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))
    finally:
        tigon.unpatch(module)


REFUSED = [
    (ClampedNorm(), "no candidate computes the same"),
    (EpsOutside(), "no candidate computes the same"),
    (EpsAsFloor(), "no candidate computes the same"),
    (EpsOfTheDtype(), "rounds to 16 bits"),
    (OnlyTheInverse(), "it makes (32, 1) of (32, 64)"),
    (RoundedSquares(), "rounds to 16 bits"),
    (GroupsInTurns(), "no candidate computes the same"),
    (ByHead(), "its weight has 2 axes"),
    (ManyHeads(), "it does not take rows of the width of its weight"),
    (DetachedNorm(), "no candidate computes the same"),
    (Multiplier(), "no candidate computes the same"),
    (LimitedBothWays(), "no candidate computes the same"),
    (LimitedUp(), "no candidate computes the same"),
    (LimitedAfterTheOffset(), "no candidate computes the same"),
    (ThreeMultipliers(), "no candidate computes the same"),
    (ClampedGate(), "no candidate computes the same"),
    (ClampedActivation(), "no candidate computes the same"),
    (SparseGate(), "no candidate computes the same"),
    (OwnBias(), "parameters or buffers of its own"),
    (WithDropout(0.1), "drops out"),
    (FunctionalDropout(), "draws random numbers"),
    (ReadsWeight(), "it reads the weights of its projections"),
    (UsesTheSizeOfAWeight(), "it reads the weights of its projections"),
    (InnerNormFirst(), "its child norm has parameters or buffers, and is not called on the product alone"),
    (InnerNormTwice(), "its child norm has parameters or buffers, and is not called on the product alone"),
    (FlagIsSet(), "double: 'bool' = True"),
    (Residual(), "takes (x: "),
]


@pytest.mark.parametrize(("module", "reason"), REFUSED, ids=lambda value: type(value).__name__)
def test_traps_are_refused_with_a_reason(module: nn.Module, reason: str) -> None:
    # Of a refused MLP the norm within may be replaced.
    with warnings.catch_warnings(action="ignore"):
        row = tigon.patch(nn.Sequential(module)).kept[0]
    assert reason in row.reason
    assert "forward" not in module.__dict__
    tigon.unpatch(module)


@pytest.mark.parametrize("module", [nn.GroupNorm(2, 24), OverChannels(24), Unbiased(24), nn.Dropout(0.1), nn.PReLU(24)])
def test_what_normalises_something_else_has_no_row(module: nn.Module) -> None:
    (row,) = tigon.patch(nn.Sequential(Norm(), module), strict=True).rows
    assert row.cls == "Norm"


def test_a_weight_that_is_not_used_gets_no_gradient() -> None:
    norm = UnusedWeight()
    assert only_row(norm).variant == "no weight"
    norm(torch.randn(3, 24, requires_grad=True)).sum().backward()
    assert norm.scale.grad is None


def test_a_norm_and_an_mlp_around_it_are_both_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from tigon.patch import _glu, _norms

    mlp, x, calls = InnerNorm(), torch.randn(3, 12), []
    native = mlp(x)
    for module, name in ((_glu, "glu"), (_norms, "rms_norm")):
        op = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, op=op, name=name, **k: calls.append(name) or op(*a, **k))
    tigon.patch(mlp)
    torch.testing.assert_close(mlp(x), native, rtol=1e-5, atol=1e-5)
    assert calls == ["glu", "rms_norm"]


def test_further_arguments_go_to_the_native_forward() -> None:
    mlp, x = OptionalIndex(), torch.randn(3, 12)
    native = [mlp(x, 3), mlp(x, index=3), mlp(x, None)]
    assert only_row(mlp).verdict == "replaced"
    for patched, wanted in zip((mlp(x, 3), mlp(x, index=3), mlp(x, None)), native, strict=True):
        torch.testing.assert_close(patched, wanted, rtol=1e-5, atol=1e-5)


def test_a_projection_kept_in_fp32_gets_fp32() -> None:
    mlp, x = CastsToTheWeight(), torch.randn(3, 12).to(torch.bfloat16)
    mlp.a.to(torch.bfloat16), mlp.b.to(torch.bfloat16)
    native = mlp(x)
    assert only_row(mlp).verdict == "replaced"
    assert mlp(x).dtype == native.dtype == torch.float32
    torch.testing.assert_close(mlp(x), native, rtol=2e-2, atol=2e-2)


def test_attention_blocks_and_dropouts_do_not_look_like_forms() -> None:
    class Block(nn.Module):
        """Query, key and value projections with the shapes of a packed MLP, and a dropout."""

        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out, self.dropout = nn.Linear(8, 16), nn.Linear(8, 8), nn.Dropout(0.1)

        def forward(self, x: Tensor, mask: Tensor, cache: Any = None) -> Tensor:
            return self.out(self.qkv(x)[..., :8])

    with pytest.warns(UserWarning, match="nothing recognised"):
        assert tigon.patch(Block()).rows == []


@pytest.mark.parametrize("cls", [Norm, TwoFloats])
def test_eps_is_found_by_its_effect_and_read_at_every_call(cls: type[Norm]) -> None:
    norm = cls()
    tigon.patch(norm)
    x = torch.randn(3, 24)
    norm.tiny = 0.5
    torch.testing.assert_close(norm(x), Norm.forward(norm, x))


@pytest.mark.parametrize(
    ("module", "numbers"),
    [
        (TwoMultipliers(), {"first": 0.7, "second": 1.3}),
        (LimitedActivation(float("inf")), {"some_limit": 0.2}),
        (Packed(), {"alpha": 1.1, "limit": 0.3}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_limits_and_factors_are_found_by_their_effect_and_read_at_every_call(
    module: nn.Module, numbers: dict[str, float]
) -> None:
    assert only_row(module).verdict == "replaced"
    for name, number in numbers.items():
        setattr(module, name, number)
        x = torch.randn(3, 12)
        torch.testing.assert_close(module(x), type(module).forward(module, x), rtol=1e-5, atol=1e-5)
    tigon.unpatch(module)


def test_the_probe_leaves_weights_hooks_and_random_numbers_alone() -> None:
    norm, calls = Norm(), []
    norm.register_forward_hook(lambda *_: calls.append("forward"))
    before = norm.scale.detach().clone()
    version, state = norm.scale._version, torch.get_rng_state()
    tigon.patch(norm)
    assert (calls, norm.scale._version) == ([], version)
    assert torch.equal(norm.scale, before)
    assert torch.equal(torch.get_rng_state(), state)
    norm(torch.randn(2, 24))
    assert calls == ["forward"]


def test_meta_weights_are_no_obstacle() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Norm(), Mlp())
        report = tigon.patch(model)
    assert [row.verdict for row in report] == ["replaced", "replaced"]
    model = model.to_empty(device="cpu")
    assert model[0](torch.ones(2, 24)).shape == (2, 24)


def test_the_probe_runs_in_eager_fp32_whatever_the_caller_is_in() -> None:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert only_row(Norm()).verdict == "replaced"


def test_projections_of_any_kind_are_called_not_read() -> None:
    class Quantised(nn.Module):
        """A linear layer with its weight in integers, which a fused matmul could not use."""

        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.in_features, self.out_features = linear.in_features, linear.out_features
            self.register_buffer("integers", (linear.weight.detach() * 127).to(torch.int8))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.integers.float() / 127)

    mlp = Mlp()
    mlp.a, mlp.b, mlp.c = Quantised(mlp.a), Quantised(mlp.b), Quantised(mlp.c)
    x = torch.randn(3, 12)
    native = mlp(x)
    assert only_row(mlp).verdict == "replaced"
    torch.testing.assert_close(mlp(x), native, rtol=1e-5, atol=1e-6)


def test_a_large_mlp_is_probed_at_small_sizes() -> None:
    with torch.device("meta"):
        mlp = Mlp(8192, 28672)
    assert only_row(mlp).verdict == "replaced"


def test_verdicts_do_not_leak_between_configurations() -> None:
    class Mixed(Mlp):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y + (self.factor - 1) * y.mean(-1, keepdim=True)

    report = tigon.patch(model := nn.Sequential(Mixed(1.0), Mixed(2.0), Mixed(1.0)))
    assert [(row.verdict, row.modules) for row in report] == [("replaced", ("0", "2")), ("kept", ("1",))]
    # At another value it is none of the forms, so there the native forward runs.
    model[0].factor, x = 2.0, torch.randn(3, 12)
    torch.testing.assert_close(model[0](x), Mixed.forward(model[0], x), rtol=0, atol=0)


def test_a_layer_norm_under_autocast_keeps_torchs_rule() -> None:
    norm = nn.LayerNorm(24)
    x = torch.randn(3, 24, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        native = norm(x)
        tigon.patch(norm)
        assert norm(x).dtype == native.dtype


def test_b112_a_patched_layer_norm_subtracts_the_mean() -> None:
    norm = nn.LayerNorm(24)
    with torch.no_grad():
        norm.bias.fill_(3.0)
        norm.weight.copy_(torch.randn(24))
    x = torch.randn(4, 24) + 5
    native = norm(x)
    tigon.patch(norm)
    torch.testing.assert_close(norm(x), native, rtol=1e-5, atol=1e-5)
    assert type(norm) is nn.LayerNorm
    assert nn.LayerNorm.__name__ == "LayerNorm"
    assert repr(norm) == repr(nn.LayerNorm(24))


def test_arguments_keep_their_names(build: Callable[..., nn.Module]) -> None:
    """Callers may name the argument, whatever the class calls it."""
    model = build("Llama")
    tigon.patch(model)
    layer, hidden = model.model.layers[0], torch.randn(1, 3, model.config.hidden_size)
    for module in (layer.mlp, layer.input_layernorm):
        (name,) = inspect.signature(type(module).forward).parameters.keys() - {"self"}
        assert torch.equal(module(**{name: hidden}), module(hidden))


CHANGES = {
    "hook": lambda mlp: mlp.act_fn.register_forward_hook(lambda module, inputs, output: output * 0.5),
    "backward hook": lambda mlp: mlp.act_fn.register_full_backward_hook(lambda module, di, do: (di[0] * 0,)),
    "own forward": lambda mlp: setattr(mlp.act_fn, "forward", torch.relu),
    "exchanged": lambda mlp: setattr(mlp, "act_fn", nn.ReLU()),
}


@pytest.mark.parametrize("first", [True, False], ids=["before patching", "after patching"])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_an_activation_are_honoured(name: str, first: bool, build: Callable[..., nn.Module]) -> None:
    native, model = build("Llama").model.layers[0].mlp, build("Llama")
    mlp = model.model.layers[0].mlp
    CHANGES[name](native)
    if first:
        CHANGES[name](mlp)
    tigon.patch(model)
    if not first:
        CHANGES[name](mlp)
    x = torch.randn(1, 3, model.config.hidden_size)
    results = []
    for each in (native, mlp):
        leaf = x.clone().requires_grad_()
        y = each(leaf)
        results.append((y, *torch.autograd.grad(y.sum(), leaf)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
