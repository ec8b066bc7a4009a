"""What the generic checks cannot say of `glu`, `swiglu` and `geglu`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

import tigon
from tigon.ops.glu import _MAX_COLS, ACTIVATIONS, _as_matrices, _blocks, glu_reference

# `tigon.ops.glu` as an attribute is the function.
module = importlib.import_module("tigon.ops.glu")


def _run(
    function: Callable[..., Tensor], *tensors: Tensor, upstream: Tensor | None = None, **options: Any
) -> tuple[Tensor, ...]:
    """The output, then the gradient of each of `tensors`; the gradient of the sum without an `upstream`."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = function(*leaves, **options)
    y.sum().backward() if upstream is None else y.backward(upstream)
    return y.detach(), *(t.grad for t in leaves)


def _assert_same(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("num_cols", [1, 3, 17, 127, 129, 1023, 1024, 1025, 46336, 65537, 131072])
def test_any_number_of_columns(num_cols: int, device: torch.device) -> None:
    gate, up, dy = (torch.randn(2, num_cols, device=device) for _ in range(3))
    expected = _run(glu_reference, gate, up, upstream=dy)
    packed = torch.cat([gate, up], -1)
    for actual in (
        _run(tigon.swiglu, gate, up, upstream=dy),
        (lambda y, d: (y, *d.chunk(2, -1)))(*_run(tigon.swiglu, packed, upstream=dy)),
    ):
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def _layouts(device: torch.device) -> Iterator[Any]:
    draw = lambda *shape: torch.randn(*shape, device=device)  # noqa: E731
    yield "chunk", draw(2, 5, 14).chunk(2, -1)
    yield "transposed", (draw(7, 5, 2).transpose(0, 2), draw(2, 7, 5).transpose(1, 2))
    yield "expanded rows", (draw(1, 5, 7).expand(2, 5, 7), draw(2, 1, 7).expand(2, 5, 7))
    yield "expanded columns", (draw(2, 5, 1).expand(2, 5, 7), draw(1, 1, 1).expand(2, 5, 7))
    yield "every second", (draw(2, 10, 7)[:, ::2], draw(2, 5, 14)[..., ::2])
    yield "one axis", (draw(7), draw(14)[::2])


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_any_strides_give_the_bits_of_the_contiguous_copy(name: str, device: torch.device) -> None:
    function = getattr(tigon, name)
    for layout, (gate, up) in _layouts(device):
        shape = gate.shape
        transposed = torch.randn(tuple(reversed(shape)), device=device).permute(*reversed(range(len(shape))))
        for upstream in (None, transposed):
            strided = _run(function, gate, up, upstream=upstream)
            dense = None if upstream is None else upstream.contiguous()
            _assert_same(strided, _run(function, gate.contiguous(), up.contiguous(), upstream=dense))
        assert strided[0].is_contiguous(), layout


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gate_first", [True, False])
def test_packed_equals_split(activation: str, gate_first: bool, device: torch.device) -> None:
    packed, dy = torch.randn(3, 4, 26, device=device), torch.randn(3, 4, 13, device=device)
    first, second = packed.chunk(2, -1)
    gate, up = (first, second) if gate_first else (second, first)
    y, dgate, dup = _run(tigon.glu, gate, up, upstream=dy, activation=activation)
    halves = (dgate, dup) if gate_first else (dup, dgate)
    actual = _run(tigon.glu, packed, upstream=dy, activation=activation, gate_first=gate_first)
    _assert_same(actual, (y, torch.cat(halves, -1)))


def test_packed_halves_are_read_and_written_in_place(launches: list[Any], device: torch.device) -> None:
    packed = torch.randn(3, 4, 32, device=device, requires_grad=True)
    tigon.swiglu(packed, gate_first=False).sum().backward()
    forward, backward = launches
    item = packed.element_size()
    assert [t.data_ptr() - packed.data_ptr() for t in forward.args[:2]] == [16 * item, 0]
    gate, up, _, dgate, dup = backward.args[:5]
    assert [t.data_ptr() - packed.data_ptr() for t in (gate, up)] == [16 * item, 0]
    assert dgate.data_ptr() - dup.data_ptr() == 16 * item
    assert packed.grad.is_contiguous()


def test_only_what_is_needed_is_computed(launches: list[Any], device: torch.device) -> None:
    gate, up = torch.randn(3, 7, device=device), torch.randn(3, 7, device=device)
    _, dgate, dup = _run(tigon.swiglu, gate, up)
    launches.clear()
    for wanted, expected in (((True, False), dgate), ((False, True), dup)):
        leaves = [t.clone().requires_grad_(w) for t, w in zip((gate, up), wanted, strict=True)]
        tigon.swiglu(*leaves).sum().backward()
        assert tuple(launches[-1].constants[key] for key in ("NEEDS_DGATE", "NEEDS_DUP")) == wanted
        assert [t.grad is not None for t in leaves] == list(wanted)
        assert torch.equal(next(t.grad for t in leaves if t.grad is not None), expected)
    launches.clear()
    with torch.no_grad():
        tigon.swiglu(gate.requires_grad_(), up)
    assert len(launches) == 1


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_forms_of_gelu_are_not_mixed_up(approximate: str, backend: str, device: torch.device) -> None:
    gate = torch.linspace(-6, 6, 500, device=device)[None]
    up = torch.ones_like(gate)
    other = "none" if approximate == "tanh" else "tanh"
    with tigon.backend(backend):
        y = tigon.geglu(gate, up, approximate=approximate)
    assert (y - F.gelu(gate, approximate=approximate)).abs().max() < 2e-6
    assert 4e-4 < (y - F.gelu(gate, approximate=other)).abs().max() < 5e-4


def test_defaults_are_silu_and_the_tanh_form(device: torch.device) -> None:
    gate, up = torch.randn(5, 9, device=device), torch.randn(5, 9, device=device)
    assert torch.equal(tigon.glu(gate, up), tigon.glu(gate, up, activation="silu"))
    assert torch.equal(tigon.swiglu(gate, up), tigon.glu(gate, up, activation="silu"))
    assert torch.equal(tigon.geglu(gate, up), tigon.glu(gate, up, activation="gelu_tanh"))
    assert torch.equal(tigon.geglu(gate, up, approximate="none"), tigon.glu(gate, up, activation="gelu"))


# ---- clamped kinds ----


def _model_forms() -> dict[str, tuple[Callable[..., Tensor], dict[str, Any]]]:
    """Forms found in models, as they are written there, and the options that express them."""
    up_limited = lambda up: up.clamp(-1.0, 1.0)  # noqa: E731

    def sloped(gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=1.0)
        return (up_limited(up) + 1) * (gate * torch.sigmoid(gate * 1.702))

    return {
        "gate": (lambda g, u: F.silu(g.clamp(max=1.0)) * up_limited(u), {"limit": 1.0}),
        "activation": (
            lambda g, u: F.silu(g).clamp(max=1.0) * up_limited(u),
            {"limit": 1.0, "limit_on": "activation"},
        ),
        "sloped": (sloped, {"limit": 1.0, "alpha": 1.702, "up_offset": 1.0}),
        "scaled": (lambda g, u: u * F.silu(g * 0.6), {"gate_scale": 0.6}),
        "no limit": (lambda g, u: F.silu(g) * u, {"limit": float("inf"), "limit_on": "activation"}),
    }


@pytest.mark.parametrize("form", _model_forms())
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_forms_of_models(form: str, backend: str, device: torch.device) -> None:
    """Values on both sides of every limit, and on it, where a gradient passes as it does through torch.clamp."""
    function, options = _model_forms()[form]
    edges = torch.tensor([-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 3.0], device=device)
    gate, up = (t.flatten()[None] for t in torch.meshgrid(edges, edges, indexing="ij"))
    upstream = torch.randn_like(gate)
    expected = _run(function, gate, up, upstream=upstream)
    with tigon.backend(backend):
        actual = _run(tigon.glu, gate, up, upstream=upstream, **options)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{"limit": 1.0}, {"limit": 1.0, "limit_on": "activation"}], ids=str)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_limits_let_nan_pass(options: dict[str, Any], backend: str, device: torch.device) -> None:
    nan = torch.tensor([[float("nan"), 1.0]], device=device)
    with tigon.backend(backend):
        assert tigon.glu(nan, nan.flip(-1), **options).isnan().all()


