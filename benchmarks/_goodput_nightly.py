"""The scenario of Ray Train's nightly preemption test: 1,600 steps, checkpoints every 400, four preemptions.

Theirs has eight workers with a whole model each, on instances that get half a minute of notice and are replaced
(ray-project/ray#65047). Here four VMs have a whole model each. VMs go at the steps at which theirs got notice in the
arm that saves on notice.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from _goodput_player import kill_vm, list_training, run_manager
from _recovery_figures import median_step_s, parse_record
from _recovery_trial import ModelSize, make_command, wait_for

from varuna_client import Client
from varuna_planner.schedule.batching import count_micro_batches
from varuna_proto.rest import GenerationDocument, JobSpecDocument

__all__ = ["PUBLISHED", "WAYS", "NightlyFigures", "count_wasted_steps", "play_nightly"]

STEPS: Final = 1600
CHECKPOINT_EVERY: Final = 400
PREEMPTED_AT: Final = (695, 866, 1395, 1547)
"""Steps; theirs resumed at 696, 867, 1396 and 1548."""
PUBLISHED: Final = {"Ray Train": 517, "Ray Train, saves on notice": 91}
"""Steps wasted, of the run that is shown there."""
_SIZE: Final = ModelSize(name="nightly", width=128, layers=4, global_batch=16, micro_batch=2, example_ms=0.75)
_VMS: Final = 4
_LOSSES: Final = ("vm_lost", "worker_failed")
"""Ends of generations after which work is run again."""
_POLL_S = 0.01
_TAIL_BYTES = 400
"""Some lines of the record."""


@dataclass(frozen=True, kw_only=True)
class NightlyWay:
    notice_s: float = 0.0
    """0: VMs are killed without notice."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of the job."""


WAYS: Final = {
    "killed": NightlyWay(),
    "notice": NightlyWay(notice_s=5.0),
    "restart": NightlyWay(environment={"VARUNA_IN_PLACE": "0"}),
}
"""`restart` goes back to the checkpoint after each loss, as Ray Train does."""


@dataclass(frozen=True, kw_only=True)
class NightlyFigures:
    way: str
    steps_wasted: float
    steps_redone: int
    micro_batches_redone: int
    """Those of steps under way, of the generations that know it."""
    seconds_without_progress: float
    """Of all morphs: losses, and the growth into each VM that comes in the place of a lost one."""
    step_s: float
    morphs: tuple[str, ...]
    """The shape that each led to, and how."""


def play_nightly(name: str) -> NightlyFigures:
    """Trains all steps in one of the ways."""
    way = WAYS[name]
    with run_manager(_SIZE, _VMS, None) as (client, folder):
        client.set_local_capacity(_VMS)
        record = folder / "record"
        job = client.submit(_make_job(folder, record, way))["id"]
        for step in PREEMPTED_AT:
            wait_for(partial(_has_made, record, step), f"step {step}", poll_s=_POLL_S)
            _preempt_vm(client, list_training(client, job)[-1], way)
        wait_for(lambda: list_training(client, job) and client.job(job)["state"] == "succeeded", "the last step")
        generations = list_training(client, job)
        step_s = median_step_s([line for line in parse_record(record.read_text()) if line.step < PREEMPTED_AT[0]])
    return summarize(name, generations, step_s)


def _make_job(folder: Path, record: Path, way: NightlyWay) -> JobSpecDocument:
    return {
        "name": "nightly",
        "workdir": str(folder),
        "run": f"{make_command(_SIZE, record)} --steps {STEPS} --checkpoint-every {CHECKPOINT_EVERY}",
        "global_batch": _SIZE.global_batch,
        "plan": {"p": 1, "micro_batch": _SIZE.micro_batch},
        "checkpoint": {"interval_s": 1e9},
        "env": dict(way.environment),
    }


def _has_made(record: Path, step: int) -> bool:
    if not record.exists():
        return False
    with record.open("rb") as file:
        file.seek(max(0, record.stat().st_size - _TAIL_BYTES))
        lines = file.read().splitlines()[1:-1]  # the first and the last may not be whole
    return any(int(line.split()[1]) >= step for line in lines)


def _preempt_vm(client: Client, generation: GenerationDocument, way: NightlyWay) -> None:
    """The VM of the last rank."""
    vm_id = max(generation["placement"], key=lambda place: place["rank"])["vm_id"]
    if way.notice_s:
        client.preempt(vm_id, notice_s=way.notice_s)
    else:
        kill_vm(client, vm_id)


def summarize(name: str, generations: Sequence[GenerationDocument], step_s: float) -> NightlyFigures:
    """`generations`: all that trained."""
    later = generations[1:]
    return NightlyFigures(
        way=name,
        steps_wasted=count_wasted_steps(generations, count_micro_batches(_SIZE.global_batch, _SIZE.micro_batch)),
        steps_redone=sum(one["steps_redone"] or 0 for one in later),
        micro_batches_redone=sum(one["micro_batches_redone"] or 0 for one in later),
        seconds_without_progress=sum(one["seconds_without_progress"] or 0.0 for one in later),
        step_s=step_s,
        morphs=tuple(f"{one['p']}×{one['d']} by {one['kind_of_morph']}: {one['reason']}" for one in later),
    )


def count_wasted_steps(generations: Sequence[GenerationDocument], micro_batches: int) -> float:
    """Committed steps that were done again, and what micro-batches that were run again come to in steps.

    Where a loss leaves it open what of the step under way is run again, all of it counts. `micro_batches`: of a step.
    """
    wasted = 0.0
    for before, after in itertools.pairwise(generations):
        redone = after["micro_batches_redone"]
        if redone is None:
            redone = micro_batches if before["end_cause"] in _LOSSES else 0
        wasted += (after["steps_redone"] or 0) + redone / micro_batches
    return wasted
