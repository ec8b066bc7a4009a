"""A progress bar on a terminal, a line every tenth of the way elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        self.label, self.total = label, total
        self.stream = sys.stderr if stream is None else stream
        self.is_terminal = self.stream.isatty()
        self.started = time.monotonic()
        self.next_line = 0.0

    def update(self, done: int, note: str) -> None:
        """Show that `done` steps are over; `note` stands at the end of the line."""
        elapsed = time.monotonic() - self.started
        if self.is_terminal:
            filled = 24 * done // self.total
            bar = "█" * filled + "░" * (24 - filled)
            left = elapsed / done * (self.total - done)
            line = f"\r{self.label} {bar} {done}/{self.total}  {note}  {left:3.0f} s left"
            self.stream.write(line + "\x1b[K" + ("\n" if done == self.total else ""))
        elif done >= self.next_line or done == self.total:
            self.next_line = done + max(1.0, self.total / 10)
            self.stream.write(f"{self.label} {done}/{self.total}  {note}  {elapsed:.0f} s\n")
        self.stream.flush()

    def abort(self) -> None:
        """End the line, so that an error message starts on its own."""
        if self.is_terminal:
            self.stream.write("\n")
