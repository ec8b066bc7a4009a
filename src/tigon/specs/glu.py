"""Cases of `glu`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.glu import ACTIVATIONS, glu_reference
from ._spec import Case, Cost, Make, Mutation, OpSpec


def inputs(case: Case, make: Make) -> dict[str, Tensor | None]:
    """Gate and up, one tensor of both halves where the case is `packed`, an fp32 up where it says so."""
    if case.sizes.get("packed"):
        return {"gate": make.rows(case.M, 2 * case.I, spread=0.5), "up": None}
    up_dtype = torch.float32 if case.sizes.get("fp32_up") else None
    # A spread of 0.5 reaches both the curved and the flat parts of every activation.
    return {"gate": make.rows(case.M, case.I, spread=0.5), "up": make.randn(case.M, case.I, dtype=up_dtype)}


def cost(case: Case, itemsize: int) -> Cost:
    """Forward reads two tensors and writes one, backward reads three and writes two."""
    tensor = case.M * case.I * itemsize
    return Cost(forward_bytes=3 * tensor, backward_bytes=5 * tensor)


def _swapped(gate: Tensor, up: Tensor | None = None, **options: Any) -> Tensor:
    if up is None:
        return glu_reference(gate, **{**options, "gate_first": not options.get("gate_first", True)})
    return glu_reference(up, gate, **options)


def _other_gelu(gate: Tensor, up: Tensor | None = None, *, activation: str = "silu", **options: Any) -> Tensor:
    other = {"gelu": "gelu_tanh", "gelu_tanh": "gelu"}.get(activation, activation)
    return glu_reference(gate, up, activation=other, **options)


def _drops_last_column(gate: Tensor, up: Tensor | None = None, **options: Any) -> Tensor:
    y = glu_reference(gate, up, **options)
    keep = torch.ones(y.shape[-1], dtype=y.dtype, device=y.device)
    keep[-1] = 0
    return y * keep


def _slope_is_the_ratio(
    gate: Tensor, up: Tensor | None = None, *, activation: str = "silu", gate_first: bool = True, **options: Any
) -> Tensor:
    """Right values, but the gradient takes act(gate) / gate, half of the product rule, for act'(gate)."""
    if options:
        return glu_reference(gate, up, activation=activation, gate_first=gate_first, **options)
    if up is None:
        first, second = gate.chunk(2, -1)
        gate, up = (first, second) if gate_first else (second, first)
    act = ACTIVATIONS[activation].reference(gate)
    return ((act / gate).detach() * gate * up).to(torch.promote_types(gate.dtype, up.dtype))


def _without(option: str) -> Any:
    """The reference with one option at its default."""

    def mutant(gate: Tensor, up: Tensor | None = None, **options: Any) -> Tensor:
        options.pop(option, None)
        return glu_reference(gate, up, **options)

    return mutant


def _gradient_beyond_the_limit(gate: Tensor, up: Tensor | None = None, **options: Any) -> Tensor:
    """Right values, but what is beyond the limit has the gradient it would have without one."""
    y = glu_reference(gate, up, **options)
    options.pop("limit", None)
    free = glu_reference(gate, up, **options)
    return free + (y - free).detach()


# The clamped forms of models: limits on both inputs; a limit on the activation; the one with a slope and an offset.
_LIMITED = {"limit": 1.5}
_LIMITED_ACTIVATION = {"limit": 1.25, "limit_on": "activation"}
_SLOPED = {"limit": 2.0, "alpha": 1.702, "up_offset": 1.0}


