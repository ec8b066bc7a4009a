"""The text the demo trains on, and its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._options import DemoError


def read_text(path: Path | None) -> tuple[str, str]:
    """Text and a name for it; without a path the language reference that Python ships, 460 kB of English."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[key] for key in sorted(topics)), "Python's language reference"
    try:
        return path.read_text(encoding="utf-8"), path.name
    except UnicodeDecodeError as error:
        raise DemoError(f"--text: {path} is not UTF-8 text ({error.reason} at byte {error.start})") from error


def train_tokenizer(text: str, vocab_size: int) -> Any:
    """A byte-level BPE tokenizer of at most `vocab_size` entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def encode(text: str, tokenizer: Any, seq_len: int) -> Tensor:
    """Token ids, `[N]` int64; raises DemoError when they do not fill one sequence."""
    encoded = tokenizer.encode(text)
    tokens = torch.tensor(getattr(encoded, "ids", encoded), dtype=torch.int64)
    if tokens.numel() <= seq_len:
        raise DemoError(
            f"--text: {tokens.numel()} tokens are too few for sequences of {seq_len}; "
            "give a longer text or a smaller --seq-len"
        )
    return tokens
