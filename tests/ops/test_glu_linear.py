"""What the generic checks cannot say of `glu_linear`."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tigon
from tigon.ops.glu import ACTIVATIONS
from tigon.ops.glu_linear import glu_linear_reference

# Where the kernels are launched; as an attribute of `tigon.ops` either name is the function.
module = importlib.import_module("tigon.ops.glu")
operator = importlib.import_module("tigon.ops.glu_linear")

Inputs = tuple[Tensor, Tensor | None, Tensor, Tensor | None]


def apart(gate: Tensor, up: Tensor | None, weight: Tensor, *, bias: Tensor | None = None, **options: Any) -> Tensor:
    return F.linear(tigon.glu(gate, up, **options), weight, bias)


def draw(
    device: torch.device, *rows: int, width: int = 24, out: int = 16, packed: bool = False, bias: bool = True
) -> Inputs:
    gate = torch.randn(*rows, 2 * width if packed else width, device=device)
    up = None if packed else torch.randn(*rows, width, device=device)
    weight = torch.randn(out, width, device=device) / width**0.5
    return gate, up, weight, torch.randn(out, device=device) if bias else None


def run(
    function: Callable[..., Tensor],
    inputs: Inputs,
    wanted: tuple[int, ...] = (0, 1, 2, 3),
    upstream: Tensor | None = None,
    **options: Any,
) -> list[Tensor | None]:
    """The output, then the gradient of each input that has one, None for the others."""
    leaves = [None if t is None else t.detach().requires_grad_(i in wanted) for i, t in enumerate(inputs)]
    y = function(*leaves[:3], bias=leaves[3], **options)
    if y.requires_grad:
        y.sum().backward() if upstream is None else y.backward(upstream)
    return [y.detach(), *(None if t is None else t.grad for t in leaves)]


def is_same(left: list[Tensor | None], right: list[Tensor | None]) -> bool:
    return all(
        a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(left, right, strict=True)
    )


# ---- the bits of the two operators ----


def layouts(device: torch.device) -> Iterator[Any]:
    yield "matrices", draw(device, 10), {}
    yield "no bias", draw(device, 10, bias=False), {}
    yield "three axes", draw(device, 2, 5), {}
    yield "three axes, no bias", draw(device, 2, 5, bias=False), {}
    yield "four axes", draw(device, 2, 1, 5), {}
    yield "packed", draw(device, 2, 5, packed=True), {"gate_first": False}
    yield "interleaved", draw(device, 2, 5, packed=True), {"interleaved": True, "limit": 0.7, "up_offset": 1.0}
    _, _, weight, bias = draw(device, 2, 5)
    yield "halves", (*torch.randn(2, 5, 48, device=device).chunk(2, -1), weight, bias), {}
    transposed = torch.randn(24, 5, 2, device=device).transpose(0, 2)
    yield "transposed", (transposed, torch.randn(2, 24, 5, device=device).transpose(1, 2), weight, bias), {}
    expanded = torch.randn(1, 5, 24, device=device).expand(2, 5, 24)
    yield "expanded", (expanded, torch.randn(2, 1, 24, device=device).expand(2, 5, 24), weight, bias), {}
    columns = torch.randn(16, 48, device=device)[:, ::2]
    yield "strided weight", (*draw(device, 2, 5)[:2], columns, bias), {}


LAYOUTS = [name for name, *_ in layouts(torch.device("cpu"))]


@pytest.mark.parametrize("upstream", ["sum", "dense", "transposed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_bits_as_glu_and_linear(layout: str, upstream: str, device: torch.device) -> None:
    inputs, options = next((i, o) for name, i, o in layouts(device) if name == layout)
    shape = (*inputs[0].shape[:-1], inputs[2].shape[0])
    dense = torch.randn(shape, device=device)
    dy = {"sum": None, "dense": dense, "transposed": dense.transpose(0, -1).contiguous().transpose(0, -1)}[upstream]
    actual, expected = (run(f, inputs, upstream=dy, **options) for f in (tigon.glu_linear, apart))
    if upstream == "transposed" and inputs[3] is not None:
        # Of some shapes F.linear adds the bias by itself, whose gradient is then summed in the order of memory.
        torch.testing.assert_close(actual.pop(), expected.pop())
    assert is_same(actual, expected)
    assert actual[0].is_contiguous()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_product_is_the_same_again(activation: str, device: torch.device) -> None:
    """A rounding elsewhere in backward would show in dweight: with one row each product is an element of it."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    gate, up, weight, _ = (t.to(dtype) for t in draw(device, 1, width=4096, out=1))
    inputs = (4 * gate, up, weight, None)
    one = torch.ones(1, 1, device=device, dtype=dtype)
    actual = run(tigon.glu_linear, inputs, upstream=one, activation=activation)
    assert torch.equal(actual[3], tigon.glu(*inputs[:2], activation=activation))
    assert is_same(actual, run(apart, inputs, upstream=one, activation=activation))