def test_options_that_change_nothing_are_left_out(launches: list[Any], device: torch.device) -> None:
    gate, up = torch.randn(3, 8, device=device), torch.randn(3, 8, device=device)
    _run(tigon.glu, gate, up, limit=float("inf"), alpha=1.0, gate_scale=1, up_offset=0)
    for made in launches:
        assert made.args[-4:] == (None, None, None, None)
        assert not made.constants["LIMITS_GATE"]
        assert not made.constants["INTERLEAVED"]


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("shape", [(3, 4, 26), (1, 2), (2, 4098), (0, 6)])
def test_interleaved_equals_split(shape: tuple[int, ...], gate_first: bool, device: torch.device) -> None:
    packed = torch.randn(shape, device=device)
    dy = torch.randn(*shape[:-1], shape[-1] // 2, device=device)
    first, second = packed[..., 0::2], packed[..., 1::2]
    gate, up = (first, second) if gate_first else (second, first)
    options = {"limit": 0.7, "up_offset": 1.0}
    y, dgate, dup = _run(tigon.glu, gate, up, upstream=dy, **options)
    pairs = torch.stack((dgate, dup) if gate_first else (dup, dgate), -1).flatten(-2)
    options |= {"interleaved": True, "gate_first": gate_first}
    _assert_same(_run(tigon.glu, packed, upstream=dy, **options), (y, pairs))
    strided = torch.randn(*shape[:-1], 2 * shape[-1], device=device)[..., : shape[-1]]
    strided.copy_(packed)
    _assert_same(_run(tigon.glu, strided, upstream=dy, **options), (y, pairs))


def test_interleaved_is_read_and_written_in_place(launches: list[Any], device: torch.device) -> None:
    packed = torch.randn(3, 4, 32, device=device, requires_grad=True)
    tigon.glu(packed, interleaved=True).sum().backward()
    forward, backward = launches
    assert forward.args[0].data_ptr() == backward.args[0].data_ptr() == packed.data_ptr()
    assert forward.args[1] is None
    assert backward.args[3].numel() == packed.numel()


@pytest.mark.parametrize(
    "options",
    [
        {"limit": 0.8},
        {"limit": 0.3, "limit_on": "activation"},
        {"limit": 0.8, "alpha": 1.702, "up_offset": 1.0},
        {"gate_scale": 0.6, "interleaved": True},
    ],
    ids=str,
)
def test_reference_gradient_of_clamped_kinds_is_exact(options: dict[str, Any]) -> None:
    packed = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: glu_reference(x, **options), [packed])


