"""One class, native against patched: the same numbers in every way to call it, and what of it was replaced."""

from __future__ import annotations

import inspect
import os
import re
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tigon

from . import build as zoo
from .tables import OTHER, SMALL, Size

# fp32 sums in another order; a part of the model that is dropped changes them by 1e-3 and more.
LOSS_TOLERANCE = 1e-5
TOLERANCE = 1e-4
# Of a gradient that cancels to nothing, as key biases have, rounding is left: fp32's share of the model's largest.
NEGLIGIBLE = 1e-3

Record = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A way to call the model. `change` makes its keyword arguments from the batch."""

    name: str
    change: Callable[[dict[str, Any]], dict[str, Any]]
    training: bool
    backward: bool = False


def _without_labels(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in batch.items() if key != "labels"}


def _shifted(batch: dict[str, Any]) -> Tensor:
    """Not what shifting `labels` gives, so that it shows which of the two is used."""
    labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].clone()
    labels[:, 4:6] = -100
    return labels


CALLS = (
    Call("train", lambda b: b, True, backward=True),
    Call("train, num_items_in_batch", lambda b: {**b, "num_items_in_batch": torch.tensor(7)}, True, backward=True),
    Call("train, shift_labels", lambda b: {**b, "shift_labels": _shifted(b)}, True),
    Call("train, output_hidden_states", lambda b: {**b, "output_hidden_states": True}, True),
    Call("train, return_dict=False", lambda b: {**b, "return_dict": False}, True),
    Call("eval", lambda b: b, False),
    Call("eval, shift_labels", lambda b: {**b, "shift_labels": _shifted(b)}, False),
    Call("eval, num_items_in_batch", lambda b: {**b, "num_items_in_batch": 7}, False),
    Call("eval, return_dict=False", lambda b: {**b, "return_dict": False}, False),
    Call("eval, no labels", _without_labels, False),
    Call("eval, logits_to_keep", lambda b: {**_without_labels(b), "logits_to_keep": 3}, False),
)


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Tensor | None]]:
    """Every tensor of an output, and None where a tuple has it, by a name that says where it is."""
    if value is None or isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from _flat(item, f"{name}.{i}" if name else str(i))


def _run(model: nn.Module, call: Call, batch: dict[str, Any]) -> dict[str, Tensor | None]:
    """The output of a call by name, and the gradients of the parameters as `grad of NAME`."""
    model.train(call.training)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    with torch.set_grad_enabled(call.backward):
        output = model(**call.change(batch))
    if not call.backward:
        return {name: None if value is None else value.detach() for name, value in _flat(output)}
    output.loss.backward()
    result = {name: None if value is None else value.detach() for name, value in _flat(output)}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            result[f"grad of {name}"] = parameter.grad.clone()
    model.zero_grad(set_to_none=True)
    return result


def differences(native: dict[str, Tensor | None], patched: dict[str, Tensor | None], allowed: set[str]) -> list[str]:
    """What is not the same, worst first; `allowed` may be missing from `patched`."""
    found = [(float("inf"), f"{name} is new") for name in patched.keys() - native.keys()]
    gradients = [value for name, value in native.items() if name.startswith("grad of ") and value is not None]
    smallest = NEGLIGIBLE * max([float(g.abs().max()) for g in gradients if g.numel()], default=0.0)
    for name, want in native.items():
        got = patched.get(name)
        if got is None or want is None:
            if got is not want and name not in allowed:
                found.append((float("inf"), f"{name} is {'missing' if got is None else 'not None'}"))
        elif got.shape != want.shape or got.dtype != want.dtype:
            found.append(
                (float("inf"), f"{name} is {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}")
            )
        elif want.numel():
            error = _error(got, want, smallest if name.startswith("grad of ") else 0.0)
            tolerance = LOSS_TOLERANCE if name == "loss" else TOLERANCE
            if not error <= tolerance:
                found.append((error, f"{name} is off by {error:.0e}"))
    return [text for _, text in sorted(found, key=lambda item: -item[0])]


def _error(got: Tensor, want: Tensor, smallest: float) -> float:
    """Largest difference relative to the largest element. Masks hold infinities, which must be in the same places."""
    if not want.is_floating_point():
        return 0.0 if torch.equal(got, want) else float("inf")
    finite = want.isfinite()
    if not torch.equal(got[~finite].nan_to_num(), want[~finite].nan_to_num()):
        return float("inf")
    got, want = got[finite], want[finite]
    if not want.numel():
        return 0.0
    scale = max(float(want.abs().max()), smallest, 1.0 if want.dim() == 0 else 1e-12)
    return float((got - want).abs().max()) / scale


# ---- what there is to replace ----

_ROTATE = re.compile(r"^apply_\w*(rot|rope)\w*$|^_?(apply_)?rotary(_pos)?_fn$|^rotary_pos_emb\w*$")
_MLP = re.compile(r"MLP|Mlp|FeedForward|FFN|ActDense|ReluDense|SwiGLU|GLU", re.ASCII)
_EXPERTS = re.compile(r"Experts?(GLU)?(Gemm)?$|ParallelExperts")
KINDS = {"norm": ("rms_norm", "layer_norm"), "mlp": ("glu",), "rope": ("rope",), "experts": ("experts",)}


def kind_of(module: nn.Module) -> str | None:
    """Which of `KINDS` a module is by its name and its children: not how the patcher sees it."""
    cls = type(module).__name__
    parameters = [p for p in module._parameters.values() if p is not None]
    lines = [child.weight.shape for child in module.children() if getattr(child, "weight", None) is not None]
    lines = [shape for shape in lines if len(shape) == 2]
    if "Norm" in cls and "BatchNorm" not in cls and "GroupNorm" not in cls and not list(module.children()):
        return "norm"
    if _EXPERTS.search(cls) and any(p.dim() >= 2 for p in module.parameters()):
        return "experts"
    code = inspect.unwrap(type(module).forward).__code__
    if any(_ROTATE.match(name) for name in code.co_names):
        return "rope"
    if _MLP.search(cls) and (lines or parameters):
        packed = len(lines) == 2 and any(a[0] == 2 * b[1] for a, b in (lines, lines[::-1]))
        return "mlp" if packed or len(lines) >= 3 else "plain mlp"
    return None


def _kinds(model: nn.Module, run: Callable[[], Any]) -> dict[str, str]:
    """Kind by name of every module that runs."""
    names = {module: name for name, module in model.named_modules()}
    ran: dict[str, str] = {}

    def hook(module: nn.Module, *_: Any) -> None:
        kind = kind_of(module)
        if kind:
            ran[names[module]] = kind

    hooks = [module.register_forward_pre_hook(hook) for module in names]
    try:
        run()
    finally:
        for each in hooks:
            each.remove()
    return ran


def coverage(model: nn.Module, report: tigon.Report, kinds: dict[str, str]) -> Record:
    """By kind how many of the modules that run there are and how many were replaced, and the rest with the reason."""
    modules = dict(model.named_modules())
    rows = {(name, row.form): row for row in report for name in row.modules}
    counts, kept = {}, Counter()
    variants: Counter[str] = Counter()
    for kind, forms in KINDS.items():
        names = [name for name, each in kinds.items() if each == kind]
        found = {n: next((rows[n, f] for f in forms if (n, f) in rows), None) for n in names}
        replaced = [row for row in found.values() if row and row.verdict == "replaced"]
        counts[kind] = [len(replaced), len(names)]
        variants.update(f"{row.form}: {row.variant}" for row in replaced)
        for name, row in found.items():
            if not row or row.verdict == "kept":
                kept[kind, type(modules[name]).__name__, row.reason if row else "not seen as a form"] += 1
    # What the names above do not tell, but the patcher found.
    extra = Counter()
    for (name, form), row in rows.items():
        if form != "linear_cross_entropy" and not any(form in KINDS[k] for k in KINDS if kinds.get(name) == k):
            extra[form, row.cls, row.verdict, row.reason or row.variant] += 1
    losses = [row for row in report if row.form == "linear_cross_entropy"]
    return {
        "counts": counts,
        "plain mlp": sum(kind == "plain mlp" for kind in kinds.values()),
        "variants": dict(variants),
        "kept": [[*key, n] for key, n in kept.items()],
        "extra": [[*key, n] for key, n in extra.items()],
        "loss row": [[row.modules, row.verdict, row.reason] for row in losses],
    }


# ---- one class ----


def where(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:300]} ({os.path.basename(frame.filename)}:{frame.lineno})"


def _native(model: nn.Module, batch: dict[str, Any]) -> tuple[dict[str, dict[str, Tensor | None]], dict[str, str]]:
    """Results by call, and why for the calls that the model does not take."""
    results, not_taken = {}, {}
    for call in CALLS:
        try:
            results[call.name] = _run(model, call, batch)
        except Exception as error:
            not_taken[call.name] = where(error)
    return results, not_taken


def compare(name: str, size: Size, record: Record) -> None:
    model = zoo.build(name, size)
    batch = zoo.make_batch(name, model, size)
    native, not_taken = _native(model, batch)
    if "train" not in native:
        record["native"] = not_taken["train"]
        return
    record["not taken"] = not_taken
    kinds = _kinds(model, lambda: _run(model, CALLS[0], batch))
    wrong = record.setdefault("wrong", [])
    state = {n: set(m.__dict__) for n, m in model.named_modules()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = tigon.patch(model)
    except Exception as error:
        wrong.append(f"patch: {where(error)}")
        return
    record.update(coverage(model, report, kinds))
    labelled = list(native["train"])
    fused = False
    for call in CALLS:
        if call.name not in native:
            continue
        try:
            patched = _run(model, call, batch)
        except Exception as error:
            wrong.append(f"{call.name}: {where(error)}")
            continue
        if call.name == "train":
            fused = patched.get("logits") is None
        allowed = (
            {"logits", str(labelled.index("logits"))} if call.training and fused and "logits" in labelled else set()
        )
        wrong.extend(f"{call.name}: {text}" for text in differences(native[call.name], patched, allowed)[:2])
    record["fused"] = fused
    tigon.unpatch(model)
    if {n: set(m.__dict__) for n, m in model.named_modules()} != state:
        wrong.append("unpatch: attributes are left or lost")
    again = _run(model, next(call for call in CALLS if call.name == "eval"), batch)
    wrong.extend(f"unpatch: {text}" for text in differences(native["eval"], again, set())[:1])


def examine(name: str) -> Record:
    """The record of one class, as data that JSON holds."""
    started = time.monotonic()
    record: Record = {"name": name, "native": ""}
    with tigon.backend("torch"):
        for size in (SMALL, OTHER):
            part: Record = {}
            try:
                compare(name, size, part)
            except Exception as error:
                part["native"] = where(error)
            if part.get("native"):
                record["native"] = part["native"]
            tag = "" if size is SMALL else "other size: "
            wrong = [*record.get("wrong", []), *(tag + text for text in part.get("wrong", []))]
            if size is OTHER and record.get("counts") != part.get("counts"):
                wrong.append(f"other size: replaced {part.get('counts')}, not {record.get('counts')}")
            record = {**part, **record, "wrong": wrong}
    record["seconds"] = round(time.monotonic() - started, 2)
    return record
