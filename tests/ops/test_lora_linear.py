"""What the generic checks cannot say of `lora_linear`: the mask, what is kept, dtypes, ways."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from tests.ops import hopper
from tests.ops.conftest import Launched
from tests.ops.gated_mlp import Inputs, leaves_of, low, new_shapes, run, saved_by
from torch import Tensor

import tigon
from tigon.ops import _choice
from tigon.ops.lora_linear import _philox, kept_by, lora_linear_reference
from tigon.testing import assert_within_budget

# As an attribute of `tigon.ops` the name is the function.
module = importlib.import_module("tigon.ops.lora_linear")

FROZEN = ("x", "lora_a", "lora_b")


def draw(device: torch.device, *rows: int, k: int = 48, n: int = 40, rank: int = 8, bias: bool = False) -> Inputs:
    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, device=device) * scale

    return {
        "x": randn(*rows, k),
        "weight": randn(n, k, scale=k**-0.5),
        "lora_a": randn(rank, k, scale=k**-0.5),
        "lora_b": randn(n, rank),
        "bias": randn(n) if bias else None,
    }


def dropped(x: Tensor, **options: Any) -> Tensor:
    """`drop(x)` as the operator has it: nothing but an adapter that is the identity."""
    one = torch.eye(x.shape[-1], device=x.device)
    return tigon.lora_linear(x, torch.zeros_like(one), one, one.clone(), **options)


# ---- the mask ----


def test_philox_gives_the_numbers_of_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known answers for the counter and the key 0."""
    zero = torch.zeros(1, dtype=torch.int64)
    expected = {
        7: [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48],
        10: [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
    }
    for rounds, words in expected.items():
        monkeypatch.setattr(module, "_ROUNDS", rounds)
        assert [int(word) for word in _philox(zero[0], zero, zero)] == words


@pytest.mark.parametrize("rows", [(5,), (3, 67), (2, 3, 50)])
def test_the_mask_of_kernels_is_that_of_the_reference(rows: tuple[int, ...], device: torch.device) -> None:
    """Bit for bit, in three places: forward, dx, dlora_a."""
    seed = torch.tensor(2**61 + 12345, device=device)
    x = (1 + torch.rand(*rows, 150, device=device)).requires_grad_()
    kept = kept_by(seed, x.shape, 0.3)
    y = dropped(x, dropout=0.3, seed=seed)
    assert torch.equal(y != 0, kept)
    torch.testing.assert_close(y, x * kept / 0.7)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx != 0, kept)
    lora_a = torch.ones(1, 150, device=device, requires_grad=True)
    one, nothing = torch.ones(1, 1, device=device), torch.zeros(1, 150, device=device)
    y = tigon.lora_linear(x.detach(), nothing, lora_a, one, dropout=0.3, seed=seed)
    (da,) = torch.autograd.grad(y.sum(), lora_a)
    torch.testing.assert_close(da[0], (x * kept / 0.7).detach().view(-1, 150).sum(0))


def test_the_mask_keeps_as_much_as_it_should_without_a_pattern() -> None:
    for dropout in (0.05, 0.5, 0.9):
        kept = kept_by(torch.tensor(7), torch.Size((512, 512)), dropout).double()
        # Four standard deviations of a share of 2^18 draws.
        slack = 4 * (dropout * (1 - dropout) / 2**18) ** 0.5
        assert abs(float(kept.mean()) - (1 - dropout)) < slack
        centred = kept - kept.mean()
        for rows, cols in ((0, 1), (0, 32), (0, 128), (1, 0), (4, 0)):
            moved = centred.roll((rows, cols), (0, 1))
            assert abs(float((centred * moved).mean())) < 4 * dropout * (1 - dropout) / 2**9
    first, second = (kept_by(torch.tensor(seed), torch.Size((64, 64)), 0.5) for seed in (1, 1 + 2**32))
    assert 0.4 < float((first == second).double().mean()) < 0.6


def test_manual_seed_repeats_what_is_dropped(backend: str, on_device: None) -> None:
    x = torch.ones(4, 64)
    torch.manual_seed(5)
    first, second = dropped(x, dropout=0.5), dropped(x, dropout=0.5)
    torch.manual_seed(5)
    assert torch.equal(dropped(x, dropout=0.5), first)
    assert not torch.equal(first, second)


def test_without_dropout_no_number_is_drawn(backend: str, on_device: None) -> None:
    state = torch.random.get_rng_state()
    dropped(torch.ones(4, 64))
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_drops_the_same_again(reentrant: bool, device: torch.device) -> None:
    inputs = draw(device, 2, 5)

    def checkpointed(**given: Any) -> Tensor:
        def inner(*tensors: Tensor) -> Tensor:
            return tigon.lora_linear(*tensors, dropout=0.5)

        tensors = [given[name] for name in ("x", "weight", "lora_a", "lora_b")]
        return torch.utils.checkpoint.checkpoint(inner, *tensors, use_reentrant=reentrant)

    torch.manual_seed(3)
    expected = run(tigon.lora_linear, inputs, FROZEN, dropout=0.5)
    torch.manual_seed(3)
    actual = run(checkpointed, inputs, FROZEN)
    for name in ("y", *FROZEN):
        assert torch.equal(actual[name], expected[name])


