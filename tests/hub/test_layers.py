"""Layers in the place of a host's forward: the same numbers, roundings and gradients, or the host's own forward."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from tigon import layers
from tigon.layers import _host

LAYERS = [name for name in layers.__all__ if not name.endswith("Layout")]


@pytest.mark.parametrize("name", LAYERS)
def test_obeys_the_rules_of_kernels(name: str) -> None:
    layer = getattr(layers, name)
    assert issubclass(layer, nn.Module)
    assert layer.__init__ is nn.Module.__init__
    members = {n for n, _ in inspect.getmembers(layer)} - {n for n, _ in inspect.getmembers(nn.Module)}
    assert members == {"has_backward", "can_torch_compile"}
    assert layer.has_backward is layer.can_torch_compile is True


def run(layer: type[nn.Module] | None, host: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Results and gradients of a host with the forward of a layer, or with its own."""
    leaves = [*(x for x in inputs if x.requires_grad), *host.parameters()]
    y = (type(host) if layer is None else layer).forward(host, *inputs)
    parts = y if isinstance(y, tuple) else (y,)
    total = sum((t.float() * torch.linspace(-1, 2, t.numel()).reshape(t.shape)).sum() for t in parts)
    return [*parts, *torch.autograd.grad(total, leaves)]


def assert_same(ours: list[Tensor], expected: list[Tensor]) -> None:
    assert len(ours) == len(expected)
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == b.dtype
        if a.dtype == torch.float32:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        else:
            # A sum in another order may fall to the other side; not further than its last bit.
            torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6)


# ---- norms ----


