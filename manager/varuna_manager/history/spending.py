"""Where the time of a job went, and what it cost: computed on request from its generations."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from varuna_manager.answers.documents import format_time
from varuna_manager.db.engine import Database
from varuna_manager.db.models import JobRow
from varuna_manager.domain import accounting
from varuna_manager.domain.accounting import TimeOfJob
from varuna_manager.domain.states import GenerationKind
from varuna_manager.history.generation_times import (
    GenerationRecord,
    count_steps,
    make_generation_times,
    read_generation_records,
)
from varuna_manager.history.job_cost import read_job_bill
from varuna_manager.jobs.jobs import find_job_row
from varuna_planner.schedule.batching import micro_batches
from varuna_proto.plan import Plan
from varuna_proto.rest import JobCostDocument, JobTimeDocument, TimeCause

if TYPE_CHECKING:
    from varuna_planner.profile.document import Profile

MOST_VMS = 1000
"""The most VMs that a job's bill lists."""


class Spending:
    def __init__(self, database: Database, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._now = now

    async def read_time(self, id_or_name: str) -> JobTimeDocument:
        """Where the job's time went, from its submission to its end or now."""
        async with self._database.read() as session:
            job = await find_job_row(session, id_or_name)
            records = await read_generation_records(session, job.id)
        return await account_job_time(job, records, self._now())

    async def read_cost(self, id_or_name: str, most_vms: int = MOST_VMS) -> JobCostDocument:
        """VM-hours of the job and their cost, where prices are known, also for each of the most expensive VMs."""
        async with self._database.read() as session:
            job = await find_job_row(session, id_or_name)
            return await read_job_bill(session, job.id, self._now(), most_vms=most_vms)


async def account_job_time(job: JobRow, records: Sequence[GenerationRecord], now: float) -> JobTimeDocument:
    """Where the job's time went, from its submission to its end or now. `records`: all its generations."""
    bubbles = await asyncio.to_thread(_bubble_shares, job.profile_json, records, now)
    end = now if job.finished_at is None else job.finished_at
    times, pauses = make_generation_times(records, bubbles), accounting.list_pauses(job.history)
    return _make_time_document(accounting.account_time(job.created_at, end, times, pauses))


def _bubble_shares(profile_json: str | None, rows: Sequence[GenerationRecord], now: float) -> Mapping[int, float]:
    """By generation: the fraction of the time within steps in which the stages, on average, compute nothing. Runs in a
    thread.

    Compute times come from the profile, which heartbeats correct; step times come from the steps.
    """
    if profile_json is None:
        return {}
    from varuna_planner.profile.document import Profile

    profile = Profile.from_json(profile_json)
    shares = {}
    for row in rows:
        if row.kind != GenerationKind.TRAINING or row.started_at is None or count_steps(row) < 2:
            continue
        in_steps_s = row.last_step_at - row.started_at - sum((row.between_s or {}).values())
        step_us = in_steps_s / (count_steps(row) - 1) * 1e6
        plan = Plan.from_document(row.plan)
        if plan.p * plan.d == 1:
            continue  # one worker waits for nobody: if it is slower than its profile, the machine is
        if step_us > 0:
            shares[row.number] = min(max(1 - _predict_busy_us(profile, plan) / step_us, 0.0), 1.0)
    return shares


def _predict_busy_us(profile: Profile, plan: Plan) -> float:
    """What the ranks compute in a step, on average, each at the speed of its type of GPU."""
    from varuna_planner.profile.speed import select_gpu_type

    runs = micro_batches(plan.global_batch, plan.micro_batch, plan.d, plan.shares)
    types = plan.gpu_types or (profile.gpu_type,) * (plan.p * plan.d)
    counts = Counter[tuple[int, str]]()
    for rank, gpu_type in enumerate(types):
        counts[rank % plan.p, gpu_type] += len(runs[rank // plan.p])
    bounds = [*plan.stage_starts, len(profile.sections)]
    busy_us = 0.0
    for gpu_type in set(types):
        of_type = select_gpu_type(profile, gpu_type)
        predicted = of_type.measurements_at(plan.micro_batch)
        for stage, (first, stop) in enumerate(itertools.pairwise(bounds)):
            stage_us = 2 * of_type.stage_overhead_us
            for section in predicted[first:stop]:
                again_us = section.recompute_us if plan.recompute[stage] else 0.0
                stage_us += section.forward_us + section.backward_us + again_us
            busy_us += stage_us * counts[stage, gpu_type]
    # The last micro-batch may be smaller.
    examples = plan.global_batch / (plan.micro_batch * sum(map(len, runs)))
    return busy_us / (plan.p * plan.d) * examples


def _make_time_document(found: TimeOfJob) -> JobTimeDocument:
    total_s = found.total_s
    seconds: dict[TimeCause, tuple[float, str]] = {
        "training": (found.sum_seconds("training_s"), "the stages computed steps that counted"),
        "bubbles": (
            found.sum_seconds("bubbles_s"),
            "stages waited for each other, for messages and for sums of gradients",
        ),
        "data": (found.sum_between_steps("data"), "between steps, the script made its next batch"),
        "evaluation": (found.sum_between_steps("evaluation"), "between steps, the script evaluated"),
        "checkpoints": (found.sum_between_steps("checkpoints"), "training waited for its state to be copied or saved"),
        "script": (found.sum_between_steps("script"), "between steps, the script did something else"),
        "redone_steps": (found.sum_seconds("redone_s"), "steps were redone that no checkpoint had"),
        "morphs": (found.sum_seconds("morph_s"), "workers stopped, started and loaded state, up to each first step"),
        "waiting_for_vms": (
            found.waiting_s,
            "no generation ran: VMs were lacking, or a plan was being made",
        ),
        "calibration": (found.sum_seconds("calibration_s"), "the model's profile was measured"),
    }
    return {
        "start": format_time(found.start),
        "end": format_time(found.end),
        "total_s": total_s,
        "elapsed_s": found.elapsed_s,
        "useful_s": found.useful_s,
        "goodput": found.goodput,
        "causes": [
            {"cause": cause, "seconds": spent, "share": spent / total_s if total_s > 0 else 0.0, "text": text}
            for cause, (spent, text) in seconds.items()
        ],
        "generations": [
            {
                "generation": spent.number,
                "kind": spent.kind.value,
                "waiting_s": spent.waiting_s,
                "morph_s": spent.morph_s,
                "training_s": spent.training_s,
                "bubbles_s": spent.bubbles_s,
                "redone_s": spent.redone_s,
                "between_s": sum(spent.between_s.values()),
            }
            for spent in found.generations
        ],
    }
