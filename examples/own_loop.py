"""An own model and training loop, built from the operators: norm, gated MLP, loss without logits.

    python examples/own_loop.py [--steps 100] [--device cuda]

A block of a language model in plain PyTorch; what is tigon's is marked. The task is to continue a repeating pattern,
so the loss falls to almost zero.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import tigon


class Block(nn.Module):
    """Causal attention and a gated MLP, each behind a norm that also adds the residual stream."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.Parameter(torch.ones(hidden_size))
        self.mlp_norm = nn.Parameter(torch.ones(hidden_size))
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.gate_up = nn.Linear(hidden_size, 4 * hidden_size, bias=False)
        self.down = nn.Linear(2 * hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        # tigon: one pass for `residual + x` and its norm.
        y, residual = tigon.rms_norm(x, self.attention_norm, residual=residual)
        q, k, v = self.qkv(y).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(y.transpose(1, 2).flatten(2))
        y, residual = tigon.rms_norm(y, self.mlp_norm, residual=residual)
        # tigon: gate and up come packed from one projection and are not split into copies.
        return self.down(tigon.swiglu(self.gate_up(y))), residual


class Model(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int = 64, num_layers: int = 2, num_heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.positions = nn.Embedding(1024, hidden_size)
        self.blocks = nn.ModuleList(Block(hidden_size, num_heads) for _ in range(num_layers))
        self.norm = nn.Parameter(torch.ones(hidden_size))
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        residual = self.positions(torch.arange(tokens.shape[1], device=tokens.device)).expand_as(x)
        for block in self.blocks:
            x, residual = block(x, residual)
        return tigon.rms_norm(x, self.norm, residual=residual).y

    def loss(self, tokens: Tensor) -> Tensor:
        """Next-token loss; the logits, `[B * T, V]`, are never stored as a whole."""
        hidden = self(tokens[:, :-1])
        return tigon.linear_cross_entropy(hidden, self.head.weight, tokens[:, 1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Model(vocab_size=1000).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    pattern = torch.randint(1000, (17,), device=args.device)
    for step in range(args.steps):
        start = torch.randint(17, (8, 1), device=args.device)
        tokens = pattern[(start + torch.arange(65, device=args.device)) % 17]
        loss = model.loss(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, args.steps // 5) == 0 or step == args.steps - 1:
            print(f"step {step:4d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
