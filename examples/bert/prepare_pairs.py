"""Pairs of segments for next-sentence prediction, as spans of a shard's tokens.

Follows the data of Devlin et al., "BERT" (2019), appendix A.2: segment A is a run of sentences, B either what follows
it or a run from another document; together they fill the sequence, but for a share of deliberately short ones. One
rule is stricter here: every pair is a toss of a coin. The usual recipe always takes a random B where a single
sentence is left, so that the length of A reveals the label. Here a pair begins with at least two sentences: a single
last one is not used, nor is a document of one sentence (which may still be a random B).

Letters: N examples, T tokens of a sequence, with [CLS] and twice [SEP].
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SPECIAL_PER_SEQUENCE = 3


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A shard's text: all ids in one array, and where sentences and documents begin in it, ends included.

    Sentence s is ids[sentences[s]:sentences[s + 1]]; document d is the sentences documents[d] … documents[d + 1] − 1.
    No sentence and no document is empty.
    """

    ids: NDArray[np.int32]
    sentences: list[int]
    documents: list[int]


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Spans [begin, end) of ids, all of shape (N,), int64; `random_next` bool: B is from another document."""

    a_begin: NDArray[np.int64]
    a_end: NDArray[np.int64]
    b_begin: NDArray[np.int64]
    b_end: NDArray[np.int64]
    random_next: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.a_begin)

    def __getitem__(self, rows: slice) -> Pairs:
        return Pairs(
            a_begin=self.a_begin[rows],
            a_end=self.a_end[rows],
            b_begin=self.b_begin[rows],
            b_end=self.b_end[rows],
            random_next=self.random_next[rows],
        )


def make_pairs(
    tokens: Tokens, *, max_seq_length: int, short_seq_prob: float, dupe_factor: int, rng: np.random.Generator
) -> Pairs:
    """The pairs of a shard in random order: `dupe_factor` passes over it, each cut in another way.

    Every pair fits in `max_seq_length` with its three special tokens. Raises ValueError for less than two documents.
    """
    if len(tokens.documents) < 3:
        raise ValueError("a shard of one document has no other to take a random next sentence from: use fewer shards")
    tosses = random.Random(int(rng.integers(1 << 63)))  # much faster than NumPy's, one number at a time
    room = max_seq_length - SPECIAL_PER_SEQUENCE
    found = [
        pair
        for _ in range(dupe_factor)
        for document in range(len(tokens.documents) - 1)
        for pair in _pairs_of(tokens, document, room, short_seq_prob, tosses)
    ]
    table = np.array(found, dtype=np.int64).reshape(-1, 5)
    rng.shuffle(table)
    return _trimmed(table, room, rng)


def _pairs_of(
    tokens: Tokens, document: int, room: int, short_seq_prob: float, tosses: random.Random
) -> Iterator[tuple[int, int, int, int, bool]]:
    """Untrimmed (a_begin, a_end, b_begin, b_end, random_next) of one pass over a document."""
    starts = tokens.sentences
    sentence, last = tokens.documents[document], tokens.documents[document + 1]
    while last - sentence >= 2:
        target = tosses.randint(2, room) if tosses.random() < short_seq_prob else room
        end = max(sentence + 2, _reach(starts, sentence, target, last))
        a_end = tosses.randint(sentence + 1, end - 1)
        if tosses.random() < 0.5:
            left = max(1, target - (starts[a_end] - starts[sentence]))
            b_begin, b_end = _elsewhere(tokens, document, left, tosses)
            yield starts[sentence], starts[a_end], b_begin, b_end, True
            sentence = a_end  # what would have followed is not used up
        else:
            yield starts[sentence], starts[a_end], starts[a_end], starts[end], False
            sentence = end


def _reach(starts: Sequence[int], sentence: int, wanted: int, last: int) -> int:
    """The first sentence that begins at least `wanted` tokens after `sentence` does, or `last`."""
    return min(last, bisect_left(starts, starts[sentence] + wanted, sentence + 1, last))


def _elsewhere(tokens: Tokens, document: int, wanted: int, tosses: random.Random) -> tuple[int, int]:
    """Some `wanted` tokens from a random sentence of a random other document."""
    other = tosses.randrange(len(tokens.documents) - 2)
    other += other >= document
    first, last = tokens.documents[other], tokens.documents[other + 1]
    begin = tosses.randrange(first, last)
    return tokens.sentences[begin], tokens.sentences[_reach(tokens.sentences, begin, wanted, last)]


def _trimmed(table: NDArray[np.int64], room: int, rng: np.random.Generator) -> Pairs:
    """The pairs cut to `room` tokens: token by token from the longer segment, at its front or its back by chance.

    Counted at once: how many tokens each segment loses, and of these a binomial number at the front.
    """
    a_begin, a_end, b_begin, b_end, random_next = table.T
    a, b = a_end - a_begin, b_end - b_begin
    too_long = a + b > room
    kept_a = np.where(too_long, np.minimum(a, np.maximum(room - b, room - room // 2)), a)
    kept_b = np.where(too_long, room - kept_a, b)
    front_a, front_b = rng.binomial(a - kept_a, 0.5), rng.binomial(b - kept_b, 0.5)
    return Pairs(
        a_begin=a_begin + front_a,
        a_end=a_begin + front_a + kept_a,
        b_begin=b_begin + front_b,
        b_end=b_begin + front_b + kept_b,
        random_next=random_next.astype(bool),
    )
