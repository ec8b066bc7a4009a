"""Kernels that are remembered: for any two calls with one key Triton must have compiled one kernel.

Nothing is launched. Triton's own binder says what it specialises on, and a stand-in of what it compiles records how it
would have been called.
"""

from __future__ import annotations

import inspect
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tigon.ops import _launch, _op

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime import jit  # noqa: E402


def _fn(x_ptr, y_ptr, stride, num_cols, eps, flag, HAS_Y: tl.constexpr, BLOCK: tl.constexpr):
    pass


def _late(x_ptr, HAS_Y: tl.constexpr, y_ptr):
    pass


class JITFunction(jit.JITFunction):
    """Binds as Triton does and makes the call that it would make, of a kernel that is not compiled."""

    def __init__(self, fn: Any) -> None:
        super().__init__(fn)
        self.backend = make_backend(GPUTarget("cuda", 90, 32))
        self.bind = jit.create_function_from_signature(self.signature, self.params, self.backend)
        self.kernels: dict[str, Any] = {}
        self.bound = 0

    def run(self, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> Any:
        self.bound += 1
        bound_args, specialization, options = self.bind(*args, **kwargs)
        device = _launch._current_device()
        kernel = self.kernels.setdefault(f"{device} {specialization} {sorted(options.items())}", _Compiled())
        x, y, z = (*grid, 1, 1)[:3]
        kernel.run(x, y, z, _launch._raw_stream(device), "function", "metadata", None, None, None, *bound_args.values())
        return kernel


class _Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def run(self, *args: Any) -> None:
        self.calls.append(args)


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with a GPU, of which device and stream can be set."""
    state = SimpleNamespace(device=0, stream=7)
    monkeypatch.setattr(_launch, "_remembers", True)
    monkeypatch.setattr(_launch, "_current_device", lambda: state.device)
    monkeypatch.setattr(_launch, "_raw_stream", lambda index: state.stream + 100 * index)
    monkeypatch.setattr(_launch, "_readers", {})
    monkeypatch.setattr(_launch, "_compiled", {})
    monkeypatch.setattr(triton.compiler, "CompiledKernel", _Compiled)
    return state


def _call(kernel: JITFunction, *args: Any, grid: tuple[int, ...] = (3,), **constants: Any) -> Any:
    """The compiled kernel that a launch goes to."""
    before = {id(k): len(k.calls) for k in kernel.kernels.values()}
    _launch._launch_on(_launch._current_device(), kernel, grid, args, constants)
    (called,) = (k for k in kernel.kernels.values() if len(k.calls) != before.get(id(k), 0))
    return called


def _numbers(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of a launcher, of which it makes numbers of tensors."""
    return tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args)


INTEGERS = (0, 1, 2, 15, 16, 17, 33, -1, -16, 2**31 - 16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63, 2**64 - 1)


def _arguments() -> list[tuple[Any, ...]]:
    """Calls that differ in one argument each, and some in two."""
    x = torch.zeros(64)
    pointers = (x, x[1:], x[2:], x[4:], x[:0], x.half(), x.half()[1:], x.long(), torch.nn.Parameter(x))
    base = (x, x, 64, 100, 1e-6, True)
    calls = [base]
    calls += [(p, *base[1:]) for p in pointers] + [(x, p, *base[2:]) for p in (*pointers, None)]
    calls += [(*base[:2], n, *base[3:]) for n in INTEGERS] + [(*base[:3], n, *base[4:]) for n in INTEGERS]
    calls += [(*base[:2], n, m, *base[4:]) for n, m in itertools.product(INTEGERS[:6], INTEGERS[9:12])]
    calls += [(*base[:4], value, True) for value in (0.0, 1.0, 16.0, 1, 16, 2, True, None)]
    calls += [(*base[:5], value) for value in (False, 1, 0, 2, 1.0, None)]
    return calls