def test_one_axis(device: torch.device) -> None:
    inputs = draw(device)
    for a, b in zip(run(tigon.glu_linear, inputs), run(apart, inputs), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("packed", [False, True])
def test_each_subset_of_gradients(packed: bool, launches: list[Any], device: torch.device) -> None:
    inputs = draw(device, 2, 5, packed=packed)
    dy = torch.randn(2, 5, 16, device=device)
    everything = run(tigon.glu_linear, inputs, upstream=dy)
    present = [i for i in range(4) if inputs[i] is not None]
    for size in range(len(present) + 1):
        for wanted in itertools.combinations(present, size):
            launches.clear()
            y, *gradients = run(tigon.glu_linear, inputs, wanted, dy)
            assert torch.equal(y, everything[0])
            assert [i for i in range(4) if gradients[i] is not None] == list(wanted)
            assert all(torch.equal(gradients[i], everything[1 + i]) for i in wanted)
            backward = [made for made in launches[1:] if made.name == "_glu_bwd_kernel"]
            # The product is made again only for dweight, and by forward's kernel where nothing else is to be done.
            assert len(backward) == (0 in wanted or 1 in wanted)
            assert all(made.constants["EMITS_PRODUCT"] == (2 in wanted) for made in backward)
            assert len(launches) == 1 + (bool(backward) or 2 in wanted)


def test_a_product_that_is_not_made_again_is_noticed(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    fill = operator.fill_bwd
    monkeypatch.setattr(operator, "fill_bwd", lambda *args, emits_product: fill(*args))
    inputs = draw(device, 2, 5)
    actual, expected = run(tigon.glu_linear, inputs), run(apart, inputs)
    assert [torch.equal(a, b) for a, b in zip(actual, expected, strict=True)] == [True, True, True, False, True]


# ---- memory ----


def saved_by(function: Callable[..., Tensor], inputs: Inputs, wanted: tuple[int, ...] = (0, 1, 2, 3)) -> list[Tensor]:
    leaves = [None if t is None else t.detach().requires_grad_(i in wanted) for i, t in enumerate(inputs)]
    found: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        function(*leaves[:3], bias=leaves[3])
    return found


def test_the_product_is_not_saved(device: torch.device) -> None:
    inputs = draw(device, 2, 5)
    saved = saved_by(tigon.glu_linear, inputs)
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in inputs[:3]]
    # This is how the product would show.
    known = {t.data_ptr() for t in inputs if t is not None}
    assert [tuple(t.shape) for t in saved_by(apart, inputs) if t.data_ptr() not in known] == [(10, 24)]


def test_the_saved_weight_is_the_parameter_itself(device: torch.device) -> None:
    """Sharding exchanges what a parameter holds; an alias would keep the whole weight, and read what was freed."""
    gate, up, weight, _ = draw(device, 10)
    y = tigon.glu_linear(gate, up.requires_grad_(), weight.requires_grad_())
    assert y.grad_fn.saved_tensors[2] is weight


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [((), []), ((3,), []), ((2,), [0, 1]), ((2, 3), [0, 1]), ((0,), [0, 1, 2]), ((1, 2), [0, 1, 2])],
)
def test_saved_is_what_is_needed(wanted: tuple[int, ...], expected: list[int], device: torch.device) -> None:
    inputs = draw(device, 2, 5)
    saved = saved_by(tigon.glu_linear, inputs, wanted)
    assert [t.data_ptr() for t in saved] == [inputs[i].data_ptr() for i in expected]