def test_clamped_kinds_compile(device: torch.device) -> None:
    torch._dynamo.reset()
    options = {"limit": 0.8, "alpha": 1.702, "up_offset": 1.0, "interleaved": True}
    compiled = torch.compile(tigon.glu, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((3, 4, 10), (5, 2, 18)):
        packed = torch.randn(shape, device=device)
        _assert_same(_run(compiled, packed, **options), _run(tigon.glu, packed, **options))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_saturated_gates_have_finite_gradients(activation: str, device: torch.device) -> None:
    gate = torch.tensor([[-1e4, -100.0, -50.0, 0.0, 50.0, 100.0, 1e4]], device=device)
    up = torch.full_like(gate, 2.0)
    for actual, expected in zip(
        _run(tigon.glu, gate, up, activation=activation),
        _run(glu_reference, gate.double(), up.double(), activation=activation),
        strict=True,
    ):
        assert actual.isfinite().all()
        # Below the tolerance fp64 is not exact either: 1 - sigmoid(50) is zero in it.
        torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_backend_rounds_once(dtype: torch.dtype) -> None:
    gate, up = torch.randn(40, 9).to(dtype), torch.randn(40, 9).to(dtype)
    with tigon.backend("torch"):
        y = tigon.swiglu(gate, up)
    assert torch.equal(y, (F.silu(gate.float()) * up.float()).to(dtype))
    # Rounding the activation first, as plain model code does, is another result.
    assert not torch.equal(y, F.silu(gate) * up)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_mixed_dtypes_promote(backend: str, device: torch.device) -> None:
    gate, up = torch.randn(3, 5, device=device, dtype=torch.float16), torch.randn(3, 5, device=device)
    with tigon.backend(backend):
        y, dgate, dup = _run(tigon.swiglu, gate, up)
    assert (y.dtype, dgate.dtype, dup.dtype) == (torch.float32, torch.float16, torch.float32)


def test_float64_runs_on_the_reference(device: torch.device) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, device=device)
    assert tigon.why_not(tigon.glu, x, x) == ["float64 is computed by the reference"]
    assert tigon.glu(x, x).dtype == torch.float64


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("packed", [False, True])
def test_reference_gradient_is_exact(activation: str, packed: bool) -> None:
    tensors = [torch.randn(2, 6, dtype=torch.float64, requires_grad=True) for _ in range(1 if packed else 2)]
    assert torch.autograd.gradcheck(lambda *t: glu_reference(*t, activation=activation), tensors)


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_with_dynamic_shapes(packed: bool, device: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(tigon.geglu, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for shape in ((3, 4, 10), (5, 2, 18)):
            tensors = [torch.randn(shape, device=device) for _ in range(1 if packed else 2)]
            _assert_same(_run(compiled, *tensors), _run(tigon.geglu, *tensors))


def test_contiguous_tensors_become_one_row() -> None:
    x = torch.empty(3, 4, 5)
    (row,), _, *size = _as_matrices(x)
    assert row is x
    assert size == [1, 60]
    (first, second), strides, *size = _as_matrices(*torch.empty(3, 4, 10).chunk(2, -1))
    assert size == [*first.shape] == [*second.shape] == [12, 5]
    assert strides == [10, 10]
    assert first.stride() == second.stride() == (10, 1)
    long = torch.empty(4, _MAX_COLS // 2, device="meta")
    assert _as_matrices(long)[1:] == ([long.stride(0)], *long.shape)


@pytest.mark.parametrize("num_cols", [0, 1, 5, 64, 1000, 1024, 14336, _MAX_COLS])
def test_tiles_hold_eight_elements_a_thread(num_cols: int) -> None:
    block_m, block_n = _blocks(num_cols)
    assert block_m * block_n == 8 * 4 * 32
    assert block_n == 1024 or block_n >= num_cols
    # Column numbers of the last tile, masked lanes included, are int32.
    assert -(-num_cols // block_n) * block_n < 2**31


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: tigon.glu(torch.ones(2, 3), torch.ones(2, 4)),
            r"glu: up: expected shape \(2, 3\), got \(2, 4\)",
        ),
        (lambda: tigon.swiglu(torch.ones(2, 3)), "swiglu: gate: expected an even last axis, as up is None"),
        (lambda: tigon.geglu(torch.ones(())), "geglu: gate: expected at least one axis, got a scalar"),
        (lambda: tigon.swiglu(torch.ones(2, 4, dtype=torch.int64)), "swiglu: gate: expected a floating-point"),
        (lambda: tigon.swiglu(torch.ones(4), [1.0]), "swiglu: up: expected a tensor, got list"),
        (lambda: tigon.glu(torch.ones(4), activation="swish"), "glu: activation: expected one of 'silu', "),
        (lambda: tigon.geglu(torch.ones(4), approximate="erf"), "geglu: approximate: expected one of 'tanh', "),
        (
            lambda: tigon.glu(torch.ones(4), torch.ones(4), gate_first=False),
            "glu: gate_first: expected True when up is given, got False",
        ),
        (
            lambda: tigon.glu(torch.ones(4), torch.ones(4), interleaved=True),
            "glu: interleaved: expected False when up is given, got True",
        ),
        (lambda: tigon.glu(torch.ones(4), limit=0.0), "glu: limit: expected a positive number or None, got 0.0"),
        (lambda: tigon.glu(torch.ones(4), alpha=0.0), "glu: alpha: expected a positive number, got 0.0"),
        (lambda: tigon.glu(torch.ones(4), limit_on="up"), "glu: limit_on: expected one of 'gate', 'activation'"),
        (
            lambda: tigon.glu(torch.ones(4), torch.ones(4, device="meta")),
            "glu: up: expected device cpu, got meta",
        ),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# ---- gradients over the inputs ----


def _owned(device: torch.device, count: int = 2) -> tuple[list[Tensor], list[Tensor]]:
    """Leaves, and tensors made from them that a graph alone holds once the caller lets go."""
    leaves = [torch.randn(3, 40, device=device, requires_grad=True) for _ in range(count)]
    return leaves, [leaf.clone() for leaf in leaves]


def _expected(leaves: list[Tensor], **options: Any) -> list[Tensor]:
    return list(torch.autograd.grad(glu_reference(*leaves, **options).sum(), leaves))


def _places(tensors: list[Tensor], seen: dict[int, int]) -> list[int]:
    """Where each tensor lies; `seen` is filled with where its gradient lies."""
    for index, t in enumerate(tensors):
        t.register_hook(lambda g, i=index: seen.__setitem__(i, g.data_ptr()))
    return [t.data_ptr() for t in tensors]


def test_gradients_take_the_place_of_inputs_that_only_the_graph_holds(device: torch.device) -> None:
    leaves, made = _owned(device)
    seen: dict[int, int] = {}
    places = _places(made, seen)
    y = tigon.swiglu(*made)
    made.clear()
    actual = torch.autograd.grad(y.sum(), leaves)
    assert [seen[i] for i in range(2)] == places
    torch.testing.assert_close(list(actual), _expected(leaves))


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_packed_gradient_takes_the_place_of_its_input(interleaved: bool, device: torch.device) -> None:
    leaves, made = _owned(device, 1)
    seen: dict[int, int] = {}
    places = _places(made, seen)
    y = tigon.glu(made.pop(), interleaved=interleaved)
    actual = torch.autograd.grad(y.sum(), leaves)
    assert [seen[0]] == places
    torch.testing.assert_close(list(actual), _expected(leaves, interleaved=interleaved))


@pytest.mark.parametrize(
    "hold",
    [
        lambda gate: gate,
        lambda gate: gate.detach(),
        lambda gate: gate[1:],
        lambda gate: torch.sigmoid(gate) * gate,
    ],
    ids=["itself", "detached", "view", "saved input"],
)
def test_what_somebody_else_holds_stays(hold: Callable[[Tensor], Any], device: torch.device) -> None:
    leaves, made = _owned(device)
    held, kept = hold(made[0]), made[0].detach().clone()
    seen: dict[int, int] = {}
    places = _places(made, seen)
    y = tigon.swiglu(*made)
    made.clear()
    gradient = torch.autograd.grad(y.sum(), leaves)
    assert seen[0] != places[0]
    assert seen[1] == places[1]
    torch.testing.assert_close(list(gradient), _expected(leaves))
    assert torch.equal(held, hold(kept))
    if held.grad_fn is not None:
        # Its own gradient still finds what it saved.
        again = torch.autograd.grad(held.sum(), leaves[0])
        torch.testing.assert_close(again, torch.autograd.grad(hold(leaves[0]).sum(), leaves[0]))


def test_what_its_maker_saved_stays(device: torch.device) -> None:
    leaves, _ = _owned(device)
    y = tigon.swiglu(leaves[0].exp(), leaves[1].clone())
    expected = torch.autograd.grad(glu_reference(leaves[0].exp(), leaves[1]).sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), leaves), expected)


def test_a_kept_graph_keeps_the_inputs(device: torch.device) -> None:
    leaves, made = _owned(device)
    y = tigon.swiglu(*made).sum()
    made.clear()
    first = torch.autograd.grad(y, leaves, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(y, leaves), strict=True))


