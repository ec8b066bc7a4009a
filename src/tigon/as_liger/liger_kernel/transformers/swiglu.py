from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .._missing import missing_from
from ..ops import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction

__getattr__ = missing_from(__name__)


def require_silu(config: Any, *names: str) -> None:
    activation = next((value for name in names if (value := getattr(config, name, None))), None)
    if activation not in ("silu", "swish"):
        raise ValueError(f"{names[0]}: expected silu or swish, got {activation!r}")


class LigerSwiGLUMLP(nn.Module):
    _activation: tuple[str, ...] = ("hidden_act",)

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__()
        require_silu(config, *self._activation)
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        self._make_projections(bias=False)

    def _make_projections(self, bias: bool) -> None:
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    pass


class LigerSwiGLUMLPForMuseGlimmer(LigerSwiGLUMLP):
    _activation = ("hidden_activation", "hidden_act")

    def __init__(self, config: Any) -> None:
        super().__init__(config)


class LigerHunyuanV1SwiGLUMLP(LigerSwiGLUMLP):
    def __init__(self, config: Any, layer_idx: int | None = None, is_shared_mlp: bool = False) -> None:
        super().__init__(config)
        self.layer_idx = layer_idx


class LigerFalconH1SwiGLUMLP(LigerSwiGLUMLP):
    """Factors before the activation and after the projection back."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gate_multiplier, self.down_multiplier = (float(value) for value in config.mlp_multipliers)

    def _make_projections(self, bias: bool) -> None:
        super()._make_projections(bias=getattr(self.config, "mlp_bias", False))

    def forward(self, x: Tensor) -> Tensor:
        y = LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x), self.gate_multiplier)
        return self.down_proj(y) * self.down_multiplier


class LigerBlockSparseTop2MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        require_silu(config, "hidden_act")
        self.ffn_dim, self.hidden_dim = config.intermediate_size, config.hidden_size
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(LigerSiLUMulFunction.apply(self.w1(x), self.w3(x)))


class LigerPhi3SwiGLUMLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        require_silu(config, "hidden_act")
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(LigerFusedGateUpSiLUMulFunction.apply(self.gate_up_proj(x)))
