"""Checks an operator against its reference on the user's own machine: what the tests run, shipped.

Every run of the operator happens with poisoned allocations. The stages, in the order in which a failure
explains the next: forward and backward, each way among which the operator chooses by time, gradients of each subset of
inputs, strided inputs, an expanded upstream gradient, inputs left unchanged, the same bits twice, a second backward,
empty input, compiled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops import OPS, _choice
from ..specs import Case, Make, OpSpec
from .budget import NOISE, Measured, assert_within_budget
from .poison import poison

STAGES = (
    "budget",
    "ways",
    "subsets",
    "strided",
    "expanded_grad",
    "unchanged",
    "deterministic",
    "twice",
    "empty",
    "compiled",
)


# Up to 33 on an H200: dx of `group_norm`, one channel a group, bf16.
_NOISE_SLACK = 64.0


@dataclass(frozen=True)
class CheckResult:
    """Outcome of one stage of one case; `used` is the largest share of the error budget that it took."""

    op: str
    case: str
    dtype: str
    stage: str
    passed: bool
    used: float
    message: str = ""


@dataclass
class Run:
    """Outputs and gradients of one call, by name."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]

    def named(self) -> dict[str, Tensor]:
        return {**self.outputs, **{f"d{name}": grad for name, grad in self.gradients.items()}}


def flatten(result: Any) -> dict[str, Tensor]:
    """Tensors of an operator's result by name."""
    if isinstance(result, Tensor):
        return {"y": result}
    if hasattr(result, "_fields"):
        return {k: v for k, v in zip(result._fields, result, strict=True) if isinstance(v, Tensor)}
    return {f"y{i}": v for i, v in enumerate(result) if isinstance(v, Tensor)}


def call(
    function: Callable[..., Any],
    inputs: dict[str, Tensor | None],
    options: Any,
    wanted: Sequence[str],
    upstream: dict[str, Tensor] | None,
    *,
    retain_graph: bool = False,
) -> Run:
    """Run `function` and, where `upstream` has gradients of its outputs, the backward for the inputs `wanted`."""
    given = {
        k: v.detach().requires_grad_(k in wanted) if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in inputs.items()
    }
    outputs = flatten(function(**given, **options))
    gradients: dict[str, Tensor] = {}
    if wanted and upstream is not None:
        used = [k for k in outputs if outputs[k].requires_grad and k in upstream]
        leaves = [given[k] for k in wanted]
        grads = torch.autograd.grad(
            [outputs[k] for k in used],
            leaves,  # type: ignore[arg-type]
            [upstream[k].to(outputs[k].dtype) for k in used],
            retain_graph=retain_graph,
        )
        gradients = dict(zip(wanted, grads, strict=True))
        if retain_graph:
            again = torch.autograd.grad(
                [outputs[k] for k in used], leaves, [upstream[k].to(outputs[k].dtype) for k in used]
            )  # type: ignore[arg-type]
            gradients |= {f"{k} (second backward)": g for k, g in zip(wanted, again, strict=True)}
    return Run({k: v.detach() for k, v in outputs.items()}, gradients)


