"""The outputs of transformers with two fields more."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

_OUTPUT = "CausalLMOutputWithPast"
# Prefix of the name, and folder of the models.
_PREFIXES = {
    "": "",
    "Moe": "",
    "Gemma3": "gemma3",
    "Gemma4": "gemma4",
    "Glm4vMoe": "glm4v_moe",
    "InternVL": "internvl",
    "Llava": "llava",
    "MuseGlimmer": "muse_glimmer",
    "PaliGemma": "paligemma",
    "Qwen2VL": "qwen2_vl",
    "Qwen2_5_VL": "qwen2_5_vl",
    "Qwen3VL": "qwen3_vl",
    "Qwen3VLMoe": "qwen3_vl_moe",
    "Qwen3_5": "qwen3_5",
    "Qwen3_5Moe": "qwen3_5_moe",
}


def __getattr__(name: str) -> Any:
    prefix = name.removeprefix("Liger").removesuffix(_OUTPUT)
    if name != f"Liger{prefix}{_OUTPUT}" or prefix not in _PREFIXES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    folder = _PREFIXES[prefix]
    path = f"transformers.models.{folder}.modeling_{folder}" if folder else "transformers.modeling_outputs"
    base = getattr(importlib.import_module(path), f"{prefix}{_OUTPUT}")
    fields: list[Any] = [(field, Any, None) for field in ("token_accuracy", "predicted_tokens")]
    made = dataclasses.make_dataclass(name, fields, bases=(base,), namespace={"__module__": __name__})
    globals()[name] = made
    return made
