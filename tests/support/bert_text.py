"""Small corpora for the tests of the BERT example."""

from __future__ import annotations

import random
from pathlib import Path

_SYLLABLES = ("ba", "de", "ki", "lo", "mu", "ne", "po", "ra", "su", "ti", "vo", "za")


def write_texts(folder: Path, documents: int, seed: int = 0) -> Path:
    """A folder of one text file for each document: a first sentence that names it, then invented ones."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 4))) for _ in range(400)]
    folder.mkdir(parents=True, exist_ok=True)
    for document in range(documents):
        sentences = [f"This is the text number {document} of the folder."]
        for _ in range(rng.randint(3, 30)):
            chosen = rng.choices(words, k=rng.randint(3, 15))
            sentences.append(" ".join(chosen).capitalize() + ".")
        (folder / f"{document:04d}.txt").write_text("\n".join(sentences) + "\n")
    return folder
