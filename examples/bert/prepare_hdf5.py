"""A shard of sentences as an hdf5 file of examples, under NVIDIA's keys."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import h5py
import numpy as np

from corpus_shards import SPLITS
from prepare_masks import Masking, make_examples
from prepare_pairs import Tokens, make_pairs
from vocabulary import Vocabulary, WordPieces, read_vocabulary

_FORMAT = 1  # in the fingerprint: files that an older version of these rules made are made again
_ROWS = 4096  # examples in memory at a time
_SENTENCES = 8192
_NAMES = {
    "input_ids": "i4",
    "input_mask": "i1",
    "segment_ids": "i1",
    "masked_lm_positions": "i4",
    "masked_lm_ids": "i4",
    "next_sentence_labels": "i1",
}


@dataclass(frozen=True, kw_only=True)
class ShardJob:
    """One hdf5 file to make, and all that its bytes depend on."""

    text: Path
    text_sha256: str
    vocabulary: Path
    vocabulary_sha256: str
    lower_case: bool
    target: Path
    shard: str
    max_seq_length: int
    masking: Masking
    short_seq_prob: float
    dupe_factor: int
    seed: int

    def fingerprint(self) -> str:
        """Of what the file is made from; where things lie does not matter."""
        known = asdict(self) | {"format": _FORMAT}
        for place in ("text", "vocabulary", "target"):
            del known[place]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def examples_in(job: ShardJob) -> int | None:
    """The number of examples of a shard that is there, whole, and made from just this; None when it must be made."""
    try:
        with h5py.File(job.target, "r") as file:
            if file.attrs.get("made_from") != job.fingerprint() or set(file) != set(_NAMES):
                return None
            return int(file["input_ids"].shape[0])
    except OSError:  # not there, or cut off
        return None


def write_shard(job: ShardJob) -> int:
    """Make the file, which appears only when it is whole, and return the number of its examples.

    Randomness depends on the seed, the shard's name and the sequence length alone. Raises ValueError for a text with
    no pair of sentences.
    """
    vocabulary = read_vocabulary(job.vocabulary)
    tokens = read_tokens(job.text, vocabulary, lower_case=job.lower_case)
    rng = np.random.default_rng([job.seed, job.max_seq_length, *job.shard.encode()])
    pairs = make_pairs(
        tokens,
        max_seq_length=job.max_seq_length,
        short_seq_prob=job.short_seq_prob,
        dupe_factor=job.dupe_factor,
        rng=rng,
    )
    if not len(pairs):
        raise ValueError(f"{job.text}: no document of this shard has two sentences to pair: use fewer shards")
    job.target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = job.target.with_suffix(".partial")
    with h5py.File(unfinished, "w") as file:
        for begin in range(0, len(pairs), _ROWS):
            block = make_examples(
                tokens.ids,
                pairs[begin : begin + _ROWS],
                vocabulary,
                length=job.max_seq_length,
                masking=job.masking,
                rng=rng,
            )
            for name, rows in block.items():
                if not begin:  # one piece, not compressed: any example can be read in place
                    file.create_dataset(name, shape=(len(pairs), *rows.shape[1:]), dtype=_NAMES[name])
                file[name][begin : begin + len(rows)] = rows
        file.attrs["vocab_size"] = len(vocabulary)
        file.attrs["made_from"] = job.fingerprint()
    unfinished.replace(job.target)
    return len(pairs)


def read_tokens(path: Path, vocabulary: Vocabulary, *, lower_case: bool) -> Tokens:
    """The ids of a text shard. Sentences without any token (control characters) are left out."""
    pieces = WordPieces(vocabulary, lower_case=lower_case)
    parts: list[np.ndarray] = []
    sentences, documents = [0], [0]
    with path.open(encoding="utf-8", newline="\n") as file:
        while lines := [line.rstrip("\n") for line in islice(file, _SENTENCES)]:
            for line, ids in zip(lines, pieces.ids(lines), strict=True):
                if ids:
                    parts.append(np.array(ids, dtype=np.int32))
                    sentences.append(sentences[-1] + len(ids))
                if not line and len(sentences) - 1 > documents[-1]:
                    documents.append(len(sentences) - 1)
    return Tokens(
        ids=np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32), sentences=sentences, documents=documents
    )


def stale_shards(folder: Path, wanted: set[Path]) -> Iterator[Path]:
    """Shards in `folder` that an earlier preparation made and this one does not: training would read them too."""
    for path in sorted(folder.glob("*.hdf5")):
        if path not in wanted and path.stem.split("_")[0] in SPLITS:
            yield path
