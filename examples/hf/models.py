"""Models by name: of a folder that `save_pretrained` has written, or new ones of a type that transformers knows."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from arguments import Arguments

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "hidden_dropout", "attention_dropout"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
}
"""Each type of model knows some of these names. No dropout, because plain PyTorch would draw different masks."""


def is_folder(arguments: Arguments) -> bool:
    return Path(arguments.model_name_or_path).is_dir()


def load_config(arguments: Arguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The folder's configuration, or a new one for this tokenizer. Raises ValueError for a name that is neither."""
    name = arguments.model_name_or_path
    if is_folder(arguments):
        config = AutoConfig.from_pretrained(name)
    elif name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or name in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        known = AutoConfig.for_model(name)
        sizes = {key: size for key, size in TINY.items() if hasattr(known, key)}
        config = AutoConfig.for_model(
            name,
            **(sizes if arguments.config_size == "tiny" else {}),
            vocab_size=len(tokenizer),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    else:
        raise ValueError(
            f"{name} is no folder and no type of language model: give a folder as save_pretrained writes it, or one of "
            f"{', '.join(sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MASKED_LM_MAPPING_NAMES}))}"
        )
    config.use_cache = False  # of keys and values, which training does not use
    return config


def is_masked(config: PreTrainedConfig) -> bool:
    """Whether the model fills in masked tokens (BERT's kind), not the next one."""
    if config.architectures:
        return config.architectures[0].endswith("MaskedLM")
    return config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def has_weights(arguments: Arguments) -> bool:
    return is_folder(arguments) and any(Path(arguments.model_name_or_path).glob("*.safetensors"))


def build_model(arguments: Arguments, config: PreTrainedConfig) -> PreTrainedModel:
    """The same in every process: with the folder's weights, or those that the seed gives.

    A model on meta gets its values from `weights_for_stages`.
    """
    kind = AutoModelForMaskedLM if is_masked(config) else AutoModelForCausalLM
    if has_weights(arguments) and not arguments.meta:
        return kind.from_pretrained(arguments.model_name_or_path, config=config).train()
    torch.manual_seed(arguments.seed)
    with torch.device("meta") if arguments.meta else nullcontext():
        return kind.from_config(config)


def weights_for_stages(arguments: Arguments) -> str | None:
    """The folder, when the model is on meta and its weights are there; None: it initialises itself."""
    return arguments.model_name_or_path if arguments.meta and has_weights(arguments) else None
