"""What makes each model tiny, and what some of them need beyond text. Data only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# Ids below are special tokens, so that random text never holds the place of an image.
FIRST_TEXT_ID = 96
ROPE = {"rope_type": "default", "rope_theta": 1e4}

Batch = dict[str, Any]
Fields = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """The numbers that differ between the two builds of a model. Heads are 16 wide in both."""

    width: int
    inner: int
    expert_inner: int
    heads: int
    kv_heads: int
    experts: int
    experts_per_token: int
    vocab: int
    batch: int
    tokens: int

    @property
    def state_heads(self) -> int:
        """Heads of a state-space mixer that is twice as wide as the model."""
        return self.width // 8


# The second has no two equal sizes, and none that is the double of another.
SMALL = Size(64, 128, 32, 4, 2, 4, 2, 256, 2, 16)
OTHER = Size(96, 160, 40, 6, 3, 5, 3, 251, 3, 24)


def sizes(s: Size) -> dict[str, int]:
    """Field name to tiny value. A field is never made larger, and left alone where its default is None,
    which mostly means that it follows from others, unless it is in `ALSO_IF_NONE`."""
    groups = (
        # widths
        (
            s.width,
            """hidden_size d_model n_embd dim emb_dim embed_dim word_embed_proj_dim embedding_size projection_dim
            input_embedding_size output_embedding_size projector_hidden_size out_hidden_size output_dim lru_width
            mm_embed_dim audio_embed_dim output_proj_dims backbone_hidden_size projection_hidden_size hidden_dim
            text_hidden_size hidden_size_global encoder_hidden_size decoder_hidden_size image_text_hidden_size
            patch_embed_hidden_size projector_output_dim shape_embed_dim pronunciation_embed_dim router_hidden_size
            image_token_embed_dim downsample_hidden_size position_embedding_size adapter_in_dim adapter_out_dim
            adapter_input_size projection_hidden_dim""",
        ),
        (
            s.inner,
            """intermediate_size ffn_dim dim_ff dff d_ff d_inner n_inner encoder_ffn_dim decoder_ffn_dim mlp_dim
            ffn_hidden_size feed_forward_size intermediate_size_mlp dense_intermediate_size
            prefix_dense_intermediate_size alignment_intermediate_size projection_intermediate_size
            expert_ffn_hidden_size""",
        ),
        (
            s.expert_inner,
            """moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size share_expert_dim
            moe_shared_expert_intermediate_size shared_experts_intermediate_size""",
        ),
        # depths
        (
            2,
            """num_hidden_layers n_layer n_layers num_layers layers encoder_layers decoder_layers depth num_blocks
            num_encoder_layers num_decoder_layers conf_num_hidden_layers num_global_layers""",
        ),
        (1, "resampler_depth aligner_num_add_layers merger_times depths"),
        # heads
        (
            s.heads,
            """num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads
            decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads
            conf_num_attention_heads swa_num_attention_heads index_n_heads linear_num_value_heads linear_num_heads
            resampler_n_heads resampler_heads""",
        ),
        (
            s.kv_heads,
            "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads linear_num_key_heads index_n_groups",
        ),
        (
            16,
            """head_dim kv_channels dim_head attention_head_size swa_head_dim index_head_dim linear_key_head_dim d_kv
            d_rel linear_value_head_dim linear_head_dim v_head_dim resampler_head_dim resampler_dim_head""",
        ),
        (8, "qk_rope_head_dim qk_nope_head_dim rotary_dim gated_norm_rank laurel_rank hidden_size_per_layer_input"),
        (16, "q_lora_rank kv_lora_rank o_lora_rank hc_lowrank adapter_rank"),
        # experts
        (s.experts, "num_experts n_routed_experts num_local_experts moe_num_experts"),
        (s.experts_per_token, "num_experts_per_tok moe_topk moe_top_k moe_k top_k_experts"),
        (2, "zero_expert_num"),
        (
            1,
            """n_group num_expert_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts
            first_k_dense_replace num_dense_layers""",
        ),
        # state-space models and linear attention
        (16, "mamba_d_state state_size ssm_state_size mamba_d_head mamba_head_dim"),
        (8, "chunk_size mamba_chunk_size mamba_dt_rank time_step_rank"),
        (s.state_heads, "mamba_n_heads mamba_num_heads"),
        (2 * s.width, "mamba_d_ssm"),
        (2, "n_groups n_mamba_heads"),
        # lengths and windows
        (128, "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions"),
        (
            8,
            """sliding_window sliding_window_size attention_window_size attention_chunk_size local_attention
            window_size keep_window_size rel_extent""",
        ),
        (4, "index_topk index_topk_blocks indexer_budget index_block_size"),
        # vocabularies
        (
            s.vocab,
            """vocab_size vocab_size_per_layer_input audio_vocab_size decoder_vocab_size codebook_size num_embeddings
            pronunciation_vocab_size shape_vocab_size mel_vocab_size encoder_hash_byte_group_vocab
            ngram_vocab_size_base num_centroids unpadded_vocab_size""",
        ),
        # vision and audio towers
        (32, "image_size crop_size resolution base_channels latent_channels output_channels num_mel_bins n_mel_bins"),
        (32, "input_feat_size max_source_positions"),
        (8, "patch_size num_filters"),
        (16, "num_position_embeddings"),
        (
            4,
            """num_query_tokens resampler_n_latents latent_query_num resampler_num_latents image_seq_length
            prompt_length mm_tokens_per_image num_image_tokens conf_attention_chunk_size
            conf_attention_context_left attention_context_left""",
        ),
        (64, "mm_posemb_size"),
    )
    return {name: value for value, fields in groups for name in fields.split()}


ALSO_IF_NONE = {"num_key_value_heads", "num_kv_heads", "head_dim", "num_experts_per_tok", "n_routed_experts"}

# Numbers whose usual values, 1 or far above the activations of a random model, hide whether they are applied.
VISIBLE: Fields = {
    "logits_scaling": 2.0,
    "logit_scale": 0.5,
    "lm_head_multiplier": 0.5,
    "final_logit_softcapping": 0.5,
    "logits_soft_cap": 0.5,
    "output_logit_soft_cap": 0.5,
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.8,
    "attention_multiplier": 0.3,
    "mlp_multipliers": [0.7, 1.3],
    "swiglu_limit": 0.1,
    "mlp_gate_softcap": 0.3,
    "mlp_up_softcap": 0.3,
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.9,
}

# The same of numbers that stand in a module and in no configuration, by the class of the module.
VISIBLE_IN_MODULES: dict[str, Fields] = {"GptOssExperts": {"limit": 0.3}}


def overrides(s: Size) -> dict[str, Fields]:
    """By configuration class, what the names of the fields do not tell; "sub.field" is a field of a part."""
    return {
        # layer patterns
        "BambaConfig": {"attn_layer_indices": [1]},
        "CohereCompassTextConfig": {
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                t: {**ROPE, "mrope_section": [2, 3, 3]} for t in ("sliding_attention", "full_attention")
            },
        },
        "Dots3NoteTextConfig": {
            "layer_types": ["indexed_attention", "sliding_attention"],
            "swa_num_attention_heads": s.heads,
            "swa_num_key_value_heads": s.heads,
            "swa_q_lora_rank": 16,
            "swa_kv_lora_rank": 16,
            "swa_head_dim": 16,
            "swa_qk_nope_head_dim": 8,
            "swa_v_head_dim": 16,
        },
        "Dots3NoteVisionConfig": {"mlp_layer_types": ["dense", "dense"]},
        "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"]},
        "Dots1Config": {"n_shared_experts": 1, "first_k_dense_replace": 1},
        "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
        "GraniteMoeHybridConfig": {"layer_types": ["linear_attention", "full_attention"]},
        "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
        "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
        "LaraMiniConfig": {"num_hidden_layers": 3},
        "Lfm3Config": {"num_hidden_layers": 3},
        "Lfm3VlVisionConfig": {"layer_types": ["conv", "full_attention"]},
        "RecurrentGemmaConfig": {"block_types": ["recurrent", "attention"]},
        "ReformerConfig": {
            "attn_layers": ["local", "lsh"],
            "axial_pos_embds_dim": [32, s.width - 32],
            "axial_pos_shape": [4, s.tokens // 4],
            "local_attn_chunk_length": 4,
            "lsh_attn_chunk_length": 4,
            "hash_seed": 0,
            "num_buckets": 4,
        },
        "ZambaConfig": {"num_hidden_layers": 4, "attn_layer_period": 1, "attn_layer_offset": 0},
        "Zamba2Config": {
            "num_hidden_layers": 3,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        },
        # options that are off by default
        "Gemma3nTextConfig": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.95, 0.0]},
        "GraniteMoeSharedConfig": {"shared_intermediate_size": s.expert_inner},
        "GraniteMoeSWAConfig": {"shared_intermediate_size": s.expert_inner},
        "Step3p7TextConfig": {"sliding_window": 8, "swiglu_limits": [0.1, 0.2], "swiglu_limits_shared": [0.1, 0.2]},
        # One pair of rotated elements is the same in every layout.
        "DeepseekV4Config": {"partial_rotary_factor": 0.5},
        # sizes that must agree
        "Apertus1p5Config": {
            "vision_config.codebook_size": 16,
            "audio_config.codebook_size": 16,
            "audio_config.codebook_dim": s.width,
            "image_token_offset": 100,
            "audio_token_offset": 116,
        },
        "BloomConfig": {"hidden_size": s.width},
        "CodeGenConfig": {"n_head": 4},
        "DiffLlamaConfig": {"num_key_value_heads": 2},
        "BltConfig": {"encoder_hash_byte_group_size": [3, 4]},
        "BltLocalDecoderConfig": {"num_key_value_heads": s.heads},
        "BltLocalEncoderConfig": {
            "intermediate_size": s.inner,
            "num_hidden_layers": 1,
            "num_key_value_heads": s.heads,
        },
        "DbrxConfig": {"ffn_config.hidden_size": s.width, "attn_config.rope_theta": 1e4, "attn_config.clip_qkv": 8.0},
        "Ernie4_5_VLMoeTextConfig": {
            "moe_intermediate_size": [s.expert_inner, s.expert_inner],
            "rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]},
        },
        "FunAsrNanoConfig": {"adaptor_config.intermediate_size": 16},
        "Glm4vMoeTextConfig": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
        "Glm5NextTextConfig": {"qk_rope_head_dim": 0, "head_dim": 0, "index_topk": 4, "index_kpool": 2},
        "Granite4VisionConfig": {
            "deepstack_layer_map": [[-1, 1]],
            "spatial_target_layers": [1],
            "downsample_rate": "1/2",
        },
        "GraniteSpeechEncoderConfig": {"hidden_dim": s.width, "dim_head": 16},
        "HYV4VLTextConfig": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
        "MimiConfig": {"codebook_size": 128},
        "Molmo2Config": {"adapter_config.vision_feature_layer": [1, 0]},
        "MuseSparkTextConfig": {"moe_hidden_size": s.width},
        "MuseSparkAudioConfig": {"patch_sizes": [4, 4], "hidden_sizes": [16, 32], "depths": [1, 1]},
        "NemotronH_Omni_Reasoning_V3_Config": {"vision_config.video_temporal_patch_size": 2},
        "UnlimitedOcrTextConfig": {"num_key_value_heads": s.heads},
        "InklingVisionConfig": {"num_hidden_layers": 8},
        "LongcatFlashConfig": {"head_dim": 8},
        "Mamba2Config": {"num_heads": s.state_heads, "head_dim": 16},
        "PaddleOCRTextConfig": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
        "PerceptionLMConfig": {"vision_config.model_args": {"embed_dim": s.width}},
        "PPFormulaNetVisionConfig": {
            "post_conv_in_channels": 32,
            "post_conv_mid_channels": 32,
            "post_conv_out_channels": s.width,
        },
        "Qwen4ExpTextConfig": {
            "indexer_n_heads": s.heads,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
        },
        "VisionEncoderDecoderConfig": {"decoder.add_cross_attention": True, "decoder.is_decoder": True},
        "xLSTMConfig": {"mode": "train", "hidden_size": 2 * s.width},
        # special tokens and languages without a default
        "Blip2Config": {"image_token_index": 90},
        "ChameleonConfig": {"vocabulary_map": {"<image>": 90}},
        "Emu3Config": {"vocabulary_map": {"<image>": 90, "<|extra_200|>": 91}},
        "InstructBlipConfig": {"image_token_index": 90},
        "InstructBlipVideoConfig": {"video_token_index": 90},
        "Qwen2_5OmniThinkerConfig": {"vision_start_token_id": 90},
        "Qwen3OmniMoeThinkerConfig": {"vision_start_token_id": 90},
        "UdopConfig": {"decoder_start_token_id": 0},
        "XmodConfig": {"default_language": "en_XX"},
    }


# Parts, as model types, where the default is missing or none that the model can use.
PARTS: dict[str, dict[str, str]] = {
    # The real tower needs timm; text does not pass through it.
    "FastVlmConfig": {"vision_config": "siglip_vision_model"},
    "Granite4VisionConfig": {"text_config": "granite4_vision_text"},
    "PerceptionLMConfig": {"vision_config": "siglip_vision_model"},
    "VisionEncoderDecoderConfig": {"encoder": "vit", "decoder": "gpt2"},
}


def _pixels(batch: Batch) -> torch.Tensor:
    return torch.randn(len(batch["labels"]), 3, 32, 32)


def _image(batch: Batch, config: Any) -> Batch:
    return {**batch, "pixel_values": _pixels(batch)}


def _image_tokens(batch: Batch, config: Any) -> Batch:
    """Pixels and, at the start of the text, as many image tokens as there are query tokens."""
    token = getattr(config, "image_token_index", None) or config.video_token_index
    batch["input_ids"][:, : config.num_query_tokens] = token
    batch["labels"][:, : config.num_query_tokens] = -100
    return _image(batch, config)


def _instruct(batch: Batch, config: Any) -> Batch:
    batch = _image_tokens(batch, config)
    return {**batch, "qformer_input_ids": batch["input_ids"], "qformer_attention_mask": batch["attention_mask"]}


def _instruct_video(batch: Batch, config: Any) -> Batch:
    batch = _instruct(batch, config)
    return {**batch, "pixel_values": batch["pixel_values"][:, None]}


def _encoder_decoder_image(batch: Batch, config: Any) -> Batch:
    labels = batch["labels"].clamp(min=0)
    return {"pixel_values": _pixels(batch), "decoder_input_ids": batch["input_ids"], "labels": labels}


def _codebooks(batch: Batch, config: Any) -> Batch:
    k = config.num_codebooks
    labels = batch["labels"].clamp(min=FIRST_TEXT_ID)[..., None].expand(-1, -1, k)
    return {"input_ids": batch["input_ids"].repeat_interleave(k, 0), "labels": labels}


def _image_per_text(batch: Batch, config: Any) -> Batch:
    mask = torch.ones(*batch["input_ids"].shape, 1, dtype=torch.long)
    return {**batch, "pixel_values": _pixels(batch)[:, None], "image_attention_mask": mask}


def _image_positions(batch: Batch, config: Any) -> Batch:
    b, t = batch["input_ids"].shape
    mask = (torch.arange(t) < config.latent_query_num).expand(b, -1)
    return {**_image(batch, config), "image_embeds_position_mask": mask}


def _patches(batch: Batch, config: Any) -> Batch:
    b, t = batch["input_ids"].shape
    width = 2 + config.vision_config.patch_embed_hidden_size
    return {"flattened_patches": torch.rand(b, t, width), "labels": batch["labels"]}


def _token_types(batch: Batch, config: Any) -> Batch:
    return {**batch, "mm_token_type_ids": torch.zeros_like(batch["input_ids"])}


def _boxes(batch: Batch, config: Any) -> Batch:
    return {**_image(batch, config), "bbox": torch.zeros(*batch["input_ids"].shape, 4)}


BATCHES: dict[str, Callable[[Batch, Any], Batch]] = {
    "BlipForConditionalGeneration": _image,
    "Blip2ForConditionalGeneration": _image_tokens,
    "GitForCausalLM": _image,
    "IdeficsForVisionText2Text": _image_per_text,
    "InstructBlipForConditionalGeneration": _instruct,
    "InstructBlipVideoForConditionalGeneration": _instruct_video,
    "Kosmos2ForConditionalGeneration": _image_positions,
    "Molmo2ForConditionalGeneration": _token_types,
    "MusicgenForCausalLM": _codebooks,
    "MusicgenMelodyForCausalLM": _codebooks,
    "Pix2StructForConditionalGeneration": _patches,
    "PPFormulaNetForConditionalGeneration": _encoder_decoder_image,
    "UdopForConditionalGeneration": _boxes,
    "VisionEncoderDecoderModel": _encoder_decoder_image,
}

# In the mappings of transformers, but without a loss from labels, or not to be built here.
LEFT_OUT = {
    "DiffusionGemmaForBlockDiffusion": "block diffusion; takes no labels",
    "Gemma3nForConditionalGeneration": "needs timm; its text model is Gemma3nForCausalLM",
    "Gemma4AssistantForCausalLM": "draft model for speculative decoding; takes no labels",
    "Gemma4UnifiedAssistantForCausalLM": "draft model for speculative decoding; takes no labels",
    "PI0ForConditionalGeneration": "robot actions with a flow-matching loss",
}

# Relative tolerance of gradients where fp32 itself is no better, measured against a run in fp64.
ROUNDING = {
    # One cancelling sum scales each of its lambda vectors; the native gradient is off by 4.5e-4.
    "DiffLlamaForCausalLM": 1e-3,
}
