"""Cross entropy of a linear projection, without ever holding all of its logits.

    logits = (hidden @ weight.T + bias) * logit_scale
    loss   = cross_entropy(logits, labels, ...)                         (softcap, smoothing, z-loss as there)

Gradient, with dlogits that of cross_entropy times logit_scale:

    dhidden = dlogits @ weight,   dweight = dlogits.T @ hidden,   dbias = sum over rows of dlogits

Rows are taken in chunks: the logits of one chunk are computed, turned into dlogits in place, and multiplied into
the gradients before the next chunk overwrites them. For a scalar loss that happens in forward, up to the upstream
gradient, which backward multiplies in; for losses of rows backward computes the logits again. The dlogits of a mean
are those of a sum: times 1 / divisor the label's entries, all next to -1, would all have the same rounding error.
The plain loss reads its logits once (`_anchored.py`), or, on compute capability 9.0, takes the exponentials before they
reach memory (`_hopper_cross_entropy.py`). Logits of the first rows lie in the memory of dweight and what
`max_logits_bytes` adds to it, in blocks of classes, and each part of dweight is written by one product over logits that
are used up; where these are all rows, there is one chunk.

M rows (all leading axes), D hidden size, V classes. Saved for backward: the inputs, 8 bytes a row, and for a
scalar loss the gradients.   Source: Wijmans et al. 2024, arXiv:2411.09009, and Hsu et al. 2024, arXiv:2410.10989
(chunks with the gradient in forward).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _op
from ._check import (
    require,
    require_bytes,
    require_floating,
    require_number,
    require_one_of,
    require_same_device,
)
from ._linear_cross_entropy import (
    anchors,
    drive,
    drive_anchored,
    drive_sliced,
)
from ._op import (
    define,
    once_differentiable,
    op,
    runs_reference,
)
from ._predictions import Predictions
from ._projection import (
    CPU_LOGITS_BYTES,
    LOGITS_BYTES,
    fake_gradients,
    finished,
    is_foreign,
    matmul_dtype,
    multiply_,
    row_stride,
)
from .cross_entropy import (
    CrossEntropyOutput,
    Reduction,
    checked_labels,
    cross_entropy_reference,
    mean_divisors,
    reduce_rows,
    require_options,
    wide_dtype,
)

Memory = Literal["default", "min"]
MEMORIES = ("default", "min")


class LinearCrossEntropyOutput(NamedTuple):
    """A loss, the part of it that is the z-loss, None if not asked for, and the likeliest class of each row."""

    loss: Tensor
    z_loss: Tensor | None
    predictions: Tensor


# ---- reference ----


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    class_weight: Tensor | None = None,
    reduction: Reduction = "mean",
    num_items: float | Tensor | None = None,
    logit_scale: float | None = None,
    return_z_loss: bool = False,
    max_logits_bytes: int | None = None,
    memory: Memory = "default",
    token_weight: Tensor | None = None,
    skip_ignored: bool = False,
    main_grad: Tensor | None = None,
    return_predictions: bool = False,
) -> Tensor | CrossEntropyOutput | LinearCrossEntropyOutput:
    if main_grad is not None:
        weight = _AddInto.apply(weight, main_grad)
    # What an ignored row holds must not reach dweight, where 0 * inf is NaN.
    hidden = hidden.masked_fill((labels == ignore_index).unsqueeze(-1), 0.0)
    logits = F.linear(hidden, weight, bias)
    if logit_scale is not None:
        logits = logits.to(wide_dtype(logits.dtype)) * logit_scale
    predictions = None
    if return_predictions:
        z = logits.detach().to(wide_dtype(logits.dtype))
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        predictions = z.argmax(-1).masked_fill(labels == ignore_index, -1)
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "softcap": softcap,
        "class_weight": class_weight,
        "return_z_loss": return_z_loss,
    }
    if token_weight is None:
        out = cross_entropy_reference(logits, labels, reduction=reduction, num_items=num_items, **options)
        return _with_predictions(out, predictions)
    rows = cross_entropy_reference(logits, labels, reduction="none", **options)
    wide = wide_dtype(logits.dtype)
    w = token_weight.to(wide).masked_fill(labels == ignore_index, 0.0)
    divisor = mean_divisors(labels, None, ignore_index, num_items, wide)[0] if reduction == "mean" else 1.0
    weighted = [w * t if reduction == "none" else (w * t).sum() / divisor for t in _as_tuple(rows)]
    return _with_predictions(CrossEntropyOutput(*weighted) if return_z_loss else weighted[0], predictions)


class _AddInto(torch.autograd.Function):
    """The weight, whose gradient is added to another tensor."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, main_grad: Tensor) -> Tensor:
        ctx.main_grad = main_grad
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweight: Tensor) -> tuple[None, None]:
        ctx.main_grad.add_(dweight)
        return None, None


