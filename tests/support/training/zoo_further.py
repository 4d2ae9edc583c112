"""More models of Hugging Face, of as many kinds of structure as there are: `make soak-zoo` runs them, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zoo_models import (
    BERT,
    KEPT_TOKENS,
    LLAMA,
    SEQ2SEQ,
    VIT,
    WAV2VEC2,
    B,
    Entry,
    T,
    hugging_face,
    images,
    language,
    speech,
    unmasked,
)
from zoo_torch import H, L, V

__all__ = ["FURTHER"]

Inputs = Callable[[], dict[str, Any]]


def _entry(model: str, config: str, inputs: Inputs = language, drops: bool = True, **sizes: Any) -> Entry:
    return Entry(hugging_face(model, config, **sizes), inputs, drops)


_GPT = {"vocab_size": V, "n_embd": H, "n_layer": L, "n_head": 2, "n_positions": 2 * T, **KEPT_TOKENS}
_EXPERTS = {**LLAMA, "num_experts_per_tok": 2}
_ROUTED = {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": H}
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
_POSITIONS = {"max_position_embeddings": 3 * T}
_NO_LAYERDROP = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
_LINEAR_ATTENTION = {
    f"linear_{what}": size
    for what, size in (("num_value_heads", 2), ("num_key_heads", 2), ("key_head_dim", 8), ("value_head_dim", 8))
}

_DECODERS: dict[str, Entry] = {
    "GPT-J": _entry("GPTJForCausalLM", "GPTJConfig", **_GPT, rotary_dim=4, attn_pdrop=0.1),
    "GPT-Neo": _entry(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        vocab_size=V,
        hidden_size=H,
        num_layers=L,
        num_heads=2,
        attention_types=[[["global", "local"], 2]],
        resid_dropout=0.1,
        **_POSITIONS,
        **KEPT_TOKENS,
    ),
    "Falcon": _entry("FalconForCausalLM", "FalconConfig", **BERT, hidden_dropout=0.1),
    "StableLM": _entry("StableLmForCausalLM", "StableLmConfig", **LLAMA),
    "Cohere": _entry("CohereForCausalLM", "CohereConfig", **LLAMA, **KEPT_TOKENS),
    "OLMo 2": _entry("Olmo2ForCausalLM", "Olmo2Config", **LLAMA),
    "Granite": _entry("GraniteForCausalLM", "GraniteConfig", **LLAMA),
    "SmolLM 3": _entry("SmolLM3ForCausalLM", "SmolLM3Config", **LLAMA, **KEPT_TOKENS),
    "LLaVA": _entry(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        lambda: {
            "input_ids": torch.cat((torch.full((B, 4), V - 1), torch.randint(3, V - 1, (B, T))), 1),
            "pixel_values": torch.randn(B, 3, 8, 8),
            "labels": torch.randint(3, V - 1, (B, T + 4)),
        },
        text_config={**LLAMA, "model_type": "llama"},
        vision_config={
            **{key: VIT[key] for key in VIT if key not in ("num_labels", "hidden_dropout_prob")},
            "num_hidden_layers": 2,
            "model_type": "clip_vision_model",
        },
        image_token_index=V - 1,
        vision_feature_select_strategy="default",
    ),
}

_MIXTURES: dict[str, Entry] = {
    "Qwen2 MoE": _entry("Qwen2MoeForCausalLM", "Qwen2MoeConfig", **_ROUTED, shared_expert_intermediate_size=H),
    "OLMoE": _entry("OlmoeForCausalLM", "OlmoeConfig", **_EXPERTS, num_experts=4),
    "GPT-OSS": _entry(
        "GptOssForCausalLM", "GptOssConfig", **_EXPERTS, head_dim=8, num_local_experts=4, sliding_window=4
    ),
    "DeepSeek-V3": _entry(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        **{**_EXPERTS, **_LATENT, "num_key_value_heads": 2},
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=H,
        first_k_dense_replace=1,
    ),
    "Llama 4": _entry(
        "Llama4ForCausalLM", "Llama4TextConfig", **LLAMA, head_dim=8, num_local_experts=4, intermediate_size_mlp=H
    ),
    "NLLB-MoE": _entry(
        "NllbMoeForConditionalGeneration",
        "NllbMoeConfig",
        **{**SEQ2SEQ, **_POSITIONS, **_NO_LAYERDROP},
        num_experts=4,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
    ),
    "Qwen3-Next": _entry(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        **{**_ROUTED, **_LINEAR_ATTENTION},
        head_dim=8,
        shared_expert_intermediate_size=H,
    ),
}

_RECURRENT: dict[str, Entry] = {
    "RWKV": _entry(
        "RwkvForCausalLM",
        "RwkvConfig",
        unmasked,
        drops=False,
        vocab_size=V,
        hidden_size=H,
        num_hidden_layers=L,
        context_length=2 * T,
    ),
    "RecurrentGemma": _entry(
        "RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", **LLAMA, lru_width=H, attention_window_size=4
    ),
    "Bamba": _entry(
        "BambaForCausalLM",
        "BambaConfig",
        **LLAMA,
        attn_layer_indices=[1, 3],
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=4,
        mamba_chunk_size=4,
        mamba_n_groups=1,
    ),
}

_ENCODERS: dict[str, Entry] = {
    "XLM-RoBERTa": _entry("XLMRobertaForMaskedLM", "XLMRobertaConfig", **BERT),
    "ModernBERT": _entry(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        **BERT,
        **KEPT_TOKENS,
        embedding_dropout=0.1,
        cls_token_id=1,
        sep_token_id=2,
    ),
    "XLNet": _entry(
        "XLNetLMHeadModel", "XLNetConfig", unmasked, vocab_size=V, d_model=H, n_layer=L, n_head=2, d_inner=2 * H
    ),
    "MPNet": _entry("MPNetForMaskedLM", "MPNetConfig", **BERT),
    "ConvBERT": _entry("ConvBertForMaskedLM", "ConvBertConfig", **BERT, embedding_size=H),
    "FNet": _entry(
        "FNetForMaskedLM",
        "FNetConfig",
        unmasked,
        vocab_size=V,
        hidden_size=H,
        num_hidden_layers=L,
        intermediate_size=2 * H,
    ),
    "Longformer": _entry("LongformerForMaskedLM", "LongformerConfig", **BERT, **KEPT_TOKENS, attention_window=4),
    "BigBird": _entry("BigBirdForMaskedLM", "BigBirdConfig", **BERT, attention_type="original_full"),
    "Funnel": Entry(
        hugging_face(
            "FunnelForMaskedLM",
            "FunnelConfig",
            vocab_size=V,
            d_model=H,
            block_sizes=[2, 2],
            n_head=2,
            d_head=8,
            d_inner=2 * H,
            num_decoder_layers=2,
        ),
        language,
        refused="no module returned it",
    ),
}

_SEQ2SEQS: dict[str, Entry] = {
    "Pegasus": _entry("PegasusForConditionalGeneration", "PegasusConfig", **SEQ2SEQ, **_POSITIONS),
    "mBART": _entry("MBartForConditionalGeneration", "MBartConfig", **SEQ2SEQ, **_POSITIONS),
    "M2M100": _entry("M2M100ForConditionalGeneration", "M2M100Config", **SEQ2SEQ, **_POSITIONS, **_NO_LAYERDROP),
    "LED": _entry(
        "LEDForConditionalGeneration",
        "LEDConfig",
        **SEQ2SEQ,
        max_encoder_position_embeddings=3 * T,
        max_decoder_position_embeddings=3 * T,
        attention_window=4,
    ),
}

_VISION_AND_SPEECH: dict[str, Entry] = {
    "DeiT": _entry("DeiTForImageClassification", "DeiTConfig", images(8), **VIT),
    "BEiT": _entry("BeitForImageClassification", "BeitConfig", images(8), **VIT, drop_path_rate=0.1),
    "DINOv2": _entry("Dinov2ForImageClassification", "Dinov2Config", images(8), **VIT),
    "MobileNetV2": _entry(
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        images(32),
        num_labels=5,
        depth_multiplier=0.25,
        depth_divisible_by=4,
        min_depth=4,
    ),
    "RegNet": _entry(
        "RegNetForImageClassification",
        "RegNetConfig",
        images(32),
        drops=False,
        num_labels=5,
        embedding_size=8,
        hidden_sizes=[8, 8, 16],
        depths=[2, 2, 2],
        groups_width=4,
    ),
    "SegFormer": _entry(
        "SegformerForImageClassification",
        "SegformerConfig",
        images(32),
        num_labels=5,
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 8, 16, 16],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=8,
    ),
    "HuBERT": _entry("HubertForCTC", "HubertConfig", speech, **WAV2VEC2, layerdrop=0.0),
    "WavLM": _entry("WavLMForCTC", "WavLMConfig", speech, **WAV2VEC2, layerdrop=0.0),
    "Wav2Vec2 SpecAugment": Entry(
        hugging_face(
            "Wav2Vec2ForCTC",
            "Wav2Vec2Config",
            **{**WAV2VEC2, "apply_spec_augment": True, "mask_time_prob": 0.3, "mask_time_length": 2},
            layerdrop=0.0,
        ),
        speech,
        refused="numpy's generator",
    ),
}

FURTHER: dict[str, Entry] = {
    **_DECODERS,
    **_MIXTURES,
    **_RECURRENT,
    **_ENCODERS,
    **_SEQ2SEQS,
    **_VISION_AND_SPEECH,
}