def _upstream(outputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    drawn = {}
    for name, y in outputs.items():
        if y.is_floating_point():
            # Rounded to the low dtype so that all three runs see the same gradient.
            drawn[name] = torch.randn(y.shape, generator=generator).to(dtype).to(y.device, y.dtype)
    return drawn


def _wide(inputs: dict[str, Tensor | None], dtype: torch.dtype) -> dict[str, Tensor | None]:
    return {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


def _strided(t: Tensor) -> Iterator[Tensor]:
    """The values of `t` in other layouts: every second column of a wider buffer, and axes stored in reverse."""
    other = 255 if t.dtype == torch.uint8 else 1e4
    wider = torch.full((*t.shape[:-1], 2 * t.shape[-1]), other, dtype=t.dtype, device=t.device)
    sliced = wider[..., ::2]
    sliced.copy_(t)
    yield sliced
    yield t.permute(*reversed(range(t.dim()))).contiguous().permute(*reversed(range(t.dim())))


class Checker:
    """One case of one operator in one dtype; the reference runs are made once and shared by the stages."""

    def __init__(
        self,
        spec: OpSpec,
        case: Case,
        device: str,
        dtype: torch.dtype,
        function: Callable[..., Any] | None = None,
    ) -> None:
        self.spec, self.case, self.dtype = spec, case, dtype
        self.op = function or OPS[spec.name].public
        self.reference = OPS[spec.name].reference
        self.inputs = spec.inputs(case, Make(case, device, dtype))
        self.wanted = spec.wanted(case, self.inputs)
        self.factor = spec.factor.get(case.name, 2.0)
        self.floor = spec.floor.get(case.name, 0.0)
        probe = call(self.reference, self.inputs, case.options, [], None)
        self.upstream = _upstream(probe.outputs, dtype)
        self.low = call(self.reference, self.inputs, case.options, self.wanted, self.upstream)
        self.high = self._high(self.upstream)

    def _high(self, upstream: dict[str, Tensor]) -> Run:
        wide = {k: v.to(self.case.exact) for k, v in upstream.items()}
        return call(self.reference, _wide(self.inputs, self.case.exact), self.case.options, self.wanted, wide)

    def _run(
        self,
        inputs: dict[str, Tensor | None] | None = None,
        wanted: Sequence[str] | None = None,
        upstream: dict[str, Tensor] | None = None,
        *,
        function: Callable[..., Any] | None = None,
        retain_graph: bool = False,
    ) -> Run:
        with poison():
            return call(
                function or self.op,
                inputs or self.inputs,
                self.case.options,
                self.wanted if wanted is None else wanted,
                self.upstream if upstream is None else upstream,
                retain_graph=retain_graph,
            )

    def _compare(
        self,
        run: Run,
        low: Run | None = None,
        high: Run | None = None,
        *,
        slack: float = 1.0,
        noise: dict[str, float] | None = None,
    ) -> float:
        low, high = (low or self.low).named(), (high or self.high).named()
        used = 0.0
        for name, actual in run.named().items():
            plain = name.removesuffix(" (second backward)")
            floor = self.floor + (noise or {}).get(name, 0.0)
            measured: Measured = assert_within_budget(
                name, actual, low[plain], high[plain], factor=slack * self.factor, floor=floor
            )
            used = max(used, measured.ratio)
        return used

    def budget(self) -> float:
        run = self._run()
        missing = set(self.high.named()) - set(run.named())
        if missing:
            raise AssertionError(f"missing {sorted(missing)}")
        return self._compare(run)

    def ways(self) -> float:
        """Each way among which the operator chose by time; none on a CPU."""
        _choice.offered.clear()
        self._run()
        used = 0.0
        for name in sorted(_choice.offered):
            with _choice.forced(name):
                used = max(used, self._compare(self._run()))
        return used

    def _proper_subsets(self) -> Iterator[tuple[str, ...]]:
        """Of the inputs that get a gradient: all subsets, or for more than three inputs, but in the first case, a part.

        Each alone and all but one show what one gradient owes to another, and are 2 n in place of 2^n.
        """
        number = len(self.wanted)
        few = number <= 3 or self.case is self.spec.cases[0]
        for size in range(1, number) if few else (1, number - 1):
            yield from itertools.combinations(self.wanted, size)

    def subsets(self) -> float:
        used = self._compare(self._run(wanted=()))
        for subset in self._proper_subsets():
            used = max(used, self._compare(self._run(wanted=subset)))
        with torch.no_grad():
            used = max(used, self._compare(Run(self._run(wanted=()).outputs, {})))
        return used

    def strided(self) -> float:
        used = 0.0
        for index in range(2):
            inputs = {
                k: list(_strided(v))[index] if isinstance(v, Tensor) and v.dim() >= 1 and v.numel() else v
                for k, v in self.inputs.items()
            }
            upstream = {k: list(_strided(v))[index] if v.dim() >= 1 else v for k, v in self.upstream.items()}
            run = self._run(inputs, upstream=upstream)
            try:
                used = max(used, self._compare(run))
            except AssertionError:
                # Sums over strided inputs may round in another order, in the reference too: either error is its own.
                low = call(self.reference, inputs, self.case.options, self.wanted, upstream)
                used = max(used, self._compare(run, low))
        return used

    def expanded_grad(self) -> float:
        upstream = {k: torch.ones((), dtype=v.dtype, device=v.device).expand(v.shape) for k, v in self.upstream.items()}
        run, dense = self._run(upstream=upstream), self._run(upstream={k: v.contiguous() for k, v in upstream.items()})
        named, expected = run.named(), dense.named()
        # The gradient of a plain sum is zero for a norm, and the reference's rounding noise a lottery. Strides change
        # nothing where the bits are those of a gradient with memory of its own; that leaves gross errors to look for.
        is_same = all(_same(named[name], expected[name]) for name in expected)
        low = call(self.reference, self.inputs, self.case.options, self.wanted, upstream)
        high = self._high(upstream)
        if not is_same:
            return self._compare(run, low, high)
        # Roundings of the terms that cancel, which are as large as an output or as a gradient that does not.
        largest = max((_largest(y) for y in self.high.outputs.values()), default=0.0)
        noise = {f"d{name}": NOISE * max(largest, _largest(grad)) for name, grad in self.high.gradients.items()}
        return self._compare(run, low, high, slack=_NOISE_SLACK, noise=noise)

    def unchanged(self) -> float:
        before = {k: v.clone() for k, v in self.inputs.items() if isinstance(v, Tensor)}
        upstream = {k: v.clone() for k, v in self.upstream.items()}
        self._run()
        for name, value in before.items():
            if not _same(self.inputs[name], value):
                raise AssertionError(f"input {name} was changed")
        for name, value in upstream.items():
            if not _same(self.upstream[name], value):
                raise AssertionError(f"upstream gradient of {name} was changed")
        return 0.0

    def deterministic(self) -> float:
        first, second = self._run().named(), self._run().named()
        for name in first:
            if not _same(first[name], second[name]):
                raise AssertionError(f"{name} differs between two runs")
        return 0.0

    def twice(self) -> float:
        return self._compare(self._run(retain_graph=True))

    def empty(self) -> float:
        case = self.spec.empty
        inputs = self.spec.inputs(case, Make(case, self.upstream_device, self.dtype))
        wanted = self.spec.wanted(case, inputs)
        expected = call(self.reference, inputs, case.options, [], None)
        upstream = {k: torch.ones_like(v) for k, v in expected.outputs.items() if v.is_floating_point()}
        with poison():
            run = call(self.op, inputs, case.options, wanted, upstream)
        for name, value in expected.outputs.items():
            if not _same(run.outputs[name], value):
                raise AssertionError(f"{name} of an empty input is {run.outputs[name]}, reference {value}")
        for name, grad in run.gradients.items():
            if grad.shape != inputs[name].shape or bool((grad != 0).any()):  # type: ignore[union-attr]
                raise AssertionError(f"d{name} of an empty input is not zero")
        return 0.0

    @property
    def upstream_device(self) -> torch.device:
        return next(v.device for v in self.inputs.values() if isinstance(v, Tensor))

    def compiled(self) -> float:
        torch._dynamo.reset()
        # Of an operator's own graph inductor makes little; what tracing gets wrong the faster one shows too.
        is_first = self.case is self.spec.cases[0]
        backend = "inductor" if is_first and self.upstream_device.type != "cpu" else "aot_eager"
        compiled = torch.compile(self.op, fullgraph=True, backend=backend)
        return self._compare(call(compiled, self.inputs, self.case.options, self.wanted, self.upstream))


def _largest(t: Tensor) -> float:
    """The largest magnitude that is finite."""
    return float(torch.nan_to_num(t, nan=0.0, posinf=0.0, neginf=0.0).abs().max()) if t.numel() else 0.0


def _same(a: Any, b: Tensor) -> bool:
    return (
        torch.equal(torch.nan_to_num(a, nan=1e30), torch.nan_to_num(b, nan=1e30)) if a.numel() else a.shape == b.shape
    )


def check_case(
    spec: OpSpec,
    case: Case,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    stages: Sequence[str] = STAGES,
    function: Callable[..., Any] | None = None,
) -> list[CheckResult]:
    """Run `stages` of one case; exceptions become failed results.

    Args:
        function: checked in place of the operator, with its signature.
    """
    short = str(dtype).removeprefix("torch.")
    results = []
    try:
        checker = Checker(spec, case, device, dtype, function)
    except Exception as error:
        return [CheckResult(spec.name, case.name, short, "reference", False, float("inf"), _one_line(error))]
    for stage in stages:
        try:
            used = getattr(checker, stage)()
            results.append(CheckResult(spec.name, case.name, short, stage, used <= 1, used))
        except Exception as error:
            results.append(CheckResult(spec.name, case.name, short, stage, False, float("inf"), _one_line(error)))
    return results


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n\n")[0].replace("\n", " ")[:500]


def cases_for(spec: OpSpec, device: str, dtype: torch.dtype) -> list[Case]:
    """Cases of `spec` that run on `device` in `dtype`."""
    return [
        case
        for case in spec.cases
        if (case.dtypes is None or dtype in case.dtypes) and (device != "cpu" or not case.models_only)
    ]


def check_op(
    spec: OpSpec, *, device: str = "cpu", dtype: torch.dtype = torch.float32, stages: Sequence[str] = STAGES
) -> Iterator[CheckResult]:
    """Check every case of `spec` on `device` in `dtype`, yielding results as they come.

    `models_only` cases run the stages that large inputs can change: budget and determinism. Compiling takes
    seconds, so the first case stands for the others; on an accelerator only for those with the same options.
    """
    compiled: list[set[str]] = []
    for case in cases_for(spec, device, dtype):
        is_new = not compiled or (device.startswith("cuda") and set(case.options) not in compiled)
        compiled += [set(case.options)] if is_new and not case.models_only else []
        chosen = [s for s in stages if s != "compiled" or is_new]
        if case.models_only:
            chosen = [s for s in chosen if s in ("budget", "deterministic")]
        yield from check_case(spec, case, device=device, dtype=dtype, stages=chosen)
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
