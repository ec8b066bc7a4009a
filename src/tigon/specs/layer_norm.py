"""Cases of `layer_norm`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.layer_norm import layer_norm_reference
from ._spec import Case, Cost, Make, Mutation, OpSpec


def _inputs(case: Case, make: Make) -> dict[str, Tensor | None]:
    vector_dtype = torch.float32 if case.sizes.get("fp32_vectors") else None
    without = case.sizes.get("without", 0)
    return {
        "x": make.rows(case.M, case.N) + case.sizes.get("mean", 0),
        "weight": None if without & 1 else make.randn(case.N, mean=0.5, dtype=vector_dtype),
        "bias": None if without & 2 else make.randn(case.N, dtype=vector_dtype),
    }


def _cost(case: Case, itemsize: int) -> Cost:
    tensor, vector, statistics = case.M * case.N * itemsize, case.N * itemsize, 8 * case.M
    return Cost(
        forward_bytes=2 * tensor + 2 * vector + statistics,
        backward_bytes=3 * tensor + 3 * vector + statistics,
    )


def _padded_variance(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Counts the lanes between N and the next power of two, which hold -mean after centring."""
    n = x.shape[-1]
    padding = (1 << (n - 1).bit_length()) - n
    mean = x.mean(-1, keepdim=True)
    var = ((x - mean).square().sum(-1, keepdim=True) + padding * mean.square()) / n
    return _affine((x - mean) * torch.rsqrt(var + eps), weight, bias)


def _unbiased(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=min(1, x.shape[-1] - 1))
    return _affine((x - mean) * torch.rsqrt(var + eps), weight, bias)


def _mean_is_constant(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Right values; the gradient lacks the term of the mean."""
    centred = x - x.mean(-1, keepdim=True).detach()
    return _affine(centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps), weight, bias)


def _one_pass_variance(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """mean(x^2) - mean(x)^2, which cancels where the mean is large."""
    mean = x.mean(-1, keepdim=True)
    var = (x.square().mean(-1, keepdim=True) - mean.square()).clamp_min(0)
    return _affine((x - mean) * torch.rsqrt(var + eps), weight, bias)


def _no_bias(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    return layer_norm_reference(x, weight, None if bias is None else 0 * bias, eps=eps)


def _affine(n: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    n = n if weight is None else n * weight
    return n if bias is None else n + bias


# Values of `without`: which of the two vectors are absent.
_WEIGHT, _BIAS = 1, 2

SPEC = OpSpec(
    name="layer_norm",
    cases=(
        Case("odd", {"M": 37, "N": 300}),
        Case("large_mean", {"M": 9, "N": 129, "mean": 1000}, {"eps": 1e-6}),
        Case("no_bias", {"M": 17, "N": 64, "without": _BIAS}),
        Case("no_weight", {"M": 17, "N": 65, "without": _WEIGHT}),
        Case("bare", {"M": 9, "N": 48, "without": _WEIGHT | _BIAS}),
        Case("one_column", {"M": 5, "N": 1}),
        Case("one_row", {"M": 1, "N": 257}),
        Case("head_dim", {"M": 70, "N": 16}),
        Case("fp32_vectors", {"M": 7, "N": 65, "fp32_vectors": 1}),
        Case("wide", {"M": 3, "N": 8193}),
        Case("two_blocks", {"M": 2, "N": 20000, "mean": 10}),
        Case("hidden_4096", {"M": 16384, "N": 4096}, models_only=True),
        Case("hidden_8192", {"M": 8192, "N": 8192}, models_only=True),
        Case("hidden_1024", {"M": 32768, "N": 1024}, models_only=True),
        Case("hidden_768", {"M": 65536, "N": 768}, models_only=True),
        Case("head_128", {"M": 524288, "N": 128, "without": _BIAS}, models_only=True),
        Case("hidden_12288", {"M": 4096, "N": 12288}, models_only=True),
        Case("hidden_20480", {"M": 4096, "N": 20480}, models_only=True),
    ),
    inputs=_inputs,
    differentiable=("x", "weight", "bias"),
    empty=Case("empty", {"M": 0, "N": 64}),
    cost=_cost,
    floor={
        # A row of one element: dx cancels to the rounding of dy * weight.
        "one_column": 1e-6,
        # Without a weight an upstream gradient of ones has dx = 0, and rstd of the smallest rows is about 100.
        "bare": 2e-6,
    },
    mutations=(
        Mutation("variance over padded lanes", _padded_variance),
        Mutation("variance divided by N - 1", _unbiased),
        Mutation("gradient without the mean term", _mean_is_constant),
        Mutation("variance from mean(x^2) - mean(x)^2", _one_pass_variance),
        Mutation("bias lost", _no_bias),
    ),
)
