"""What an import costs and touches, seen from fresh interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"


def in_fresh_interpreter(code: str) -> str:
    """Output of `code` in an interpreter that saw nothing of this test run but the source tree."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "TIGON_"))}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SOURCE), env.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=env, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


WITHOUT_TRITON = """
    import sys
    sys.modules["triton"] = sys.modules["triton.language"] = None
"""


def test_operators_run_on_a_cpu_without_triton() -> None:
    out = in_fresh_interpreter(
        WITHOUT_TRITON
        + """
    import importlib, pkgutil
    import torch, tigon, tigon.ops
    names = [m.name for m in pkgutil.walk_packages(tigon.ops.__path__, "tigon.ops.")]
    for name in names:
        importlib.import_module(name)
    assert len(names) > 8, names
    from tigon.specs import Make, all_specs
    from tigon.testing.check import flatten
    for name, spec in all_specs().items():
        case = spec.cases[0]
        inputs = spec.inputs(case, Make(case, "cpu", torch.float32))
        assert tigon.why_not(name, **inputs, **case.options) == ["Triton is not installed"], name
        record = tigon.OPS[name]
        for y in inputs.values():
            if isinstance(y, torch.Tensor) and y.is_floating_point():
                y.requires_grad_()
        ours, plain = (flatten(f(**inputs, **case.options)) for f in (record.public, record.reference))
        assert list(ours) == list(plain)
        sum(y.double().sum() for y in ours.values() if y.requires_grad).backward()
        for key in plain:
            # A fallback that never builds the logits sums in another order than the reference.
            torch.testing.assert_close(ours[key], plain[key], msg=lambda m: f"{name} {key}: {m}")
        print(name)
    """
    )
    assert "rms_norm" in out.split()


def test_forcing_kernels_without_triton_says_why() -> None:
    out = in_fresh_interpreter(
        WITHOUT_TRITON
        + """
    import torch, tigon
    try:
        with tigon.backend("triton"):
            tigon.rms_norm(torch.ones(2, 4))
    except ValueError as error:
        print(error)
    """
    )
    assert "rms_norm: backend 'triton' is forced but cannot run: Triton is not installed" in out


@pytest.mark.parametrize(
    "module", ["tigon", "tigon.cli", "tigon.hub", "tigon.layers", "tigon.losses", "tigon.ops", "tigon.patch"]
)
def test_import_is_light(module: str) -> None:
    out = in_fresh_interpreter(
        f"""
    import sys
    import {module}
    import torch
    heavy = ["transformers", "matplotlib", "peft", "accelerate", "tokenizers", "liger_kernel"]
    heavy += ["tigon.demo", "tigon.bench", "tigon.testing"]
    print([name for name in heavy if name in sys.modules], torch.cuda.is_initialized())
    """
    )
    assert out.split("\n")[0] == "[] False"


def test_interpreter_gap_is_seen() -> None:
    """The light-import test must be able to fail: an interpreter that loads matplotlib shows it."""
    out = in_fresh_interpreter("import sys, matplotlib; print('matplotlib' in sys.modules)")
    assert out.strip() == "True"


def test_the_compiler_is_not_imported() -> None:
    """Importing torch's compiler takes longer than all of tigon; it is asked for only where it runs."""
    in_fresh_interpreter("import sys, tigon\nassert 'torch._dynamo' not in sys.modules, 'imports the compiler'")
