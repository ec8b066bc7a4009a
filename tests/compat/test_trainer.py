"""`use_liger_kernel=True` of the Trainer with the drop-in: what it computes without, step by step."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from tests.compat.conftest import SIZES, config_of
from tests.compat.test_apply import ALL, forms
from tests.compat.test_install import ROOT
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import tigon

pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def _plain_torch(quick_collection: None) -> Iterator[None]:
    with tigon.backend("torch"):
        yield


@pytest.fixture
def start() -> nn.Module:
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(config_of("Llama"))


def rows() -> list[dict[str, Tensor]]:
    """Rows with 0 to 16 labels that count: of the micro-batches of a step, each has its own number."""
    generator = torch.Generator().manual_seed(0)
    data = []
    for i in range(16):
        ids = torch.randint(3, SIZES["vocab_size"], (16,), generator=generator)
        labels = ids.clone()
        labels[: (5 * i) % 17] = -100
        data.append({"input_ids": ids, "labels": labels})
    return data


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]
    evaluated: dict[str, float]
    predictions: list[Tensor]
    model: nn.Module


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def train(model: nn.Module, folder: Path, metrics: bool = False, steps: int = 4, **options: Any) -> Trained:
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=3,
        **options,
    )
    seen = []

    def compute(prediction: Any) -> dict[str, float]:
        seen.append(torch.as_tensor(prediction.predictions))
        return accuracy(prediction)

    data = rows()
    given = {"compute_metrics": compute} if metrics else {}
    trainer = Trainer(copy.deepcopy(model), arguments, train_dataset=data, eval_dataset=data[1:5], **given)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    evaluated = {key: value for key, value in trainer.evaluate().items() if key in ("eval_loss", "eval_accuracy")}
    steps_logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Trained(
        [e["loss"] for e in steps_logged], [e["grad_norm"] for e in steps_logged], evaluated, seen, trainer.model
    )


def assert_same_training(ours: Trained, native: Trained) -> None:
    assert ours.losses == pytest.approx(native.losses, rel=1e-5)
    assert ours.norms == pytest.approx(native.norms, rel=1e-4)
    assert ours.evaluated == pytest.approx(native.evaluated, rel=1e-5)
    for got, want in zip(ours.predictions, native.predictions, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    expected = dict(native.model.named_parameters())
    for name, weight in ours.model.named_parameters():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-5)


OFF = dict.fromkeys(["rope", "rms_norm", "swiglu", "fused_linear_cross_entropy"], False)
UNFUSED = {"liger_kernel_config": {"fused_linear_cross_entropy": False}}
STORED = {"liger_kernel_config": {"cross_entropy": True}}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"metrics": True},
        {"metrics": True, "prediction_loss_only": True},
        {"label_smoothing_factor": 0.1},
        {"label_smoothing_factor": 0.1, "metrics": True},
        {"average_tokens_across_devices": False, "gradient_checkpointing": True},
        {"eval_strategy": "steps", "eval_steps": 2},
        {**STORED, "metrics": True},
        {**UNFUSED, "label_smoothing_factor": 0.1},
        {"liger_kernel_config": OFF},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_the_trainer(options: dict[str, Any], start: nn.Module, tmp_path: Path) -> None:
    native = train(start, tmp_path, **{**options, "liger_kernel_config": None})
    ours = train(start, tmp_path, use_liger_kernel=True, **options)
    assert_same_training(ours, native)
    flags = options.get("liger_kernel_config", {})
    fused = not flags.get("cross_entropy") and flags.get("fused_linear_cross_entropy", True)
    assert forms(ours.model) == (set() if flags is OFF else ALL if fused else ALL - {"linear_cross_entropy"})
    # Without the logits there is no metric of them.
    wanted = options.get("metrics") and not options.get("prediction_loss_only")
    assert [tuple(each.shape) for each in ours.predictions] == ([(4, 16, 61)] if wanted else [])
    assert not torch.equal(native.model.model.norm.weight, start.model.norm.weight)


@pytest.mark.parametrize(
    "options",
    [{}, {"metrics": True}, {"label_smoothing_factor": 0.1}, STORED],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("saved", [None, ["lm_head"]], ids=["lora", "lora-and-head"])
def test_the_trainer_with_adapters(
    options: dict[str, Any], saved: list[str] | None, start: nn.Module, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(
        target_modules=["q_proj", "down_proj"], modules_to_save=saved, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(start, adapters)
    native = train(model, tmp_path, **{**options, "liger_kernel_config": None})
    ours = train(model, tmp_path, use_liger_kernel=True, **options)
    assert_same_training(ours, native)
    # The copy of the head that is trained is not the head that the model has.
    fused = options is not STORED and saved is None
    assert forms(ours.model) == (ALL if fused else ALL - {"linear_cross_entropy"})


def test_twenty_steps_without_a_form_and_what_is_printed(
    start: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LIGER_KERNEL_DEBUG", "1")
    caplog.set_level(logging.WARNING, "tigon")
    flags = {"rope": True, "cross_entropy": True, "rms_norm": False, "swiglu": True}
    native = train(start, tmp_path, steps=20)
    ours = train(start, tmp_path, steps=20, use_liger_kernel=True, liger_kernel_config=flags)
    assert ours.losses == pytest.approx(native.losses, rel=1e-5)
    assert native.losses[-1] < native.losses[0]
    assert forms(ours.model) == {"rope", "glu"}
    assert ours.model.loss_function.__name__ == "stored_logits_loss"
    assert "tigon.as_liger: cross_entropy of stored logits in the model itself" in caplog.text


def test_training_twice_and_saving_between(start: nn.Module, tmp_path: Path) -> None:
    """Each call of `train` applies once more."""

    seen = []

    class Count(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            seen.append(sum(len(module._forward_pre_hooks) for module in model.modules()))

    arguments = TrainingArguments(
        str(tmp_path / "out"), use_cpu=True, max_steps=2, report_to=[], use_liger_kernel=True, disable_tqdm=True
    )
    trainer = Trainer(start, arguments, train_dataset=rows(), eval_dataset=rows()[:2], callbacks=[Count])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.evaluate()
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert forms(start) == ALL
    trainer.train()
    assert seen == [2, 2]
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert forms(again) == set()
    assert again.state_dict().keys() == start.state_dict().keys()


TWO = """
    import sys
    import torch, transformers
    from tests.compat.test_trainer import config_of, train
    import tigon.as_liger
    from pathlib import Path

    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config_of("Llama"))
    folder = Path(sys.argv[1])
    native = train(model, folder)
    ours = train(model, folder, use_liger_kernel=True)
    assert torch.distributed.get_world_size() == 2 and torch.distributed.get_backend() == "gloo"
    if torch.distributed.get_rank() == 0:
        distance = max((a - b).abs().max().item() for a, b in zip(ours.model.parameters(), native.model.parameters()))
        torch.save({"native": native[:3], "ours": ours[:3], "distance": distance}, folder / "result.pt")
    # Threads of a group that is left to the end of the interpreter can abort it.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""


def test_two_processes(tmp_path: Path) -> None:
    script, folder = tmp_path / "two.py", tmp_path / "out"
    folder.mkdir()
    script.write_text(textwrap.dedent(TWO))
    env = {key: value for key, value in os.environ.items() if not key.startswith(("TRITON_", "TIGON_"))}
    env |= {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT))), "OMP_NUM_THREADS": "1"}
    # `accelerate launch --cpu` starts more than one process through MPI only.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, str(script), str(folder)], env=env, capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    result = torch.load(folder / "result.pt", weights_only=True)
    for got, want in zip(result["ours"], result["native"], strict=True):
        assert got == pytest.approx(want, rel=1e-5)
    assert len(result["native"][0]) == 4
    assert result["distance"] < 1e-5
