"""What a form is. The kinds of modules that there are stand in the files named after them, the table in _forms.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from . import _dispatch, _probe
from ._probe import Refused

# "sure" gets a row whatever comes of it; "maybe" is a shape that other things have too, so only success is reported.
Match = Literal["no", "maybe", "sure"]


class Found(NamedTuple):
    """A candidate that the probe accepted: what the report calls it, and what its forward needs to know."""

    variant: str
    settings: Any


@dataclass(frozen=True)
class Form:
    """One kind of module. `verify` returns what it is or raises Refused; `forward` is the replacement."""

    name: str
    match: Callable[[nn.Module], Match]
    verify: Callable[[nn.Module, torch.Generator], Found]
    forward: Callable[..., Any]


def arguments_of(module: nn.Module) -> list[inspect.Parameter]:
    """The arguments of the forward of a module's class."""
    return list(inspect.signature(type(module).forward).parameters.values())[1:]


def required_arguments_of(module: nn.Module) -> list[str]:
    """Names of those that have no default."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [a.name for a in arguments_of(module) if a.default is a.empty and a.kind in by_name]


def refuse_unseen(module: nn.Module) -> None:
    """Refuse a module whose forward would be given what is deferred, and hands it on past torch's dispatch."""
    if reason := _dispatch.why_unseen(module):
        raise Refused(reason)


def argument_of(module: nn.Module) -> str:
    """The name of the first argument of the module's forward."""
    arguments = arguments_of(module)
    if not arguments or arguments[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        raise Refused(f"its forward takes ({shown(arguments)}), the form a tensor by name")
    return arguments[0].name


def only_argument(module: nn.Module) -> str:
    """The name of the only argument of the module's forward."""
    arguments = arguments_of(module)
    if len(arguments) != 1:
        raise Refused(f"its forward takes ({shown(arguments)}), the form one tensor")
    return argument_of(module)


def shown(arguments: list[inspect.Parameter]) -> str:
    return ", ".join(str(argument) for argument in arguments)


def run(module: nn.Module, *args: Any) -> Any:
    """The forward of a twin, refused if that does more than return a result."""
    return _probe.watched(module, type(module).forward, module, *args)


def own(store: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in store.items() if value is not None}


def passed_over(module: nn.Module, called: tuple[str | None, ...] = ()) -> tuple[tuple[str, type], ...]:
    """Children that a replacement does not call, with their classes."""
    return tuple((name, type(child)) for name, child in own(module._modules).items() if name not in called)


def are_as_probed(module: nn.Module, children: tuple[tuple[str, type], ...]) -> bool:
    """Whether not calling these children changes nothing: no hook waits for them, and none was exchanged."""
    for name, kind in children:
        child = module._modules.get(name)
        if type(child) is not kind or "forward" in child.__dict__:
            return False
        if child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks:
            return False
        if kind is nn.Dropout and child.training and child.p > 0:
            return False
    return True


def floats_of(module: nn.Module) -> list[str]:
    return [name for name, value in module.__dict__.items() if type(value) is float]


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether the kernels may have them: a sharded or wrapped tensor goes to the module's own forward."""
    return all(t is None or type(t) in (Tensor, nn.Parameter) for t in tensors)
