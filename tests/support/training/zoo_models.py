"""The models of the zoo: as they come from pip, small and with random weights, and those of plain torch.

Letters: B examples, T tokens, V vocabulary, H hidden, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo_torch import ConvolutionalClassifier, EncoderModel, H, L, ResNetModel, Seq2SeqModel, UNet, V

__all__ = [
    "BERT",
    "CHEAP",
    "KEPT_TOKENS",
    "LLAMA",
    "MODELS",
    "SEQ2SEQ",
    "VIT",
    "WAV2VEC2",
    "B",
    "Entry",
    "T",
    "hugging_face",
    "images",
    "language",
    "speech",
    "unmasked",
]

B, T = 3, 6


@dataclass(frozen=True)
class Entry:
    """A model and a batch for it. Only what is called imports transformers, which takes seconds."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    drops: bool = True
    """Its forward draws random numbers: dropout, stochastic depth, masks."""
    refused: str = ""
    """Words of the reason for which it is not cut; empty: it is."""


def tokens() -> Tensor:
    return torch.randint(3, V, (B, T))


def classes() -> Tensor:
    return torch.randint(0, 5, (B,))


def language() -> dict[str, Any]:
    attention = torch.ones(B, T, dtype=torch.long)
    attention[0, T - 1] = 0
    return {"input_ids": tokens(), "attention_mask": attention, "labels": tokens()}


def unmasked() -> dict[str, Any]:
    return {"input_ids": tokens(), "labels": tokens()}


def targets() -> dict[str, Any]:
    return {"tokens": tokens(), "targets": tokens()}


def images(size: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": torch.randn(B, 3, size, size), "labels": classes()}


def hugging_face(
    model: str, config: str, prepare: Callable[[Any], None] = lambda model: None, **sizes: Any
) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, model)(getattr(transformers, config)(**sizes)).train()
        prepare(made)
        return made

    return build


