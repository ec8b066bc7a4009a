"""What the generic checks cannot say of `rms_norm_glu`."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from tests.ops.gated_mlp import (
    Alive,
    apart_glu,
    assert_same,
    draw,
    leaves_of,
    low,
    new_shapes,
    present,
    run,
    saved_by,
)
from torch import Tensor

import tigon
from tigon.ops.rms_norm_glu import rms_norm_glu_reference

# As an attribute of `tigon.ops` the name is the function.
operator = importlib.import_module("tigon.ops.rms_norm_glu")


def layouts(device: torch.device) -> Iterator[Any]:
    yield "matrices", draw(device, 10), {}
    yield "no bias", draw(device, 10, bias=False), {}
    yield "three axes", draw(device, 2, 5), {}
    yield "three axes, no bias", draw(device, 2, 5, bias=False), {}
    yield "packed", draw(device, 2, 5, packed=True), {"gate_first": False}
    yield "interleaved", draw(device, 2, 5, packed=True), {"interleaved": True, "limit": 0.7, "up_offset": 1.0}
    yield "weightless", draw(device, 2, 5, weightless=True), {"eps": 1e-3}
    yield "offset", draw(device, 2, 5), {"offset": 1.0, "cast": "none"}
    yield "activation", draw(device, 2, 5), {"activation": "gelu", "alpha": 1.5, "gate_scale": 0.5}
    inputs = draw(device, 5, 2)
    yield "transposed", {**inputs, "x": inputs["x"].transpose(0, 1)}, {}
    yield "expanded", {**inputs, "x": torch.randn(1, 2, 16, device=device).expand(5, 2, 16)}, {}
    yield "strided weight", {**inputs, "gate_weight": torch.randn(24, 32, device=device)[:, ::2]}, {}
    yield "strided norm", {**inputs, "norm_weight": torch.randn(32, device=device)[::2]}, {}


LAYOUTS = [name for name, *_ in layouts(torch.device("cpu"))]


@pytest.mark.parametrize("upstream", ["sum", "dense", "transposed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_as_norm_projections_and_product(layout: str, upstream: str, device: torch.device) -> None:
    inputs, options = next((i, o) for name, i, o in layouts(device) if name == layout)
    dense = torch.randn(*inputs["x"].shape[:-1], 24, device=device)
    dy = {"sum": None, "dense": dense, "transposed": dense.transpose(0, -1).contiguous().transpose(0, -1)}[upstream]
    actual, expected = (run(f, inputs, upstream=dy, **options) for f in (tigon.rms_norm_glu, apart_glu))
    # Of one packed weight there is one product, which needs no sum.
    assert_same(actual, expected, *([()] if inputs["up_weight"] is None else []))
    assert actual["y"].is_contiguous()


def test_one_axis(device: torch.device) -> None:
    inputs = draw(device)
    actual, expected = run(tigon.rms_norm_glu, inputs), run(apart_glu, inputs)
    assert actual["y"].shape == (24,)
    assert_same(actual, expected, rounded=list(actual))


@pytest.mark.parametrize("packed", [False, True])
def test_each_subset_of_gradients(packed: bool, device: torch.device) -> None:
    inputs = draw(device, 2, 5, packed=packed)
    dy = torch.randn(2, 5, 24, device=device)
    everything = run(tigon.rms_norm_glu, inputs, upstream=dy)
    names = present(inputs)
    for size in range(len(names) + 1):
        for wanted in itertools.combinations(names, size):
            found = run(tigon.rms_norm_glu, inputs, wanted, dy)
            assert_same(found, {k: v if k in ("y", *wanted) else None for k, v in everything.items()}, rounded=())


@pytest.mark.parametrize(
    ("wanted", "products"),
    [(("gate_bias", "up_bias"), 0), (("up_weight",), 1), (("x",), 2), (("norm_weight", "gate_weight"), 3)],
)
def test_backward_multiplies_only_what_is_needed(wanted: tuple[str, ...], products: int, device: torch.device) -> None:
    y = tigon.rms_norm_glu(**leaves_of(draw(device, 10), wanted))
    with Alive() as alive:
        y.sum().backward()
    assert len(alive.at_products) == products


# ---- memory ----


def test_norm_and_product_are_not_saved(device: torch.device) -> None:
    inputs = draw(device, 2, 5)
    saved = saved_by(tigon.rms_norm_glu, inputs)
    assert new_shapes(saved, inputs) == [(2, 5, 1), (10, 24), (10, 24)]
    expected = sum(inputs[k].nbytes for k in ("x", "norm_weight", "gate_weight", "up_weight"))
    assert sum(t.nbytes for t in saved) == expected + 4 * (10 + 2 * 10 * 24)
    # This is how the norm would show.
    assert (10, 16) in new_shapes(saved_by(apart_glu, inputs), inputs)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ((), []),
        (("gate_bias",), []),
        (("up_weight",), ["x", "norm_weight"]),
        (("x",), ["x", "norm_weight", "gate_weight", "up_weight"]),
        (("norm_weight", "up_bias"), ["x", "norm_weight", "gate_weight", "up_weight"]),
    ],
)
def test_saved_is_what_is_needed(wanted: tuple[str, ...], expected: list[str], device: torch.device) -> None:
    inputs = draw(device, 10)
    pointers = {t.data_ptr(): k for k, t in inputs.items()}
    saved = saved_by(tigon.rms_norm_glu, inputs, wanted)
    assert [pointers[t.data_ptr()] for t in saved if t.data_ptr() in pointers] == expected
    assert new_shapes(saved, inputs) == [(10, 1)] * bool(expected) + [(10, 24)] * 2 * bool(wanted)


def test_the_saved_weights_are_the_parameters_themselves(device: torch.device) -> None:
    """Sharding exchanges what a parameter holds; an alias would keep the whole weight, and read what was freed."""
    leaves = leaves_of(draw(device, 10))
    saved = tigon.rms_norm_glu(**leaves).grad_fn.saved_tensors
    assert all(any(t is leaves[k] for t in saved) for k in ("norm_weight", "gate_weight", "up_weight"))


def test_compiled_saves_no_more(device: torch.device) -> None:
    torch._dynamo.reset()
    inputs = draw(device, 2, 5)
    compiled = torch.compile(tigon.rms_norm_glu, fullgraph=True, backend="aot_eager")
    assert new_shapes(saved_by(compiled, inputs), inputs) == [(2, 5, 1), (10, 24), (10, 24)]


def test_upstream_stays(device: torch.device) -> None:
    inputs, dy = draw(device, 10), torch.randn(10, 24, device=device)
    before = dy.clone()
    run(tigon.rms_norm_glu, inputs, upstream=dy)
    assert torch.equal(dy, before)


def test_a_kept_graph_gives_the_same_again(device: torch.device) -> None:
    given = leaves_of(draw(device, 2, 5))
    leaves = list(given.values())
    y = tigon.rms_norm_glu(**given).square().sum()
    first = torch.autograd.grad(y, leaves, retain_graph=True)
    again = torch.autograd.grad(y, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, leaves)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_gradients(use_reentrant: bool, device: torch.device) -> None:
    inputs = draw(device, 2, 5)
    leaves = leaves_of(inputs)

    def layer(*given: Tensor) -> Tensor:
        return tigon.rms_norm_glu(**dict(zip(leaves, given, strict=True)))

    torch.utils.checkpoint.checkpoint(layer, *leaves.values(), use_reentrant=use_reentrant).sum().backward()
    expected = run(tigon.rms_norm_glu, inputs)
    assert all(torch.equal(t.grad, expected[k]) for k, t in leaves.items())


def test_the_output_may_be_written_to(device: torch.device) -> None:
    inputs = draw(device, 2, 5)
    expected = run(tigon.rms_norm_glu, inputs)
    assert_same(run(lambda **given: tigon.rms_norm_glu(**given).mul_(1), inputs), expected, rounded=())


@pytest.mark.parametrize("changed", ["x", "norm_weight", "gate_weight"])
def test_a_changed_input_is_noticed(changed: str, device: torch.device) -> None:
    made = {k: t * 1 for k, t in leaves_of(draw(device, 10)).items()}
    y = tigon.rms_norm_glu(**made)
    made[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- dtypes ----


@pytest.mark.parametrize("packed", [False, True])
def test_16_bits(packed: bool, device: torch.device) -> None:
    inputs = {k: t if t is None else t.to(low(device)) for k, t in draw(device, 2, 5, packed=packed).items()}
    actual, expected = run(tigon.rms_norm_glu, inputs), run(apart_glu, inputs)
    assert_same(actual, expected, *([()] if packed else []))


def test_float16_does_not_overflow_where_the_norm_does_not(device: torch.device) -> None:
    inputs = {k: t if t is None else t.half() for k, t in draw(device, 8).items()}
    inputs["x"] = 2000 * inputs["x"]
    # Without the norm first, the scaled input would be infinite.
    assert (30 * inputs["norm_weight"] * inputs["x"]).isinf().any()
    actual, expected = run(tigon.rms_norm_glu, inputs), run(apart_glu, inputs)
    assert all(t.isfinite().all() for t in actual.values())
    assert_same(actual, expected)


@pytest.mark.parametrize("x_is_low", [False, True])
def test_autocast_is_that_of_linear(x_is_low: bool, device: torch.device) -> None:
    inputs = draw(device, 4, 8)
    if x_is_low:
        inputs["x"] = inputs["x"].to(low(device))
    with torch.autocast(device.type, low(device)):
        actual, expected = run(tigon.rms_norm_glu, inputs), run(apart_glu, inputs)
    assert actual["y"].dtype == low(device)
    assert actual["gate_weight"].dtype == actual["norm_weight"].dtype == torch.float32
    assert_same(actual, expected)


def test_a_wider_norm_weight_widens_what_follows(device: torch.device) -> None:
    inputs = draw(device, 10)
    inputs["x"] = inputs["x"].to(low(device))
    actual = run(tigon.rms_norm_glu, inputs)
    assert [actual[k].dtype for k in ("y", "x", "gate_weight")] == [torch.float32, low(device), torch.float32]
    assert_same(actual, run(apart_glu, inputs))


def test_float64_runs_on_the_reference(device: torch.device) -> None:
    inputs = {k: t.double() for k, t in draw(device, 3).items()}
    assert tigon.why_not(tigon.rms_norm_glu, **inputs) == ["float64 is computed by the reference"]
    assert torch.equal(tigon.rms_norm_glu(**inputs), rms_norm_glu_reference(**inputs))


# ---- compilers ----


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_with_dynamic_shapes(packed: bool, device: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(tigon.rms_norm_glu, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows, width in (((3, 4), 10), ((5, 2), 18)):
            inputs = draw(device, *rows, width=width, packed=packed)
            assert_same(run(compiled, inputs), run(tigon.rms_norm_glu, inputs), rounded=())


@pytest.mark.parametrize("wanted", [("gate_bias",), ("x", "up_bias"), ("norm_weight", "up_weight")])
def test_compiled_subsets(wanted: tuple[str, ...], device: torch.device) -> None:
    torch._dynamo.reset()
    inputs = draw(device, 3, 4)
    compiled = torch.compile(tigon.rms_norm_glu, fullgraph=True, backend="aot_eager")
    assert_same(run(compiled, inputs, wanted), run(tigon.rms_norm_glu, inputs, wanted), rounded=())


def test_compiled_autocast(device: torch.device) -> None:
    torch._dynamo.reset()
    inputs = draw(device, 3, 4)
    compiled = torch.compile(tigon.rms_norm_glu, fullgraph=True, backend="aot_eager")
    with torch.autocast(device.type, low(device)):
        assert_same(run(compiled, inputs), run(tigon.rms_norm_glu, inputs), rounded=())


# ---- the function behind which a kernel may stand ----


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("needs_product", [False, True])
def test_project_gives_what_is_asked_for(saves: bool, needs_product: bool, device: torch.device) -> None:
    inputs = draw(device, 2, 5)
    x, weights = inputs["x"], [inputs[k] for k in ("norm_weight", "gate_weight", "gate_bias", "up_weight", "up_bias")]
    options = "silu", True, False, None, "gate", None, None, None
    made = operator.project(
        x, None, *weights, x.dtype, 1e-6, 0.0, "cast_then_scale", *options, saves=saves, needs_product=needs_product
    )
    assert [t is not None for t in made] == [needs_product, True, saves, saves]
    if needs_product:
        assert torch.equal(made.product, tigon.rms_norm_glu(**inputs).view(10, 24))
    if saves:
        assert torch.equal(tigon.glu(made.gate, made.up), tigon.rms_norm_glu(**inputs).view(10, 24))


# ---- errors ----


def _call(**changed: Any) -> Callable[[], Tensor]:
    def call() -> Tensor:
        ones = torch.ones
        given = {"x": ones(2, 4), "norm_weight": ones(4), "gate_weight": ones(6, 4), "up_weight": ones(6, 4), **changed}
        return tigon.rms_norm_glu(**given)

    return call


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"norm_weight": torch.ones(3)}, r"norm_weight: expected shape \(4,\), got \(3,\)"),
        ({"norm_weight": None, "offset": 1.0}, "offset: expected 0 without a weight, got 1.0"),
        ({"norm_weight": None, "cast": "cast_to_weight"}, "norm_weight: expected a tensor for this cast, got None"),
        ({"cast": "late"}, "cast: expected one of 'cast_then_scale', "),
        ({"x": torch.tensor(1.0)}, "x: expected at least one axis, got a scalar"),
        ({"x": torch.ones(2, 4, dtype=torch.int64)}, "x: expected a floating-point dtype, got torch.int64"),
        ({"gate_weight": torch.ones(6)}, r"gate_weight: expected two axes, got shape \(6,\)"),
        ({"gate_weight": torch.ones(6, 5)}, r"gate_weight: expected 4 columns, got shape \(6, 5\)"),
        ({"up_weight": torch.ones(5, 4)}, r"up_weight: expected shape \(6, 4\), got \(5, 4\)"),
        ({"gate_bias": torch.ones(5)}, r"gate_bias: expected shape \(6,\), got \(5,\)"),
        ({"up_bias": torch.ones(5)}, r"up_bias: expected shape \(6,\), got \(5,\)"),
        ({"gate_weight": torch.ones(5, 4), "up_weight": None}, "gate_weight: expected an even first axis"),
        ({"up_weight": None, "up_bias": torch.ones(6)}, "up_bias: expected None, as up_weight is None, got a tensor"),
        ({"gate_first": False}, "gate_first: expected True when up_weight is given, got False"),
        ({"interleaved": True}, "interleaved: expected False when up_weight is given, got True"),
        ({"activation": "swish"}, "activation: expected one of 'silu', "),
        ({"limit": 0.0}, "limit: expected a positive number or None, got 0.0"),
        (
            {"gate_weight": torch.ones(6, 4).half()},
            "gate_weight: expected dtype torch.float32 of the norm, got torch.float16",
        ),
        ({"up_weight": torch.ones(6, 4).half()}, "up_weight: expected dtype torch.float32 of the norm"),
        ({"up_bias": torch.ones(6).half()}, "up_bias: expected dtype torch.float32 of the norm, got torch.float16"),
        ({"up_weight": torch.ones(6, 4, device="meta")}, "up_weight: expected device cpu, got meta"),
    ],
)
def test_wrong_arguments_are_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"rms_norm_glu: {message}"):
        _call(**changed)()
