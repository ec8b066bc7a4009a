"""The loss of a language model without its logits.

In training with labels the output layer returns `DeferredLogits`: its input, and the elementwise operations the
model applies afterwards. The loss function computes the fused loss from it. Any operation that is not known
materialises the real logits, so the model's own forward stays what runs, whatever it does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.linear_cross_entropy import linear_cross_entropy
from . import _hf
from ._deferred import Deferred, real
from ._forms import _is_plain
from ._swap import this_thread


class _LossRequest:
    """What the output layer is to compute instead of logits. Not a pytree, so that wrappers do not cast it."""

    def __init__(self, labels: Tensor, options: dict[str, Any], columns: int | None) -> None:
        self.labels, self.options, self.columns = labels, options, columns


class _LogitsRequest:
    """Asks the output layer for real logits while its flag is up."""


class DeferredLogits(Deferred):
    """Logits that are not computed yet.

    Scalar factors, one tanh, casts to floating dtypes, `contiguous`, slices of rows, `[..., :n]` and views as a matrix
    are recorded, and the mean cross entropy of a matrix is fused; everything else runs on the real logits.
    """

    def __init__(self, head: nn.Module, hidden: Tensor, dtype: torch.dtype) -> None:
        self.head, self.hidden, self.dtype = head, hidden, dtype
        self.shape = torch.Size((*hidden.shape[:-1], head.out_features))
        self.device = hidden.device
        self.operations: tuple[tuple[str, Any], ...] = ()
        self.formed: Tensor | None = None
        # Logits that these are a view of, and how: an edit in place of the ones is seen in the others.
        self.view_of: tuple[DeferredLogits, Callable[[Tensor], Tensor]] | None = None

    @property
    def real(self) -> Tensor | None:
        """The real logits, where they, or what they are a view of, were formed."""
        if self.formed is None and self.view_of is not None and self.view_of[0].real is not None:
            base, view = self.view_of
            self.formed = view(base.real)  # type: ignore[arg-type]
        return self.formed

    def _with(self, hidden: Tensor, columns: int, view: Callable[[Tensor], Tensor] | None = None) -> DeferredLogits:
        """These logits of other hidden states, in the same memory if `view` says where."""
        after = DeferredLogits(self.head, hidden, self.dtype)
        after.operations, after.shape = self.operations, torch.Size((*hidden.shape[:-1], columns))
        after.view_of = None if view is None else (self, view)
        return after

    def _then(self, name: str, value: Any, dtype: torch.dtype | None = None) -> Any:
        """These logits after one more operation."""
        if self.real is not None:
            return _OPERATIONS[name](self.real, value)
        after = self._with(self.hidden, self.shape[-1])
        after.operations, after.dtype = (*self.operations, (name, value)), dtype or self.dtype
        return after

    def materialise(self) -> Tensor:
        """The real logits, from the output layer itself; computed once."""
        if self.real is not None:
            return self.real
        if self.view_of is not None:
            base, view = self.view_of
            self.formed = view(base.materialise())
            return self.formed
        logits = self.head(self.hidden, _request=_LogitsRequest())
        for name, value in self.operations:
            logits = _OPERATIONS[name](logits, value)
        self.formed = logits
        return logits

    def plan(self) -> tuple[dict[str, Any], int | None] | None:
        """Options of the fused loss and the number of columns, or None where it has no such form."""
        if self.real is not None:
            return None
        scale, cap, columns = 1.0, None, None
        for name, value in self.operations:
            if name == "slice":
                columns = value
            elif name == "tanh":
                if cap is not None:
                    return None
                cap = 1.0
            elif name in ("mul", "div"):
                factor = value if name == "mul" else 1.0 / value
                scale, cap = (scale * factor, None) if cap is None else (scale, cap * factor)
        if cap is not None:
            # cap * tanh(scale * x) is the softcap of x * (scale * cap).
            scale *= cap
        if not 0 < (1.0 if cap is None else cap) < float("inf") or not abs(scale) < float("inf"):
            return None
        options: dict[str, Any] = {} if cap is None else {"softcap": cap}
        # A cap divides and multiplies by one number, which leaves a rounding error in fp64.
        if abs(scale - 1.0) > 1e-12:
            options["logit_scale"] = scale
        return options, columns

    # ---- what is recorded ----

    def __mul__(self, other: Any) -> Any:
        return self._then("mul", other) if _is_number(other) else self.materialise() * real(other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._then("div", other) if _is_number(other) else self.materialise() / real(other)

    def tanh(self) -> Any:
        return self._then("tanh", None)

    def contiguous(self, *args: Any, **kwargs: Any) -> Any:
        if self.real is not None or args or kwargs:
            return self.materialise().contiguous(*args, **kwargs)
        # Of a part it is a copy, which sees no later edit.
        return self if self.view_of is None else self._with(self.hidden, self.shape[-1])

    def float(self) -> Any:
        return self.to(torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        dtype = args[0] if len(args) == 1 and not kwargs else kwargs.get("dtype") if len(kwargs) == 1 else None
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point and not (args and kwargs):
            if dtype == self.dtype and self.real is None:
                return self
            return self._then("to", dtype, dtype)
        return self.materialise().to(*args, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        if self.real is not None:
            return self.real[index]
        axes = self._slices(index)
        if axes is None or any(axis != slice(None) for axis in axes[-1:]):
            stop = axes[-1].stop if axes and all(axis == slice(None) for axis in axes[:-1]) else None
            if type(stop) is int and 0 < stop <= self.shape[-1] and axes and axes[-1] == slice(stop):
                after = self._with(self.hidden, stop, lambda logits: logits[..., :stop])
                after.operations = (*self.operations, ("slice", stop))
                return after
            return self.materialise()[index]
        # Rows of the logits are the logits of these rows.
        return self._with(self.hidden[axes], self.shape[-1], lambda logits: logits[index])

    def view(self, *shape: Any) -> Any:
        return self._as_matrix("view", shape)

    def reshape(self, *shape: Any) -> Any:
        return self._as_matrix("reshape", shape)

    def _as_matrix(self, name: str, shape: tuple[Any, ...]) -> Any:
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        rows = self.shape[:-1].numel()
        if self.real is None and sizes in ((-1, self.shape[-1]), (rows, self.shape[-1]), (rows, -1)):
            hidden = self.hidden.reshape(rows, self.hidden.shape[-1])
            return self._with(hidden, self.shape[-1], lambda logits: getattr(logits, name)(*shape))
        return getattr(self.materialise(), name)(*shape)

    def _slices(self, index: Any) -> tuple[slice, ...] | None:
        """One slice for every axis, or None for an index of another kind."""
        index = index if isinstance(index, tuple) else (index,)
        dots = [i for i, each in enumerate(index) if each is Ellipsis]
        split = dots[0] if dots else len(index)
        before, after = index[:split], index[split + 1 :]
        missing = self.ndim - len(before) - len(after)
        if missing < 0 or not all(isinstance(each, slice) for each in (*before, *after)):
            return None
        return (*before, *[slice(None)] * missing, *after)

    @classmethod
    def noted(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.tanh and len(args) == 1 and not kwargs:
            return args[0].tanh()
        return _cross_entropy(*args, **kwargs) if func is F.cross_entropy else NotImplemented


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`torch.nn.functional.cross_entropy` of deferred logits, NotImplemented where it is not the fused loss."""
    usual = weight is None and size_average is None and reduce is None and reduction == "mean" and label_smoothing == 0
    if not usual or not isinstance(input, DeferredLogits) or not _is_plain(target) or not isinstance(target, Tensor):
        return NotImplemented
    planned = input.plan() if input.ndim == 2 and target.shape == input.shape[:1] else None
    if planned is None or target.dtype != torch.int64:
        return NotImplemented
    loss = input.head(
        input.hidden, _request=_LossRequest(target, {**planned[0], "ignore_index": ignore_index}, planned[1])
    )
    # It rounds as the logits do, unless autocast says otherwise.
    return loss if torch.is_autocast_enabled(input.device.type) else loss.to(input.dtype)


