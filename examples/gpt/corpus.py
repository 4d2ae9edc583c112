"""The Python standard library's own sources as training text, which every machine with Python has; or tokens of yours.

Shapes: B examples, T tokens of a window.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

MAX_BYTES = 4_000_000


def read_corpus(root: Path | None = None, max_bytes: int = MAX_BYTES) -> NDArray[np.uint8]:
    """The bytes of the library's top-level modules, in the order of their names, as one array.

    The order is by name, so machines with the same Python have the same text. Raises ValueError when `root` holds no
    source.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    sources = sorted(root.glob("*.py"), key=lambda path: path.name)
    if not sources:
        raise ValueError(f"no .py file in {root}: install Python's standard library sources, or pass another folder")
    text = b"\n".join(path.read_bytes() for path in sources)
    return np.frombuffer(text[:max_bytes], dtype=np.uint8)


def read_tokens(path: Path, vocabulary: int) -> NDArray[np.uint16]:
    """The token numbers of a file, each two bytes, little-endian, and nothing else; they stay on disk until used.

    Raises ValueError when some are not below `vocabulary`.
    """
    tokens: NDArray[np.uint16] = np.memmap(path, dtype="<u2", mode="r")
    largest = int(tokens.max())
    if largest >= vocabulary:
        raise ValueError(f"{path}: token {largest} is not one of the model's {vocabulary}: use its own tokenizer")
    return tokens


class Windows(Dataset[dict[str, Tensor]]):
    """Neighbouring windows of the corpus. Sample i: `window` tokens, and those that follow each."""

    def __init__(self, corpus: NDArray[np.uint8] | NDArray[np.uint16], window: int) -> None:
        self.window = window
        self.samples = (len(corpus) - 1) // window
        if self.samples < 1:
            raise ValueError(f"a corpus of {len(corpus)} tokens holds no window of {window}: take a longer text")
        self.corpus = corpus

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`tokens` (T,) and `targets` (T,), int64."""
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        start = index * self.window
        text = torch.from_numpy(self.corpus[start : start + self.window + 1].astype(np.int64))
        return {"tokens": text[:-1], "targets": text[1:]}

    def batch(self, indices: list[int]) -> dict[str, Tensor]:
        """The samples stacked: `tokens` (B, T) and `targets` (B, T)."""
        samples = [self[index] for index in indices]
        return {name: torch.stack([sample[name] for sample in samples]) for name in ("tokens", "targets")}
