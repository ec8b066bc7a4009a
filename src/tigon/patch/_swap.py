"""Put a forward on one module and take it off again; everything a swap leaves behind is here."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as _torch_module


class Installed(NamedTuple):
    """The one attribute a patched module gains: plain data, so that copies and pickles of the module work.

    `slot` is the attribute that holds the forward, `before` what the instance had there (`()` for nothing).
    """

    form: str
    variant: str
    settings: Any
    slot: str
    before: tuple[Any, ...]


def slot_of(module: nn.Module) -> str:
    """Where the forward of an instance goes: hooks that wrap forward keep the wrapped one in `_old_forward`."""
    state = module.__dict__
    return "_old_forward" if "_hf_hook" in state and "_old_forward" in state else "forward"


def foreign_forward(module: nn.Module) -> bool:
    """Whether the instance has a forward that is neither its class's own nor ours."""
    current = module.__dict__.get(slot_of(module))
    return current is not None and getattr(current, "__func__", None) is not type(module).forward and not _ours(current)


def is_installed(module: nn.Module) -> bool:
    """Whether a swap is in force. A pickled model comes back with the mark but its class's own forward."""
    mark = module.__dict__.get("_tigon")
    return mark is not None and _ours(module.__dict__.get(mark.slot))


def _ours(forward: Any) -> bool:
    function = getattr(forward, "__func__", None)
    return function is not None and getattr(function, "__tigon__", None) is function


def signed(function: types.FunctionType) -> types.FunctionType:
    """Mark a function as ours: by itself, since a decorator around it copies its attributes."""
    function.__tigon__ = function  # type: ignore[attr-defined]
    return function


def watched_by_all() -> bool:
    """Whether there is a hook that is called for every module there is."""
    return _torch_module._has_any_global_hook()


def ours_unwatched(module: nn.Module, names: tuple[str, ...], form: str) -> bool:
    """Whether these children have a forward of ours still, and no hook sees what they are given or give."""
    if watched_by_all():
        return False
    for name in names:
        child = module._modules.get(name)
        mark = None if child is None else child.__dict__.get("_tigon")
        if mark is None or mark.form != form or mark.slot != "forward" or not is_installed(child):
            return False
        if child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks:
            return False
    return True


def this_thread() -> int:
    """Who may be given what is deferred: another thread that runs the same module gets tensors."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def install(module: nn.Module, form: str, variant: str, settings: Any, function: Callable[..., Any]) -> None:
    slot = slot_of(module)
    before = (module.__dict__[slot],) if slot in module.__dict__ else ()
    # Straight into the instance: a module's own __setattr__ may have opinions.
    module.__dict__["_tigon"] = Installed(form, variant, settings, slot, before)
    module.__dict__[slot] = types.MethodType(function, module)
    module.__dict__["_replicate_for_data_parallel"] = types.MethodType(_replicate, module)


def uninstall(module: nn.Module) -> bool:
    """Undo `install`; False, and nothing done, when something else has wrapped the forward since."""
    mark: Installed = module.__dict__["_tigon"]
    if is_installed(module):
        if mark.before:
            module.__dict__[mark.slot] = mark.before[0]
        else:
            del module.__dict__[mark.slot]
    elif foreign_forward(module):
        return False
    del module.__dict__["_tigon"]
    for name in ("_replicate_for_data_parallel", "_tigon_defer", "_tigon_outer", "_tigon_running"):
        module.__dict__.pop(name, None)
    return True


# All that patching puts on an instance, for good.
_PUT = ("_tigon", "forward", "_old_forward", "_replicate_for_data_parallel", "_loss_function")


def put_on(module: nn.Module) -> dict[str, Any]:
    """What of a module patching may change, for `put_back`."""
    return {name: module.__dict__[name] for name in _PUT if name in module.__dict__}


def put_back(module: nn.Module, state: dict[str, Any]) -> None:
    for name in _PUT:
        module.__dict__.pop(name, None)
    module.__dict__.update(state)


def _replicate(self: nn.Module) -> nn.Module:
    # DataParallel copies the instance's attributes, so the copy's forward would still be bound to the original.
    replica = type(self)._replicate_for_data_parallel(self)
    slot = replica._tigon.slot
    replica.__dict__[slot] = types.MethodType(replica.__dict__[slot].__func__, replica)
    return replica


# A bound method is pickled by name, and a pickle comes back with the class's own methods.
_replicate.__name__ = "_replicate_for_data_parallel"


@functools.cache
def like(template: Callable[..., Any], native: Callable[..., Any], argument: str | None = None) -> Callable[..., Any]:
    """`template` with the name, signature and documentation of `native`, its `x` renamed to `argument`."""
    code = template.__code__
    if argument not in (None, "x"):
        names = {"x": argument, argument: f"{argument}_"}
        code = code.replace(co_varnames=tuple(names.get(name, name) for name in code.co_varnames))
    function = types.FunctionType(code, template.__globals__, native.__name__, template.__defaults__)
    function.__kwdefaults__ = template.__kwdefaults__
    functools.update_wrapper(function, native)
    return signed(function)