def test_every_call_gets_the_kernel_that_triton_would_take(state: SimpleNamespace) -> None:
    kernel, oracle = JITFunction(_fn), JITFunction(_fn)
    for _ in range(2):
        for args in _arguments():
            constants = {"HAS_Y": args[1] is not None, "BLOCK": 64, "num_warps": 4}
            called = _call(kernel, *args, **constants)
            expected = oracle[(3,)](*args, **constants)
            assert list(kernel.kernels.values()).index(called) == list(oracle.kernels.values()).index(expected), args
            assert _numbers(called.calls[-1]) == _numbers(expected.calls[-1]), args
    # The second time Triton was not asked once, and so it was not for most of the first.
    assert kernel.bound < len(_arguments()) == oracle.bound / 2


@pytest.mark.parametrize(
    "change",
    [{"BLOCK": 128}, {"num_warps": 8}, {"num_stages": 3}, {"HAS_Y": False}],
    ids=lambda change: next(iter(change)),
)
def test_constants_and_options_are_told_apart(state: SimpleNamespace, change: dict[str, Any]) -> None:
    kernel, x = JITFunction(_fn), torch.zeros(64)
    constants = {"HAS_Y": True, "BLOCK": 64, "num_warps": 4}
    args = (x, x, 64, 64, 0.5, True)
    first, second = _call(kernel, *args, **constants), _call(kernel, *args, **{**constants, **change})
    assert first is not second
    assert first is _call(kernel, *args, **constants)
    assert second is _call(kernel, *args, **{**constants, **change})
    assert kernel.bound == 2
    # The same values under other names.
    assert _call(kernel, *args, **constants, num_stages=8) is not _call(kernel, *args, **constants, num_ctas=8)
    # Constants in another order are the same constants.
    assert second is _call(kernel, *args, **dict(reversed({**constants, **change}.items())))
    assert first.calls[-1][-2:] == (True, 64)


def test_each_device_has_its_own_kernels_and_stream(state: SimpleNamespace) -> None:
    kernel, x = JITFunction(_fn), torch.zeros(64)
    args, constants = (x, x, 64, 64, 0.5, True), {"HAS_Y": True, "BLOCK": 64}
    first = _call(kernel, *args, **constants)
    state.device = 1
    second = _call(kernel, *args, **constants)
    assert first is not second
    state.stream = 9
    assert _call(kernel, *args, **constants) is second
    assert [call[3] for call in second.calls] == [107, 109]
    state.device = 0
    assert _call(kernel, *args, **constants) is first
    assert [call[3] for call in first.calls] == [7, 9]
    assert kernel.bound == 2


@pytest.mark.parametrize("grid", [(3,), (3, 4), (3, 4, 5)], ids=len)
def test_the_grid_is_of_the_call(state: SimpleNamespace, grid: tuple[int, ...]) -> None:
    kernel, x = JITFunction(_fn), torch.zeros(64)
    args, constants = (x, None, 1, 64, 0.5, True), {"HAS_Y": False, "BLOCK": 64}
    for scale in (1, 2):
        called = _call(kernel, *args, grid=tuple(scale * n for n in grid), **constants)
    assert [call[:3] for call in called.calls] == [
        (*grid, 1, 1)[:3],
        tuple(2 * n for n in grid) + (1,) * (3 - len(grid)),
    ]
    assert kernel.bound == 1


