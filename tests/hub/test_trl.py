"""TRL's own way to kernels: `model_init_kwargs={"use_kernels": True, ...}` of a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.hub.calls import counted
from tests.hub.conftest import make_model

import tigon

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.usefixtures("tables")
WORDS = [f"w{i}" for i in range(40)]


@pytest.fixture(autouse=True)
def _plain() -> Iterator[None]:
    datasets.disable_progress_bars()
    with tigon.backend("torch"):
        yield
    tigon.unregister_kernels()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    model = models.WordLevel({w: i for i, w in enumerate([*special.values(), *WORDS])}, unk_token="<unk>")
    words = Tokenizer(model)
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("Qwen3", vocab_size=44).save_pretrained(path)
    return path


def trained(folder: Path, tokenizer: Any, output: Path, **options: Any) -> tuple[list[float], dict[str, int], Any]:
    generator = torch.Generator().manual_seed(0)
    texts = [" ".join(WORDS[i] for i in torch.randint(40, (9,), generator=generator).tolist()) for _ in range(8)]
    arguments = trl.SFTConfig(
        str(output),
        model_init_kwargs={"dtype": "float32", **options},
        use_cpu=True,
        bf16=False,
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        eval_strategy="steps",
        eval_steps=2,
        gradient_checkpointing=False,
        max_length=16,
        seed=1,
    )
    rows = datasets.Dataset.from_list([{"text": text} for text in texts])
    trainer = trl.SFTTrainer(str(folder), arguments, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)
    with counted() as calls:
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    losses += [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return losses, +calls, arguments


@pytest.mark.parametrize("way", ["configuration", "registration"])
def test_sft(way: str, folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    expected, none, _ = trained(folder, tokenizer, tmp_path)
    assert not none
    assert len(expected) == 5
    options: dict[str, Any] = {"use_kernels": True}
    if way == "configuration":
        options["kernel_config"] = tigon.KernelConfig()
    else:
        tigon.register_kernels()
    losses, calls, arguments = trained(folder, tokenizer, tmp_path, **options)
    # Nine norms in each of 3 steps; evaluation has no gradient.
    assert calls["rms_norm backward"] == 27
    assert calls["rope backward"] == 6
    assert calls["rms_norm"] > 27
    assert losses == pytest.approx(expected, rel=1e-5)
    # Trainers write their arguments down.
    assert "use_kernels" in arguments.to_json_string()
