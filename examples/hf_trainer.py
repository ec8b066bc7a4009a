"""Train a patched model with the Trainer of transformers: one line more than without tigon.

    python examples/hf_trainer.py [--steps 30] [--text book.txt]
    torchrun --nproc-per-node 2 examples/hf_trainer.py --fsdp

With --fsdp accelerate shards the patched model with FSDP2, its layers as units; on a CPU it replicates it instead.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

import tigon


class Windows(torch.utils.data.Dataset):
    """Windows of a text, a byte a token."""

    def __init__(self, text: bytes, length: int) -> None:
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.tokens[index * self.length : (index + 1) * self.length]
        return {"input_ids": window, "labels": window}


def read(path: Path | None) -> bytes:
    if path is not None:
        return path.read_bytes()
    from pydoc_data.topics import topics

    return "\n".join(topics[key] for key in sorted(topics)).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--text", type=Path, help="default: Python's language reference")
    parser.add_argument("--fsdp", action="store_true", help="shard the model, started by torchrun")
    args = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    # This line is all there is to it.
    print(tigon.patch(model))

    sharded = {"fsdp": True, "fsdp_config": {"fsdp_version": 2}} if args.fsdp else {}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            logging_steps=max(1, args.steps // 3),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
            seed=0,
            use_cpu=not torch.cuda.is_available(),
            **sharded,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Windows(read(args.text), 128))
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print("losses", " ".join(f"{float(loss):.3f}" for loss in losses))


if __name__ == "__main__":
    main()
