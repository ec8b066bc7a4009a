"""Run a module's own forward against candidates, on random numbers, without touching the module.

A twin has the class and the attributes of the module but fresh parameters, no hooks and stand-ins for its
projections, so that meta, sharded, quantised and tied weights are no obstacle and nothing live is written.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import random
import types
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn

# Equal up to the order of fp32 additions; variants of one activation differ by 1e-4 at these scales.
FP32_TOLERANCE = 1e-5
# A different place of rounding flips a third of the bf16 results, a different order of fp32 operations one in 1e3.
BF16_FLIPS = 0.02


class Refused(Exception):
    """Why a module or a function cannot be replaced; the message is the reason of the report's row."""


class LeavesTraces(Refused):
    """It runs, and does more than return a result."""


@contextlib.contextmanager
def laboratory() -> Iterator[torch.Generator]:
    """Plain fp32 CPU torch whatever contexts the caller is in, and a generator of its own."""
    on_cpu = torch.get_default_device().type == "cpu"
    dtype = torch.get_default_dtype()
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        contextlib.nullcontext() if on_cpu else torch.device("cpu"),
    ):
        torch.random.default_generator.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        try:
            yield torch.Generator().manual_seed(0)
        finally:
            torch.set_default_dtype(dtype)


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """`functools.cache` that remembers refusals too."""
    outcomes: dict[tuple[Any, ...], tuple[Any, str | None]] = {}

    @functools.wraps(function)
    def call(*key: Any) -> Any:
        if key not in outcomes:
            try:
                outcomes[key] = function(*key), None
            except Refused as refused:
                outcomes[key] = None, str(refused)
        result, reason = outcomes[key]
        if reason is not None:
            raise Refused(reason)
        return result

    return call


def explained(call: Callable[..., Any], *args: Any) -> Any:
    """`call(*args)`, any exception turned into a reason."""
    try:
        return call(*args)
    except Refused:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise Refused(f"its forward raised {type(error).__name__} in the probe: {lines[0]}") from error


class StandIn(nn.Module):
    """What is run in place of a child; what it notes about its calls is no record that the module keeps."""


class Projection(StandIn):
    """Stand-in for a linear layer of any kind. Its `weight` and `bias` have shapes and a dtype, but no numbers."""

    def __init__(self, in_features: int, out_features: int, generator: torch.Generator) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.matrix = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
        self.shift = torch.randn(out_features, generator=generator)
        # What its weight is said to be in; whether that is all it takes.
        self.dtype, self.strict = torch.float32, False

    @property
    def weight(self) -> Tensor:
        return torch.full((self.out_features, self.in_features), float("nan"), dtype=self.dtype)

    @property
    def bias(self) -> Tensor:
        return self.weight[:, 0]

    def forward(self, x: Tensor) -> Tensor:
        if self.strict and x.dtype != self.dtype:
            raise RuntimeError(f"expected {self.dtype}, got {x.dtype}")
        return x @ self.matrix.to(x.dtype).T + self.shift.to(x.dtype)


_NO_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_PRIVATE = ("forward", "_old_forward", "_hf_hook", "_tigon")


def twin(
    module: nn.Module,
    *,
    parameters: dict[str, Tensor] | None = None,
    buffers: dict[str, Tensor] | None = None,
    children: dict[str, nn.Module] | None = None,
    attributes: dict[str, Any] | None = None,
    training: bool = False,
) -> nn.Module:
    """A module of the same class and attributes with the given parameters and children, and its own forward."""
    other = object.__new__(type(module))
    # What a forward that keeps a record writes into is the twin's own.
    state = {key: _owned(value) for key, value in module.__dict__.items() if key not in _PRIVATE}
    state.update({name: OrderedDict() for name in _NO_HOOKS})
    given = parameters or {}
    # Absent parameters stay absent: a module asks for them by name.
    state["_parameters"] = {name: nn.Parameter(given[name]) if name in given else None for name in module._parameters}
    if buffers is None:
        state["_buffers"] = {name: _owned(buffer) for name, buffer in module._buffers.items()}
    else:
        state["_buffers"] = {name: buffers.get(name) for name in module._buffers}
    if children is None:
        children = {name: twin(child, training=training) for name, child in module._modules.items() if child}
    state["_modules"] = dict(children)
    state["training"] = training
    state.update(attributes or {})
    other.__dict__.update(state)
    return other


# Larger ones are tables and weights, which nothing is recorded in.
_SMALL = 2**16


def _owned(value: Any) -> Any:
    if type(value) is Tensor:
        # Flat parameters that are spread over processes: the tensor's memory is taken away between uses.
        if value.layout == torch.strided and not value.is_meta and value.untyped_storage().nbytes() < value.nbytes:
            raise Refused("it holds a tensor whose memory is elsewhere")
        if value.numel() <= _SMALL:
            return value.detach().clone()
    return copy.copy(value) if type(value) in (list, dict, set) else value


def watched(module: nn.Module, call: Callable[..., Any], *args: Any, draws: bool = False) -> Any:
    """`explained(call, *args)`, refused if it leaves anything behind on `module`, a twin, that a replacement would not.

    Nor may it draw random numbers, unless `draws`: what it does with them need not show in one run.
    """
    state, chance = _state_of(module), _chance()
    result = explained(call, *args)
    after = _state_of(module)
    for name in (*after, *state):
        if not _is_kept(state.get(name), after.get(name)):
            raise LeavesTraces(f"its forward keeps a record in {name}, which a replacement would not")
    if not draws and not all(_equal(a, b) for a, b in zip(chance, _chance(), strict=True)):
        raise LeavesTraces("its forward draws random numbers")
    return result


