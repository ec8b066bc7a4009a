"""What tests of single operators share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

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
