"""A script that leaves its shape open, under a launcher that knows none: ranks plan, wait, save when they are asked to
end, and other ranks go on.

A model as small as this one runs best on one rank, so all others have no place. `test_elastic_torchrun.py` has a larger
one.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from repository import TRAINING_SCRIPTS
from small_gpt import Task, train_plainly
from training_world import Outcome, Ranks, Zygote
from varuna_planner.profile.document import Profile
from varuna_proto.environment import EXIT_GENERATION_ENDED
from waiting import wait_until

SCRIPT = TRAINING_SCRIPTS / "launched_script.py"
TASK = Task(global_batch=1, steps=3)


def launch(zygote: Zygote, folder: Path, processes: int, task: Task = TASK, *, start: int = 1, **wanted: Any) -> Ranks:
    """Processes that train with the store in `folder`."""
    return Ranks(
        zygote,
        folder,
        task,
        1,
        processes,
        generation=start,
        script=SCRIPT,
        wanted={"group": "never", "varuna": {"stages": "auto"}, **wanted},
        launched=lambda rank: set_by_hand(rank, processes),
        environ={"VARUNA_CHECKPOINT_URL": str(folder / "store")},
    )


def set_by_hand(rank: int, processes: int) -> Mapping[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}


@pytest.mark.slow
def test_ranks_without_a_place_end_with_the_others_and_the_next_start_has_the_profile(
    zygote: Zygote, tmp_path: Path
) -> None:
    save = {"step": TASK.steps, "url": str(tmp_path / "store")}
    with launch(zygote, tmp_path, 2, save=save) as world:
        assert world.exit_codes() == [0, 0], world.logs()
    assert "the plan has no place for this rank" in (world.out / "rank1.log").read_text()
    first = Outcome.read([world.out / "rank0"])
    profile = Profile.from_json((tmp_path / "store" / "profile.json").read_text())
    assert profile.environment["ranks"] == "2"

    longer = replace(TASK, steps=TASK.steps + 2)
    with launch(zygote, tmp_path, 1, longer, start=2) as world:
        second = world.finish()
    assert "profile taken from the cache" in world.logs()
    assert second.ranks[0]["first"] == TASK.steps + 1
    plain = train_plainly(longer)
    assert [*first.losses, *second.losses] == pytest.approx(plain.losses, rel=1e-5)


def test_a_rank_that_is_asked_to_end_saves_unless_it_has_no_place(zygote: Zygote, tmp_path: Path) -> None:
    with launch(zygote, tmp_path, 2, forever=True) as world:

        def count_updates() -> int:
            return len(list(world.out.glob("rank0.updated*")))

        wait_until(lambda: count_updates() > 1, "steps")
        pids = world._pids()
        assert pids is not None
        os.kill(pids[1], signal.SIGTERM)
        wait_until(lambda: 1 in world._events("code"), "the end of the rank without a place")
        before = count_updates()
        wait_until(lambda: count_updates() > before, "further steps")
        os.kill(pids[0], signal.SIGTERM)
        assert world.exit_codes() == [EXIT_GENERATION_ENDED] * 2, world.logs()
    saved = re.search(r"asked to save and leave; step (\d+): committed", world.logs())
    assert saved is not None, world.logs()
    steps = int(saved[1])
    assert steps == count_updates()
    assert (tmp_path / "store" / f"varuna_ckpt_{steps}").is_dir()
