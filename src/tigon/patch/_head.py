"""The loss of a language model without its logits.

In training with labels the output layer returns `DeferredLogits`: its input, and the elementwise operations the
model applies afterwards. The loss function computes the fused loss from it. Any operation that is not known
materialises the real logits, so the model's own forward stays what runs, whatever it does.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import itertools
import types
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops._check import require, require_one_of
from ..ops._op import is_traced
from ..ops._projection import row_stride
from ..ops.linear_cross_entropy import MEMORIES, linear_cross_entropy
from . import _dispatch, _hf
from ._deferred import WRAPPERS, Deferred, real
from ._forms import _is_plain
from ._swap import this_thread, watched_by_all


class _Call(NamedTuple):
    """What a call of the output layer depends on besides its arguments, as it was then."""

    grad: bool
    # None where it was off, else the dtype.
    autocast: torch.dtype | None
    # Of the parameters: whether they get gradients, and their version.
    trained: tuple[bool, ...]
    versions: tuple[int, ...]

    @classmethod
    def now(cls, head: nn.Module, device: torch.device) -> _Call:
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        parameters = [head.weight] if head.bias is None else [head.weight, head.bias]
        trained = tuple(parameter.requires_grad for parameter in parameters)
        # Hooks that gather a weight write it anew for every call.
        versions = () if head._forward_pre_hooks else tuple(_version(parameter) for parameter in parameters)
        return cls(torch.is_grad_enabled(), autocast, trained, versions)


def _version(tensor: Tensor) -> int:
    return 0 if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


class _LogitsRequest:
    """Asks the output layer for real logits, as `call` would have made them, while its flag is up.

    Not a pytree, so that wrappers do not cast what is in it.
    """

    def __init__(self, call: _Call) -> None:
        self.call = call


class _LossRequest(_LogitsRequest):
    """What the output layer is to compute instead of logits."""

    def __init__(self, call: _Call, labels: Tensor, options: dict[str, Any], columns: int | None) -> None:
        super().__init__(call)
        self.labels, self.options, self.columns = labels, options, columns


class DeferredLogits(Deferred):
    """Logits that are not computed yet.

    Scalar factors, one tanh, casts to floating dtypes, `contiguous`, slices of rows, `[..., :n]` and views as a matrix
    are recorded, and the mean cross entropy of a matrix is fused; everything else runs on the real logits.
    """

    def __init__(self, head: nn.Module, hidden: Tensor, call: _Call) -> None:
        self.head, self.hidden, self.call, self.version = head, hidden, call, _version(hidden)
        self.dtype = call.autocast or hidden.dtype
        self.shape = torch.Size((*hidden.shape[:-1], head.out_features))
        self.device = hidden.device
        # How the logits lie in memory, which says what of them is a view.
        self.strides = _dense(self.shape)
        self.operations: tuple[tuple[str, Any], ...] = ()
        self.formed: Tensor | None = None
        # Logits that these are a view of, and how: an edit in place of the ones is seen in the others.
        self.view_of: tuple[DeferredLogits, Callable[[Tensor], Tensor]] | None = None

    @property
    def real(self) -> Tensor | None:
        """The real logits, where they, or what they are a view of, were formed."""
        if self.formed is None and self.view_of is not None and self.view_of[0].real is not None:
            base, view = self.view_of
            self.formed = self._viewed(view, base.real)  # type: ignore[arg-type]
        return self.formed

    def _viewed(self, view: Callable[[Tensor], Tensor], base: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.call.grad):
            return view(base)

    def _with(self, hidden: Tensor, columns: int, view: Callable[[Tensor], Tensor] | None = None) -> DeferredLogits:
        """These logits of other hidden states, in the same memory if `view` says where."""
        # What is done without gradients has none, whatever it is done to.
        call = self.call if torch.is_grad_enabled() else self.call._replace(grad=False)
        after = DeferredLogits(self.head, hidden, call)
        after.operations, after.dtype, after.version = self.operations, self.dtype, self._checked_version(hidden)
        after.shape = torch.Size((*hidden.shape[:-1], columns))
        after.strides = _dense(after.shape)
        after.view_of = None if view is None else (self, view)
        return after

    def _checked_version(self, hidden: Tensor) -> int:
        """The version of `hidden`, which was made of what the output layer was given."""
        if _version(self.hidden) != self.version:
            raise RuntimeError(
                "tigon: the hidden states were modified by an inplace operation after the output layer was called on"
                " them, and its logits are not computed yet; modify a copy, or patch with skip=['linear_cross_entropy']"
            )
        return _version(hidden)

    def product(self, *request: Any) -> Any:
        """The logits, or what the given labels, options and columns ask for, from the output layer itself.

        Through its __call__, so that whatever gathers, casts or adapts the weight does so.
        """
        self._checked_version(self.hidden)
        grad = self.call.grad and (torch.is_grad_enabled() or not request)
        made = _LossRequest(self.call, *request) if request else _LogitsRequest(self.call)
        if grad == torch.is_grad_enabled():
            return self.head(self.hidden, _request=made)
        with torch.set_grad_enabled(grad):
            return self.head(self.hidden, _request=made)

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
            self.formed = self._viewed(view, base.materialise())
            return self.formed
        logits = self.product()
        with torch.set_grad_enabled(self.call.grad):
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
        # Of what has gaps it is a copy, which sees no later edit.
        has_gaps = not self._is_matrix() or self.strides[:-1] != _dense(self.shape)[:-1]
        return self._with(self.hidden, self.shape[-1]) if has_gaps else self

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
                after.strides = self.strides
                return after
            return self.materialise()[index]
        # Rows of the logits are the logits of these rows.
        after = self._with(self.hidden[axes], self.shape[-1], lambda logits: logits[index])
        after.strides = tuple(n * (axis.step or 1) for n, axis in zip(self.strides, axes, strict=True))
        return after

    def view(self, *shape: Any) -> Any:
        return self._as_matrix("view", shape)

    def reshape(self, *shape: Any) -> Any:
        return self._as_matrix("reshape", shape)

    def _as_matrix(self, name: str, shape: tuple[Any, ...]) -> Any:
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        rows = self.shape[:-1].numel()
        if self.real is None and sizes in ((-1, self.shape[-1]), (rows, self.shape[-1]), (rows, -1)):
            hidden = self.hidden.reshape(rows, self.hidden.shape[-1])
            if name == "reshape" and not self._is_matrix():
                # Then it copies, and sees no later edit.
                return self._with(hidden, self.shape[-1])
            after = self._with(hidden, self.shape[-1], lambda logits: getattr(logits, name)(*shape))
            after.strides = (*self.strides[-2:-1], 1) if self.ndim > 1 else (self.shape[-1], 1)
            return after
        return getattr(self.materialise(), name)(*shape)

    def _is_matrix(self) -> bool:
        """Whether the rows are evenly spaced in memory."""
        axes = [(n, stride) for n, stride in zip(self.shape[:-1], self.strides[:-1], strict=True) if n != 1]
        return all(outer[1] == n * stride for outer, (n, stride) in itertools.pairwise(axes))

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
    loss = input.product(target, {**planned[0], "ignore_index": ignore_index}, planned[1])
    # It rounds as the logits do, unless autocast says otherwise.
    return loss if torch.is_autocast_enabled(input.device.type) else loss.to(input.dtype)


_OPERATIONS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "mul": lambda logits, value: logits * value,
    "div": lambda logits, value: logits / value,
    "tanh": lambda logits, value: torch.tanh(logits),
    "to": lambda logits, value: logits.to(value),
    "slice": lambda logits, value: logits[..., :value],
}


def _dense(shape: Iterable[int]) -> tuple[int, ...]:
    """Strides of a tensor without gaps."""
    strides = [1]
    for size in (*shape,)[:0:-1]:
        strides.append(strides[-1] * size)
    return tuple(strides[::-1])


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and value != 0


# ---- how the loss computes ----

# Arguments of the fused loss that change how it is computed and not what.
LOSS_OPTIONS = ("memory", "max_logits_bytes", "skip_ignored")


class HeadSettings(NamedTuple):
    """With the output layer, since every fused loss is computed in a call of it."""

    loss_options: dict[str, Any]


def checked_loss_options(function: str, options: Any) -> dict[str, Any] | None:
    """A copy of the options; ValueError where the fused loss would not take them."""
    if options is None:
        return None
    require(isinstance(options, Mapping), function, "loss_options", "a mapping or None", repr(options))
    for name, value in options.items():
        require_one_of(function, "loss_options", name, LOSS_OPTIONS)
        argument = f"loss_options[{name!r}]"
        if name == "memory":
            require_one_of(function, argument, value, MEMORIES)
        elif name == "skip_ignored":
            require(isinstance(value, bool), function, argument, "True or False", repr(value))
        elif value is not None:
            is_int = isinstance(value, int) and not isinstance(value, bool)
            require(is_int and value > 0, function, argument, "a positive int or None", repr(value))
    return dict(options)


def require_a_row(function: str, head: nn.Module, options: dict[str, Any]) -> None:
    """Raise where the logits of one row of `head` exceed `max_logits_bytes`."""
    given = options.get("max_logits_bytes")
    if given is not None:
        row_bytes = row_stride(head.out_features, head.weight.device) * head.weight.dtype.itemsize
        expected = f"at least {row_bytes}, one row of logits"
        require(given >= row_bytes, function, "loss_options['max_logits_bytes']", expected, given)


def loss_options_of(head: nn.Module) -> dict[str, Any]:
    """What is set, also on a pickle of a patched output layer, whose forward is native again."""
    mark = head.__dict__.get("_tigon")
    return mark.settings.loss_options if mark is not None and isinstance(mark.settings, HeadSettings) else {}


def set_loss_options(head: nn.Module, options: dict[str, Any]) -> None:
    head.__dict__["_tigon"] = head.__dict__["_tigon"]._replace(settings=HeadSettings(dict(options)))


def _loss_options_now(head: nn.Module, hidden: Tensor) -> dict[str, Any]:
    options = head._tigon.settings.loss_options
    if not options.get("skip_ignored"):
        return options
    # What records a graph cannot wait for the number of rows, and the operator would refuse.
    is_recorded = is_traced(hidden) or (hidden.is_cuda and torch.cuda.is_current_stream_capturing())
    return {**options, "skip_ignored": False} if is_recorded else options


# ---- the three functions that are put on a model ----


def head_forward(self: nn.Module, input: Tensor, _request: Any = None) -> Any:
    """Forward of the output layer."""
    if isinstance(_request, _LogitsRequest):
        now = _Call.now(self, input.device)
        if now._replace(grad=_request.call.grad) == _request.call:
            return _requested(self, input, _request)
        with _as_called(self, input.device, now, _request.call):
            return _requested(self, input, _request)
    # A weight that is not whole here (tensor parallel) or not plain (quantised) keeps its own forward.
    if self.__dict__.get("_tigon_defer") == this_thread() and _is_plain(input, self.weight):
        return DeferredLogits(self, input, _Call.now(self, input.device))
    return type(self).forward(self, input)


def _requested(head: nn.Module, hidden: Tensor, request: _LogitsRequest) -> Tensor:
    return _loss_of(head, hidden, request) if isinstance(request, _LossRequest) else type(head).forward(head, hidden)


@contextlib.contextmanager
def _as_called(head: nn.Module, device: torch.device, now: _Call, then: _Call) -> Iterator[None]:
    """What was set otherwise when the output layer was called is set so again."""
    if now.versions != then.versions:
        raise RuntimeError(
            "tigon: the weight of the output layer was modified by an inplace operation after the call whose logits are"
            " not computed yet; modify it before or after the forward, or patch with skip=['linear_cross_entropy']"
        )
    parameters = [head.weight] if head.bias is None else [head.weight, head.bias]
    dtype = then.autocast or torch.get_autocast_dtype(device.type)
    try:
        for parameter, trained in zip(parameters, then.trained, strict=True):
            parameter.requires_grad_(trained)
        with torch.autocast(device.type, dtype=dtype, enabled=then.autocast is not None):
            yield
    finally:
        for parameter, trained in zip(parameters, now.trained, strict=True):
            parameter.requires_grad_(trained)


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
    options = {**request.options, **_loss_options_now(head, hidden)}
    return linear_cross_entropy(hidden, weight, request.labels, bias=bias, **options)


def rows_of_labels(
    logits: Any, labels: Tensor | None, vocab_size: int, ignore_index: int, shift_labels: Tensor | None
) -> Tensor | None:
    """The label of each row of `logits`, which is the next token; None for a call that only transformers knows."""
    rows = labels if shift_labels is None else shift_labels
    if rows is None or logits.shape[-1] != vocab_size or rows.numel() != logits.shape[:-1].numel():
        return None
    if shift_labels is None:
        rows = F.pad(rows, (0, 1), value=ignore_index)[..., 1:]
    return rows.reshape(logits.shape[:-1]).to(logits.device)


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
    rows = None if planned is None else rows_of_labels(logits, labels, vocab_size, ignore_index, shift_labels)
    if planned is None or rows is None:
        return _hf.native_loss()(
            real(logits), labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
        )
    options, columns = planned
    return logits.product(rows, {**options, "ignore_index": ignore_index, "num_items": num_items_in_batch}, columns)


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
    defer = defer and can_defer(head) and _sees_what_is_done(self)
    inner = _inner_models(self, settings.inner) if outer is None else []
    # A call from within a call of the same model, such as from a hook, is one of its own.
    running = self.__dict__.get("_tigon_running") or ()
    heads = [each for each in running if _of_this_thread(each, "_tigon_defer") is not None]
    if not defer and not inner and not heads:
        return type(self).forward(self, *args, **kwargs)
    if defer and not any(each is head for each in heads):
        heads.append(head)
    before = [_of_this_thread(each, "_tigon_defer") for each in heads]
    inner_before = [_of_this_thread(each, "_tigon_outer") for each in inner]
    for each in heads:
        each._tigon_defer = this_thread() if defer and each is head else None
    for each in inner:
        each._tigon_outer = (this_thread(), skip_logits)
    if defer:
        # In a tuple, since a module would become a child.
        self._tigon_running = (head,)
    try:
        output = type(self).forward(self, *args, **kwargs)
    finally:
        for each, value in zip(heads, before, strict=True):
            each._tigon_defer = value
        for each, value in zip(inner, inner_before, strict=True):
            each._tigon_outer = value
        if defer:
            self._tigon_running = running
    return output if outer is not None else _without_deferred(output)


def _of_this_thread(module: nn.Module, flag: str) -> Any:
    """The flag, to be put back, if this thread has set it; that of another would outlast its call."""
    value = module.__dict__.get(flag)
    return value if (value[0] if isinstance(value, tuple) else value) == this_thread() else None


def _sees_what_is_done(model: nn.Module) -> bool:
    """Whether the loss function in use, which may have been set after patching, dispatches what it does."""
    loss = model.__dict__.get("_loss_function", causal_lm_loss)
    if loss is causal_lm_loss:
        return True
    # A compiler would break its graph at the search.
    return not torch.compiler.is_compiling() and not _dispatch.passed_by(loss)


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


def has_foreign_hooks(module: nn.Module) -> bool:
    """Whether a hook on `module`, or on all modules, expects, or may change, what its own forward takes and gives."""
    if watched_by_all():
        return True
    stores = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    hooks = [getattr(hook, "func", hook) for store in stores for hook in store.values()]
    # Those of wrappers only bring the weight where it is needed: they are right around a loss as around logits.
    return any(not (getattr(hook, "__module__", None) or "").startswith(WRAPPERS) for hook in hooks)


def _without_deferred(output: Any) -> Any:
    """`output` with None for deferred logits, in nested outputs too; what holds none is returned as it is."""
    if isinstance(output, DeferredLogits):
        return None
    if isinstance(output, (tuple, list)):
        items = [_without_deferred(item) for item in output]
        if _are_same(items, output):
            return output
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    if isinstance(output, dict):
        return _dict_without_deferred(output)
    if dataclasses.is_dataclass(output) or isinstance(output, (types.SimpleNamespace, UserDict)):
        if isinstance(output, type):
            return output
        state = {key: _without_deferred(value) for key, value in _state_of(output)}
        if _are_same(state.values(), (value for _, value in _state_of(output))):
            return output
        after = copy.copy(output)
        for key, value in state.items():
            # A frozen one has no other way.
            object.__setattr__(after, key, value)
        return after
    return output


def _state_of(output: Any) -> list[tuple[str, Any]]:
    if dataclasses.is_dataclass(output):
        return [(field.name, getattr(output, field.name)) for field in dataclasses.fields(output)]
    return list(vars(output).items())


def _dict_without_deferred(output: dict[Any, Any]) -> dict[Any, Any]:
    items = {key: _without_deferred(value) for key, value in output.items()}
    if _are_same(items.values(), output.values()):
        return output
    if type(output) is dict:
        return items
    if not dataclasses.is_dataclass(output):
        after = copy.copy(output)
        after.update(items)
        return after
    # Rebuilt: setting a field of an output class to None keeps it as an item.
    return type(output)(**{key: value for key, value in items.items() if value is not None})


def _are_same(after: Iterable[Any], before: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(after, before, strict=True))


def labels_index(model: nn.Module) -> int | None:
    """Position of `labels` among the arguments of the model's forward; None when it has no such argument."""
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    return names.index("labels") if "labels" in names else None
