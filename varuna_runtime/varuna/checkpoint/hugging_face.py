"""Describes a Hugging Face transformers model in checkpoints, so that they can become a `from_pretrained` folder.

The runtime does not need transformers for this: it recognizes such a model by its `config`.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.format.manifest import Manifest

__all__ = ["STATE", "WEIGHTS_FILE", "ModelDescription", "read_description", "write_beside"]

STATE = "varuna.transformers"
"""The name under which checkpoints keep the description."""

WEIGHTS_FILE = "model.safetensors"
_CONFIG, _GENERATION_CONFIG = "config.json", "generation_config.json"
_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*_tokens*.json",
    "special_tokens_map.json",
    "*.model",
    "chat_template*",
    "*processor_config.json",
)


class ModelDescription:
    """The model's configuration as a state that checkpoints can save; it never changes."""

    def __init__(self, files: Mapping[str, str], tied_to_others: list[str]) -> None:
        self._files = dict(files)
        self._tied_to_others = tied_to_others

    @classmethod
    def from_model(cls, model: nn.Module) -> ModelDescription | None:
        """None unless it is a transformers model."""
        if not (hasattr(model, "base_model_prefix") and hasattr(getattr(model, "config", None), "to_json_string")):
            return None
        config: Any = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        files = {_CONFIG: config.to_json_string()}
        generation: Any = getattr(model, "generation_config", None)
        if generation is not None:
            files[_GENERATION_CONFIG] = generation.to_json_string()
        # Names that from_pretrained ties to others: a dict in transformers 5, a list before.
        tied: Any = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
        return cls(files, sorted(tied))

    def state_dict(self) -> dict[str, Any]:
        return {"files": dict(self._files), "tied_to_others": list(self._tied_to_others)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing: the script's model counts, not the checkpoint's description."""


def read_description(manifest: Manifest, where: str) -> tuple[dict[str, str], set[str]]:
    """Returns (the folder's small files by name, names that the weights may omit).

    Raises CheckpointError when the checkpoint is not of a transformers model, or names other files than
    `ModelDescription` does: who exports it may not be who wrote it.
    """
    state = manifest.state.get("user", {}).get(STATE)
    if state is None:
        raise CheckpointError(
            f"{where} is not of a Hugging Face transformers model that Varuna was given as it is: leave out --hf, and "
            "load the file into your own model"
        )
    match state:
        case {"files": dict() as files, "tied_to_others": list() as tied}:
            is_own = files.keys() <= {_CONFIG, _GENERATION_CONFIG}
            if is_own and all(isinstance(text, str) for text in (*files.values(), *tied)):
                return files, set(tied)
    raise CheckpointError(f"{where}: the state {STATE!r} is not what Varuna writes there, so it is not exported")


def write_beside(files: Mapping[str, str], folder: Path, tokenizer: Path | None) -> None:
    """Write `files` into `folder`, and copy the tokenizer's files from the folder `tokenizer`.

    Raises CheckpointError when there is no tokenizer; OSError.
    """
    found: list[Path] = []
    if tokenizer is not None:
        found = sorted({path for pattern in _TOKENIZER_FILES for path in tokenizer.glob(pattern) if path.is_file()})
        if not found:
            raise CheckpointError(
                f"no tokenizer's files in {tokenizer}: give the folder where save_pretrained wrote it"
            )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text if text.endswith("\n") else text + "\n")
    for path in found:
        if path.resolve() != (folder / path.name).resolve():
            shutil.copyfile(path, folder / path.name)
