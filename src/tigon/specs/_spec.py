"""What a specification says of an operator: cases, inputs, cost, mutations. Read by tests, check, bench, docs."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One call: named sizes, and the keyword options of the public function.

    `models_only` cases have the sizes of real models: they run on accelerators and are what is benchmarked.
    `dtypes` limits a case to the dtypes named, with the reason in `note`. `frozen` inputs get no gradient: a teacher's.
    `exact` is the dtype of what errors are measured against: fp32 for 16-bit cases whose fp64 would not fit a GPU.
    """

    name: str
    sizes: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    models_only: bool = False
    dtypes: tuple[torch.dtype, ...] | None = None
    note: str = ""
    frozen: tuple[str, ...] = ()
    exact: torch.dtype = torch.float64

    def __getattr__(self, name: str) -> int:
        sizes = object.__getattribute__(self, "sizes")
        if name in sizes:
            return sizes[name]
        raise AttributeError(name)


@dataclass(frozen=True)
class Cost:
    """Bytes that must cross device memory once, and floating-point operations of matrix products."""

    forward_bytes: int
    backward_bytes: int
    forward_flops: int = 0
    backward_flops: int = 0


class Make:
    """Draws the inputs of a case: seeded by its name, on one device, `dtype` unless told otherwise."""

    def __init__(self, case: Case, device: torch.device | str, dtype: torch.dtype) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self.meta = self.device.type == "meta"
        # Drawn on the CPU for small cases so that every device sees the same numbers.
        self.draw_on = torch.device("cpu") if not case.models_only or self.meta else self.device
        self.generator = torch.Generator(self.draw_on).manual_seed(zlib.crc32(case.name.encode()))

    def randn(self, *shape: int, scale: float = 1.0, mean: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normal values; drawn in fp32, rounded once."""
        if self.meta:
            return torch.empty(shape, dtype=dtype or self.dtype, device="meta")
        drawn = torch.randn(shape, generator=self.generator, device=self.draw_on) * scale + mean
        return drawn.to(self.device, dtype or self.dtype)

    def rows(self, *shape: int, spread: float = 2.0) -> Tensor:
        """Normal values whose rows (last axis) differ in scale by up to 10^(2 * spread)."""
        if self.meta:
            return self.randn(*shape)
        scale = torch.rand(*shape[:-1], 1, generator=self.generator, device=self.draw_on) * 2 - 1
        drawn = torch.randn(shape, generator=self.generator, device=self.draw_on)
        return (drawn * 10.0 ** (spread * scale)).to(self.device, self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Whole numbers in [low, high), int64."""
        if self.meta:
            return torch.empty(shape, dtype=torch.int64, device="meta")
        return torch.randint(low, max(high, low + 1), shape, generator=self.generator, device=self.draw_on).to(
            self.device
        )

    def mask(self, probability: float, *shape: int) -> Tensor:
        """True with `probability`."""
        if self.meta:
            return torch.empty(shape, dtype=torch.bool, device="meta")
        return (torch.rand(shape, generator=self.generator, device=self.draw_on) < probability).to(self.device)


@dataclass(frozen=True)
class Mutation:
    """A wrong implementation with the signature of the operator; the budget must catch it in some case."""

    name: str
    function: Callable[..., Any]


@dataclass(frozen=True)
class OpSpec:
    """One operator.

    Attributes:
        name: of the operator in `tigon.ops.OPS`.
        cases: small ones for every device, `models_only` ones for accelerators and benchmarks.
        inputs: builds the tensor arguments of a case by name.
        differentiable: names of the inputs that get a gradient.
        empty: a case without elements.
        cost: of one case at an item size in bytes.
        mutations: at least three.
        floor: absolute error that a case by name may have where its results cancel to rounding noise, each with a
            comment that says why.
        factor: budget factor for a case by name where 2 is not right, each with a comment that says why.
        compile_cases: names of cases whose kernels are compiled for every target; all `models_only` ones if empty.
    """

    name: str
    cases: tuple[Case, ...]
    inputs: Callable[[Case, Make], dict[str, Tensor | None]]
    differentiable: tuple[str, ...]
    empty: Case
    cost: Callable[[Case, int], Cost]
    mutations: tuple[Mutation, ...]
    factor: Mapping[str, float] = field(default_factory=dict)
    floor: Mapping[str, float] = field(default_factory=dict)
    compile_cases: tuple[str, ...] = ()

    def wanted(self, case: Case, inputs: Mapping[str, Tensor | None]) -> list[str]:
        """Names of the `inputs` that get a gradient in this case."""
        return [k for k in self.differentiable if inputs.get(k) is not None and k not in case.frozen]

    def case(self, name: str) -> Case:
        """The case called `name`.

        Raises:
            ValueError: there is none.
        """
        for case in self.cases:
            if case.name == name:
                return case
        raise ValueError(f"{self.name}: case: expected one of {[c.name for c in self.cases]}, got {name!r}")
