"""Launching, and the choice of block sizes and warps as pure functions of shape, dtype and capability.

Triton binds the arguments of every call to the signature of the kernel, and finds out anew what it specialises on. On
an NVIDIA GPU that is done here once: a call whose arguments are like those of an earlier one, in all that Triton looks
at, goes straight to the kernel that was compiled for it. All others go through Triton, and so does every call while a
hook, the debug mode or a sanitizer wants to see it. With TIGON_DEBUG=1 all do, and one for which another kernel would
have been taken here raises.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _op
from ._triton import HAS_TRITON, INTERPRETED, triton

# What Triton specialises on, and how it calls a compiled kernel, was read in these versions and those between.
_KNOWN_VERSIONS = (3, 4), (3, 9)
# The call that is made here in place of Triton's own, where that stands in its source.
_CALL = (
    "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata,"
    " knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values())"
)
# More than any program needs; beyond it all are forgotten, so that sizes which never come again do not pile up.
_MAX_ENTRIES = 4096

# Looks at a call: the key of what Triton would look at, and the arguments as the launcher takes them.
_Reader = Callable[[tuple[Any, ...], tuple[Any, ...], int], tuple[tuple[Any, ...], tuple[Any, ...]]]

_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
# By kernel, names of the constants and types of the arguments; with the kernel, so that its id is not given again.
_readers: dict[tuple[Any, ...], tuple[_Reader | None, Any]] = {}
# One for each reader: keys of two must differ, also of two made at the same time by forward's and backward's thread.
_serials = itertools.count()
# By what a reader found: launcher, function, metadata, constants in their order, and the kernel, which must stay alive.
_compiled: dict[tuple[Any, ...], tuple[Any, Any, Any, tuple[Any, ...], Any]] = {}
# Called with each kernel that is remembered for a new kind of call: compiled, or loaded from Triton's cache.
listeners: list[Callable[[Any], None]] = []
# Whether kernels are remembered; None until the first launch on a GPU.
_remembers: bool | None = None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch `kernel` on the device of its first argument, a tensor or its descriptor; an empty grid does nothing."""
    if 0 in grid:
        return
    first = args[0]
    if not isinstance(first, Tensor):
        first = first.base
    if not first.is_cuda:
        kernel[grid](*args, **constants)
    elif (index := first.get_device()) == _current_device():
        _launch_on(index, kernel, grid, args, constants)
    else:
        with torch.cuda.device(index):
            _launch_on(index, kernel, grid, args, constants)


