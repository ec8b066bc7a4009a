"""Cases of `rms_norm_glu`; of the options of its kernels, those that change what backward reads or writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.glu import glu_reference
from ..ops.rms_norm import rms_norm_reference
from ..ops.rms_norm_glu import rms_norm_glu_reference
from ._spec import Case, Cost, Make, Mutation, OpSpec


def inputs(case: Case, make: Make) -> dict[str, Tensor | None]:
    """`packed` puts both weights into one; `fp32_norm` has a wider norm weight, which widens all that follows."""
    has_bias, parts = case.sizes.get("bias"), 2 if case.sizes.get("packed") else 1
    dtype = torch.float32 if case.sizes.get("fp32_norm") else None

    def weight() -> Tensor:
        return make.randn(parts * case.I, case.D, scale=case.D**-0.5, dtype=dtype)

    def bias() -> Tensor | None:
        return make.randn(parts * case.I, dtype=dtype) if has_bias else None

    return {
        "x": make.rows(case.M, case.D, spread=1.0),
        "norm_weight": None if case.sizes.get("weightless") else make.randn(case.D, mean=0.5, dtype=dtype),
        "gate_weight": weight(),
        "up_weight": weight() if parts == 1 else None,
        "gate_bias": bias(),
        "up_bias": bias() if parts == 1 else None,
    }


def cost(case: Case, itemsize: int) -> Cost:
    """What is given and returned, once; two products of matrices forward and four backward."""
    x, weights, product = case.M * case.D, 2 * case.I * case.D, case.M * case.I
    flops = 4 * case.M * case.D * case.I
    return Cost(
        forward_bytes=(x + weights + product) * itemsize,
        backward_bytes=(2 * x + 2 * weights + product) * itemsize,
        forward_flops=flops,
        backward_flops=2 * flops,
    )


# ---- mutations ----

Reference = Callable[..., Tensor]


def mutations(reference: Reference) -> tuple[Mutation, ...]:
    """Those of norm, projections and product, of an operator that begins with them."""

    def changed(change: Callable[..., dict[str, Any]]) -> Reference:
        def mutant(x: Tensor, *rest: Any, **given: Any) -> Tensor:
            names = ("norm_weight", "gate_weight", "up_weight", "down_weight")
            given = {**dict(zip(names, rest, strict=False)), **given}
            return reference(x, **{**given, **change(x, **given)})

        return mutant

    def without_bias(x: Tensor, *, gate_bias: Tensor | None = None, up_bias: Tensor | None = None, **_: Any) -> Any:
        biases = {"gate_bias": gate_bias, "up_bias": up_bias}
        return {k: None if b is None else 0 * b for k, b in biases.items()}

    def swapped(
        x: Tensor, *, gate_weight: Tensor, up_weight: Tensor | None, gate_first: bool = True, **given: Any
    ) -> Any:
        if up_weight is None:
            return {"gate_first": not gate_first}
        biases = {"gate_bias": given.get("up_bias"), "up_bias": given.get("gate_bias")}
        return {"gate_weight": up_weight, "up_weight": gate_weight, **biases}

    def unscaled(x: Tensor, *, norm_weight: Tensor | None, **_: Any) -> Any:
        return {} if norm_weight is None else {"norm_weight": 0 * norm_weight + 1}

    return (
        Mutation("biases left out", changed(without_bias)),
        Mutation("gate and up swapped", changed(swapped)),
        Mutation("norm not scaled", changed(unscaled)),
        Mutation("offset ignored", changed(lambda x, **_: {"offset": 0.0})),
        Mutation("eps 100 times too large", changed(lambda x, eps=1e-6, **_: {"eps": 100 * eps})),
        Mutation("limit ignored", changed(lambda x, **_: {"limit": None})),
    )


def _by_parts(
    x: Tensor,
    norm_weight: Tensor | None,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    multiply: Callable[[Tensor, Tensor, int], Tensor],
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast: Any = "cast_then_scale",
    **options: Any,
) -> Tensor:
    """The reference with `multiply(n, weight, which)` for its two products."""
    n = rms_norm_reference(x, norm_weight, eps=eps, offset=offset, cast=cast)
    gate = multiply(n, gate_weight, 0)
    up = None if up_weight is None else multiply(n, up_weight, 1)
    gate = gate if gate_bias is None else gate + gate_bias
    return glu_reference(gate, up if up is None or up_bias is None else up + up_bias, **options)


def _gradient_of_one_branch(
    x: Tensor, norm_weight: Tensor | None, gate_weight: Tensor, up_weight: Tensor | None, **options: Any
) -> Tensor:
    """Right values, but what flows back to the norm is that of the gate alone."""

    def multiply(n: Tensor, weight: Tensor, which: int) -> Tensor:
        return F.linear(n.detach() if which else n, weight)

    return _by_parts(x, norm_weight, gate_weight, up_weight, multiply, **options)


def _weight_gradient_of_the_input(
    x: Tensor, norm_weight: Tensor | None, gate_weight: Tensor, up_weight: Tensor | None, **options: Any
) -> Tensor:
    """Right values, but the weights' gradients are made of `x` where the norm was to be made again."""

    def multiply(n: Tensor, weight: Tensor, which: int) -> Tensor:
        of_input = F.linear(x.detach().to(n.dtype), weight)
        return F.linear(n, weight.detach()) + of_input - of_input.detach()

    return _by_parts(x, norm_weight, gate_weight, up_weight, multiply, **options)