SPEC = OpSpec(
    name="glu",
    cases=(
        Case("odd", {"M": 37, "I": 300}),
        Case("packed", {"M": 17, "I": 129, "packed": 1}),
        Case("packed_up_first", {"M": 5, "I": 64, "packed": 1}, {"activation": "gelu", "gate_first": False}),
        Case("gelu", {"M": 9, "I": 127}, {"activation": "gelu"}),
        Case("gelu_tanh", {"M": 9, "I": 127}, {"activation": "gelu_tanh"}),
        Case("relu", {"M": 3, "I": 33}, {"activation": "relu"}),
        Case("relu2", {"M": 3, "I": 33}, {"activation": "relu2"}),
        Case("sigmoid", {"M": 3, "I": 33}, {"activation": "sigmoid"}),
        Case("identity", {"M": 3, "I": 33}, {"activation": "identity"}),
        Case("one_column", {"M": 5, "I": 1}),
        Case("one_row", {"M": 1, "I": 3}),
        Case("fp32_up", {"M": 7, "I": 65, "fp32_up": 1}),
        Case("limited", {"M": 9, "I": 65}, _LIMITED),
        Case("limited_packed", {"M": 5, "I": 33, "packed": 1}, {**_LIMITED, "gate_first": False}),
        Case("limited_activation", {"M": 9, "I": 65}, _LIMITED_ACTIVATION),
        Case("sloped", {"M": 9, "I": 65}, _SLOPED),
        Case("scaled", {"M": 5, "I": 33}, {"gate_scale": 0.6, "activation": "gelu_tanh"}),
        Case("interleaved", {"M": 7, "I": 129, "packed": 1}, {"interleaved": True}),
        Case("interleaved_sloped", {"M": 5, "I": 47, "packed": 1}, {**_SLOPED, "interleaved": True}),
        Case(
            "interleaved_up_first",
            {"M": 5, "I": 64, "packed": 1},
            {"interleaved": True, "gate_first": False, "activation": "relu"},
        ),
        Case("wide", {"M": 2, "I": 5000, "packed": 1}, {"activation": "gelu_tanh"}),
        Case("mlp_14336", {"M": 8192, "I": 14336}, models_only=True),
        Case("mlp_14336_packed", {"M": 8192, "I": 14336, "packed": 1}, models_only=True),
        Case("mlp_8192", {"M": 16384, "I": 8192}, models_only=True),
        Case("mlp_11008", {"M": 8192, "I": 11008}, models_only=True),
        Case("mlp_9216_gelu_tanh", {"M": 8192, "I": 9216}, {"activation": "gelu_tanh"}, models_only=True),
        Case("mlp_4096_gelu", {"M": 16384, "I": 4096}, {"activation": "gelu"}, models_only=True),
        Case("mlp_2048_limited", {"M": 32768, "I": 2048, "packed": 1}, {"limit": 10.0}, models_only=True),
        Case("mlp_1280_limited_activation", {"M": 32768, "I": 1280}, _LIMITED_ACTIVATION, models_only=True),
        Case("mlp_2880_interleaved", {"M": 16384, "I": 2880, "packed": 1}, {"interleaved": True}, models_only=True),
        Case(
            "mlp_2880_interleaved_sloped",
            {"M": 16384, "I": 2880, "packed": 1},
            {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0, "interleaved": True},
            models_only=True,
        ),
        Case("odd_5121", {"M": 1311, "I": 5121, "packed": 1}, models_only=True),
    ),
    inputs=inputs,
    differentiable=("gate", "up"),
    empty=Case("empty", {"M": 0, "I": 64}),
    cost=cost,
    mutations=(
        Mutation("gate and up swapped", _swapped),
        Mutation("tanh form of gelu for the exact one and the reverse", _other_gelu),
        Mutation("last column dropped", _drops_last_column),
        Mutation("derivative without the inner part", _slope_is_the_ratio),
        *(
            Mutation(f"{option} ignored", _without(option))
            for option in ("interleaved", "limit", "limit_on", "alpha", "gate_scale", "up_offset")
        ),
        Mutation("gradient beyond the limit", _gradient_beyond_the_limit),
    ),
    compile_cases=(
        "mlp_14336",
        "mlp_14336_packed",
        "mlp_9216_gelu_tanh",
        "mlp_4096_gelu",
        "relu2",
        "odd_5121",
        "mlp_2048_limited",
        "mlp_1280_limited_activation",
        "mlp_2880_interleaved",
        "mlp_2880_interleaved_sloped",
        "interleaved_up_first",
    ),
)
