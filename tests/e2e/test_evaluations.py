"""A VM is lost in an evaluation, and the others go on with it in place, under a real manager and agents."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from repository import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from _recovery_trial import (
    ModelSize,
    RecoveryWay,
    TrialOptions,
    kill_all,
    list_vm_processes,
    make_job,
    start_manager,
    wait_for,
)

from varuna_client.demo.processes import DemoProcesses

pytestmark = pytest.mark.xdist_group("e2e")

SIZE = ModelSize(name="evaluating", width=64, layers=24, global_batch=32, micro_batch=4, example_ms=1.0)
"""An evaluation takes some tenths of a second."""
OPTIONS = TrialOptions.undisturbed(2, 2)
LOST_AFTER = 3
"""Steps. The loss comes in the evaluation after the first one."""


@pytest.mark.slow
@pytest.mark.parametrize("changes_cuts", [False, True], ids=["same stages", "other stages"])
def test_the_others_go_on_with_the_evaluation(changes_cuts: bool, tmp_path: Path) -> None:
    record, evaluations = tmp_path / "record", tmp_path / "evaluations"
    way = RecoveryWay(name="evaluating", flags=f"--evaluations {evaluations}", changes_cuts=changes_cuts)
    memory = SIZE.state_bytes if changes_cuts else None
    flags = ["--grpc-port", "0"]

    def list_losses() -> dict[str, list[tuple[int, float]]]:
        """By process: the step before each evaluation, and its loss."""
        found = defaultdict(list)
        for process, step, loss in map(str.split, evaluations.read_text().splitlines() if evaluations.exists() else ()):
            found[process].append((int(step), float(loss)))
        return dict(found)

    def count_at(step: int) -> list[int]:
        return [sum(at == step for at, _ in losses) for losses in list_losses().values()]

    with (
        DemoProcesses(tmp_path) as processes,
        start_manager(processes, tmp_path, SIZE, OPTIONS, flags, device_memory_bytes=memory) as client,
    ):
        job = client.submit(make_job(SIZE, OPTIONS, way, record))["id"]
        wait_for(lambda: sum(map(bool, count_at(LOST_AFTER))) == OPTIONS.vms, "an evaluation", poll_s=0.005)
        time.sleep(0.05)
        (before,) = [one for one in client.generations(job) if one["kind"] == "training"]
        client.set_local_capacity(OPTIONS.vms - 1)  # another VM in its place would make a new shape better
        kill_all(list_vm_processes(client, before["placement"][OPTIONS.vms - 1]["vm_id"]))
        wait_for(lambda: any(count_at(LOST_AFTER + 1)), "the evaluation after the next step")
        after = client.generations(job)[-1]
        assert not client.events(job, kind=["reshape_not_possible"])
    assert (before["p"], before["d"]) == (2, 2)
    assert (after["p"], after["d"]) == ((3, 1) if changes_cuts else (2, 1))
    assert (after["kind_of_morph"], after["resumed_step"], after["steps_redone"]) == ("reshape", LOST_AFTER, 0)
    assert after["state_from"]["store"] == 0
    whole = [losses for losses in list_losses().values() if (LOST_AFTER + 1) in dict(losses)]
    assert len(whole) >= 2
    counts = [[sum(at == step for at, _ in losses) for step in range(1, LOST_AFTER + 1)] for losses in whole]
    assert counts == [[4] * LOST_AFTER] * len(whole), "each evaluation once"
    assert len({tuple(losses[: 4 * LOST_AFTER]) for losses in whole}) == 1, "with the same loss on all ranks"
