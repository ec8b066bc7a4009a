"""A gated MLP whose first two projections are one: its forward, and the module that takes the host's place.

The library that loads such a layer looks beside it for a class of its name and `Layout`, makes modules of that class
where the model would make its own, and turns the weights of a checkpoint into those of the layout and back.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor, nn

from ..ops.glu import glu

# Activations by the names that configurations have for them.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
CONVERTER = "GateUpConverter"


class GateUpMLP(nn.Module):
    """`down_proj(act(gate) * up)`, with `gate, up = gate_up_proj(x)`."""

    has_backward = True
    can_torch_compile = True

    down_proj: nn.Module
    gate_up_proj: nn.Module
    activation: str

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(glu(self.gate_up_proj(x), activation=self.activation))


def _conversions() -> list[Any]:
    # By name: what is portable imports torch alone, and only the library that reads checkpoints asks for this.
    loading = importlib.import_module("transformers.core_model_loading")
    # A class of its own, by which it is found again in a table that outlives the model.
    converter = type(CONVERTER, (loading.WeightConverter,), {"__slots__": ()})
    return [
        converter(
            source_patterns=[rf"\.gate_proj.{name}", rf"\.up_proj.{name}"],
            target_patterns=rf"\.gate_up_proj.{name}",
            operations=[loading.Concatenate(dim=0)],
        )
        for name in ("weight", "bias")
    ]


class _WithConversions(type):
    @property
    def conversion_mapping(cls) -> list[Any]:
        return _conversions()


class GateUpMLPLayout(nn.Module, metaclass=_WithConversions):
    """What stands in the model; made from the configuration, as the host is."""

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__()
        self.config = config
        name = getattr(config, "hidden_activation", None) or config.hidden_act
        if name not in ACTIVATIONS:
            raise ValueError(f"GateUpMLP: hidden_act: expected one of {', '.join(ACTIVATIONS)}, got {name!r}")
        self.activation = ACTIVATIONS[name]
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        bias = bool(getattr(config, "mlp_bias", False))
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(glu(self.gate_up_proj(x), activation=self.activation))
