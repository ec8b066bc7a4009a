"""What the tests of `rms_norm_glu` and `rms_norm_mlp` share: inputs, the same of separate operators, what is alive."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import tigon

Inputs = dict[str, Tensor | None]
# Made of what the two branches send back to the norm, which here are added up in one product after the other.
ROUNDED = ("x", "norm_weight")


def apart_glu(
    x: Tensor,
    norm_weight: Tensor | None,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast: Any = "cast_then_scale",
    **options: Any,
) -> Tensor:
    n = tigon.rms_norm(x, norm_weight, eps=eps, offset=offset, cast=cast)
    up = None if up_weight is None else F.linear(n, up_weight, up_bias)
    return tigon.glu(F.linear(n, gate_weight, gate_bias), up, **options)


def apart_mlp(
    x: Tensor,
    *first: Any,
    down_weight: Tensor,
    down_bias: Tensor | None = None,
    residual: bool = False,
    recompute: bool = False,
    **options: Any,
) -> Tensor:
    y = F.linear(apart_glu(x, *first, **options), down_weight, down_bias)
    return x + y if residual else y


def draw(
    device: torch.device,
    *rows: int,
    hidden: int = 16,
    width: int = 24,
    packed: bool = False,
    bias: bool = True,
    weightless: bool = False,
    down: bool = False,
) -> Inputs:
    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, device=device) * scale

    inputs: Inputs = {
        "x": randn(*rows, hidden),
        "norm_weight": None if weightless else randn(hidden) + 0.5,
        "gate_weight": randn((2 if packed else 1) * width, hidden, scale=hidden**-0.5),
        "up_weight": None if packed else randn(width, hidden, scale=hidden**-0.5),
        "gate_bias": randn((2 if packed else 1) * width) if bias else None,
        "up_bias": randn(width) if bias and not packed else None,
    }
    if down:
        inputs["down_weight"] = randn(hidden, width, scale=width**-0.5)
        inputs["down_bias"] = randn(hidden) if bias else None
    return inputs


def present(inputs: Inputs) -> list[str]:
    return [name for name, t in inputs.items() if t is not None]


def leaves_of(inputs: Inputs, wanted: Sequence[str] | None = None) -> Inputs:
    wanted = present(inputs) if wanted is None else wanted
    return {k: None if t is None else t.detach().requires_grad_(k in wanted) for k, t in inputs.items()}


def run(
    function: Callable[..., Tensor],
    inputs: Inputs,
    wanted: Sequence[str] | None = None,
    upstream: Tensor | None = None,
    **options: Any,
) -> dict[str, Tensor | None]:
    """The output as "y", and the gradient of each input, None where there is none."""
    leaves = leaves_of(inputs, wanted)
    y = function(**leaves, **options)
    if y.requires_grad:
        y.sum().backward() if upstream is None else y.backward(upstream)
    return {"y": y.detach(), **{k: None if t is None else t.grad for k, t in leaves.items()}}


def assert_same(
    actual: dict[str, Tensor | None], expected: dict[str, Tensor | None], rounded: Sequence[str] = ROUNDED
) -> None:
    """The same bits, but for those whose terms are `rounded` elsewhere."""
    assert list(actual) == list(expected)
    # A few roundings of the terms, which are as large as the largest of their sums.
    eps = 4 * torch.finfo(expected["y"].dtype).eps
    for name, a in actual.items():
        b = expected[name]
        assert (a is None) == (b is None), name
        if a is None or b is None:
            continue
        assert a.dtype == b.dtype, name
        if name in rounded:
            assert float((a - b).abs().max()) <= max(eps, torch.finfo(b.dtype).eps) * float(b.abs().max()), name
        else:
            assert torch.equal(a, b), name


def low(device: torch.device) -> torch.dtype:
    """A 16-bit dtype in which the kernels run there: the interpreter truncates bfloat16."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def saved_by(
    function: Callable[..., Tensor], inputs: Inputs, wanted: Sequence[str] | None = None, **options: Any
) -> list[Tensor]:
    found: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        function(**leaves_of(inputs, wanted), **options)
    return found


def new_shapes(saved: Sequence[Tensor], inputs: Inputs) -> list[tuple[int, ...]]:
    """Shapes of what was `saved` besides the inputs, in order of size."""
    known = {t.data_ptr() for t in inputs.values() if t is not None}
    return sorted((tuple(t.shape) for t in saved if t.data_ptr() not in known), key=math.prod)


class Alive(TorchDispatchMode):
    """Elements of all that was made since it began and is not gone, at each matrix product after it has been made."""

    def __init__(self) -> None:
        super().__init__()
        self.refs: dict[int, tuple[StorageWeakRef, int]] = {}
        self.at_products: list[int] = []

    def count(self) -> int:
        # The interpreter of kernels leaves cycles that hold their arguments.
        gc.collect()
        self.refs = {k: (ref, size) for k, (ref, size) in self.refs.items() if not ref.expired()}
        return sum(size for _, size in self.refs.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(out):
            # The interpreter makes tensors of what it writes.
            if isinstance(t, Tensor) and func.overloadpacket is not torch.ops.aten.set_:
                storage = t.untyped_storage()
                if storage._cdata not in given:
                    self.refs[storage._cdata] = StorageWeakRef(storage), storage.nbytes() // t.element_size()
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.at_products.append(self.count())
        return out
