"""Cases of `log_softmax`: those of `softmax`."""

from __future__ import annotations

from dataclasses import replace

from ..ops.softmax import log_softmax_reference
from .softmax import SPEC as SOFTMAX
from .softmax import mutations

SPEC = replace(SOFTMAX, name="log_softmax", mutations=mutations(log_softmax_reference), floor={})
