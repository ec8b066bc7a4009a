"""Build any language model class of transformers, tiny and random, and a batch for it.

The configuration class with its default values is the start; every field that is a size is set by its name, so a new
model usually needs no entry in the tables. Models run in fp32 with eager attention, without dropout and on text; a
vision tower is built, but runs only where the model cannot go without an image.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from . import tables
from .tables import FIRST_TEXT_ID, SMALL, Size

MAPPINGS = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")
SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def _listed(mapping: str) -> Iterator[tuple[str, str]]:
    """Model type and class name of every entry of a mapping."""
    for model_type, names in getattr(modeling_auto, mapping).items():
        for name in [names] if isinstance(names, str) else names:
            yield model_type, name


def classes() -> list[str]:
    """Names of all classes that are trained with labels, in the order transformers lists them."""
    names = dict.fromkeys(name for mapping in MAPPINGS for _, name in _listed(mapping))
    return [name for name in names if name not in tables.LEFT_OUT]


def model_types() -> dict[str, list[str]]:
    """Model types by class name."""
    types: dict[str, list[str]] = {}
    for mapping in MAPPINGS:
        for model_type, name in _listed(mapping):
            types.setdefault(name, []).append(model_type)
    return types


def _defaults(config_class: type) -> dict[str, Any]:
    def default(field: dataclasses.Field[Any]) -> Any:
        if field.default is not dataclasses.MISSING:
            return field.default
        return field.default_factory() if field.default_factory is not dataclasses.MISSING else None

    return {field.name: default(field) for field in dataclasses.fields(config_class)}


def _shrunk(name: str, value: Any, size: Size) -> Any:
    """The tiny value of a field, `value` itself where there is no reason to change it."""
    tiny = tables.sizes(size).get(name)
    if name == "use_cache":
        return False
    if name in tables.VISIBLE:
        return tables.VISIBLE[name]
    if tiny is not None and (value is not None or name in tables.ALSO_IF_NONE):
        if isinstance(value, (list, tuple)):
            return type(value)([tiny] * len(value))
        if value is None or isinstance(value, str):
            return tiny
        return min(value, tiny) if value else value
    if isinstance(value, float) and ("drop" in name or name.endswith("_jitter_noise")):
        return 0.0
    return value


def tiny_config(config_class: Any, size: Size, more: dict[str, Any] | None = None, ids: Iterator[int] | None = None):
    """A tiny configuration; `more` maps a field, or "part.field", to its value."""
    # Special tokens have one id each, shared by none.
    ids = iter(range(3, FIRST_TEXT_ID)) if ids is None else ids
    more = {**tables.overrides(size).get(config_class.__name__, {}), **(more or {})}
    defaults = _defaults(config_class)
    fields: dict[str, Any] = {}
    for name, value in defaults.items():
        if name in SPECIAL_TOKENS:
            fields[name] = SPECIAL_TOKENS.index(name)
        elif name.endswith(("_token_id", "_token_index", "_start_id", "_end_id")) and isinstance(value, int):
            fields[name] = next(ids)
        elif (tiny := _shrunk(name, value, size)) is not value and tiny != value:
            fields[name] = tiny
    if {"kv_lora_rank", "num_key_value_heads"} <= set(defaults):
        # Latent attention has as many of them as heads.
        fields["num_key_value_heads"] = size.heads
    if "mrope_section" in getattr(config_class, "ignore_keys_at_rope_validation", ()):
        rope = getattr(config_class(), "rope_parameters", None) or tables.ROPE
        fields["rope_parameters"] = {**rope, "mrope_section": [2, 3, 3]}
    fields.update(_parts(config_class, size, more, ids))
    fields.update({name: value for name, value in more.items() if "." not in name})
    if "num_hidden_layers" in defaults:
        fields = {**_one_layer_of_each_type(config_class, defaults), **fields}
    return config_class(**fields)


def _parts(config_class: Any, size: Size, more: dict[str, Any], ids: Iterator[int]) -> dict[str, Any]:
    """Tiny configurations of the parts; their classes are those of the default configuration."""
    keys = getattr(config_class, "sub_configs", None) or {}
    chosen = tables.PARTS.get(config_class.__name__, {})
    default = config_class() if set(keys) - set(chosen) else None
    parts = {}
    for key in keys:
        part_class = CONFIG_MAPPING[chosen[key]] if key in chosen else type(getattr(default, key, None))
        if part_class is type(None):
            continue
        nested = {name.split(".", 1)[1]: value for name, value in more.items() if name.startswith(key + ".")}
        part = tiny_config(part_class, size, nested, ids)
        parts[key] = part.to_dict() if getattr(config_class, "has_no_defaults_at_init", False) else part
    return parts


def _one_layer_of_each_type(config_class: Any, defaults: dict[str, Any]) -> dict[str, Any]:
    """For hybrid models as many layers as the full-size model has types of layers, one of each."""
    full = config_class()
    patterns = {}
    for field in ("layer_types", "mlp_layer_types", "indexer_types"):
        types = list(dict.fromkeys(getattr(full, field, None) or []))
        if types and field in defaults:
            patterns[field] = types
    count = max([2, *(len(types) for types in patterns.values())])
    cycled = {field: [types[i % len(types)] for i in range(count)] for field, types in patterns.items()}
    return {"num_hidden_layers": count, **cycled}


def build(name: str, size: Size = SMALL) -> nn.Module:
    """A model of this class in training mode, with weights that make every part of it matter."""
    cls = getattr(transformers, name)
    causal = name in {each for _, each in _listed(MAPPINGS[0])}
    is_decoder = causal and "is_decoder" in _defaults(cls.config_class)
    config = tiny_config(cls.config_class, size, {"is_decoder": True} if is_decoder else None)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = cls(config).float().train()
    for module in model.modules():
        for attribute, value in tables.VISIBLE_IN_MODULES.get(type(module).__name__, {}).items():
            setattr(module, attribute, value)
    redraw(model)
    return model


@torch.no_grad()
def redraw(model: nn.Module) -> None:
    """Weights as large as in a trained model, norm weights and biases away from ones and zeros: at the usual
    initial values a clamp, a cap, an offset or a bias that is dropped does not show."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.2 * torch.randn_like(parameter))
        elif parameter.ndim > 1:
            usual = parameter.shape[-1] ** -0.5
            spread = float(parameter.std()) if parameter.numel() > 1 else 1.0
            if spread == 0.0:
                parameter.add_(usual * torch.randn_like(parameter))
            elif spread < usual:
                parameter.mul_(usual / spread)


def make_batch(name: str, model: Any, size: Size = SMALL) -> dict[str, Any]:
    """Random text with labels; three tokens at the start of each row are a prompt that is not trained on."""
    torch.manual_seed(1)
    ids = torch.randint(FIRST_TEXT_ID, size.vocab, (size.batch, size.tokens))
    labels = ids.clone()
    labels[:, :3] = -100
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    return tables.BATCHES[name](batch, model.config) if name in tables.BATCHES else batch