def test_compiled_dropout_is_one_mask(device: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(dropped, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5):
        x = torch.ones(rows, 64, device=device, requires_grad=True)
        y = compiled(x, dropout=0.5)
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(dx, y)
        assert 0 < int((y == 0).sum()) < y.numel()


# ---- what is kept, read and multiplied ----


def test_of_a_frozen_layer_x_and_a_few_numbers_a_row_are_kept(device: torch.device) -> None:
    inputs = draw(device, 3, 5)
    for options in ({}, {"dropout": 0.5}):
        saved = saved_by(tigon.lora_linear, inputs, FROZEN, **options)
        kept = new_shapes(saved, inputs)
        assert kept == [*([()] if options else []), (15, 8)]
        assert sum(t.data_ptr() == inputs["x"].data_ptr() for t in saved) == 1
    # Nothing of the layer where only lora_b learns, and not x.
    saved = saved_by(tigon.lora_linear, inputs, ("lora_b",))
    assert [tuple(t.shape) for t in saved] == [(15, 8)]
    assert new_shapes(saved_by(tigon.lora_linear, inputs, ("x", "lora_a")), inputs) == []


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dy_is_read_by_one_kernel(dropout: float, launches: list[Launched], device: torch.device) -> None:
    inputs = draw(device, 7)
    run(tigon.lora_linear, inputs, FROZEN, dropout=dropout)
    made = [(each.name, each.constants.get("HAS_FACTOR"), each.constants.get("HAS_LOW")) for each in launches]
    kernel = "_lora_linear_low_kernel"
    expected = [(kernel, True, False), (kernel, True, True), (kernel, False, True)]
    assert made == expected + ([("_lora_linear_add_kernel", None, None)] if dropout else [])


def test_both_products_at_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a kernel sums two products, which is stood in for, forward and dx are one call of it each."""
    shapes = []

    def sum_products(a: Tensor, weight: Tensor, b: Tensor, low: Tensor, bias: Any, out: Tensor, **given: Any) -> None:
        shapes.append((tuple(out.shape), given.get("transposed", False)))
        z = a @ (weight if given else weight.t()) + b @ (low if given else low.t())
        out.copy_(z if bias is None else z + bias)

    monkeypatch.setattr(module, "can_sum_products", lambda *_: True)
    monkeypatch.setattr(module, "sum_products", sum_products)
    inputs = draw(device, 3, 5, bias=True)
    runs = []
    for way in ("both products at once", "one product after the other"):
        with _choice.forced(way):
            runs.append(run(tigon.lora_linear, inputs, scaling=1.5))
    assert shapes == [((15, 40), False), ((15, 48), True)]
    for name, value in runs[1].items():
        torch.testing.assert_close(runs[0][name], value, rtol=1e-5, atol=1e-5)


def test_the_sum_of_products_gets_what_descriptors_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tigon.ops._hopper_sum.multiply", hopper.multiply)
    monkeypatch.setattr(module, "can_sum_products", lambda *_: True)
    inputs, upstream = draw(torch.device("cpu"), 3, 5, bias=True), torch.randn(3, 5, 40)
    with _choice.forced("both products at once"):
        actual = run(tigon.lora_linear, inputs, scaling=1.5, upstream=upstream)
    expected = run(lora_linear_reference, inputs, scaling=1.5, upstream=upstream)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-5)


def test_results_may_be_written_to(backend: str, on_device: None) -> None:
    inputs = draw(torch.device("cpu" if torch.get_default_device().type == "cpu" else "cuda"), 3, 5)
    y = tigon.lora_linear(**leaves_of(inputs, FROZEN))
    y.add_(1).sum().backward()


# ---- dtypes ----


def plain(x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor, bias: Any = None, scaling: float = 1.0) -> Tensor:
    """As adapter libraries write it."""
    y = F.linear(x, weight, bias)
    h = x.to(lora_a.dtype)
    return (y + F.linear(F.linear(h, lora_a), lora_b) * scaling).to(y.dtype)


def _compare(function: Callable[..., Tensor], inputs: Inputs, upstream: Tensor, exact: dict[str, Any]) -> None:
    actual, plainly = (run(f, inputs, scaling=1.5, upstream=upstream) for f in (function, plain))
    for name, value in plainly.items():
        if value is not None:
            # dtype and shape are part of the budget.
            assert_within_budget(name, actual[name], value, exact[name])


def _exact(inputs: Inputs, upstream: Tensor) -> dict[str, Any]:
    return run(
        plain,
        {k: None if t is None else t.double() for k, t in inputs.items()},
        scaling=1.5,
        upstream=upstream.double(),
    )


def test_a_wider_adapter_is_computed_in_its_dtype(device: torch.device) -> None:
    inputs = draw(device, 4, 30, bias=True)
    inputs |= {k: inputs[k].to(low(device)) for k in ("x", "weight", "bias")}
    upstream = torch.randn(4, 30, 40, device=device).to(low(device))
    _compare(tigon.lora_linear, inputs, upstream, _exact(inputs, upstream))
    # The digits that 16 bits have not are in what the adapter gets and learns.
    learned = run(tigon.lora_linear, inputs, upstream=upstream, scaling=1.5)["lora_b"]
    exact = _exact(inputs, upstream)["lora_b"]
    assert float((learned - exact).norm() / exact.norm()) < 1e-6


@pytest.mark.parametrize("adapter", [torch.float32, torch.float16])
@pytest.mark.parametrize("layer", [torch.float32, torch.float16])
def test_autocast_is_that_of_linear(layer: torch.dtype, adapter: torch.dtype, device: torch.device) -> None:
    inputs = draw(device, 4, 30)
    inputs |= {k: inputs[k].to(layer) for k in ("x", "weight")} | {
        k: inputs[k].to(adapter) for k in ("lora_a", "lora_b")
    }
    upstream = torch.randn(4, 30, 40, device=device).to(low(device))
    exact = _exact(inputs, upstream)
    with torch.autocast(device.type, low(device)):
        _compare(tigon.lora_linear, inputs, upstream, exact)


def test_what_is_dropped_out_is_scaled_before_autocast_rounds_it(device: torch.device) -> None:
    x, seed = 1 + torch.rand(6, 64, device=device), torch.tensor(5, device=device)
    with torch.autocast(device.type, low(device)):
        y = dropped(x, dropout=0.3, seed=seed)
    kept = kept_by(seed, x.shape, 0.3)
    assert torch.equal(y, (x * (1 / 0.7)).to(low(device)) * kept)
    assert not torch.equal(y, (x.to(low(device)) * (1 / 0.7)).to(low(device)) * kept)


def test_dtypes_that_linear_refuses_are_refused(device: torch.device) -> None:
    inputs = draw(device, 4)
    for name in ("weight", "lora_b"):
        with pytest.raises(ValueError, match=f"lora_linear: {name}: expected dtype torch.float32 of"):
            tigon.lora_linear(**{**inputs, name: inputs[name].to(torch.float16)})


# ---- layouts and ranks ----


@pytest.mark.parametrize("rank", [1, 17, 40, 300])
def test_any_rank(rank: int, device: torch.device) -> None:
    inputs = draw(device, 9, rank=rank)
    for options in ({}, {"dropout": 0.5, "seed": torch.tensor(3, device=device)}):
        actual, expected = (run(f, inputs, FROZEN, **options) for f in (tigon.lora_linear, lora_linear_reference))
        for name in ("y", *FROZEN):
            torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-4)


def test_one_axis_and_odd_strides(device: torch.device) -> None:
    inputs = draw(device)
    assert tigon.lora_linear(**inputs).shape == (40,)
    inputs = draw(device, 6, 2)
    inputs["x"] = inputs["x"].transpose(0, 1)
    inputs["lora_a"] = torch.randn(48, 8, device=device).t()
    inputs["lora_b"] = torch.randn(40, 16, device=device)[:, ::2]
    actual, expected = (run(f, inputs) for f in (tigon.lora_linear, plain))
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(40, 47)}, r"weight: expected shape \(40, 48\), got \(40, 47\)"),
        ({"lora_a": torch.ones(8, 47)}, r"lora_a: expected shape \(rank, 48\), got \(8, 47\)"),
        ({"lora_a": torch.ones(0, 48)}, r"lora_a: expected shape \(rank, 48\), got \(0, 48\)"),
        ({"lora_b": torch.ones(40, 7)}, r"lora_b: expected shape \(40, 8\), got \(40, 7\)"),
        ({"bias": torch.ones(41)}, r"bias: expected shape \(40,\), got \(41,\)"),
        ({"dropout": 1.0}, r"dropout: expected a number in \[0, 1\), got 1.0"),
        ({"scaling": float("nan")}, "scaling: expected a finite number"),
        ({"dropout": 0.5, "seed": torch.ones(())}, "seed: expected an int64 scalar, got torch.float32"),
        ({"lora_a": torch.ones(8, 48, dtype=torch.int64)}, "lora_a: expected a floating-point dtype"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"lora_linear: {message}"):
        tigon.lora_linear(**{**draw(torch.device("cpu"), 4), **change})
