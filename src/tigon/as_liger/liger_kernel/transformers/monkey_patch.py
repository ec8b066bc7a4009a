"""The functions that put the operators into models: flags in, `tigon.patch` and `tigon.patch_on_build` out."""

from __future__ import annotations

import gc
import importlib
import inspect
import logging
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from tigon.as_liger._model import FORMS_OF, apply_to
from tigon.patch import PatchOnBuild, Report, _on_build

from . import functional
from ._models import ALIASES, APPLY_NAMES, FOLDERS, HANDED_ON, SIGNATURES
from .geglu import LigerGEGLUMLP
from .layer_norm import LigerLayerNorm
from .rms_norm import LigerRMSNorm

logger = logging.getLogger("tigon")

_GATED = ("swiglu", "geglu")
_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
# For a model that there is no function for: everything that there is a form of.
_EVERYTHING = dict.fromkeys(FORMS_OF, True)
_fused_linear_cross_entropy = functional.liger_fused_linear_cross_entropy


# ---- flags ----


def _flags(name: str) -> dict[str, bool]:
    """The flags of a function with their defaults."""
    if name not in SIGNATURES:
        return dict(_EVERYTHING)
    parameters = SIGNATURES[name].parameters.values()
    flags = {each.name: each.default for each in parameters if type(each.default) is bool}
    return {**dict.fromkeys(HANDED_ON.get(name, ()), True), **flags}


def _known(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """`given` without what is no flag, each of which is named in a warning."""
    flags = {*_flags(name), *FORMS_OF, *_LOSSES}
    for unknown in [key for key in given if key not in flags]:
        warnings.warn(f"liger_kernel: {unknown}={given[unknown]!r} is no flag of {name} and does nothing", stacklevel=4)
    return {key: value for key, value in given.items() if key in flags}


def _chosen(name: str, given: dict[str, Any]) -> dict[str, bool]:
    """What to do: the defaults and what was said; of the two losses the one that was asked for.

    Raises:
        ValueError: a flag is no truth value, both losses were asked for, or one whose function was replaced, or one
            kind of gated MLP only where there may be both.
    """
    for flag, value in given.items():
        # Text such as "false" would be true.
        if value not in (None, True, False):
            raise ValueError(f"{name}: {flag}: expected True, False or None, got {value!r}")
    if all(given.get(loss) for loss in _LOSSES):
        raise ValueError("cross_entropy and fused_linear_cross_entropy cannot both be True")
    flags = _flags(name)
    chosen = {**flags, **given}
    kinds = {kind: bool(given[kind]) for kind in _GATED if kind in given}
    if kinds and all(kind in flags for kind in _GATED):
        if len(set(kinds.values())) > 1:
            raise ValueError(f"{name}: swiglu and geglu: expected one value, as they are one form, got {kinds}")
        chosen.update(dict.fromkeys(_GATED, next(iter(kinds.values()))))
    for loss, other in (_LOSSES, _LOSSES[::-1]):
        if given.get(loss):
            chosen[other] = False
    if chosen.get("relu_squared"):
        warnings.warn("relu_squared: an MLP without a gate is no form of tigon and stays as it is", stacklevel=4)
    replaced = functional.liger_fused_linear_cross_entropy is not _fused_linear_cross_entropy
    if chosen.get("fused_linear_cross_entropy") and replaced:
        raise ValueError(
            "fused_linear_cross_entropy: expected functional.liger_fused_linear_cross_entropy as it was, got a"
            " replacement, such as one for use_token_scaling: the loss of a patched model does not call it"
        )
    return {flag: bool(value) for flag, value in chosen.items()}


# ---- classes ----


class _Built(PatchOnBuild):
    """Applies flags to every model of a class that is built from now on."""

    def __init__(self, cls: type[nn.Module], chosen: dict[str, bool], is_inner: bool) -> None:
        super().__init__(cls, {})
        self.chosen, self.is_inner = chosen, is_inner

    def built(self, model: nn.Module) -> None:
        with warnings.catch_warnings():
            if self.is_inner:
                # What it is built into may have what it lacks.
                warnings.filterwarnings("ignore", "tigon.patch replaced nothing")
            self.report = apply_to(model, self.chosen)


def _classes(folder: str) -> Iterator[tuple[type[nn.Module], bool]]:
    """Classes of models in a file of transformers, and whether others are built around them."""
    from transformers import PreTrainedModel
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    names = {name for value in MODEL_MAPPING_NAMES.values() for name in ([value] if isinstance(value, str) else value)}
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    for cls in list(vars(module).values()):
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel) and cls.__module__ == module.__name__:
            if "labels" in inspect.signature(cls.forward).parameters:
                yield cls, False
            elif cls.__name__ in names:
                yield cls, True


def _ask(folder: str, chosen: dict[str, bool]) -> list[_Built]:
    handles = []
    for cls, is_inner in _classes(folder):
        wanted = {flag: on and not (is_inner and flag in _LOSSES) for flag, on in chosen.items()}
        if not any(wanted.values()):
            continue
        asked = [h for h in _on_build._asked.get(cls, ()) if isinstance(h, _Built) and h.chosen == wanted]
        handles.append(asked[0] if asked else _Built(cls, wanted, is_inner).start())
    return handles  # type: ignore[return-value]