def test_compiled_saves_no_product(device: torch.device) -> None:
    torch._dynamo.reset()
    inputs = draw(device, 2, 5)
    compiled = torch.compile(tigon.glu_linear, fullgraph=True, backend="aot_eager")
    known = {t.data_ptr() for t in inputs if t is not None}
    assert all(t.data_ptr() in known for t in saved_by(compiled, inputs))


class Allocated(TorchDispatchMode):
    """Operators that give new memory of at least so many elements."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.names, self.kept = numel, [], []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            # The interpreter makes tensors of what it writes.
            is_new = isinstance(t, Tensor) and func.overloadpacket is not torch.ops.aten.set_
            if is_new and t.untyped_storage().data_ptr() not in given and t.numel() >= self.numel:
                self.names.append(func._schema.name.removeprefix("aten::"))
                # So that no address comes twice.
                self.kept.append(t)
        return result


@pytest.mark.parametrize(
    ("packed", "held", "expected"),
    [(False, False, ["mm"]), (True, False, ["mm"]), (False, True, ["mm", "new_empty"])],
)
def test_backward_allocates_one_tensor_of_the_size_of_the_product(
    packed: bool, held: bool, expected: list[str], device: torch.device
) -> None:
    leaves = [t.requires_grad_() for t in draw(device, 10, width=64, out=3, packed=packed) if t is not None]
    made = [leaf.clone() for leaf in leaves[:-2]]
    y = tigon.glu_linear(made[0], None if packed else made[1], leaves[-2], bias=leaves[-1])
    kept = made[0] if held else None
    made.clear()
    upstream = torch.randn_like(y)
    with Allocated(10 * 64) as allocated:
        gradients = torch.autograd.grad(y, leaves, upstream)
    assert allocated.names == expected
    del kept
    inputs = (*leaves[:-2], *[None] * packed, *leaves[-2:])
    expected_gradients = [g for g in run(apart, inputs, upstream=upstream)[1:] if g is not None]
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected_gradients, strict=True))


def test_gradients_take_the_place_of_inputs_that_only_the_graph_holds(device: torch.device) -> None:
    gate, up, weight, _ = draw(device, 10)
    leaves = [t.requires_grad_() for t in (gate, up, weight)]
    made, seen = [leaf.clone() for leaf in leaves[:2]], {}
    for i in range(2):
        made[i].register_hook(lambda g, i=i: seen.__setitem__(i, g.data_ptr()))
    places, before = [t.data_ptr() for t in made], weight.detach().clone()
    y = tigon.glu_linear(*made, weight)
    made.clear()
    gradients = torch.autograd.grad(y.sum(), leaves)
    assert [seen[0], seen[1]] == places
    assert is_same(list(gradients), run(apart, (gate, up, weight, None))[1:4])
    assert torch.equal(weight, before)


def test_upstream_and_inputs_stay(device: torch.device) -> None:
    """Above all where the gradient of the product could be taken for the upstream one: D = I and weight = 1."""
    gate, up, *_ = draw(device, 10)
    weight, dy = torch.eye(24, device=device), torch.randn(10, 24, device=device)
    before = [t.clone() for t in (gate, up, weight, dy)]
    run(tigon.glu_linear, (gate, up, weight, None), upstream=dy)
    assert all(torch.equal(a, b) for a, b in zip((gate, up, weight, dy), before, strict=True))


def test_a_kept_graph_gives_the_same_again(device: torch.device) -> None:
    leaves = [t.requires_grad_() for t in draw(device, 2, 5)]
    y = tigon.glu_linear(leaves[0] * 1, leaves[1] * 1, leaves[2], bias=leaves[3]).square().sum()
    first = torch.autograd.grad(y, leaves, retain_graph=True)
    assert is_same(list(first), list(torch.autograd.grad(y, leaves)))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_gradients(use_reentrant: bool, device: torch.device) -> None:
    inputs = draw(device, 2, 5)

    def layer(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return tigon.glu_linear(gate * 1, up * 1, weight, bias=bias)

    leaves = [t.requires_grad_() for t in inputs]
    y = torch.utils.checkpoint.checkpoint(layer, *leaves, use_reentrant=use_reentrant)
    y.sum().backward()
    assert is_same([leaf.grad for leaf in leaves], run(apart, inputs)[1:])


@pytest.mark.parametrize("bias", [False, True])
def test_the_output_may_be_written_to(bias: bool, device: torch.device) -> None:
    inputs = draw(device, 2, 5, bias=bias)
    actual = run(lambda *given, **options: tigon.glu_linear(*given, **options).mul_(1), inputs)
    assert is_same(actual, run(tigon.glu_linear, inputs))


@pytest.mark.parametrize("changed", [0, 2])
def test_a_changed_input_is_noticed(changed: int, device: torch.device) -> None:
    inputs = [t.requires_grad_() for t in draw(device, 10, bias=False) if t is not None]
    made = [t * 1 for t in inputs]
    y = tigon.glu_linear(*made)
    made[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- dtypes ----


def low(device: torch.device) -> torch.dtype:
    """A 16-bit dtype in which the kernels run there: the interpreter truncates bfloat16."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16


