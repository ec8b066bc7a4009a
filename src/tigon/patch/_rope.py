"""Rotary embedding is a function that an attention forward finds among the globals of its module.

Rebinding the global would change every model of the family, so the instance gets a copy of the forward in which
that one name is a closure variable: compiled again from its source, in the same live globals, and only if the
source compiles to the very code that is running.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import linecache
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.rope import rope, rope_reference
from . import _probe, _swap
from ._forms import Found, _is_plain
from ._probe import Refused


class RopeSettings(NamedTuple):
    """What a rotary function computes."""

    layout: str
    tables: str
    # The tables repeat their first half, which is all that is read.
    first_half: bool
    # The axis of the heads, or None when callers say it with `unsqueeze_dim`.
    heads: int | None
    # Whether results are cast back to the dtype of the input.
    keeps_dtype: bool
    has_k: bool

    def call(self, op: Callable[..., Any], q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, axis: int) -> Any:
        if self.first_half:
            cos, sin = cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]
        y = op(q, k, cos, sin, layout=self.layout, tables=self.tables, unsqueeze_dim=axis)
        if not self.keeps_dtype:
            return y
        return y.to(q.dtype) if k is None else (y[0].to(q.dtype), y[1].to(k.dtype))


# ---- finding ----


def _signature(function: Any) -> list[inspect.Parameter]:
    target = type(function).forward if isinstance(function, nn.Module) else function
    parameters = list(inspect.signature(target).parameters.values())
    return parameters[1:] if isinstance(function, nn.Module) else parameters


@functools.cache
def _looks_rotary(value: types.FunctionType | nn.Module) -> bool:
    try:
        names = [parameter.name for parameter in _signature(value)]
    except (TypeError, ValueError, AttributeError):
        return False
    return "cos" in names[1:3] and names[names.index("cos") + 1 :][:1] == ["sin"]


def rotary_functions(forward: Callable[..., Any]) -> dict[str, Any]:
    """Rotary functions by the global name under which a forward calls them."""
    innermost = inspect.unwrap(forward)
    if not isinstance(innermost, types.FunctionType):
        return {}
    found = {name: innermost.__globals__.get(name) for name in innermost.__code__.co_names}
    callables = {name: value for name, value in found.items() if isinstance(value, (types.FunctionType, nn.Module))}
    return {name: value for name, value in callables.items() if _looks_rotary(value)}


# ---- probing ----


@_probe.remembered
def verify(function: Any) -> Found:
    """What a rotary function computes; raises Refused when no candidate does."""
    names = [parameter.name for parameter in _signature(function)]
    has_k = names[2] == "cos"
    # position_ids is an argument that older functions take and do not use.
    unknown = [name for name in names[names.index("sin") + 1 :] if name not in ("position_ids", "unsqueeze_dim")]
    if unknown:
        raise Refused(f"the rotary function takes {', '.join(unknown)} too")
    says_axis = "unsqueeze_dim" in names
    axes: tuple[int | None, ...] = (None,) if says_axis else (1, 2)
    candidates = [
        RopeSettings(layout, tables, first_half, axis, keeps, has_k)
        for (layout, tables, first_half), axis, keeps in itertools.product(_CANDIDATES, axes, (False, True))
    ]
    with _probe.laboratory() as generator:
        for case in itertools.product((1, 2), (16, 8), (1, 2)):
            candidates = _surviving(function, candidates, generator, *case)
        if not any(_runs(function, has_k, says_axis, generator, axis, width) for axis in (1, 2) for width in (16, 8)):
            raise Refused("the rotary function does not take [B, H, S, D] and [B, S, D]")
        if not candidates:
            raise Refused("the rotary function is none of the known rotations")
        settings = candidates[0]
    notes = [settings.layout, f"{settings.tables} tables" if settings.tables == "half" else ""]
    return Found(", ".join(note for note in notes if note), settings)


_CANDIDATES = (("half", "full", False), ("half", "half", False), ("interleaved", "half", True))
_DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
)


def _draw(generator: torch.Generator, axis: int, width: int, batch: int) -> list[Tensor]:
    """q, k, cos, sin: other head counts, tables of numbers that are no angles, so that every column matters."""
    q, k = (torch.randn(2, heads, 6, 16, generator=generator) * 3 for heads in (4, 3))
    if axis == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    return [q, k, *(torch.randn(batch, 6, width, generator=generator) for _ in range(2))]


def _native(function: Any, tensors: list[Tensor], has_k: bool, says_axis: bool, axis: int) -> tuple[Any, ...]:
    q, k, cos, sin = tensors
    y = function(*((q, k) if has_k else (q,)), cos, sin, **({"unsqueeze_dim": axis} if says_axis else {}))
    return tuple(y) if has_k else (y,)


def _runs(function: Any, has_k: bool, says_axis: bool, generator: torch.Generator, axis: int, width: int) -> bool:
    try:
        _native(function, _draw(generator, axis, width, 2), has_k, says_axis, axis)
    except Exception:
        return False
    return True


def _surviving(
    function: Any, candidates: list[RopeSettings], generator: torch.Generator, axis: int, width: int, batch: int
) -> list[RopeSettings]:
    """Candidates that agree wherever the function runs; sizes that it does not take say nothing."""
    has_k = bool(candidates) and candidates[0].has_k
    says_axis = bool(candidates) and candidates[0].heads is None
    tensors = _draw(generator, axis, width, batch)
    upstream = [torch.randn(t.shape, generator=generator) for t in tensors[:2]]
    for x_dtype, table_dtype in _DTYPES:
        inputs = [t.to(x_dtype if i < 2 else table_dtype) for i, t in enumerate(tensors)]
        leaves = [t.detach().clone().requires_grad_() for t in inputs[: 1 + has_k]]
        try:
            native = _native(function, [*leaves, *inputs[1 + has_k :]], has_k, says_axis, axis)
            exact = _native(function, [t.float() for t in inputs], has_k, says_axis, axis)
            ups = [u.to(y.dtype) for u, y in zip(upstream, native, strict=False)]
            wanted = torch.autograd.grad(native, leaves, ups)
        except Exception:
            continue
        kept = []
        for settings in candidates:
            fresh = [t.detach().clone().requires_grad_() for t in leaves]
            k = fresh[1] if has_k else None
            try:
                y = settings.call(rope_reference, fresh[0], k, *inputs[2:], settings.heads or axis)
                results = y if has_k else (y,)
                got = torch.autograd.grad(results, fresh, ups)
            except Exception:
                continue
            if x_dtype == table_dtype == torch.float32:
                pairs = zip((*results, *got), (*native, *wanted), strict=True)
                agrees = all(_probe.same(a, b) for a, b in pairs)
            else:
                agrees = all(_probe.no_worse(a, b, c) for a, b, c in zip(results, native, exact, strict=True))
            if agrees:
                kept.append(settings)
        candidates = kept
    return candidates


# ---- replacing ----


def replacement(native: Any, settings: RopeSettings) -> Callable[..., Any]:
    """A function called like `native` that runs the kernel where it fits, and `native` elsewhere."""
    parameters = _signature(native)
    names = tuple(parameter.name for parameter in parameters)
    defaults = tuple(None if parameter.default is parameter.empty else parameter.default for parameter in parameters)
    num_tensors = names.index("sin") + 1

    def rotate(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *(kwargs.get(n, d) for n, d in zip(names[len(args) :], defaults[len(args) :], strict=False))]
        given = dict(zip(names, values, strict=False))
        tensors = values[:num_tensors]
        axis = given["unsqueeze_dim"] if settings.heads is None else settings.heads
        fits = (
            all(name in given for name in kwargs)
            and all(isinstance(t, Tensor) for t in tensors)
            and tensors[0].dim() == 4
            and tensors[-1].dim() == 3
            and axis in (1, 2)
            and given.get("position_ids") is None
            and _is_plain(*tensors)
        )
        if not fits:
            return native(*args, **kwargs)
        q, k = (tensors[0], tensors[1]) if settings.has_k else (tensors[0], None)
        return settings.call(rope, q, k, tensors[-2], tensors[-1], axis)

    return rotate


@_probe.remembered
def rebound(forward: types.FunctionType, functions: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """A copy of an attention forward in which the given rotary functions, by their global names, are replaced."""
    new = _rebuilt(forward, {name: replacement(function, verify(function).settings) for name, function in functions})
    return _swap.signed(new)


def _rebuilt(function: Any, replaced: dict[str, Any]) -> types.FunctionType:
    """`function` with other globals, through the decorators around it."""
    if not isinstance(function, types.FunctionType):
        raise Refused("the attention forward is not a plain function")
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        code, cells = _recompiled(function, replaced)
    else:
        code, new = function.__code__, _rebuilt(inner, replaced)
        cells = tuple(types.CellType(new) if _holds(cell, inner) else cell for cell in function.__closure__ or ())
        if not any(_holds(cell, inner) for cell in function.__closure__ or ()):
            raise Refused("a decorator of the attention forward hides what it calls")
    copy = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    return copy


def _holds(cell: types.CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:
        return False


def _recompiled(
    function: types.FunctionType, replaced: dict[str, Any]
) -> tuple[types.CodeType, tuple[types.CellType, ...]]:
    """Code and closure of `function` with the names in `replaced` as closure variables."""
    old = function.__code__
    source = "".join(linecache.getlines(old.co_filename, function.__globals__))
    try:
        # The whole file, since what its names are bound to shows in the code of the functions.
        tree = ast.parse(source)
        native = _code_in(compile(tree, old.co_filename, "exec", dont_inherit=True), old)
    except SyntaxError as error:
        raise Refused("the source of the attention forward is not at hand") from error
    if native is None:
        raise Refused("the source of the attention forward is not at hand")
    if (native.co_code, native.co_names, native.co_freevars) != (old.co_code, old.co_names, old.co_freevars):
        raise Refused("the source of the attention forward is not the code that runs")
    tree = ast.fix_missing_locations(_Enclose(old, tuple(replaced)).visit(tree))
    new = _code_in(compile(tree, old.co_filename, "exec", dont_inherit=True), old)
    cells = dict(zip(old.co_freevars, function.__closure__ or (), strict=True))
    cells.update({name: types.CellType(value) for name, value in replaced.items()})
    if new is None or not set(replaced) <= set(new.co_freevars) <= set(cells):
        raise Refused("the rotary function is not called by the attention forward itself")
    if hasattr(old, "co_qualname"):
        new = new.replace(co_qualname=old.co_qualname)
    return new, tuple(cells[name] for name in new.co_freevars)


def _code_in(code: types.CodeType, wanted: types.CodeType) -> types.CodeType | None:
    """The code object within `code` that has the name and the line of `wanted`."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            if (constant.co_name, constant.co_firstlineno) == (wanted.co_name, wanted.co_firstlineno):
                return constant
            found = _code_in(constant, wanted)
            if found is not None:
                return found
    return None


class _Enclose(ast.NodeTransformer):
    """Put one function definition into another that has the given arguments, which become its closure."""

    def __init__(self, wanted: types.CodeType, arguments: tuple[str, ...]) -> None:
        self.wanted, self.arguments = wanted, arguments

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        if (node.name, first) != (self.wanted.co_name, self.wanted.co_firstlineno):
            return self.generic_visit(node)
        outer = ast.parse(f"def enclosing({', '.join(self.arguments)}): pass").body[0]
        outer.body = [node]  # type: ignore[attr-defined]
        return outer
