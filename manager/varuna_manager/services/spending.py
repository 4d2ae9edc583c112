"""Where the time of a job went, and what it cost: worked out when asked, from its generations."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import Row, func, select

from varuna_manager.db.engine import Database
from varuna_manager.db.models import GenerationRow, VmRow, WorkerRow
from varuna_manager.domain import accounting
from varuna_manager.domain.accounting import Account, Past
from varuna_manager.domain.states import GenerationKind
from varuna_manager.services.documents import Document, iso
from varuna_manager.services.jobs import find

_MOST_VMS = 1000
"""Of a job's bill."""
_COLUMNS = [
    GenerationRow.number,
    GenerationRow.kind,
    GenerationRow.plan,
    GenerationRow.created_at,
    GenerationRow.started_at,
    GenerationRow.last_step_at,
    GenerationRow.ended_at,
    GenerationRow.resumed_step,
    GenerationRow.last_step,
    GenerationRow.steps_redone,
]
_Generation = Row[*tuple[Any, ...]]


class Spending:
    def __init__(self, database: Database, now: Callable[[], float] = time.time) -> None:
        self._database = database
        self._now = now

    async def time(self, id_or_name: str) -> Document:
        """Where the job's time went, from its submission to its end or now."""
        async with self._database.read() as session:
            job = await find(session, id_or_name)
            query = select(*_COLUMNS).where(GenerationRow.job_id == job.id).order_by(GenerationRow.number)
            rows = (await session.execute(query)).all()
        now = self._now()
        bubbles = await asyncio.to_thread(_bubble_shares, job.profile_json, rows, now)
        past = [_past(row, bubbles.get(row.number, 0.0)) for row in rows]
        end = now if job.finished_at is None else job.finished_at
        return _time_document(accounting.account(job.created_at, end, past))

    async def cost(self, id_or_name: str) -> Document:
        """VM-hours of the job, and their price where it is known."""
        now = self._now()
        async with self._database.read() as session:
            job = await find(session, id_or_name)
            counted = (
                select(WorkerRow.vm_id, WorkerRow.generation, func.count().label("gpus"))
                .where(WorkerRow.job_id == job.id)
                .group_by(WorkerRow.vm_id, WorkerRow.generation)
                .subquery()
            )
            rows = await session.execute(
                select(
                    counted.c.vm_id,
                    counted.c.gpus,
                    GenerationRow.created_at,
                    GenerationRow.ended_at,
                    VmRow.gpus.label("vm_gpus"),
                    VmRow.price_per_hour,
                )
                .join(
                    GenerationRow,
                    (GenerationRow.job_id == job.id) & (GenerationRow.number == counted.c.generation),
                )
                .join(VmRow, VmRow.id == counted.c.vm_id)
            )
            found = [(_use(row, now), row.ended_at is None) for row in rows]
        bills = accounting.bills(use for use, _ in found)
        whole = accounting.total(bills)
        rates = [
            use.price_per_hour * use.gpus / max(use.vm_gpus, 1)
            for use, lasts in found
            if lasts and use.price_per_hour is not None
        ]
        return {
            "vm_hours": whole.hours,
            "gpu_hours": whole.gpu_hours,
            "cost": whole.cost,
            "cost_per_hour": None if whole.cost is None else sum(rates),
            "vms_without_price": sum(bill.price_per_hour is None for bill in bills),
            "by_vm": [
                {
                    "vm_id": bill.vm_id,
                    "hours": bill.hours,
                    "gpu_hours": bill.gpu_hours,
                    "price_per_hour": bill.price_per_hour,
                    "cost": bill.cost,
                }
                for bill in bills[:_MOST_VMS]
            ],
        }


def _use(row: _Generation, now: float) -> accounting.Use:
    return accounting.Use(
        vm_id=row.vm_id,
        seconds=max((now if row.ended_at is None else row.ended_at) - row.created_at, 0.0),
        gpus=row.gpus,
        vm_gpus=row.vm_gpus,
        price_per_hour=row.price_per_hour,
    )


def _past(row: _Generation, bubble_share: float) -> Past:
    return Past(
        number=row.number,
        kind=GenerationKind(row.kind),
        created_at=row.created_at,
        first_step_at=row.started_at,
        last_step_at=row.last_step_at,
        ended_at=row.ended_at,
        steps=_steps(row),
        redone=row.steps_redone or 0,
        bubble_share=bubble_share,
    )


def _steps(row: _Generation) -> int:
    return 0 if row.last_step is None else int(row.last_step - (row.resumed_step or 0))


def _bubble_shares(profile_json: str | None, rows: Sequence[_Generation], now: float) -> Mapping[int, float]:
    """By generation: the part of a step in which the stages, on the average, compute nothing. In a thread.

    What they compute is known from the profile, which the heartbeats keep true; what a step takes, from the steps.
    """
    if profile_json is None:
        return {}
    from varuna_planner.profile import Profile

    profile = Profile.from_json(profile_json)
    shares = {}
    for row in rows:
        if row.kind != GenerationKind.TRAINING or row.started_at is None or _steps(row) < 2:
            continue
        step_us = (row.last_step_at - row.started_at) / (_steps(row) - 1) * 1e6
        plan = row.plan
        predicted = profile.at(plan["micro_batch"])
        bounds = [*plan["stage_starts"], len(predicted)]
        busy_us = 2 * profile.stage_overhead_us * plan["p"]
        for (first, stop), recomputes in zip(itertools.pairwise(bounds), plan["recompute"], strict=True):
            for section in predicted[first:stop]:
                busy_us += section.forward_us + section.backward_us + (section.recompute_us if recomputes else 0.0)
        micro_batches = plan["global_batch"] / (plan["d"] * plan["micro_batch"])
        if step_us > 0:
            shares[row.number] = min(max(1 - busy_us / plan["p"] * micro_batches / step_us, 0.0), 1.0)
    return shares


def _time_document(found: Account) -> Document:
    total_s = found.end - found.start
    seconds = {
        "training": (found.total("training_s"), "the stages computed steps that counted"),
        "bubbles": (found.total("bubbles_s"), "stages waited for each other, for messages and for sums of gradients"),
        "redone_steps": (found.total("redone_s"), "steps were done again that no checkpoint held"),
        "morphs": (found.total("morph_s"), "workers stopped, started and loaded state, up to each first step"),
        "waiting_for_vms": (found.waiting_s, "there were no VMs to run on"),
        "calibration": (found.total("calibration_s"), "the model's profile was measured"),
    }
    useful_s = seconds["training"][0]
    return {
        "start": iso(found.start),
        "end": iso(found.end),
        "total_s": total_s,
        "useful_s": useful_s,
        "goodput": useful_s / total_s if total_s > 0 else 0.0,
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
            }
            for spent in found.generations
        ],
    }