def _state_of(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Every attribute, buffer and parameter by name: what it is, and what shows a change within it."""
    state: dict[str, tuple[Any, Any]] = {}
    for path, part in module.named_modules():
        if isinstance(part, StandIn):
            continue
        prefix = f"{path}." if path else ""
        own = {key: value for key, value in part.__dict__.items() if key not in _STORES}
        shared = {key: value for key, value in type(part).__dict__.items() if not key.startswith("__")}
        for store in (shared, own, part._buffers, part._parameters):
            state.update({prefix + key: (value, _content_of(value)) for key, value in store.items()})
    return state


_STORES = ("_parameters", "_buffers", "_modules")


def _content_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return 0 if value.is_inference() else value._version
    if type(value) is dict:
        return [*value.keys(), *value.values()]
    return list(value) if type(value) in (list, set) else None


def _is_kept(before: tuple[Any, Any] | None, after: tuple[Any, Any] | None) -> bool:
    if before is None or after is None or before[0] is not after[0]:
        return False
    if isinstance(before[1], list):
        return len(before[1]) == len(after[1]) and all(a is b for a, b in zip(before[1], after[1], strict=True))
    return before[1] == after[1]


def _chance() -> tuple[Any, ...]:
    return torch.random.default_generator.get_state(), random.getstate()


def _equal(first: Any, second: Any) -> bool:
    return torch.equal(first, second) if isinstance(first, Tensor) else first == second


def shape_of(parameter: Tensor) -> tuple[int, ...]:
    """The full shape; ZeRO-3 leaves an empty placeholder that remembers it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def same(actual: Any, expected: Any, *, tolerance: float = FP32_TOLERANCE) -> bool:
    """Whether two results agree: shape, dtype, and every row within `tolerance` of its largest element."""
    if not isinstance(actual, Tensor) or not isinstance(expected, Tensor):
        return False
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    actual, expected = actual.detach().double(), expected.detach().double()
    if not bool(torch.isfinite(expected).all()):
        return False
    size = expected.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return bool(((actual - expected).abs() <= tolerance * size).all())


def flips(actual: Any, expected: Any) -> float:
    """Share of elements that were rounded to 16 bits elsewhere; 1 when shape or dtype differ.

    A result in 16 bits is compared bit for bit, one in fp32 up to the order of its operations.
    """
    if not isinstance(actual, Tensor) or actual.shape != expected.shape or actual.dtype != expected.dtype:
        return 1.0
    size = expected.abs().amax(-1, keepdim=True) if expected.dtype == torch.float32 else 0.0
    equal = (actual == expected) | ((actual - expected).abs() <= FP32_TOLERANCE * size)
    return 1.0 - float(equal.float().mean())


def no_worse(actual: Any, native: Any, exact: Tensor) -> bool:
    """Whether `actual` is as near to the fp32 result as the module's own low-precision result is."""
    if not isinstance(actual, Tensor) or actual.shape != native.shape or actual.dtype != native.dtype:
        return False
    exact = exact.detach().double()
    error, own = (float((t.detach().double() - exact).square().mean().sqrt()) for t in (actual, native))
    return error <= 2 * own + 1e-6 * float(exact.square().mean().sqrt())


def gradients(result: Tensor, inputs: list[Tensor], upstream: Tensor) -> list[Tensor | None]:
    return list(torch.autograd.grad(result, inputs, upstream.to(result.dtype), allow_unused=True))


def same_gradients(actual: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    """Whether gradients agree, and are missing for the same inputs."""
    return all(
        a is b if a is None or b is None else same(a, b, tolerance=1e-4) for a, b in zip(actual, expected, strict=True)
    )


_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)
_SKIPPED = frozenset((*nn.Module().__dict__, *_PRIVATE))


def fingerprint(module: nn.Module, memo: dict[int, str], opaque: Container[str] = ()) -> tuple[Any, ...] | None:
    """What the verdict depends on, or None when an attribute cannot be described; not what is in `opaque` attributes
    and children, of which it is the class."""
    parts: list[Any] = [type(module), type(module).forward, "forward" in module.__dict__]
    for name, value in module.__dict__.items():
        if name in _SKIPPED:
            continue
        described = type(value) if name in opaque else _described(value, memo)
        if described is None:
            return None
        parts.append((name, described))
    parts += [(name, None if p is None else shape_of(p)) for name, p in module._parameters.items()]
    parts += [(name, None if b is None else tuple(b.shape)) for name, b in module._buffers.items()]
    for name, child in module._modules.items():
        if name in opaque:
            parts.append((name, type(child)))
            continue
        # A projection is called, never looked into.
        inner = sizes_of(child) or (child and fingerprint(child, memo))
        if child is not None and inner is None:
            return None
        parts.append((name, inner))
    return tuple(parts)


def sizes_of(module: nn.Module | None) -> tuple[int, int] | None:
    """(in_features, out_features) of a linear layer of any kind: plain, quantised or with adapters."""
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return sizes if all(isinstance(size, int) for size in sizes) else None  # type: ignore[return-value]


def _described(value: Any, memo: dict[int, str]) -> Any:
    if isinstance(value, (*_SCALARS, *_FUNCTIONS)):
        return type(value), value
    if isinstance(value, functools.partial):
        return _described((value.func, *value.args, *sorted(value.keywords.items())), memo)
    if isinstance(value, (tuple, list)):
        inner = tuple(_described(item, memo) for item in value)
        return None if None in inner else (type(value), inner)
    if hasattr(value, "to_dict"):
        if id(value) not in memo:
            try:
                # Which implementations were chosen is no part of the dictionary.
                private = {k: v for k, v in vars(value).items() if k.startswith("_") and isinstance(v, _SCALARS)}
                memo[id(value)] = json.dumps([value.to_dict(), private], sort_keys=True, default=repr)
            except Exception:
                return None
        return memo[id(value)]
    return None
