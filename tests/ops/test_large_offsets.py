"""Element offsets beyond 2^31: three rows, 2^30 + 64 elements apart, in memory that is committed only where touched."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A 32-bit offset reads or writes outside the buffer, so each operator gets a process that may crash.
PROGRAM = """
import mmap, sys
import torch, tigon

stride, n = 2**30 + 64, 8
# Linux only: pages that are reserved but not counted against memory.
pages = mmap.mmap(-1, 2 * (2 * stride + n), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
far = torch.frombuffer(pages, dtype=torch.float16).as_strided((3, n), (stride, 1))
far.copy_(torch.randn(3, n))
call = {
    "glu": lambda x: tigon.glu(x, x),
    "swiglu": tigon.swiglu,
    "layer_norm": tigon.layer_norm,
    "rms_norm": tigon.rms_norm,
    "rms_norm of groups": lambda x: tigon.rms_norm(x, group_size=4),
    "rms_norm_gated": lambda x: tigon.rms_norm_gated(x, torch.ones(8).half(), x),
    "glu interleaved": lambda x: tigon.glu(x, interleaved=True),
    "softmax": tigon.softmax,
    "log_softmax": tigon.log_softmax,
    "sparsemax": tigon.sparsemax,
    "kl_div": lambda x: tigon.kl_div(x, x, log_target=True, reduction="rows"),
    "jsd of elements": lambda x: tigon.jsd(x, -x, reduction="none"),
    "group_norm": lambda x: tigon.group_norm(x, 2),
}[sys.argv[1]]
results = []
for x in (far, far.contiguous()):
    x = x.detach().requires_grad_()
    with tigon.backend("triton"):
        y = call(x)
    results.append((y.detach(), *torch.autograd.grad(y, x, torch.arange(y.numel()).view_as(y).to(y.dtype))))
assert all(torch.equal(a, b) for a, b in zip(*results)), results
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reserves address space the way Linux does")
@pytest.mark.parametrize(
    "name",
    [
        "glu",
        "swiglu",
        "layer_norm",
        "rms_norm",
        "rms_norm of groups",
        "rms_norm_gated",
        "glu interleaved",
        "softmax",
        "log_softmax",
        "sparsemax",
        "kl_div",
        "jsd of elements",
        "group_norm",
    ],
)
def test_rows_far_apart(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name], capture_output=True, text=True, env=_environment(), timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:] or f"status {done.returncode}"


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
