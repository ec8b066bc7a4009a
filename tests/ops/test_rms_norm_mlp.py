"""What the generic checks cannot say of `rms_norm_mlp`; what it shares with `rms_norm_glu` is tested there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from tests.ops.gated_mlp import (
    Alive,
    Inputs,
    apart_mlp,
    assert_same,
    draw,
    leaves_of,
    low,
    new_shapes,
    run,
    saved_by,
)
from torch import Tensor

import tigon
from tigon.ops.rms_norm_mlp import rms_norm_mlp_reference

PARAMETERS = ("norm_weight", "gate_weight", "up_weight", "down_weight")


def inputs_of(device: torch.device, *rows: int, **options: Any) -> Inputs:
    return draw(device, *rows, down=True, **options)


# ---- the same as separate operators ----


def layouts(device: torch.device) -> Iterator[Any]:
    yield "matrices", inputs_of(device, 10), {}
    yield "no bias", inputs_of(device, 10, bias=False), {}
    yield "three axes", inputs_of(device, 2, 5), {}
    yield "four axes", inputs_of(device, 2, 1, 5, bias=False), {}
    yield "packed", inputs_of(device, 2, 5, packed=True), {"gate_first": False}
    yield "interleaved", inputs_of(device, 2, 5, packed=True), {"interleaved": True, "limit": 0.7, "up_offset": 1.0}
    yield "weightless", inputs_of(device, 2, 5, weightless=True), {"eps": 1e-3}
    yield "offset", inputs_of(device, 2, 5), {"offset": 1.0, "cast": "none"}
    inputs = inputs_of(device, 5, 2)
    yield "transposed", {**inputs, "x": inputs["x"].transpose(0, 1)}, {}
    yield "expanded", {**inputs, "x": torch.randn(1, 2, 16, device=device).expand(5, 2, 16)}, {}
    yield "strided weight", {**inputs, "down_weight": torch.randn(16, 48, device=device)[:, ::2]}, {}


LAYOUTS = [name for name, *_ in layouts(torch.device("cpu"))]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_as_separate_operators(layout: str, residual: bool, recompute: bool, device: torch.device) -> None:
    inputs, options = next((i, o) for name, i, o in layouts(device) if name == layout)
    options = {**options, "residual": residual, "recompute": recompute}
    for upstream in (None, torch.randn(inputs["x"].shape, device=device)):
        actual, expected = (run(f, inputs, upstream=upstream, **options) for f in (tigon.rms_norm_mlp, apart_mlp))
        assert_same(actual, expected)
        assert actual["y"].is_contiguous()


def test_one_axis(device: torch.device) -> None:
    inputs = inputs_of(device)
    actual, expected = (run(f, inputs, residual=True) for f in (tigon.rms_norm_mlp, apart_mlp))
    assert_same(actual, expected, rounded=list(actual))


@pytest.mark.parametrize("options", [{}, {"residual": True, "recompute": True}], ids=["plain", "residual_recompute"])
def test_each_subset_of_gradients(options: dict[str, bool], device: torch.device) -> None:
    inputs = inputs_of(device, 2, 5)
    dy = torch.randn(2, 5, 16, device=device)
    everything = run(tigon.rms_norm_mlp, inputs, upstream=dy, **options)
    # What one gradient owes to another shows in pairs, and in all but one.
    for size in (0, 1, 2, len(inputs) - 1):
        for wanted in itertools.combinations(inputs, size):
            found = run(tigon.rms_norm_mlp, inputs, wanted, dy, **options)
            assert_same(found, {k: v if k in ("y", *wanted) else None for k, v in everything.items()}, rounded=())


@pytest.mark.parametrize(
    ("wanted", "products", "again"),
    [
        (("down_bias",), 0, 0),
        (("down_weight",), 1, 2),
        (("gate_bias", "up_bias"), 1, 2),
        (("up_weight",), 2, 2),
        (("x",), 3, 2),
        (("x", "norm_weight", "gate_weight", "up_weight", "down_weight"), 6, 2),
    ],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_backward_multiplies_only_what_is_needed(
    recompute: bool, wanted: tuple[str, ...], products: int, again: int, device: torch.device
) -> None:
    y = tigon.rms_norm_mlp(**leaves_of(inputs_of(device, 10), wanted), recompute=recompute)
    with Alive() as alive:
        y.sum().backward()
    assert len(alive.at_products) == products + again * recompute


def test_a_training_loop_gives_the_same_losses(device: torch.device) -> None:
    inputs = inputs_of(device, 32, bias=False)
    x, target = inputs.pop("x"), torch.randn(32, 16, device=device)

    def losses(function: Callable[..., Tensor], **options: Any) -> list[float]:
        parameters = {k: t.clone().requires_grad_() for k, t in inputs.items() if t is not None}
        optimizer = torch.optim.SGD(parameters.values(), lr=0.2)
        found = []
        for _ in range(8):
            loss = (function(x, up_bias=None, **parameters, residual=True, **options) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    expected = losses(apart_mlp)
    assert expected[-1] < 0.8 * expected[0]
    for options in ({}, {"recompute": True}):
        # Roundings of eight steps add up.
        assert losses(tigon.rms_norm_mlp, **options) == pytest.approx(expected, rel=1e-5)


# ---- memory ----


def test_norm_and_product_are_not_saved(device: torch.device) -> None:
    inputs = inputs_of(device, 2, 5)
    saved = saved_by(tigon.rms_norm_mlp, inputs, residual=True)
    assert new_shapes(saved, inputs) == [(2, 5, 1), (10, 24), (10, 24)]
    expected = sum(inputs[k].nbytes for k in ("x", *PARAMETERS))
    assert sum(t.nbytes for t in saved) == expected + 4 * (10 + 2 * 10 * 24)
    # This is how norm and product would show, besides gate and up.
    shapes = new_shapes(saved_by(apart_mlp, inputs, residual=True), inputs)
    assert (10, 16) in shapes
    assert sum(math.prod(s) == 240 for s in shapes) > 2


def test_recompute_saves_rstd_alone(device: torch.device) -> None:
    inputs = inputs_of(device, 2, 5)
    saved = saved_by(tigon.rms_norm_mlp, inputs, recompute=True)
    assert new_shapes(saved, inputs) == [(2, 5, 1)]
    expected = ["x", "norm_weight", "gate_weight", "up_weight", "gate_bias", "up_bias", "down_weight"]
    assert {t.data_ptr() for t in saved} - {inputs[k].data_ptr() for k in expected} == {
        t.data_ptr() for t in saved if t.shape == (2, 5, 1)
    }


@pytest.mark.parametrize(
    ("wanted", "expected", "halves"),
    [
        ((), [], 0),
        (("down_bias",), [], 0),
        (("down_weight",), [], 2),
        (("gate_bias",), ["down_weight"], 2),
        (("up_weight",), ["x", "norm_weight", "down_weight"], 2),
        (("x",), ["x", *PARAMETERS], 2),
    ],
)
def test_saved_is_what_is_needed(
    wanted: tuple[str, ...], expected: list[str], halves: int, device: torch.device
) -> None:
    inputs = inputs_of(device, 10)
    pointers = {t.data_ptr(): k for k, t in inputs.items()}
    saved = saved_by(tigon.rms_norm_mlp, inputs, wanted, residual=True)
    assert [pointers[t.data_ptr()] for t in saved if t.data_ptr() in pointers] == expected
    assert new_shapes(saved, inputs) == [(10, 1)] * ("x" in expected) + [(10, 24)] * halves


def test_the_saved_weights_are_the_parameters_themselves(device: torch.device) -> None:
    """Sharding exchanges what a parameter holds; an alias would keep the whole weight, and read what was freed."""
    leaves = leaves_of(inputs_of(device, 10))
    for recompute in (False, True):
        saved = tigon.rms_norm_mlp(**leaves, recompute=recompute).grad_fn.saved_tensors
        assert all(any(t is leaves[k] for t in saved) for k in PARAMETERS)


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_saves_no_more(recompute: bool, device: torch.device) -> None:
    torch._dynamo.reset()
    inputs = inputs_of(device, 2, 5)
    compiled = torch.compile(tigon.rms_norm_mlp, fullgraph=True, backend="aot_eager")
    saved = saved_by(compiled, inputs, recompute=recompute, residual=True)
    assert new_shapes(saved, inputs) == [(2, 5, 1)] + [(10, 24)] * 2 * (not recompute)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_alive_in_backward(recompute: bool, device: torch.device) -> None:
    """The largest sum at any time, and that each gradient is gone once it has been used."""
    rows, hidden, width = 128, 32, 112
    inputs = inputs_of(device, rows, hidden=hidden, width=width, bias=False)
    leaves = leaves_of(inputs)
    x, half, weight = rows * hidden, rows * width, hidden * width
    dy = torch.randn(rows, hidden, device=device)
    with Alive() as alive:
        y = tigon.rms_norm_mlp(**leaves, residual=True, recompute=recompute)
        alive.at_products.clear()
        torch.autograd.grad(y, [leaves[k] for k in ("x", *PARAMETERS)], dy)
    found = alive.at_products[2:] if recompute else alive.at_products
    saved = x + 2 * half + rows
    assert found == [
        # The result, and what is saved; the product's gradient, then ddown_weight.
        saved + half,
        saved + half + weight,
        # The product is gone, the norm is made again; dgate_weight, then the norm's gradient.
        saved + x + 2 * weight,
        saved + 2 * x + 2 * weight,
        # The gate's gradient is gone; dup_weight; then the norm is gone as well.
        saved - half + 2 * x + 3 * weight,
        saved - half + x + 3 * weight,
    ]


@pytest.mark.parametrize("max_rows", [1, 5, 12, 24, 1000])
@pytest.mark.parametrize("frozen", [(), ("x", "norm_weight"), ("gate_weight", "down_bias")])
def test_parts_give_what_all_rows_give(frozen: tuple[str, ...], max_rows: int, device: torch.device) -> None:
    inputs = inputs_of(device, 2, 12)

    def run(**options: Any) -> list[Tensor]:
        leaves = {k: None if v is None else v.detach().requires_grad_(k not in frozen) for k, v in inputs.items()}
        y = tigon.rms_norm_mlp(**leaves, residual=True, recompute=True, **options)
        given = [v for k, v in leaves.items() if v is not None and k not in frozen]
        return [y.detach(), *torch.autograd.grad(y.square().sum(), given)]

    for a, b in zip(run(max_rows=max_rows), run(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * (1 + float(b.abs().max())))


def test_parts_exist_one_after_the_other(device: torch.device) -> None:
    """Beside inputs, gradients and sums, what is alive is of the rows of a part, forward and backward."""
    rows, hidden, width, part = 128, 32, 112, 16
    inputs = inputs_of(device, rows, hidden=hidden, width=width, bias=False)
    leaves = leaves_of(inputs)
    x, weight = rows * hidden, hidden * width
    dy = torch.randn(rows, hidden, device=device)
    with Alive() as alive:
        y = tigon.rms_norm_mlp(**leaves, residual=True, recompute=True, max_rows=part)
        # The result, rstd so far, norm, gate, up and product of a part.
        assert max(alive.at_products) <= x + rows + part * (2 * hidden + 3 * width)
        alive.at_products.clear()
        torch.autograd.grad(y, [leaves[k] for k in ("x", *PARAMETERS)], dy)
    # The result, dx, sums of three projections; of a part norm, its gradient, gate, up and product.
    assert max(alive.at_products) <= 2 * x + rows + 3 * weight + part * (3 * hidden + 3 * width)


def test_parts_compiled(device: torch.device) -> None:
    inputs = inputs_of(device, 12)
    compiled = torch.compile(tigon.rms_norm_mlp, fullgraph=True, backend="aot_eager")
    runs = []
    for function in (compiled, tigon.rms_norm_mlp):
        leaves = leaves_of(inputs)
        y = function(**leaves, recompute=True, max_rows=5)
        runs.append([y.detach(), *torch.autograd.grad(y.square().sum(), [v for v in leaves.values() if v is not None])])
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("residual", [False, True])
def test_upstream_and_inputs_stay(residual: bool, device: torch.device) -> None:
    """Above all where the gradient of the product could be taken for the upstream one: D = I and weight = 1."""
    inputs = inputs_of(device, 10, hidden=24)
    inputs["down_weight"], dy = torch.eye(24, device=device), torch.randn(10, 24, device=device)
    before = {k: t.clone() for k, t in {**inputs, "dy": dy}.items()}
    run(tigon.rms_norm_mlp, inputs, upstream=dy, residual=residual)
    assert all(torch.equal(t, before[k]) for k, t in {**inputs, "dy": dy}.items())


@pytest.mark.parametrize("recompute", [False, True])
def test_a_kept_graph_gives_the_same_again(recompute: bool, device: torch.device) -> None:
    given = leaves_of(inputs_of(device, 2, 5))
    leaves = list(given.values())
    y = tigon.rms_norm_mlp(**given, residual=True, recompute=recompute).square().sum()
    first = torch.autograd.grad(y, leaves, retain_graph=True)
    again = torch.autograd.grad(y, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, leaves)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_gradients(use_reentrant: bool, recompute: bool, device: torch.device) -> None:
    inputs = inputs_of(device, 2, 5)
    leaves = leaves_of(inputs)

    def layer(*given: Tensor) -> Tensor:
        return tigon.rms_norm_mlp(**dict(zip(leaves, given, strict=True)), residual=True, recompute=recompute)

    torch.utils.checkpoint.checkpoint(layer, *leaves.values(), use_reentrant=use_reentrant).sum().backward()
    expected = run(tigon.rms_norm_mlp, inputs, residual=True)
    assert all(torch.equal(t.grad, expected[k]) for k, t in leaves.items())


@pytest.mark.parametrize("residual", [False, True])
def test_the_output_may_be_written_to(residual: bool, device: torch.device) -> None:
    inputs = inputs_of(device, 2, 5)
    expected = run(tigon.rms_norm_mlp, inputs, residual=residual)
    actual = run(lambda **given: tigon.rms_norm_mlp(**given).mul_(1), inputs, residual=residual)
    assert_same(actual, expected, rounded=())


@pytest.mark.parametrize("changed", ["x", *PARAMETERS])
def test_a_changed_input_is_noticed(changed: str, device: torch.device) -> None:
    made = {k: t * 1 for k, t in leaves_of(inputs_of(device, 10)).items()}
    y = tigon.rms_norm_mlp(**made)
    made[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- dtypes ----


@pytest.mark.parametrize("residual", [False, True])
def test_16_bits(residual: bool, device: torch.device) -> None:
    inputs = {k: t.to(low(device)) for k, t in inputs_of(device, 2, 5).items()}
    actual, expected = (run(f, inputs, residual=residual) for f in (tigon.rms_norm_mlp, apart_mlp))
    assert_same(actual, expected)


def test_float16_does_not_overflow_where_the_norm_does_not(device: torch.device) -> None:
    inputs = {k: t.half() for k, t in inputs_of(device, 8).items()}
    inputs["x"] = 2000 * inputs["x"]
    # Without the norm first, the scaled input would be infinite.
    assert (30 * inputs["norm_weight"] * inputs["x"]).isinf().any()
    actual, expected = (run(f, inputs, residual=True) for f in (tigon.rms_norm_mlp, apart_mlp))
    assert all(t.isfinite().all() for t in actual.values())
    assert_same(actual, expected)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("x_is_low", [False, True])
def test_autocast_is_that_of_linear(x_is_low: bool, residual: bool, recompute: bool, device: torch.device) -> None:
    inputs = inputs_of(device, 4, 8)
    if x_is_low:
        inputs["x"] = inputs["x"].to(low(device))
    upstream = torch.randn(4, 8, 16, device=device)
    wide = residual and not x_is_low
    upstream = upstream if wide else upstream.to(low(device))
    options = {"residual": residual, "recompute": recompute}
    with torch.autocast(device.type, low(device)):
        actual, expected = (run(f, inputs, upstream=upstream, **options) for f in (tigon.rms_norm_mlp, apart_mlp))
    assert actual["y"].dtype == (torch.float32 if wide else low(device))
    assert all(actual[k].dtype == torch.float32 for k in PARAMETERS)
    # The norm's gradient is rounded to 16 bits, whatever the result.
    for name in ("x", "norm_weight"):
        a, b = actual.pop(name), expected.pop(name)
        assert a.dtype == b.dtype
        assert float((a - b).abs().max()) <= 4 * torch.finfo(low(device)).eps * float(b.abs().max())
    assert_same(actual, expected)


def test_a_wider_norm_weight_widens_what_follows(device: torch.device) -> None:
    inputs = inputs_of(device, 10)
    inputs["x"] = inputs["x"].to(low(device))
    actual, expected = (run(f, inputs, residual=True) for f in (tigon.rms_norm_mlp, apart_mlp))
    assert [actual[k].dtype for k in ("y", "x", "down_weight")] == [torch.float32, low(device), torch.float32]
    assert_same(actual, expected)


def test_float64_runs_on_the_reference(device: torch.device) -> None:
    inputs = {k: t.double() for k, t in inputs_of(device, 3).items()}
    assert tigon.why_not(tigon.rms_norm_mlp, **inputs) == ["float64 is computed by the reference"]
    assert torch.equal(tigon.rms_norm_mlp(**inputs), rms_norm_mlp_reference(**inputs))


# ---- compilers ----


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_with_dynamic_shapes(packed: bool, recompute: bool, device: torch.device) -> None:
    torch._dynamo.reset()
    options = {"residual": True, "recompute": recompute}
    compiled = torch.compile(tigon.rms_norm_mlp, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows, width in (((3, 4), 10), ((5, 2), 18)):
            inputs = inputs_of(device, *rows, width=width, packed=packed)
            expected = run(tigon.rms_norm_mlp, inputs, **options)
            assert_same(run(compiled, inputs, **options), expected, rounded=())


@pytest.mark.parametrize("wanted", [("down_weight",), ("x", "down_bias"), ("norm_weight", "up_weight"), ("gate_bias",)])
def test_compiled_subsets(wanted: tuple[str, ...], device: torch.device) -> None:
    torch._dynamo.reset()
    inputs = inputs_of(device, 3, 4)
    compiled = torch.compile(tigon.rms_norm_mlp, fullgraph=True, backend="aot_eager")
    assert_same(run(compiled, inputs, wanted), run(tigon.rms_norm_mlp, inputs, wanted), rounded=())


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_autocast(recompute: bool, device: torch.device) -> None:
    torch._dynamo.reset()
    inputs = inputs_of(device, 3, 4)
    options = {"residual": True, "recompute": recompute}
    compiled = torch.compile(tigon.rms_norm_mlp, fullgraph=True, backend="aot_eager")
    with torch.autocast(device.type, low(device)):
        assert_same(run(compiled, inputs, **options), run(tigon.rms_norm_mlp, inputs, **options), rounded=())


# ---- errors ----


def _call(**changed: Any) -> Callable[[], Tensor]:
    def call() -> Tensor:
        ones = torch.ones
        weights = {"gate_weight": ones(6, 4), "up_weight": ones(6, 4), "down_weight": ones(4, 6)}
        return tigon.rms_norm_mlp(**{"x": ones(2, 4), "norm_weight": ones(4), **weights, **changed})

    return call


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"norm_weight": torch.ones(3)}, r"norm_weight: expected shape \(4,\), got \(3,\)"),
        ({"gate_weight": torch.ones(6, 5)}, r"gate_weight: expected 4 columns, got shape \(6, 5\)"),
        ({"down_weight": torch.ones(6, 4)}, r"down_weight: expected shape \(4, 6\), got \(6, 4\)"),
        ({"up_weight": None}, r"down_weight: expected shape \(4, 3\), got \(4, 6\)"),
        ({"down_bias": torch.ones(6)}, r"down_bias: expected shape \(4,\), got \(6,\)"),
        (
            {"down_weight": torch.ones(4, 6).half()},
            "down_weight: expected dtype torch.float32 of the product, got torch.float16",
        ),
        ({"down_bias": torch.ones(4).half()}, "down_bias: expected dtype torch.float32 of the product"),
        ({"down_weight": torch.ones(4, 6, device="meta")}, "down_weight: expected device cpu, got meta"),
        ({"activation": "swish"}, "activation: expected one of 'silu', "),
        ({"max_rows": 0, "recompute": True}, "max_rows: expected at least 1, or None, got 0"),
        ({"max_rows": 8}, "recompute: expected True with max_rows, got False"),
    ],
)
def test_wrong_arguments_are_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"rms_norm_mlp: {message}"):
        _call(**changed)()


@pytest.mark.parametrize("options", [{}, {"recompute": True, "max_rows": 3}])
def test_a_compiler_sees_no_result_written_in_forward(device: torch.device, options: dict[str, Any]) -> None:
    # torch 2.11 takes the gradient of such a result for zero.
    calls: list[str] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        for name, part in graph.named_modules():
            if name.rpartition(".")[2].startswith("fwd_body"):
                nodes = [n for n in part.graph.nodes if n.op.startswith("call")]  # type: ignore[union-attr]
                calls.extend(n.target if isinstance(n.target, str) else n.target.__name__ for n in nodes)
        return graph.forward

    torch._dynamo.reset()
    call = torch.compile(tigon.rms_norm_mlp, fullgraph=True, backend=record)
    inputs = {k: t if t is None else t.requires_grad_() for k, t in inputs_of(device, 10).items()}
    call(**inputs, residual=True, **options)
    assert "rms_norm_fwd.default" in calls or "rms_norm_fwd" in calls
    assert [n for n in calls if (n.endswith("_") and not n.endswith("__")) or n == "setitem"] == []
