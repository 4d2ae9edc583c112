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

__all__ = ["CHEAP", "MODELS", "Entry"]

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


def _tokens() -> Tensor:
    return torch.randint(3, V, (B, T))


def _classes() -> Tensor:
    return torch.randint(0, 5, (B,))


def _language() -> dict[str, Any]:
    attention = torch.ones(B, T, dtype=torch.long)
    attention[0, T - 1] = 0
    return {"input_ids": _tokens(), "attention_mask": attention, "labels": _tokens()}


def _unmasked() -> dict[str, Any]:
    return {"input_ids": _tokens(), "labels": _tokens()}


def _targets() -> dict[str, Any]:
    return {"tokens": _tokens(), "targets": _tokens()}


def _images(size: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": torch.randn(B, 3, size, size), "labels": _classes()}


def _hf(
    model: str, config: str, prepare: Callable[[Any], None] = lambda model: None, **sizes: Any
) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, model)(getattr(transformers, config)(**sizes)).train()
        prepare(made)
        return made

    return build


_KEPT_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BERT = {
    "vocab_size": V,
    "hidden_size": H,
    "num_hidden_layers": L,
    "num_attention_heads": 2,
    "intermediate_size": 2 * H,
    "max_position_embeddings": 3 * T,
}
_LLAMA = {**_BERT, "num_key_value_heads": 1, "attention_dropout": 0.1}
_GPT2 = {"vocab_size": V, "n_embd": H, "n_layer": L, "n_head": 2, "n_positions": 2 * T, **_KEPT_TOKENS}
_T5 = {
    "vocab_size": V,
    "d_model": H,
    "d_kv": 8,
    "d_ff": 2 * H,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
_SEQ2SEQ = {
    "vocab_size": V,
    "d_model": H,
    **{f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")},
    **{f"{part}_ffn_dim": 2 * H for part in ("encoder", "decoder")},
    **_KEPT_TOKENS,
    "decoder_start_token_id": 1,
}
_VIT = {
    **{key: _BERT[key] for key in _BERT if key not in ("vocab_size", "max_position_embeddings")},
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 5,
    "hidden_dropout_prob": 0.1,
}
_MIXTRAL = {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}
_WAV2VEC2 = {
    **_BERT,
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


def _speech() -> dict[str, Any]:
    return {"input_values": torch.randn(B, 200), "labels": torch.randint(3, V, (B, 4))}


_TORCH: dict[str, Entry] = {
    "torch TransformerEncoder": Entry(EncoderModel, _targets),
    "torch Transformer": Entry(Seq2SeqModel, _targets),
    "ResNet-like": Entry(ResNetModel, lambda: {"image": torch.randn(B, 3, 16, 16), "label": _classes()}, drops=False),
    "convolutional classifier": Entry(
        ConvolutionalClassifier, lambda: {"image": torch.randn(B, 3, 16, 16), "label": _classes()}
    ),
    "U-Net": Entry(UNet, lambda: {"image": torch.randn(B, 3, 16, 16), "mask": torch.randint(0, 5, (B, 16, 16))}),
}

_ENCODERS: dict[str, Entry] = {
    "BERT": Entry(_hf("BertForMaskedLM", "BertConfig", **_BERT), _language),
    "BERT eager attention": Entry(
        _hf("BertForMaskedLM", "BertConfig", **_BERT, attn_implementation="eager"), _language
    ),
    "BERT pre-training": Entry(
        _hf("BertForPreTraining", "BertConfig", **_BERT),
        lambda: {**_language(), "next_sentence_label": torch.randint(0, 2, (B,))},
    ),
    "RoBERTa": Entry(_hf("RobertaForMaskedLM", "RobertaConfig", **_BERT), _language),
    "DistilBERT": Entry(
        _hf("DistilBertForMaskedLM", "DistilBertConfig", vocab_size=V, dim=H, n_layers=L, n_heads=2, hidden_dim=2 * H),
        _language,
    ),
    "ELECTRA": Entry(_hf("ElectraForMaskedLM", "ElectraConfig", **_BERT, embedding_size=8), _language),
    "DeBERTa": Entry(
        _hf("DebertaForMaskedLM", "DebertaConfig", **_BERT, relative_attention=True, pos_att_type=["c2p", "p2c"]),
        _language,
    ),
    "DeBERTa-v2": Entry(
        _hf(
            "DebertaV2ForMaskedLM",
            "DebertaV2Config",
            **_BERT,
            relative_attention=True,
            position_buckets=4,
            pos_att_type=["c2p", "p2c"],
        ),
        _language,
    ),
    "ALBERT": Entry(
        _hf("AlbertForMaskedLM", "AlbertConfig", **_BERT, embedding_size=8), _language, refused="one section"
    ),
}

_DECODERS: dict[str, Entry] = {
    "GPT-2": Entry(_hf("GPT2LMHeadModel", "GPT2Config", **_GPT2), _language),
    "GPT-2 use_cache": Entry(_hf("GPT2LMHeadModel", "GPT2Config", **_GPT2), lambda: {**_language(), "use_cache": True}),
    "GPT-2 hidden states": Entry(
        _hf("GPT2LMHeadModel", "GPT2Config", **_GPT2), lambda: {**_language(), "output_hidden_states": True}
    ),
    "GPT-NeoX (Pythia)": Entry(_hf("GPTNeoXForCausalLM", "GPTNeoXConfig", **_BERT, hidden_dropout=0.1), _language),
    "OPT": Entry(
        _hf(
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
        _language,
    ),
    "Llama": Entry(_hf("LlamaForCausalLM", "LlamaConfig", **_LLAMA), _language),
    "Llama eager attention": Entry(
        _hf("LlamaForCausalLM", "LlamaConfig", **_LLAMA, attn_implementation="eager"), _language
    ),
    "Llama checkpointing": Entry(
        _hf("LlamaForCausalLM", "LlamaConfig", lambda model: model.gradient_checkpointing_enable(), **_LLAMA),
        _language,
    ),
    "Mistral": Entry(_hf("MistralForCausalLM", "MistralConfig", **_LLAMA, sliding_window=4), _language),
    "Qwen2": Entry(_hf("Qwen2ForCausalLM", "Qwen2Config", **_LLAMA), _language),
    "Qwen3": Entry(_hf("Qwen3ForCausalLM", "Qwen3Config", **_LLAMA, head_dim=8), _language),
    "Gemma": Entry(_hf("GemmaForCausalLM", "GemmaConfig", **_LLAMA, head_dim=8), _language),
    "Gemma 2": Entry(_hf("Gemma2ForCausalLM", "Gemma2Config", **_LLAMA, head_dim=8, sliding_window=4), _language),
    "Gemma 3": Entry(_hf("Gemma3ForCausalLM", "Gemma3TextConfig", **_LLAMA, head_dim=8, sliding_window=4), _language),
    "Phi": Entry(_hf("PhiForCausalLM", "PhiConfig", **_BERT, **_KEPT_TOKENS, resid_pdrop=0.1), _language),
    "Phi-3": Entry(_hf("Phi3ForCausalLM", "Phi3Config", **_LLAMA, **_KEPT_TOKENS, resid_pdrop=0.1), _language),
    "BLOOM": Entry(
        _hf("BloomForCausalLM", "BloomConfig", vocab_size=V, hidden_size=H, n_layer=L, n_head=2, hidden_dropout=0.1),
        _language,
    ),
}

_EXPERTS: dict[str, Entry] = {
    "Mixtral": Entry(_hf("MixtralForCausalLM", "MixtralConfig", **_MIXTRAL), _language),
    "Mixtral router loss": Entry(
        _hf("MixtralForCausalLM", "MixtralConfig", **_MIXTRAL, output_router_logits=True), _language
    ),
    "Mixtral eager experts": Entry(
        _hf("MixtralForCausalLM", "MixtralConfig", **_MIXTRAL, experts_implementation="eager"), _language
    ),
    "Qwen3 MoE": Entry(
        _hf(
            "Qwen3MoeForCausalLM",
            "Qwen3MoeConfig",
            **_LLAMA,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=H,
        ),
        _language,
    ),
    "Switch": Entry(
        _hf(
            "SwitchTransformersForConditionalGeneration",
            "SwitchTransformersConfig",
            **_T5,
            num_decoder_layers=2,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            num_experts=4,
        ),
        _language,
    ),
}

_STATE_SPACE: dict[str, Entry] = {
    "Mamba": Entry(
        _hf("MambaForCausalLM", "MambaConfig", vocab_size=V, hidden_size=H, num_hidden_layers=L, state_size=4),
        _unmasked,
        drops=False,
    ),
    "Mamba-2": Entry(
        _hf(
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
        _unmasked,
        drops=False,
    ),
    "Jamba": Entry(
        _hf(
            "JambaForCausalLM",
            "JambaConfig",
            **_LLAMA,
            mamba_d_state=4,
            mamba_dt_rank=4,
            use_mamba_kernels=False,
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=2,
        ),
        _language,
    ),
    "Zamba": Entry(
        _hf(
            "ZambaForCausalLM",
            "ZambaConfig",
            **{**_LLAMA, "num_hidden_layers": 6},
            attn_layer_period=2,
            attn_layer_offset=1,
            mamba_d_state=4,
            n_mamba_heads=2,
            use_mamba_kernels=False,
        ),
        _language,
    ),
    "Falcon-H1": Entry(
        _hf(
            "FalconH1ForCausalLM",
            "FalconH1Config",
            **_LLAMA,
            mamba_d_ssm=H,
            mamba_n_heads=2,
            mamba_d_head=8,
            mamba_d_state=4,
            mamba_n_groups=1,
            mamba_chunk_size=4,
        ),
        _language,
    ),
}

_SEQ2SEQS: dict[str, Entry] = {
    "T5": Entry(_hf("T5ForConditionalGeneration", "T5Config", **_T5), _language),
    "BART": Entry(
        _hf("BartForConditionalGeneration", "BartConfig", **_SEQ2SEQ, max_position_embeddings=2 * T), _language
    ),
    "Whisper": Entry(
        _hf(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            **_SEQ2SEQ,
            dropout=0.1,
            num_mel_bins=4,
            max_source_positions=T,
            max_target_positions=2 * T,
        ),
        lambda: {"input_features": torch.randn(B, 4, 2 * T), "labels": _tokens()},
    ),
}

_VISION_AND_SPEECH: dict[str, Entry] = {
    "ViT": Entry(_hf("ViTForImageClassification", "ViTConfig", **_VIT), _images(8)),
    "Swin": Entry(
        _hf(
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
        _images(16),
    ),
    "ConvNeXt": Entry(
        _hf(
            "ConvNextForImageClassification",
            "ConvNextConfig",
            hidden_sizes=[8, 8, 16, 16],
            depths=[1, 1, 2, 1],
            drop_path_rate=0.2,
            layer_scale_init_value=1.0,
            num_labels=5,
        ),
        _images(32),
    ),
    "ResNet": Entry(
        _hf(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=8,
            hidden_sizes=[8, 8, 16],
            depths=[2, 2, 2],
            layer_type="basic",
            num_labels=5,
        ),
        _images(32),
        drops=False,
    ),
    "CLIP": Entry(
        _hf(
            "CLIPModel",
            "CLIPConfig",
            text_config={**_BERT, **_KEPT_TOKENS, "num_hidden_layers": 2, "attention_dropout": 0.1},
            vision_config={
                **{key: _VIT[key] for key in _VIT if key not in ("num_labels", "hidden_dropout_prob")},
                "num_hidden_layers": 2,
            },
            projection_dim=8,
        ),
        lambda: {"input_ids": _tokens(), "pixel_values": torch.randn(B, 3, 8, 8), "return_loss": True},
    ),
    "Wav2Vec2": Entry(_hf("Wav2Vec2ForCTC", "Wav2Vec2Config", **_WAV2VEC2, layerdrop=0.0), _speech),
    "Wav2Vec2 layerdrop": Entry(
        _hf("Wav2Vec2ForCTC", "Wav2Vec2Config", **_WAV2VEC2, layerdrop=0.1), _speech, refused="random draw"
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
"""What `make soak-zoo` runs."""

CHEAP = ("torch TransformerEncoder", "U-Net", "ResNet-like", "BERT", "Llama", "Mixtral", "T5", "ALBERT")
"""What `make test` runs: lists in lists, skips, batch norm, tied weights, experts, an encoder-decoder, one refused."""