def _as_tuple(out: Tensor | CrossEntropyOutput) -> tuple[Tensor, ...]:
    return (out,) if isinstance(out, Tensor) else tuple(out)


def _with_predictions(
    out: Tensor | CrossEntropyOutput, predictions: Tensor | None
) -> Tensor | CrossEntropyOutput | LinearCrossEntropyOutput:
    if predictions is None:
        return out
    loss, z_loss = (out, None) if isinstance(out, Tensor) else out
    return LinearCrossEntropyOutput(loss, z_loss, predictions)


# ---- kernels ----

# Those of `_anchored.py`, `cross_entropy.py`, `_predictions.py` and `_projection.py`.


# ---- operators ----

# The same by tiles, where losses are all that is wanted or memory matters most.
MIN_LOGITS_BYTES = 64 << 20


def _gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *rest: Any,
    needs: Sequence[bool],
    settings: Sequence[Any],
    classes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """All chunks, then the gradients in their dtypes, for which the buffer of logits makes room; fills `classes`."""
    labels, class_weight, ce, _, stats, dce, _, factor = rest
    dtype, z_loss, max_logits_bytes, has_kernel, ignore_index, label_smoothing, softcap, scale, is_sliced = settings
    dbias = predictions = None
    if classes is not None:
        predictions = Predictions(classes, labels, dtype, ignore_index, softcap, scale, has_kernel)
    settings = settings[:-1]
    if is_sliced:
        return drive_sliced(hidden, weight, bias, *rest, needs, *settings, predictions=predictions)
    like = hidden.new_empty(0, dtype=dtype)
    if anchors(ce, dce, class_weight, needs, z_loss, label_smoothing, scale, has_kernel, like):
        inputs = hidden, weight, bias, labels, ce, stats, dce, factor, needs
        dhidden, dweight = drive_anchored(*inputs, dtype, max_logits_bytes, ignore_index, softcap, scale, predictions)
    else:
        dhidden, dweight, dbias = drive(hidden, weight, bias, *rest, needs, *settings, predictions=predictions)
    b = weight[:, 0] if bias is None else bias
    return dhidden, finished(dweight, weight, needs[1]), finished(dbias, b, needs[2])


# Arguments that both operators pass on as they are, in the order of `drive`.
_SETTINGS = (
    "bool[] needs, ScalarType dtype, float z_loss, SymInt max_logits_bytes, bool has_kernel,"
    " int ignore_index, float label_smoothing, float? softcap, float? scale, bool is_sliced"
)


def _row_buffers(hidden: Tensor, labels: Tensor, dtype: torch.dtype, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    ce = hidden.new_empty(labels.shape, dtype=wide_dtype(dtype))
    return ce, ce.new_empty(labels.shape if z_loss else (0,)), ce.new_empty((*labels.shape, 2))


def _class_buffer(labels: Tensor, has_predictions: bool) -> Tensor:
    return labels.new_empty(labels.shape if has_predictions else (0,), dtype=torch.int64)


def _fake_fwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    class_weight: Tensor | None,
    dce: Tensor | None,
    dsquares: Tensor | None,
    factor: Tensor | None,
    has_predictions: bool,
    needs: Sequence[bool],
    dtype: torch.dtype,
    z_loss: float,
    *settings: Any,
) -> tuple[Tensor, ...]:
    gradients = fake_gradients(hidden, weight, bias, needs if dce is not None else (False,) * 3)
    return *_row_buffers(hidden, labels, dtype, z_loss), *gradients, _class_buffer(labels, has_predictions)


