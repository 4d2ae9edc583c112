"""The prepared examples as a dataset: any number of hdf5 shards, read where they lie.

Shapes: T tokens of a sequence, M predictions at most per sequence.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

_OPEN_FILES = 128
_KEYS = (
    "input_ids",
    "input_mask",
    "segment_ids",
    "masked_lm_positions",
    "masked_lm_ids",
    "next_sentence_labels",
)


class PretrainingDataset(Dataset[dict[str, Tensor]]):
    """The examples of a folder's shards whose names hold `split` (None: of all its *.hdf5), in the order of the names.

    `source` may also be a list of files; NVIDIA's own can be read too. Item i is a dict of int64 tensors: `input_ids`,
    `token_type_ids`, `attention_mask`, `masked_lm_labels` (T,), which is `ignore_index` where nothing is to be
    predicted, and `next_sentence_labels` (), 1 where the second segment is random. With `max_predictions_per_seq`
    only that many first predictions are kept.

    Files are mapped when an example of theirs is first asked for, at most 128 at a time, and each process (a loader's
    worker, a fork) maps its own. Raises ValueError for no file, a file that is cut off or lacks a key, or files of
    different sequence lengths.
    """

    def __init__(
        self,
        source: str | Path | Sequence[Path],
        *,
        split: str | None = "training",
        max_predictions_per_seq: int | None = None,
        ignore_index: int = -1,
    ) -> None:
        self.files = _shards(Path(source), split) if isinstance(source, str | Path) else [Path(file) for file in source]
        if not self.files:
            raise ValueError("no hdf5 file was given: make some with examples/bert/prepare.py")
        facts = [_facts(path) for path in self.files]
        self.max_seq_length = facts[0][1]
        for path, (_, length, _) in zip(self.files, facts, strict=True):
            if length != self.max_seq_length:
                raise ValueError(
                    f"{path} has sequences of {length} tokens, {self.files[0]} of {self.max_seq_length}: "
                    "each phase's files lie in a folder of their own"
                )
        self.vocab_size = max((size for _, _, size in facts if size), default=None)
        self._ends = list(accumulate(examples for examples, _, _ in facts))
        self._max_predictions = max_predictions_per_seq
        self._ignore_index = ignore_index
        self._forget()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        index %= len(self)
        shard = bisect_right(self._ends, index)
        row = index - (self._ends[shard - 1] if shard else 0)
        arrays = self._arrays(shard)
        labels = torch.full((self.max_seq_length,), self._ignore_index, dtype=torch.int64)
        positions = torch.from_numpy(arrays["masked_lm_positions"][row].astype(np.int64))[: self._max_predictions]
        ids = torch.from_numpy(arrays["masked_lm_ids"][row].astype(np.int64))[: self._max_predictions]
        there = positions > 0  # position 0 is [CLS], which is never predicted: zeros are padding
        labels[positions[there]] = ids[there]
        return {
            "input_ids": torch.from_numpy(arrays["input_ids"][row].astype(np.int64)),
            "token_type_ids": torch.from_numpy(arrays["segment_ids"][row].astype(np.int64)),
            "attention_mask": torch.from_numpy(arrays["input_mask"][row].astype(np.int64)),
            "masked_lm_labels": labels,
            "next_sentence_labels": torch.tensor(int(arrays["next_sentence_labels"][row])),
        }

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": None}  # maps do not travel to other processes

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def _forget(self) -> None:
        self._open: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._process = os.getpid()

    def _arrays(self, shard: int) -> dict[str, Any]:
        if os.getpid() != self._process:  # a fork: the HDF5 library's own files must not be shared with the parent
            self._forget()
        if shard in self._open:
            self._open.move_to_end(shard)
        else:
            self._open[shard] = _map(self.files[shard])
            if len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)
        return self._open[shard]


def _shards(folder: Path, split: str | None) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder: make one with examples/bert/prepare.py")
    every = sorted(folder.glob("*.hdf5"))
    found = every if split is None else [path for path in every if split in path.name]
    if not found:
        has = f"{len(every)} hdf5 files, none" if every else "no hdf5 file"
        kind = f" with '{split}' in its name" if split else ""
        raise ValueError(f"{folder}: holds {has}{kind}: make some with examples/bert/prepare.py")
    return found


def _facts(path: Path) -> tuple[int, int, int | None]:
    """A file's examples, the length of their sequences, and its vocabulary's size, if it has one."""
    try:
        with h5py.File(path, "r") as file:
            missing = [key for key in _KEYS if key not in file]
            if missing:
                raise ValueError(f"{path}: lacks {', '.join(missing)}: it is not a file of BERT pre-training examples")
            counts = {file[key].shape[0] for key in _KEYS}
            if len(counts) > 1:
                raise ValueError(f"{path}: its arrays have different lengths {sorted(counts)}: make it again")
            size = file.attrs.get("vocab_size")
            examples, length = file["input_ids"].shape
            return examples, length, None if size is None else int(size)
    except OSError as error:
        raise ValueError(f"{path}: is no whole hdf5 file ({error}): make it again with prepare.py") from None


def _map(path: Path) -> dict[str, Any]:
    """The arrays of a file by key: mapped where they lie in one piece, else (compressed) as HDF5 reads them.

    A map needs no lock and no copy, and is one file descriptor a shard.
    """
    file = h5py.File(path, "r")
    places = {key: file[key].id.get_offset() for key in _KEYS}
    if None in places.values():
        return {key: file[key] for key in _KEYS}
    with file, path.open("rb") as raw:
        mapped = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
        return {
            key: np.frombuffer(mapped, file[key].dtype, file[key].size, places[key]).reshape(file[key].shape)
            for key in _KEYS
        }
