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
import re
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.qk_norm_rope import qk_norm_rope
from ..ops.rope import rope, rope_reference
from . import _probe, _swap
from ._deferred import Deferred, real
from ._form import Found, is_plain
from ._norms import NormedHeads, weight_of
from ._probe import Refused


class RopeSettings(NamedTuple):
    """What a rotary function computes."""

    layout: str
    tables: str
    # Only the first half of the tables is read; the second repeats it.
    first_half: bool
    # The axis of the heads, or None when callers say it with `unsqueeze_dim`.
    heads: int | None
    # Whether results are cast back to the dtype of the input.
    keeps_dtype: bool
    inverse: bool
    tail: bool

    @property
    def variant(self) -> str:
        notes = (
            self.layout,
            f"{self.tables} tables" if (self.layout, self.tables) not in _USUAL else "",
            "inverse" if self.inverse else "",
            "tail" if self.tail else "",
        )
        return ", ".join(note for note in notes if note)

    def call(self, op: Callable[..., Any], q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, axis: int) -> Any:
        if self.first_half:
            cos, sin = cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]
        y = op(
            q,
            k,
            cos,
            sin,
            layout=self.layout,
            tables=self.tables,
            unsqueeze_dim=axis,
            inverse=self.inverse,
            tail=self.tail,
        )
        if not self.keeps_dtype:
            return y
        return y.to(q.dtype) if k is None else (y[0].to(q.dtype), y[1].to(k.dtype))


# Layouts with the tables that need no mention.
_USUAL = (("half", "full"), ("interleaved", "full"), ("interleaved_to_half", "half"))
# Layout, tables, whether the first half of them is all that is read. Some agree wherever both run, the first is taken.
_TABLES = (
    ("half", "full", False),
    ("half", "half", False),
    ("half", "half", True),
    ("interleaved", "full", False),
    ("interleaved", "half", False),
    ("interleaved", "half", True),
    ("interleaved_to_half", "half", True),
    ("interleaved_to_half", "half", False),
    ("interleaved_to_half", "full", False),
)


# ---- finding ----


class _Method(NamedTuple):
    """A rotary function that is no global but a method of the attention's class."""

    name: str


class _Arguments(NamedTuple):
    """Where a rotary function has its tensors. `complex` is the one table cos + i sin in place of two."""

    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    num_heads_tensors: int
    cos: int
    sin: int

    @property
    def complex(self) -> bool:
        return self.cos == self.sin

    @property
    def num_tensors(self) -> int:
        return self.num_heads_tensors + (1 if self.complex else 2)

    def tables(self, values: Sequence[Any]) -> tuple[Tensor, Tensor]:
        if self.complex:
            return torch.view_as_real(values[self.cos].resolve_conj()).unbind(-1)  # type: ignore[return-value]
        return values[self.cos], values[self.sin]

    def place(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        if self.complex:
            return (torch.complex(cos.float(), sin.float()),)
        return (cos, sin) if self.cos < self.sin else (sin, cos)


@functools.cache
def _arguments(function: Any) -> _Arguments | None:
    """One or two tensors to rotate, then the tables by one of their usual names; None for anything else."""
    target = type(function).forward if isinstance(function, nn.Module) else function
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError, AttributeError):
        return None
    parameters = parameters[1:] if isinstance(function, nn.Module) else parameters
    names = tuple(parameter.name for parameter in parameters)
    defaults = tuple(None if parameter.default is parameter.empty else parameter.default for parameter in parameters)
    for count in (1, 2):
        if set(names[count : count + 2]) == {"cos", "sin"}:
            return _Arguments(names, defaults, count, names.index("cos"), names.index("sin"))
        if names[count : count + 1] == ("freqs_cis",):
            return _Arguments(names, defaults, count, count, count)
    return None


def rotary_functions(forward: Callable[..., Any]) -> dict[str, Any]:
    """Rotary functions by the name under which a forward calls them: globals, and methods to say no to."""
    innermost = inspect.unwrap(forward)
    if not isinstance(innermost, types.FunctionType):
        return {}
    names = innermost.__code__.co_names
    found = {name: innermost.__globals__.get(name) for name in names}
    callables = {name: value for name, value in found.items() if isinstance(value, (types.FunctionType, nn.Module))}
    functions = {name: value for name, value in callables.items() if _arguments(value) is not None}
    if functions:
        return functions
    owner = innermost.__globals__.get(innermost.__qualname__.partition(".")[0])
    methods = [name for name in names if re.match("apply_rot|rotate_quer", name) and callable(getattr(owner, name, 0))]
    return {name: _Method(name) for name in methods}


