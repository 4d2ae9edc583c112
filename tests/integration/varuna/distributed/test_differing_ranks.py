"""A rank that differs from the others is named in one line before it can do harm."""

from __future__ import annotations

from pathlib import Path

import pytest

from repository import TRAINING_SCRIPTS
from small_gpt import Task
from training_world import Ranks, Zygote
from varuna_proto.environment import EXIT_PEER_LOST

SCRIPT = TRAINING_SCRIPTS / "differing_script.py"


@pytest.mark.parametrize(
    ("p", "d", "differs", "line"),
    [
        (1, 2, "frozen", "parameter norm.bias is float32 [16], frozen on rank 1 and float32 [16], trained on rank 0"),
        (2, 1, "length", "the example input ['tokens'] is int64 [2, 5] on rank 1 and int64 [2, 6] on rank 0"),
        (1, 2, "head", "parameter head.weight is float32 [31, 16], trained on rank 1 and float32 [29, 16], trained on"),
    ],
)
def test_a_rank_that_traces_another_model_says_in_what(
    zygote: Zygote, tmp_path: Path, p: int, d: int, differs: str, line: str
) -> None:
    wanted = {"odd_rank": 1, "differs": differs}
    with Ranks(zygote, tmp_path, Task(), p, d, script=SCRIPT, wanted=wanted) as world:
        codes = world.exit_codes()
    assert codes[1] == 1
    assert codes[0] != 0
    assert f"ValueError: rank 1 has traced a different model than rank 0: {line}" in world.logs()


@pytest.mark.parametrize(
    ("p", "d", "odd_rank", "differs", "line"),
    [
        (1, 2, 1, "steps", "rank 1 has ended its script after step 2, but this rank, 0, is in step 3"),
        (1, 2, 0, "steps", "rank 0 has ended its script after step 2, but this rank, 1, is in step 3"),
        (2, 2, 2, "evaluation", "rank 2 is in evaluate() after step 2, but this rank, {rank}, is in step 3"),
    ],
)
def test_a_rank_whose_data_ends_earlier_is_named_by_the_others(
    zygote: Zygote, tmp_path: Path, p: int, d: int, odd_rank: int, differs: str, line: str
) -> None:
    wanted = {"odd_rank": odd_rank, "differs": differs}
    with Ranks(zygote, tmp_path, Task(), p, d, script=SCRIPT, wanted=wanted) as world:
        codes = world.exit_codes()
    for rank in set(range(p * d)) - {odd_rank}:
        log = (world.out / f"rank{rank}.log").read_text()
        if codes[rank] == 1:
            assert f"RanksDifferError: {line.format(rank=rank)}: all ranks must make the same calls" in log
    assert 1 in codes
    assert codes[odd_rank] == (0 if differs == "steps" else EXIT_PEER_LOST)
