"""Cases of `group_norm`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..ops.group_norm import group_norm_reference
from ._spec import Case, Cost, Make, Mutation, OpSpec


def _shape(case: Case) -> tuple[int, ...]:
    """K channels a group, so that fewer of them still are whole groups."""
    return case.B, case.options["num_groups"] * case.K, *(case.sizes[k] for k in "DHW" if k in case.sizes)


def _inputs(case: Case, make: Make) -> dict[str, Tensor | None]:
    vector_dtype = torch.float32 if case.sizes.get("fp32_vectors") else None
    without, shape = case.sizes.get("without", 0), _shape(case)
    groups = case.options["num_groups"]
    mean = case.sizes.get("mean", 0)
    # The mean is rounded in units that do not depend on the spread of a group: narrow ones would show luck alone.
    x = make.rows(case.B, groups, math.prod(shape[1:]) // groups, spread=0.0 if mean else 2.0) + mean
    return {
        "x": x.reshape(shape),
        "weight": None if without & 1 else make.randn(shape[1], mean=0.5, dtype=vector_dtype),
        "bias": None if without & 2 else make.randn(shape[1], dtype=vector_dtype),
    }


def _cost(case: Case, itemsize: int) -> Cost:
    shape = _shape(case)
    tensor, vector, statistics = (
        math.prod(shape) * itemsize,
        shape[1] * itemsize,
        8 * case.B * case.options["num_groups"],
    )
    return Cost(
        forward_bytes=2 * tensor + 2 * vector + statistics,
        backward_bytes=3 * tensor + 3 * vector + statistics,
    )


def _groups(x: Tensor, num_groups: int) -> Tensor:
    return x.reshape(x.shape[0], num_groups, -1)


def _affine(n: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y, shape = n.reshape(x.shape), (-1, *(1 for _ in x.shape[2:]))
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def _padded_variance(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Counts the lanes between the size of a group and the next power of two, which hold -mean after centring."""
    groups = _groups(x, num_groups)
    size = groups.shape[-1]
    mean = groups.mean(-1, keepdim=True)
    padding = (1 << (size - 1).bit_length()) - size
    var = ((groups - mean).square().sum(-1, keepdim=True) + padding * mean.square()) / size
    return _affine((groups - mean) * torch.rsqrt(var + eps), x, weight, bias)


def _interleaved_groups(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Every G-th channel makes a group."""
    turned = x.reshape(x.shape[0], -1, num_groups, *x.shape[2:]).transpose(1, 2)
    n = group_norm_reference(turned.reshape(x.shape), num_groups, eps=eps)
    return _affine(n.reshape(turned.shape).transpose(1, 2), x, weight, bias)


def _weight_of_the_group(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Every group is scaled by the weights of the first."""
    size = x.shape[1] // num_groups
    first = None if weight is None else weight[:size].repeat(num_groups)
    return group_norm_reference(x, num_groups, first, bias, eps=eps)


def _mean_is_constant(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Right values; the gradient lacks the term of the mean."""
    groups = _groups(x, num_groups)
    centred = groups - groups.mean(-1, keepdim=True).detach()
    return _affine(centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps), x, weight, bias)


def _one_pass_variance(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """mean(x^2) - mean(x)^2, which cancels where the mean is large."""
    groups = _groups(x, num_groups)
    mean = groups.mean(-1, keepdim=True)
    var = (groups.square().mean(-1, keepdim=True) - mean.square()).clamp_min(0)
    return _affine((groups - mean) * torch.rsqrt(var + eps), x, weight, bias)


def _no_bias(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    return group_norm_reference(x, num_groups, weight, None if bias is None else 0 * bias, eps=eps)


# Values of `without`: which of the two vectors are absent.
_WEIGHT, _BIAS = 1, 2

SPEC = OpSpec(
    name="group_norm",
    cases=(
        Case("odd", {"B": 3, "K": 3, "H": 5, "W": 7}, {"num_groups": 4}),
        Case("large_mean", {"B": 16, "K": 3, "W": 43, "mean": 1000}, {"num_groups": 3, "eps": 1e-6}),
        Case("weight_only", {"B": 2, "K": 4, "W": 16, "without": _BIAS}, {"num_groups": 2}),
        Case("bias_only", {"B": 2, "K": 4, "W": 17, "without": _WEIGHT}, {"num_groups": 2}),
        Case("bare", {"B": 2, "K": 3, "W": 16, "without": _WEIGHT | _BIAS}, {"num_groups": 2}),
        Case("no_positions", {"B": 5, "K": 6}, {"num_groups": 3}),
        Case("one_group", {"B": 1, "K": 10, "H": 3, "W": 9}, {"num_groups": 1}),
        Case("one_channel_a_group", {"B": 2, "K": 1, "H": 6, "W": 6}, {"num_groups": 5}),
        Case("three_axes", {"B": 2, "K": 2, "D": 3, "H": 4, "W": 5}, {"num_groups": 2}),
        Case("fp32_vectors", {"B": 2, "K": 3, "W": 11, "fp32_vectors": 1}, {"num_groups": 2}),
        Case("wide_backward", {"B": 1, "K": 3, "H": 50, "W": 63}, {"num_groups": 2}),
        Case("wide", {"B": 1, "K": 3, "H": 65, "W": 67, "mean": 10}, {"num_groups": 2}),
        Case("many_channels", {"B": 1, "K": 1100, "W": 9}, {"num_groups": 1}),
        Case("unet_512_64", {"B": 8, "K": 16, "H": 64, "W": 64}, {"num_groups": 32}, models_only=True),
        Case("unet_1280_32", {"B": 4, "K": 40, "H": 32, "W": 32}, {"num_groups": 32}, models_only=True),
        Case("unet_1280_8", {"B": 16, "K": 40, "H": 8, "W": 8}, {"num_groups": 32}, models_only=True),
        Case("vae_128_512", {"B": 1, "K": 4, "H": 512, "W": 512}, {"num_groups": 32, "eps": 1e-6}, models_only=True),
    ),
    inputs=_inputs,
    differentiable=("x", "weight", "bias"),
    empty=Case("empty", {"B": 0, "K": 2, "W": 3}, {"num_groups": 2}),
    cost=_cost,
    floor={
        # Without a weight an upstream gradient of ones has dx = 0, and rstd of the smallest groups is about 100.
        "bare": 2e-6,
        "bias_only": 2e-6,
    },
    mutations=(
        Mutation("variance over padded lanes", _padded_variance),
        Mutation("groups of every G-th channel", _interleaved_groups),
        Mutation("weight of the first group for all", _weight_of_the_group),
        Mutation("gradient without the mean term", _mean_is_constant),
        Mutation("variance from mean(x^2) - mean(x)^2", _one_pass_variance),
        Mutation("bias lost", _no_bias),
    ),
)
