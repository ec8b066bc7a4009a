"""Patch every model of a class as soon as it is built, for code that builds its model out of reach."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from ._apply import lock, patch
from ._head import checked_loss_options
from ._norm_mlp import checked_mlp
from .report import Report

# By class, what is asked of it, oldest first.
_asked: dict[type, list[PatchOnBuild]] = {}


class PatchOnBuild:
    """What `patch_on_build` returns. `remove()` ends it, as does the end of a `with` block.

    `report` is the `Report` of the last model that was built, None before the first.
    """

    def __init__(self, cls: type[nn.Module], options: dict[str, Any]) -> None:
        self.cls, self.options = cls, options
        self.report: Report | None = None

    def start(self) -> PatchOnBuild:
        with lock:
            _asked.setdefault(self.cls, []).append(self)
            init = self.cls.__dict__.get("__init__")
            if getattr(init, "__tigon__", None) is not init or init is None:
                patching = _patching(self.cls, self.cls.__init__, inherited=init is None)
                self.cls.__init__ = patching  # type: ignore[method-assign]
        return self

    def built(self, model: nn.Module) -> None:
        """What is done with a model when its `__init__` has finished."""
        self.report = patch(model, **self.options)

    def remove(self) -> None:
        """Let models of the class be built as before. Models that were built stay patched."""
        with lock:
            asked = _asked.get(self.cls, [])
            if self not in asked:
                return
            asked.remove(self)
            if asked:
                return
            del _asked[self.cls]
            init = self.cls.__dict__.get("__init__")
            if getattr(init, "__tigon__", None) is not init:
                # Something is around it by now; with nothing asked it only calls the native one.
                return
            if init.__tigon_inherited__:
                del self.cls.__init__
            else:
                self.cls.__init__ = init.__wrapped__  # type: ignore[method-assign]

    def __enter__(self) -> PatchOnBuild:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def patch_on_build(
    cls: type[nn.Module],
    *,
    only: Iterable[str] | None = None,
    skip: Iterable[str] | None = None,
    fuse: Iterable[str] = (),
    strict: bool = False,
    loss_options: Mapping[str, Any] | None = None,
    mlp: str | None = None,
) -> PatchOnBuild:
    """Patch every model of a class when its `__init__` has finished, whoever builds it.

    That is before `from_pretrained` loads weights, ties them or moves them, all of which patched models allow.
    Only models whose class is `cls` itself are patched: a subclass is another class and is asked for by itself,
    also when it has no `__init__` of its own. Models that exist already, copies and unpickled models are not built,
    so they stay as they are.

    Args:
        cls: a module class.
        only, skip, fuse, strict, loss_options, mlp: as in `patch`; with `strict`, and where the loss or an MLP is not
            fused, it is the constructor that raises.

    Returns:
        A handle with `remove()`, which can also be used in a `with` statement. Asked twice, a model is patched once,
        for what either asks; each handle ends its own part.

    Raises:
        ValueError: `cls` is no module class, or `loss_options` or `mlp` is something else than `patch` takes.
    """
    if not isinstance(cls, type) or not issubclass(cls, nn.Module):
        raise ValueError(f"patch_on_build: cls: expected a class of torch.nn.Module, got {cls!r}")
    only, skip, fuse = (
        None if names is None else [names] if isinstance(names, str) else list(names) for names in (only, skip, fuse)
    )
    loss_options, mlp = checked_loss_options("patch_on_build", loss_options), checked_mlp("patch_on_build", mlp)
    options = {"only": only, "skip": skip, "fuse": fuse, "strict": strict, "loss_options": loss_options, "mlp": mlp}
    return PatchOnBuild(cls, options).start()


def _patching(cls: type[nn.Module], native: Callable[..., None], inherited: bool) -> Callable[..., None]:
    @functools.wraps(native)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        native(self, *args, **kwargs)
        # Not within the constructor of a subclass, which has not finished.
        if type(self) is cls:
            for handle in tuple(_asked.get(cls, ())):
                handle.built(self)

    __init__.__tigon__ = __init__  # type: ignore[attr-defined]
    __init__.__tigon_inherited__ = inherited  # type: ignore[attr-defined]
    return __init__
