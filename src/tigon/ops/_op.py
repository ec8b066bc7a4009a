"""How an operator is registered and how its backend is chosen: all torch plumbing of the package.

An operator is a public function with a plain-torch `reference` of the same signature and a `supports`
function that returns the reasons why its kernels cannot take a call. The choice is made in Python, on
shapes, dtypes and devices, never on data, so that a compiler sees one branch only.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix
from ._device import constant_while_compiling, why_no_kernels
from ._triton import INTERPRETED

logger = logging.getLogger("tigon")
F = TypeVar("F", bound=Callable[..., Any])

BACKENDS = ("auto", "triton", "torch")
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
# By name: torch 2.11 cannot trace the function that tells.
_AUTOCAST_DEVICES = ("cuda", "cpu", "xpu")
# Stand-ins of plain tensors while a call is traced; by name, since importing them is slow.
_TRACED = ("FakeTensor", "FunctionalTensor")


def _checked_backend(name: str, source: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source}: expected one of {', '.join(BACKENDS)}, got {name!r}")
    return name


# A module global, not a context variable or thread local: the compiler guards on it (see DESIGN.md).
_backend = _checked_backend(os.environ.get("TIGON_BACKEND", "auto"), "TIGON_BACKEND")
DEBUG = any(os.environ.get(name, "0") not in ("", "0") for name in ("TIGON_DEBUG", "LIGER_KERNEL_DEBUG"))
_logged: set[str] = set()


@dataclass(frozen=True)
class Op:
    """One operator: its name, the public function, the reference, and what its kernels refuse."""

    name: str
    public: Callable[..., Any]
    reference: Callable[..., Any]
    supports: Callable[..., list[str]]


OPS: dict[str, Op] = {}


def op(*, reference: Callable[..., Any], supports: Callable[..., list[str]]) -> Callable[[F], F]:
    """Register the decorated public function as an operator; the function itself is returned unchanged."""

    def register(public: F) -> F:
        OPS[public.__name__] = Op(public.__name__, public, reference, supports)
        return public

    return register


def is_traced(t: Tensor | None) -> bool:
    """True while a compiler records the call, and for the stand-ins that it records with."""
    return torch.compiler.is_compiling() or type(t) not in _PLAIN_TENSORS


# Calls whose arguments were checked and go to kernels. Sizes that never come again must not pile up.
_accepted: set[tuple[Any, ...]] = set()
_MAX_ACCEPTED = 4096


def call_key(name: str, tensors: tuple[Tensor | None, ...], *options: Any) -> tuple[Any, ...] | None:
    """What the checks of a call and the choice of its backend depend on, where they look at nothing else.

    Not at the values of tensors, nor at whether gradients are wanted; such checks stay outside. None where nothing may
    be remembered: while a compiler traces, and for tensor subclasses.
    """
    if torch.compiler.is_compiling():
        return None
    key = [name, _backend, options]
    for t in tensors:
        if t is None:
            key.append(None)
        elif type(t) in _PLAIN_TENSORS:
            key += (t.shape, t.dtype, t.device)
        else:
            return None
    return tuple(key)


def is_accepted(key: tuple[Any, ...] | None) -> bool:
    """Whether a call with this key passed all checks before and went to kernels, as this one then does."""
    try:
        return key is not None and key in _accepted
    except TypeError:
        # An option that cannot be hashed: its check says what is wrong with it.
        return False


def accept(key: tuple[Any, ...] | None, first: Tensor) -> None:
    """The call of this key, with the tensor `first`, passed all checks and goes to kernels."""
    # Elsewhere kernels are never run; tests pretend that they were.
    if key is not None and (first.device.type in ("cuda", "xpu") or INTERPRETED):
        if len(_accepted) >= _MAX_ACCEPTED:
            _accepted.clear()
        _accepted.add(key)


# torch 2.13 cannot trace two calls of one operator with a float that it takes for dynamic, as dynamic=True makes it.
_FIXES_FLOATS = tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2]) >= (2, 13)


def _fixed(value: Any) -> Any:
    """`value` with its floats, an eps or a factor, as constants of the graph that a compiler makes."""
    if isinstance(value, float):
        return torch.fx.experimental.symbolic_shapes.guard_scalar(value)
    return tuple(_fixed(v) for v in value) if isinstance(value, tuple) else value


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, in eager without its search for tensors that a finished `torch.func` left behind."""
    if torch.compiler.is_compiling():
        return function.apply(*[_fixed(a) for a in args]) if _FIXES_FLOATS else function.apply(*args)
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def as_output(y: Tensor, like: Tensor) -> Tensor:
    """`y` with the leading axes of `like`, for an `autograd.Function` to return.

    Into a view of a temporary, which torch's products of more than two axes may be, autograd lets nobody write.
    """
    return torch.ops.aten._unsafe_view.default(y, [*like.shape[:-1], y.shape[-1]])


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype that `F.linear` casts to on a device of this type, None where it casts nothing."""
    if device not in _AUTOCAST_DEVICES or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def define(schema: str, *, fake: Callable[..., Any]) -> Callable[[F], F]:
    """Register a launcher as `torch.ops.tigon.<name>`; the callable returned skips the dispatcher in eager.

    The registered operator is called while compiling and for tensor subclasses (fake, functional), where the
    dispatcher is what makes tracing work; plain tensors go straight to the launcher, which is cheaper.
    """
    name, signature = schema.split("(", 1)
    qualified = add_op_namespace_prefix(name.strip())
    torch.library.define(qualified, f"({signature}", tags=(torch.Tag.pt2_compliant_tag,))

    def decorate(launcher: F) -> F:
        torch.library.impl(qualified, ("CPU", "CUDA", "XPU"))(launcher)
        torch.library.register_fake(qualified)(fake)
        namespace, short = qualified.split("::")
        registered = getattr(getattr(torch.ops, namespace), short).default

        def call(first: Tensor, *rest: Any) -> Any:
            if is_traced(first):
                return registered(first, *rest)
            return launcher(first, *rest)

        call.__name__ = call.__qualname__ = name.strip()
        call.__doc__ = launcher.__doc__
        return call  # type: ignore[return-value]

    return decorate


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Choose how operators run inside the block: "auto", "triton" (raise rather than fall back) or "torch".

    The choice is process-wide, as is `TIGON_BACKEND`, which sets it at import.

    Raises:
        ValueError: `name` is none of the three.
    """
    global _backend
    previous, _backend = _backend, _checked_backend(name, "backend")
    try:
        yield
    finally:
        _backend = previous


