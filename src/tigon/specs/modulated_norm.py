"""Cases of `modulated_norm`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.modulated_norm import ModulatedResidual, modulated_norm_reference
from ._spec import Case, Cost, Make, Mutation, OpSpec

# Values of `without`: which of the arguments are absent.
_WEIGHT, _SHIFT, _GATE = 1, 2, 4
# Values of `by_token`: which of the modulations have a row for each token.
_SCALE_TOO, _SHIFT_TOO, _GATE_TOO = 1, 2, 4


def _inputs(case: Case, make: Make) -> dict[str, Tensor | None]:
    without, by_token = case.sizes.get("without", 0), case.sizes.get("by_token", 0)
    shape = case.B, *((case.S,) if "S" in case.sizes else ()), case.N

    def modulation(absent: int, token: int) -> Tensor | None:
        if without & absent:
            return None
        if by_token & token:
            return make.randn(*shape, scale=0.5)
        ones = (1,) if case.sizes.get("with_axis") else ()
        return make.randn(case.B, *ones, case.N, scale=0.5)

    has_residual = case.sizes.get("residual", 0)
    # Beside the residual stream x must be seen in the sum, in rows of any scale.
    x = make.rows(*shape) + case.sizes.get("mean", 0)
    return {
        "x": x,
        "scale": modulation(0, _SCALE_TOO),
        "shift": modulation(_SHIFT, _SHIFT_TOO),
        "weight": None
        if without & _WEIGHT
        else make.randn(case.N, mean=0.5, dtype=torch.float32 if case.sizes.get("fp32_weight") else None),
        "residual": make.rows(*shape) if has_residual else None,
        "gate": modulation(_GATE, _GATE_TOO) if has_residual else None,
    }


def _cost(case: Case, itemsize: int) -> Cost:
    without, by_token = case.sizes.get("without", 0), case.sizes.get("by_token", 0)
    has_residual = bool(case.sizes.get("residual", 0))
    tokens, row = case.B * case.sizes.get("S", 1), case.N * itemsize
    tensor = tokens * row
    modulation = 0
    for absent, token in ((0, _SCALE_TOO), (_SHIFT, _SHIFT_TOO), (_GATE, _GATE_TOO)):
        if not without & absent and (absent != _GATE or has_residual):
            modulation += tensor if by_token & token else case.B * row
    weight = 0 if without & _WEIGHT else row
    statistics = (8 if case.options.get("norm") == "layer" else 4) * tokens
    has_gate = has_residual and not without & _GATE
    return Cost(
        forward_bytes=(4 if has_residual else 2) * tensor + modulation + weight + statistics,
        # Read: dy, s, with a residual the gradient of s, with a gate x. Written: ds, with a gate dx too.
        backward_bytes=(3 + has_residual + 2 * has_gate) * tensor + 2 * modulation + 2 * weight + statistics,
    )


def _changed(**change: Tensor | None):
    """The reference with arguments replaced by functions of themselves."""

    def function(x: Tensor, scale: Tensor, shift: Tensor | None = None, **options):
        given = {"scale": scale, "shift": shift, **options}
        for name, new in change.items():
            if given.get(name) is not None:
                given[name] = new(given[name])
        return modulated_norm_reference(x, **given)

    return function


def _first_sample(t: Tensor) -> Tensor:
    return t[:1].expand(t.shape)


def _norm_is_constant(x: Tensor, scale: Tensor, shift: Tensor | None = None, **options):
    """Right values; the gradient lacks the terms of the statistics."""
    out = modulated_norm_reference(x, scale, shift, **options)
    if options.get("residual") is not None:
        return out
    s = x.detach()
    centred = s - s.mean(-1, keepdim=True) if options.get("norm") == "layer" else s
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + options.get("eps", 1e-6))
    linear = (x - s) * rstd
    if options.get("weight") is not None:
        linear = linear * options["weight"].detach()
    factor = 1 + (scale if scale.shape == x.shape else scale.reshape(x.shape[0], *(1 for _ in x.shape[1:-1]), -1))
    return modulated_norm_reference(s, scale, shift, **options) + linear * factor.detach()


def _sum_without_gradient(x: Tensor, scale: Tensor, shift: Tensor | None = None, **options):
    """The gradient of the returned sum is lost."""
    out = modulated_norm_reference(x, scale, shift, **options)
    if options.get("residual") is None:
        return out
    return ModulatedResidual(out.y, out.residual.detach() + 0 * out.y)


def _padded_square(x: Tensor, scale: Tensor, shift: Tensor | None = None, **options):
    """Padding counted in the mean square."""
    n = x.shape[-1]
    wider = ((1 << (n - 1).bit_length()) / n) ** 0.5
    weight = options.pop("weight", None)
    return modulated_norm_reference(
        x,
        scale,
        shift,
        weight=wider * (torch.ones_like(x[(0,) * (x.dim() - 1)]) if weight is None else weight),
        **options,
    )


SPEC = OpSpec(
    name="modulated_norm",
    cases=(
        Case("odd", {"B": 2, "S": 5, "N": 45, "residual": 1}),
        Case("layer", {"B": 2, "S": 9, "N": 65, "residual": 1}, {"norm": "layer"}),
        Case("rms_alone", {"B": 2, "S": 5, "N": 48}),
        Case("layer_alone", {"B": 2, "S": 6, "N": 33, "without": _WEIGHT}, {"norm": "layer"}),
        Case("large_mean", {"B": 3, "S": 5, "N": 129, "mean": 1000}, {"norm": "layer"}),
        Case("no_shift", {"B": 2, "S": 5, "N": 40, "without": _SHIFT | _WEIGHT}),
        Case("no_gate", {"B": 2, "S": 5, "N": 40, "residual": 1, "without": _GATE}),
        Case("with_axis", {"B": 2, "S": 3, "N": 24, "residual": 1, "with_axis": 1}),
        Case("by_token", {"B": 2, "S": 3, "N": 24, "residual": 1, "by_token": 7}),
        Case("gate_by_sample", {"B": 2, "S": 3, "N": 24, "residual": 1, "by_token": 3}, {"norm": "layer"}),
        Case("no_tokens", {"B": 5, "N": 17, "residual": 1}),
        Case("one_row", {"B": 1, "S": 1, "N": 257, "residual": 1}),
        Case("many_tokens", {"B": 2, "S": 300, "N": 12, "residual": 1}, {"norm": "layer"}),
        Case("fp32_weight", {"B": 2, "S": 3, "N": 16, "residual": 1, "fp32_weight": 1}),
        Case("wide", {"B": 1, "S": 3, "N": 4100, "residual": 1, "without": _WEIGHT | _SHIFT}, {"norm": "layer"}),
        Case("two_blocks", {"B": 1, "S": 2, "N": 16400, "without": _WEIGHT | _SHIFT}),
        Case("dit_3072", {"B": 8, "S": 4096, "N": 3072, "without": _WEIGHT}, {"norm": "layer"}, models_only=True),
        Case("dit_3072_weight", {"B": 8, "S": 4096, "N": 3072}, models_only=True),
        Case(
            "dit_3072_residual",
            {"B": 8, "S": 4096, "N": 3072, "residual": 1, "without": _WEIGHT},
            {"norm": "layer"},
            models_only=True,
        ),
        Case("dit_5120_residual", {"B": 2, "S": 8192, "N": 5120, "residual": 1}, models_only=True),
        Case("dit_1152_residual", {"B": 64, "S": 256, "N": 1152, "residual": 1}, models_only=True),
        Case("by_token_3072", {"B": 2, "S": 4096, "N": 3072, "residual": 1, "by_token": 7}, models_only=True),
        Case("wide_16384", {"B": 2, "S": 1024, "N": 16384, "residual": 1}, {"norm": "layer"}, models_only=True),
    ),
    inputs=_inputs,
    differentiable=("x", "scale", "shift", "weight", "residual", "gate"),
    empty=Case("empty", {"B": 2, "S": 0, "N": 24, "residual": 1}),
    cost=_cost,
    mutations=(
        Mutation("scale without the one", _changed(scale=lambda t: t - 1)),
        Mutation("scale of the first sample for all", _changed(scale=_first_sample)),
        Mutation("shift of the first sample for all", _changed(shift=_first_sample)),
        Mutation("gate lost", _changed(gate=lambda t: 1 + 0 * t)),
        Mutation("gradient without the terms of the statistics", _norm_is_constant),
        Mutation("gradient of the sum lost", _sum_without_gradient),
        Mutation("mean square over padded lanes", _padded_square),
        Mutation("weight lost", _changed(weight=lambda t: 1 + 0 * t)),
    ),
)
