"""The references, as model code writes them: what runs when nothing is replaced."""

from __future__ import annotations

from ...ops import OPS
from . import Peer

PEER = Peer("torch_eager", "torch", {name: op.reference for name, op in OPS.items()})
