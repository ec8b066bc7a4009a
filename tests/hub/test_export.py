"""The exported repository: what it holds, that `kernels` takes it, and that it lives beside the installed package."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import tigon
from tigon import cli, hub
from tigon.hub import _export
from tigon.hub._layers import LAYERS

SOURCE = Path(tigon.__file__).parent


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hub.export(tmp_path_factory.mktemp("exported") / "kernels")


def metadata(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metadata.json").read_text())


def test_is_a_verbatim_copy_for_each_backend(exported: Path) -> None:
    folders = sorted((exported / "build").iterdir())
    assert [folder.name for folder in folders] == ["torch-cpu", "torch-cuda", "torch-rocm", "torch-xpu"]
    for folder in folders:
        names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        own = {
            path.relative_to(SOURCE).as_posix()
            for part in ("ops", "losses", "layers")
            for path in (SOURCE / part).rglob("*.py")
        }
        assert names == own | {"__init__.py", "_ops.py", "metadata.json"}
        for name in own:
            assert filecmp.cmp(folder / name, SOURCE / name, shallow=False), name
        assert metadata(folder) == {
            "name": "tigon",
            "id": f"_tigon_{folder.name.removeprefix('torch-')}_{_export.content_hash()}",
            "version": 1,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": folder.name.removeprefix("torch-")},
        }
    assert {path.name for path in exported.iterdir()} == {
        "LICENSE",
        "NOTICE",
        "README.md",
        "benchmarks",
        "build",
        "tests",
    }
    assert tigon.__version__ in (exported / "README.md").read_text()


def test_name_changes_with_the_content(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = metadata(exported / "build" / "torch-cpu")["id"]
    package = tmp_path / "tigon"
    for part in ("ops", "losses", "layers"):
        (package / part).mkdir(parents=True)
        (package / part / "x.py").write_text("x = 1\n")
    for name in ("__init__.py", "_ops.py"):
        (package / name).write_text((SOURCE / name).read_text())
    monkeypatch.setattr(_export, "PACKAGE", package)
    _export.export_backend(tmp_path / "one", "cpu")
    (package / "ops" / "x.py").write_text("x = 2\n")
    _export.export_backend(tmp_path / "two", "cpu")
    names = [metadata(tmp_path / which / "build" / "torch-cpu")["id"] for which in ("one", "two")]
    assert len({before, *names}) == 3


def test_tests_of_the_copy_pass(exported: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=exported, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
    assert "failed" not in done.stdout


def test_folder_with_something_in_it_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(FileExistsError, match=r"expected an empty folder, or none$"):
            hub.export(tmp_path, force=force)
    assert os.listdir(tmp_path) == ["notes.txt"]
    folder = tmp_path / "new"
    assert cli.main(["hub", "export", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder)
    assert cli.main(["hub", "export", str(folder)]) == 2
    assert "--force replaces an earlier export" in capsys.readouterr().err
    (folder / "build" / "torch-cpu" / "ops" / "old.py").write_text("")
    assert cli.main(["hub", "export", str(folder), "--force"]) == 0
    assert not (folder / "build" / "torch-cpu" / "ops" / "old.py").exists()


def test_repository_of_this_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGON_CACHE_DIR", str(tmp_path))
    first = hub.repository()
    made = (first / "README.md").stat().st_mtime_ns
    assert first.is_relative_to(tmp_path)
    assert hub.repository() == first
    assert (first / "README.md").stat().st_mtime_ns == made
    assert os.listdir(first.parent) == [first.name]
    monkeypatch.setenv("TIGON_CACHE_DIR", "")
    with pytest.raises(FileNotFoundError, match="TIGON_CACHE_DIR is empty"):
        hub.repository()


# ---- loaded by kernels ----


@pytest.fixture(scope="module")
def loaded(exported: Path) -> Any:
    kernels = pytest.importorskip("kernels")
    return kernels.get_local_kernel(exported)


def test_lives_beside_the_installed_package(loaded: Any) -> None:
    name = loaded.__name__
    assert loaded.rms_norm is not tigon.rms_norm
    assert loaded.OPS.keys() == tigon.OPS.keys()
    theirs, ours = (set(dir(getattr(torch.ops, n.removeprefix("_")))) for n in (name, "tigon"))
    x, weight = torch.randn(5, 24, requires_grad=True), torch.randn(24, requires_grad=True)
    results = []
    for package in (loaded, tigon):
        y = package.rms_norm(x, weight)
        results.append([y, *torch.autograd.grad(y.square().sum(), (x, weight))])
        torch._dynamo.reset()
        compiled = torch.compile(package.rms_norm, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, weight), y)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    theirs, ours = (getattr(torch.ops, n) for n in (name.removeprefix("_"), "tigon"))
    assert theirs.rms_norm_fwd.default.name() == f"{name.removeprefix('_')}::rms_norm_fwd"
    assert ours.rms_norm_fwd.default.name() == "tigon::rms_norm_fwd"
    # The backend of one is not that of the other.
    with tigon.backend("torch"):
        assert loaded.current_backend() == "auto"


def test_lives_beside_another_version(loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels import get_local_kernel

    shutil.copytree(SOURCE, tmp_path / "tigon", ignore=shutil.ignore_patterns("__pycache__", "repository"))
    file = tmp_path / "tigon" / "ops" / "_check.py"
    file.write_text(file.read_text() + "\nIS_ANOTHER = True\n")
    monkeypatch.setattr(_export, "PACKAGE", tmp_path / "tigon")
    _export.export_backend(tmp_path / "other", "cpu")
    other = get_local_kernel(tmp_path / "other")
    assert other.__name__ != loaded.__name__
    assert other.ops._check.IS_ANOTHER
    assert not hasattr(loaded.ops._check, "IS_ANOTHER")
    x = torch.randn(3, 8)
    assert torch.equal(other.rms_norm(x), loaded.rms_norm(x))


def test_loads_from_every_form_of_path(exported: Path, loaded: Any) -> None:
    from kernels import get_local_kernel

    for path in (exported, exported / "build", exported / "build" / "torch-cpu"):
        assert get_local_kernel(path).__name__ == loaded.__name__


HOSTS = {
    "RMSNorm": ("llama", "LlamaRMSNorm"),
    "LigerRMSNorm": ("gpt_oss", "GptOssRMSNorm"),
    "RMSNormZeroCentered": ("qwen3_5", "Qwen3_5RMSNorm"),
    "RMSNormGated": ("qwen3_next", "Qwen3NextRMSNormGated"),
    "SwiGLUMLP": ("llama", "LlamaMLP"),
    "LigerTiledGEGLUMLP": ("gemma", "GemmaMLP"),
    "rotary_pos_emb": ("llama", "apply_rotary_pos_emb"),
    "apply_rotary_transformers": ("qwen3", "apply_rotary_pos_emb"),
    "Linear": (None, nn.Linear),
    "GateUpMLP": ("llama", "LlamaMLP"),
    "SiLU": (None, transformers.activations.SiLUActivation),
    "Gelu": (None, transformers.activations.GELUActivation),
}


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("name", HOSTS)
def test_layer_passes_the_check_of_kernels(name: str, exported: Path) -> None:
    from kernels import LocalLayerRepository
    from kernels.layer.layer import _validate_layer

    module, host = HOSTS[name]
    if module is not None:
        host = getattr(__import__(f"transformers.models.{module}.modeling_{module}", fromlist=["_"]), host)
        host = type(host) if isinstance(host, nn.Module) else host
    repository = LocalLayerRepository(exported, layer_name=name)
    _validate_layer(check_cls=host, cls=repository.load(), repo=repository)


@pytest.mark.usefixtures("tables")
def test_check_of_kernels_bites(exported: Path) -> None:
    from kernels import LocalLayerRepository
    from kernels.layer.layer import _validate_layer

    repository = LocalLayerRepository(exported, layer_name="RMSNorm")
    with pytest.raises(TypeError, match="different number of arguments"):
        _validate_layer(check_cls=nn.Bilinear, cls=repository.load(), repo=repository)


@pytest.mark.usefixtures("tables")
def test_hub_names_are_redirected_to_the_folder(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LOCAL_KERNELS, which `kernels` reads whenever it loads, puts the folder in a repository's place, offline."""
    from kernels import LayerRepository

    monkeypatch.setenv("LOCAL_KERNELS", f"kernels-community/liger-kernels={exported}")
    repository = LayerRepository("kernels-community/liger-kernels", layer_name="LigerRMSNorm", revision="main")
    assert repository.load().__module__.startswith("_tigon_cpu_")


def test_every_layer_named_in_the_table_exists() -> None:
    for name, layer in LAYERS.items():
        assert issubclass(getattr(tigon.layers, layer), nn.Module), name
        assert getattr(tigon.layers, name) is getattr(tigon.layers, layer)