@pytest.mark.parametrize("bias", [False, True])
def test_16_bits(bias: bool, device: torch.device) -> None:
    inputs = tuple(t if t is None else t.to(low(device)) for t in draw(device, 2, 5, bias=bias))
    assert is_same(run(tigon.glu_linear, inputs), run(apart, inputs))


@pytest.mark.parametrize("gates", ["fp32", "same", "other", "mixed"])
def test_autocast_is_that_of_linear(gates: str, device: torch.device) -> None:
    """Whatever dtypes the gates have: the product is rounded to theirs and then to that of autocast."""
    # What is emitted must not be bfloat16 in the interpreter, and is not where the gates are float16.
    cast = torch.bfloat16 if gates == "other" else low(device)
    dtypes = {
        "fp32": (torch.float32, torch.float32),
        "same": (low(device), low(device)),
        "other": (torch.float16, torch.float16),
        "mixed": (torch.float32, low(device)),
    }[gates]
    gate, up, weight, bias = draw(device, 4, 8)
    inputs = (3 * gate.to(dtypes[0]), up.to(dtypes[1]), weight, bias)
    upstream = torch.randn(4, 8, 16, device=device).to(cast)
    with torch.autocast(device.type, cast):
        actual = run(tigon.glu_linear, inputs, upstream=upstream)
        expected = run(apart, inputs, upstream=upstream)
    assert actual[0].dtype == cast
    assert actual[3].dtype == actual[4].dtype == torch.float32
    assert is_same(actual, expected)


def test_autocast_remembers_no_weight_without_its_graph(device: torch.device) -> None:
    gate, up, weight, _ = draw(device, 10)
    weight.requires_grad_()
    with torch.autocast(device.type, low(device)):
        tigon.glu_linear(gate, up, weight)
        # The copy that autocast makes of a parameter serves all of its uses.
        (grad,) = torch.autograd.grad(F.linear(gate, weight).sum(), weight)
    assert grad.abs().max() > 0


def test_a_wider_up_makes_a_wider_product(device: torch.device) -> None:
    gate, up, weight, bias = draw(device, 10)
    inputs = (gate.to(low(device)), up, weight, bias)
    actual = run(tigon.glu_linear, inputs)
    assert [t.dtype for t in actual[:3]] == [torch.float32, low(device), torch.float32]
    assert is_same(actual, run(apart, inputs))


def test_float64_runs_on_the_reference(device: torch.device) -> None:
    gate, up, weight, bias = (t.double() for t in draw(device, 3))
    assert tigon.why_not(tigon.glu_linear, gate, up, weight) == ["float64 is computed by the reference"]
    assert torch.equal(tigon.glu_linear(gate, up, weight, bias=bias), glu_linear_reference(gate, up, weight, bias=bias))