def _launch_on(
    index: int, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    """Launch on the current device, which is number `index`."""
    global _remembers
    if _remembers is None:
        _remembers = _is_known()
    if not _remembers:
        kernel[grid](*args, **constants)
        return
    kind = (id(kernel), *constants, *map(type, args))
    found = _readers.get(kind)
    if found is None:
        found = _readers[kind] = _reader(kernel, args, constants), kernel
    read = found[0]
    if read is None or _is_watched(kernel):
        kernel[grid](*args, **constants)
        return
    key, values = read(args, tuple(constants.values()), index)
    known = _compiled.get(key)
    if known is None or _op.DEBUG:
        _remember(key, kernel, kernel[grid](*args, **constants), constants, len(args))
        return
    run, function, metadata, tail, _ = known
    x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    run(x, y, z, _raw_stream(index), function, metadata, None, None, None, *values, *tail)


def _is_known() -> bool:
    """Whether this version of Triton binds, specialises and launches in the way that is followed here."""
    if not HAS_TRITON or INTERPRETED or torch.version.cuda is None or _raw_stream is None:
        return False
    version = tuple(int(n) for n in re.findall(r"\d+", triton.__version__)[:2])
    if not _KNOWN_VERSIONS[0] <= version <= _KNOWN_VERSIONS[1]:
        return False
    try:
        source = inspect.getsource(triton.runtime.jit.JITFunction.run)
    except (OSError, TypeError):
        return False
    return _CALL in " ".join(source.split())


def _is_watched(kernel: Any) -> bool:
    """True while something wants Triton's own call: a hook, or a mode that compiles other kernels."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    # Chains of hooks since Triton 3.5, which are there without a hook too.
    return bool(
        runtime.debug
        or (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
        or kernel.pre_run_hooks
        or getattr(runtime, "add_stages_inspection_hook", None) is not None
        or getattr(triton.knobs.compilation, "instrumentation_mode", "")
    )


def _width(n: int) -> int:
    """Which of the three integer types Triton passes `n` in."""
    return 0 if -(2**31) <= n < 2**31 else 1 if 2**63 <= n < 2**64 else 2


def _reader(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> _Reader | None:
    """What looks at calls of `kernel` with arguments of these types; None where only Triton can.

    Written out for the types, since it runs for every launch. A pointer is its dtype and whether it is aligned, an
    integer is 1, a multiple of 16, or another: such are the specialisations. Pointers are handed on as numbers, which
    saves the launcher a question to the driver for each.
    """
    if type(kernel).__name__ not in ("JITFunction", "GluonJITFunction"):
        return None
    is_constant = [p.is_constexpr for p in kernel.params]
    if is_constant != [False] * len(args) + [True] * (len(is_constant) - len(args)):
        return None
    names, setup, key, values, pointers, integers = [], [], [], [], [], []
    for i, value in enumerate(args):
        name = f"a{i}"
        names.append(name)
        values.append(name)
        if type(value) in (Tensor, torch.nn.Parameter):
            setup.append(f"p{i} = {name}.data_ptr()")
            key.append(f"{name}.dtype")
            values[-1] = f"p{i}"
            pointers.append(f"p{i}")
        elif type(value) is int:
            key.append(f"1 if {name} == 1 else {name} & 15 and 2")
            integers.append(name)
        elif type(value) not in (float, bool, type(None)):
            return None
    lines = [
        "def read(args, constants, index):",
        f"({', '.join(names)},) = args",
        *setup,
        f"key = ({', '.join((str(next(_serials)), 'index', 'constants', *key))},)",
    ]
    # Both are rare, so one test for all comes first.
    if pointers:
        rare = ", ".join(f"{p} & 15 and 1" for p in pointers)
        lines.append(f"if ({' | '.join(pointers)}) & 15: key += ('unaligned', {rare})")
    if integers:
        rare = ", ".join(f"width({n})" for n in integers)
        lines.append(f"if ({' | '.join(integers)}) >> 31: key += ('wide', {rare})")
    lines.append(f"return key, ({', '.join(values)},)")
    scope: dict[str, Any] = {"width": _width}
    exec("\n    ".join(lines), scope)
    return scope["read"]


def _remember(key: tuple[Any, ...], kernel: Any, compiled: Any, constants: dict[str, Any], num_args: int) -> None:
    """Take what Triton ran for a call as the kernel for all calls with its key."""
    known = _compiled.get(key)
    if known is not None:
        if known[-1] is not compiled:
            raise RuntimeError(f"tigon: {kernel.arg_names} was compiled twice for one key: {key}")
        return
    # Later versions may hand out one that is still being compiled.
    if type(compiled) is not triton.compiler.CompiledKernel:
        return
    if len(_compiled) >= _MAX_ENTRIES:
        _compiled.clear()
    tail = tuple(constants.get(p.name, p.default) for p in kernel.params[num_args:])
    _compiled[key] = compiled.run, compiled.function, compiled.packed_metadata, tail, compiled
    for listener in listeners:
        listener(kernel)


def as_rows(x: Tensor) -> Tensor:
    """`x` as `[M, N]` with unit column stride; a view where the strides allow it, else a copy."""
    if x.dim() == 2 and x.stride()[1] == 1:
        return x
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def rows_of(x: Tensor) -> tuple[Tensor, int, int]:
    """What `as_rows` gives, number of rows, elements between them; `x` itself where it is contiguous, of any axes."""
    if x.is_contiguous() and x.numel():
        num_cols = x.shape[-1]
        return x, x.numel() // num_cols, num_cols
    rows = as_rows(x)
    return rows, rows.shape[0], rows.stride(0)


def column_groups(x: Tensor, group_size: int | None) -> tuple[int, int]:
    """Number of groups in a row of `x`, and columns of each; None for one group."""
    num_cols = x.shape[-1]
    return (1, num_cols) if group_size is None else (num_cols // group_size, group_size)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


# What loads in flight may take of a program's shared memory: the 99 KiB of compute capability 8.6, 8.9 and 12.0, less
# what reductions need.
_MAX_STAGED_BYTES = 96 * 1024


def pipeline_stages(bytes_a_tile: int) -> int:
    """Depth of a ring of loads, which is the tiles in flight and the one computed on."""
    return 3 if 2 * bytes_a_tile <= _MAX_STAGED_BYTES else 2
