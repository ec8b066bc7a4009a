"""The drop-in for one test module at a time: other tests must not find a liger_kernel."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
import transformers

transformers.logging.set_verbosity_error()

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module", autouse=True)
def liger() -> Iterator[Any]:
    """The package `liger_kernel`, gone again after the module."""
    import tigon.as_liger as as_liger

    as_liger.install()
    yield sys.modules["liger_kernel"]
    for name in [name for name in sys.modules if name == "liger_kernel" or name.startswith("liger_kernel.")]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, as_liger._Finder)]
    transformers.utils.import_utils.is_liger_kernel_available.cache_clear()


@pytest.fixture(autouse=True)
def _classes_as_before() -> Iterator[None]:
    """End what the test asked of classes."""
    from tigon.patch import _on_build

    yield
    for handle in [handle for handles in list(_on_build._asked.values()) for handle in handles]:
        handle.remove()


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors are tiny: beside other processes, threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def quick_collection() -> Iterator[None]:
    """Trainers collect garbage at every turn: let that be only what the test made."""
    gc.freeze()
    yield
    gc.unfreeze()


def config_of(family: str, **options: Any) -> Any:
    return getattr(transformers, f"{family}Config")(**{**SIZES, **options})


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, SIZES["vocab_size"], (2, 9), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def put_loss(model: Any, queue: Any) -> None:
    """What another process does with a model. It is here as it is found by its name there."""
    queue.put((model(**batch()).loss.item(), "liger_kernel" in sys.modules))
