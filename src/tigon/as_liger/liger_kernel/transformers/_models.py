"""The models that Liger-Kernel has a function for, with the flags of each: data, read by monkey_patch.py.

The names are part of the interface that is answered to; what is patched is found by structure, as everywhere.
"""

from __future__ import annotations

import inspect
from typing import Any

_STANDARD = "rope -cross_entropy fused_linear_cross_entropy rms_norm swiglu model"
_GEGLU = "rope -cross_entropy fused_linear_cross_entropy rms_norm geglu model"
_VISION = "-cross_entropy fused_linear_cross_entropy rms_norm layer_norm model **kwargs"

# Flags in their order; a minus is off by default, all others are on.
_FLAGS = {
    **dict.fromkeys(
        [
            "exaone4",
            "falcon_h1",
            "hunyuan_v1_dense",
            "hunyuan_v1_moe",
            "llama",
            "ministral",
            "mistral",
            "mixtral",
            "olmo2",
            "olmo3",
            "phi3",
            "qwen2",
            "qwen2_5_vl",
            "qwen3",
            "qwen3_moe",
            "qwen3_vl_moe",
            "smollm3",
        ],
        _STANDARD,
    ),
    **dict.fromkeys(
        [
            "deepseek_v2",
            "deepseek_v3",
            "glm4",
            "glm4v",
            "glm4v_moe",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_next",
        ],
        _STANDARD.replace("rope", "-rope"),
    ),
    **dict.fromkeys(["gpt_oss", "qwen3_vl"], _STANDARD.replace("swiglu", "-swiglu")),
    **dict.fromkeys(["gemma", "gemma2", "gemma3_text"], _GEGLU),
    **dict.fromkeys(["gemma3", "paligemma"], _GEGLU.replace("rms_norm", "layer_norm rms_norm")),
    **dict.fromkeys(["mllama", "muse_glimmer"], _STANDARD.replace("rms_norm", "layer_norm rms_norm")),
    **dict.fromkeys(["internvl", "smolvlm"], _VISION),
    "deepseek_v4": _STANDARD.replace("rope", "-rope").replace("swiglu", "-swiglu"),
    "gemma4": _GEGLU.replace("rope", "-rope").replace("rms_norm", "-layer_norm rms_norm"),
    "gemma4_text": _GEGLU.replace("rope", "-rope"),
    "granite": "rope cross_entropy -fused_linear_cross_entropy rms_norm swiglu model",
    "llama4": f"{_STANDARD} layer_norm",
    "llava": "-cross_entropy fused_linear_cross_entropy model **kwargs",
    "nemotron": "relu_squared -cross_entropy fused_linear_cross_entropy model **kwargs",
    "pixtral": "rope rms_norm swiglu model",
    "qwen2_vl": _STANDARD.replace("rms_norm", "rms_norm layer_norm"),
}
# Model types that share the function of another.
ALIASES = {
    "llama4_text": "llama4",
    "mllama_text_model": "mllama",
    "qwen2_5_vl_text": "qwen2_5_vl",
    "qwen2_vl_text": "qwen2_vl",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "qwen3_vl_text": "qwen3_vl",
}
# Whose classes stand in the file of another.
FOLDERS = {"gemma3_text": "gemma3", "gemma4_text": "gemma4"}
# Flags that those with **kwargs hand on to the language and vision models within.
HANDED_ON = dict.fromkeys(["internvl", "llava", "smolvlm"], ("rope", "rms_norm", "layer_norm", "swiglu", "geglu"))


def _signature(flags: str) -> inspect.Signature:
    def parameter(word: str) -> inspect.Parameter:
        if word.startswith("**"):
            return inspect.Parameter(word[2:], inspect.Parameter.VAR_KEYWORD)
        default: Any = None if word == "model" else not word.startswith("-")
        return inspect.Parameter(word.lstrip("-"), inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)

    return inspect.Signature([parameter(word) for word in flags.split()])


SIGNATURES = {name: _signature(flags) for name, flags in sorted(_FLAGS.items())}
APPLY_NAMES = {f"apply_liger_kernel_to_{name}": name for name in SIGNATURES}
