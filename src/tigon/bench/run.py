"""Measures an operator beside its peers on a CUDA device: correctness first, then time and memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import __version__
from ..ops import OPS, dequantize_nf4
from ..specs import Case, OpSpec
from ..testing.budget import measure
from ..testing.check import Checker, Run, call, flatten
from .peers import Peer
from .store import Row, environment, version_of
from .timing import Timing, capture, copy_gbps, device_times, graph_times, host_times, peak_mib

MODES = ("forward", "backward", "both")
OURS = "tigon"
# Absent tensors that every implementation has a parameter for; other absent ones are left out of the call.
_POSITIONAL = ("weight", "up", "k", "norm_weight", "up_weight")
PRODUCTS = "matrix_products"
_HOW = ("main_grad", "max_logits_bytes", "max_rows", "memory", "recompute", "skip_ignored")
# A graph holds so many calls that their inputs are several times the cache, and takes no more memory than this.
_REPLICA_BYTES, _MAX_GRAPH_BYTES, _MAX_REPLICAS = 512 * 2**20, 24 * 2**30, 12


class Contestant:
    """One implementation on one case, able to prepare each mode afresh."""

    def __init__(self, function: Callable[..., Any], checker: Checker) -> None:
        self.function, self.checker = function, checker
        # Kept apart so that an implementation which writes into its inputs cannot spoil the next launch.
        self.master = {k: v for k, v in checker.inputs.items() if v is not None or k in _POSITIONAL}
        self.inputs: dict[str, Tensor | None] = {}

    @property
    def input_bytes(self) -> int:
        return sum(v.numel() * v.element_size() for v in self.master.values() if isinstance(v, Tensor))

    def _fresh(self) -> None:
        if not self.inputs:
            wanted = self.checker.wanted
            self.inputs = {
                k: v.detach().clone().requires_grad_(k in wanted) if isinstance(v, Tensor) else v
                for k, v in self.master.items()
            }
            return
        with torch.no_grad():
            for name, value in self.inputs.items():
                if isinstance(value, Tensor):
                    value.detach().copy_(self.master[name])

    def _upstream(self, outputs: list[Tensor]) -> list[Tensor]:
        drawn = list(self.checker.upstream.values())
        return [g.to(y.dtype).reshape(y.shape).clone() for g, y in zip(drawn, outputs, strict=False)]

    def _outputs(self) -> list[Tensor]:
        made = flatten(self.function(**self.inputs, **self.checker.case.options))
        return [y for y in made.values() if y.requires_grad]

    def prepare(self, mode: str, *, retain_graph: bool = False) -> Callable[[], Any]:
        self._fresh()
        leaves = [self.inputs[k] for k in self.checker.wanted]
        if mode == "forward":
            return self._outputs
        outputs = self._outputs()
        upstream = self._upstream(outputs)
        if mode == "backward":
            return lambda: torch.autograd.grad(outputs, leaves, upstream, retain_graph=retain_graph)  # type: ignore[arg-type]
        return lambda: torch.autograd.grad(self._outputs(), leaves, upstream)  # type: ignore[arg-type]

    def prepare_as_layer(self) -> Callable[[], Any]:
        """Forward and backward as inside a model: what another layer made is held by the graph alone.

        Weights are leaves, which stay; so do the sources of the rest.
        """
        self._fresh()
        upstream = self._upstream(self._outputs())
        self._fresh()
        leaves = [self.inputs[k] for k in self.checker.wanted]
        given = {
            k: v.clone() if k in self.checker.wanted and not k.endswith(("weight", "bias")) else v  # type: ignore[union-attr]
            for k, v in self.inputs.items()
        }

        def call() -> Any:
            made = flatten(self.function(**given, **self.checker.case.options))
            given.clear()
            outputs = [made.pop(k) for k in list(made) if made[k].requires_grad]
            return torch.autograd.grad(outputs, leaves, upstream)  # type: ignore[arg-type]

        return call

    def budget_used(self) -> float:
        """Error as a share of the budget; dtype differences of the output are forgiven a peer."""
        checker = self.checker
        given = {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.master.items()}
        upstream = {k: v.clone() for k, v in checker.upstream.items()}
        run = call(
            _renamed(self.function, list(checker.low.outputs)), given, checker.case.options, checker.wanted, upstream
        )
        used = 0.0
        low, high = checker.low.named(), checker.high.named()
        for name, actual in Run(run.outputs, run.gradients).named().items():
            used = max(
                used,
                measure(
                    actual.to(low[name].dtype), low[name], high[name], factor=checker.factor, floor=checker.floor
                ).ratio,
            )
        return used


def _renamed(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """`function` with its outputs under the names that the operator gives them."""

    def renamed(**kwargs: Any) -> Any:
        made = list(flatten(function(**kwargs)).values())
        return made[0] if names == ["y"] else _Named(dict(zip(names, made, strict=False)))

    return renamed


class _Named(tuple):
    _fields: tuple[str, ...]

    def __new__(cls, tensors: dict[str, Tensor]) -> _Named:
        made = super().__new__(cls, tensors.values())
        made._fields = tuple(tensors)
        return made


def _products(shape: torch.Size) -> Callable[..., Any]:
    """The matrix products of a projection onto classes and nothing else: its floor, measured in the same run."""

    class Products(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
            logits = F.linear(hidden, weight)
            ctx.gradients = logits @ weight, logits.T @ hidden
            return logits.new_zeros(shape, dtype=torch.float32)

        @staticmethod
        def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor]:
            return ctx.gradients

    made: list[Tensor] = []

    def products(**given: Any) -> Tensor:
        if "packed" in given:
            # Before the first measurement, of the numbers that the operator multiplies with.
            if not made:
                size = given["lora_b"].shape[0], given["lora_a"].shape[1]
                names = "packed", "absmax", "block_size", "nested_absmax", "nested_code", "nested_offset"
                named = {name: given[name] for name in (*names, "nested_block_size") if name in given}
                made.append(dequantize_nf4(**named, shape=size, dtype=given["x"].dtype))
            given = {**given, "weight": made[0]}
        if "gate_weight" in given:
            names = "x", "norm_weight", "gate_weight", "up_weight", "down_weight"
            return _MlpProducts.apply(*(given.get(name) for name in names))
        if "lora_a" in given:
            return _LoraProducts.apply(*(given[name] for name in ("x", "weight", "lora_a", "lora_b")))
        if "teacher_hidden" in given:
            names = "student_hidden", "student_weight", "teacher_hidden", "teacher_weight"
            return _DivergenceProducts.apply(shape, *(given[name] for name in names))
        if "gate" in given:
            return _LayerProducts.apply(given["gate"], given["up"], given["weight"])
        return Products.apply(given["hidden"], given["weight"])

    return products


class _LoraProducts(torch.autograd.Function):
    """The matrix products of a linear layer with a frozen weight and its adapter, summed without another pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, lora_a: Tensor, lora_b: Tensor) -> Tensor:
        low = x @ lora_a.T
        ctx.save_for_backward(x, weight, lora_a, lora_b, low)
        return F.linear(x, weight).addmm_(low, lora_b.T)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, lora_a, lora_b, low = ctx.saved_tensors
        dlow = dy @ lora_b
        return (dy @ weight).addmm_(dlow, lora_a), None, dlow.T @ x, dy.T @ low


