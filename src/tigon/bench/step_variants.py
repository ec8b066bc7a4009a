"""Ways to train one model: each a row that says how a freshly built model is made ready."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from .. import __version__
from .store import version_of


@dataclass(frozen=True)
class Variant:
    """A named way to train.

    Attributes:
        prepare: changes the model in place.
        requires: import name that must be present.
        is_compiled: the model goes through `torch.compile` afterwards.
        is_captured: forward, backward and optimiser are one CUDA graph.
    """

    name: str
    prepare: Callable[[Any], None]
    requires: str = "torch"
    is_compiled: bool = False
    is_captured: bool = False

    @property
    def is_available(self) -> bool:
        return importlib.util.find_spec(self.requires) is not None

    @property
    def version(self) -> str:
        return {"tigon": __version__, "liger_kernel": version_of("liger_kernel")}.get(
            self.requires, version_of("torch")
        )


def _native(model: Any) -> None:
    """Nothing is changed."""


def _liger(model: Any) -> None:
    # Imported when measured: importing it touches CUDA.
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    from .peers.liger import _ops

    _ops()
    _apply_liger_kernel_to_instance(model=model)


def _patched(**options: Any) -> Callable[[Any], None]:
    def prepare(model: Any) -> None:
        from ..patch import patch

        patch(model, **options)

    return prepare


_FUSIONS = ("qk_norm_rope", "rms_norm_mlp", "add_rms_norm")
_SMALL: dict[str, Any] = {"fuse": _FUSIONS, "loss_options": {"memory": "min"}}

VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("native", _native),
        Variant("native_compile", _native, is_compiled=True),
        Variant("liger", _liger, "liger_kernel"),
        Variant("liger_compile", _liger, "liger_kernel", is_compiled=True),
        Variant("tigon", _patched(), "tigon"),
        Variant("tigon_compile", _patched(), "tigon", is_compiled=True),
        Variant("tigon_fused", _patched(fuse=_FUSIONS), "tigon"),
        Variant("tigon_graph", _patched(), "tigon", is_captured=True),
        Variant("tigon_recompute", _patched(mlp="recompute", **_SMALL), "tigon"),
        Variant("tigon_tiled", _patched(mlp="tiled", **_SMALL), "tigon"),
    )
}
# What is measured unless others are named.
DEFAULT = ("native", "native_compile", "liger", "tigon", "tigon_compile", "tigon_fused")


def num_changed(model: nn.Module, classes: list[type]) -> int:
    """Modules with a forward of their own, or of another class than in `classes`, in the order of `modules()`."""
    return sum(
        "forward" in vars(module) or type(module) is not cls
        for module, cls in zip(model.modules(), classes, strict=True)
    )
