from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tigon.ops import geglu

# The names that transformers has for the two forms of gelu; without one it is the first.
_FORMS: dict[Any, Any] = {
    None: "tanh",
    "gelu_pytorch_tanh": "tanh",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu": "none",
    "gelu_python": "none",
}


class LigerGEGLUMLP(nn.Module):
    """With the form of gelu that the configuration names."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
        if activation not in _FORMS:
            raise ValueError(f"hidden_activation: expected a form of gelu, got {activation!r}")
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self._make_projections()

    def _make_projections(self) -> None:
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        config = self.config
        activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
        return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x), approximate=_FORMS[activation]))


class LigerGEGLUMLPForGemma4(LigerGEGLUMLP):
    """Twice as wide in layers that share keys and values, where the configuration says so."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        super().__init__(config)
        shared = getattr(config, "num_kv_shared_layers", 0)
        first = getattr(config, "num_hidden_layers", 0) - shared
        wide = getattr(config, "use_double_wide_mlp", False) and shared > 0
        if wide and layer_idx is not None and layer_idx >= first:
            self.intermediate_size *= 2
            self._make_projections()
