"""Tiny models on disk, and tables of the process as they were."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

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
FAMILIES = ("Llama", "Qwen3")


def make_model(family: str, **options: Any) -> Any:
    """A tiny model whose norms have weights that show."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape) + 0.5)
    return model


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A saved model of each family."""
    made = {}
    for family in FAMILIES:
        made[family] = tmp_path_factory.mktemp(family)
        make_model(family).save_pretrained(made[family])
    return made


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


@pytest.fixture
def tables() -> Iterator[None]:
    """Kernels that a test registered, and forwards that stand in place of functions, are gone after it."""
    if os.environ["USE_HUB_KERNELS"] == "NO":
        pytest.skip("needs USE_HUB_KERNELS=YES, as `make test-kernels` sets it")
    kernels = pytest.importorskip("kernels")
    if not transformers.utils.is_kernels_available():
        pytest.skip(f"transformers {transformers.__version__} does not take kernels {kernels.__version__}")
    from kernels.layer.globals import _KERNEL_MAPPING

    table = _KERNEL_MAPPING.get()
    before = copy.copy(table)
    yield
    table.clear()
    table.update(before)
    for family in FAMILIES:
        module = __import__(f"transformers.models.{family.lower()}.modeling_{family.lower()}", fromlist=["_"])
        module.apply_rotary_pos_emb.__dict__.pop("forward", None)