class _DivergenceProducts(torch.autograd.Function):
    """The matrix products of a student's and a teacher's head, and of the gradients of the student's."""

    @staticmethod
    def forward(
        ctx: Any, shape: torch.Size, hidden: Tensor, weight: Tensor, other: Tensor, other_weight: Tensor
    ) -> Any:
        # For its time alone.
        F.linear(other, other_weight)
        logits = F.linear(hidden, weight)
        ctx.gradients = logits @ weight, logits.T @ hidden
        return logits.new_zeros(shape, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradients, None, None


class _LayerProducts(torch.autograd.Function):
    """The matrix products of a down projection and nothing else, of half of a packed `gate`."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, weight: Tensor) -> Tensor:
        ctx.shapes = gate.shape, None if up is None else up.shape
        ctx.save_for_backward(gate[..., : weight.shape[1]], weight)
        return F.linear(gate[..., : weight.shape[1]], weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        dhidden, dweight = dy @ weight, dy.T @ hidden
        # Of gradients that are no products, a number that takes no time.
        dgate, dup = (None if shape is None else dhidden[0, 0].expand(shape) for shape in ctx.shapes)
        return dgate, dup, dweight


class _MlpProducts(torch.autograd.Function):
    """The matrix products of a gated MLP and nothing else: with gate for the product, and gate and up for gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor | None,
        gate_weight: Tensor,
        up_weight: Tensor | None,
        down_weight: Tensor | None,
    ) -> Tensor:
        weights = [w for w in (gate_weight, up_weight) if w is not None]
        halves = [F.linear(x, w) for w in weights]
        product = halves[0] if up_weight is not None else halves[0][:, : gate_weight.shape[0] // 2]
        ctx.is_scaled = norm_weight is not None
        ctx.save_for_backward(x, product, down_weight, *halves, *weights)
        if down_weight is not None:
            return F.linear(product, down_weight)
        return product if up_weight is not None else product.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, product, down_weight, *rest = ctx.saved_tensors
        halves, weights = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        ddown_weight = dx = None
        if down_weight is not None:
            ddown_weight = dy.T @ product
            # What would be the gradient of the product, for its time alone.
            torch.mm(dy, down_weight)
        dweights = []
        for half, weight in zip(halves, weights, strict=True):
            dweights.append(half.T @ x)
            dx = half @ weight if dx is None else dx.addmm_(half, weight)
        # A gradient that is no product is a number that takes no time.
        dnorm_weight = dx[0, 0].expand(x.shape[-1]) if ctx.is_scaled else None  # type: ignore[index]
        return dx, dnorm_weight, *dweights, *[None] * (2 - len(dweights)), ddown_weight


def _without_ours(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` without the options that change how tigon computes and not what."""
    return lambda **given: function(**{k: v for k, v in given.items() if k not in _HOW})


def contestants(spec: OpSpec, peers: list[Peer]) -> dict[str, tuple[Callable[..., Any], str]]:
    """Functions and versions by implementation name, ours first."""
    found: dict[str, tuple[Callable[..., Any], str]] = {OURS: (OPS[spec.name].public, __version__)}
    for peer in peers:
        if spec.name in peer.provides:
            found[peer.name] = (_without_ours(peer.provides[spec.name]), version_of(peer.distribution))
    return found


def measure_case(
    spec: OpSpec,
    case: Case,
    peers: list[Peer],
    *,
    dtype: torch.dtype = torch.bfloat16,
    modes: tuple[str, ...] = MODES,
    roof_gbps: float,
    command: str,
    rounds: int = 25,
    say: Callable[[str], None] = print,
) -> Iterator[Row]:
    """Rows of one case: every implementation in every mode, ours only if it keeps its error budget."""
    checker = Checker(spec, case, "cuda", dtype)
    ready: dict[str, Contestant] = {}
    used: dict[str, float] = {}
    versions: dict[str, str] = {}
    for name, (function, version) in contestants(spec, peers).items():
        contestant = Contestant(function, checker)
        try:
            used[name] = contestant.budget_used()
        except Exception as error:
            say(f"{spec.name}[{case.name}] {name}: not measured: {type(error).__name__}: {str(error)[:200]}")
            continue
        if name == OURS and used[name] > 1:
            say(f"{spec.name}[{case.name}] {name}: not measured: {used[name]:.2f} of its error budget")
            continue
        ready[name], versions[name] = contestant, version
    del checker.low, checker.high
    if spec.cost(case, dtype.itemsize).forward_flops:
        ready[PRODUCTS], versions[PRODUCTS], used[PRODUCTS] = (
            Contestant(_products(next(iter(checker.upstream.values())).shape), checker),
            torch.__version__,
            0.0,
        )
    gc.collect()
    torch.cuda.empty_cache()
    peaks = {name: peak_mib(lambda c=c: c.prepare_as_layer()) for name, c in ready.items()}
    cost = spec.cost(case, dtype.itemsize)
    # A capture that fails can leave its memory behind, so what waits for the device is not tried.
    synchronising = {peer.name for peer in peers if spec.name in peer.synchronises}
    for mode in modes:
        prepare: Mapping[str, Any] = {name: (lambda c=c, m=mode: c.prepare(m)) for name, c in ready.items()}
        device = device_times(prepare, rounds=rounds)
        host = host_times(prepare, rounds=rounds)
        capturable = {name: c for name, c in ready.items() if name not in synchronising}
        graphs = _graphs(capturable, mode, max(peaks[name] for name in capturable), rounds, say)
        gc.collect()
        torch.cuda.empty_cache()
        moved = {"forward": cost.forward_bytes, "backward": cost.backward_bytes}.get(
            mode, cost.forward_bytes + cost.backward_bytes
        )
        for name, timing in device.items():
            gbps = 0.0 if cost.forward_flops else moved / timing.median_ms * 1e-6
            roof = _percent(timing, device.get(PRODUCTS), gbps, roof_gbps, mode)
            graph = graphs.get(name)
            graph_roof = 0.0
            if graph is not None:
                graph_gbps = gbps * timing.median_ms / graph.median_ms
                graph_roof = _percent(graph, graphs.get(PRODUCTS), graph_gbps, roof_gbps, mode)
            yield Row(
                op=spec.name,
                case=case.name,
                sizes=dict(case.sizes),
                dtype=str(dtype).removeprefix("torch."),
                implementation=name,
                version=versions[name],
                mode=mode,
                device_ms=round(timing.median_ms, 4),
                low_ms=round(timing.low_ms, 4),
                high_ms=round(timing.high_ms, 4),
                host_ms=round(host[name].median_ms, 4),
                peak_mib=round(peaks[name], 1),
                gbps=round(gbps, 1),
                percent_of_roof=round(roof, 1),
                budget_used=round(used[name], 3),
                graph_ms=0.0 if graph is None else round(graph.median_ms, 4),
                graph_percent=round(graph_roof, 1),
                **environment(command),
            )


def _graphs(
    ready: Mapping[str, Contestant], mode: str, peak_mib: float, rounds: int, say: Callable[[str], None]
) -> dict[str, Timing]:
    """Kernel times in graph replay of `ready`, which can be captured."""
    bytes_a_call = next(iter(ready.values())).input_bytes
    wanted = min(_MAX_REPLICAS, 1 + _REPLICA_BYTES // max(bytes_a_call, 1))
    fits = int(_MAX_GRAPH_BYTES // (2 * bytes_a_call + peak_mib * 2**20)) // max(len(ready), 1)
    count = max(1, min(wanted, fits))
    captured: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    kept = []
    for name, contestant in ready.items():

        def replicas(contestant: Contestant = contestant) -> list[Callable[[], Any]]:
            copies = [Contestant(contestant.function, contestant.checker) for _ in range(count)]
            # Retained, or a captured backward would free what it reads again in every replay.
            return [copy.prepare(mode, retain_graph=True) for copy in copies]

        try:
            graph, num_calls, alive = capture(lambda c=contestant: c.prepare(mode), replicas)  # type: ignore[misc]
        except Exception as error:
            torch.cuda.synchronize()
            say(f"{name}: no graph of {mode}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
            continue
        captured[name] = graph, num_calls
        kept.append(alive)
    return graph_times(captured, rounds=rounds)


def _percent(timing: Timing, products: Timing | None, gbps: float, roof_gbps: float, mode: str) -> float:
    if products is not None:
        # Where gradients are made is a choice of each implementation: only the sum compares.
        return 100 * products.median_ms / timing.median_ms if mode == "both" else 0.0
    return 100 * gbps / roof_gbps


def measure_op(
    spec: OpSpec,
    peers: list[Peer],
    *,
    cases: tuple[str, ...] = (),
    dtype: torch.dtype = torch.bfloat16,
    modes: tuple[str, ...] = MODES,
    command: str = "",
    rounds: int = 25,
    say: Callable[[str], None] = print,
) -> Iterator[list[Row]]:
    """Rows of all `models_only` cases of `spec`, or of those named, a list for each case.

    Raises:
        ValueError: no CUDA device, or an unknown case.
    """
    if not torch.cuda.is_available():
        raise ValueError("bench: needs a CUDA device, and torch sees none here")
    chosen = [spec.case(name) for name in cases] or [c for c in spec.cases if c.models_only]
    roof = copy_gbps()
    say(f"copy bandwidth {roof:.0f} GB/s")
    for case in chosen:
        try:
            yield list(
                measure_case(
                    spec, case, peers, dtype=dtype, modes=modes, roof_gbps=roof, command=command, rounds=rounds, say=say
                )
            )
        except torch.OutOfMemoryError as error:
            # Of a smaller GPU than the case needs; the other cases may fit.
            say(f"{spec.name}[{case.name}]: not measured: {str(error).splitlines()[0]}")
        gc.collect()
        torch.cuda.empty_cache()