@define(
    "linear_cross_entropy_fwd(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor? class_weight,"
    f" Tensor? dce, Tensor? dsquares, Tensor? factor, bool has_predictions, {_SETTINGS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=_fake_fwd,
)
def _fwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    class_weight: Tensor | None,
    dce: Tensor | None,
    dsquares: Tensor | None,
    factor: Tensor | None,
    has_predictions: bool,
    needs: Sequence[bool],
    dtype: torch.dtype,
    z_loss: float,
    *settings: Any,
) -> tuple[Tensor, ...]:
    rows, classes = _row_buffers(hidden, labels, dtype, z_loss), _class_buffer(labels, has_predictions)
    needs = needs if dce is not None else (False,) * 3
    inputs, settings = (hidden, weight, bias, labels, class_weight), (dtype, z_loss, *settings)
    asked = classes if has_predictions else None
    gradients = _gradients(*inputs, *rows, dce, dsquares, factor, needs=needs, settings=settings, classes=asked)
    return *rows, *gradients, classes


def _fake_bwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    class_weight: Tensor | None,
    stats: Tensor,
    dce: Tensor,
    dsquares: Tensor | None,
    needs: Sequence[bool],
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(hidden, weight, bias, needs)


@define(
    "linear_cross_entropy_bwd(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor? class_weight,"
    f" Tensor stats, Tensor dce, Tensor? dsquares, {_SETTINGS}) -> (Tensor, Tensor, Tensor)",
    fake=_fake_bwd,
)
def _bwd(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    class_weight: Tensor | None,
    stats: Tensor,
    dce: Tensor,
    dsquares: Tensor | None,
    needs: Sequence[bool],
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = hidden, weight, bias, labels, class_weight
    return _gradients(*inputs, None, None, stats, dce, dsquares, None, needs=needs, settings=settings)


# ---- autograd ----


class _RowLosses(torch.autograd.Function):
    """Losses of rows: any upstream gradient is exact, because backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        class_weight: Tensor | None,
        main_grad: Tensor | None,
        has_predictions: bool,
        settings: tuple[Any, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = hidden, weight, bias, labels, class_weight
        ce, squares, stats, *_, predictions = _fwd(*inputs, None, None, None, has_predictions, *settings)
        ctx.save_for_backward(*inputs, stats)
        ctx.settings, ctx.main_grad = settings, main_grad
        ctx.mark_non_differentiable(predictions)
        return ce, squares, predictions

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dce: Tensor, dsquares: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.settings[0]
        dsquares = dsquares if ctx.settings[2] else None
        if ctx.main_grad is None:
            gradients = _bwd(*ctx.saved_tensors, dce, dsquares, *ctx.settings)
        else:
            *inputs, stats = ctx.saved_tensors
            given = *inputs, None, None, stats, dce, dsquares, None, *ctx.settings[:-1]
            gradients, needs = drive_sliced(*given, main_grad=ctx.main_grad), (needs[0], False, needs[2])
        wanted = (g if is_needed else None for g, is_needed in zip(gradients, needs, strict=True))
        return *wanted, *[None] * 5


class _ScalarLoss(torch.autograd.Function):
    """A mean or a sum: forward computes the gradients for an upstream gradient of 1, backward multiplies."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        class_weight: Tensor | None,
        token_weight: Tensor | None,
        divisor: Tensor,
        squares_divisor: Tensor | None,
        returns_z_loss: bool,
        is_traced: bool,
        has_predictions: bool,
        settings: tuple[Any, ...],
    ) -> tuple[Tensor, ...]:
        inputs = hidden, weight, bias, labels, class_weight
        dsquares = divisor.new_ones(()) if token_weight is None else token_weight
        if squares_divisor is None:
            dce, factor = dsquares, divisor.reciprocal()
        else:
            dce, factor = dsquares * (squares_divisor / divisor), squares_divisor.reciprocal()
        made = _fwd(*inputs, dce, dsquares, factor, has_predictions, *settings)
        ce, squares, stats, *gradients, predictions = made
        ctx.settings, ctx.is_traced = settings, is_traced
        ctx.mark_non_differentiable(predictions)
        if is_traced:
            ctx.save_for_backward(*gradients, factor)
        else:
            # Not saved tensors: backward takes them out, so that nothing else holds them when it hands them over.
            ctx.gradients = gradients
            ctx.save_for_backward(*inputs, stats, dce, dsquares, factor)
            ctx.set_materialize_grads(False)
        divisors = divisor, divisor if squares_divisor is None else squares_divisor
        if token_weight is not None:
            ce, squares = ce * token_weight, squares * token_weight if settings[2] else squares
        out = reduce_rows(ce, squares if settings[2] else None, divisors, "sum", returns_z_loss)
        return *_as_tuple(out), predictions

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor | None, *rest: Tensor | None) -> tuple[Tensor | None, ...]:
        # The last is that of the predictions.
        dz_loss = rest[0] if len(rest) == 2 else None
        if ctx.is_traced:
            *gradients, factor = ctx.saved_tensors
            factors = dloss * factor, dloss, dloss  # type: ignore[operator]
            pairs = zip(gradients, factors, strict=True)
            gradients = [(g.to(f.dtype) * f).to(g.dtype) for g, f in pairs]
        elif ctx.gradients is not None and dloss is not None and dz_loss is None:
            gradients, ctx.gradients = ctx.gradients, None
            factors = dloss * ctx.saved_tensors[-1], dloss, dloss
            for gradient, gradient_factor in zip(gradients, factors, strict=True):
                multiply_(gradient, gradient_factor, ctx.settings[4])
        else:
            # The z-loss has an upstream gradient of its own, or this is not the first backward.
            *inputs, stats, dce, dsquares, factor = ctx.saved_tensors
            dloss = torch.zeros_like(factor) if dloss is None else dloss
            dsum = dloss if dz_loss is None else dloss + dz_loss
            gradients = _bwd(*inputs, stats, dloss * factor * dce, dsum * factor * dsquares, *ctx.settings)
        wanted = (g if is_needed else None for g, is_needed in zip(gradients, ctx.settings[0], strict=True))
        return *wanted, *[None] * 9