# ---- entry points ----


def _apply(name: str, model: nn.Module | None, given: dict[str, Any]) -> Report | list[_Built] | None:
    chosen = _chosen(name, _known(name, given))
    return apply_to(model, chosen) if model is not None else _ask(FOLDERS.get(name, name), chosen)


def _function(name: str) -> Callable[..., Any]:
    signature = SIGNATURES[name]

    def apply(*args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(*args, **kwargs).arguments)
        given.update(given.pop("kwargs", {}))
        return _apply(name, given.pop("model", None), given)

    apply.__name__ = apply.__qualname__ = f"apply_liger_kernel_to_{name}"
    apply.__module__ = __name__
    apply.__signature__ = signature  # type: ignore[attr-defined]
    apply.__doc__ = (
        "Use fused operators in `model`, or without it in every model of this family that is built from now on.\n\n"
        "Returns the report of the patch, or handles whose `remove()` ends it."
    )
    return apply


_functions = {f"apply_liger_kernel_to_{name}": _function(name) for name in SIGNATURES}
globals().update(_functions)

MODEL_TYPE_TO_APPLY_LIGER_FN = {
    model_type: _functions[f"apply_liger_kernel_to_{ALIASES.get(model_type, model_type)}"]
    for model_type in (*SIGNATURES, *ALIASES)
}


def _name_of(model_type: str) -> str:
    return ALIASES.get(model_type, model_type)


def _apply_liger_kernel(model_type: str, **kwargs: Any) -> None:
    """Use fused operators in models of a type: those built from now on, and those that exist.

    Who calls this may have built the model already.
    """
    if not model_type:
        logger.info("liger_kernel: no model type, nothing is patched")
        return
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    name = _name_of(model_type)
    chosen = _chosen(name, _known(name, kwargs))
    folder = FOLDERS.get(name) or model_type_to_module_name(model_type).replace("-", "_")
    try:
        handles = _ask(folder, chosen)
    except ImportError:
        warnings.warn(f"liger_kernel: transformers has no model type {model_type!r}, nothing is patched", stacklevel=2)
        return
    by_class = {handle.cls: handle for handle in handles}
    for model in [each for each in gc.get_objects() if type(each) in by_class]:
        by_class[type(model)].built(model)


def _apply_liger_kernel_to_instance(model: nn.Module, **kwargs: Any) -> Report | None:
    """Use fused operators in a model, of a type that there is a function for or of another."""
    name = _name_of(getattr(getattr(model, "config", None), "model_type", "") or type(model).__name__)
    return apply_to(model, _chosen(name, _known(name, kwargs)))


# ---- single modules ----


def _bind_method_to_module(module: nn.Module, method_name: str, new_method: Callable[..., Any]) -> None:
    module.__dict__[method_name] = types.MethodType(new_method, module)


def _wrapped(module: nn.Module) -> list[nn.Module]:
    """A module, or the original and the copies in the wrapper that PEFT puts around it."""
    copies = module._modules.get("modules_to_save")
    original = module._modules.get("original_module")
    return [module] if copies is None or original is None else [original, *copies.values()]  # type: ignore[operator]


def _become(module: nn.Module, cls: type[nn.Module]) -> None:
    _bind_method_to_module(module, "forward", cls.forward)
    _bind_method_to_module(module, "extra_repr", cls.extra_repr)
    module.__dict__["_liger_name"] = cls.__name__
    _bind_method_to_module(module, "_get_name", _get_name)


def _get_name(self: nn.Module) -> str:
    return self.__dict__["_liger_name"]


def _epsilon(module: nn.Module, eps: float) -> float:
    return next((v for n in ("variance_epsilon", "eps") if (v := getattr(module, n, None)) is not None), eps)


def _patch_rms_norm_module(
    module: nn.Module,
    offset: float = 0.0,
    eps: float = 1e-6,
    casting_mode: str = "llama",
    in_place: bool = True,
    row_mode: bool | None = None,
) -> None:
    for each in _wrapped(module):
        values = {"offset": offset, "casting_mode": casting_mode, "in_place": in_place, "row_mode": row_mode}
        each.__dict__.update(values, variance_epsilon=_epsilon(each, eps))
        _become(each, LigerRMSNorm)


def _patch_layer_norm_module(module: nn.Module, eps: float = 1e-6) -> None:
    for each in _wrapped(module):
        size = getattr(each, "hidden_size", None) or getattr(each, "normalized_shape", None)
        each.__dict__.update(hidden_size=size, variance_epsilon=_epsilon(each, eps))
        _become(each, LigerLayerNorm)


def _patch_swiglu_module(module: nn.Module, liger_module: type[nn.Module]) -> None:
    _become(module, liger_module)


def _patch_geglu_module(module: nn.Module) -> None:
    _become(module, LigerGEGLUMLP)


__all__ = [
    "MODEL_TYPE_TO_APPLY_LIGER_FN",
    "_apply_liger_kernel",
    "_apply_liger_kernel_to_instance",
    *APPLY_NAMES,
]
