"""Where the time of a job went, and what it cost: worked out when asked, from its generations."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import Row, select

from varuna_manager.db.engine import Database
from varuna_manager.db.models import GenerationRow
from varuna_manager.domain import accounting
from varuna_manager.domain.accounting import Account, Past
from varuna_manager.domain.states import GenerationKind
from varuna_manager.services.documents import Document, iso
from varuna_manager.services.job_bills import job_bill
from varuna_manager.services.jobs import find

MOST_VMS = 1000
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
        before = itertools.accumulate((row.last_step or 0 for row in rows), max, initial=0)
        past = [_past(row, bubbles.get(row.number, 0.0), best) for row, best in zip(rows, before, strict=False)]
        end = now if job.finished_at is None else job.finished_at
        return _time_document(accounting.account(job.created_at, end, past))

    async def cost(self, id_or_name: str, most_vms: int = MOST_VMS) -> Document:
        """VM-hours of the job, and their price where it is known; of the dearest VMs also by VM."""
        async with self._database.read() as session:
            job = await find(session, id_or_name)
            bill = await job_bill(session, job.id, self._now(), most_vms=most_vms)
        return {
            "vm_hours": bill.hours,
            "gpu_hours": bill.gpu_hours,
            "cost": bill.cost,
            "cost_per_hour": bill.cost_per_hour,
            "vms_without_price": bill.vms_without_price,
            "by_vm": [
                {
                    "vm_id": vm.vm_id,
                    "hours": vm.hours,
                    "gpu_hours": vm.gpu_hours,
                    "price_per_hour": vm.price_per_hour,
                    "cost": vm.cost,
                }
                for vm in bill.by_vm
            ],
        }


def _past(row: _Generation, bubble_share: float, best_before: int) -> Past:
    """`best_before`: the newest step that an earlier generation completed."""
    return Past(
        number=row.number,
        kind=GenerationKind(row.kind),
        created_at=row.created_at,
        first_step_at=row.started_at,
        last_step_at=row.last_step_at,
        ended_at=row.ended_at,
        steps=_steps(row),
        redone=max(min(row.last_step or 0, best_before) - (row.resumed_step or 0), 0),
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
