"""One class, native against patched: the same numbers in every way to call it, and what of it was replaced."""

from __future__ import annotations

import inspect
import os
import re
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon
from tigon.patch._forms import FUSIONS

from . import build as zoo
from .tables import OTHER, ROUNDING, SMALL, Batch, Size

# fp32 sums in another order differ by 1e-6; a part of the model that is dropped changes them by 1e-3 and more.
SCALAR_TOLERANCE = 1e-5
TOLERANCE = 1e-4
# Of a gradient that cancels to nothing, as key biases have, rounding is left: fp32's share of the model's largest.
NEGLIGIBLE = 1e-3

Record = dict[str, Any]
Results = dict[str, Any]


# ---- ways to call a model ----


@dataclass(frozen=True)
class Call:
    """`change` makes the arguments from the batch. With `like` it is a call that only a model with the fused loss
    takes, and gives what the native model gives when it is called as `like`."""

    name: str
    training: bool
    change: Callable[[Batch], Batch] = lambda batch: batch
    backward: bool = False
    like: str = ""


def _unlabelled(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name != "labels"}


def _shifted(batch: Batch) -> Batch:
    """Not what shifting `labels` gives, so that it shows which of the two is used."""
    labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].clone()
    labels[:, 4:6] = -100
    return {**batch, "shift_labels": labels}


