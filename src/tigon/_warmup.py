"""Compiling the kernels of a step before the first one."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .ops import _launch

# Seconds after which it says what it does.
_PATIENCE = 3.0

Call = tuple[Callable[..., Any], Mapping[str, Any]]


class Warmup(NamedTuple):
    """Kernels that this process had not launched before, and the seconds all took."""

    kernels: int
    seconds: float


def warmup(
    what: nn.Module | Iterable[Call],
    inputs: Mapping[str, Any] | None = None,
    *,
    shape: tuple[int, int] = (1, 512),
    device: torch.device | str | None = None,
) -> Warmup:
    """Compile, or load from Triton's cache, the kernels that a model or calls of operators need, before the first step.

        tigon.warmup(model, batch)                                    # or, with random tokens,
        tigon.warmup(model, shape=(8, 1024))
        x = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
        tigon.warmup([(tigon.rms_norm, {"x": x})])

    A model runs one step, forward and backward, with the memory that takes; its parameters, their gradients and the
    random state are afterwards what they were. All ranks of a sharded model call it together. What is chosen by trying
    (docs/compile.md) is tried here, so a CUDA graph can record afterwards. On a CPU nothing is compiled.

    Args:
        what: a model, patched before; or pairs of a public operator and its arguments, in which tensors stand for
            their shape, dtype and whether they require a gradient: those on the meta device take no memory here.
        inputs: what the model is called with; None for random tokens, which are the labels too.
        shape: batch and length of the random tokens. Kernels are compiled anew where a number of rows becomes a
            multiple of 16 or stops being one, and choices are made for each size: take the one that is trained with.
        device: where calls run; the current CUDA device by default.

    Returns:
        `(kernels, seconds)`: how many kernels were new, and the time of it all.

    Raises:
        ValueError: the model gives no loss for random tokens; give `inputs`.
    """
    place = _device_of(what, device)
    if place.type != "cuda":
        print(f"tigon: nothing to compile on {'a CPU' if place.type == 'cpu' else place.type}", file=sys.stderr)
        return Warmup(0, 0.0)
    with torch.cuda.device(place), torch.random.fork_rng([place]), _watched() as counted:
        if isinstance(what, nn.Module):
            _step(what, inputs, shape, place)
        else:
            for function, arguments in what:
                _call(function, arguments, place)
        torch.cuda.synchronize()
    return counted()


def _device_of(what: Any, device: torch.device | str | None) -> torch.device:
    if device is None and isinstance(what, nn.Module):
        device = next((p.device for p in what.parameters()), torch.device("cpu"))
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if found.type == "cuda" and found.index is None else found


@contextlib.contextmanager
def _watched() -> Iterator[Callable[[], Warmup]]:
    """Counts kernels, with a line once it takes long and another at the end; gives the count so far."""
    names: list[str] = []
    start, told = time.monotonic(), 0.0

    def counted() -> Warmup:
        return Warmup(len(names), time.monotonic() - start)

    def note(kernel: Any) -> None:
        nonlocal told
        names.append(getattr(kernel, "__name__", "a kernel"))
        passed = time.monotonic() - start
        if passed - told > _PATIENCE:
            told = passed
            print(
                f"tigon: compiled {len(names)} kernels, {passed:.0f} s, last {names[-1]}", file=sys.stderr, flush=True
            )

    _launch.listeners.append(note)
    try:
        yield counted
    finally:
        _launch.listeners.remove(note)
    if told:
        print(f"tigon: {len(names)} kernels ready after {counted().seconds:.0f} s", file=sys.stderr, flush=True)


def _step(model: nn.Module, inputs: Mapping[str, Any] | None, shape: tuple[int, int], device: torch.device) -> None:
    if inputs is None:
        table = getattr(model, "get_input_embeddings", lambda: None)()
        size = getattr(table, "num_embeddings", None)
        if size is None:
            raise ValueError("warmup: inputs: expected what the model is called with, as its tokens are not known")
        ids = torch.randint(0, size, shape, device=device)
        inputs = {"input_ids": ids, "labels": ids}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    output = model(**inputs)
    loss = getattr(output, "loss", None) if not isinstance(output, Mapping) else output.get("loss")
    if not isinstance(loss, Tensor):
        raise ValueError("warmup: inputs: expected such that the model returns a loss")
    gradients = [(p, p.grad) for p in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        if loss.requires_grad:
            loss.backward()
    finally:
        with torch.no_grad():
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for buffer, before in buffers:
                buffer.copy_(before)


def _call(function: Callable[..., Any], arguments: Mapping[str, Any], device: torch.device) -> None:
    def made(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point():
            return torch.randn(value.shape, device=device).to(value.dtype).requires_grad_(value.requires_grad)
        return torch.zeros(value.shape, dtype=value.dtype, device=device)

    outputs = function(**{name: made(value) for name, value in arguments.items()})
    tensors = [outputs] if isinstance(outputs, Tensor) else [t for t in outputs if isinstance(t, Tensor)]
    wanted = [t for t in tensors if t.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [torch.ones_like(t) for t in wanted])
