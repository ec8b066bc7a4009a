"""`triton` and `tl`, or stand-ins that let kernel modules import where Triton is absent."""

from __future__ import annotations

from typing import Any


class _Absent:
    """Decorates kernels without compiling them; calling one is prevented by the backend choice."""

    @staticmethod
    def jit(fn: Any = None, **_: Any) -> Any:
        return fn if fn is not None else lambda kernel: kernel


try:
    import triton
    import triton.language as tl
except ImportError:
    triton: Any = _Absent()
    tl: Any = _Absent()
    HAS_TRITON = False
    INTERPRETED = False
else:
    HAS_TRITON = True
    # Fixed when the kernels are decorated, so it is read once.
    INTERPRETED = bool(triton.knobs.runtime.interpret)

__all__ = ["HAS_TRITON", "INTERPRETED", "tl", "triton"]
