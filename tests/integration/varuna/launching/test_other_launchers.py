"""Under torchrun, srun, mpirun or by hand a script trains as plain PyTorch does.

srun and mpirun are not run here: the ranks get the variables that these set. `test_torchrun.py` runs torchrun itself.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from repository import TRAINING_SCRIPTS
from small_gpt import Task, train_plainly
from training_world import Ranks, Zygote
from varuna_proto.environment import EXIT_PEER_LOST

SCRIPT = TRAINING_SCRIPTS / "launched_script.py"
TASK = Task(tied=True, dropout=0.0, steps=3)
MASTER = {"MASTER_ADDR": "127.0.0.1"}  # the port comes from the world

Launcher = Callable[[int, int], dict[str, str]]


def by_hand(rank: int, world_size: int) -> dict[str, str]:
    return {**MASTER, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}


def srun(rank: int, world_size: int) -> dict[str, str]:
    """In a batch script that exports MASTER_ADDR and MASTER_PORT."""
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    return {**MASTER, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), **dict.fromkeys(names, str(world_size))}


def mpirun(rank: int, world_size: int) -> dict[str, str]:
    """With `-x MASTER_ADDR -x MASTER_PORT`."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "SIZE": world_size, "LOCAL_SIZE": world_size}
    return {**MASTER, **{f"OMPI_COMM_WORLD_{name}": str(value) for name, value in own.items()}}


@pytest.mark.parametrize(
    ("launcher", "group", "arguments", "place"),
    [
        (by_hand, "never", {"stages": 2, "chunk_size": 2}, [(0, 0), (1, 0)]),
        (srun, "after", {"stages": 1}, [(0, 0), (0, 1)]),
        # Varuna's rank 0 is not the launcher's.
        (mpirun, "before", {"stage_to_rank_map": "1;0;", "chunk_size": 2}, [(1, 0), (0, 0)]),
        (
            by_hand,
            "before",
            {"stage_to_rank_map": "0,1;2,3;", "chunk_size": 2},
            [(0, 0), (0, 1), (1, 0), (1, 1)],
        ),
    ],
    ids=["by hand", "srun", "mpirun", "stage by stage"],
)
def test_it_trains_as_plain_pytorch(
    zygote: Zygote,
    tmp_path: Path,
    launcher: Launcher,
    group: str,
    arguments: dict[str, Any],
    place: list[tuple[int, int]],
) -> None:
    p, d = max(stage for stage, _ in place) + 1, max(replica for _, replica in place) + 1
    wanted = {"group": group, "varuna": arguments, "place": place}
    launched = Ranks(
        zygote,
        tmp_path,
        TASK,
        p,
        d,
        script=SCRIPT,
        wanted=wanted,
        launched=lambda rank: launcher(rank, p * d),
    )
    with launched as world:
        outcome = world.finish()
    plain = train_plainly(TASK)
    assert outcome.losses == pytest.approx(plain.losses, rel=1e-5)
    assert outcome.norms == pytest.approx(plain.norms, rel=1e-4)
    torch.testing.assert_close(outcome.parameters, plain.parameters, rtol=1e-4, atol=2e-5)


def test_the_others_end_when_a_rank_is_killed_so_that_torchrun_starts_them_again(
    zygote: Zygote, tmp_path: Path
) -> None:
    wanted = {
        "group": "before",
        "varuna": {"stages": 2, "chunk_size": 2},
        "die": {"rank": 1, "step": 2},
        "forever": True,
    }
    launched = Ranks(zygote, tmp_path, TASK, 2, 1, script=SCRIPT, wanted=wanted, launched=lambda rank: by_hand(rank, 2))
    with launched as world:
        assert world.exit_codes() == [EXIT_PEER_LOST, -signal.SIGKILL], world.logs()


def test_ranks_that_were_given_other_sizes_are_told_which(zygote: Zygote, tmp_path: Path) -> None:
    wanted = {"group": "never", "varuna": {"stages": 2, "chunk_size": 2}, "differs": {"chunk_size": 4}}
    launched = Ranks(zygote, tmp_path, TASK, 2, 1, script=SCRIPT, wanted=wanted, launched=lambda rank: by_hand(rank, 2))
    with launched as world:
        assert world.exit_codes()[1] == 1, world.logs()
    assert "ValueError: chunk_size=4 here, but 2 on rank 0: give all ranks the same" in world.logs()
