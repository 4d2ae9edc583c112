"""Masked examples from pairs of segments, many at once in NumPy.

Of each sequence's ordinary tokens `masked_lm_prob` (15 %) are to be predicted; of these 80 % are replaced by [MASK],
10 % by a random ordinary token, and 10 % stay (Devlin et al., "BERT", 2019, section 3.1).

Letters: N examples, T tokens of a sequence, M predictions at most per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prepare_pairs import Pairs
from vocabulary import Vocabulary

Rows = dict[str, NDArray[np.int32] | NDArray[np.int8]]


@dataclass(frozen=True, kw_only=True)
class Masking:
    """How much is masked. `whole_words`: a word's pieces are masked all or none."""

    max_predictions: int
    probability: float = 0.15
    whole_words: bool = False


def make_examples(
    ids: NDArray[np.int32],
    pairs: Pairs,
    vocabulary: Vocabulary,
    *,
    length: int,
    masking: Masking,
    rng: np.random.Generator,
) -> Rows:
    """NVIDIA's arrays: `input_ids`, `input_mask`, `segment_ids` (N, T), `masked_lm_positions`, `masked_lm_ids` (N, M),
    padded with zeros, and `next_sentence_labels` (N,), 1 where B is random."""
    sequences, segments, filled = _sequences(ids, pairs, vocabulary, length)
    maskable = filled & ~vocabulary.special[sequences]
    begins_word = maskable.copy()
    if masking.whole_words:
        first_of_a_segment = np.zeros_like(filled)
        first_of_a_segment[:, 1:] = vocabulary.special[sequences[:, :-1]]
        begins_word &= ~vocabulary.continues_word[sequences] | first_of_a_segment
    wanted = np.minimum(
        masking.max_predictions, np.maximum(1, np.rint(maskable.sum(axis=1) * masking.probability).astype(np.int64))
    )
    chosen = _choose(maskable, begins_word, wanted, rng)
    rows, positions = np.nonzero(chosen)
    originals = sequences[rows, positions]
    column = np.arange(len(rows)) - np.searchsorted(rows, rows)  # of each prediction within its row
    masked_positions = np.zeros((len(pairs), masking.max_predictions), dtype=np.int32)
    masked_ids = np.zeros_like(masked_positions)
    masked_positions[rows, column] = positions
    masked_ids[rows, column] = originals
    sequences[rows, positions] = _replacements(originals, vocabulary, rng)
    return {
        "input_ids": sequences,
        "input_mask": filled.astype(np.int8),
        "segment_ids": segments,
        "masked_lm_positions": masked_positions,
        "masked_lm_ids": masked_ids,
        "next_sentence_labels": pairs.random_next.astype(np.int8),
    }


def _sequences(
    ids: NDArray[np.int32], pairs: Pairs, vocabulary: Vocabulary, length: int
) -> tuple[NDArray[np.int32], NDArray[np.int8], NDArray[np.bool_]]:
    """[CLS] A [SEP] B [SEP] and padding: ids, segment numbers (0 up to the first [SEP], then 1), and what is filled."""
    a, b = (pairs.a_end - pairs.a_begin)[:, None], (pairs.b_end - pairs.b_begin)[:, None]
    at = np.arange(length)[None, :]
    in_a = (at >= 1) & (at <= a)
    in_b = (at >= a + 2) & (at < a + 2 + b)
    source = np.where(in_a, pairs.a_begin[:, None] + at - 1, pairs.b_begin[:, None] + at - a - 2)
    sequences = np.full(in_a.shape, vocabulary.pad, dtype=np.int32)
    inside = in_a | in_b
    sequences[inside] = ids[source[inside]]
    sequences[:, 0] = vocabulary.classify
    sequences[(at == a + 1) | (at == a + b + 2)] = vocabulary.separate
    filled = at <= a + b + 2
    return sequences, (filled & (at >= a + 2)).astype(np.int8), filled


def _choose(
    maskable: NDArray[np.bool_], begins_word: NDArray[np.bool_], wanted: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Which tokens are predicted: words in random order, skipping those that no longer fit into `wanted` (N,).

    A word is a run of maskable tokens from where `begins_word`. All rows go through their words at the same time.
    """
    examples, length = maskable.shape
    every = np.arange(examples)
    word = np.where(maskable, np.cumsum(begins_word, axis=1) - 1, length)  # unmaskable: a word that is never chosen
    flat = (word + every[:, None] * (length + 1)).ravel()
    sizes = np.bincount(flat, minlength=examples * (length + 1)).reshape(examples, length + 1)
    sizes[:, length] = 0
    keys = rng.random((examples, length), dtype=np.float32)
    keys[sizes[:, :length] == 0] = 2  # no such word: last
    order = np.argsort(keys, axis=1, kind="stable")
    taken = np.zeros((examples, length + 1), dtype=bool)
    count = np.zeros(examples, dtype=np.int64)
    for rank in range(int((sizes > 0).sum(axis=1).max(initial=0))):
        candidate = order[:, rank]
        size = sizes[every, candidate]
        fits = (size > 0) & (count + size <= wanted)
        taken[every[fits], candidate[fits]] = True
        count += np.where(fits, size, 0)
        if (count >= wanted).all():
            break
    return np.take_along_axis(taken, word, axis=1)


def _replacements(originals: NDArray[np.int32], vocabulary: Vocabulary, rng: np.random.Generator) -> NDArray[np.int32]:
    ordinary = np.flatnonzero(~vocabulary.special).astype(np.int32)
    toss = rng.random(len(originals))
    return np.where(
        toss < 0.8, np.int32(vocabulary.mask), np.where(toss < 0.9, rng.choice(ordinary, len(originals)), originals)
    ).astype(np.int32)