def current_backend() -> str:
    """The backend in force: "auto", "triton" or "torch"."""
    return _backend


def once_differentiable(backward: F) -> F:
    """For the backward of an `autograd.Function` whose gradients have no gradient themselves: raises when asked.

    torch's decorator of this name notices only upstream gradients that need a gradient, so `create_graph=True`
    on a plain sum would silently lose the second derivative.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *upstream: Tensor | None) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "tigon's fused operators have no second derivative (create_graph=True); call the plain reference, "
                "for example tigon.ops.rms_norm_reference, to get one"
            )
        device = "cpu"
        for t in upstream:
            if t is not None:
                device = t.device.type
                break
        if torch.compiler.is_compiling() or autocast_dtype(device) is None:
            return backward(ctx, *upstream)
        # The dtypes were chosen in forward; a backward called inside autocast must not choose again.
        with torch.autocast(device, enabled=False):
            return backward(ctx, *upstream)

    return checked  # type: ignore[return-value]


def _find(public: Callable[..., Any] | str) -> Op:
    name = public if isinstance(public, str) else getattr(public, "__name__", repr(public))
    if name not in OPS:
        raise ValueError(f"why_not: op: expected one of {', '.join(OPS)}, got {name!r}")
    return OPS[name]


def _first_tensor(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    raise ValueError("why_not: expected at least one tensor argument, got none")


def why_not(public: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> list[str]:
    """Reasons why `public(*args, **kwargs)` would not run on its Triton kernels; empty when it would.

    Example: `tigon.why_not(tigon.rms_norm, x, weight)`.
    """
    record = _find(public)
    if _backend == "torch":
        return ["the backend is set to torch"]
    return _reasons(record, _first_tensor(args, kwargs), args, kwargs)


def _reasons(record: Op, first: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and type(value) not in _PLAIN_TENSORS and type(value).__name__ not in _TRACED:
            return [f"a {type(value).__name__} is not a plain tensor"]
    return why_no_kernels(first.device, first.dtype) or record.supports(*args, **kwargs)


def runs_reference(name: str, *args: Any, **kwargs: Any) -> bool:
    """True when the call belongs to the reference; raises when kernels are forced and cannot take it."""
    if _backend == "torch":
        return True
    first: Tensor = args[0]
    reasons = _reasons(OPS[name], first, args, kwargs)
    if not reasons:
        return False
    if _backend == "triton":
        raise ValueError(f"{name}: backend 'triton' is forced but cannot run: {'; '.join(reasons)}")
    if DEBUG or first.device.type != "cpu":
        _log_fallback(name, "; ".join(reasons))
    return True


@constant_while_compiling
def _log_fallback(name: str, reasons: str) -> None:
    message = f"{name} runs on plain torch: {reasons}"
    if message not in _logged:
        _logged.add(message)
        logger.log(logging.WARNING if DEBUG else logging.INFO, message)
