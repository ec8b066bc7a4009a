"""Cases of `glu_linear`; of the options of its kernels, those that change what backward reads or writes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.glu import glu_reference
from ..ops.glu_linear import glu_linear_reference
from . import glu
from ._spec import Case, Cost, Make, Mutation, OpSpec


def inputs(case: Case, make: Make) -> dict[str, Tensor | None]:
    dtype = torch.float32 if case.sizes.get("fp32_up") else None
    return {
        **glu.inputs(case, make),
        "weight": make.randn(case.D, case.I, scale=case.I**-0.5, dtype=dtype),
        "bias": make.randn(case.D, dtype=dtype) if case.sizes.get("bias") else None,
    }


def cost(case: Case, itemsize: int) -> Cost:
    """What is given and returned, once; one product of matrices forward and two backward."""
    half, weight, y = case.M * case.I, case.D * case.I, case.M * case.D
    product = 2 * case.M * case.D * case.I
    return Cost(
        forward_bytes=(2 * half + weight + y) * itemsize,
        backward_bytes=(4 * half + 2 * weight + y) * itemsize,
        forward_flops=product,
        backward_flops=2 * product,
    )


def _no_bias(gate: Tensor, up: Tensor | None, weight: Tensor, *, bias: Tensor | None = None, **options: Any) -> Tensor:
    return glu_linear_reference(gate, up, weight, bias=None if bias is None else 0 * bias, **options)


def _swapped(gate: Tensor, up: Tensor | None, weight: Tensor, **options: Any) -> Tensor:
    if up is None:
        return glu_linear_reference(
            gate, None, weight, **{**options, "gate_first": not options.get("gate_first", True)}
        )
    return glu_linear_reference(up, gate, weight, **options)


def _no_limit(gate: Tensor, up: Tensor | None, weight: Tensor, **options: Any) -> Tensor:
    return glu_linear_reference(gate, up, weight, **{**options, "limit": None})


class _NotEmitted(torch.autograd.Function):
    """A linear layer whose dweight reads the gradient of its input, where that was to be written over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        dx = dy @ ctx.saved_tensors[0]
        return dx, dy.t() @ dx


def _gradient_for_product(
    gate: Tensor, up: Tensor | None, weight: Tensor, *, bias: Tensor | None = None, **options: Any
) -> Tensor:
    y = _NotEmitted.apply(glu_reference(gate, up, **options), weight)
    return y if bias is None else y + bias


def _activation_for_product(
    gate: Tensor, up: Tensor | None, weight: Tensor, *, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """Right values, but dweight is that of the activation alone, without `up`."""
    y = glu_linear_reference(gate, up, weight.detach(), bias=bias, **options)
    if up is None:
        return y + 0 * weight.sum()
    act = F.linear(glu_reference(gate, torch.ones_like(up), **options).detach(), weight)
    return y + act - act.detach()


_SLOPED = {"limit": 2.0, "alpha": 1.702, "up_offset": 1.0}


SPEC = OpSpec(
    name="glu_linear",
    cases=(
        Case("odd", {"M": 37, "I": 300, "D": 48}),
        Case("bias", {"M": 9, "I": 65, "D": 33, "bias": 1}, {"activation": "gelu_tanh"}),
        Case("packed", {"M": 17, "I": 129, "D": 40, "packed": 1}),
        Case("packed_up_first", {"M": 5, "I": 64, "D": 24, "packed": 1}, {"gate_first": False, "activation": "gelu"}),
        Case(
            "interleaved_sloped", {"M": 5, "I": 47, "D": 16, "packed": 1, "bias": 1}, {**_SLOPED, "interleaved": True}
        ),
        Case("limited", {"M": 9, "I": 65, "D": 32}, {"limit": 1.5}),
        Case("limited_activation", {"M": 9, "I": 65, "D": 32}, {"limit": 1.25, "limit_on": "activation"}),
        Case("fp32_up", {"M": 7, "I": 65, "D": 16, "fp32_up": 1}),
        Case("one_row", {"M": 1, "I": 3, "D": 5}),
        Case("one_column", {"M": 5, "I": 1, "D": 1}),
        Case("mlp_14336", {"M": 8192, "I": 14336, "D": 4096}, models_only=True),
        Case("mlp_14336_packed", {"M": 8192, "I": 14336, "D": 4096, "packed": 1}, models_only=True),
        Case("mlp_9216_gelu_tanh", {"M": 8192, "I": 9216, "D": 2304}, {"activation": "gelu_tanh"}, models_only=True),
        Case("mlp_3072", {"M": 16384, "I": 3072, "D": 1024}, models_only=True),
    ),
    inputs=inputs,
    differentiable=("gate", "up", "weight", "bias"),
    empty=Case("empty", {"M": 0, "I": 64, "D": 16, "bias": 1}),
    cost=cost,
    mutations=(
        Mutation("bias left out", _no_bias),
        Mutation("gate and up swapped", _swapped),
        Mutation("limit ignored", _no_limit),
        Mutation("product not written over its gradient", _gradient_for_product),
        Mutation("product without up", _activation_for_product),
    ),
    compile_cases=(
        "mlp_14336",
        "mlp_14336_packed",
        "mlp_9216_gelu_tanh",
        "packed_up_first",
        "interleaved_sloped",
        "limited",
        "limited_activation",
        "fp32_up",
    ),
)
