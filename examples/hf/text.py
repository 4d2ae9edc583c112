"""Local text as examples of a language model.

Shapes: B examples, T tokens of an example.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from arguments import Arguments
from models import is_folder

MASKED_SHARE = 0.15
NO_LABEL = -100
"""transformers' label of a token that does not count in the loss."""


def read_text(file: Path | None, max_bytes: int) -> str:
    """The text of a file, or of a folder's .txt and .py files in the order of their names.

    Raises ValueError when there is none.
    """
    path = file or Path(sysconfig.get_paths()["stdlib"])
    files = [path] if path.is_file() else sorted({*path.glob("*.txt"), *path.glob("*.py")})
    if not files:
        raise ValueError(f"no .txt or .py file in {path}: give --train_file a text or a folder with some")
    data = bytearray()
    for each in files:
        data += each.read_bytes()[: max_bytes - len(data)]
        if len(data) >= max_bytes:
            break
    return data.decode(errors="replace")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte: it needs no training, and is the same on every machine."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=end, eos_token=end, pad_token="<|pad|>", mask_token="<|mask|>"
    )


def load_tokenizer(arguments: Arguments) -> PreTrainedTokenizerBase:
    """That of the model's folder; bytes for a new model."""
    if is_folder(arguments):
        return AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    return byte_tokenizer()


class Blocks(Dataset[dict[str, Tensor]]):
    """Neighbouring blocks of `block_size` tokens. Sample i: `input_ids` (T,) and `labels` (T,), int64.

    A `mask_token` replaces 15 % of the tokens, which are then the labels; without one the model shifts the labels.
    All examples have as many labels, so the mean over a batch is the mean over its micro-batches' means.
    """

    def __init__(self, tokens: Tensor, block_size: int, *, mask_token: int | None = None, seed: int = 0) -> None:
        """Raises ValueError when the text has not one block."""
        self.blocks = tokens[: len(tokens) // block_size * block_size].view(-1, block_size)
        if not len(self.blocks):
            raise ValueError(f"a text of {len(tokens)} tokens has no block of {block_size}: take a longer one")
        self.mask_token = mask_token
        self.seed = seed

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.blocks[index]
        if self.mask_token is None:
            return {"input_ids": tokens, "labels": tokens}
        size = len(tokens)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        masked = torch.randperm(size, generator=generator)[: max(1, round(MASKED_SHARE * size))]
        inputs, labels = tokens.clone(), torch.full_like(tokens, NO_LABEL)
        labels[masked] = tokens[masked]
        inputs[masked] = self.mask_token
        return {"input_ids": inputs, "labels": labels}

    def batch(self, indices: range) -> dict[str, Tensor]:
        """The samples stacked: (B, T)."""
        samples = [self[index] for index in indices]
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    def example(self, size: int, device: str = "cpu") -> dict[str, Tensor]:
        """Some `size` samples, for `Varuna` to see what the model is given."""
        return self.batch(range(size))


def load_blocks(arguments: Arguments, tokenizer: PreTrainedTokenizerBase, *, masked: bool) -> tuple[Blocks, Blocks]:
    """(to train on, to evaluate on): the text's last examples are for evaluating."""
    text = read_text(arguments.train_file, arguments.max_train_bytes)
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    for_evaluating = arguments.eval_examples * arguments.block_size
    if masked and tokenizer.mask_token_id is None:
        raise ValueError(f"the tokenizer of {arguments.model_name_or_path} has no mask token, which its model needs")
    mask_token = tokenizer.mask_token_id if masked else None
    made = [
        Blocks(part, arguments.block_size, mask_token=mask_token, seed=arguments.seed)
        for part in (tokens[:-for_evaluating], tokens[-for_evaluating:])
    ]
    return made[0], made[1]
