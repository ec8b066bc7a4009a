"""What tests of single operators share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import tigon


class Launched(NamedTuple):
    """One launch of a kernel."""

    name: str
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]


@pytest.fixture
def on_device(device: torch.device) -> Iterator[None]:
    """Tensors are made on the device under test."""
    if device.type == "cpu":
        yield
        return
    with device:
        yield


@pytest.fixture(params=["auto", "torch"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernels where they run, then plain torch."""
    with tigon.backend(request.param):
        yield request.param


@pytest.fixture
def launches(request: pytest.FixtureRequest) -> Iterator[list[Launched]]:
    """What the operator file that the test file calls `module` launches."""
    made: list[Launched] = []
    module = request.module.module
    launch = module.launch

    def spy(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        made.append(Launched(kernel.__name__, grid, args, constants))
        launch(kernel, grid, *args, **constants)

    with mock.patch.object(module, "launch", spy):
        yield made


class ProductSpy(TorchDispatchMode):
    """Counts matrix products and remembers the shape and size of every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.made: list[tuple[tuple[int, ...], int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        seen = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for t in pytree.tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in seen:
                self.made.append((tuple(t.shape), t.numel() * t.itemsize))
        return out
