"""A plain `use_kernels=True`, after `tigon.register_kernels()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hub.calls import counted
from tests.hub.conftest import FAMILIES, load
from tests.hub.test_config import CALLS, assert_same_step, both_ways, step

import tigon
from tigon.hub._layers import LAYERS, InstalledLayer

pytestmark = pytest.mark.usefixtures("tables")


@pytest.fixture(autouse=True)
def _registered(tables: None) -> Any:
    with tigon.backend("torch"):
        yield
    tigon.unregister_kernels()


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_use_kernels_trains_with_our_layers(family: str, folders: dict[str, Path]) -> None:
    expected = [step(load(folders[family]).train(mode)) for mode in (True, False)]
    tigon.register_kernels()
    model = load(folders[family], use_kernels=True)
    calls_of = {name: CALLS[family][name] for name in ("rms_norm", "rope")}
    for mode in (False, True, False):
        model.train(mode)
        with counted() as calls:
            assert_same_step(step(model), expected[not mode])
        assert calls == both_ways(calls_of)


def test_unregistered_means_native_again(folders: dict[str, Path]) -> None:
    tigon.register_kernels()
    tigon.register_kernels()
    model = load(folders["Llama"], use_kernels=True)
    tigon.unregister_kernels()
    tigon.unregister_kernels()
    model.train()
    with counted() as calls:
        step(model)
        step(load(folders["Llama"], use_kernels=True).train())
    assert not calls


def test_classes_get_and_lose_a_name(folders: dict[str, Path]) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    expected = step(load(folders["Llama"]).train())
    tigon.register_kernels({LlamaMLP: "SwiGLUMLP"})
    model = load(folders["Llama"], use_kernels=True).train()
    with counted() as calls:
        assert_same_step(step(model), expected)
    assert calls["glu"] == calls["glu backward"] == 2
    tigon.unregister_kernels()
    assert not hasattr(LlamaMLP, "kernel_layer_name")
    assert not hasattr(LlamaMLP, "kernel_condition")


def test_wrong_names() -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    with pytest.raises(ValueError, match=r"LlamaMLP: expected one of RMSNorm, .*, got 'MLP'"):
        tigon.register_kernels({LlamaMLP: "MLP"})
    with pytest.raises(ValueError, match="LlamaRMSNorm: it has the name 'RMSNorm', got 'RMSNormGated'"):
        tigon.register_kernels({LlamaRMSNorm: "RMSNormGated"})


def test_default_table_of_transformers_does_not_come_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA there are defaults for the same names, which transformers registers again for every model."""
    from kernels import Mode
    from kernels.layer import repos
    from kernels.layer.globals import _KERNEL_MAPPING
    from transformers.integrations.hub_kernels import (
        get_kernel_mapping_transformers,
        register_kernel_mapping_transformers,
    )

    monkeypatch.setattr(repos, "_find_capability", lambda: 90)
    table = _KERNEL_MAPPING.get()

    def found(device: str) -> dict[str, Any]:
        register_kernel_mapping_transformers()
        chosen = {}
        for name in LAYERS:
            places = table.get(name, {}).get(device)
            for mode in (Mode.TRAINING, Mode.INFERENCE, Mode.TRAINING | Mode.TORCH_COMPILE):
                selected = places and repos._select_repository(places.repos or {}, mode=mode)
                chosen[name, mode] = selected and selected[0]
        return chosen

    before = {device: found(device) for device in ("cuda", "rocm", "cpu")}
    assert any(before["cuda"].values())
    assert not any(isinstance(repository, InstalledLayer) for repository in before["cuda"].values())
    tigon.register_kernels()
    for device in ("cuda", "rocm", "cpu"):
        for (name, _), repository in found(device).items():
            assert repository == InstalledLayer(LAYERS[name]), (device, name)
    tigon.unregister_kernels()
    assert {device: found(device) for device in ("cuda", "rocm", "cpu")} == before
    assert set(LAYERS) <= {*get_kernel_mapping_transformers(), "RMSNormZeroCentered"}


def test_what_others_registered_is_there_again() -> None:
    from kernels import Device, Mode, register_kernel_mapping
    from kernels.layer.globals import _KERNEL_MAPPING

    theirs = InstalledLayer("GeLU")
    register_kernel_mapping({"SiLU": {Device(type="cpu"): {Mode.TRAINING: theirs}}})
    tigon.register_kernels()
    assert _KERNEL_MAPPING.get()["SiLU"]["cpu"].repos[Mode.TRAINING] == InstalledLayer("SiLU")
    tigon.unregister_kernels()
    assert _KERNEL_MAPPING.get()["SiLU"]["cpu"].repos == {Mode.TRAINING: theirs}


def test_xpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="on an XPU transformers overwrites what is registered"):
        tigon.register_kernels()