def test_packed_by_a_hook_is_not_written(device: torch.device) -> None:
    leaves, made = _owned(device)
    packed: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = tigon.swiglu(*made)
    made.clear()
    kept = [t.detach().clone() for t in packed]
    torch.testing.assert_close(list(torch.autograd.grad(y.sum(), leaves)), _expected(leaves))
    assert len(packed) == 2
    assert all(torch.equal(a, b) for a, b in zip(packed, kept, strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_gradients(use_reentrant: bool, device: torch.device) -> None:
    leaves, _ = _owned(device)
    y = torch.utils.checkpoint.checkpoint(lambda a, b: tigon.swiglu(a * 1, b * 1), *leaves, use_reentrant=use_reentrant)
    y.sum().backward()
    torch.testing.assert_close([leaf.grad for leaf in leaves], _expected(leaves))


def test_one_tensor_as_both(device: torch.device) -> None:
    leaves, made = _owned(device, 1)
    y = tigon.swiglu(made[0], made[0])
    made.clear()
    expected = torch.autograd.grad(glu_reference(leaves[0], leaves[0]).sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), leaves), expected)


def test_an_expanded_tensor(device: torch.device) -> None:
    leaves, made = _owned(device)
    y = tigon.swiglu(made[0][:1].clone().expand(3, 40), made.pop())
    made.clear()
    expected = torch.autograd.grad(glu_reference(leaves[0][:1].expand(3, 40), leaves[1]).sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), leaves), expected)


