"""Documents as shards of sentences: text files of one sentence a line, with an empty line after each document.

Sentences are found by sentencex: rules for some 300 languages, kept by Wikimedia's language team, with no model to
download. Of the libraries that need none it was the fastest on the default corpus (4 times syntok, 30 times pysbd),
and it knows abbreviations that a Punkt trained on the text itself did not.
"""

from __future__ import annotations

import hashlib
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO

from sentencex import segment

from corpus_reading import Document
from prepare_processes import ordered_map

SPLITS = ("training", "test")
_BATCH_CHARACTERS = 1 << 18
_PARAGRAPH = re.compile(r"\n\s*\n")


@dataclass(frozen=True, kw_only=True)
class TextShard:
    """One shard of sentences. `split` is training or test; `sha256` of the file."""

    split: str
    index: int
    file: str
    documents: int
    sentences: int
    characters: int
    sha256: str

    @property
    def name(self) -> str:
        return f"{self.split}_{self.index:04d}"


def split_sentences(text: str, *, language: str = "en", one_per_line: bool = False) -> list[str]:
    """The sentences of a document, each on one line. A paragraph ends at an empty line, and no sentence crosses it."""
    if one_per_line:
        found: Iterable[str] = text.split("\n")
    else:
        found = (
            sentence
            for paragraph in _PARAGRAPH.split(text)
            if paragraph.strip()
            for sentence in segment(language, " ".join(paragraph.split()))
        )
    joined = (" ".join(sentence.split()) for sentence in found)
    return [sentence for sentence in joined if sentence]


def write_text_shards(  # noqa: PLR0913 - the options of the program
    documents: Iterable[Document],
    folder: Path,
    *,
    training_shards: int,
    test_shards: int,
    test_fraction: float,
    seed: int,
    language: str,
    one_per_line: bool,
    executor: Executor | None,
    processes: int,
    advance: Callable[[int], None] = lambda characters: None,
) -> list[TextShard]:
    """Write the shards into `folder`, which is replaced and appears only when it is complete.

    Whole documents go to the shard that is furthest behind its share of the text, so shards are of even size and do
    not depend on the number of processes. `advance` receives the number of characters done. Raises ValueError for a
    shard of less than two documents: a random next sentence must come from another document.
    """
    shares = {("training", index): (1 - test_fraction) / training_shards for index in range(training_shards)}
    if test_fraction > 0:
        shares |= {("test", index): test_fraction / test_shards for index in range(test_shards)}
    partial_folder = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial_folder, ignore_errors=True)
    partial_folder.mkdir(parents=True)
    split_batch = partial(_split_batch, language=language, one_per_line=one_per_line)
    with ExitStack() as open_files:
        writers = [_Writer(split, index, share, partial_folder, open_files) for (split, index), share in shares.items()]
        random.Random(seed).shuffle(writers)  # so that equal shards take turns in an order of the seed's
        total = 0
        for batch in ordered_map(executor, split_batch, _batches(documents), ahead=4 * processes):
            for characters, sentences in batch:
                if sentences:
                    total += characters
                    behind = max(writers, key=lambda writer: writer.share * total - writer.characters)
                    behind.write(sentences, characters)
                advance(characters)
    shards = sorted((writer.done() for writer in writers), key=lambda shard: (shard.split == "test", shard.index))
    _check(shards)
    shutil.rmtree(folder, ignore_errors=True)
    partial_folder.rename(folder)
    return shards


def as_json(shards: list[TextShard]) -> list[dict[str, object]]:
    """The shards as JSON keeps them; `TextShard(**row)` is the way back."""
    return [asdict(shard) for shard in shards]


class _Writer:
    def __init__(self, split: str, index: int, share: float, folder: Path, open_files: ExitStack) -> None:
        self.split, self.index, self.share = split, index, share
        self.name = f"{split}_{index:04d}.txt"
        self.file: IO[bytes] = open_files.enter_context((folder / self.name).open("wb"))
        self.digest = hashlib.sha256()
        self.documents = self.sentences = self.characters = 0

    def write(self, sentences: list[str], characters: int) -> None:
        data = ("\n".join(sentences) + "\n\n").encode(errors="replace")  # lone surrogates have no bytes
        self.file.write(data)
        self.digest.update(data)
        self.documents += 1
        self.sentences += len(sentences)
        self.characters += characters

    def done(self) -> TextShard:
        return TextShard(
            split=self.split,
            index=self.index,
            file=self.name,
            documents=self.documents,
            sentences=self.sentences,
            characters=self.characters,
            sha256=self.digest.hexdigest(),
        )


def _batches(documents: Iterable[Document]) -> Iterator[list[str]]:
    """Texts of documents in bundles that are worth sending to another process."""
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document.text)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _split_batch(texts: list[str], *, language: str, one_per_line: bool) -> list[tuple[int, list[str]]]:
    return [(len(text), split_sentences(text, language=language, one_per_line=one_per_line)) for text in texts]


def _check(shards: list[TextShard]) -> None:
    documents = sum(shard.documents for shard in shards)
    if not documents:
        raise ValueError("the input holds no text: give files with sentences")
    for shard in shards:
        if shard.documents < 2:
            raise ValueError(
                f"shard {shard.name} has {shard.documents} of the corpus' {documents} documents, and a random next "
                "sentence must come from another document of the shard: give more documents (--documents-by "
                "blank-line, if files hold several) or fewer shards (--training-shards 1, --test-fraction 0)"
            )
