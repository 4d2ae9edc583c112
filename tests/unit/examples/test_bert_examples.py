"""BERT's examples from text: pairs of segments, masks, labels, by their statistics and by rebuilding what was there.

Bounds are five standard deviations of a binomial, with fixed seeds, so the outcome is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from example_modules import BERT, example_modules

LENGTH = 64
ROOM = LENGTH - 3
WORDS = 500


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, ModuleType]]:
    with (
        pytest.MonkeyPatch.context() as patch,
        example_modules(patch, BERT, "prepare_pairs", "prepare_masks", "vocabulary") as modules,
    ):
        yield modules


@pytest.fixture(scope="module")
def vocabulary(example: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Five special tokens, then words. Every third one continues the one before."""
    special = example["vocabulary"].SPECIAL_TOKENS
    ordinary = [("##" if index % 3 == 2 else "") + f"w{index}" for index in range(WORDS)]
    path: Path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("".join(token + "\n" for token in (*special, *ordinary)))
    return example["vocabulary"].read_vocabulary(path)


@pytest.fixture(scope="module")
def tokens(example: dict[str, ModuleType]) -> Any:
    """200 documents of 1 to 40 sentences of 1 to 30 tokens; some sentences alone are longer than a sequence."""
    rng = np.random.default_rng(3)
    counts = rng.integers(1, 40, 200)
    lengths = rng.integers(1, 30, counts.sum())
    long = rng.random(len(lengths)) < 0.05
    lengths[long] = rng.integers(60, 150, long.sum())
    return example["prepare_pairs"].Tokens(
        ids=rng.integers(5, 5 + WORDS, lengths.sum()).astype(np.int32),
        sentences=[0, *accumulate(lengths.tolist())],
        documents=[0, *accumulate(counts.tolist())],
    )


@pytest.fixture(scope="module")
def pairs(example: dict[str, ModuleType], tokens: Any) -> Any:
    return example["prepare_pairs"].make_pairs(
        tokens, max_seq_length=LENGTH, short_seq_prob=0.1, dupe_factor=5, rng=np.random.default_rng(1)
    )


def documents_of(tokens: Any, positions: np.ndarray) -> np.ndarray:
    begins = np.array([tokens.sentences[sentence] for sentence in tokens.documents])
    return np.searchsorted(begins, positions, side="right") - 1


def assert_binomial(hits: int, of: int, probability: float) -> None:
    deviation = np.sqrt(of * probability * (1 - probability))
    assert abs(hits - of * probability) < 5 * deviation, f"{hits} of {of}, where {probability:.1%} are due"


def test_half_the_pairs_are_random_and_these_are_never_of_one_document(tokens: Any, pairs: Any) -> None:
    assert len(pairs) > 3000
    assert_binomial(int(pairs.random_next.sum()), len(pairs), 0.5)
    of_a, of_b = documents_of(tokens, pairs.a_begin), documents_of(tokens, pairs.b_begin)
    assert (of_a == documents_of(tokens, pairs.a_end - 1)).all()
    assert (of_b == documents_of(tokens, pairs.b_end - 1)).all()
    assert ((of_a != of_b) == pairs.random_next).all()
    assert len(set(of_b[pairs.random_next].tolist())) == 200, "every document is drawn from, those of one sentence too"


def test_a_true_next_segment_follows_and_nothing_but_trimmed_tokens_lies_between(tokens: Any, pairs: Any) -> None:
    follows = ~pairs.random_next
    assert (pairs.b_begin >= pairs.a_end)[follows].all()
    a, b = pairs.a_end - pairs.a_begin, pairs.b_end - pairs.b_begin
    untrimmed = follows & (a + b < ROOM)  # what is trimmed fills the room
    assert untrimmed.sum() > 100
    assert (pairs.b_begin == pairs.a_end)[untrimmed].all()
    assert set(pairs.a_begin[untrimmed].tolist()) <= set(tokens.sentences)


