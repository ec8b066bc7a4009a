"""How the package comes under its name, in fresh interpreters: without files, with the distribution, or not at all."""

from __future__ import annotations

import importlib
import importlib.metadata
import multiprocessing
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SHIM = ROOT / "compat" / "liger_kernel"


@pytest.fixture
def unnamed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`tigon.as_liger` as before it is imported: nothing has the name."""
    import tigon.as_liger as as_liger

    for name in [name for name in sys.modules if name == "liger_kernel" or name.startswith("liger_kernel.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if not isinstance(each, as_liger._Finder)])
    return as_liger


def run(code: str, *paths: Path, fails: bool = False, **env: str) -> str:
    """Standard output of `code`; if it fails, standard error."""
    env = {**{k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "TIGON_"))}, **env}
    env["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT / "src", *paths)))
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
        cwd="/",
    )
    assert (done.returncode != 0) == fails, done.stderr
    return done.stderr if fails else done.stdout


def test_without_files() -> None:
    out = run(
        """
        import importlib.metadata, sys
        import tigon.as_liger
        from liger_kernel.transformers import LigerRMSNorm, apply_liger_kernel_to_llama
        from liger_kernel.ops import LigerRMSNormFunction
        import liger_kernel.functional
        print([name for name in ("transformers", "peft", "trl", "torch._dynamo") if name in sys.modules])

        apply_liger_kernel_to_llama()
        import transformers
        assert transformers.utils.is_liger_kernel_available()
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
        )
        model = transformers.LlamaForCausalLM(config)
        forms = {module._tigon.form for module in model.modules() if hasattr(module, "_tigon")}
        print(sorted(forms), importlib.metadata.version("liger_kernel"))
        """
    )
    assert out.splitlines() == ["[]", "['glu', 'linear_cross_entropy', 'rms_norm', 'rope'] 0.9.0"]


def test_who_asked_too_early_may_ask_again(unnamed: Any) -> None:
    available = pytest.importorskip("transformers").utils.is_liger_kernel_available
    available.cache_clear()
    assert not available()
    unnamed.install()
    unnamed.install()
    assert available()


def test_who_takes_it_out_of_the_modules_gets_it_again(unnamed: Any) -> None:
    unnamed.install()
    first = importlib.import_module("liger_kernel.transformers")
    for name in [name for name in sys.modules if name.startswith("liger_kernel")]:
        del sys.modules[name]
    assert importlib.metadata.version("liger-kernel") == "0.9.0"
    again = importlib.import_module("liger_kernel.transformers")
    assert again is not first
    assert again.__spec__.origin == first.__spec__.origin
    del sys.modules["liger_kernel"]
    unnamed.install()
    importlib.reload(sys.modules["liger_kernel"])
    assert len([finder for finder in sys.meta_path if isinstance(finder, unnamed._Finder)]) == 1
    with pytest.raises(ImportError, match="no counterpart"):
        importlib.import_module("liger_kernel.megatron")


def test_without_transformers() -> None:
    out = run(
        """
        import sys
        sys.modules["transformers"] = sys.modules["peft"] = None
        import tigon.as_liger, torch
        import liger_kernel.transformers as module
        from liger_kernel.transformers import LigerRMSNorm

        print(LigerRMSNorm(8)(torch.ones(2, 8)).shape, module.is_transformers_available())
        try:
            module.apply_liger_kernel_to_llama
        except ImportError as error:
            print(error)
        """
    )
    assert out.splitlines() == [
        "torch.Size([2, 8]) False",
        "liger_kernel.transformers.apply_liger_kernel_to_llama needs transformers: pip install 'tigon[hf]'",
    ]


def test_a_patched_model_goes_to_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from tests.compat.conftest import batch, config_of, put_loss

    model = pytest.importorskip("transformers").LlamaForCausalLM(config_of("Llama"))
    _apply_liger_kernel_to_instance(model, cross_entropy=True)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=put_loss, args=(model, queue))
    with monkeypatch.context() as patched:
        # A new process would run the kernels in the interpreter too.
        patched.delenv("TRITON_INTERPRET", raising=False)
        process.start()
    there, is_known = queue.get(timeout=60)
    process.join()
    assert there == pytest.approx(model(**batch()).loss.item(), rel=1e-5)
    assert is_known


def test_with_the_distribution(tmp_path: Path) -> None:
    """Installed as a user does, but for the network: it has nothing but the name and the version."""
    pytest.importorskip("setuptools")
    copy, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(SHIM, copy)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--target", site, copy], check=True, cwd="/", capture_output=True)
    files = sorted(path.name for path in (site / "liger_kernel").iterdir() if path.suffix == ".py")
    assert files == ["__init__.py"]
    out = run(
        """
        import importlib.metadata, importlib.util, sys
        print(importlib.metadata.version("liger_kernel"), importlib.util.find_spec("liger_kernel").origin)
        import liger_kernel.transformers.functional
        from liger_kernel.transformers import LigerRMSNorm
        import tigon.as_liger
        assert sys.modules["liger_kernel"].__version__ == importlib.metadata.version("liger-kernel")
        found = [d for d in importlib.metadata.distributions() if d.metadata["Name"] == "liger_kernel"]
        from transformers.utils import is_liger_kernel_available
        print(LigerRMSNorm(4), is_liger_kernel_available(), sys.modules["liger_kernel"].__file__)
        """,
        site,
    )
    first, second = out.splitlines()
    assert first == f"0.9.0 {site / 'liger_kernel' / '__init__.py'}"
    assert "True" in second
    assert str(ROOT / "src" / "tigon" / "as_liger" / "liger_kernel") in second


def test_versions_are_one() -> None:
    project = (SHIM / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nversion = "{sys.modules["liger_kernel"].__version__}"\n' in project
    assert '\nname = "liger_kernel"\n' in project


@pytest.mark.parametrize("imported_first", [False, True])
def test_another_liger_kernel_is_refused(
    tmp_path: Path, unnamed: Any, monkeypatch: pytest.MonkeyPatch, imported_first: bool
) -> None:
    (tmp_path / "liger_kernel").mkdir()
    (tmp_path / "liger_kernel" / "__init__.py").write_text("OTHER = True")
    monkeypatch.syspath_prepend(tmp_path)
    if imported_first:
        importlib.import_module("liger_kernel")
    with pytest.raises(ImportError, match="is already there") as caught:
        unnamed.install()
    assert str(tmp_path) in str(caught.value)
    # Nothing is left half done.
    assert importlib.import_module("liger_kernel").OTHER


def test_the_distribution_among_files_of_another_is_refused(
    tmp_path: Path, unnamed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(SHIM / "src" / "liger_kernel", tmp_path / "liger_kernel")
    (tmp_path / "liger_kernel" / "ops").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="with other files in"):
        importlib.import_module("liger_kernel")
    # A folder of the name without a package in it is nobody's.
    (tmp_path / "liger_kernel" / "__init__.py").unlink()
    importlib.invalidate_caches()
    unnamed.install()
    assert importlib.import_module("liger_kernel").__version__ == "0.9.0"
