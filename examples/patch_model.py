"""Patch a transformers model, see what changed, train a step, and take the patch back.

    python examples/patch_model.py [--model config.json] [--device cuda]

Without --model a small random model is built; with it, the model of that configuration, folder or hub id.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import tigon


def build(source: str | None) -> torch.nn.Module:
    torch.manual_seed(0)
    if source is not None:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return AutoModelForCausalLM.from_config(config)


def loss_and_gradients(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    output = model(input_ids=tokens, labels=tokens)
    output.loss.backward()
    return output.loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="configuration file, local folder or hub id")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    model = build(args.model).to(args.device).train()
    tokens = torch.randint(model.config.get_text_config().vocab_size, (2, 64), device=args.device)
    native_loss, native = loss_and_gradients(model, tokens)

    report = tigon.patch(model)
    print(report, "\n")
    patched_loss, patched = loss_and_gradients(model, tokens)
    worst = max(float((patched[n] - native[n]).norm() / (native[n].norm() + 1e-12)) for n in native)
    print(f"loss      native {native_loss:.6f}  patched {patched_loss:.6f}")
    print(f"gradients largest relative difference {worst:.1e}")

    # In training with labels no logits are made; evaluation and generation are as before.
    print("logits    in training:", model(input_ids=tokens, labels=tokens).logits)
    print("logits    on request: ", tuple(model(input_ids=tokens, labels=tokens, skip_logits=False).logits.shape))

    tigon.unpatch(model)
    again, _ = loss_and_gradients(model, tokens)
    print(f"unpatched loss {again:.6f}, as before: {again == native_loss}")


if __name__ == "__main__":
    main()