_OPERATIONS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "mul": lambda logits, value: logits * value,
    "div": lambda logits, value: logits / value,
    "tanh": lambda logits, value: torch.tanh(logits),
    "to": lambda logits, value: logits.to(value),
    "slice": lambda logits, value: logits[..., :value],
}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and value != 0


# ---- the three functions that are put on a model ----


def head_forward(self: nn.Module, input: Tensor, _request: Any = None) -> Any:
    """Forward of the output layer."""
    if isinstance(_request, _LossRequest):
        return _loss_of(self, input, _request)
    # A weight that is not whole here (tensor parallel) or not plain (quantised) keeps its own forward.
    if _request is None and self.__dict__.get("_tigon_defer") == this_thread() and _is_plain(input, self.weight):
        autocast = torch.is_autocast_enabled(input.device.type)
        return DeferredLogits(self, input, torch.get_autocast_dtype(input.device.type) if autocast else input.dtype)
    return type(self).forward(self, input)


def _loss_of(head: nn.Module, hidden: Tensor, request: _LossRequest) -> Tensor:
    weight, bias = head.weight, head.bias
    if request.columns is not None and request.columns != weight.shape[0]:
        weight = weight[: request.columns]
        bias = None if bias is None else bias[: request.columns]
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return linear_cross_entropy(hidden, weight, request.labels, bias=bias, **request.options)