# ---- public ----


def _supports(hidden: Tensor, weight: Tensor | None = None, labels: Tensor | None = None, **_: Any) -> list[str]:
    return ["float64 is computed in plain torch"] if hidden.dtype == torch.float64 else []


def _of_valid_rows(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weight: Tensor | None,
    ignore_index: int,
    reduction: Reduction,
    **options: Any,
) -> Tensor | CrossEntropyOutput | LinearCrossEntropyOutput:
    """`linear_cross_entropy` of the rows that are not ignored, whose number the host waits for."""
    flat = labels.reshape(-1)
    index = (flat != ignore_index).nonzero().squeeze(-1)
    out = linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]).index_select(0, index),
        weight,
        flat[index],
        ignore_index=ignore_index,
        reduction=reduction,
        token_weight=None if token_weight is None else token_weight.reshape(-1)[index],
        **options,
    )

    def whole(rows: Tensor, ignored: int = 0) -> Tensor:
        return rows.new_full(flat.shape, ignored).index_copy(0, index, rows).view(labels.shape)

    predictions = None
    if isinstance(out, LinearCrossEntropyOutput):
        predictions = whole(out.predictions, -1)
        out = out.loss if out.z_loss is None else CrossEntropyOutput(out.loss, out.z_loss)
    if reduction == "none":
        out = whole(out) if isinstance(out, Tensor) else CrossEntropyOutput(*map(whole, out))
    return _with_predictions(out, predictions)


