"""Layers of this package for every model that is loaded with a plain `use_kernels=True`."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ._layers import LAYERS, InstalledLayer, in_all_modes, require_kernels

# What the table had before, and the classes that were given a name.
_before: dict[str, Any] | None = None
_named: list[type[nn.Module]] = []


def register_kernels(classes: Mapping[type[nn.Module], str] | None = None) -> None:
    """Let `from_pretrained(..., use_kernels=True)`, without a configuration, use the layers of this package.

    transformers writes its own table again at every call. It writes for all compute capabilities; the table prefers the
    narrower interval, which is the one registered here. So this one stays in force, for all models loaded afterwards.

    Args:
        classes: names for classes that transformers gives none, such as `{SomeMLP: "SwiGLUMLP"}`: gated MLPs have none.

    Raises:
        ImportError: `kernels` is missing or has a version that the installed transformers does not take.
        ValueError: a name is not one of those with a layer, or a class has another name.
        RuntimeError: on a machine with an XPU, where the table knows no interval: use `tigon.KernelConfig` there.
    """
    global _before
    require_kernels("register_kernels")
    classes = dict(classes or {})
    for cls, name in classes.items():
        if name not in LAYERS:
            raise ValueError(f"register_kernels: {cls.__name__}: expected one of {', '.join(LAYERS)}, got {name!r}")
        has = getattr(cls, "kernel_layer_name", name)
        if has != name:
            raise ValueError(f"register_kernels: {cls.__name__}: it has the name {has!r}, got {name!r}")
    if torch.xpu.is_available():
        raise RuntimeError(
            "register_kernels: on an XPU transformers overwrites what is registered; give tigon.KernelConfig to"
            " from_pretrained instead"
        )
    from kernels import CUDAProperties, Device, register_kernel_mapping, replace_kernel_forward_from_hub
    from kernels.layer import device as devices

    table = _table()
    if _before is None:
        _before = {name: copy.deepcopy(table.get(name)) for name in LAYERS}
    # Any interval within that of the default, which begins at 0 and has no end.
    interval = {"min_capability": 1, "max_capability": 9999}
    places = [
        Device(type="cpu"),
        Device(type="cuda", properties=CUDAProperties(**interval)),
        Device(type="rocm", properties=devices.ROCMProperties(**interval)),
    ]
    register_kernel_mapping(
        {name: {place: in_all_modes(InstalledLayer(layer)) for place in places} for name, layer in LAYERS.items()}
    )
    for cls, name in classes.items():
        if "kernel_layer_name" not in cls.__dict__:
            replace_kernel_forward_from_hub(cls, name)
            _named.append(cls)


def unregister_kernels() -> None:
    """Take back what `register_kernels` did: the table is as it was, and classes have no name again.

    A model that was loaded meanwhile keeps its layers until the next change between `train()` and `eval()`.
    """
    global _before
    if _before is None:
        return
    table = _table()
    for name, entry in _before.items():
        table.pop(name, None)
        if entry is not None:
            table[name] = entry
    _before = None
    while _named:
        cls = _named.pop()
        del cls.kernel_layer_name
        if "kernel_condition" in cls.__dict__:
            del cls.kernel_condition


def _table() -> dict[str, Any]:
    # `kernels` has a function to add to its table and none to take from it.
    return importlib.import_module("kernels.layer.globals")._KERNEL_MAPPING.get()
