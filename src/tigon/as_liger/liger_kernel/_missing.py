"""What Liger-Kernel has and tigon has not: an import of it fails by name, with the reason.

docs/liger.md shows this table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Feature(NamedTuple):
    """Names that raise ImportError wherever they are looked for, and modules that hold nothing else."""

    reason: str
    names: str
    modules: str


FEATURES = (
    Feature(
        "no divergences with a projection or with a cross entropy; JSD, KL and TVD of whole rows are there",
        "LigerFusedCETVDLoss LigerFusedCETVDFunction fused_ce_tvd_forward fused_ce_tvd_backward"
        " LigerFusedLinearJSD LigerFusedLinearJSDFunction fused_linear_jsd fused_linear_jsd_forward"
        " fused_linear_jsd_backward liger_fused_linear_jsd"
        " LigerFusedLinearKLDivLoss LigerFusedLinearKLDivFunction fused_linear_kl_div_forward"
        " fused_linear_kl_div_backward liger_fused_linear_kl_div",
        "ops.fused_ce_tvd ops.fused_linear_jsd ops.fused_linear_kl_div"
        " transformers.fused_ce_tvd transformers.fused_linear_jsd transformers.fused_linear_kl_div",
    ),
    Feature(
        "no bases to build chunked losses on, and no pieces of them: tigon.losses has functions of hidden states,"
        " tigon.linear_log_probs what a loss of one's own needs",
        "LigerFusedLinearDistillationBase LigerFusedLinearPPOBase LigerFusedLinearPreferenceBase"
        " LigerFusedLinearUnpairedPreferenceBase clip_coef_fn get_gamma_weights k3_loss_fn sapo_loss_fn",
        "chunked_loss.fused_linear_distillation chunked_loss.fused_linear_ppo chunked_loss.fused_linear_preference"
        " chunked_loss.fused_linear_unpaired_preference",
    ),
    Feature(
        "no policy losses of logits, and no trainers",
        "GrpoLossFunction fused_selective_log_softmax triton_grpo_loss LigerORPOTrainer",
        "ops.grpo_loss transformers.grpo_loss transformers.trainer",
    ),
    Feature(
        "not under this name; tigon.linear_log_probs has log-probabilities and entropies of rows",
        "LigerFusedLinearScaledCrossEntropyFunction",
        "ops.fused_linear_scaled_cross_entropy",
    ),
    Feature(
        "not under these names; tigon.vocab_parallel_linear_cross_entropy is the loss of ranks that share classes",
        "LigerFusedLinearScaledCrossEntropyTPFunction LigerVocabParallelCEFunction LigerVocabParallelCrossEntropy"
        " liger_fused_linear_scaled_cross_entropy_tp validate_formula_and_mode configure FusedLinearCrossEntropyConfig",
        "ops.configure ops.vocab_parallel_cross_entropy transformers.vocab_parallel_cross_entropy",
    ),
    Feature(
        "no operator for polynomial and dynamic-tanh norms",
        "LigerDyT LigerDyTFunction liger_dyt liger_dyt_fwd liger_dyt_bwd"
        " LigerPolyNorm LigerPolyNormFunction liger_poly_norm poly_norm_forward poly_norm_backward",
        "ops.dyt ops.poly_norm transformers.dyt transformers.poly_norm",
    ),
    Feature(
        "no operator for attention of these kinds, hyper-connections and embeddings",
        "LigerAttnResFunction attn_res_forward attn_res_backward liger_attn_res"
        " LigerEmbedding LigerEmbeddingFunction"
        " LigerFusedNeighborhoodAttention LigerFusedNeighborhoodAttentionConfig LigerFusedNeighborhoodAttentionFunction"
        " LigerFusedNeighborhoodAttentionLayer fused_neighborhood_attention_forward liger_fused_neighborhood_attention"
        " LigerMHC LigerMHCCoeffsFunction LigerMHCPostResFunction LigerMHCPreFunction liger_mhc_apply liger_mhc_coeffs"
        " liger_mhc_forward liger_mhc_post_res liger_mhc_pre mhc_mm_norm_bwd mhc_mm_norm_fwd mhc_post_res_bwd"
        " mhc_post_res_fwd mhc_pre_bwd mhc_pre_fwd mhc_sinkhorn_bwd mhc_split_sinkhorn_fwd"
        " LigerMultiTokenAttention LigerMultiTokenAttentionFunction liger_multi_token_attention",
        "ops.attn_res ops.experimental ops.fused_neighborhood_attention ops.mhc ops.multi_token_attention"
        " transformers.experimental transformers.fused_neighborhood_attention transformers.mhc"
        " transformers.multi_token_attention",
    ),
    Feature(
        "no kernel over experts; tigon.patch fuses the gated product of stacked experts in the model's own forward",
        "LigerExperts LigerExpertParallelFusedMoe LigerFusedMoEFunction MoEConfig compute_routing_metadata",
        "ops.fused_moe transformers.moe",
    ),
    Feature(
        "no MLP in one kernel with its projections or in shards of the sequence; `transformers.mlp` has the classes",
        "LigerMLPFunction LigerTiledGEGLUMLP LigerTiledMLPFunction LigerTiledSwiGLUMLP apply_tiled_mlp gemm_swiglu"
        " get_bucket_m swiglu_backward_dGU swiglu_backward_dI",
        "ops.mlp ops.tiled_mlp transformers.tiled_mlp",
    ),
    Feature(
        "launchers by themselves: their order of arguments and what they save belong to the kernels behind them",
        "cross_entropy_forward cross_entropy_backward fused_add_rms_norm_forward fused_add_rms_norm_backward"
        " geglu_forward geglu_backward group_norm_forward group_norm_backward jsd_forward jsd_backward"
        " kldiv_forward_triton kldiv_backward_triton layer_norm_forward layer_norm_backward llama4_rope_forward"
        " qwen2vl_mrope_forward qwen2vl_mrope_backward relu_squared_forward relu_squared_backward rms_norm_forward"
        " rms_norm_backward rope_forward rope_backward swiglu_forward swiglu_backward swiglu_fused_gate_up_forward"
        " swiglu_fused_gate_up_backward tv_distance_forward_triton tvd_backward_triton liger_cross_entropy_kernel"
        " modulated_rms_norm_forward modulated_rms_norm_backward MAX_FUSED_SIZE amp_custom_bwd amp_custom_fwd"
        " calculate_settings compare_version device_context element_mul_kernel ensure_contiguous"
        " get_amp_custom_fwd_bwd get_npu_core_count get_num_warps is_hip set_large_grf_mode torch_to_triton_dtype",
        "",
    ),
    Feature(
        "one implementation of each operator, chosen by tigon.backend",
        "available_backends available_impls get_backend get_impl set_backend set_impl infer_device_arch"
        " get_total_gpu_memory transformers_version_dispatch",
        "backends env_report ops.backends ops.cute ops.cutedsl ops.cutile testing triton",
    ),
    Feature(
        "no forwards of models; tigon.patch(model) fuses the loss of the model's own forward, sharded or not",
        "causal_forward lce_forward lce_forward_deprecated lce_forward_for_multimodal_conditional_generation"
        " lce_forward_conditional_generation lce_maybe_trainable_lm_head multimodal_forward _FSDPForwardRedirection",
        "transformers.fsdp",
    ),
    Feature(
        "no patch of Megatron-LM",
        "LigerMegatronCrossEntropy LigerMegatronRMSNorm LigerMegatronSwiGLU apply_liger_kernel_to_megatron",
        "megatron",
    ),
)
_REASON_OF_NAME = {name: feature.reason for feature in FEATURES for name in feature.names.split()}
_REASON_OF_MODULE = {name: feature.reason for feature in FEATURES for name in feature.modules.split()}
# All its modules but two are forwards, one for each model.
_FORWARDS = "transformers.model."


def _error(what: str, reason: str) -> ImportError:
    return ImportError(f"{what}: tigon has no counterpart yet: {reason}. See docs/liger.md", name=what)


def missing_from(module: str) -> Callable[[str], Any]:
    """A `__getattr__` for a module."""

    def __getattr__(name: str) -> Any:
        if name in _REASON_OF_NAME:
            raise _error(f"{module}.{name}", _REASON_OF_NAME[name])
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__


def refuse_module(module: str) -> None:
    """Raise ImportError with the reason for a module, by its whole name, that Liger-Kernel has and this package not."""
    path = module.partition(".")[2]
    if path.startswith(_FORWARDS):
        raise _error(module, _REASON_OF_NAME["lce_forward"])
    for name, reason in _REASON_OF_MODULE.items():
        if path == name or path.startswith(f"{name}."):
            raise _error(module, reason)