class _Norm(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        # Both are there, and only one is read.
        self.variance_epsilon, self.eps = 0.3, 0.9


def _normalised(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class CastThenScale(_Norm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.weight * _normalised(hidden_states, self.variance_epsilon).to(hidden_states.dtype)


class ScaleThenCast(_Norm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return (self.weight * _normalised(hidden_states, self.variance_epsilon)).to(hidden_states.dtype)


class ZeroCentered(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (_normalised(x, self.eps) * (1.0 + self.weight.float())).type_as(x)


class CastRstd(_Norm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        rstd = torch.rsqrt(hidden_states.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (hidden_states * rstd.to(hidden_states.dtype))


class CastToWeight(_Norm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.weight * _normalised(hidden_states, self.eps).to(self.weight.dtype)


NORMS = {
    CastThenScale: ("variance_epsilon", 0.0, "cast_then_scale"),
    ScaleThenCast: ("variance_epsilon", 0.0, "scale_then_cast"),
    ZeroCentered: ("eps", 1.0, "scale_then_cast"),
    CastRstd: ("eps", 0.0, "cast_rstd"),
    CastToWeight: ("eps", 0.0, "cast_to_weight"),
}
DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize("host", NORMS)
def test_cast_order_is_found(host: type[nn.Module]) -> None:
    assert _host.norm_form(host) == NORMS[host]


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("host", NORMS)
def test_norm(host: type[nn.Module], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    norm, x = host().to(dtypes[1]), torch.randn(2, 3, 24, dtype=dtypes[0], requires_grad=True)
    ours, expected = run(layers.RMSNorm, norm, x), run(None, norm, x)
    assert_same(ours, expected)
    # Where it rounds is seen bit by bit.
    assert (ours[0] != expected[0]).float().mean() < 0.02 or dtypes[0] == torch.float32


class Gated(_Norm):
    def __init__(self, activation: str = "silu") -> None:
        super().__init__()
        self.activation = activation

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        y = self.weight * _normalised(hidden_states, self.variance_epsilon).to(hidden_states.dtype)
        return (y * _act(self, gate)).to(hidden_states.dtype)


def _act(module: Any, gate: Tensor) -> Tensor:
    return {"silu": F.silu, "sigmoid": torch.sigmoid}[module.activation](gate.float())


class GatedBefore(Gated):
    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        product = hidden_states.float() * _act(self, gate)
        return (self.weight * _normalised(product, self.eps)).to(hidden_states.dtype)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("host", [Gated, GatedBefore])
def test_gated_norm(host: type[Gated], activation: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    norm = host(activation).to(dtypes[1])
    x, gate = (torch.randn(2, 3, 24, dtype=dtypes[0], requires_grad=True) for _ in range(2))
    is_after = host is Gated
    eps, cast = ("variance_epsilon", "cast_then_scale") if is_after else ("eps", "scale_then_cast")
    assert _host.gated_norm_form(host, activation) == (eps, activation, is_after, cast)
    assert_same(run(layers.RMSNormGated, norm, x, gate), run(None, norm, x, gate))


class Halved(_Norm):
    """A norm that no formula is."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return 0.5 * self.weight * _normalised(hidden_states, self.eps)


class TwiceRounded(_Norm):
    """One that rounds where no cast does."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        y = _normalised(hidden_states, self.eps).to(hidden_states.dtype)
        return (self.weight * y).to(hidden_states.dtype)


class WithState(_Norm):
    """One that a stand-in cannot run, since it has more than a norm has."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.factor * self.weight * _normalised(hidden_states, self.eps)


@pytest.mark.parametrize("host", [Halved, TwiceRounded, WithState])
def test_unknown_norm_keeps_its_forward_and_says_so(host: type[nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    _host._noted.clear()
    norm, x = host(), torch.randn(3, 24, requires_grad=True)
    with caplog.at_level(logging.WARNING, "tigon"):
        ours, again = run(layers.RMSNorm, norm, x), run(layers.RMSNorm, norm, x)
    assert_same(ours, run(None, norm, x))
    assert_same(again, ours)
    said = "computes nothing that the layer RMSNorm knows; its own forward runs"
    assert [record.message for record in caplog.records] == [f"tigon: {host.__module__}.{host.__qualname__} {said}"]


def test_a_layer_without_host_says_so() -> None:
    norm = layers.RMSNorm()
    norm.weight, norm.eps = nn.Parameter(torch.ones(8)), 1e-6
    with pytest.raises(TypeError, match="takes the place of a forward, and RMSNorm has no other"):
        norm(torch.randn(2, 8))


def test_probe_leaves_no_trace_in_random_numbers() -> None:
    class Fresh(CastThenScale):
        pass

    before = torch.get_rng_state()
    assert _host.norm_form(Fresh) == NORMS[CastThenScale]
    assert torch.equal(torch.get_rng_state(), before)


def test_probe_is_right_in_any_surrounding() -> None:
    """The first call may be in a model without memory, traced, or under autocast."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    class MakesTensors(CastThenScale):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states) * torch.ones((), dtype=hidden_states.dtype)

    surroundings = [
        FakeTensorMode(),
        torch.device("meta"),
        torch.inference_mode(),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ]
    for around in surroundings:
        norm, mlp = type("Fresh", (MakesTensors,), {}), type("Fresh", (_MLP,), {})
        with around:
            assert _host.norm_form(norm) == NORMS[CastThenScale], around
            assert _host.is_gated_mlp(mlp), around


# ---- rotary embedding ----


def _turned(x: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return torch.cat((-x2, x1), -1)


def _half(q: Tensor, cos: Tensor, sin: Tensor, dim: int) -> Tensor:
    return q * cos.unsqueeze(dim) + _turned(q) * sin.unsqueeze(dim)


def _inverse(q: Tensor, cos: Tensor, sin: Tensor, dim: int) -> Tensor:
    return _half(q, cos, -sin, dim)


def _keeps(q: Tensor, cos: Tensor, sin: Tensor, dim: int) -> Tensor:
    return _half(q, cos, sin, dim).to(q.dtype)


def _half_tables(q: Tensor, cos: Tensor, sin: Tensor, dim: int) -> Tensor:
    q1, q2 = q.chunk(2, -1)
    cos, sin = cos.unsqueeze(dim), sin.unsqueeze(dim)
    return torch.cat((q1 * cos - q2 * sin, q2 * cos + q1 * sin), -1)


def _interleaved(q: Tensor, cos: Tensor, sin: Tensor, dim: int) -> Tensor:
    q1, q2 = q[..., ::2], q[..., 1::2]
    cos, sin = cos.unsqueeze(dim), sin.unsqueeze(dim)
    return torch.stack((q1 * cos - q2 * sin, q2 * cos + q1 * sin), -1).flatten(-2)


def _scaled(q: Tensor, cos: Tensor, sin: Tensor, dim: int) -> Tensor:
    return 0.5 * _half(q, cos, sin, dim)


def rotary(rotate: Callable[..., Tensor]) -> type[nn.Module]:
    """A host as `kernels` makes one of a function."""

    class Func(nn.Module):
        def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
            return rotate(q, cos, sin, unsqueeze_dim), rotate(k, cos, sin, unsqueeze_dim)

    return Func


ROTARIES = {
    _half: (False, ("half", False, False)),
    _inverse: (False, ("half", True, False)),
    _keeps: (False, ("half", False, True)),
    _half_tables: (True, ("half", False, False)),
    _interleaved: (True, ("interleaved", False, False)),
    _scaled: (False, None),
}


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("rotate", ROTARIES, ids=lambda f: f.__name__)
def test_rotary(rotate: Callable[..., Tensor], unsqueeze_dim: int) -> None:
    is_half, form = ROTARIES[rotate]
    host = rotary(rotate)()
    assert _host.rope_form(type(host), is_half) == form
    assert _host.rope_form(type(host), not is_half) is None or rotate not in (_half_tables, _interleaved)
    q, k = torch.randn(2, 4, 5, 8, requires_grad=True), torch.randn(2, 2, 5, 8, requires_grad=True)
    if unsqueeze_dim == 2:
        q, k = (t.detach().transpose(1, 2).requires_grad_() for t in (q, k))
    angles = torch.randn(1, 5, 4)
    angles = angles if is_half else torch.cat((angles, angles), -1)
    inputs = (q, k, angles.cos(), angles.sin())
    turn = type("Bound", (), {"forward": lambda s, *a: layers.RotaryPosEmb.forward(s, *a, unsqueeze_dim)})
    native = type("Bound", (), {"forward": lambda s, *a: type(host).forward(s, *a, unsqueeze_dim)})
    assert_same(run(turn, host, *inputs), run(native, host, *inputs))
    low = (q.bfloat16(), k.bfloat16(), angles.cos(), angles.sin())
    assert [t.dtype for t in layers.RotaryPosEmb.forward(host, *low, unsqueeze_dim)] == [
        t.dtype for t in type(host).forward(host, *low, unsqueeze_dim)
    ]


def test_rotary_that_is_one_for_heads_on_one_axis_alone() -> None:
    assert _host.rope_form(rotary(lambda q, cos, sin, dim: _half(q, cos, sin, 1)), False) is None


def test_rotary_of_another_shape_is_the_hosts() -> None:
    """With narrower tables it may do what it was not asked for when it was found out."""

    class Partial(nn.Module):
        def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
            start = q.shape[-1] - cos.shape[-1]
            turned = [_half(t[..., start:], cos, sin, unsqueeze_dim) for t in (q, k)]
            return tuple(torch.cat((t[..., :start], y), -1) for y, t in zip(turned, (q, k), strict=True))

    host = Partial()
    q, k, tables = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(2, 1, 3, 6)
    for a, b in zip(layers.RotaryPosEmb.forward(host, q, k, *tables), host(q, k, *tables), strict=True):
        assert torch.equal(a, b)


# ---- gated MLPs ----


class _MLP(nn.Module):
    def __init__(self, act_fn: Any = F.silu) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.down_proj, self.act_fn = nn.Linear(12, 8, bias=False), act_fn

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Swapped(_MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class Clamped(_MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=0.1) * self.up_proj(x))


class OwnAct(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


class Scaling(nn.Module):
    """What it does is in the instance, not in the class."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.factor * x)


ACTIVATIONS = [
    (F.silu, "silu"),
    (nn.SiLU(), "silu"),
    (OwnAct(), "silu"),
    (nn.GELU(), "gelu"),
    (nn.GELU(approximate="tanh"), "gelu_tanh"),
    (torch.relu, "relu"),
    (Scaling(2.0), None),
    (nn.PReLU(), None),
    (torch.tanh, None),
]


@pytest.mark.parametrize("layer", [layers.GatedMLP, layers.TiledMLP])
@pytest.mark.parametrize(("act_fn", "name"), ACTIVATIONS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_gated_mlp(act_fn: Any, name: str | None, layer: type[nn.Module]) -> None:
    assert _host.activation_of(act_fn) == name
    # Fewer rows than parts, and more.
    for rows in (3, 25):
        mlp, x = _MLP(act_fn), torch.randn(1, rows, 8, requires_grad=True)
        assert_same(run(layer, mlp, x), run(None, mlp, x))


@pytest.mark.parametrize("layer", [layers.GatedMLP, layers.TiledMLP])
@pytest.mark.parametrize("host", [Swapped, Clamped])
def test_other_mlp_keeps_its_forward(host: type[_MLP], layer: type[nn.Module]) -> None:
    assert _host.is_gated_mlp(_MLP)
    assert not _host.is_gated_mlp(host)
    mlp, x = host(), torch.randn(2, 3, 8, requires_grad=True)
    assert_same(run(layer, mlp, x), run(None, mlp, x))


def test_projections_are_called() -> None:
    """A projection may be an adapter or a quantised layer: what counts is what it returns."""
    mlp, x = _MLP(), torch.randn(2, 3, 8)
    seen = []
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(mlp, name).register_forward_hook(lambda m, i, y: seen.append(m) or 2 * y)
    expected = mlp(x)
    seen.clear()
    torch.testing.assert_close(layers.GatedMLP.forward(mlp, x), expected)
    assert seen == [mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def test_tiles_are_computed_again_and_not_kept() -> None:
    mlp, x = _MLP(), torch.randn(64, 8, requires_grad=True)
    rows = []
    mlp.gate_proj.register_forward_hook(lambda m, i, y: rows.append(len(y)))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        y = layers.TiledMLP.forward(mlp, x)
    assert rows == [8] * 8
    assert sum(n for n in saved if n not in (12 * 8,)) <= x.numel()
    y.sum().backward()
    assert rows == [8] * 16


# ---- losses, activations, linear ----


@pytest.mark.parametrize("items", [None, 7, torch.tensor(7)], ids=str)
def test_causal_lm_loss_is_that_of_transformers(items: Any) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    logits, labels = torch.randn(2, 6, 11, requires_grad=True), torch.randint(11, (2, 6))
    labels[0, 2] = -100
    for shifted in (False, True):
        given = {"labels": None, "shift_labels": labels} if shifted else {"labels": labels}
        given |= {"vocab_size": 11, "num_items_in_batch": items}
        results = []
        for loss in (
            ForCausalLMLoss(logits, **given),
            layers.ForCausalLMLoss.forward(None, logits, **given, attention_flag=True),
            layers.LinearForCausalLMLoss.forward(None, logits, **given),
        ):
            results.append([loss, *torch.autograd.grad(loss, logits)])
        assert_same(results[1], results[0])
        assert_same(results[2], results[0])


def test_loss_of_hidden_states_is_that_of_their_logits() -> None:
    hidden, weight = torch.randn(2, 6, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    bias, labels = torch.randn(11, requires_grad=True), torch.randint(11, (2, 6))
    logits = 3 * torch.tanh((hidden @ weight.T + bias) / 3)
    leaves = (hidden, weight, bias)
    plain = layers.ForCausalLMLoss.forward(None, logits, labels, 11)
    fused = layers.LinearForCausalLMLoss.forward(
        None,
        None,
        labels,
        11,
        hidden_states=hidden,
        lm_head_weight=weight,
        lm_head_bias=bias,
        final_logit_softcapping=3.0,
    )
    assert_same([fused, *torch.autograd.grad(fused, leaves)], [plain, *torch.autograd.grad(plain, leaves)])
    with pytest.raises(ValueError, match="logits: expected a tensor"):
        layers.LinearForCausalLMLoss.forward(None, None, labels, 11)
    with pytest.raises(ValueError, match="labels: expected a tensor"):
        layers.ForCausalLMLoss.forward(None, logits, None, 11)


@pytest.mark.parametrize(
    ("layer", "act"),
    {
        "SiLU": "silu",
        "GeLU": "gelu",
        "GeluTanh": "gelu_pytorch_tanh",
        "NewGELU": "gelu_new",
        "FastGELU": "gelu_fast",
        "QuickGELU": "quick_gelu",
    }.items(),
)
def test_activation_is_that_of_transformers(layer: str, act: str) -> None:
    from transformers.activations import ACT2FN

    x = torch.randn(5, 7, requires_grad=True)
    assert_same(run(getattr(layers, layer), ACT2FN[act], x), run(None, ACT2FN[act], x))


@pytest.mark.parametrize(
    ("layer", "act"),
    [("SiluAndMul", F.silu), ("GeluAndMul", F.gelu), ("GeluTanhAndMul", lambda x: F.gelu(x, approximate="tanh"))],
)
def test_activation_of_one_half(layer: str, act: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(5, 8)
    torch.testing.assert_close(getattr(layers, layer).forward(None, x), act(x[:, :4]) * x[:, 4:])


def test_linear() -> None:
    for bias in (True, False):
        linear, x = nn.Linear(4, 3, bias=bias), torch.randn(5, 4, requires_grad=True)
        assert_same(run(layers.Linear, linear, x), run(None, linear, x))


# ---- compiled ----


def _fresh(host: type[nn.Module]) -> type[nn.Module]:
    return type("Fresh", (host,), {})


@pytest.mark.parametrize("kind", ["norm", "rotary", "mlp"])
def test_compiles_whole_even_at_the_first_call(kind: str) -> None:
    """What the host is has to be found while the compiler traces."""
    host, layer, inputs = {
        "norm": lambda: (_fresh(CastThenScale)(), layers.RMSNorm, [torch.randn(4, 24)]),
        "rotary": lambda: (rotary(_half)(), layers.RotaryPosEmb, [torch.randn(1, 2, 4, 8), *torch.randn(3, 1, 4, 8)]),
        "mlp": lambda: (_fresh(_MLP)(nn.SiLU()), layers.GatedMLP, [torch.randn(4, 8)]),
    }[kind]()
    if kind == "rotary":
        inputs = [inputs[0], inputs[0].clone(), *inputs[1:3]]
    inputs[0].requires_grad_()
    with tigon.backend("torch"):
        torch._dynamo.reset()
        compiled = torch.compile(layer.forward, fullgraph=True, backend="aot_eager")
        bound = type("Bound", (), {"forward": staticmethod(lambda h, *a: compiled(h, *a))})
        assert_same(run(bound, host, *inputs), run(None, host, *inputs))
