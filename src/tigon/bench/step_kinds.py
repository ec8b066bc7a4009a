"""Where the time of a training step goes: kernels sorted into kinds, by name and by the operator that launched them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

# In the order in which they are stacked; the last is what no kernel was running for.
KINDS = ("products", "attention", "pointwise", "loss", "optimiser", "other", "host_gap")
TITLES = {
    "products": "matrix products",
    "attention": "attention",
    "pointwise": "norms, activations, RoPE, sums",
    "loss": "loss",
    "optimiser": "optimiser",
    "other": "other kernels",
    "host_gap": "waiting for the host",
}

# The first that is found in a name decides. A compiler's kernel is named after all that it computes, so its names are
# asked first; names of attention kernels mention the types of matrix products, those of products mention no other kind.
_NAMES: tuple[tuple[str, str], ...] = (
    ("optimiser", r"multi_tensor|adam|_foreach|\bOptimizer\."),
    ("products", r"^triton_tem_.*mm"),
    (
        "loss",
        r"cross_?entropy|nll_?loss|log_?softmax|softmax_online|anchored|label_logits|linear_log_probs|dlogits|element_mul_kernel"
        r"|^_(losses|flags|join|finish|predictions|is_one|scale_rows)_kernel",
    ),
    ("pointwise", r"^triton_(poi|red|per|for)_"),
    ("attention", r"flash|fmha|attention|sdpa|cudnn.*[fb]prop|softmax"),
    ("products", r"gemm|cutlass|nvjet|cublas|xmma|wgmma|matmul|split_?k|aten::(add)?mm\b|aten::_?(grouped|scaled)_mm"),
    ("other", r"embedding|index|memcpy|memset|scatter|gather|nccl|random|arange|\baten::(zeros|zero_|fill_|empty)"),
    (
        "pointwise",
        r"elementwise|reduce_kernel|norm|glu|silu|gelu|rope|rotary|CatArray|sum_partials|sum_rows|scale_kernel|^triton_"
        r"|\baten::",
    ),
)
_RULES = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _NAMES)


class Sizes(NamedTuple):
    """What tells the loss and eager attention from other elementwise work."""

    vocab: int
    seq: int


class Launch(NamedTuple):
    """A kernel, or on a CPU an operator, with what is known of where it came from.

    Attributes:
        operators: the operator that launched it and those around it, from the inside out.
        shapes: of the inputs of the innermost operator that has any.
    """

    name: str
    ms: float
    operators: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()


def kind_of(launch: Launch, sizes: Sizes) -> str:
    """One of `KINDS`, never "host_gap"."""
    if any("Optimizer.step" in name for name in launch.operators):
        return "optimiser"
    named = next((kind for kind, rule in _RULES if rule.search(launch.name)), "other")
    inner = launch.operators[0] if launch.operators else launch.name
    if named in ("loss", "optimiser"):
        return named
    # Scores of eager attention: one product a head, and whatever reads or writes a matrix of tokens by tokens.
    if re.search(r"aten::(bmm|baddbmm)", inner):
        return "attention"
    if named == "products":
        return named
    if any(len(shape) > 1 and shape[-1] == sizes.vocab for shape in launch.shapes):
        return "loss"
    if any(len(shape) > 2 and shape[-2:] == (sizes.seq, sizes.seq) for shape in launch.shapes):
        return "attention"
    return named


def by_kind(launches: Iterable[Launch], sizes: Sizes, num_steps: int, wall_ms: float) -> dict[str, float]:
    """Milliseconds of one step by kind, with what is left of `wall_ms` as the host's."""
    total = Counter(dict.fromkeys(KINDS, 0.0))
    for launch in launches:
        total[kind_of(launch, sizes)] += launch.ms / num_steps
    total["host_gap"] = max(0.0, wall_ms - sum(total.values()))
    return {kind: round(total[kind], 4) for kind in KINDS}


def _shapes_of(event: Any) -> tuple[tuple[int, ...], ...]:
    """Of the operator or of the nearest around it that says any."""
    while event is not None:
        found = tuple(
            tuple(shape)
            for shape in event.input_shapes or ()
            if isinstance(shape, (list, tuple)) and shape and all(isinstance(n, int) for n in shape)
        )
        if found:
            return found
        event = event.cpu_parent
    return ()


def _operators_of(event: Any) -> tuple[str, ...]:
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return tuple(names)


def _is_on_host(event: Any) -> bool:
    return str(event.device_type).rpartition(".")[2] in ("CPU", "cpu")


def launches_in(events: Sequence[Any], on_device: bool) -> Iterator[Launch]:
    """What the events of a `torch.profiler` run computed, from `profile.events()` with recorded shapes.

    Kernels that no operator is known for (a CUDA graph's, a launcher's of its own) have only their names.
    """
    measured: Counter[str] = Counter()
    linked: dict[str, list[Launch]] = {}
    # A range around an optimiser's step, for example, is on the device under its own name, from first kernel to last.
    ranges = {event.name for event in events if _is_on_host(event)}
    for event in events:
        if getattr(event, "is_user_annotation", False) or event.name.startswith("ProfilerStep"):
            continue
        if not _is_on_host(event):
            if event.name not in ranges:
                measured[event.name] += event.time_range.elapsed_us() * 1e-3
        elif on_device:
            operators = _operators_of(event) if event.kernels else ()
            for kernel in event.kernels:
                launch = Launch(kernel.name, kernel.duration * 1e-3, operators, _shapes_of(event))
                linked.setdefault(kernel.name, []).append(launch)
        elif event.self_cpu_time_total > 0:
            yield Launch(event.name, event.self_cpu_time_total * 1e-3, _operators_of(event), _shapes_of(event))
    # What the device took is the truth: an operator can be linked to kernels of all its likes, as an optimiser's is.
    for name, ms in measured.items():
        launches = linked.get(name, [])
        known = sum(launch.ms for launch in launches)
        share = min(1.0, ms / known) if known else 0.0
        for launch in launches:
            yield launch._replace(ms=launch.ms * share)
        if ms > known * share:
            yield Launch(name, ms - known * share)