def test_halves_of_one_tensor(device: torch.device) -> None:
    leaves, made = _owned(device, 1)
    y = tigon.swiglu(*made.pop().chunk(2, -1))
    torch.testing.assert_close(list(torch.autograd.grad(y.sum(), leaves)), _expected(leaves))


def test_a_changed_input_is_still_noticed(device: torch.device) -> None:
    _, made = _owned(device)
    y = tigon.swiglu(*made)
    made[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_is_taken_out_of_the_graph_stays(device: torch.device) -> None:
    leaves, made = _owned(device)
    y = tigon.swiglu(*made)
    made.clear()
    seen = y.grad_fn.saved_tensors[0]  # type: ignore[union-attr]
    kept = seen.clone()
    torch.testing.assert_close(list(torch.autograd.grad(y.sum(), leaves)), _expected(leaves))
    assert torch.equal(seen, kept)


def test_what_a_later_hook_packs_stays(device: torch.device) -> None:
    leaves, made = _owned(device)
    y = tigon.swiglu(*made)
    made.clear()
    packed: list[Tensor] = []
    y.grad_fn._raw_saved_tensors[0].register_hooks(lambda t: packed.append(t) or t, lambda t: t)  # type: ignore[union-attr, func-returns-value]
    kept = packed[0].clone()
    torch.testing.assert_close(list(torch.autograd.grad(y.sum(), leaves)), _expected(leaves))
    assert torch.equal(packed[0], kept)


@pytest.mark.parametrize("share", ["dlpack", "shared"])
def test_memory_that_is_not_torchs_alone_stays(share: str) -> None:
    leaves = [torch.randn(3, 40, requires_grad=True) for _ in range(2)]
    own = leaves[0].detach().clone()
    memory = own.share_memory_() if share == "shared" else own.numpy()

    class Lent(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return memory.view(3, 40) if share == "shared" else torch.from_dlpack(memory)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            return dy

    kept = leaves[0].detach().clone()
    y = tigon.swiglu(Lent.apply(leaves[0]), leaves[1].clone())
    torch.testing.assert_close(list(torch.autograd.grad(y.sum(), leaves)), _expected(leaves))
    assert torch.equal(torch.as_tensor(memory).view(3, 40), kept)


@pytest.mark.parametrize("holds", [False, True])
def test_a_backward_that_failed_is_right_or_refused(holds: bool, device: torch.device) -> None:
    leaves, made = _owned(device)
    y = tigon.swiglu(*made)
    if not holds:
        made.clear()
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ArithmeticError("once")

    y.grad_fn.register_hook(fail)  # type: ignore[union-attr]
    with pytest.raises(ArithmeticError):
        torch.autograd.grad(y.sum(), leaves)
    if holds:
        torch.testing.assert_close(list(torch.autograd.grad(y.sum(), leaves)), _expected(leaves))
    else:
        with pytest.raises(RuntimeError, match="a backward that raised is repeated"):
            torch.autograd.grad(y.sum(), leaves)
