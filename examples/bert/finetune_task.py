"""The small task of the fine-tuning example: which subject is a passage of Python's documentation about?

Passages are two neighbouring sentences of one module's documentation. No module has passages in both the training set
and the test set, so knowing the words of one module is not enough.

Shapes: B passages, T tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from corpus_reading import Document
from corpus_shards import split_sentences
from vocabulary import Vocabulary, WordPieces

SUBJECTS = {
    "the language": ("topic",),
    "windows": ("tkinter", "turtle", "turtledemo", "idlelib"),
    "concurrency": ("asyncio", "concurrent", "multiprocessing", "threading", "selectors", "queue", "subprocess"),
    "mail": ("email", "mailbox", "smtplib", "imaplib", "poplib", "nntplib"),
    "the web": ("http", "urllib", "xmlrpc", "wsgiref", "html", "socketserver", "ssl", "webbrowser"),
    "packaging": ("distutils", "numpy.distutils", "importlib", "venv", "zipimport", "pkgutil", "zipapp"),
    "arrays": ("numpy._core", "numpy.lib", "numpy.linalg", "numpy.fft", "numpy.random", "numpy.matrixlib"),
    "tests": ("unittest", "doctest", "numpy.testing", "pdb", "bdb", "trace", "traceback", "logging"),
}
_SENTENCES = 2
_FEWEST_WORDS = 12
_PASSAGES_OF_A_MODULE = 40


@dataclass(frozen=True, kw_only=True)
class Passage:
    """`subject` is an index into SUBJECTS."""

    text: str
    subject: int


def make_task(
    documents: Iterable[Document], *, labelled: int, tested: int, seed: int
) -> tuple[list[Passage], list[Passage]]:
    """`labelled` passages of each subject to learn from, and up to `tested` of each from other modules.

    Raises ValueError when a subject has fewer to learn from.
    """
    rng = random.Random(seed)
    of_subject: dict[int, list[list[str]]] = {subject: [] for subject in range(len(SUBJECTS))}
    for document in documents:
        subject = subject_of(document.name)
        passages = _passages(document.text) if subject is not None else []
        if subject is not None and passages:
            rng.shuffle(passages)
            of_subject[subject].append(passages[:_PASSAGES_OF_A_MODULE])
    training: list[Passage] = []
    test: list[Passage] = []
    for subject, modules in of_subject.items():
        rng.shuffle(modules)
        half = len(modules) // 2
        for chosen, size, begin, end in ((training, labelled, 0, half), (test, tested, half, len(modules))):
            texts = [text for module in modules[begin:end] for text in module]
            rng.shuffle(texts)
            if len(texts) < size and chosen is training:
                raise ValueError(f"--labelled {labelled}: {list(SUBJECTS)[subject]} has {len(texts)} to learn from")
            chosen.extend(Passage(text=text, subject=subject) for text in texts[:size])
    rng.shuffle(training)
    return training, test


def subject_of(name: str) -> int | None:
    """The subject of a document of `corpus_python`, by its name."""
    path = name.replace(":", ".") + "."
    for subject, packages in enumerate(SUBJECTS.values()):
        if any(path.startswith(package + ".") for package in packages):
            return subject
    return None


def encode(passages: list[Passage], vocabulary: Vocabulary, pieces: WordPieces, length: int) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask` (B, T) and `labels` (B,), int64: [CLS] passage [SEP], cut or padded to `length`."""
    ids = torch.full((len(passages), length), vocabulary.pad, dtype=torch.int64)
    for row, text in enumerate(pieces.ids([passage.text for passage in passages])):
        inside = [vocabulary.classify, *text[: length - 2], vocabulary.separate]
        ids[row, : len(inside)] = torch.tensor(inside)
    return {
        "input_ids": ids,
        "attention_mask": (ids != vocabulary.pad).long(),
        "labels": torch.tensor([passage.subject for passage in passages]),
    }


def _passages(text: str) -> list[str]:
    sentences = split_sentences(text)
    runs = (" ".join(sentences[begin : begin + _SENTENCES]) for begin in range(0, len(sentences), _SENTENCES))
    return [run for run in runs if len(run.split()) >= _FEWEST_WORDS]
