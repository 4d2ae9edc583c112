"""All VMs of a job are gone at once and nobody has the state: only the work since the newest save is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from all_die_script import STEPS_MORE
from repository import TRAINING_SCRIPTS
from small_gpt import Task, train_plainly
from training_world import Ranks, Zygote
from varuna.checkpoint import newest_complete
from varuna.checkpoint.format.manifest import MANIFEST

SCRIPT = TRAINING_SCRIPTS / "all_die_script.py"
EVERY_BOUNDARY_S = 1e-6
"""As an interval, this makes a save due at every boundary at which no save is being written."""


@pytest.mark.parametrize(("p", "d"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])
def test_what_is_lost_begins_with_the_newest_committed_save(zygote: Zygote, tmp_path: Path, p: int, d: int) -> None:
    """At most the time of an interval and of the save in flight is lost, because the next save waits for that one."""
    store = tmp_path / "store"
    interval = {"VARUNA_CHECKPOINT_INTERVAL_S": str(EVERY_BOUNDARY_S)}
    task = Task(global_batch=4)
    with Ranks(
        zygote,
        tmp_path,
        task,
        p,
        d,
        checkpoint_url=str(store),
        wanted={"forever": True},
        environ=interval,
        script=SCRIPT,
    ) as world:
        assert world.exit_codes() == [-signal.SIGKILL] * (p * d), world.logs()
        died_at = int((world.out / "die-at").read_text())
    committed = newest_complete(str(store))
    folders = sorted(int(folder.name.rpartition("_")[2]) for folder in store.iterdir())
    assert committed is not None
    assert folders[0] == committed, "the one before it was pruned, or never was"
    (in_flight,) = folders[1:]
    assert not (store / f"varuna_ckpt_{in_flight}" / MANIFEST).exists()
    assert committed < in_flight <= died_at - STEPS_MORE, "none was begun while one was in flight"

    done = Task(global_batch=4, steps=died_at + 2)
    with Ranks(zygote, tmp_path, done, d, p, generation=2, checkpoint_url=str(store)) as world:
        outcome = world.finish()
    assert {rank["first"] for rank in outcome.ranks} == {committed + 1}
    assert outcome.losses == pytest.approx(train_plainly(done).losses[committed:], rel=1e-5)
