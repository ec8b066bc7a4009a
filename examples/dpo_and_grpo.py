"""Preferences and rewards without logits: a tiny model reads English, then DPO, then GRPO, on a CPU in a minute.

    python examples/dpo_and_grpo.py [--steps 30] [--device cuda]

The text is the language reference that Python ships, a byte a token. DPO prefers what comes next to the same letters in
another order; GRPO rewards the share of letters "e" in what the model writes itself. Both are handed hidden states and
the head; the logits, `[sequences, tokens, classes]`, are never stored as a whole.
"""

from __future__ import annotations

import argparse
import copy
from pydoc_data.topics import topics

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import tigon

PROMPT, ANSWER = 48, 32


def build(device: str) -> LlamaForCausalLM:
    sizes = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=256, **sizes, **special)).to(device)


def hidden_and_labels(model: LlamaForCausalLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states of the positions before the tokens of the answer, and these tokens."""
    hidden = model.model(tokens[:, :-1], use_cache=False).last_hidden_state
    return hidden[:, PROMPT - 1 :], tokens[:, PROMPT:]


def excerpts(text: Tensor, count: int, length: int) -> Tensor:
    starts = torch.randint(0, len(text) - length, (count,))
    return torch.stack([text[i : i + length] for i in starts.tolist()])


def read(model: LlamaForCausalLM, text: Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        tokens = excerpts(text, 16, PROMPT + ANSWER)
        hidden = model.model(tokens[:, :-1], use_cache=False).last_hidden_state
        loss = tigon.linear_cross_entropy(hidden, model.lm_head.weight, tokens[:, 1:])
        update(optimizer, loss)
        if step % 50 == 0 or step == steps - 1:
            print(f"read {step:4d}  loss {loss.item():.3f}", flush=True)


def prefer(model: LlamaForCausalLM, text: Tensor, steps: int) -> None:
    """Direct preference optimisation against the model as it was."""
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(steps):
        chosen = excerpts(text, 8, PROMPT + ANSWER)
        order = torch.randperm(ANSWER)
        rejected = torch.cat((chosen[:, :PROMPT], chosen[:, PROMPT:][:, order]), 1)
        tokens = torch.cat((chosen, rejected))
        hidden, labels = hidden_and_labels(model, tokens)
        with torch.no_grad():
            ref_hidden, _ = hidden_and_labels(reference, tokens)
        out = tigon.losses.dpo(
            hidden, model.lm_head.weight, labels, ref_hidden=ref_hidden, ref_weight=reference.lm_head.weight, beta=0.1
        )
        update(optimizer, out.loss)
        if step % 10 == 0 or step == steps - 1:
            print(f"dpo {step:4d}  loss {out.loss.item():.3f}  accuracy {out.accuracy.item():.2f}", flush=True)


def reward(model: LlamaForCausalLM, text: Tensor, steps: int) -> None:
    """Group-relative policy optimisation: 8 answers to each of 4 prompts, two updates with each."""
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        prompts = excerpts(text, 4, PROMPT).repeat_interleave(8, 0)
        with torch.no_grad():
            mask = torch.ones_like(prompts)
            tokens = model.generate(prompts, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=ANSWER)
            ref_hidden, _ = hidden_and_labels(reference, tokens)
        rewards = (tokens[:, PROMPT:] == ord("e")).float().mean(1)
        groups = rewards.view(4, 8)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        old = None
        for _ in range(2):
            hidden, labels = hidden_and_labels(model, tokens)
            out = tigon.losses.grpo(
                hidden,
                model.lm_head.weight,
                labels,
                advantages.flatten(),
                old_log_probs=old,
                ref_hidden=ref_hidden,
                ref_weight=reference.lm_head.weight,
                beta=0.01,
            )
            # What the policy says now is what the next update calls old.
            old = out.log_probs if old is None else old
            update(optimizer, out.loss)
        if step % 10 == 0 or step == steps - 1:
            print(f"grpo {step:4d}  reward {rewards.mean().item():.3f}  kl {out.kl.item():.3f}", flush=True)


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30, help="of DPO and of GRPO; reading takes 5 times as many")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    # So little to do at once that threads would wait for each other.
    torch.set_num_threads(1)
    text = "\n".join(topics[key] for key in sorted(topics)).encode("ascii", "ignore")
    tokens = torch.tensor(list(text), device=arguments.device)
    model = build(arguments.device)
    read(model, tokens, 5 * arguments.steps)
    prefer(model, tokens, arguments.steps)
    reward(model, tokens, arguments.steps)


if __name__ == "__main__":
    main()