def test_pairs_fill_the_sequence_but_for_the_short_ones_and_the_ends_of_documents(tokens: Any, pairs: Any) -> None:
    a, b = pairs.a_end - pairs.a_begin, pairs.b_end - pairs.b_begin
    assert min(a.min(), b.min()) >= 1
    assert (a + b).max() == ROOM
    assert (a + b == ROOM).mean() > 0.5
    trimmed = a + b == ROOM  # of two long segments both lose, down to the same length
    assert (np.minimum(a, b) == ROOM // 2)[trimmed].sum() > 20


def test_the_length_of_the_first_segment_does_not_tell_the_label(pairs: Any) -> None:
    whole = pairs.a_end - pairs.a_begin >= ROOM - 1
    assert whole.sum() < len(pairs) / 20  # a long sentence gives way to the second segment
    for a_longer in (True, False):
        of = (pairs.a_end - pairs.a_begin > 20) == a_longer
        share = pairs.random_next[of].mean()
        assert share == pytest.approx(0.5, abs=0.06)


def test_short_sequences_are_made_on_purpose(example: dict[str, ModuleType]) -> None:
    """One long document of one-token sentences and another: only the random short pairs and the last one are short."""
    make_pairs, document = example["prepare_pairs"].make_pairs, 50_000
    long = example["prepare_pairs"].Tokens(
        ids=np.full(2 * document, 5, dtype=np.int32),
        sentences=list(range(2 * document + 1)),
        documents=[0, document, 2 * document],
    )
    for probability in (0.0, 0.3):
        made = make_pairs(
            long, max_seq_length=LENGTH, short_seq_prob=probability, dupe_factor=1, rng=np.random.default_rng(0)
        )
        truly = ~made.random_next  # a random one may also end with its document
        short = (made.a_end - made.a_begin + made.b_end - made.b_begin < ROOM)[truly]
        # Of the short targets, from 2 tokens to ROOM, one is ROOM.
        expected = probability * (1 - 1 / (ROOM - 1))
        assert abs(short.mean() - expected) < 5 * np.sqrt(max(expected, 0.001) / len(short))


@pytest.mark.parametrize("whole_words", [False, True], ids=["pieces", "whole-words"])
def test_what_was_there_can_be_rebuilt_and_the_rest_is_padding(
    example: dict[str, ModuleType], vocabulary: Any, tokens: Any, pairs: Any, whole_words: bool
) -> None:
    rows = masked(example, vocabulary, tokens, pairs, whole_words=whole_words)
    for index in range(0, len(pairs), 17):
        a = tokens.ids[pairs.a_begin[index] : pairs.a_end[index]].tolist()
        b = tokens.ids[pairs.b_begin[index] : pairs.b_end[index]].tolist()
        expected = [vocabulary.classify, *a, vocabulary.separate, *b, vocabulary.separate]
        filled = len(expected)
        count = int((rows["masked_lm_positions"][index] > 0).sum())
        positions = rows["masked_lm_positions"][index][:count]
        rebuilt = rows["input_ids"][index].copy()
        rebuilt[positions] = rows["masked_lm_ids"][index][:count]
        assert rebuilt.tolist() == expected + [vocabulary.pad] * (LENGTH - filled)
        assert rows["input_mask"][index].tolist() == [1] * filled + [0] * (LENGTH - filled)
        assert rows["segment_ids"][index].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1) + [0] * (LENGTH - filled)
        assert all(before < after for before, after in pairwise(positions.tolist()))
        assert not rows["masked_lm_positions"][index][count:].any()
        assert not rows["masked_lm_ids"][index][count:].any()
    assert (rows["next_sentence_labels"] == pairs.random_next).all()


