"""A value that is computed when it is known what for. Not a Tensor subclass, which would break a compiled graph.

It passes through a model's own forward as a tensor would. Subclasses note the operations they know; any other makes
the tensor and runs on it, so that whatever a model does with it, it gets what it would have got.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Whose hooks put others on every tensor they meet, which would make it.
WRAPPERS = ("torch.distributed.", "deepspeed.", "accelerate.")


class Deferred:
    """What looks like a tensor. Subclasses set `shape`, `dtype` and `device`, and say how it is made."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    # What `isinstance(value, nn.Parameter)` asks a tensor for.
    _is_param = False

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """A tensor, to the code of a model that asks with `isinstance`; itself to torch, to wrappers, and here."""
        caller: Any = sys._getframe(1)
        if caller.f_globals.get("__name__") == "torch":
            # From `torch.is_tensor`.
            caller = caller.f_back
        name = caller.f_globals.get("__name__") or ""
        if name == "torch._functorch.utils":
            # An autograd function looks through its arguments, and would take this for a constant.
            raise RuntimeError(
                f"tigon: an autograd function, or a re-entrant checkpoint, got {type(self).__name__}, which stands for"
                " a tensor that is not computed yet, and would lose its gradient; unpatch the model and patch it with"
                " skip=['linear_cross_entropy'] and without fuse"
            )
        return type(self) if name.startswith(("torch.", "tigon.", *WRAPPERS)) else Tensor

    def materialise(self) -> Tensor:
        """The tensor, computed once."""
        raise NotImplementedError

    @classmethod
    def noted(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function of torch that need not have the tensor, NotImplemented for any other."""
        return NotImplemented

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = cls.noted(func, args, kwargs or {})
        return func(*real(args), **real(kwargs or {})) if result is NotImplemented else result

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling ask an object without state for their hooks.
        if name.startswith("__") or not self.__dict__:
            raise AttributeError(name)
        return getattr(self.materialise(), name)


def _forwarded(name: str) -> Callable[..., Any]:
    def call(self: Deferred, *args: Any) -> Any:
        return getattr(self.materialise(), name)(*real(args))

    call.__name__ = name
    return call


_BINARY = ("add", "sub", "mul", "truediv", "pow", "matmul", "floordiv", "mod", "and", "or", "xor")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_UNARY = ("neg", "pos", "abs", "invert", "bool", "int", "float", "iter", "contains", "getitem", "setitem")
_IN_PLACE = ("itruediv", "imul", "iadd", "isub", "ipow")
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_COMPARISONS, *_UNARY, *_IN_PLACE):
    setattr(Deferred, f"__{_name}__", _forwarded(f"__{_name}__"))
# __eq__ alone would make it unhashable, which a tensor is not.
Deferred.__hash__ = object.__hash__  # type: ignore[method-assign]


def real(value: Any) -> Any:
    """`value` with everything deferred in it computed."""
    if isinstance(value, Deferred):
        return value.materialise()
    if type(value) in (tuple, list):
        return type(value)(real(item) for item in value)
    if type(value) is dict:
        return {key: real(item) for key, item in value.items()}
    return value
