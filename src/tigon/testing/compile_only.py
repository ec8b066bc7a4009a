"""Compiles every kernel launch of a specification for a GPU that need not be there.

The operators run on meta tensors with launching replaced by recording, so the signatures, constants and launch
settings compiled are exactly those a user gets. Registers spilled or shared memory over the limit are failures.

    python -m tigon.testing.compile_only --target sm_90 --op rms_norm
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .. import ops
from ..ops import _choice, _device, _hopper, _launch, _op
from ..ops._triton import HAS_TRITON, INTERPRETED
from ..specs import Case, Make, OpSpec, all_specs
from .check import call, flatten

# Shared memory one program may use, bytes; CUDA programming guide table of compute capabilities, CDNA3 ISA.
SHARED_LIMIT = {
    "sm_75": 65536,
    "sm_80": 166912,
    "sm_90": 232448,
    "sm_100": 232448,
    "sm_120": 101376,
    "gfx942": 65536,
}
TARGETS = tuple(SHARED_LIMIT)
_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
_LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


@dataclass(frozen=True)
class Launch:
    """One recorded launch, reduced to what the compiler sees."""

    kernel: Any
    signature: tuple[tuple[str, Any], ...]
    constants: tuple[tuple[tuple[int, ...], Any], ...]
    divisible: tuple[tuple[int, ...], ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return self.kernel.__name__


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a launch for one target."""

    launch: Launch
    target: str
    shared_bytes: int
    spilled_bytes: int
    registers: int

    def problems(self) -> list[str]:
        found = []
        if self.spilled_bytes:
            found.append(f"{self.spilled_bytes} bytes of registers spilled")
        if self.shared_bytes > SHARED_LIMIT[self.target]:
            found.append(f"{self.shared_bytes} bytes of shared memory, limit {SHARED_LIMIT[self.target]}")
        return found