# ---- probing ----


@_probe.remembered
def verify(function: Any) -> Found:
    """What a rotary function computes; raises Refused when no candidate does."""
    if isinstance(function, _Method):
        raise Refused(f"its rotation is the method {function.name} of its class, not a function")
    arguments = _arguments(function)
    # position_ids is an argument that older functions take and do not use.
    unknown = [n for n in arguments.names[arguments.num_tensors :] if n not in ("position_ids", "unsqueeze_dim")]
    if unknown:
        raise Refused(f"the rotary function takes {', '.join(unknown)} too")
    says_axis = "unsqueeze_dim" in arguments.names
    axes: tuple[int | None, ...] = (None,) if says_axis else (1, 2)
    candidates = [
        RopeSettings(*tables, axis, keeps, inverse, tail)
        for tail, inverse, tables, axis, keeps in itertools.product(
            (False, True), (False, True), _TABLES, axes, (False, True)
        )
    ]
    runs = False
    with _probe.laboratory() as generator:
        for axis, width, batch in itertools.product((1, 2), (16, 8, 4), (1, 2)):
            case = _Case(function, arguments, says_axis, axis, _draw(generator, axis, width, batch), generator)
            runs = runs or case.runs()
            candidates = case.surviving(candidates)
    if not runs:
        raise Refused("the rotary function does not take [B, H, S, D] and [B, S, D]")
    if not candidates:
        raise Refused("the rotary function is none of the known rotations")
    return Found(candidates[0].variant, candidates[0])


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


class _Case(NamedTuple):
    """A rotary function on tensors of one set of shapes."""

    function: Any
    arguments: _Arguments
    says_axis: bool
    axis: int
    tensors: list[Tensor]
    generator: torch.Generator

    def native(self, heads: list[Tensor], cos: Tensor, sin: Tensor) -> tuple[Any, ...]:
        axis = {"unsqueeze_dim": self.axis} if self.says_axis else {}
        y = self.function(*heads, *self.arguments.place(cos, sin), **axis)
        return tuple(y) if self.arguments.num_heads_tensors == 2 else (y,)

    def runs(self) -> bool:
        try:
            self.native(self.tensors[: self.arguments.num_heads_tensors], *self.tensors[2:])
        except Exception:
            return False
        return True

    def surviving(self, candidates: list[RopeSettings]) -> list[RopeSettings]:
        """Candidates that agree wherever the function runs; sizes that it does not take say nothing."""
        count = self.arguments.num_heads_tensors
        upstream = [torch.randn(t.shape, generator=self.generator) for t in self.tensors[:count]]
        for x_dtype, table_dtype in _DTYPES:
            if self.arguments.complex and table_dtype != torch.float32:
                continue
            heads = [t.to(x_dtype) for t in self.tensors[:count]]
            tables = [t.to(table_dtype) for t in self.tensors[2:]]
            leaves = [t.detach().clone().requires_grad_() for t in heads]
            try:
                native = self.native(leaves, *tables)
                exact = self.native([t.float() for t in heads], *(t.float() for t in tables))
                ups = [u.to(y.dtype) for u, y in zip(upstream, native, strict=True)]
                wanted = torch.autograd.grad(native, leaves, ups)
            except Exception:
                continue
            in_fp32 = x_dtype == table_dtype == torch.float32
            kept = []
            for settings in candidates:
                fresh = [t.detach().clone().requires_grad_() for t in heads]
                q, k = fresh[0], fresh[1] if count == 2 else None
                try:
                    y = settings.call(rope_reference, q, k, *tables, settings.heads or self.axis)
                    results = (y,) if k is None else y
                    got = torch.autograd.grad(results, fresh, ups)
                except Exception:
                    continue
                if in_fp32:
                    pairs = zip((*results, *got), (*native, *wanted), strict=True)
                    agrees = all(_probe.same(a, b) for a, b in pairs)
                else:
                    agrees = all(_probe.no_worse(a, b, c) for a, b, c in zip(results, native, exact, strict=True))
                if agrees:
                    kept.append(settings)
            candidates = kept
        return candidates


# ---- replacing ----


