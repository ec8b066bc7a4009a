from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tigon import losses
from tigon.ops._check import require, require_one_of

from .._missing import missing_from

_COUNTED = ("dapo", "cispo", "vespo")


def _num_items(attention_mask: Tensor, num_items_in_batch: Any) -> Tensor:
    """Tokens of all ranks, or those given, divided by the ranks; at least 1."""
    import torch.distributed as dist

    is_shared = dist.is_available() and dist.is_initialized()
    if num_items_in_batch is None:
        total = (attention_mask != 0).sum(dtype=torch.float32)
        if is_shared:
            dist.all_reduce(total)
    else:
        total = torch.as_tensor(num_items_in_batch, dtype=torch.float32).to(attention_mask.device).reshape(())
    return (total / (dist.get_world_size() if is_shared else 1)).clamp(min=1)


__getattr__ = missing_from(__name__)


class LigerFusedLinearGRPOFunction:
    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        beta: float = 0.04,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        vllm_is_ratio: Tensor | None = None,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        num_items_in_batch: Any = None,
    ) -> Any:
        name = "LigerFusedLinearGRPOLoss"
        require_one_of(name, "loss_type", loss_type, tuple(losses.POLICY))
        is_sequence = importance_sampling_level == "sequence"
        if vllm_is_ratio is not None and vllm_is_ratio.dim() == 1:
            vllm_is_ratio = vllm_is_ratio.unsqueeze(1)
        ratios = vllm_is_ratio is None or vllm_is_ratio.shape[1] == 1
        # Of tokens that type is weighted by the length of the sequence here, and summed over it in tigon.losses.
        fits = loss_type != "luspo" or (is_sequence and beta == 0 and ratios)
        expected = "'sequence' for luspo, without KL and ratios of tokens"
        require(fits, name, "importance_sampling_level", expected, repr(importance_sampling_level))
        has_reference = ref_per_token_logps is not None or ref_input is not None
        require(has_reference or not use_ref_model, name, "ref_per_token_logps", "a tensor, or ref_input", None)
        reference: dict[str, Any] = {"ref_log_probs": ref_per_token_logps if use_ref_model else None}
        if ref_per_token_logps is None and use_ref_model and ref_input is not None:
            reference = {"ref_hidden": ref_input, "ref_weight": ref_weight, "ref_bias": ref_bias}
        # Without a reference the policy is its own, and their divergence 0.
        has_kl = beta != 0 and any(t is not None for t in reference.values())
        out = losses.grpo(
            _input,
            weight,
            selected_token_ids,
            # Of tokens, so that shares of clipped sequences are of their tokens.
            advantages.unsqueeze(1).expand(attention_mask.shape) if is_sequence else advantages,
            bias=bias,
            mask=attention_mask,
            old_log_probs=old_per_token_logps,
            sampler_ratio=vllm_is_ratio,
            loss_type=loss_type,
            importance_level=importance_sampling_level,
            epsilon_low=epsilon_low,
            epsilon_high=epsilon_high,
            delta=delta if losses.POLICY[loss_type].term == "clip" else None,
            beta=beta if has_kl else 0.0,
            kl_takes_ratio=use_bias_correction_kl and has_kl,
            sapo_temperature_pos=sapo_temperature_pos,
            sapo_temperature_neg=sapo_temperature_neg,
            vespo_k_pos=vespo_k_pos,
            vespo_lambda_pos=vespo_lambda_pos,
            vespo_k_neg=vespo_k_neg,
            vespo_lambda_neg=vespo_lambda_neg,
            temperature=temperature,
            max_completion_length=max_completion_length if loss_type == "dr_grpo" else None,
            num_items=_num_items(attention_mask, num_items_in_batch) if loss_type in _COUNTED else None,
            **(reference if has_kl else {}),
        )
        return out.loss, ((out.kl, out.clip_ratio) if beta != 0 else (out.clip_ratio,))


class LigerFusedLinearGRPOLoss(torch.nn.Module):
    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
    ) -> None:
        super().__init__()
        self.beta = beta
        self.compiled = compiled
        self.use_ref_model = use_ref_model
        self.chunk_size = chunk_size
        self.epsilon_low = epsilon_low
        self.epsilon_high = epsilon_high
        self.loss_type = loss_type
        self.max_completion_length = max_completion_length
        self.importance_sampling_level = importance_sampling_level
        self.sapo_temperature_pos = sapo_temperature_pos
        self.sapo_temperature_neg = sapo_temperature_neg
        self.temperature = temperature
        self.delta = delta
        self.use_bias_correction_kl = use_bias_correction_kl
        self.vespo_k_pos = vespo_k_pos
        self.vespo_lambda_pos = vespo_lambda_pos
        self.vespo_k_neg = vespo_k_neg
        self.vespo_lambda_neg = vespo_lambda_neg

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Any = None,
    ) -> Any:
        return LigerFusedLinearGRPOFunction.apply(
            _input,
            lin_weight,
            selected_token_ids,
            attention_mask,
            advantages,
            bias,
            ref_per_token_logps,
            old_per_token_logps,
            ref_input,
            ref_weight,
            ref_bias,
            beta=self.beta,
            compiled=self.compiled,
            use_ref_model=self.use_ref_model,
            chunk_size=self.chunk_size,
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            loss_type=self.loss_type,
            max_completion_length=self.max_completion_length,
            importance_sampling_level=self.importance_sampling_level,
            sapo_temperature_pos=self.sapo_temperature_pos,
            sapo_temperature_neg=self.sapo_temperature_neg,
            temperature=self.temperature,
            delta=self.delta,
            use_bias_correction_kl=self.use_bias_correction_kl,
            vespo_k_pos=self.vespo_k_pos,
            vespo_lambda_pos=self.vespo_lambda_pos,
            vespo_k_neg=self.vespo_k_neg,
            vespo_lambda_neg=self.vespo_lambda_neg,
            vllm_is_ratio=vllm_is_ratio,
            num_items_in_batch=num_items_in_batch,
        )
