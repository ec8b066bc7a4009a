"""`use_liger_kernel=True` of the Trainer with the drop-in: the same losses as without, step by step."""

from __future__ import annotations

import json

from tests.compat.test_install import run

CODE = """
    import json, sys, tempfile
    import torch, transformers
    import tigon.as_liger
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 61, (16,), generator=generator) for _ in range(16)]
    data = [{"input_ids": row, "labels": row.clone()} for row in rows]
    for i, row in enumerate(data):
        row["labels"][: i % 5] = -100

    def losses(**options):
        torch.manual_seed(1)
        model = LlamaForCausalLM(config)
        arguments = TrainingArguments(
            tempfile.mkdtemp(), use_cpu=True, max_steps=20, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, learning_rate=1e-3, logging_steps=1, report_to=[], save_strategy="no",
            disable_tqdm=True, seed=3, **options,
        )
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4])
        trainer.train()
        trained = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return trained, trainer.evaluate()["eval_loss"], model

    flags = {"rope": True, "cross_entropy": True, "rms_norm": False, "swiglu": True}
    native, native_eval, _ = losses()
    ours, ours_eval, model = losses(use_liger_kernel=True, liger_kernel_config=flags)
    fused, fused_eval, whole = losses(use_liger_kernel=True)
    forms = lambda model: {type(m).__name__: m._tigon.form for m in model.modules() if hasattr(m, "_tigon")}
    norms = [m for m in model.modules() if "RMSNorm" in type(m).__name__]
    print(json.dumps({
        "native": native, "native_eval": native_eval, "ours": ours, "ours_eval": ours_eval, "fused": fused,
        "fused_eval": fused_eval, "forms": forms(model), "whole": forms(whole), "loss": model.loss_function.__name__,
        "norms": [len(norms), sum("forward" in m.__dict__ for m in norms)],
    }), file=sys.stderr)
"""


def test_twenty_steps_are_those_of_the_native_model() -> None:
    out = run("import sys\nsys.stderr, sys.stdout = sys.stdout, sys.stderr\n" + CODE_AT_MARGIN, LIGER_KERNEL_DEBUG="1")
    result = json.loads(out.strip().splitlines()[-1])
    assert len(result["native"]) == 20
    for run_of in ("ours", "fused"):
        for got, want in zip(result[run_of], result["native"], strict=True):
            assert abs(got - want) <= 1e-5 * abs(want)
        assert abs(result[f"{run_of}_eval"] - result["native_eval"]) <= 1e-5 * result["native_eval"]
    assert result["native"][-1] < result["native"][0]
    assert result["forms"] == {"LlamaAttention": "rope", "LlamaMLP": "glu"}
    assert result["norms"] == [5, 0]
    assert result["loss"] == "stored_logits_loss"
    assert set(result["whole"].values()) == {"rope", "glu", "rms_norm", "linear_cross_entropy"}
    # The report of the patch, printed for LIGER_KERNEL_DEBUG.
    report = out[: out.index('{"native"')]
    assert "LlamaMLP x 2" in report
    assert "tigon.as_liger: cross_entropy of stored logits in the model itself" in report


def _at_margin(code: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in code.splitlines())


CODE_AT_MARGIN = _at_margin(CODE)
