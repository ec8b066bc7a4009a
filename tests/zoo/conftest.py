"""The zoo forks a process for each class, so it is for Linux, and needs transformers."""

from __future__ import annotations

import importlib.util
import sys

if sys.platform != "linux" or importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["*"]