CALLS = (
    Call("train", True, backward=True),
    Call("train num_items_in_batch", True, lambda b: {**b, "num_items_in_batch": torch.tensor(7)}, backward=True),
    Call("train shift_labels", True, _shifted),
    Call("train output_hidden_states", True, lambda b: {**b, "output_hidden_states": True}),
    Call("train return_dict=False", True, lambda b: {**b, "return_dict": False}),
    Call("train shift_labels alone", True, lambda b: _unlabelled(_shifted(b)), like="train shift_labels"),
    Call("train skip_logits=False", True, lambda b: {**b, "skip_logits": False}, backward=True, like="train"),
    Call("eval", False),
    Call("eval num_items_in_batch", False, lambda b: {**b, "num_items_in_batch": 7}),
    Call("eval shift_labels", False, _shifted),
    Call("eval return_dict=False", False, lambda b: {**b, "return_dict": False}),
    Call("eval without labels", False, _unlabelled),
    Call("eval logits_to_keep", False, lambda b: {**_unlabelled(b), "logits_to_keep": 3}),
    Call("eval skip_logits=True", False, lambda b: {**b, "skip_logits": True}, like="eval"),
)
TRAIN, EVAL = (next(call for call in CALLS if call.name == name) for name in ("train", "eval"))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Everything an output holds, by a name that says where it is."""
    items = enumerate(value) if isinstance(value, (tuple, list)) else value.items() if isinstance(value, dict) else None
    if items is None:
        yield name, value.detach() if isinstance(value, Tensor) else value
    else:
        for key, item in items:
            yield from _flat(item, f"{name}.{key}" if name else str(key))


def run(model: nn.Module, call: Call, batch: Batch) -> Results:
    """The output of a call by name, and the gradients of the parameters as `grad of NAME`."""
    model.train(call.training)
    torch.manual_seed(2)
    with torch.set_grad_enabled(call.backward):
        output = model(**call.change(batch))
    if not call.backward:
        return dict(_flat(output))
    output.loss.backward()
    results = dict(_flat(output))
    results.update({f"grad of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None})
    model.zero_grad(set_to_none=True)
    return results


# ---- comparing ----


def differences(native: Results, patched: Results, may_lack: set[str], tolerance: float = TOLERANCE) -> list[str]:
    """What is not the same, worst first. A name in `may_lack` may be None, or missing, in the patched results."""
    gradients = [float(v.abs().max()) for name, v in native.items() if name.startswith("grad of ") and v.numel()]
    smallest = NEGLIGIBLE * max(gradients, default=0.0)
    found = [(float("inf"), f"{name} is new") for name in patched.keys() - native.keys()]
    for name, want in native.items():
        got = patched.get(name)
        if got is None and (want is None or name in may_lack):
            continue
        if not isinstance(want, Tensor) or not isinstance(got, Tensor):
            # Caches and the like are not looked into.
            if type(got) is not type(want):
                found.append((float("inf"), f"{name} is {type(got).__name__}, not {type(want).__name__}"))
        elif (got.shape, got.dtype) != (want.shape, want.dtype):
            text = f"{name} is {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
            found.append((float("inf"), text))
        else:
            scale = 1.0 if want.dim() == 0 else smallest if name.startswith("grad of ") else 0.0
            error = _error(got, want, scale)
            if not error <= (SCALAR_TOLERANCE if want.dim() == 0 else tolerance):
                found.append((error, f"{name} is off by {error:.0e}"))
    return [text for _, text in sorted(found, key=lambda item: -item[0])]


def _error(got: Tensor, want: Tensor, scale: float) -> float:
    """Largest difference relative to the largest element, or to `scale` where that is larger."""
    if not want.is_floating_point():
        return 0.0 if torch.equal(got, want) else float("inf")
    # Masks hold infinities; they must stand in the same places.
    finite = want.isfinite()
    if not torch.equal(got[~finite].nan_to_num(), want[~finite].nan_to_num()):
        return float("inf")
    got, want = got[finite], want[finite]
    if not want.numel():
        return 0.0
    return float((got - want).abs().max()) / max(float(want.abs().max()), scale, 1e-12)


def _logits_in(results: Results, native: Results) -> set[str]:
    """Names in `results` of what a plain training step returns as logits: in tuples they have no name of their own."""
    logits = [value for name, value in native.items() if name.split(".")[-1] == "logits" and value is not None]
    tensors = {name: value for name, value in results.items() if isinstance(value, Tensor)}
    return {name for name, value in tensors.items() if any(_same_bits(value, each) for each in logits)}


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


# ---- what there is to replace ----

KINDS = {
    "norm": ("rms_norm", "rms_norm_gated", "layer_norm"),
    "mlp": ("glu",),
    "rope": ("rope",),
    "experts": ("experts",),
}
LOSS = "linear_cross_entropy"
_ROTATE = re.compile(r"^apply_\w*(rot|rope)\w*$|^_?(apply_)?rotary(_pos)?_fn$|^rotary_pos_emb\w*$")
_MLP = re.compile(r"MLP|Mlp|FeedForward|FFN|ActDense|ReluDense|GLU")
_EXPERTS = re.compile(r"Experts?(GLU)?(Gemm)?$|ParallelExperts")


def kind_of(module: nn.Module) -> str | None:
    """Which of `KINDS` a module is by its names and shapes, whatever the patcher thinks of it."""
    cls = type(module).__name__
    if "Norm" in cls and "BatchNorm" not in cls and "GroupNorm" not in cls and not list(module.children()):
        return "norm"
    if _EXPERTS.search(cls) and any(p.dim() >= 2 for p in module.parameters()):
        return "experts"
    if any(_ROTATE.match(name) for name in inspect.unwrap(type(module).forward).__code__.co_names):
        return "rope"
    lines = [child.weight.shape for child in module.children() if getattr(child, "weight", None) is not None]
    lines = [shape for shape in lines if len(shape) == 2]
    packed = len(lines) == 2 and any(a[0] == 2 * b[1] for a, b in (lines, lines[::-1]))
    return "mlp" if _MLP.search(cls) and (packed or len(lines) >= 3) else None


def kinds_that_run(model: nn.Module, batch: Batch) -> dict[str, str]:
    """Kind by name of every module that a training step runs: of a vision tower nothing, where there is no image."""
    names = {module: name for name, module in model.named_modules()}
    ran: dict[str, str] = {}

    def hook(module: nn.Module, *_: Any) -> None:
        if kind := kind_of(module):
            ran[names[module]] = kind

    hooks = [module.register_forward_pre_hook(hook) for module in names]
    try:
        run(model, TRAIN, batch)
    finally:
        for each in hooks:
            each.remove()
    # Experts within experts are parts of them.
    whole = [f"{name}." for name, kind in ran.items() if kind == "experts"]
    return {name: kind for name, kind in ran.items() if kind != "experts" or not name.startswith(tuple(whole))}


def coverage(model: nn.Module, report: tigon.Report, kinds: dict[str, str]) -> Record:
    """`counts`: by kind how many modules were replaced and how many there are; `variants`: as what; `kept`: kind,
    class, reason and number of the others; `loss`: reason why it stays, "" where it was replaced."""
    modules = dict(model.named_modules())
    rows = {(name, row.form): row for row in report for name in row.modules}
    counts: dict[str, list[int]] = {}
    variants: Counter[str] = Counter()
    kept: Counter[tuple[str, str, str]] = Counter()
    for kind, forms in KINDS.items():
        names = [name for name, each in kinds.items() if each == kind]
        found = [next((rows[name, form] for form in forms if (name, form) in rows), None) for name in names]
        replaced = [row for row in found if row and row.verdict == "replaced"]
        counts[kind] = [len(replaced), len(names)]
        variants.update(f"{row.form}: {row.variant}" for row in replaced)
        for name, row in zip(names, found, strict=True):
            if row not in replaced:
                kept[kind, type(modules[name]).__name__, row.reason if row else "not seen as a form"] += 1
    losses = [row for row in report if row.form == LOSS]
    replaced_loss = any(row.verdict == "replaced" for row in losses)
    why = "" if replaced_loss else losses[0].reason if losses else "not seen as a form"
    return {
        "counts": counts,
        "variants": dict(variants),
        "kept": [[*key, number] for key, number in kept.items()],
        "loss": why,
    }


# ---- one class ----


def _where(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:300]} ({os.path.basename(frame.filename)}:{frame.lineno})"


def _attributes(model: nn.Module) -> dict[str, set[str]]:
    return {name: set(module.__dict__) for name, module in model.named_modules()}


def _native(model: nn.Module, batch: Batch) -> tuple[dict[str, Results], dict[str, str]]:
    """Results by call, and why for the calls that the class does not take."""
    results, not_taken = {}, {}
    for call in CALLS:
        if not call.like:
            try:
                results[call.name] = run(model, call, batch)
            except Exception as error:
                not_taken[call.name] = _where(error)
    return results, not_taken


def _patched(model: nn.Module, batch: Batch, native: dict[str, Results], tolerance: float) -> tuple[bool, list[str]]:
    """Whether the loss was fused, and what differs."""
    fused, wrong = False, []
    for call in CALLS:
        want = native.get(call.like or call.name)
        if want is None or (call.like and not fused):
            continue
        if call.name == "train shift_labels alone" and _same_bits(want["loss"], native[TRAIN.name]["loss"]):
            # A model that does not read them has no loss from them.
            continue
        try:
            got = run(model, call, batch)
        except Exception as error:
            wrong.append(f"{call.name}: {_where(error)}")
            continue
        if call is TRAIN:
            fused = got.get("logits") is None
        defers = fused and call.change(batch).get("skip_logits", call.training)
        may_lack = _logits_in(want, native["train" if call.training else "eval"]) if defers else set()
        wrong += [f"{call.name}: {text}" for text in differences(want, got, may_lack, tolerance)[:2]]
    return fused, wrong


def fusions(report: tigon.Report) -> Record:
    """By fusion how many modules were replaced, and how many of a class were kept for a reason."""
    counts: Record = {form: {"replaced": 0, "kept": {}} for form in FUSIONS}
    for row in report:
        if row.form in FUSIONS and row.verdict == "replaced":
            counts[row.form]["replaced"] += row.count
        elif row.form in FUSIONS:
            counts[row.form]["kept"][f"{row.cls}: {row.reason}"] = row.count
    return counts


def compare(name: str, size: Size, fuse: Sequence[str] = ()) -> Record:
    model = zoo.build(name, size)
    batch = zoo.make_batch(name, model, size)
    native, not_taken = _native(model, batch)
    if TRAIN.name not in native:
        return {"native": not_taken[TRAIN.name]}
    kinds = kinds_that_run(model, batch)
    before = _attributes(model)
    try:
        report = tigon.patch(model, fuse=fuse)
    except Exception as error:
        return {"native": "", "wrong": [f"patch: {_where(error)}"]}
    fused, wrong = _patched(model, batch, native, ROUNDING.get(name, TOLERANCE))
    record = {"native": "", "fused": fused, **coverage(model, report, kinds), "not taken": not_taken}
    if fuse:
        record["fusions"] = fusions(report)
    tigon.unpatch(model)
    if _attributes(model) != before:
        wrong.append("unpatch: attributes are left or lost")
    for key, value in run(model, EVAL, batch).items():
        if isinstance(value, Tensor) and not _same_bits(value, native[EVAL.name][key]):
            wrong.append(f"unpatch: {key} is not what it was")
    return {**record, "wrong": wrong}


def examine(name: str, fuse: Sequence[str] = ()) -> Record:
    """The record of one class, as JSON has it: that of the small size, with what is wrong at either."""
    started = time.monotonic()
    with tigon.backend("torch"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small, other = (_guarded(name, size, fuse) for size in (SMALL, OTHER))
    wrong = [*small.get("wrong", []), *(f"other size: {text}" for text in other.get("wrong", []))]
    for key in ("counts", "variants", "fused", "fusions"):
        if small.get(key) != other.get(key):
            wrong.append(f"other size: {key} {other.get(key)}, not {small.get(key)}")
    native = small["native"] or other["native"]
    record = {"name": name, **small, "native": native, "wrong": [] if native else wrong}
    return {**record, "seconds": round(time.monotonic() - started, 2)}


def _guarded(name: str, size: Size, fuse: Sequence[str]) -> Record:
    try:
        return compare(name, size, fuse)
    except Exception as error:
        return {"native": _where(error)}