def describe(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> Launch:
    """The launch as Triton would specialise it: pointer types, integers by width, 1 and None as constants."""
    options = {k: v for k, v in constants.items() if k in _LAUNCH_OPTIONS}
    named = dict(zip(kernel.arg_names, args, strict=False)) | {
        k: v for k, v in constants.items() if k not in _LAUNCH_OPTIONS
    }
    signature, values, divisible = [], [], []
    for index, parameter in enumerate(kernel.params):
        name = kernel.arg_names[index]
        is_special = not getattr(parameter, "do_not_specialize", False)
        if parameter.is_constexpr:
            kind = "constexpr"
            values.append(((index,), named[name]))
        else:
            kind = _kind(named[name], (index,), is_special, values, divisible)
        signature.append((name, kind))
    return Launch(kernel, tuple(signature), tuple(values), tuple(divisible), tuple(sorted(options.items())))


def _kind(value: Any, path: tuple[int, ...], is_special: bool, values: list[Any], divisible: list[Any]) -> Any:
    """Type of one argument in a signature; adds its path, and value, where the compiler knows more than the type."""
    if isinstance(value, tuple):
        return tuple(_kind(v, (*path, i), is_special, values, divisible) for i, v in enumerate(value))
    if value is None or (type(value) is int and value == 1 and is_special):
        values.append((path, value))
        return "constexpr"
    if isinstance(value, Tensor):
        if is_special:
            divisible.append(path)
        return _TYPES[value.dtype]
    if hasattr(value, "block_shape"):
        dtype = _TYPES[value.base.dtype].removeprefix("*")
        return f"tensordesc<{dtype}{list(value.block_shape)},{value.layout!r}>"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        if value % 16 == 0 and is_special:
            divisible.append(path)
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


@contextlib.contextmanager
def recorded(capability: tuple[int, int]) -> Iterator[list[Launch]]:
    """Record launches instead of making them, for a device of `capability`."""
    launches: list[Launch] = []

    def record(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if 0 not in grid:
            launches.append(describe(kernel, args, constants))

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(_op, "why_no_kernels", return_value=[]))
        stack.enter_context(mock.patch.object(_device, "capability", return_value=capability))
        original = _launch.launch
        for name, module in list(sys.modules.items()):
            if name.startswith(ops.__name__) and getattr(module, "launch", None) is original:
                stack.enter_context(mock.patch.object(module, "launch", record))
        yield launches


def launches_of(spec: OpSpec, case: Case, dtype: torch.dtype, capability: tuple[int, int]) -> list[Launch]:
    """Launches of the forward without gradients, then of forward and backward for all inputs, and of either in every
    way among which the operator chooses."""
    inputs = spec.inputs(case, Make(case, "meta", dtype))
    wanted = spec.wanted(case, inputs)
    public = ops.OPS[spec.name].public

    def run() -> None:
        with torch.no_grad():
            outputs = flatten(public(**inputs, **case.options))
        upstream = {k: torch.empty_like(v) for k, v in outputs.items() if v.is_floating_point()}
        call(public, inputs, case.options, wanted, upstream)

    with recorded(capability) as launches:
        _choice.offered.clear()
        run()
        for name in sorted(_choice.offered):
            with _choice.forced(name):
                run()
    return list(dict.fromkeys(launches))


def compile_for(launch: Launch, target: str) -> Compiled:
    """Compile one launch with Triton's own compiler for `target`, for example "sm_90" or "gfx942"."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    gpu = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[3:]), 32)
    make_source = ASTSource
    if launch.kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as make_source
    source = make_source(
        fn=launch.kernel,
        signature=dict(launch.signature),
        constexprs=dict(launch.constants),
        attrs={path: [["tt.divisibility", 16]] for path in launch.divisible},
    )
    binary = triton.compile(source, target=gpu, options=dict(launch.options))
    shared = int(binary.metadata.shared)
    if gpu.backend == "hip":
        text = binary.asm["amdgcn"]
        spills = sum(int(n) for n in re.findall(r"\.(?:vgpr|sgpr)_spill_count:\s*(\d+)", text))
        registers = max((int(n) for n in re.findall(r"\.vgpr_count:\s*(\d+)", text)), default=0)
        return Compiled(launch, target, shared, spills, registers)
    usage = _resource_usage(binary.asm["cubin"])
    # Spills live on the stack, but not all of the stack is spills: only then is the assembler asked.
    spilled = _spilled_bytes(binary.asm["ptx"]) if usage["STACK"] else 0
    return Compiled(launch, target, shared, spilled, usage["REG"])


def _tool(name: str) -> str:
    """Path of an NVIDIA program that Triton carries."""
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return str(folder / name)


def _spilled_bytes(ptx: str) -> int:
    """Bytes stored by register spills, as ptxas reports them when it assembles the PTX again."""
    arch = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assembler = "ptxas-blackwell" if arch and arch[1] >= "sm_1" and len(arch[1]) >= 6 else "ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [
            _tool(assembler),
            "-v",
            f"--gpu-name={arch[1] if arch else 'sm_90'}",
            file.name,
            "-o",
            "/dev/null",
        ]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", report))


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK (where spills go), SHARED of a cubin, read by the cuobjdump that Triton carries."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_tool("cuobjdump"), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {k: int(v) for k, v in re.findall(r"(REG|STACK|SHARED):(\d+)", text)}


def all_kernels(target: str) -> set[str]:
    """Names of every kernel in the operator files, a function ending in `_kernel`, that `target` is for."""
    found = set()
    for path in Path(ops.__file__).parent.rglob("*.py"):
        if path.name.startswith("_hopper") and _capability(target) != _hopper.CAPABILITY:
            continue
        # In bf16 alone, which Turing has not.
        if path.name == "_norm_glu.py" and _capability(target) < (8, 0):
            continue
        relative = path.relative_to(Path(ops.__file__).parent).with_suffix("").parts
        module = importlib.import_module(".".join((ops.__name__, *relative)).removesuffix(".__init__"))
        found |= {k for k in vars(module) if k.endswith("_kernel") and hasattr(vars(module)[k], "arg_names")}
    return found


def cases_to_compile(spec: OpSpec) -> list[Case]:
    """The cases a specification names for compiling; all `models_only` ones where it names none."""
    return [c for c in spec.cases if (c.name in spec.compile_cases if spec.compile_cases else c.models_only)]


def _capability(target: str) -> tuple[int, int]:
    return (9, 4) if target.startswith("gfx") else divmod(int(target[3:]), 10)


def main(argv: list[str] | None = None) -> int:
    """Compile and print one line a launch; exit status 1 if any fails, spills or asks for too much memory."""
    parser = argparse.ArgumentParser(prog="python -m tigon.testing.compile_only", description=__doc__)
    parser.add_argument("--target", action="append", choices=TARGETS, help="may be repeated; all when left out")
    parser.add_argument("--op", action="append", help="may be repeated; all when left out")
    parser.add_argument("--dtype", action="append", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--once", action="store_true", help="each kernel at its first launch in a dtype, no other")
    chosen = parser.parse_args(argv)
    if not HAS_TRITON or INTERPRETED:
        parser.error("needs Triton, and TRITON_INTERPRET unset")
    failed, seen = 0, set()
    for target in chosen.target or TARGETS:
        # Turing has no bf16 conversion instruction; the operators refuse bf16 there. fp32 needs the most space.
        dtypes = chosen.dtype or ["float16" if target == "sm_75" else "bfloat16", "float32"]
        for spec in all_specs().values():
            if chosen.op and spec.name not in chosen.op:
                continue
            for case in cases_to_compile(spec):
                for dtype, launch in [
                    (d, la) for d in dtypes for la in launches_of(spec, case, getattr(torch, d), _capability(target))
                ]:
                    seen.add(launch.name)
                    key = (launch.name, dtype, target) if chosen.once else (launch, target)
                    if key in seen:
                        continue
                    seen.add(key)
                    start = time.perf_counter()
                    try:
                        compiled = compile_for(launch, target)
                        problems = compiled.problems()
                        detail = f"{compiled.registers} registers, {compiled.shared_bytes} bytes shared"
                    except Exception as error:
                        problems, detail = [f"{type(error).__name__}: {str(error)[:400]}"], ""
                    failed += bool(problems)
                    verdict = "; ".join(problems) or "ok"
                    seconds = time.perf_counter() - start
                    print(
                        f"{target:7} {launch.name:36} {case.name:20} {detail:36} {seconds:5.1f} s  {verdict}",
                        flush=True,
                    )
    if not chosen.op:
        missing = set().union(*(all_kernels(target) for target in chosen.target or TARGETS)) - seen
        if missing:
            failed += 1
            print(f"no case launches {', '.join(sorted(missing))}")
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
