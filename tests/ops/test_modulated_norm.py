"""What the generic checks cannot say of `modulated_norm`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from tigon.ops.modulated_norm import _bwd_blocks, _fwd_blocks, modulated_norm_reference
from tigon.testing import assert_within_budget

# `tigon.ops.modulated_norm` as an attribute is the function.
module = importlib.import_module("tigon.ops.modulated_norm")

NAMES = ("x", "scale", "shift", "weight", "residual", "gate")


def _written_out(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    weight: Tensor,
    norm: str = "rms",
    residual: Tensor,
    gate: Tensor,
) -> tuple[Tensor, Tensor]:
    """What blocks of diffusion transformers compute, with torch's own norms; modulations `[B, N]`, x `[B, S, N]`."""
    s = residual + gate[:, None] * x
    width = s.shape[-1:]
    n = F.rms_norm(s, width, weight, 1e-6) if norm == "rms" else F.layer_norm(s, width, weight, None, 1e-6)
    return n * (1 + scale[:, None]) + shift[:, None], s


def _inputs(shape: tuple[int, ...], device: torch.device, *, by_token: bool = False) -> dict[str, Tensor]:
    rows = shape if by_token else (shape[0], shape[-1])
    shapes = {"x": shape, "scale": rows, "shift": rows, "weight": shape[-1:], "residual": shape, "gate": rows}
    return {name: torch.randn(s, device=device) for name, s in shapes.items()}


def _run(
    function: Callable[..., Any],
    inputs: dict[str, Tensor | None],
    wanted: tuple[str, ...] = NAMES,
    *,
    of: tuple[int, ...] = (0, 1),
    **options: Any,
) -> dict[str, Tensor]:
    """Outputs and gradients by name, from upstream gradients of the outputs `of`, which are drawn from one seed."""
    leaves = {k: None if v is None else v.detach().requires_grad_(k in wanted) for k, v in inputs.items()}
    rest = dict(leaves)
    out = function(rest.pop("x"), rest.pop("scale"), rest.pop("shift"), **rest, **options)
    outputs = (out,) if isinstance(out, Tensor) else tuple(out)
    generator = torch.Generator().manual_seed(3)
    upstream = [torch.randn(y.shape, generator=generator).to(y.device, y.dtype) for y in outputs]
    used = [i for i in of if i < len(outputs) and outputs[i].requires_grad]
    torch.autograd.backward([outputs[i] for i in used], [upstream[i] for i in used])
    found = dict(zip(("y", "s"), (y.detach() for y in outputs), strict=False))
    return found | {f"d{k}": v.grad for k, v in leaves.items() if v is not None and v.grad is not None}


def _wide(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.double() for k, v in inputs.items()}


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("shape", [(2, 5, 40), (3, 70, 24), (1, 1, 129), (2, 3, 4099)])
def test_is_the_block_written_out(shape: tuple[int, ...], norm: str, device: torch.device) -> None:
    inputs = _inputs(shape, device)
    actual = _run(tigon.modulated_norm, inputs, norm=norm)
    low = _run(modulated_norm_reference, inputs, norm=norm)
    high = _run(_written_out, _wide(inputs), norm=norm)
    assert set(actual) == {"y", "s", *(f"d{k}" for k in NAMES)}
    for name, value in actual.items():
        assert_within_budget(name, value, low[name], high[name])


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_by_token_is_by_sample_with_one_token(norm: str, device: torch.device) -> None:
    """The kernels for both kinds agree where the kinds do."""
    inputs = _inputs((6, 24), device)
    by_sample = _run(tigon.modulated_norm, inputs, norm=norm)
    tokens = {k: v if k == "weight" else v[None] for k, v in inputs.items()}
    by_token = _run(tigon.modulated_norm, tokens, norm=norm)
    for name, value in by_sample.items():
        torch.testing.assert_close(by_token[name].reshape(value.shape), value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["rows", "axis", "tokens"])
def test_every_shape_of_a_modulation_is_the_same_modulation(kind: str, device: torch.device) -> None:
    inputs = _inputs((2, 3, 4, 16), device)
    shaped = dict(inputs)
    for name in ("scale", "shift", "gate"):
        rows = inputs[name]
        shaped[name] = {"rows": rows, "axis": rows[:, None, None], "tokens": rows[:, None, None].expand(2, 3, 4, 16)}[
            kind
        ]
    actual, expected = _run(tigon.modulated_norm, shaped), _run(modulated_norm_reference, inputs)
    for name, value in expected.items():
        found = actual[name]
        if kind == "tokens" and name in ("dscale", "dshift", "dgate"):
            found = found.sum((1, 2))
        torch.testing.assert_close(found.reshape(value.shape), value, rtol=1e-4, atol=1e-5)


