"""The WordPiece vocabulary: trained on the corpus with Hugging Face's tokenizers, kept as BERT's `vocab.txt`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordPiece
from tokenizers.trainers import WordPieceTrainer

PAD, UNKNOWN, CLASSIFY, SEPARATE, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_CONTINUES = "##"
_READ_CHARACTERS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tokens of a `vocab.txt`, by id, and what masking needs to know of them."""

    tokens: tuple[str, ...]
    pad: int
    unknown: int
    classify: int
    separate: int
    mask: int
    special: NDArray[np.bool_]  # by id
    continues_word: NDArray[np.bool_]  # by id: `##ing`

    def __len__(self) -> int:
        return len(self.tokens)


def train_vocabulary(files: Sequence[Path], *, size: int, lower_case: bool = True, alphabet: int = 1000) -> list[str]:
    """The tokens of a vocabulary of at most `size`, learnt from text files: special ones, characters, pieces of words.

    The most frequent `alphabet` characters are kept; words with others become [UNK]. The same text gives
    the same vocabulary. Raises ValueError for a size that leaves no room for pieces of words.
    """
    tokenizer = _tokenizer({}, lower_case)
    characters = _characters(files, tokenizer.normalizer, alphabet)
    first = [*SPECIAL_TOKENS, *characters, *(_CONTINUES + character for character in characters)]
    if size <= len(first):
        raise ValueError(
            f"--vocab-size {size}: the special tokens and the text's {len(characters)} characters, at a word's begin "
            f"and inside, take {len(first)}: allow more, or keep fewer characters with --limit-alphabet"
        )
    trainer = WordPieceTrainer(
        vocab_size=size,
        min_frequency=2,
        # The trainer numbers pieces of one character in the order of a hash table, and breaks ties by these numbers:
        # every run would give another vocabulary. Named here they have numbers, and it finds none by itself.
        special_tokens=first,
        limit_alphabet=0,
        continuing_subword_prefix=_CONTINUES,
        show_progress=False,
    )
    tokenizer.train([str(path) for path in files], trainer)
    by_token = tokenizer.get_vocab()
    return sorted(by_token, key=lambda token: by_token[token])


def _characters(files: Sequence[Path], normalizer: normalizers.Normalizer, most: int) -> list[str]:
    """The `most` frequent characters of the normalized text, by code point."""
    counts: Counter[str] = Counter()
    for path in files:
        with path.open(encoding="utf-8", newline="\n") as file:
            while lines := file.readlines(_READ_CHARACTERS):
                counts.update(normalizer.normalize_str("".join(lines)))
    ranked = sorted((-count, character) for character, count in counts.items() if not character.isspace())
    return sorted(character for _, character in ranked[:most])


def read_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary of a `vocab.txt` (one token a line; the line's number is its id).

    Raises ValueError for a file that is not there, lacks a special token or has a token twice.
    """
    try:
        tokens = tuple(path.read_text(encoding="utf-8").removesuffix("\n").split("\n"))
    except OSError as error:
        raise ValueError(f"{path}: no vocabulary can be read there: {error.strerror or error}") from None
    by_token = {token: index for index, token in enumerate(tokens)}
    missing = [token for token in SPECIAL_TOKENS if token not in by_token]
    if missing:
        raise ValueError(f"{path}: lacks {', '.join(missing)}: it is not a BERT vocabulary of one token a line")
    if len(by_token) < len(tokens):
        twice = next(token for index, token in enumerate(tokens) if by_token[token] != index)
        raise ValueError(f"{path}: has the token {twice!r} twice: each line must be another token")
    return Vocabulary(
        tokens=tokens,
        pad=by_token[PAD],
        unknown=by_token[UNKNOWN],
        classify=by_token[CLASSIFY],
        separate=by_token[SEPARATE],
        mask=by_token[MASK],
        special=np.array([token in SPECIAL_TOKENS for token in tokens]),
        continues_word=np.array([token.startswith(_CONTINUES) for token in tokens]),
    )


class WordPieces:
    """Text as ids of a vocabulary, as BERT's tokenizer cuts it, without special tokens.

    What looks like one in the text (`[MASK]`, in a text about BERT) is cut like any other.
    """

    def __init__(self, vocabulary: Vocabulary, *, lower_case: bool = True) -> None:
        self._tokenizer = _tokenizer({token: index for index, token in enumerate(vocabulary.tokens)}, lower_case)

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


def _tokenizer(vocabulary: dict[str, int], lower_case: bool) -> Tokenizer:
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token=UNKNOWN, continuing_subword_prefix=_CONTINUES))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=_CONTINUES)
    return tokenizer
