"""Patched models of seven families against themselves unpatched."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch

import tigon

FAMILIES = ("Llama", "Qwen2", "Qwen3", "Gemma2", "Mistral", "Phi3", "Olmo2")
# Norms of two layers and the last one.
NORMS = {"Llama": 5, "Qwen2": 5, "Qwen3": 9, "Gemma2": 9, "Mistral": 5, "Phi3": 5, "Olmo2": 9}
VARIANTS = {"Gemma2": "scale_then_cast, offset 1", "Olmo2": "scale_then_cast"}
GLUS = {"Gemma2": "gelu_tanh", "Phi3": "silu, packed"}


def rows_of(report: tigon.Report) -> dict[str, Any]:
    return {row.form: row for row in report}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_norm_mlp_rotation_and_the_loss_are_replaced(family: str, build: Any) -> None:
    report = tigon.patch(build(family))
    rows = rows_of(report)
    assert [row.reason for row in report.kept] == []
    assert (rows["rms_norm"].count, rows["rms_norm"].variant) == (
        NORMS[family],
        VARIANTS.get(family, "cast_then_scale"),
    )
    assert (rows["glu"].count, rows["glu"].variant) == (2, GLUS.get(family, "silu"))
    assert (rows["rope"].count, rows["rope"].variant) == (2, "half")
    assert rows["linear_cross_entropy"].modules == ("",)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_those_of_the_native_model(
    family: str, build: Any, batch: Any, step: Any, assert_same_step: Any
) -> None:
    model = build(family)
    native = step(model, batch)
    tigon.patch(model)
    patched = step(model, batch)
    assert patched["output"].logits is None
    assert_same_step(patched, native)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_patched_model_calls_the_operators(
    family: str, build: Any, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tigon.patch import _glu, _head, _norms, _rope

    calls: list[str] = []

    def counted(module: Any, name: str) -> None:
        operator = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return operator(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    model = build(family)
    tigon.patch(model)
    for module, name in ((_norms, "rms_norm"), (_glu, "glu"), (_rope, "rope"), (_head, "linear_cross_entropy")):
        counted(module, name)
    model(**batch)
    assert {name: calls.count(name) for name in set(calls)} == {
        "rms_norm": NORMS[family],
        "glu": 2,
        "rope": 2,
        "linear_cross_entropy": 1,
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_unpatch_restores_the_very_same_functions(family: str, build: Any, batch: Any) -> None:
    model = build(family)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    logits = model(**batch).logits
    tigon.patch(model)
    tigon.unpatch(model)
    for name, module in model.named_modules():
        assert module.__dict__.keys() == before[name].keys(), name
        assert module.forward.__func__ is type(module).forward
    torch.testing.assert_close(model(**batch).logits, logits, rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_b100_greedy_generation_gives_the_same_tokens(family: str, build: Any, batch: Any) -> None:
    model = build(family).eval()
    options = {"max_new_tokens": 4, "do_sample": False}
    ids = batch["input_ids"]
    native = [model.generate(ids, use_cache=cache, **options) for cache in (True, False)]
    tigon.patch(model)
    patched = [model.generate(ids, use_cache=cache, **options) for cache in (True, False)]
    assert all(torch.equal(a, b) for a, b in zip(patched, native, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_b07_b104_signatures_and_keys_do_not_change(family: str, build: Any) -> None:
    model = build(family)
    keys = list(model.state_dict())
    signatures = {name: inspect.signature(module.forward) for name, module in model.named_modules()}
    tigon.patch(model)
    assert list(model.state_dict()) == keys
    for name, module in model.named_modules():
        assert inspect.signature(module.forward) == signatures[name], name


def test_b23_norms_before_and_after_a_block_train_alike(build: Any, batch: Any, step: Any) -> None:
    native, patched = build("Gemma2"), build("Gemma2")
    tigon.patch(patched)
    losses = []
    for model in (native, patched):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        row = []
        for _ in range(3):
            row.append(float(step(model, batch)["loss"]))
            optimizer.step()
        losses.append(row)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("family", ["Gemma", "Gemma2", "Llama"])
def test_b30_an_offset_is_found_from_random_weights_and_zero_weights(family: str, build: Any, batch: Any) -> None:
    model = build(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.zero_()
    native = model.eval()(**batch)
    tigon.patch(model)
    torch.testing.assert_close(model(**batch).logits, native.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "silu"])
def test_b71_the_activation_is_found_from_what_the_mlp_computes(activation: str, build: Any) -> None:
    model = build("Gemma2", hidden_activation=activation)
    mlp = model.model.layers[0].mlp
    x = torch.randn(4, 7, 32) * 3
    native = mlp(x)
    report = tigon.patch(model, only=["glu"])
    assert rows_of(report)["glu"].variant == activation.replace("_pytorch", "")
    torch.testing.assert_close(mlp(x), native, rtol=1e-5, atol=1e-5)


def test_b71_an_unknown_activation_is_left_alone(build: Any) -> None:
    model = build("Gemma2", hidden_activation="gelu_10")
    report = tigon.patch(model, skip=["rope"])
    row = rows_of(report)["glu"]
    assert (row.verdict, row.reason) == ("kept", "no candidate computes the same")
    assert "forward" not in model.model.layers[0].mlp.__dict__


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Olmo2"])
def test_k05_norms_round_where_the_native_ones_do(family: str, weights: torch.dtype, build: Any) -> None:
    """A norm that rounds elsewhere differs in a third of the elements, or in the dtype of the result."""
    norm = build(family).model.norm.to(weights)
    x = torch.randn(64, 32).to(torch.bfloat16)
    native = norm(x)
    tigon.patch(norm)
    patched = norm(x)
    assert patched.dtype == native.dtype
    assert (patched != native).float().mean() < 0.01


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Olmo2"])
@pytest.mark.parametrize("weights", ["bf16", "fp32"])
def test_k05_bf16_results_have_the_dtype_and_the_accuracy_of_the_native_model(
    family: str, weights: str, build: Any, batch: Any
) -> None:
    """Against the native model in fp64, as the native bf16 model is."""
    model = build(family).eval()
    exact = copy.deepcopy(model).double()(**batch).logits
    if weights == "bf16":
        model = model.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=weights == "fp32"):
        native = model(**batch).logits
        tigon.patch(model)
        patched = model(**batch).logits
    assert patched.dtype == native.dtype
    error, own = ((logits.double() - exact).square().mean().sqrt() for logits in (patched, native))
    assert error <= 1.5 * own


@pytest.mark.kernels
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_the_kernels_in_a_patched_model(family: str, build: Any, batch: Any, step: Any, assert_same_step: Any) -> None:
    model = build(family, num_hidden_layers=1)
    native = step(model, batch)
    tigon.patch(model)
    assert_same_step(step(model, batch), native)


# Structures the seven families do not have, with what of them is left alone.
OTHERS: dict[str, dict[str, str]] = {
    "Granite": {},
    "Cohere": {},
    "Glm": {},
    "Phi": {},
    "GPTNeoX": {},
    "GptOss": {},
    "Mixtral": {},
    "Starcoder2": {},
    "Nemotron": {},
    "FalconH1": {},
}
OTHER_OPTIONS: dict[str, dict[str, Any]] = {
    "FalconH1": {"mlp_multipliers": [0.7, 1.3], "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
}


@pytest.mark.parametrize("family", OTHERS)
def test_other_structures_train_alike_and_say_what_was_kept(
    family: str, build: Any, batch: Any, step: Any, assert_same_step: Any
) -> None:
    model = build(family, **OTHER_OPTIONS.get(family, {}))
    native = step(model, batch)
    report = tigon.patch(model)
    assert {row.form: row.reason for row in report.kept} == OTHERS[family]
    assert "linear_cross_entropy" in {row.form for row in report.replaced}
    # Some of these native models are 1e-4 from their own fp64 gradients.
    assert_same_step(step(model, batch), native, gradient=1e-3)


def test_layouts_of_the_rotation_are_told_apart(build: Any) -> None:
    variants = {family: rows_of(tigon.patch(build(family)))["rope"].variant for family in ("Phi", "Glm", "GptOss")}
    assert variants == {"Phi": "half", "Glm": "interleaved, half tables", "GptOss": "half, half tables"}