KEPT_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT = {
    "vocab_size": V,
    "hidden_size": H,
    "num_hidden_layers": L,
    "num_attention_heads": 2,
    "intermediate_size": 2 * H,
    "max_position_embeddings": 3 * T,
}
LLAMA = {**BERT, "num_key_value_heads": 1, "attention_dropout": 0.1}
_GPT2 = {"vocab_size": V, "n_embd": H, "n_layer": L, "n_head": 2, "n_positions": 2 * T, **KEPT_TOKENS}
_T5 = {
    "vocab_size": V,
    "d_model": H,
    "d_kv": 8,
    "d_ff": 2 * H,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
SEQ2SEQ = {
    "vocab_size": V,
    "d_model": H,
    **{f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")},
    **{f"{part}_ffn_dim": 2 * H for part in ("encoder", "decoder")},
    **KEPT_TOKENS,
    "decoder_start_token_id": 1,
}
VIT = {
    **{key: BERT[key] for key in BERT if key not in ("vocab_size", "max_position_embeddings")},
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 5,
    "hidden_dropout_prob": 0.1,
}
_MIXTRAL = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}
WAV2VEC2 = {
    **BERT,
    "conv_dim": (8, 8),
    "conv_kernel": (4, 2),
    "conv_stride": (4, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "pad_token_id": 0,
}


def speech() -> dict[str, Any]:
    return {"input_values": torch.randn(B, 200), "labels": torch.randint(3, V, (B, 4))}


_TORCH: dict[str, Entry] = {
    "torch TransformerEncoder": Entry(EncoderModel, targets),
    "torch Transformer": Entry(Seq2SeqModel, targets),
    "ResNet-like": Entry(ResNetModel, lambda: {"image": torch.randn(B, 3, 16, 16), "label": classes()}, drops=False),
    "convolutional classifier": Entry(
        ConvolutionalClassifier, lambda: {"image": torch.randn(B, 3, 16, 16), "label": classes()}
    ),
    "U-Net": Entry(UNet, lambda: {"image": torch.randn(B, 3, 16, 16), "mask": torch.randint(0, 5, (B, 16, 16))}),
}

_ENCODERS: dict[str, Entry] = {
    "BERT": Entry(hugging_face("BertForMaskedLM", "BertConfig", **BERT), language),
    "BERT eager attention": Entry(
        hugging_face("BertForMaskedLM", "BertConfig", **BERT, attn_implementation="eager"), language
    ),
    "BERT pre-training": Entry(
        hugging_face("BertForPreTraining", "BertConfig", **BERT),
        lambda: {**language(), "next_sentence_label": torch.randint(0, 2, (B,))},
    ),
    "RoBERTa": Entry(hugging_face("RobertaForMaskedLM", "RobertaConfig", **BERT), language),
    "DistilBERT": Entry(
        hugging_face(
            "DistilBertForMaskedLM", "DistilBertConfig", vocab_size=V, dim=H, n_layers=L, n_heads=2, hidden_dim=2 * H
        ),
        language,
    ),
    "ELECTRA": Entry(hugging_face("ElectraForMaskedLM", "ElectraConfig", **BERT, embedding_size=8), language),
    "DeBERTa": Entry(
        hugging_face(
            "DebertaForMaskedLM", "DebertaConfig", **BERT, relative_attention=True, pos_att_type=["c2p", "p2c"]
        ),
        language,
    ),
    "DeBERTa-v2": Entry(
        hugging_face(
            "DebertaV2ForMaskedLM",
            "DebertaV2Config",
            **BERT,
            relative_attention=True,
            position_buckets=4,
            pos_att_type=["c2p", "p2c"],
        ),
        language,
    ),
    "ALBERT": Entry(
        hugging_face("AlbertForMaskedLM", "AlbertConfig", **BERT, embedding_size=8), language, refused="one section"
    ),
}

_DECODERS: dict[str, Entry] = {
    "GPT-2": Entry(hugging_face("GPT2LMHeadModel", "GPT2Config", **_GPT2), language),
    "GPT-2 use_cache": Entry(
        hugging_face("GPT2LMHeadModel", "GPT2Config", **_GPT2), lambda: {**language(), "use_cache": True}
    ),
    "GPT-2 hidden states": Entry(
        hugging_face("GPT2LMHeadModel", "GPT2Config", **_GPT2), lambda: {**language(), "output_hidden_states": True}
    ),
    "GPT-NeoX (Pythia)": Entry(
        hugging_face("GPTNeoXForCausalLM", "GPTNeoXConfig", **BERT, hidden_dropout=0.1), language
    ),
    "OPT": Entry(
        hugging_face(
            "OPTForCausalLM",
            "OPTConfig",
            vocab_size=V,
            hidden_size=H,
            word_embed_proj_dim=H,
            ffn_dim=2 * H,
            num_hidden_layers=L,
            num_attention_heads=2,
            max_position_embeddings=2 * T,
        ),
        language,
    ),
    "Llama": Entry(hugging_face("LlamaForCausalLM", "LlamaConfig", **LLAMA), language),
    "Llama eager attention": Entry(
        hugging_face("LlamaForCausalLM", "LlamaConfig", **LLAMA, attn_implementation="eager"), language
    ),
    "Llama checkpointing": Entry(
        hugging_face("LlamaForCausalLM", "LlamaConfig", lambda model: model.activation_checkpointing_enable(), **LLAMA),
        language,
    ),
    "Mistral": Entry(hugging_face("MistralForCausalLM", "MistralConfig", **LLAMA, sliding_window=4), language),
    "Qwen2": Entry(hugging_face("Qwen2ForCausalLM", "Qwen2Config", **LLAMA), language),
    "Qwen3": Entry(hugging_face("Qwen3ForCausalLM", "Qwen3Config", **LLAMA, head_dim=8), language),
    "Gemma": Entry(hugging_face("GemmaForCausalLM", "GemmaConfig", **LLAMA, head_dim=8), language),
    "Gemma 2": Entry(
        hugging_face("Gemma2ForCausalLM", "Gemma2Config", **LLAMA, head_dim=8, sliding_window=4), language
    ),
    "Gemma 3": Entry(
        hugging_face("Gemma3ForCausalLM", "Gemma3TextConfig", **LLAMA, head_dim=8, sliding_window=4), language
    ),
    "Phi": Entry(hugging_face("PhiForCausalLM", "PhiConfig", **BERT, **KEPT_TOKENS, resid_pdrop=0.1), language),
    "Phi-3": Entry(hugging_face("Phi3ForCausalLM", "Phi3Config", **LLAMA, **KEPT_TOKENS, resid_pdrop=0.1), language),
    "BLOOM": Entry(
        hugging_face(
            "BloomForCausalLM", "BloomConfig", vocab_size=V, hidden_size=H, n_layer=L, n_head=2, hidden_dropout=0.1
        ),
        language,
    ),
}

_EXPERTS: dict[str, Entry] = {
    "Mixtral": Entry(hugging_face("MixtralForCausalLM", "MixtralConfig", **_MIXTRAL), language),
    "Mixtral router loss": Entry(
        hugging_face("MixtralForCausalLM", "MixtralConfig", **_MIXTRAL, output_router_logits=True), language
    ),
    "Mixtral eager experts": Entry(
        hugging_face("MixtralForCausalLM", "MixtralConfig", **_MIXTRAL, experts_implementation="eager"), language
    ),
    "Qwen3 MoE": Entry(
        hugging_face(
            "Qwen3MoeForCausalLM",
            "Qwen3MoeConfig",
            **LLAMA,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=H,
        ),
        language,
    ),
    "Switch": Entry(
        hugging_face(
            "SwitchTransformersForConditionalGeneration",
            "SwitchTransformersConfig",
            **_T5,
            num_decoder_layers=2,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            num_experts=4,
        ),
        language,
    ),
}

_STATE_SPACE: dict[str, Entry] = {
    "Mamba": Entry(
        hugging_face("MambaForCausalLM", "MambaConfig", vocab_size=V, hidden_size=H, num_hidden_layers=L, state_size=4),
        unmasked,
        drops=False,
    ),
    "Mamba-2": Entry(
        hugging_face(
            "Mamba2ForCausalLM",
            "Mamba2Config",
            vocab_size=V,
            hidden_size=H,
            num_hidden_layers=L,
            state_size=4,
            num_heads=4,
            head_dim=8,
            n_groups=1,
            chunk_size=4,
        ),
        unmasked,
        drops=False,
    ),
    "Jamba": Entry(
        hugging_face(
            "JambaForCausalLM",
            "JambaConfig",
            **LLAMA,
            mamba_d_state=4,
            mamba_dt_rank=4,
            use_mamba_kernels=False,
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=2,
        ),
        language,
    ),
    "Zamba": Entry(
        hugging_face(
            "ZambaForCausalLM",
            "ZambaConfig",
            **{**LLAMA, "num_hidden_layers": 6},
            attn_layer_period=2,
            attn_layer_offset=1,
            mamba_d_state=4,
            n_mamba_heads=2,
            use_mamba_kernels=False,
        ),
        language,
    ),
    "Falcon-H1": Entry(
        hugging_face(
            "FalconH1ForCausalLM",
            "FalconH1Config",
            **LLAMA,
            mamba_d_ssm=H,
            mamba_n_heads=2,
            mamba_d_head=8,
            mamba_d_state=4,
            mamba_n_groups=1,
            mamba_chunk_size=4,
        ),
        language,
    ),
}

_SEQ2SEQS: dict[str, Entry] = {
    "T5": Entry(hugging_face("T5ForConditionalGeneration", "T5Config", **_T5), language),
    "BART": Entry(
        hugging_face("BartForConditionalGeneration", "BartConfig", **SEQ2SEQ, max_position_embeddings=2 * T), language
    ),
    "Whisper": Entry(
        hugging_face(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            **SEQ2SEQ,
            dropout=0.1,
            num_mel_bins=4,
            max_source_positions=T,
            max_target_positions=2 * T,
        ),
        lambda: {"input_features": torch.randn(B, 4, 2 * T), "labels": tokens()},
    ),
}

_VISION_AND_SPEECH: dict[str, Entry] = {
    "ViT": Entry(hugging_face("ViTForImageClassification", "ViTConfig", **VIT), images(8)),
    "Swin": Entry(
        hugging_face(
            "SwinForImageClassification",
            "SwinConfig",
            image_size=16,
            patch_size=2,
            embed_dim=8,
            depths=[2, 2],
            num_heads=[2, 2],
            window_size=2,
            num_labels=5,
        ),
        images(16),
    ),
    "ConvNeXt": Entry(
        hugging_face(
            "ConvNextForImageClassification",
            "ConvNextConfig",
            hidden_sizes=[8, 8, 16, 16],
            depths=[1, 1, 2, 1],
            drop_path_rate=0.2,
            layer_scale_init_value=1.0,
            num_labels=5,
        ),
        images(32),
    ),
    "ResNet": Entry(
        hugging_face(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=8,
            hidden_sizes=[8, 8, 16],
            depths=[2, 2, 2],
            layer_type="basic",
            num_labels=5,
        ),
        images(32),
        drops=False,
    ),
    "CLIP": Entry(
        hugging_face(
            "CLIPModel",
            "CLIPConfig",
            text_config={**BERT, **KEPT_TOKENS, "num_hidden_layers": 2, "attention_dropout": 0.1},
            vision_config={
                **{key: VIT[key] for key in VIT if key not in ("num_labels", "hidden_dropout_prob")},
                "num_hidden_layers": 2,
            },
            projection_dim=8,
        ),
        lambda: {"input_ids": tokens(), "pixel_values": torch.randn(B, 3, 8, 8), "return_loss": True},
    ),
    "Wav2Vec2": Entry(hugging_face("Wav2Vec2ForCTC", "Wav2Vec2Config", **WAV2VEC2, layerdrop=0.0), speech),
    "Wav2Vec2 layerdrop": Entry(
        hugging_face("Wav2Vec2ForCTC", "Wav2Vec2Config", **WAV2VEC2, layerdrop=0.1), speech, refused="random draw"
    ),
}

MODELS: dict[str, Entry] = {
    **_TORCH,
    **_ENCODERS,
    **_DECODERS,
    **_EXPERTS,
    **_STATE_SPACE,
    **_SEQ2SEQS,
    **_VISION_AND_SPEECH,
}
"""What was asked for by name. `make soak-zoo` runs these and those of zoo_further.py."""

CHEAP = ("torch TransformerEncoder", "U-Net", "ResNet-like", "BERT", "Llama", "Mixtral", "T5", "ALBERT")
"""What `make test` runs: lists in lists, skips, batch norm, tied weights, experts, an encoder-decoder, one refused."""
