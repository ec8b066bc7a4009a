"""What every test starts from: device, interpreter, threads, seed, backend."""

from __future__ import annotations

import os
import sys


def _device_from(argv: list[str]) -> str:
    """`--device X` or `--device=X`; read by hand because Triton must be told before anything imports it."""
    for i, word in enumerate(argv):
        if word == "--device" and i + 1 < len(argv):
            return argv[i + 1]
        if word.startswith("--device="):
            return word.split("=", 1)[1]
    return os.environ.get("TIGON_TEST_DEVICE", "cpu")


# Workers of xdist are started without the command line; the environment tells them.
os.environ["TIGON_TEST_DEVICE"] = _device_from(sys.argv)
if os.environ["TIGON_TEST_DEVICE"] == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    # The suite is the same on a machine with a GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
else:
    os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# With kernels no model of transformers can be pickled: theirs are a run of their own (`make test-kernels`).
os.environ.setdefault("USE_HUB_KERNELS", "NO")
# Read when torch is loaded: the threads of two workers, and of the processes they start, share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Iterator

import pytest
import torch

import tigon
from tigon.ops import _op

# Numbers drawn while tests are collected must be the same in every worker, since they may stand in a test's name.
torch.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="device the tests run on: cpu (interpreter) or cuda")


def pytest_configure(config: pytest.Config) -> None:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    if os.environ["TIGON_TEST_DEVICE"] == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch sees no CUDA device")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ["TIGON_TEST_DEVICE"] == "cpu":
        skip = pytest.mark.skip(reason="needs --device cuda")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=[item for item in items if "cuda" in item.keywords])
        items[:] = [item for item in items if "cuda" not in item.keywords]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device under test; under xdist the GPUs are dealt out to the workers in turn."""
    name = os.environ["TIGON_TEST_DEVICE"]
    if name != "cuda":
        return torch.device(name)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return torch.device("cuda", worker % torch.cuda.device_count())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _backend_restored() -> Iterator[None]:
    """Fail a test that leaves the process-wide backend changed, and put it back for the next one."""
    before = tigon.current_backend()
    yield
    after = tigon.current_backend()
    _op._backend = before
    assert after == before, f"the test left backend {after!r}"