# ---- compilers ----


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_with_dynamic_shapes(packed: bool, device: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(tigon.glu_linear, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows, width in (((3, 4), 10), ((5, 2), 18)):
            inputs = draw(device, *rows, width=width, packed=packed)
            assert is_same(run(compiled, inputs), run(tigon.glu_linear, inputs))


@pytest.mark.parametrize("wanted", [(2,), (0, 3), (1, 2)])
def test_compiled_subsets(wanted: tuple[int, ...], device: torch.device) -> None:
    torch._dynamo.reset()
    inputs = draw(device, 3, 4)
    compiled = torch.compile(tigon.glu_linear, fullgraph=True, backend="aot_eager")
    assert is_same(run(compiled, inputs, wanted), run(tigon.glu_linear, inputs, wanted))


def test_compiled_autocast(device: torch.device) -> None:
    torch._dynamo.reset()
    inputs = draw(device, 3, 4)
    compiled = torch.compile(tigon.glu_linear, fullgraph=True, backend="aot_eager")
    with torch.autocast(device.type, low(device)):
        assert is_same(run(compiled, inputs), run(tigon.glu_linear, inputs))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("emits", [False, True])
def test_the_registered_operator_says_what_it_writes(emits: bool, transposed: bool, device: torch.device) -> None:
    gate, up, *_ = draw(device, 10)
    dproduct = torch.randn(24, 10, device=device).t() if transposed else torch.randn(10, 24, device=device)
    options = True, True, emits, "silu", True, False, None, "gate", None, None, None
    before = dproduct.clone()
    torch.ops.tigon.glu_linear_bwd(dproduct, gate, up, *options)
    assert torch.equal(dproduct, tigon.glu(gate, up) if emits else before)
    torch.library.opcheck(torch.ops.tigon.glu_linear_bwd.default, (before, gate, up, *options))


# ---- errors ----


def _ones(*shape: int, **options: Any) -> Tensor:
    return torch.ones(shape, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: tigon.glu_linear(_ones(2, 4), _ones(2, 4), _ones(3, 5)),
            r"glu_linear: weight: expected shape \(3, 4\), got \(3, 5\)",
        ),
        (
            lambda: tigon.glu_linear(_ones(2, 4), None, _ones(3, 4)),
            r"glu_linear: weight: expected shape \(3, 2\), got \(3, 4\)",
        ),
        (
            lambda: tigon.glu_linear(_ones(2, 4), _ones(2, 4), _ones(4)),
            r"glu_linear: weight: expected two axes, got shape \(4,\)",
        ),
        (
            lambda: tigon.glu_linear(_ones(2, 4), _ones(2, 4), _ones(3, 4), bias=_ones(4)),
            r"glu_linear: bias: expected shape \(3,\), got \(4,\)",
        ),
        (
            lambda: tigon.glu_linear(_ones(2, 4), _ones(2, 4), _ones(3, 4, dtype=torch.bfloat16)),
            "glu_linear: weight: expected dtype torch.float32 of gate and up, got torch.bfloat16",
        ),
        (
            lambda: tigon.glu_linear(_ones(2, 4), _ones(2, 4), _ones(3, 4), bias=_ones(3, dtype=torch.float16)),
            "glu_linear: bias: expected dtype torch.float32 of gate and up, got torch.float16",
        ),
        (
            lambda: tigon.glu_linear(_ones(2, 4), _ones(2, 4), _ones(3, 4, device="meta")),
            "glu_linear: weight: expected device cpu, got meta",
        ),
        (
            lambda: tigon.glu_linear(_ones(2, 4), _ones(2, 4), _ones(3, 4), activation="swish"),
            "glu_linear: activation: expected one of 'silu', ",
        ),
        (
            lambda: tigon.glu_linear(_ones(2, 4), _ones(2, 3), _ones(3, 4)),
            r"glu_linear: up: expected shape \(2, 4\), got \(2, 3\)",
        ),
        (lambda: tigon.glu_linear(_ones(2, 3), None, _ones(3, 1)), "glu_linear: gate: expected an even last axis"),
        (
            lambda: tigon.glu_linear(_ones(2, 4), _ones(2, 4), _ones(3, 4), limit=-1.0),
            "glu_linear: limit: expected a positive number or None, got -1.0",
        ),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
