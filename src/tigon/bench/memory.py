"""`tigon memory`: what a training step holds, found by running it on tensors without memory.

A model on the meta device makes the same calls as on a GPU; a mode that sees every tensor made adds up the bytes of
those that are alive. Kernels are not launched, what their launchers allocate is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .. import ops
from .._progress import Progress
from ..ops import _device, _launch, _op
from .step_train import Plan, build, longest, masks_as_in_eager
from .step_variants import VARIANTS, Variant

GIB = 2**30
# The allocator of a GPU gives out multiples of this.
_GRAIN = 512
# Of the memory of a GPU: the rest is for the context, for what libraries allocate and for gaps between blocks.
_USABLE = 0.95
# From the fastest that is to be expected to the smallest: each recomputes more than the one before.
PREFERRED = (
    ("tigon_fused", False),
    ("tigon_recompute", False),
    ("tigon_fused", True),
    ("tigon_tiled", True),
)
# A layer that is recomputed saves its input alone, whatever else is recomputed in it.
WAYS = tuple(
    (name, checkpointing)
    for checkpointing in (False, True)
    for name in ("native", "tigon", "tigon_fused", "tigon_recompute", "tigon_tiled")
    if not (checkpointing and name == "tigon_recompute")
)
DEFAULT = ("native", "tigon", "tigon_fused", "tigon_recompute", "tigon_tiled")
CAPABILITY = (9, 0)


class Tracker(TorchDispatchMode):
    """Bytes of the storages made while it is on and still alive, and the most that ever were."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet(t.untyped_storage() for t in known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in tree_leaves(made):
            if isinstance(value, Tensor):
                self._add(value.untyped_storage())
        return made

    def _add(self, storage: Any) -> None:
        if storage in self.seen:
            return
        size = -(-storage.nbytes() // _GRAIN) * _GRAIN
        self.seen.add(storage)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.now -= size


# ---- a device that is not there ----


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What fused attention on any device saves: queries, keys, values, the result, and a number a row."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


@contextlib.contextmanager
def kernels_without_a_device() -> Iterator[None]:
    """Operators take their kernels, on tensors without memory and with launches left out."""
    with contextlib.ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        put(_op, "why_no_kernels", lambda device, dtype: [])
        put(_device, "capability", lambda index: CAPABILITY)
        launch = _launch.launch
        for name, module in list(sys.modules.items()):
            if name.startswith(ops.__name__) and getattr(module, "launch", None) is launch:
                put(module, "launch", lambda *args, **constants: None)
        put(torch.nn.functional, "scaled_dot_product_attention", _attention)
        # There is no autocast for such tensors, and asking for it raises.
        put(torch, "is_autocast_enabled", lambda *args: False)
        stack.enter_context(masks_as_in_eager())
        yield


# ---- one way to train ----


@dataclass(frozen=True)
class Memory:
    """Bytes of one training step with AdamW, after the first.

    Attributes:
        weights: of the model; gradients take as much, the optimiser's two states twice that.
        saved: what forward leaves for backward, the loss's tensors among it.
        peak: the largest sum of all.
    """

    variant: str
    checkpointing: bool
    weights: int
    saved: int
    peak: int

    @property
    def label(self) -> str:
        return self.variant + (" + checkpointing" if self.checkpointing else "")


def prepared(plan: Plan, variant: Variant) -> Any:
    """The model of a plan on the meta device, ready to train as `variant`."""
    model = build(replace(plan, device="meta"))
    variant.prepare(model)
    return model


def of_step(model: nn.Module, variant: Variant, batch: int, seq: int) -> Memory:
    """Run a step of a model on the meta device and add up."""
    tokens = torch.zeros(batch, seq, dtype=torch.int64, device="meta")
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    tracker = Tracker([*model.parameters(), *model.buffers(), tokens])
    with kernels_without_a_device(), tracker:
        loss = model(input_ids=tokens, labels=tokens).loss
        saved = tracker.now
        loss.backward()
    model.zero_grad(set_to_none=True)
    states = 2 * weights
    checkpointing = bool(getattr(model, "is_gradient_checkpointing", False))
    return Memory(variant.name, checkpointing, weights, saved, weights + states + tracker.peak)


# ---- what each layer saves ----


@dataclass(frozen=True)
class Saved:
    """What the modules of one place in all layers save; `tensors` are sizes and dtypes, with how many of each."""

    modules: str
    count: int
    bytes_each: float
    tensors: tuple[str, ...]


def by_module(model: nn.Module, batch: int, seq: int) -> list[Saved]:
    """What forward saves for backward, by the module whose forward does; a tensor counts where it is first saved."""
    tokens = torch.zeros(batch, seq, dtype=torch.int64, device="meta")
    names = {id(module): name for name, module in model.named_modules()}
    own = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers(), tokens]}
    # The tensors too, or another storage might get the address of one that has gone.
    found: dict[int, tuple[str, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage()._cdata
        if key not in own and key not in found:
            found[key] = _running(names), tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    tracker = Tracker([*model.parameters(), *model.buffers(), tokens])
    with kernels_without_a_device(), tracker, hooks:
        loss = model(input_ids=tokens, labels=tokens).loss
        held = tracker.now
    del loss
    places: dict[str, dict[str, list[Tensor]]] = {}
    for name, tensor in found.values():
        places.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", name), {}).setdefault(name, []).append(tensor)
    rows = []
    for place, modules in places.items():
        # The first layer's also hold what all layers share.
        tensors = list(modules.values())[-1]
        total = sum(t.untyped_storage().nbytes() for ts in modules.values() for t in ts)
        counted = Counter(
            f"{'x'.join(map(str, t.shape)) or '1'} {str(t.dtype).removeprefix('torch.')}" for t in tensors
        )
        shown = tuple(f"{n} of {text}" if n > 1 else text for text, n in counted.items())
        rows.append(Saved(place or "the model", len(modules), total / len(modules), shown))
    rows.sort(key=lambda row: -row.bytes_each * row.count)
    others = held - sum(row.bytes_each * row.count for row in rows)
    return [*rows, Saved("gradients that a loss makes ahead, and the rest", 1, others, ())]


def _running(names: dict[int, str]) -> str:
    """The innermost module whose forward is running.

    Hooks would say it, but a patched model does not fuse what a hook watches.
    """
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in names:
            return names[id(module)]
        frame = frame.f_back
    return ""


# ---- the command ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `tigon memory`."""
    parser.add_argument("model", type=Path, metavar="CONFIG", help="configuration of a causal language model, JSON")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences a step (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=4096, metavar="N", help="tokens a sequence (default: %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa", help="default: sdpa")
    parser.add_argument(
        "--gpu-memory", type=float, metavar="GIB", help="what is there; default: of this machine's GPU, if it has one"
    )
    parser.add_argument("--layers", metavar="VARIANT", help="also list what each module saves, for example tigon_fused")
    parser.add_argument("--max-context", action="store_true", help="also find the longest sequence of each variant")


def run(arguments: argparse.Namespace, show: Callable[[str], None] = print) -> int:
    """Carry out `tigon memory`; the exit status, 1 where nothing fits."""
    plan = _plan_of(arguments)
    available = _available(arguments)
    if arguments.max_context and not available:
        raise ValueError("memory: --max-context: expected --gpu-memory where no GPU is seen")
    if arguments.layers is not None:
        if arguments.layers not in DEFAULT:
            raise ValueError(f"memory: --layers: expected one of {', '.join(DEFAULT)}, got {arguments.layers!r}")
        show(layers_table(by_module(prepared(plan, VARIANTS[arguments.layers]), plan.batch, plan.seq)) + "\n")
    found: dict[tuple[str, bool], Memory] = {}
    lengths: dict[tuple[str, bool], int] = {}
    progress = Progress("memory", len(WAYS))
    for key in WAYS:
        name, checkpointing = key
        variant = VARIANTS[name]
        model = prepared(replace(plan, checkpointing=checkpointing), variant)
        found[key] = of_step(model, variant, plan.batch, plan.seq)
        if arguments.max_context:
            lengths[key] = longest_of(model, variant, plan, available)
        progress.update(len(found), found[key].label)
    show(table(found, lengths, available))
    if not available:
        return 0
    best = recommended(found, available)
    if best is None:
        smallest = min(found.values(), key=lambda memory: memory.peak)
        show(f"\nNothing fits into {available:.1f} GiB; {smallest.label} needs least, {smallest.peak / GIB:.2f} GiB.")
        return 1
    show(f"\nFor {available:.1f} GiB: {best.label}, {best.peak / GIB:.2f} GiB.\n  {_how(best)}")
    return 0


def recommended(found: dict[tuple[str, bool], Memory], available: float) -> Memory | None:
    """The way that fits and recomputes least."""
    return next((found[key] for key in PREFERRED if found[key].peak <= _USABLE * available * GIB), None)


def _plan_of(arguments: argparse.Namespace) -> Plan:
    if not arguments.model.is_file():
        raise ValueError(f"memory: no file {arguments.model}")
    for name in ("batch", "seq"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"memory: --{name}: expected at least 1, got {getattr(arguments, name)}")
    if not _launch.HAS_TRITON:
        raise ValueError("memory: needs Triton, whose kernels it leaves out but whose launchers it runs")
    return Plan(
        model=arguments.model,
        batch=arguments.batch,
        seq=arguments.seq,
        dtype=arguments.dtype,
        attention=arguments.attention,
    )


def _available(arguments: argparse.Namespace) -> float:
    """GiB; 0 where nobody knows."""
    if arguments.gpu_memory is not None:
        if not arguments.gpu_memory > 0:
            raise ValueError(f"memory: --gpu-memory: expected a positive number, got {arguments.gpu_memory}")
        return arguments.gpu_memory
    return torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else 0.0


def longest_of(model: nn.Module, variant: Variant, plan: Plan, available: float) -> int:
    """The longest sequence of which a step should fit."""

    def fits(length: int) -> float | None:
        peak = of_step(model, variant, plan.batch, length).peak / GIB
        return peak if peak <= _USABLE * available else None

    return longest(fits, 4096, _USABLE * available)[0]


def table(found: dict[tuple[str, bool], Memory], lengths: dict[tuple[str, bool], int], available: float) -> str:
    """One line for each way to train."""
    some = next(iter(found.values()))
    weights = some.weights / GIB
    lines = [
        f"GiB: weights {weights:.2f}, their gradients as much, the states of AdamW {2 * weights:.2f}",
        f"{'variant':<28}{'saved for backward':>20}{'peak':>10}" + (f"{'longest sequence':>20}" if lengths else ""),
    ]
    for key, memory in found.items():
        over = "  does not fit" if available and memory.peak > _USABLE * available * GIB else ""
        length = f"{lengths[key]:>20,}" if key in lengths else ""
        lines.append(f"{memory.label:<28}{memory.saved / GIB:>20.2f}{memory.peak / GIB:>10.2f}{length}{over}")
    return "\n".join(lines)


def layers_table(rows: list[Saved]) -> str:
    """One line for each place."""
    total = sum(row.bytes_each * row.count for row in rows)
    lines = [f"saved for backward, {total / GIB:.2f} GiB:"]
    for row in rows:
        lines.append(f"{row.count:>5} x{row.bytes_each / 2**20:>10.2f} MiB  {row.modules:<44} {', '.join(row.tensors)}")
    return "\n".join(lines)


def _how(best: Memory) -> str:
    options = {
        "tigon_fused": "",
        "tigon_recompute": ', mlp="recompute", loss_options={"memory": "min"}',
        "tigon_tiled": ', mlp="tiled", loss_options={"memory": "min"}',
    }[best.variant]
    call = f'tigon.patch(model, fuse=["qk_norm_rope", "rms_norm_mlp", "add_rms_norm"]{options})'
    return ("model.gradient_checkpointing_enable(); " if best.checkpointing else "") + call