def test_a_hook_and_a_mode_send_every_call_to_triton(state: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = JITFunction(_fn), torch.zeros(64)
    args, constants = (x, x, 64, 64, 0.5, True), {"HAS_Y": True, "BLOCK": 64}
    _call(kernel, *args, **constants)

    def bound() -> int:
        before = kernel.bound
        _call(kernel, *args, **constants)
        return kernel.bound - before

    assert bound() == 0
    runtime = triton.knobs.runtime
    for name, value in {
        "debug": True,
        "launch_enter_hook": lambda _: None,
        "launch_exit_hook": lambda _: None,
        "add_stages_inspection_hook": lambda *_: ("", ""),
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(runtime, name, value, raising=False)
            assert bound() == 1, name
        assert bound() == 0, name
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.compilation, "instrumentation_mode", "fpsan", raising=False)
        assert bound() == 1
    chain = runtime.launch_enter_hook
    if hasattr(chain, "add"):
        hook = print
        chain.add(hook)
        assert bound() == 1
        chain.remove(hook)
    kernel.add_pre_run_hook(lambda *_, **__: None)
    assert bound() == 1
    kernel.pre_run_hooks.clear()
    assert bound() == 0


def test_what_is_not_understood_goes_to_triton(state: SimpleNamespace) -> None:
    x = torch.zeros(64)
    kernel = JITFunction(_fn)
    for _ in range(2):
        # A tuple, a tensor of another class, and an integer that is not an int.
        _call(kernel, x, (x, x), 64, 64, 0.5, True, HAS_Y=True, BLOCK=64)
        _call(kernel, x, SimpleNamespace(dtype=x.dtype, data_ptr=x.data_ptr), 64, 64, 0.5, True, HAS_Y=True, BLOCK=64)
    assert kernel.bound == 4
    # An argument by name that is no constant, and a constant by position.
    late = JITFunction(_late)
    for _ in range(2):
        _call(late, x, HAS_Y=True, y_ptr=x)
        _call(kernel, x, x, 64, 64, 0.5, True, True, BLOCK=64)
    assert late.bound == 2
    assert kernel.bound == 6
    # Nothing but a compiled kernel is remembered.
    kernel.kernels["0 "] = None
    late.run = lambda *_, **__: None  # type: ignore[method-assign]
    for _ in range(2):
        _launch._launch_on(0, late, (1,), (x,), {"HAS_Y": True})
    assert not _launch._compiled


def test_debugging_finds_a_key_of_two_kernels(state: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = JITFunction(_fn), torch.zeros(64)
    monkeypatch.setattr(_op, "DEBUG", True)
    for args in _arguments() * 2:
        _call(kernel, *args, HAS_Y=args[1] is not None, BLOCK=64)
    assert kernel.bound == 2 * len(_arguments())
    # A key that does not look at alignment.
    args, constants = (x, x, 64, 64, 0.5, True), {"HAS_Y": True, "BLOCK": 64}
    monkeypatch.setattr(_launch, "_reader", lambda *_: lambda args, constants, index: ((constants,), args))
    monkeypatch.setattr(_launch, "_readers", {})
    _call(kernel, *args, **constants)
    with pytest.raises(RuntimeError, match="one key"):
        _launch._launch_on(0, kernel, (3,), (x[1:], *args[1:]), constants)


def test_the_number_of_kernels_that_are_remembered_is_bounded(
    state: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_launch, "_MAX_ENTRIES", 3)
    kernel, x = JITFunction(_fn), torch.zeros(64)
    for block in range(1, 9):
        for _ in range(2):
            _call(kernel, x, x, 64, 64, 0.5, True, HAS_Y=True, BLOCK=block)
        assert len(_launch._compiled) <= 3
    assert kernel.bound == 8


def test_this_version_of_triton_is_known() -> None:
    assert _launch._CALL in " ".join(inspect.getsource(jit.JITFunction.run).split())


def test_an_unknown_version_goes_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "INTERPRETED", False)
    monkeypatch.setattr(_launch, "_raw_stream", lambda index: 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    known = [version for version in ("3.3.1", "3.4.0", "3.6.0+cu130", "3.9.0", "3.10.0", "4.0.0") if _is_known(version)]
    assert known == ["3.4.0", "3.6.0+cu130", "3.9.0"]
    monkeypatch.setattr(jit.JITFunction, "run", lambda self, *args, grid, warmup, **kwargs: None)
    assert not _is_known("3.6.0")


def _is_known(version: str) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "__version__", version)
        return _launch._is_known()
