"""Layers that take the place of a module's forward; they have no state, and read the host's.

Each is under the names that transformers has for its host, and under those of the community's repositories of kernels.
"""

from .activation import GeLU, GeluAndMul, GeluTanh, GeluTanhAndMul, QuickGELU, SiLU, SiluAndMul
from .gate_up import GateUpMLP, GateUpMLPLayout
from .loss import ForCausalLMLoss, LinearForCausalLMLoss
from .mlp import GatedMLP, Linear, TiledMLP
from .norms import RMSNorm, RMSNormGated
from .rotary import RotaryPosEmb

# Names of hosts in transformers.
RMSNormZeroCentered = RMSNorm
rotary_pos_emb = RotaryPosEmb
SwiGLUMLP = GeGLUMLP = GatedMLP
NewGELU = FastGELU = GeluTanh

# Names in the community's repositories.
LigerRMSNorm = RMSNorm
LigerSwiGLUMLP = LigerGEGLUMLP = GatedMLP
LigerTiledSwiGLUMLP = LigerTiledGEGLUMLP = TiledMLP
LigerLinear = Linear
LigerForCausalLMLossLayer = LinearForCausalLMLoss
FusedRMSNormGated = RMSNormGated
apply_rotary_transformers = RotaryPosEmb
Silu = SiLU
Gelu = GeLU

__all__ = [
    "FastGELU",
    "ForCausalLMLoss",
    "FusedRMSNormGated",
    "GateUpMLP",
    "GateUpMLPLayout",
    "GatedMLP",
    "GeGLUMLP",
    "GeLU",
    "Gelu",
    "GeluAndMul",
    "GeluTanh",
    "GeluTanhAndMul",
    "LigerForCausalLMLossLayer",
    "LigerGEGLUMLP",
    "LigerLinear",
    "LigerRMSNorm",
    "LigerSwiGLUMLP",
    "LigerTiledGEGLUMLP",
    "LigerTiledSwiGLUMLP",
    "Linear",
    "LinearForCausalLMLoss",
    "NewGELU",
    "QuickGELU",
    "RMSNorm",
    "RMSNormGated",
    "RMSNormZeroCentered",
    "RotaryPosEmb",
    "SiLU",
    "Silu",
    "SiluAndMul",
    "SwiGLUMLP",
    "TiledMLP",
    "apply_rotary_transformers",
    "rotary_pos_emb",
]
