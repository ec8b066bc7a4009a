"""Gated MLPs in the place of a host's forward, and linear layers."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..ops.glu import glu
from . import _host

# As many for any number of rows: where weights are gathered for each part, all ranks gather as often.
_PARTS = 8


class GatedMLP(nn.Module):
    """`down_proj(act_fn(gate_proj(x)) * up_proj(x))` of the host, with its activation.

    Projections are called as modules: their adapters, hooks, shards and quantised weights go on doing what they do.
    """

    has_backward = True
    can_torch_compile = True

    act_fn: Any
    down_proj: nn.Module
    gate_proj: nn.Module
    up_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        host = type(self)
        activation = _host.activation_of(self.act_fn) if _host.is_gated_mlp(host) else None
        if activation is None:
            _host.note(host, "GatedMLP")
            return host.forward(self, x)
        return _mlp(self, activation, x)


class TiledMLP(nn.Module):
    """`GatedMLP` over parts of the rows, each computed again in backward, one part's intermediate tensors at a time.

    It takes a third more arithmetic. For sequences so long that what lies between the projections does not fit.
    """

    has_backward = True
    can_torch_compile = True

    act_fn: Any
    down_proj: nn.Module
    gate_proj: nn.Module
    up_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        host = type(self)
        activation = _host.activation_of(self.act_fn) if _host.is_gated_mlp(host) else None
        if activation is None:
            _host.note(host, "TiledMLP")
        part = functools.partial(_native if activation is None else _mlp, self, activation)
        if not torch.is_grad_enabled():
            return part(x)
        parts = x.reshape(-1, x.shape[-1]).tensor_split(_PARTS)
        y = torch.cat([checkpoint(part, rows, use_reentrant=False) for rows in parts])
        return y.reshape(*x.shape[:-1], y.shape[-1])


def _mlp(mlp: Any, activation: str, x: Tensor) -> Tensor:
    return mlp.down_proj(glu(mlp.gate_proj(x), mlp.up_proj(x), activation=activation))


def _native(mlp: Any, activation: None, x: Tensor) -> Tensor:
    return type(mlp).forward(mlp, x)


class Linear(nn.Module):
    """torch's product and nothing else: there is nothing around it to fuse. It is here for the name to be found."""

    has_backward = True
    can_torch_compile = True

    bias: Tensor | None
    weight: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)
