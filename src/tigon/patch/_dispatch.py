"""Code that hands tensors past the dispatch of torch, which is how a deferred value knows what is done with it.

`apply` of an autograd function, which a re-entrant checkpoint is one of, takes what is not a tensor as a constant: its
gradient would be lost. What is seen here before is not deferred; what is not seen raises (see `Deferred.__class__`).
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_NAMES = frozenset({"apply", "checkpoint", "checkpoint_sequential"})
# Whose code is known to be none of it, or is never given what is deferred.
_KNOWN = ("torch.", "tigon.", "transformers.modeling_utils", "transformers.utils", "transformers.generation")
# By function, since code that is shared may have other globals and closures, and by owner.
_found: weakref.WeakKeyDictionary[types.FunctionType, dict[type, str]] = weakref.WeakKeyDictionary()


def passed_by(function: Any, owner: type = object) -> str:
    """What in `function`, or in code that it calls by name, hands tensors past the dispatch; `""` for nothing.

    `owner` is the class whose methods it calls. Of what has no code to be read, it is itself.
    """
    inner = _code_of(function)
    if inner is None:
        return getattr(function, "__name__", type(function).__name__)
    found = _found.setdefault(inner, {})
    if owner not in found:
        found[owner] = _search(inner, owner)
    return found[owner]


def why_unseen(module: nn.Module) -> str:
    """Why what the forward of `module` does with a deferred value is not all seen, `""` where it is."""
    past = passed_by(type(module).forward, type(module))
    return f"its forward hands tensors on where operations are not seen: {past}" if past else ""


def _search(function: types.FunctionType, owner: type) -> str:
    todo, seen = [function], {function}
    while todo and len(seen) < 200:
        each = todo.pop()
        names = set(_names_in(each.__code__))
        if names & _NAMES:
            return f"{min(names & _NAMES)} in {each.__qualname__}"
        for name, value in _values(each, names, owner):
            if _is_autograd_function(value):
                return f"{name} in {each.__qualname__}"
            inner = _code_of(value)
            if inner is not None and inner not in seen and not (inner.__module__ or "").startswith(_KNOWN):
                seen.add(inner)
                todo.append(inner)
    return ""


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _values(function: types.FunctionType, names: set[str], owner: type) -> Iterator[tuple[str, Any]]:
    """What the names in a function stand for: globals, variables of its closure, methods."""
    for name in names:
        yield name, function.__globals__.get(name)
        yield name, inspect.getattr_static(owner, name, None)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue


def _is_autograd_function(value: Any) -> bool:
    value = getattr(value, "__self__", value)
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


def _code_of(value: Any) -> types.FunctionType | None:
    """The Python function that a call of `value` runs, if it is one."""
    if isinstance(value, functools.partial):
        return _code_of(value.func)
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        return _code_of(value.__func__)
    if isinstance(value, nn.Module):
        return _code_of(type(value).forward)
    if isinstance(value, type):
        return _code_of(value.forward) if issubclass(value, nn.Module) else None
    if isinstance(value, types.FunctionType):
        inner = inspect.unwrap(value)
        return inner if isinstance(inner, types.FunctionType) else None
    call = inspect.getattr_static(type(value), "__call__", None)
    return call if isinstance(call, types.FunctionType) else None
