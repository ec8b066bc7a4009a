"""`tigon demo`: the same training run twice, native and patched, each in a process of its own."""

from ._options import DemoError, Options
from ._run import run

__all__ = ["DemoError", "Options", "run"]
