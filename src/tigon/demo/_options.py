"""What a demo run is asked for, checked before anything heavy is imported."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

# Before each record that a training process prints.
MARK = "@tigon "
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16")


class DemoError(Exception):
    """Something the person at the keyboard can mend; shown without a traceback."""


@dataclass(frozen=True)
class Options:
    """Options of `tigon demo`; None leaves the choice to the device."""

    text: Path | None = None
    model: str | None = None
    steps: int | None = None
    batch_size: int | None = None
    seq_len: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    lr: float = 1e-3
    output: Path = Path("demo-output")
    seed: int = 0

    def check(self) -> None:
        """Raise DemoError for values that cannot work and for packages that are missing."""
        for name, smallest in (("steps", 1), ("batch_size", 1), ("seq_len", 2)):
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise DemoError(f"--{name.replace('_', '-')}: expected at least {smallest}, got {value}")
        if not self.lr > 0:
            raise DemoError(f"--lr: expected a positive number, got {self.lr}")
        if self.device not in DEVICES:
            raise DemoError(f"--device: expected one of {', '.join(DEVICES)}, got {self.device!r}")
        if self.dtype not in DTYPES:
            raise DemoError(f"--dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.text is not None and not self.text.is_file():
            raise DemoError(f"--text: no such file: {self.text}")
        if self.output.exists() and not self.output.is_dir():
            raise DemoError(f"--output: {self.output} exists and is not a folder")
        wanted = {"transformers": "hf", "tokenizers": "hf", "matplotlib": "bench"}
        missing = [name for name in wanted if importlib.util.find_spec(name) is None]
        if missing:
            raise DemoError(f"the demo needs {', '.join(missing)}: pip install 'tigon[hf,bench]'")