_SLOPED = {"limit": 2.0, "alpha": 1.702, "up_offset": 1.0}
_OFFSET = {"offset": 1.0, "cast": "none", "eps": 1e-5}

# Those of every operator that begins with a norm and two projections.
CASES = (
    Case("odd", {"M": 37, "D": 48, "I": 75}),
    Case("bias", {"M": 9, "D": 33, "I": 65, "bias": 1}, {"activation": "gelu_tanh"}),
    Case("packed", {"M": 17, "D": 40, "I": 65, "packed": 1}),
    Case("packed_up_first", {"M": 5, "D": 24, "I": 64, "packed": 1}, {"gate_first": False, "activation": "gelu"}),
    Case("interleaved_sloped", {"M": 5, "D": 16, "I": 47, "packed": 1, "bias": 1}, {**_SLOPED, "interleaved": True}),
    Case("weightless", {"M": 9, "D": 48, "I": 33, "weightless": 1}),
    Case("weightless_packed", {"M": 4, "D": 16, "I": 33, "weightless": 1, "packed": 1}),
    Case("offset", {"M": 7, "D": 65, "I": 32}, _OFFSET),
    Case("offset_bias", {"M": 7, "D": 65, "I": 32, "bias": 1}, {**_OFFSET, "cast": "scale_then_cast"}),
    Case("limited", {"M": 9, "D": 32, "I": 65}, {"limit": 1.5}),
    Case("fp32_norm", {"M": 7, "D": 16, "I": 65, "fp32_norm": 1}),
    Case("one_row", {"M": 1, "D": 5, "I": 3}),
    Case("mlp_14336", {"M": 8192, "D": 4096, "I": 14336}, models_only=True),
    Case("mlp_8192", {"M": 16384, "D": 2048, "I": 8192}, models_only=True),
    Case("rows_16", {"M": 16, "D": 4096, "I": 14336}, models_only=True),
    Case("rows_128", {"M": 128, "D": 4096, "I": 14336}, models_only=True),
    Case(
        "mlp_512",
        {"M": 256, "D": 256, "I": 512},
        models_only=True,
        dtypes=(torch.bfloat16,),
        note="the tiles of a 16-bit matrix product, in a moment",
    ),
)


SPEC = OpSpec(
    name="rms_norm_glu",
    cases=CASES,
    inputs=inputs,
    differentiable=("x", "norm_weight", "gate_weight", "up_weight", "gate_bias", "up_bias"),
    empty=Case("empty", {"M": 0, "D": 16, "I": 64, "bias": 1}),
    cost=cost,
    mutations=(
        *mutations(rms_norm_glu_reference),
        Mutation("gradient of one branch lost", _gradient_of_one_branch),
        Mutation("weights' gradients of the input", _weight_gradient_of_the_input),
    ),
    # Those of rms_norm and glu have the rest.
    compile_cases=("mlp_14336", "rows_16", "rows_128"),
)
