from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon.ops._check import require

from .. import _losses
from .._missing import missing_from
from .._options import require_default

__getattr__ = missing_from(__name__)


class LigerFusedLinearCrossEntropyFunction:
    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        ce_impl: Any = None,
        ce_mode: Any = None,
        chunk_mem_const: float = 1,
    ) -> _losses.Parts:
        require_default("LigerFusedLinearCrossEntropyFunction", ce_impl=ce_impl, ce_mode=ce_mode)
        return _losses.of_hidden(
            _input,
            weight,
            target,
            bias,
            ce_weight,
            ignore_index,
            lse_square_scale,
            label_smoothing,
            reduction,
            softcap,
            return_z_loss,
            accum_dtype,
            use_token_scaling,
            return_token_accuracy,
            return_predicted_tokens,
            chunk_mem_const,
        )


def fused_linear_cross_entropy_forward(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    ce_weight: Tensor | None = None,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    ce_impl: Any = None,
    ce_mode: Any = None,
    token_grad_output: Tensor | None = None,
    compute_gradients: bool | None = None,
    weight_requires_grad: bool | None = None,
    chunk_mem_const: float = 1,
) -> tuple[Any, ...]:
    """The four results and the gradients of the loss for hidden states, weight and bias."""
    name = "fused_linear_cross_entropy_forward"
    require_default(name, ce_impl=ce_impl, ce_mode=ce_mode, token_grad_output=token_grad_output)
    for option, value in (("compute_gradients", compute_gradients), ("weight_requires_grad", weight_requires_grad)):
        require(value in (None, True), name, option, "None or True", value)
    require(reduction != "none", name, "reduction", "'mean' or 'sum', whose gradient is one tensor", repr(reduction))
    with torch.enable_grad():
        inputs = [None if t is None else t.detach().requires_grad_() for t in (_input, weight, bias)]
        parts = _losses.of_hidden(
            inputs[0],
            inputs[1],
            target,
            inputs[2],
            ce_weight,
            ignore_index,
            lse_square_scale,
            label_smoothing,
            reduction,
            softcap,
            return_z_loss,
            accum_dtype,
            use_token_scaling,
            return_token_accuracy,
            return_predicted_tokens,
            chunk_mem_const,
        )
        gradients = torch.autograd.grad(parts.loss, [t for t in inputs if t is not None])
    loss, *others = (None if t is None else t.detach() for t in parts)
    return (loss, *others, *gradients, *[None] * (3 - len(gradients)))


def fused_linear_cross_entropy_backward(
    grad_output: Tensor, grad_input: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients times the upstream gradient; those given are left as they are."""
    return tuple(None if t is None else t * grad_output.to(t.dtype) for t in (grad_input, grad_weight, grad_bias))
