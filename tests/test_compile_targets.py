"""Every kernel compiles for every supported target, at the settings that users get, without spilling."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from tigon.testing.compile_only import TARGETS, Compiled, Launch, describe

# Each kernel once: limits of these lie between those of others, where every launch is compiled, or are wider.
ONCE = ("sm_80", "sm_100", "gfx942")


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_for(target: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    # A fresh interpreter: this one has the kernels decorated for interpretation.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    once = ["--once"] if target in ONCE else []
    done = subprocess.run(
        [sys.executable, "-m", "tigon.testing.compile_only", "--target", target, *once],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, "\n".join(line for line in lines if not line.endswith("ok")) + done.stderr[-2000:]
    assert sum(line.endswith("ok") for line in lines) > 0


def test_limits_are_applied() -> None:
    launch = Launch(None, (), (), (), ())
    assert Compiled(launch, "sm_75", 65536, 0, 64).problems() == []
    assert "shared memory" in Compiled(launch, "sm_75", 65537, 0, 64).problems()[0]
    assert "spilled" in Compiled(launch, "sm_90", 0, 8, 255).problems()[0]


def test_launch_is_described_as_triton_specialises_it() -> None:
    import torch

    class Parameter:
        def __init__(self, name: str, is_constexpr: bool = False) -> None:
            self.name, self.is_constexpr = name, is_constexpr

    class Kernel:
        __name__ = "kernel"
        arg_names = ("x_ptr", "none_ptr", "stride", "one", "eps", "BLOCK")
        params = tuple(Parameter(n, n.isupper()) for n in arg_names)

    launch = describe(Kernel(), (torch.ones(2), None, 32, 1, 1e-6), {"BLOCK": 8, "num_warps": 4})
    assert launch.signature == (
        ("x_ptr", "*fp32"),
        ("none_ptr", "constexpr"),
        ("stride", "i32"),
        ("one", "constexpr"),
        ("eps", "fp32"),
        ("BLOCK", "constexpr"),
    )
    assert launch.constants == (((1,), None), ((3,), 1), ((5,), 8))
    assert launch.divisible == ((0,), (2,))
    assert launch.options == (("num_warps", 4),)


def test_tuples_and_what_is_not_to_be_specialised_are_described() -> None:
    import torch

    class Parameter:
        is_constexpr = False

        def __init__(self, do_not_specialize: bool) -> None:
            self.do_not_specialize = do_not_specialize

    class Kernel:
        __name__ = "kernel"
        arg_names = ("args", "more")
        params = (Parameter(True), Parameter(False))

    launch = describe(Kernel(), ((torch.ones(2), 1, None), (16, torch.ones(2))), {})
    assert launch.signature == (("args", ("*fp32", "i32", "constexpr")), ("more", ("i32", "*fp32")))
    assert launch.constants == (((0, 2), None),)
    assert launch.divisible == ((1, 0), (1, 1))
