"""Activations, each one pass forward and one backward, and their products with the other half of their input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.glu import glu


class SiLU(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return F.silu(input)


class GeLU(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(input)


class GeluTanh(nn.Module):
    """Hosts of this kind are called NewGELU and FastGELU too; they compute the formula in eight passes."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(input, approximate="tanh")


class QuickGELU(nn.Module):
    """`input * sigmoid(1.702 input)`, for which torch has no single pass: two, as the host."""

    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return input * torch.sigmoid(1.702 * input)


class SiluAndMul(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        return glu(x, activation="silu")


class GeluAndMul(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        return glu(x, activation="gelu")


class GeluTanhAndMul(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        return glu(x, activation="gelu_tanh")
