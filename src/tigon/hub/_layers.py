"""Which layer stands under which name of transformers, and the repository that finds it in the installed package."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Any

from torch import nn

from .. import layers

# Names that classes and functions of transformers carry, or that its own table of kernels has.
LAYERS = {
    "RMSNorm": "RMSNorm",
    "RMSNormZeroCentered": "RMSNorm",
    "RMSNormGated": "RMSNormGated",
    "rotary_pos_emb": "RotaryPosEmb",
    "SwiGLUMLP": "GatedMLP",
    "GeGLUMLP": "GatedMLP",
    "Linear": "Linear",
    "ForCausalLMLoss": "ForCausalLMLoss",
    "SiLU": "SiLU",
    "GeLU": "GeLU",
    "GeluTanh": "GeluTanh",
    "NewGELU": "GeluTanh",
    "FastGELU": "GeluTanh",
    "QuickGELU": "QuickGELU",
}
# A folder as `kernels` wants one, whose modules are those of the installed package.
INSTALLED = Path(__file__).parent / "installed"


class InstalledLayer:
    """Stands where `kernels` expects a repository; gives it a layer of this package."""

    def __init__(self, layer_name: str) -> None:
        self.layer_name = layer_name

    def load(self) -> type[nn.Module]:
        return getattr(layers, self.layer_name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InstalledLayer) and other.layer_name == self.layer_name

    def __hash__(self) -> int:
        return hash((InstalledLayer, self.layer_name))

    def __str__(self) -> str:
        return f"`tigon` (layer `{self.layer_name}`)"


def in_all_modes(repository: Any) -> dict[Any, Any]:
    """The table of one device: the same layer whatever the mode."""
    from kernels import Mode

    modes = (Mode.TRAINING, Mode.INFERENCE)
    return {mode: repository for plain in modes for mode in (plain, plain | Mode.TORCH_COMPILE)}


def require_kernels(name: str) -> None:
    """Raise unless transformers takes the installed `kernels`, and is not told to leave it alone.

    Raises:
        ImportError: `kernels` is missing, or of a version that this transformers does not take.
        ValueError: an environment variable switches kernels off.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ImportError(f"{name}: needs transformers: pip install 'tigon[hf]'")
    import transformers
    from transformers.utils import import_utils

    if not import_utils.is_kernels_available():
        limits = (getattr(import_utils, f"KERNELS_{end}_VERSION", "?") for end in ("MIN", "MAX"))
        wanted = "kernels>={},<{}".format(*limits)
        try:
            found = importlib.metadata.version("kernels")
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        raise ImportError(f"{name}: transformers {transformers.__version__} needs {wanted}, found {found}")
    hub, disabled = os.environ.get("USE_HUB_KERNELS", "YES"), os.environ.get("DISABLE_KERNEL_MAPPING", "0")
    if hub.upper() not in _TRUE:
        raise ValueError(f"{name}: the environment variable USE_HUB_KERNELS={hub} switches kernels off")
    if disabled != "0":
        raise ValueError(f"{name}: the environment variable DISABLE_KERNEL_MAPPING={disabled} switches kernels off")


_TRUE = ("1", "ON", "YES", "TRUE")


@functools.cache
def required_arguments(layer: type[nn.Module]) -> int:
    """How many arguments a forward takes, itself left out."""
    import inspect

    return len(inspect.signature(layer.forward).parameters) - 1