def test_fifteen_per_cent_are_masked_and_no_special_token(
    example: dict[str, ModuleType], vocabulary: Any, tokens: Any, pairs: Any
) -> None:
    rows = masked(example, vocabulary, tokens, pairs)
    there = rows["masked_lm_positions"] > 0
    counts = there.sum(axis=1)
    ordinary = (pairs.a_end - pairs.a_begin) + (pairs.b_end - pairs.b_begin)
    assert (counts == np.maximum(1, np.rint(ordinary * 0.15))).all()
    assert counts.sum() / ordinary.sum() == pytest.approx(0.15, abs=0.005)  # rounded in each sequence
    assert not vocabulary.special[rows["masked_lm_ids"][there]].any()
    few = masked(example, vocabulary, tokens, pairs, max_predictions=4)
    assert (few["masked_lm_positions"] > 0).sum(axis=1).max() == 4
    assert few["masked_lm_ids"].shape == (len(pairs), 4)
    # Every place is as likely as any other: those of the first half of full sequences, with 9 of 61 due.
    full = ordinary == ROOM
    a_length = (pairs.a_end - pairs.a_begin)[full]
    places = np.where(a_length + 1 < LENGTH // 2, LENGTH // 2 - 2, LENGTH // 2 - 1)  # one may be the [SEP]
    drawn = there[full] & (rows["masked_lm_positions"][full] < LENGTH // 2)
    assert_binomial(int(drawn.sum()), int(places.sum()), 9 / ROOM)


def test_eighty_per_cent_become_mask_ten_random_and_ten_stay(
    example: dict[str, ModuleType], vocabulary: Any, tokens: Any, pairs: Any
) -> None:
    rows = masked(example, vocabulary, tokens, pairs)
    there = rows["masked_lm_positions"] > 0
    at = np.nonzero(there)[0]
    now = rows["input_ids"][at, rows["masked_lm_positions"][there]]
    originals = rows["masked_lm_ids"][there]
    assert len(now) > 20_000
    assert_binomial(int((now == vocabulary.mask).sum()), len(now), 0.8)
    assert_binomial(int((now == originals).sum()), len(now), 0.1 + 0.1 / WORDS)
    replaced = now[(now != vocabulary.mask) & (now != originals)]
    assert_binomial(len(replaced), len(now), 0.1 * (1 - 1 / WORDS))
    assert not vocabulary.special[replaced].any()
    assert len(set(replaced.tolist())) > 0.9 * WORDS, "any ordinary token may stand there"


def test_whole_words_are_masked_together(
    example: dict[str, ModuleType], vocabulary: Any, tokens: Any, pairs: Any
) -> None:
    rows = masked(example, vocabulary, tokens, pairs, whole_words=True)
    ordinary = (pairs.a_end - pairs.a_begin) + (pairs.b_end - pairs.b_begin)
    counts = (rows["masked_lm_positions"] > 0).sum(axis=1)
    wanted = np.maximum(1, np.rint(ordinary * 0.15))
    assert (counts <= wanted).all()
    assert counts.sum() > 0.97 * wanted.sum()
    for index in range(0, len(pairs), 17):
        chosen = set(rows["masked_lm_positions"][index][: counts[index]].tolist())
        ids = rows["input_ids"][index].copy()
        ids[rows["masked_lm_positions"][index][: counts[index]]] = rows["masked_lm_ids"][index][: counts[index]]
        for position in range(1, LENGTH):
            before, here = ids[position - 1], ids[position]
            if vocabulary.continues_word[here] and not vocabulary.special[before]:
                assert (position in chosen) == (position - 1 in chosen), f"a word of example {index} is masked in part"


def test_the_same_seed_gives_the_same_and_another_gives_another(
    example: dict[str, ModuleType], vocabulary: Any, tokens: Any, pairs: Any
) -> None:
    first, again, other = (masked(example, vocabulary, tokens, pairs, seed=seed) for seed in (1, 1, 2))
    assert all((first[name] == again[name]).all() for name in first)
    assert (first["input_ids"] != other["input_ids"]).any(axis=1).mean() > 0.9


def test_a_shard_of_one_document_is_refused(example: dict[str, ModuleType]) -> None:
    alone = example["prepare_pairs"].Tokens(ids=np.array([5, 6], dtype=np.int32), sentences=[0, 1, 2], documents=[0, 2])
    with pytest.raises(ValueError, match=r"one document.*fewer shards"):
        example["prepare_pairs"].make_pairs(
            alone, max_seq_length=16, short_seq_prob=0.1, dupe_factor=1, rng=np.random.default_rng(0)
        )


def masked(
    example: dict[str, ModuleType], vocabulary: Any, tokens: Any, pairs: Any, *, seed: int = 0, **masking: Any
) -> dict[str, np.ndarray]:
    made: dict[str, np.ndarray] = example["prepare_masks"].make_examples(
        tokens.ids,
        pairs,
        vocabulary,
        length=LENGTH,
        masking=example["prepare_masks"].Masking(**{"max_predictions": 20, **masking}),
        rng=np.random.default_rng(seed),
    )
    return made