def causal_lm_loss(
    logits: Any,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The causal language model loss of transformers; fused when the logits are deferred."""
    planned = logits.plan() if isinstance(logits, DeferredLogits) else None
    rows = None if planned is None else (labels if shift_labels is None else shift_labels)
    if rows is None or logits.shape[-1] != vocab_size or rows.numel() != logits.shape[:-1].numel():
        return _hf.native_loss()(
            real(logits), labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
        )
    if shift_labels is None:
        rows = F.pad(rows, (0, 1), value=ignore_index)[..., 1:]
    options, columns = planned
    hidden = logits.hidden
    rows = rows.reshape(hidden.shape[:-1]).to(hidden.device)
    options = {**options, "ignore_index": ignore_index, "num_items": num_items_in_batch}
    # Through __call__, so that whatever gathers, casts or adapts the weight does so.
    return logits.head(hidden, _request=_LossRequest(rows, options, columns))


class ModelSettings(NamedTuple):
    """Where `labels` stands among the positional arguments, and the loss function the instance had.

    `own_loss` is False for a model that only holds language models: it sees their outputs off. It has no
    `labels_index` where it does more with labels than hand them on. `inner` are the names, from this model, of the
    patched language models within it. `shifts` is False for a forward that has its cross entropy in itself: it knows
    no shift_labels.
    """

    labels_index: int | None
    loss_before: tuple[Any, ...]
    own_loss: bool = True
    inner: tuple[str, ...] = ()
    shifts: bool = True


# The attribute of a model that gives its logits when it is asked to skip them and has no labels. Trainers that compute
# the loss themselves ask so.
LENIENT = "_tigon_lenient"


def model_forward(self: nn.Module, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
    """Forward of a causal language model: its own, with the logits deferred when they are only needed for the loss.

    Models may hold another: what a caller sees is made by the outermost, which tells the inner ones that it runs.
    """
    settings = self._tigon.settings
    outer = self.__dict__.get("_tigon_outer")
    if outer is not None and outer[0] != this_thread():
        outer = None
    if outer is not None and skip_logits is None:
        skip_logits = outer[1]
    index, labels = settings.labels_index, None
    if index is not None:
        labels = args[index] if len(args) > index else kwargs.get("labels")
    if outer is None and settings.shifts and index is not None and labels is None and len(args) <= index:
        # Models compute the loss only when they see labels; with shift_labels they do not read them.
        labels = kwargs.get("shift_labels")
        if labels is not None:
            kwargs["labels"] = labels
    if outer is None and skip_logits and index is not None and labels is None and not self.__dict__.get(LENIENT):
        raise ValueError("forward: skip_logits=True: expected labels or shift_labels, got neither")
    defer = settings.own_loss and labels is not None and (self.training if skip_logits is None else skip_logits)
    head = self.get_output_embeddings() if defer else None
    defer = defer and can_defer(head)
    inner = _inner_models(self, settings.inner) if outer is None else []
    if not defer and not inner:
        return type(self).forward(self, *args, **kwargs)
    if defer:
        head._tigon_defer = this_thread()
    for each in inner:
        each._tigon_outer = (this_thread(), skip_logits)
    try:
        output = type(self).forward(self, *args, **kwargs)
    finally:
        if defer:
            head._tigon_defer = None
        for each in inner:
            each._tigon_outer = None
    return output if outer is not None else _without_deferred(output)


def _inner_models(model: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    """By name, since copies and replicas of a model have their own."""
    found = []
    for name in names:
        try:
            module = model.get_submodule(name)
        except AttributeError:
            # Something was put around it since; then it is the outermost of its own.
            continue
        if "_tigon" in module.__dict__:
            found.append(module)
    return found


def is_linear(head: Any) -> bool:
    """Whether a module computes what nn.Linear does: a subclass may scale, one made by sharding does not."""
    return (
        isinstance(head, nn.Linear)
        and type(head).forward is nn.Linear.forward
        and type(head).__call__ is nn.Linear.__call__
    )


def can_defer(head: Any) -> bool:
    """Whether the output layer is still the plain one that was patched: adapters or hooks may have come since."""
    return is_linear(head) and "_tigon" in head.__dict__ and not has_foreign_hooks(head)


# Whose hooks only bring the weight where it is needed: they are right around a loss as around logits.
_GATHERERS = ("torch.distributed.", "deepspeed.", "accelerate.")


def has_foreign_hooks(module: nn.Module) -> bool:
    """Whether a hook on `module` expects, or may change, what its own forward takes and gives."""
    stores = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    hooks = [getattr(hook, "func", hook) for store in stores for hook in store.values()]
    return any(not (getattr(hook, "__module__", None) or "").startswith(_GATHERERS) for hook in hooks)


def _without_deferred(output: Any) -> Any:
    """`output` with None for deferred logits, in nested outputs too; what holds none is returned as it is."""
    if isinstance(output, DeferredLogits):
        return None
    if type(output) in (tuple, list):
        items = [_without_deferred(item) for item in output]
        return output if _are_same(items, output) else type(output)(items)
    if not isinstance(output, dict):
        return output
    items = {key: _without_deferred(value) for key, value in output.items()}
    if _are_same(items.values(), output.values()):
        return output
    if type(output) is dict:
        return items
    # Rebuilt: setting a field of an output class to None keeps it as an item.
    return type(output)(**{key: value for key, value in items.items() if value is not None})


def _are_same(after: Iterable[Any], before: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(after, before, strict=True))


def labels_index(model: nn.Module) -> int | None:
    """Position of `labels` among the arguments of the model's forward; None when it has no such argument."""
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    return names.index("labels") if "labels" in names else None
