"""Losses, norms, parameters and the optimizer's state are plain PyTorch's in every combination of features."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from training_matrix import (
    FACTORS,
    SHAPES,
    Configuration,
    assert_equal,
    covering_rows,
    full_product,
    plainly,
    run,
    wanted_meetings,
)
from training_world import Zygote

pytestmark = pytest.mark.slow


ROWS = [Configuration(**row, pair=number) for number, row in enumerate(covering_rows(FACTORS, wanted_meetings()))]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_training_is_plain_pytorchs(zygote: Zygote, tmp_path: Path, shape: tuple[int, int]) -> None:
    rows = [row for row in ROWS if row.shape == shape]
    for row, outcome in zip(rows, run(zygote, tmp_path, rows), strict=True):
        print(row)
        assert_equal(outcome, plainly(row), row.precision)


def test_the_rows_cover_each_two_values_and_each_three_beside_the_shape() -> None:
    seen = {
        tuple((name, getattr(row, name)) for name in names)
        for row in ROWS
        for count in (2, 3)
        for names in combinations(FACTORS, count)
    }
    for (one, ones), (other, others) in combinations(FACTORS.items(), 2):
        assert all(((one, a), (other, b)) in seen for a in ones for b in others)
    beside = [name for name in FACTORS if name != "shape"]
    for one, two, three in combinations(beside, 3):
        for a in FACTORS[one]:
            for b in FACTORS[two]:
                assert all(((one, a), (two, b), (three, c)) in seen for c in FACTORS[three])
    assert len(ROWS) < len(set(full_product())) / 100
    # Some of the stages that tie a weight are not neighbours.
    pairs = [row.task.tied_blocks for row in ROWS if row.tied == "two stages" and row.shape[0] > 2]
    assert any(pair is not None and pair[1] - pair[0] > 1 for pair in pairs)


def test_covering_is_deterministic_and_not_lavish() -> None:
    assert covering_rows(FACTORS, wanted_meetings()) == covering_rows(FACTORS, wanted_meetings())
    pairs = covering_rows({"a": [1, 2], "b": [1, 2], "c": [1, 2]}, [("a", "b"), ("b", "c"), ("a", "c")])
    assert len(pairs) == 4  # the fewest rows that are possible
