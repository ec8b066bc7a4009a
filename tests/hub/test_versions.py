"""What transformers' own `KernelConfig` does with a folder of layers: the rows of the table in docs/hub.md.

A row that a later version mends fails here, and is then taken out of the table.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from tests.hub.calls import counted
from tests.hub.conftest import load, make_model
from tests.hub.test_config import assert_same_step, step
from transformers.utils import kernel_config

import tigon
from tigon.hub import export
from tigon.hub._layers import INSTALLED

pytestmark = [
    pytest.mark.usefixtures("tables"),
    # kernels 0.16 says so of the names that a test leaves out.
    pytest.mark.filterwarnings("ignore:(?s).*No kernel mapping found for layer:UserWarning"),
]
LOCAL = {"RMSNorm": f"{INSTALLED}:RMSNorm"}


@pytest.fixture(autouse=True)
def _plain() -> Any:
    with tigon.backend("torch"):
        yield


@pytest.fixture
def as_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes the CPU for a GPU; nothing here computes on one."""
    from kernels import Device
    from kernels.layer import repos
    from transformers.integrations import hub_kernels

    monkeypatch.setattr(kernel_config, "infer_device", lambda model: "cuda")

    def device(type: str, properties: Any = None) -> Any:
        return Device("cuda" if properties is None else type, properties)

    monkeypatch.setattr(hub_kernels, "Device", device)
    monkeypatch.setattr(repos, "_find_capability", lambda: 90)


@pytest.mark.usefixtures("as_cuda")
def test_a_folder_in_from_pretrained_crashes(folders: dict[str, Path]) -> None:
    config = transformers.KernelConfig(LOCAL, use_local_kernel=True)
    with pytest.raises(AttributeError, match="'tuple' object has no attribute 'split'"):
        load(folders["Llama"], use_kernels=True, kernel_config=config)


def test_a_dictionary_of_devices_is_refused(folders: dict[str, Path]) -> None:
    entry = {"cuda": LOCAL["RMSNorm"], "rocm": LOCAL["RMSNorm"]}
    config = transformers.KernelConfig({"RMSNorm": entry}, use_local_kernel=True)
    with pytest.raises(ValueError, match="Expected exactly one kernel repo"):
        load(folders["Llama"], use_kernels=True, kernel_config=config)


def test_a_cpu_is_refused() -> None:
    config = transformers.KernelConfig(LOCAL, use_local_kernel=True)
    with pytest.raises(ValueError, match=r"(Only cuda|Only devices in).* supported, got: cpu"):
        make_model("Llama").set_use_kernels(True, config)


@pytest.mark.usefixtures("as_cuda")
@pytest.mark.parametrize("first", ["train", "eval"])
def test_a_mode_is_chosen_when_it_is_set(first: str) -> None:
    """Set in evaluation, as `from_pretrained` does, the layer is silently not used in training."""
    model = make_model("Llama").train(first == "train")
    expected = step(model)
    model.set_use_kernels(True, transformers.KernelConfig(LOCAL, use_local_kernel=True))
    used = {}
    for mode in (True, False):
        with counted() as calls:
            assert_same_step(step(model.train(mode)), expected)
        used[mode] = calls["rms_norm"]
    assert used == {True: 5 if first == "train" else 0, False: 5}


@pytest.mark.usefixtures("as_cuda")
def test_ours_is_used_in_both_on_a_gpu(folders: dict[str, Path]) -> None:
    model = load(folders["Llama"], use_kernels=True, kernel_config=tigon.KernelConfig())
    for mode in (True, False):
        with counted() as calls:
            step(model.train(mode))
        assert calls["rms_norm"] == calls["rms_norm backward"] == 5


@pytest.mark.usefixtures("as_cuda")
def test_a_host_without_an_entry_gets_no_default(folders: dict[str, Path]) -> None:
    """The default would be looked for on the Hub."""
    config = tigon.KernelConfig({"RMSNorm": None}, inherit_mapping=True)
    model = load(folders["Llama"], use_kernels=True, kernel_config=config)
    with counted() as calls:
        step(model.train())
    assert (calls["rms_norm"], calls["glu"]) == (0, 2)


@pytest.mark.usefixtures("as_cuda")
def test_a_repository_by_name_runs_in_evaluation_alone(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The form of the documentation of transformers, with LOCAL_KERNELS for a Hub."""
    root = export(tmp_path / "kernels")
    monkeypatch.setenv("LOCAL_KERNELS", f"someone/kernels={root}")
    name = ("someone/kernels:LigerRMSNorm", {"revision": "main"})
    config = transformers.KernelConfig({"RMSNorm": name}, inherit_mapping=False)
    model = load(folders["Llama"], use_kernels=True, kernel_config=config)
    assert model.model.norm.forward.__module__.startswith("_tigon_cpu_")
    model.train()
    assert not model.model.norm.forward.__module__.startswith("_tigon_cpu_")
    # With ours, the same entry serves both.
    config = tigon.KernelConfig({"RMSNorm": name})
    model = load(folders["Llama"], use_kernels=True, kernel_config=config)
    for mode in (True, False):
        assert model.train(mode).model.norm.forward.__module__.startswith("_tigon_cpu_")


def test_arguments_with_a_configuration_of_transformers_are_no_json() -> None:
    import json

    with pytest.raises(TypeError, match="not JSON serializable"):
        json.dumps({"kernel_config": transformers.KernelConfig()})
    assert json.loads(json.dumps({"kernel_config": tigon.KernelConfig()}))


def test_models_are_not_pickled_with_kernels() -> None:
    import pickle

    with pytest.raises(AttributeError, match=r"_create_func_module.<locals>.Func"):
        pickle.dumps(make_model("Llama"))


def test_docs_have_the_versions_that_are_installed() -> None:
    import kernels

    text = (Path(__file__).parents[2] / "docs" / "hub.md").read_text(encoding="utf-8")
    minor = ".".join(transformers.__version__.split(".")[:2])
    pair = rf"{re.escape(minor)}\.\d+ and {re.escape(kernels.__version__)}"
    row = re.compile(rf"^\| {re.escape(minor)} \| .* \| {pair} \|", re.M)
    assert len(row.findall(text)) == 1
