"""The configuration that a model is loaded with, beside `use_kernels=True`."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import types
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from ..layers import _host
from ..layers.gate_up import CONVERTER
from ._layers import INSTALLED, LAYERS, InstalledLayer, in_all_modes, require_kernels, required_arguments

logger = logging.getLogger("tigon")

# The package loads a layer for the backend that torch was built for, wherever a tensor is.
DEVICES = ("cpu", "cuda", "rocm", "xpu")
GATE_UP = "GateUpMLP"
# A layer in another repository or folder, for all devices or for some; None leaves the host its own forward.
Entry = str | tuple[str, dict[str, Any]] | Mapping[str, Any] | None


class KernelConfig(transformers.KernelConfig, dict):  # type: ignore[misc]
    """The layers of this package for one model, in training and evaluation, on every device, without a network.

        model = AutoModelForCausalLM.from_pretrained(path, use_kernels=True, kernel_config=tigon.KernelConfig())

    Norms, rotary embeddings and activations go through the mechanism of transformers. Gated MLPs, which carry no name
    there, get the forward of their layer on the instance, as that mechanism does it; so does the loss function.

    Args:
        kernel_mapping: by name, what is to be used instead of this package's layer: `"org/repo:Layer"`,
            `"/folder:Layer"`, `("org/repo:Layer", {"version": 2, "trust_remote_code": True})`, a dictionary of these by
            device, or None for the host's own forward.
        use_local_kernel: accepted and not needed; a repository that is a folder is taken from there.
        inherit_mapping: whether names that neither this package nor `kernel_mapping` has a layer for go to the defaults
            of transformers, which are downloaded.
        gate_up: names of classes of gated MLPs whose two first projections become one. Weights are joined as they are
            loaded and parted as they are saved.

    Raises:
        ImportError: `kernels` is missing or has a version that the installed transformers does not take.
        ValueError: an entry has none of the forms above, or kernels are switched off by the environment.

    It is a dictionary of its arguments, so that what holds it can be written as JSON; `KernelConfig(**it)` makes it
    again.
    """

    def __init__(
        self,
        kernel_mapping: Mapping[str, Entry] | Iterable[tuple[str, Any]] | None = None,
        use_local_kernel: bool = False,
        inherit_mapping: bool = False,
        gate_up: Iterable[str] = (),
    ) -> None:
        require_kernels("KernelConfig")
        given = dict(kernel_mapping or {})
        if set(given) == {"kernel_mapping", "inherit_mapping", "gate_up"}:
            # dataclasses.asdict copies a dictionary from its items.
            given, inherit_mapping, gate_up = given["kernel_mapping"], given["inherit_mapping"], given["gate_up"]
        if isinstance(gate_up, str):
            raise ValueError(f"KernelConfig: gate_up: expected names of classes in a list, got {gate_up!r}")
        for name, entry in given.items():
            _check_entry(name, entry)
        dict.__init__(
            self, kernel_mapping=dict(given), inherit_mapping=bool(inherit_mapping), gate_up=[str(n) for n in gate_up]
        )
        self.use_local_kernel, self.inherit_mapping, self.registered_layer_names = True, bool(inherit_mapping), {}

    @property
    def kernel_mapping(self) -> dict[str, str]:
        # What is read before there is a model: the layers that bring modules of their own. Made anew for each model.
        if self["gate_up"]:
            _require_scan()
        return dict.fromkeys(self["gate_up"], f"{INSTALLED}:{GATE_UP}")

    @kernel_mapping.setter
    def kernel_mapping(self, value: Any) -> None:
        pass

    def sanitize_kernel_mapping(self, model: nn.Module) -> None:
        """Raise where `kernel_mapping` has a name that nothing in the model has, or `gate_up` joined too much."""
        _forget_layouts(self["gate_up"])
        self.store_registered_layer_names(model)
        known = {*self.registered_layer_names.values(), *LAYERS}
        for name in self["kernel_mapping"]:
            if name not in known:
                raise ValueError(
                    f"KernelConfig: kernel_mapping: expected one of {', '.join(sorted(known))}, got {name!r}"
                )
        if self["gate_up"]:
            _check_gate_up(model, self["gate_up"])

    def create_compatible_mapping(self, model: nn.Module, compile: bool = False) -> None:
        """Give the model a mapping of its own, and its MLPs and loss function what has no name to be mapped."""
        repositories: dict[str, dict[str, Any]] = {}
        for name, layer in {**LAYERS, GATE_UP: GATE_UP}.items():
            repositories[name] = dict.fromkeys(DEVICES, InstalledLayer(layer))
        for name, entry in self["kernel_mapping"].items():
            repositories[name] = {} if entry is None else _repositories(entry)
        # An empty table keeps those that keep their forward from a default.
        mapping = {
            name: {device: in_all_modes(repository) for device, repository in places.items()}
            or {device: {} for device in DEVICES}
            for name, places in repositories.items()
        }
        resolved = transformers.KernelConfig(mapping, inherit_mapping=self.inherit_mapping)
        model.kernel_config = resolved
        replaced = _replace_mlps(model, repositories) + _replace_loss(model, repositories)
        if not replaced and not any(repositories.get(name) for name in self.registered_layer_names.values()):
            warnings.warn(f"KernelConfig: nothing in {type(model).__name__} is replaced", UserWarning, stacklevel=3)


# ---- entries ----


def _check_entry(name: str, entry: Any) -> None:
    values = [entry] if entry is None or not isinstance(entry, Mapping) else list(entry.values())
    for value in values:
        repository = value[0] if isinstance(value, (tuple, list)) and len(value) == 2 else value
        is_named = isinstance(repository, str) and "/" in repository and ":" in repository
        if not is_named and entry is not None:
            raise ValueError(
                f"KernelConfig: kernel_mapping: {name}: expected 'org/repo:Layer', '/folder:Layer', one of them with"
                f" {{'version': ...}} in a tuple, these by device, or None, got {value!r}"
            )


def _repositories(entry: Any) -> dict[str, Any]:
    if isinstance(entry, Mapping):
        return {device: _repository(value) for device, value in entry.items()}
    return dict.fromkeys(DEVICES, _repository(entry))


def _repository(value: Any) -> Any:
    from kernels import LayerRepository, LocalLayerRepository

    place, options = value if isinstance(value, (tuple, list)) else (value, {})
    place, _, layer = place.rpartition(":")
    if Path(place).is_dir():
        return LocalLayerRepository(Path(place), layer_name=layer)
    if Path(place).is_absolute():
        raise ValueError(f"KernelConfig: kernel_mapping: no folder {place}")
    options = dict(options)
    if options.get("revision") is None:
        options.setdefault("version", 1)
    return LayerRepository(place, layer_name=layer, **{k: v for k, v in options.items() if v is not None})


# ---- what has no name ----


def _replace_mlps(model: nn.Module, repositories: dict[str, dict[str, Any]]) -> int:
    count = 0
    for module in model.modules():
        if hasattr(type(module), "kernel_layer_name") or not hasattr(module, "act_fn"):
            continue
        activation = _host.activation_of(module.act_fn) if _host.is_gated_mlp(type(module)) else None
        places = repositories["SwiGLUMLP" if activation == "silu" else "GeGLUMLP"] if activation else {}
        repository = places.get(_device(module))
        if repository is None:
            continue
        if "forward" in module.__dict__:
            logger.info("tigon: the forward of a %s was replaced before; it is left", type(module).__name__)
            continue
        layer = repository.load()
        if required_arguments(layer) != 1:
            raise ValueError(f"KernelConfig: {repository}: expected a forward with one argument")
        module.forward = types.MethodType(layer.forward, module)
        count += 1
    return count


def _replace_loss(model: nn.Module, repositories: dict[str, dict[str, Any]]) -> int:
    from transformers.loss.loss_utils import ForCausalLMLoss

    repository = repositories["ForCausalLMLoss"].get(_device(model))
    # Only a model with a head calls it.
    if repository is None or not hasattr(model, "lm_head") or model.loss_function is not ForCausalLMLoss:
        return 0
    model.loss_function = functools.partial(repository.load().forward, None)
    return 1


def _device(module: nn.Module) -> str:
    import torch

    device = next((p.device.type for p in module.parameters()), "cpu")
    return "rocm" if device == "cuda" and torch.version.hip is not None else device


# ---- one projection for two ----


def _require_scan() -> None:
    """Raise where transformers cannot look for a class; it would fail for every later model of the process too.

    Raises:
        ImportError: a module of transformers that it looks into cannot be imported.
    """
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("transformers"):
            try:
                dir(module)
            except ImportError as error:
                raise ImportError(
                    f"KernelConfig: gate_up: to find a class, transformers {transformers.__version__} imports modules"
                    f" that cannot be imported here: {error}"
                ) from error


def _check_gate_up(model: nn.Module, names: list[str]) -> None:
    joined = [m for m in model.modules() if type(m).__name__ == f"{GATE_UP}Layout"]
    if not joined:
        raise ValueError(
            f"KernelConfig: gate_up: no module of a class {' or '.join(names)} was made; from_pretrained alone reads it"
        )
    left = {type(m).__name__ for m in model.modules() if hasattr(m, "gate_proj") and hasattr(m, "up_proj")}
    if left:
        raise ValueError(
            f"KernelConfig: gate_up: {', '.join(sorted(left))} has two projections too, whose weights were joined in"
            " loading; name it as well, or none"
        )


def _forget_layouts(names: list[str]) -> None:
    """Take from the tables of transformers, which are of the process, what loading this one model put there."""
    if not names:
        return
    from transformers import monkey_patching

    registered = monkey_patching.get_patch_mapping()
    monkey_patching.unregister_patch_mapping([name for name in names if name in registered])
    conversions = importlib.import_module("transformers.conversion_mapping")
    table = conversions._checkpoint_conversion_mapping_cache or {}
    for key, transforms in list(table.items()):
        left = [t for t in transforms if type(t).__name__ != CONVERTER]
        if len(left) < len(transforms) and left:
            table[key] = left
        elif len(left) < len(transforms):
            del table[key]
