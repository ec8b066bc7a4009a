"""Trainers of TRL with `use_liger_kernel=True`: they fuse the layers, the loss is theirs; step by step the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.compat.conftest import config_of
from tests.compat.test_apply import forms

import tigon

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

WORDS = [f"w{i}" for i in range(40)]


@pytest.fixture(autouse=True)
def _quiet(quick_collection: None) -> Iterator[None]:
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    with tigon.backend("torch"):
        yield


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    model = models.WordLevel({w: i for i, w in enumerate([*special.values(), *WORDS])}, unk_token="<unk>")
    words = Tokenizer(model)
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a place to load it from, as some trainers load a second one."""
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("model")
    transformers.Qwen3ForCausalLM(config_of("Qwen3", vocab_size=44)).save_pretrained(folder)
    return folder


def _text(generator: torch.Generator, length: int) -> str:
    return "".join(f" {WORDS[i]}" for i in torch.randint(len(WORDS), (length,), generator=generator).tolist())


def _rows(*columns: str) -> Any:
    generator = torch.Generator().manual_seed(0)
    rows = [{name: _text(generator, 2 + (i * (k + 1)) % 7) for k, name in enumerate(columns)} for i in range(12)]
    return datasets.Dataset.from_list([{**row, "label": i % 2 == 0} for i, row in enumerate(rows)])


def _reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [len(set(text.split())) + 0.1 * i for i, text in enumerate(completions)]


CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "SFT": ("SFT", ("text",), {"max_length": 32}),
    "SFT of completions": ("SFT", ("prompt", "completion"), {"max_length": 32}),
    "SFT by dynamic weights": ("SFT", ("text",), {"max_length": 32, "loss_type": "dft"}),
    "DPO": ("DPO", ("prompt", "chosen", "rejected"), {}),
    "KTO": ("KTO", ("prompt", "completion"), {}),
    "GRPO": ("GRPO", ("prompt",), {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}),
}


@pytest.mark.filterwarnings("ignore:`use_liger_kernel=True` is deprecated:FutureWarning")
@pytest.mark.parametrize("case", CASES)
def test_trainers(case: str, path: Path, tokenizer: Any, tmp_path: Path) -> None:
    kind, columns, options = CASES[case]
    config, trainer_class = getattr(trl, f"{kind}Config"), getattr(trl, f"{kind}Trainer")
    results = []
    for use_liger_kernel in (False, True):
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        arguments = config(
            str(tmp_path),
            use_cpu=True,
            bf16=False,
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=3,
            use_liger_kernel=use_liger_kernel,
            **options,
        )
        data = _rows(*columns)
        rewards = {"reward_funcs": _reward} if kind == "GRPO" else {"eval_dataset": data.select(range(4))}
        trainer = trainer_class(model=model, args=arguments, train_dataset=data, processing_class=tokenizer, **rewards)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        steps = [[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "loss" in entry]
        evaluated = trainer.evaluate()["eval_loss"] if kind != "GRPO" else 0
        results.append((steps, evaluated, model))
    (native, native_evaluated, native_model), (ours, evaluated, model) = results
    assert len(native) == 3
    assert [norm > 0 for _, norm in native] == [True] * 3
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(native), rtol=1e-4, atol=1e-6)
    assert evaluated == pytest.approx(native_evaluated, rel=1e-5)
    for got, want in zip(model.parameters(), native_model.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert forms(model) == {"rope", "rms_norm", "glu"}
    assert forms(native_model) == set()


def test_a_fused_loss_is_refused_by_trl_itself(path: Path, tokenizer: Any, tmp_path: Path) -> None:
    arguments = trl.SFTConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to=[],
        use_liger_kernel=True,
        liger_kernel_config={"fused_linear_cross_entropy": True},
    )
    with pytest.warns(FutureWarning, match="deprecated"), pytest.raises(ValueError, match="is not supported"):
        trl.SFTTrainer(str(path), arguments, train_dataset=_rows("text"), processing_class=tokenizer)