@op(reference=linear_cross_entropy_reference, supports=_supports)
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    class_weight: Tensor | None = None,
    reduction: Reduction = "mean",
    num_items: float | Tensor | None = None,
    logit_scale: float | None = None,
    return_z_loss: bool = False,
    max_logits_bytes: int | None = None,
    memory: Memory = "default",
    token_weight: Tensor | None = None,
    skip_ignored: bool = False,
    main_grad: Tensor | None = None,
    return_predictions: bool = False,
) -> Tensor | CrossEntropyOutput | LinearCrossEntropyOutput:
    """Cross entropy of `hidden @ weight.T` against `labels`, without storing the logits.

        loss = cross_entropy(F.linear(hidden, weight, bias) * logit_scale, labels, ...)     # the reference, in one line

    Args:
        hidden: `[..., D]`, floating point, any strides.
        weight: `[V, D]`, same dtype as `hidden`, or cast with it by autocast.
        labels: `[...]`, any integer dtype.
        bias: `[V]`, same dtype as `weight`, or None.
        ignore_index: rows with this label add exactly 0 to the loss and to all gradients, whatever they hold.
        label_smoothing: weight of the uniform distribution in the target, as in `F.cross_entropy`.
        z_loss: factor of the squared log-sum-exp of each row, which is added to the loss.
        softcap: logits become `softcap * tanh(logits / softcap)`, after `logit_scale`; None leaves them.
        class_weight: `[V]`, factor of each class as `weight` of `F.cross_entropy`; gets no gradient.
        reduction: "mean" divides the cross entropy by the summed weight of the labels that are not ignored and
            the z-loss by their number; "sum" and "none" divide by nothing.
        num_items: replaces both divisors of "mean", for a batch that is part of a larger one: a number or a tensor
            of one element on any device.
        logit_scale: factor of the logits; None leaves them.
        return_z_loss: return the z-loss too.
        max_logits_bytes: most bytes of logits that exist at once beside those in the memory of `dweight`, None for
            1.25 GiB on accelerators and 64 MiB on a CPU. Fewer chunks are faster; the result does not depend on it
            but for rounding.
        memory: "min" computes logits by tiles of rows and classes of at most 64 MiB (or `max_logits_bytes`), once for
            the loss and once more in backward: four products, and beside the gradients fp32 sums of that of up to
            4096 rows of `hidden`, or an eighth of all if that is more. Not with `label_smoothing` and `class_weight` at
            once.
        token_weight: `[...]`, factor of the cross entropy and the z-loss of each row; changes no divisor and gets no
            gradient. Not with `class_weight`.
        skip_ignored: compute only the rows that are not ignored. The host waits for their number, so not while a
            compiler or a CUDA graph records.
        main_grad: fp32 `[V, D]`, contiguous: backward adds the gradient of `weight` to it, tile by tile, and gives
            `weight` itself none. Hooks on the weight, those of a gradient bucket for example, do not run. With
            `memory="min"`, in eager mode.
        return_predictions: return the likeliest class of each row too, the first of equals; -1 where ignored. Token
            accuracy is `(out.predictions == labels)[labels != ignore_index].float().mean()`.

    Returns:
        Scalar fp32 (fp64 for fp64 inputs), or `[...]` for reduction "none"; with `return_z_loss` the named tuple
        `(loss, z_loss)`, whose loss contains the z-loss; with `return_predictions` the named tuple
        `(loss, z_loss, predictions)`: z-loss None if not asked for, predictions `[...]` int64 without a gradient. A
        divisor of 0 gives loss 0 and gradients 0.

    Raises:
        ValueError: shapes, dtypes, devices or options disagree, or one row of logits exceeds `max_logits_bytes`.
            A label that is neither a class nor `ignore_index` raises on a CPU; on a GPU the loss of its row and
            the gradients it enters are NaN, and TIGON_DEBUG=1 raises.

    Numerics: logits in the dtype of the product, or in fp32 where a kernel takes them further at once, statistics and
              losses in fp32; `dweight` and `dbias` add up over
              chunks in fp32 and are rounded to the dtype of their input, and once more where the upstream
              gradient is not 1. The sum of a 16-bit `dweight` of more than 64 MiB in fp32 is rounded after each of
              up to 8 chunks instead, of which 6 make twice the error of one product (32768 rows of a 128256 x 4096
              weight); raise `max_logits_bytes` for fewer, or take `memory="min"`.
    Memory:   `max_logits_bytes`, the gradients, fp32 sums of 64 MiB, and an fp32 copy of `dweight` while more than 8
              16-bit chunks add up.
              A mean or a sum takes three matrix products. A fourth, of logits computed again in backward, is the
              price of reduction "none", of fp16 (whose range needs the loss scale before rounding), of an
              upstream gradient for the returned z-loss, and of a second backward. Predictions take one more read of
              the logits, which then always reach memory.
    Choice:   between kernels for compute capability 9.0 and others by time, once for a size, waiting for the device;
              the first ones while a CUDA graph records and under `torch.use_deterministic_algorithms`.
    Differs from the reference: never in formula; order of summation over V and over rows, which may decide between
              predictions that are equal to rounding, and the prediction of a row with NaN. Tensor subclasses go to the
              reference itself, which stores all logits.
    Source: Wijmans et al. 2024, arXiv:2411.09009; Hsu et al. 2024, arXiv:2410.10989.
    """
    name = "linear_cross_entropy"
    require_floating(name, hidden=hidden, weight=weight, bias=bias)
    require(weight.dim() == 2, name, "weight", "two axes", f"shape {tuple(weight.shape)}")
    num_classes, width = weight.shape
    require(hidden.dim() >= 1, name, "hidden", "at least one axis", "a scalar")
    require(width >= 1, name, "weight", "at least one column", f"shape {tuple(weight.shape)}")
    require(hidden.shape[-1] == width, name, "hidden", f"last axis {width}", f"shape {tuple(hidden.shape)}")
    if bias is not None:
        require(bias.shape == (num_classes,), name, "bias", f"shape ({num_classes},)", tuple(bias.shape))
    rows = hidden.shape[:-1]
    require_options(
        name, labels, rows, num_classes, label_smoothing, softcap, class_weight, reduction, num_items, z_loss
    )
    if logit_scale is not None:
        require_number(name, "logit_scale", logit_scale)
    require_one_of(name, "memory", memory, MEMORIES)
    is_weighted = class_weight is not None and label_smoothing != 0
    require(memory == "default" or not is_weighted, name, "memory", "'default' with smoothing and class_weight", memory)
    require_same_device(name, hidden=hidden, weight=weight, labels=labels, bias=bias, class_weight=class_weight)
    dtype = matmul_dtype(name, "hidden", hidden.dtype, weight, bias)
    was_given = max_logits_bytes is not None
    if max_logits_bytes is None:
        max_logits_bytes = CPU_LOGITS_BYTES if hidden.device.type == "cpu" else LOGITS_BYTES
    require_bytes(name, "max_logits_bytes", max_logits_bytes)
    row_bytes = row_stride(num_classes, hidden.device) * dtype.itemsize
    expected = f"at least {row_bytes}, one row of logits"
    require(max_logits_bytes >= row_bytes, name, "max_logits_bytes", expected, max_logits_bytes)
    if token_weight is not None:
        require_floating(name, token_weight=token_weight)
        require_same_device(name, hidden=hidden, token_weight=token_weight)
        require(token_weight.shape == rows, name, "token_weight", f"shape {tuple(rows)}", tuple(token_weight.shape))
        require(not token_weight.requires_grad, name, "token_weight", "no requires_grad", "a tensor that has it")
        require(class_weight is None, name, "token_weight", "None with class_weight", "a tensor")
    if main_grad is not None:
        shape = tuple(weight.shape)
        is_fp32 = main_grad.dtype == torch.float32 and main_grad.is_contiguous()
        got = f"{main_grad.dtype} {tuple(main_grad.shape)} with strides {main_grad.stride()}"
        require(tuple(main_grad.shape) == shape and is_fp32, name, "main_grad", f"contiguous fp32 {shape}", got)
        require_same_device(name, hidden=hidden, main_grad=main_grad)
        require(memory == "min", name, "memory", "'min' with main_grad", memory)
        require(weight.requires_grad, name, "weight", "requires_grad with main_grad", weight.requires_grad)
        is_plain = not any(_op.is_traced(t) for t in (hidden, weight, labels))
        require(is_plain, name, "main_grad", "None while compiling and for tensor subclasses", "a tensor")
    labels = checked_labels(name, labels, num_classes, ignore_index)
    if skip_ignored:
        is_unseen = _op.is_traced(hidden) or (hidden.is_cuda and torch.cuda.is_current_stream_capturing())
        require(not is_unseen, name, "skip_ignored", "False while a compiler or a graph records", skip_ignored)
        return _of_valid_rows(
            hidden,
            weight,
            labels,
            token_weight,
            ignore_index,
            reduction,
            bias=bias,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            class_weight=class_weight,
            num_items=num_items,
            logit_scale=logit_scale,
            return_z_loss=return_z_loss,
            max_logits_bytes=max_logits_bytes,
            memory=memory,
            main_grad=main_grad,
            return_predictions=return_predictions,
        )

    has_kernel = not runs_reference(name, hidden, weight, labels, bias=bias)
    if not has_kernel and any(is_foreign(t) for t in (hidden, weight, labels, bias)):
        return linear_cross_entropy_reference(
            hidden,
            weight,
            labels,
            bias=bias,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            class_weight=class_weight,
            reduction=reduction,
            num_items=num_items,
            logit_scale=logit_scale,
            return_z_loss=return_z_loss,
            token_weight=token_weight,
            return_predictions=return_predictions,
        )
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias))
    scale = None if logit_scale is None else float(logit_scale)
    # Losses alone need no more logits at once than a tile has.
    is_sliced = memory == "min" or (has_kernel and not any(needs) and (class_weight is None or not label_smoothing))
    max_logits_bytes = min(max_logits_bytes, MIN_LOGITS_BYTES) if is_sliced and not was_given else max_logits_bytes
    settings = needs, dtype, z_loss, max_logits_bytes, has_kernel, ignore_index, label_smoothing, softcap, scale
    settings = *settings, is_sliced
    wide = wide_dtype(dtype)
    divisors = mean_divisors(labels, class_weight, ignore_index, num_items, wide) if reduction == "mean" else None
    inputs = hidden, weight, bias, labels, class_weight
    weights = None if token_weight is None else token_weight.to(wide).masked_fill(labels == ignore_index, 0.0)
    returns_z_loss = return_z_loss and z_loss != 0
    is_traced = _op.is_traced(hidden)
    # A traced graph asks for the gradient of every output, so that the one of the z-loss would be known late.
    is_late = is_sliced or reduction == "none" or dtype == torch.float16 or (returns_z_loss and is_traced)
    if any(needs) and not is_late:
        divisor, squares_divisor = divisors or (labels.new_ones((), dtype=wide), None)
        squares_divisor = None if squares_divisor is divisor else squares_divisor
        given = weights, divisor, squares_divisor, returns_z_loss, is_traced, return_predictions, settings
        loss, *losses, predictions = _ScalarLoss.apply(*inputs, *given)
        out = CrossEntropyOutput(loss, losses[0] if losses else torch.zeros_like(loss)) if return_z_loss else loss
        return _with_predictions(out, predictions if return_predictions else None)
    if any(needs):
        ce, squares, predictions = _RowLosses.apply(*inputs, main_grad, return_predictions, settings)
    else:
        ce, squares, *_, predictions = _fwd(*inputs, None, None, None, return_predictions, *settings)
    squares = squares if z_loss else None
    if weights is not None:
        ce, squares = ce * weights, None if squares is None else squares * weights
    out = reduce_rows(ce, squares, divisors, reduction, return_z_loss)
    return _with_predictions(out, predictions if return_predictions else None)
