"""What the generic checks cannot say of `rms_norm_gated`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from tigon.ops.rms_norm_gated import rms_norm_gated, rms_norm_gated_reference

both_backends = pytest.mark.usefixtures("backend")


@both_backends
@pytest.mark.parametrize("group_size", [None, 6])
def test_is_a_norm_and_a_gate(group_size: int | None, device: torch.device) -> None:
    x, gate = torch.randn(4, 3, 24, device=device), torch.randn(4, 3, 24, device=device)
    weight = torch.randn(24, device=device)
    first = rms_norm_gated(x, weight, gate, group_size=group_size)
    torch.testing.assert_close(
        first, tigon.rms_norm(x, weight, group_size=group_size) * F.silu(gate), rtol=1e-5, atol=1e-6
    )
    after = rms_norm_gated(
        x, weight, gate, group_size=group_size, norm_before_gate=False, activation="sigmoid", offset=1.0
    )
    expected = tigon.rms_norm(x * gate.sigmoid(), weight, group_size=group_size, offset=1.0)
    torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-6)


def _norm(x: Tensor, group_size: int | None = None) -> Tensor:
    groups = x.unflatten(-1, (-1, group_size or x.shape[-1]))
    return (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + 1e-6)).flatten(-2)


def _gate_then_norm(x: Tensor, weight: Tensor, gate: Tensor, group_size: int | None = None) -> Tensor:
    return weight * _norm(x.float() * F.silu(gate.float()), group_size).to(x.dtype)


def _gate_then_norm_rounded_once(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    return (weight * _norm(x.float() * F.silu(gate.float()))).to(x.dtype)


def _norm_then_gate(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    return (weight * _norm(x.float()).to(x.dtype) * F.silu(gate.float())).to(x.dtype)


def _norm_then_gate_rounded_once(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    return (weight.float() * _norm(x.float()) * torch.sigmoid(gate.float())).to(x.dtype)


# The forms found in models, as they are written there, and the options that express them.
FORMS: list[tuple[Callable[..., Tensor], dict[str, Any]]] = [
    (_gate_then_norm, {"norm_before_gate": False}),
    (lambda *a: _gate_then_norm(*a, group_size=16), {"norm_before_gate": False, "group_size": 16}),
    (_gate_then_norm_rounded_once, {"norm_before_gate": False, "cast": "scale_then_cast"}),
    (_norm_then_gate, {}),
    (_norm_then_gate_rounded_once, {"activation": "sigmoid", "cast": "scale_then_cast"}),
]


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("index", range(len(FORMS)))
def test_rounds_as_models_do_bit_for_bit(index: int, x_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """On plain torch, since the interpreter does not round to bf16 as devices do."""
    formula, options = FORMS[index]
    x, gate = torch.randn(40, 64).to(x_dtype), torch.randn(40, 64).to(x_dtype)
    weight = torch.randn(64).to(weight_dtype)
    with tigon.backend("torch"):
        y = rms_norm_gated(x, weight, gate, **options)
    expected = formula(x, weight, gate)
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)


@pytest.mark.parametrize("index", range(len(FORMS)))
def test_gradients_are_those_of_models(index: int, device: torch.device) -> None:
    formula, options = FORMS[index]
    x, gate, dy = (torch.randn(40, 64, device=device) for _ in range(3))
    weight = torch.randn(64, device=device)
    results = []
    for function in (formula, lambda *a: rms_norm_gated(*a, **options)):
        leaves = [t.clone().requires_grad_() for t in (x, weight, gate)]
        results.append(torch.autograd.grad(function(*leaves), leaves, dy))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


@both_backends
@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("cast", ["cast_then_scale", "scale_then_cast"])
def test_dtypes(cast: str, norm_before_gate: bool, device: torch.device) -> None:
    x = torch.randn(3, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(8, device=device, requires_grad=True)
    gate = torch.randn(3, 8, device=device, dtype=torch.float16, requires_grad=True)
    y = rms_norm_gated(x, weight, gate, cast=cast, norm_before_gate=norm_before_gate)
    promoted = cast == "cast_then_scale" and not norm_before_gate
    assert y.dtype == (torch.float32 if promoted else torch.bfloat16)
    y.float().sum().backward()
    assert (x.grad.dtype, weight.grad.dtype, gate.grad.dtype) == (torch.bfloat16, torch.float32, torch.float16)


@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("group_size", [1, 17, 4096, 4097], ids=str)
def test_groups_of_any_width(group_size: int, norm_before_gate: bool, device: torch.device) -> None:
    """Groups wider than the registers hold take another kernel; 500 rows make more tiles than there are programs."""
    num_cols = 2 * group_size
    num_rows = 9 if num_cols > 1000 else 500
    x, gate, dy = (torch.randn(num_rows, num_cols, device=device) for _ in range(3))
    weight = torch.randn(num_cols, device=device)
    options = {"group_size": group_size, "norm_before_gate": norm_before_gate, "eps": 1e-2}
    results = []
    for function in (rms_norm_gated, rms_norm_gated_reference):
        leaves = [t.clone().requires_grad_() for t in (x, weight, gate)]
        y = function(*leaves, **options)
        results.append((y, *torch.autograd.grad(y, leaves, dy)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


def test_a_wide_program_adds_up_its_rows(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    import importlib

    module = importlib.import_module("tigon.ops.rms_norm_gated")
    monkeypatch.setattr(module, "num_sms", lambda _: 1)
    x, gate = torch.randn(8, 4100, device=device), torch.randn(8, 4100, device=device)
    weight = torch.randn(4100, device=device, requires_grad=True)
    (dw,) = torch.autograd.grad(rms_norm_gated(x, weight, gate).sum(), weight)
    (expected,) = torch.autograd.grad(rms_norm_gated_reference(x, weight, gate).sum(), weight)
    torch.testing.assert_close(dw, expected, rtol=1e-5, atol=1e-5)


def test_reads_views_without_a_copy(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    import importlib

    module = importlib.import_module("tigon.ops.rms_norm_gated")
    seen, launch = [], module.launch

    def record(kernel: Any, grid: Any, *args: Any, **constants: Any) -> None:
        seen.append([t.data_ptr() for t in args[:2]])
        launch(kernel, grid, *args, **constants)

    monkeypatch.setattr(module, "launch", record)
    packed = torch.randn(3, 5, 36, device=device, requires_grad=True)
    gate, x = packed[..., :16], packed[..., 16:32]
    rms_norm_gated(x, torch.ones(16, device=device), gate).sum().backward()
    assert seen == [[x.data_ptr(), gate.data_ptr()]] * 2


@both_backends
@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_saturated_gates_and_zero_rows_have_finite_gradients(norm_before_gate: bool, device: torch.device) -> None:
    x = torch.tensor([[0.0] * 4, [1.0, -2.0, 3.0, 0.0]], device=device, requires_grad=True)
    gate = torch.tensor([[-1e4, -50.0, 0.0, 1e4]] * 2, device=device, requires_grad=True)
    weight = torch.ones(4, device=device, requires_grad=True)
    y = rms_norm_gated(x, weight, gate, norm_before_gate=norm_before_gate)
    for t in (y, *torch.autograd.grad(y.sum(), (x, weight, gate))):
        assert t.isfinite().all()


def test_compiles_with_dynamic_shapes(device: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(rms_norm_gated, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((3, 4, 24), (5, 2, 36)):
        leaves = [torch.randn(s, device=device, requires_grad=True) for s in (shape, shape[-1:], shape)]
        results = []
        for function in (compiled, rms_norm_gated):
            y = function(*leaves, group_size=12, norm_before_gate=False)
            results.append((y, *torch.autograd.grad(y.sum(), leaves)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_operators_are_registered_rightly(device: torch.device) -> None:
    x, gate, weight = torch.randn(3, 8, device=device), torch.randn(3, 8, device=device), torch.randn(8, device=device)
    options = ("silu", True, 4, 0.0, "cast_then_scale")
    torch.library.opcheck(torch.ops.tigon.rms_norm_gated_fwd.default, (x, weight, gate, 1e-6, *options))
    rstd = torch.rand(3, 2, device=device)
    for needs in ((True, True, True), (False, True, False)):
        torch.library.opcheck(torch.ops.tigon.rms_norm_gated_bwd.default, (x, x, weight, gate, rstd, *needs, *options))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(5)}, r"rms_norm_gated: weight: expected shape \(6,\), got \(5,\)"),
        ({"gate": torch.ones(2, 5)}, r"rms_norm_gated: gate: expected shape \(2, 6\), got \(2, 5\)"),
        ({"gate": None}, "rms_norm_gated: gate: expected a tensor; rms_norm is the norm without one, got None"),
        ({"gate": torch.ones(2, 6).long()}, "rms_norm_gated: gate: expected a floating-point dtype"),
        ({"gate": torch.ones(2, 6, device="meta")}, "rms_norm_gated: gate: expected device cpu, got meta"),
        ({"group_size": 4}, "rms_norm_gated: group_size: expected a divisor of 6, got 4"),
        ({"activation": "swish"}, "rms_norm_gated: activation: expected one of 'silu', "),
        ({"cast": "none"}, "rms_norm_gated: cast: expected one of 'cast_then_scale', 'scale_then_cast', got 'none'"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments = {"x": torch.ones(2, 6), "weight": torch.ones(6), "gate": torch.ones(2, 6), **change}
    with pytest.raises(ValueError, match=message):
        rms_norm_gated(**arguments)