def test_chunks_of_one_projection_are_not_copied(device: torch.device) -> None:
    """Scale, shift and gate are slices of one `[B, 3 N]` in every model."""
    inputs = _inputs((2, 5, 16), device)
    packed = torch.cat([inputs[k] for k in ("scale", "shift", "gate")], -1)
    chunks = dict(zip(("scale", "shift", "gate"), packed.chunk(3, -1), strict=True))
    strided, dense = (_run(tigon.modulated_norm, i) for i in ({**inputs, **chunks}, inputs))
    assert all(torch.equal(a, b) for a, b in zip(strided.values(), dense.values(), strict=True))
    with mock.patch.object(Tensor, "contiguous", side_effect=AssertionError("copied")):
        module._as_rows(*chunks.values())


@pytest.mark.parametrize("of", [(0,), (1,)])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_one_output_may_be_left_unused(of: tuple[int, ...], norm: str, device: torch.device) -> None:
    inputs = _inputs((2, 5, 24), device)
    actual = _run(tigon.modulated_norm, inputs, of=of, norm=norm)
    expected = _run(modulated_norm_reference, inputs, of=of, norm=norm)
    for name in NAMES:
        want = expected.get(f"d{name}", torch.zeros_like(inputs[name]))
        torch.testing.assert_close(actual[f"d{name}"], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("wanted", NAMES)
def test_only_what_is_needed_is_computed(
    wanted: str, by_token: bool, launches: list[Any], device: torch.device
) -> None:
    inputs = _inputs((2, 5, 12), device, by_token=by_token)
    expected = _run(tigon.modulated_norm, inputs)
    launches.clear()
    actual = _run(tigon.modulated_norm, inputs, (wanted,))
    assert set(actual) == {"y", "s", f"d{wanted}"}
    assert torch.equal(actual[f"d{wanted}"], expected[f"d{wanted}"])
    constants = next(c for name, *_, c in launches if name == "_modulated_norm_bwd_kernel")
    flags = {
        "NEEDS_DX": "x",
        "NEEDS_DRESIDUAL": "residual",
        "NEEDS_DGATE": "gate",
        "NEEDS_DSCALE": "scale",
        "NEEDS_DSHIFT": "shift",
        "NEEDS_DW": "weight",
    }
    assert {k for k in flags if constants[k]} == {k for k, name in flags.items() if name == wanted}


def test_x_is_saved_for_the_gradient_of_a_gate_alone(device: torch.device) -> None:
    inputs = _inputs((2, 5, 12), device)

    def saved(*wanted: str) -> int:
        kept: list[Tensor] = []
        given = {k: v.requires_grad_(k in wanted) for k, v in ((k, v.clone()) for k, v in inputs.items())}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            tigon.modulated_norm(given.pop("x"), given.pop("scale"), given.pop("shift"), **given)
        return sum(t.shape == (2, 5, 12) for t in kept)

    assert saved("x", "scale", "weight") == 1
    assert saved("x", "gate") == 2


def test_many_splits_and_samples(launches: list[Any], device: torch.device) -> None:
    """More row tiles than programs, the last partial, and samples that do not begin at a tile."""
    with mock.patch.object(module, "num_sms", return_value=3):
        inputs = _inputs((2, 1100, 24), device)
        actual = _run(tigon.modulated_norm, inputs, norm="layer")
    low = _run(modulated_norm_reference, inputs, norm="layer")
    high = _run(modulated_norm_reference, _wide(inputs), norm="layer")
    for name, value in actual.items():
        assert_within_budget(name, value, low[name], high[name])
    grid = next(grid for name, grid, *_ in launches if name == "_modulated_norm_bwd_kernel")
    assert grid == (2, 3, 1)
    assert _bwd_blocks(24, 1100)[0] * 3 < 1100


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_dtypes_promote(backend: str, device: torch.device) -> None:
    inputs = _inputs((2, 3, 8), device)
    half = {k: v.half() if k in ("x", "residual", "gate") else v for k, v in inputs.items()}
    with tigon.backend(backend):
        found = _run(tigon.modulated_norm, half)
    assert found["y"].dtype == torch.float32
    assert found["s"].dtype == torch.float16
    assert all(found[f"d{k}"].dtype == half[k].dtype for k in NAMES)


def test_the_sum_is_rounded_before_the_norm(device: torch.device) -> None:
    """What is normalised is what is returned, so that the next block and the gradient see the same."""
    inputs = {k: v.half() for k, v in _inputs((2, 3, 64), device).items()}
    y, s = tigon.modulated_norm(
        inputs["x"], inputs["scale"], residual=inputs["residual"], gate=inputs["gate"], norm="layer"
    )
    assert torch.equal(y, tigon.modulated_norm(s, inputs["scale"], norm="layer"))


def test_reference_gradient_is_exact() -> None:
    inputs = _wide(_inputs((2, 3, 5), torch.device("cpu")))
    leaves = [v.requires_grad_() for v in inputs.values()]

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        x, scale, shift, weight, residual, gate = values
        return tuple(modulated_norm_reference(x, scale, shift, weight=weight, residual=residual, gate=gate))

    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8)])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_nothing_to_normalise(backend: str, shape: tuple[int, ...], device: torch.device) -> None:
    with tigon.backend(backend):
        found = _run(tigon.modulated_norm, _inputs(shape, device))
    assert found["y"].shape == found["s"].shape == shape
    assert not any(found[f"d{k}"].any() for k in NAMES)


