"""Makes small shards with NVIDIA's keys quickly. Their sentences count upwards, so a model can learn them."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np

CLS, SEP, MASK, FIRST_WORD, WORDS = 1, 2, 3, 4, 36
CONFIG = {
    "attention_probs_dropout_prob": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 4,
    "type_vocab_size": 2,
    "vocab_size": FIRST_WORD + WORDS - 1,  # padded to the next multiple of 8 by the model
}


def write_config(path: Path) -> Path:
    path.write_text(json.dumps(CONFIG))
    return path


def write_shard(folder: Path, *, examples: int, tokens: int, predictions: int, seed: int = 0) -> Path:
    """A training shard. Examples have 1 to `predictions` masked words, and the second half of some is padding."""
    rng = np.random.default_rng(seed)
    words = FIRST_WORD + (rng.integers(WORDS - 1, size=(examples, 1)) + np.arange(tokens)) % (WORDS - 1)
    words[:, 0], words[:, tokens // 2] = CLS, SEP
    mask = np.ones((examples, tokens), np.int8)
    mask[::5, tokens // 2 + 1 :] = 0
    words *= mask
    places = np.zeros((examples, predictions), np.int32)
    labels = np.zeros((examples, predictions), np.int32)
    for row in range(examples):
        count = rng.integers(1, predictions + 1)
        where = np.sort(rng.choice(np.arange(1, tokens // 2), count, replace=False))
        places[row, :count], labels[row, :count] = where, words[row, where]
        words[row, where] = MASK
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"training_{seed:04d}.hdf5"
    with h5py.File(path, "w") as file:
        file["input_ids"] = words.astype(np.int32)
        file["input_mask"] = mask
        file["segment_ids"] = np.broadcast_to((np.arange(tokens) > tokens // 2), words.shape).astype(np.int8)
        file["masked_lm_positions"], file["masked_lm_ids"] = places, labels
        file["next_sentence_labels"] = rng.integers(2, size=examples).astype(np.int8)
        file.attrs["vocab_size"] = CONFIG["vocab_size"]
    return path
