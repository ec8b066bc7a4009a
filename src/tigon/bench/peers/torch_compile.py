"""The references under `torch.compile` with static shapes, the compiler's best case."""

from __future__ import annotations

import torch

from ...ops import OPS
from . import Peer

PEER = Peer(
    "torch_compile",
    "torch",
    {name: torch.compile(op.reference, fullgraph=True, dynamic=False) for name, op in OPS.items()},
)