@pytest.mark.parametrize("num_cols", [16, 4099])
def test_opcheck(num_cols: int, device: torch.device) -> None:
    i = _inputs((2, 3, num_cols), device)
    tests = ("test_schema", "test_faketensor")
    forward = (i["x"], i["scale"], i["shift"], i["weight"], i["residual"], i["gate"], False, True, 1e-6)
    y, s, mean, rstd = torch.ops.tigon.modulated_norm_fwd(*forward)
    torch.library.opcheck(torch.ops.tigon.modulated_norm_fwd.default, forward, test_utils=tests)
    backward = (torch.ones_like(y), torch.ones_like(s), s, i["x"], i["scale"], i["weight"], i["gate"], mean, rstd)
    flags = (False, True, *(True for _ in NAMES))
    torch.library.opcheck(torch.ops.tigon.modulated_norm_bwd.default, (*backward, *flags), test_utils=tests)


def test_compiles_with_dynamic_shapes(device: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(tigon.modulated_norm, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for shape in ((3, 4, 10), (5, 2, 18)):
            inputs = _inputs(shape, device)
            for a, b in zip(_run(compiled, inputs).values(), _run(tigon.modulated_norm, inputs).values(), strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("num_cols", [1, 5, 64, 1152, 3072, 4096, 5120, 8192, 16384, 16385, 100000])
def test_blocks_fit_registers(num_cols: int) -> None:
    block_m, block_n, num_warps = _fwd_blocks(num_cols)
    assert block_m * block_n <= 32 * 32 * num_warps
    block_m, block_n, num_warps, per_sm = _bwd_blocks(num_cols, 4096)
    assert block_m * block_n <= 16 * 32 * num_warps
    assert per_sm * num_warps * 32 * 128 <= 65536
    assert block_n >= num_cols or num_cols > 4096
    assert _bwd_blocks(num_cols, 1)[0] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": torch.ones(3, 8)}, r"scale: expected shape \(2, 8\), \(2, 1, 8\) or \(2, 3, 8\), got \(3, 8\)"),
        ({"shift": torch.ones(8)}, r"shift: expected shape .* got \(8,\)"),
        # Checked also after a modulation by token.
        ({"scale": torch.ones(2, 3, 8), "shift": torch.ones(8)}, r"shift: expected shape .* got \(8,\)"),
        ({"gate": torch.ones(2, 3, 1)}, r"gate: expected shape .* got \(2, 3, 1\)"),
        ({"weight": torch.ones(2, 8)}, r"weight: expected shape \(8,\), got \(2, 8\)"),
        ({"residual": torch.ones(2, 8)}, r"residual: expected shape \(2, 3, 8\), got \(2, 8\)"),
        ({"residual": None}, "gate: expected a residual with it, got none"),
        ({"norm": "batch"}, "norm: expected one of 'rms', 'layer', got 'batch'"),
        ({"x": torch.ones(8)}, "x: expected at least two axes, got 1"),
        ({"scale": torch.ones(2, 8, dtype=torch.int32)}, "scale: expected a floating-point"),
        ({"shift": torch.ones(2, 8, device="meta")}, "shift: expected device cpu, got meta"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    given = {**_inputs((2, 3, 8), torch.device("cpu")), **change}
    with pytest.raises(ValueError, match=f"modulated_norm: {message}"):
        tigon.modulated_norm(given.pop("x"), given.pop("scale"), given.pop("shift"), **given)