def replacement(
    native: Any,
    settings: RopeSettings,
    op: Callable[..., Any] | None = None,
    with_norms: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """A function called like `native` that runs `op`, the kernel, where it fits, and `native` elsewhere."""
    arguments = _arguments(native)
    names, defaults, num_tensors = arguments.names, arguments.defaults, arguments.num_tensors
    takes_k = arguments.num_heads_tensors == 2

    def rotate(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *(kwargs.get(n, d) for n, d in zip(names[len(args) :], defaults[len(args) :], strict=False))]
        norms = None
        if any(isinstance(value, Deferred) for value in values[:2]):
            norms = _QkNorms.of(*values[:2]) if takes_k and not (settings.inverse or settings.tail) else None
            if norms is None:
                return rotate(*real(args), **real(kwargs))
            values[:2] = norms.heads
        given = dict(zip(names, values, strict=False))
        axis = given["unsqueeze_dim"] if settings.heads is None else settings.heads
        fits = (
            all(name in given for name in kwargs)
            and given.get("position_ids") is None
            and _fit(values[:num_tensors], takes_k, axis)
        )
        if not fits:
            return native(*real(args), **real(kwargs))
        cos, sin = arguments.tables(values)
        if norms is not None:
            return norms.rotate(with_norms or qk_norm_rope, settings, cos, sin, axis)
        return settings.call(op or rope, values[0], values[1] if takes_k else None, cos, sin, axis)

    return rotate


class _QkNorms(NamedTuple):
    """Queries and keys whose norms were left to their rotation."""

    heads: tuple[Tensor, Tensor]
    dtypes: tuple[torch.dtype, torch.dtype]
    weights: tuple[Tensor | None, Tensor | None]
    options: dict[str, Any]

    @classmethod
    def of(cls, q: Any, k: Any) -> _QkNorms | None:
        """None where one kernel cannot do both."""
        if type(q) is not NormedHeads or type(k) is not NormedHeads or q.real is not None or k.real is not None:
            return None
        settings, weights = q.norm._tigon.settings, (weight_of(q.norm), weight_of(k.norm))
        eps = settings.eps_of(q.norm)
        alike = k.norm._tigon.settings == settings and settings.eps_of(k.norm) == eps
        if not alike or (weights[0] is None) != (weights[1] is None):
            return None
        (q_weight, offset), (k_weight, _) = (settings.scaled_by(weight) for weight in weights)
        options = {"eps": eps, "offset": offset, "cast": settings.cast}
        return cls((q.x, k.x), (q.dtype, k.dtype), (q_weight, k_weight), options)

    def rotate(self, op: Callable[..., Any], settings: RopeSettings, cos: Tensor, sin: Tensor, axis: int) -> Any:
        def together(q: Tensor, k: Tensor, *tables: Tensor, inverse: bool, tail: bool, **layout: Any) -> Any:
            return op(q, k, *self.weights, *tables, **self.options, **layout)

        # The dtype to keep is that of the norm's result.
        y = settings._replace(keeps_dtype=False).call(together, *self.heads, cos, sin, axis)
        return tuple(t.to(d) for t, d in zip(y, self.dtypes, strict=True)) if settings.keeps_dtype else y


def _fit(tensors: list[Any], takes_k: bool, axis: Any) -> bool:
    """Whether the kernel takes these tensors; what else the native function can broadcast is left to it."""
    if axis not in (1, 2) or not all(isinstance(t, Tensor) for t in tensors) or not is_plain(*tensors):
        return False
    q, k, table = tensors[0], tensors[1 if takes_k else 0], tensors[-1]
    return (
        q.dim() == k.dim() == 4
        and table.dim() == 3
        and q.shape[0] == k.shape[0]
        and table.shape[0] in (1, q.shape[0])
        and q.shape[3 - axis] == k.shape[3 - axis] == table.shape[1]
        and all(t.device == q.device for t in tensors)
    )


def rebuilt_with(forward: Any, functions: dict[str, Any], *ops: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of an attention forward in which the given rotary functions, by their global names, are replaced."""
    return _rebuilt(forward, {n: replacement(f, verify(f).settings, *ops) for n, f in functions.items()})


@_probe.remembered
def rebound(forward: types.FunctionType, functions: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """The copy that runs the kernels, made once for all instances."""
    return _swap.signed(rebuilt_with(forward, dict(functions)))  # type: ignore[arg-type]


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
