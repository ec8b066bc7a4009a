"""Models loaded with `kernel_config=tigon.KernelConfig()`: our layers, the native numbers, in every mode."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.hub.calls import counted
from tests.hub.conftest import FAMILIES, load, make_model
from torch import nn

import tigon
from tigon.hub import export

pytestmark = pytest.mark.usefixtures("tables")
IDS = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
# Calls in a forward: 4 layers' norms and the last, in Qwen3 those of queries and keys too.
CALLS = {
    "Llama": {"rms_norm": 5, "rope": 2, "glu": 2, "cross_entropy": 1},
    "Qwen3": {"rms_norm": 9, "rope": 2, "glu": 2, "cross_entropy": 1},
}


@pytest.fixture(autouse=True)
def _plain(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a CPU the interpreter is slow: kernels run in the tests that ask for them."""
    with tigon.backend("auto" if "device" in request.fixturenames else "torch"):
        yield


def step(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(input_ids=IDS, attention_mask=MASK, labels=IDS).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def both_ways(calls: dict[str, int]) -> dict[str, int]:
    return calls | {f"{name} backward": count for name, count in calls.items()}


def without(name: str, calls: dict[str, int]) -> dict[str, int]:
    return {key: count for key, count in calls.items() if key != name}


def assert_same_step(ours: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-5, atol=1e-5)
    assert ours[1].keys() == expected[1].keys()
    for name in expected[1]:
        torch.testing.assert_close(ours[1][name], expected[1][name], rtol=1e-5, atol=1e-5)


def generated(model: nn.Module) -> torch.Tensor:
    return model.generate(IDS[:, :4], attention_mask=MASK[:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_is_native_through_all_modes(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    native = load(folders[family])
    expected = [step(native.train(mode)) for mode in (True, False)]
    sequence = generated(native.eval())
    model = load(folders[family], use_kernels=True, kernel_config=tigon.KernelConfig())
    for mode in (False, True, False):
        model.train(mode)
        with counted() as calls:
            assert_same_step(step(model), expected[not mode])
        assert calls == both_ways(CALLS[family]), mode
    with counted() as calls:
        assert torch.equal(generated(model.eval()), sequence)
    assert calls["rms_norm"] == 3 * CALLS[family]["rms_norm"]
    model.save_pretrained(tmp_path)
    again = load(tmp_path, use_kernels=True, kernel_config=tigon.KernelConfig())
    assert again.state_dict().keys() == native.state_dict().keys()
    assert_same_step(step(again.train()), expected[0])
    assert type(again.model.norm) is type(native.model.norm)


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_with_kernels_are_native(family: str, folders: dict[str, Path], device: torch.device) -> None:
    losses = []
    for options in ({}, {"use_kernels": True, "kernel_config": tigon.KernelConfig()}):
        model = load(folders[family], **options).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for _ in range(3):
            losses[-1].append(float(step(model)[0]))
            optimizer.step()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][2] < losses[0][0] - 0.1


def test_low_precision_is_as_near_to_fp64_as_native(folders: dict[str, Path]) -> None:
    exact = step(load(folders["Llama"]).double())
    native = step(load(folders["Llama"]).bfloat16())
    model = load(folders["Llama"], use_kernels=True, kernel_config=tigon.KernelConfig()).bfloat16()
    ours = step(model)

    def error(name: str, of: tuple[Any, Any]) -> float:
        return float((of[1][name].double() - exact[1][name]).norm())

    assert sum(error(name, ours) for name in exact[1]) <= 1.5 * sum(error(name, native) for name in exact[1])


def test_config_serves_many_models_and_stays_as_it_is(folders: dict[str, Path]) -> None:
    config = tigon.KernelConfig({"SwiGLUMLP": None})
    before = json.dumps(config)
    for family in FAMILIES:
        model = load(folders[family], use_kernels=True, kernel_config=config).train()
        with counted() as calls:
            step(model)
        assert calls == both_ways(without("glu", CALLS[family]))
    assert json.dumps(config) == before


def test_config_travels() -> None:
    mapping = {"SiLU": None, "RMSNorm": {"cuda": "org/repo:Norm"}}
    config = tigon.KernelConfig(mapping, inherit_mapping=True, gate_up=["MLP"])

    @dataclasses.dataclass
    class Arguments:
        model_init_kwargs: dict

    copies = [
        tigon.KernelConfig(**json.loads(json.dumps(config))),
        pickle.loads(pickle.dumps(config)),
        copy.deepcopy(config),
        dataclasses.asdict(Arguments({"kernel_config": config}))["model_init_kwargs"]["kernel_config"],
    ]
    for other in copies:
        assert type(other) is tigon.KernelConfig
        assert (
            dict(other)
            == dict(config)
            == {
                "kernel_mapping": mapping,
                "inherit_mapping": True,
                "gate_up": ["MLP"],
            }
        )
        assert other.inherit_mapping is True


def test_copy_of_a_model_trains_on_its_own_weights(folders: dict[str, Path]) -> None:
    model = load(folders["Llama"], use_kernels=True, kernel_config=tigon.KernelConfig()).train()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    with counted() as calls:
        loss, _ = step(other)
    assert calls == both_ways(CALLS["Llama"])
    torch.testing.assert_close(loss, step(load(folders["Llama"]))[0], rtol=1e-5, atol=1e-5)


# ---- entries ----


def test_hosts_without_an_entry_keep_their_forward(folders: dict[str, Path]) -> None:
    config = tigon.KernelConfig(dict.fromkeys(["RMSNorm", "rotary_pos_emb", "ForCausalLMLoss", "SiLU", "SwiGLUMLP"]))
    with pytest.warns(UserWarning, match="nothing in LlamaForCausalLM is replaced"):
        model = load(folders["Llama"], use_kernels=True, kernel_config=config)
    with counted() as calls:
        step(model.train())
    assert not calls


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("exported") / "kernels")


@pytest.mark.parametrize("form", ["string", "tuple", "device"])
def test_layers_of_an_exported_folder(form: str, exported: Path, folders: dict[str, Path]) -> None:
    """The form of the mapping in the documentation of transformers, with a folder for a repository."""
    entry: Any = f"{exported}:LigerRMSNorm"
    entry = {"string": entry, "tuple": (entry, {"version": 1}), "device": {"cpu": entry, "cuda": entry}}[form]
    expected = step(load(folders["Llama"]).train())
    config = tigon.KernelConfig(kernel_mapping={"RMSNorm": entry}, use_local_kernel=True)
    model = load(folders["Llama"], use_kernels=True, kernel_config=config).train()
    copied = json.loads((exported / "build" / "torch-cpu" / "metadata.json").read_text())["id"]
    with counted() as ours, counted(copied) as theirs:
        assert_same_step(step(model), expected)
    assert theirs == both_ways({"rms_norm": 5})
    assert ours == both_ways(without("rms_norm", CALLS["Llama"]))


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"RMSNorm": "nonsense"}, "RMSNorm: expected 'org/repo:Layer'"),
        ({"RMSNorm": {"cuda": 3}}, "RMSNorm: expected 'org/repo:Layer'"),
        ({"RMSNorm": ("org/repo:Layer", {}, 1)}, "RMSNorm: expected 'org/repo:Layer'"),
    ],
)
def test_entry_of_another_form_is_refused(mapping: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tigon.KernelConfig(mapping)


def test_names_and_folders_that_are_not_there(folders: dict[str, Path]) -> None:
    for mapping, message in (
        ({"Norm": "org/repo:Layer"}, "expected one of .*RMSNorm.*, got 'Norm'"),
        ({"RMSNorm": "/nowhere/at/all:Layer"}, "no folder /nowhere/at/all"),
    ):
        with pytest.raises(ValueError, match=message):
            load(folders["Llama"], use_kernels=True, kernel_config=tigon.KernelConfig(mapping))
    with pytest.raises(ValueError, match="gate_up: expected names of classes in a list, got 'LlamaMLP'"):
        tigon.KernelConfig(gate_up="LlamaMLP")


def test_kernels_that_are_not_taken_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USE_HUB_KERNELS", "NO")
    with pytest.raises(ValueError, match="USE_HUB_KERNELS=NO switches kernels off"):
        tigon.KernelConfig()
    monkeypatch.delenv("USE_HUB_KERNELS")
    monkeypatch.setenv("DISABLE_KERNEL_MAPPING", "1")
    with pytest.raises(ValueError, match="DISABLE_KERNEL_MAPPING=1 switches kernels off"):
        tigon.KernelConfig()
    monkeypatch.delenv("DISABLE_KERNEL_MAPPING")
    monkeypatch.setattr(transformers.utils.import_utils, "is_kernels_available", lambda: False)
    with pytest.raises(ImportError, match=r"KernelConfig: transformers .* needs kernels>=.*,<.*, found "):
        tigon.KernelConfig()


# ---- what else happens to a model ----


def test_adapters(folders: dict[str, Path]) -> None:
    peft = pytest.importorskip("peft")
    results = []
    for options in ({}, {"use_kernels": True, "kernel_config": tigon.KernelConfig()}):
        torch.manual_seed(3)
        lora = peft.LoraConfig(r=2, target_modules=["gate_proj", "down_proj", "q_proj"], init_lora_weights=False)
        model = peft.get_peft_model(load(folders["Llama"], **options), lora).train()
        with counted() as calls:
            loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        results.append(((loss.detach(), grads), +calls))
    assert_same_step(results[1][0], results[0][0])
    assert {name: results[1][1][name] for name in CALLS["Llama"]} == CALLS["Llama"]


def test_gradient_checkpointing(folders: dict[str, Path]) -> None:
    expected = step(load(folders["Llama"]).train())
    model = load(folders["Llama"], use_kernels=True, kernel_config=tigon.KernelConfig()).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same_step(step(model), expected)


def test_compiles_whole() -> None:
    model = make_model("Llama", num_hidden_layers=1).train()
    expected = step(model)
    model.set_use_kernels(True, tigon.KernelConfig())
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    assert_same_step(step(model), expected)


def test_fused_loss_of_patch_goes_with_it(folders: dict[str, Path]) -> None:
    """`tigon.patch` leaves layers that have a forward already, and adds the head that never makes logits."""
    expected = step(load(folders["Llama"]).train())
    config = tigon.KernelConfig({"ForCausalLMLoss": None})
    model = load(folders["Llama"], use_kernels=True, kernel_config=config).train()
    report = tigon.patch(model)
    assert any("cross_entropy" in str(row) for row in report.replaced), report
    assert_same_step(step(model), expected)
    model.eval()
    assert_same_step(step(model.train()), expected)


# ---- one projection for two ----


def needs_layouts() -> None:
    """Without torchvision transformers to 5.20 cannot look for a class: that is said before anything is changed."""
    try:
        _ = tigon.KernelConfig(gate_up=["AnyMLP"]).kernel_mapping
    except ImportError as error:
        if re.search(r"gate_up: to find a class, transformers .* No module named 'torchvision'", str(error)):
            pytest.skip(str(error))
        raise


@pytest.mark.parametrize("family", FAMILIES)
def test_gate_and_up_become_one_and_two_again(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    needs_layouts()
    native = load(folders[family]).train()
    expected = step(native)
    config = tigon.KernelConfig(gate_up=[f"{family}MLP"])
    conversions = importlib.import_module("transformers.conversion_mapping")._checkpoint_conversion_mapping_cache
    before = {key: list(value) for key, value in conversions.items()}
    for _ in range(2):
        model = load(folders[family], use_kernels=True, kernel_config=config).train()
        with counted() as calls:
            loss, grads = step(model)
        assert calls["rms_norm"] == CALLS[family]["rms_norm"]
        torch.testing.assert_close(loss, expected[0], rtol=1e-5, atol=1e-5)
        for layer in range(2):
            ours = grads[f"model.layers.{layer}.mlp.gate_up_proj.weight"]
            two = [expected[1][f"model.layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
            torch.testing.assert_close(ours, torch.cat(two), rtol=1e-5, atol=1e-5)
    # As saved and loaded by those who know nothing of it.
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    for name, value in native.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    # What loading put into tables of the process is gone.
    assert {key: list(value) for key, value in conversions.items()} == before
    assert type(load(folders[family]).model.layers[0].mlp) is type(native.model.layers[0].mlp)


def test_gate_up_of_a_class_that_is_not_there(folders: dict[str, Path]) -> None:
    needs_layouts()
    with pytest.raises(ValueError, match="no module of a class NoSuchMLP was made"):
        load(folders["Llama"], use_kernels=True, kernel_config=tigon.KernelConfig(gate_up=["NoSuchMLP"]))
    model = make_model("Llama")
    with pytest.raises(ValueError, match="from_pretrained alone reads it"):
        model.set_use_kernels(True, tigon.KernelConfig(gate_up=["LlamaMLP"]))


def test_model_made_without_a_checkpoint(folders: dict[str, Path]) -> None:
    model = make_model("Llama").train()
    expected = step(model)
    model.set_use_kernels(True, tigon.KernelConfig())
    with counted() as calls:
        assert_same_step(step(model), expected)
    assert calls == both_ways(CALLS["Llama"])
