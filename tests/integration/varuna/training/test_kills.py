"""Whichever rank is killed, at whichever op or phase: every survivor notices it and leaves, and nothing hangs.

`make soak-kills` also checks how soon, on a quiet machine, for every point.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from training_kills import SHAPES, Kill, make_checkpoint, op_kills, phase_kills, seconds_until_survivors_left
from training_world import Zygote

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_checkpoint(zygote, tmp_path_factory.mktemp("trained"))


def assert_survivors_leave(zygote: Zygote, folder: Path, kills: Sequence[Kill], checkpoint: str) -> None:
    left_s: list[float] = []
    for number, kill in enumerate(kills):
        after_s = seconds_until_survivors_left(zygote, folder / str(number), kill, checkpoint)
        print(f"{kill}: survivors left after", [round(each, 3) for each in after_s], "s")
        left_s += after_s
    print(f"{len(kills)} kills, median {statistics.median(left_s):.3f} s, longest {max(left_s):.3f} s")


RANKS = [(p, d, rank) for p, d in SHAPES for rank in range(p * d)]


@pytest.mark.parametrize(("p", "d", "rank"), RANKS, ids=lambda value: str(value))
def test_survivors_leave_when_a_rank_is_killed_at_an_op(
    zygote: Zygote, tmp_path: Path, checkpoint: str, p: int, d: int, rank: int
) -> None:
    kills = list(op_kills(p, d, rank))
    # For each op and micro-batch either the kill before it or the one after it; for the next one the other.
    assert_survivors_leave(
        zygote, tmp_path, [kills[i + (i // 2 + rank) % 2] for i in range(0, len(kills), 2)], checkpoint
    )


@pytest.mark.parametrize(("p", "d"), SHAPES)
def test_survivors_leave_when_a_rank_is_killed_elsewhere(
    zygote: Zygote, tmp_path: Path, checkpoint: str, p: int, d: int
) -> None:
    by_phase: dict[str, list[Kill]] = {}
    for rank in range(p * d):
        for kill in phase_kills(p, d, rank):
            by_phase.setdefault(kill.at, []).append(kill)
    # For each phase one kill, with the ranks in turn, and another one of a rank that does not serve the store.
    chosen = [kills[number * 5 % len(kills)] for number, kills in enumerate(by_phase.values())]
    others = [[kill for kill in kills if kill.rank] for kills in by_phase.values()]
    chosen += [kills[number * 3 % len(kills)] for number, kills in enumerate(others)]
    assert_survivors_leave(zygote, tmp_path, list({str(kill): kill for kill in chosen}.values()), checkpoint)
