"""A store full of what a dashboard shows: a large fleet, and a job that morphed over millions of steps.

The tests, the benchmark and the documentation's pictures show it through the real REST services.
"""

from __future__ import annotations

import math
import time
from typing import Any

from sqlalchemy import insert, text

from rest_world import RestWorld, generation, vm, worker
from schedules import make_schedule, make_timeline
from varuna_manager.db.changes import name_changes
from varuna_manager.db.models import CheckpointRow, EventRow, JobRow, MetricRow, TraceRow, VmRow
from varuna_manager.history.step_metrics import roll_up
from varuna_planner.schedule.policies import Policy
from varuna_proto.plan import Plan

JOB = "gpt2b000"
HOUR = 3600.0
SHAPES = ((4, 2), (4, 3), (4, 2), (3, 2), (6, 2))
"""P×D of its training generations, oldest first."""
IN_PLACE = 2
"""The one of them that goes on in place."""
GLOBAL_BATCH = 96
CANDIDATES = [  # their step times are in those of 12 GPUs
    (6, 2, 4, 0.97, True, "the fastest of 23 shapes"),
    (4, 3, 4, 1.015, True, "4.6 % slower: its all-reduce is over 3 replicas"),
    (3, 4, 2, 1.173, True, "at least 20.9 % slower, by the lower bound; not simulated"),
    (2, 6, 2, None, False, "stage 0 needs 17.2 GiB of 15.8 GiB"),
    (1, 12, 1, None, False, "stage 0 needs 33.9 GiB of 15.8 GiB"),
]


async def fill_fleet(world: RestWorld, vms: int) -> None:
    """VMs in all states over the last hour, with what happened to them."""
    now = time.time()
    rows, events = [], []
    for i in range(vms):
        state = {13: "suspect", 37: "draining", 71: "requested", 113: "lost"}.get(i % 127, "ready")
        born = now - HOUR + (i % 600) * 4.5
        changes: dict[str, Any] = {"price_per_hour": 0.62, "device_memory_bytes": 16 << 30}
        if state == "ready" and i % 499 == 7:
            changes |= {
                "slow_ratio": 1.32,
                "slow_reason": "stage 1: 41.2 ms per micro-batch, its 3 peers 31.2 ms (median), for 30 s",
                "quarantined_until": now + 540,
                "quarantines": 1,
            }
            events.append(
                _event(now - 900 + i % 700, "vm_quarantined", "32 % slower than its peers", vm_id=f"vm-{i:05}")
            )
        if state == "draining":
            changes |= {"notice_deadline": now + 25, "reason": "preemption notice"}
            events.append(_event(now - 1500 + i % 1400, "preemption_notice", "30 s", vm_id=f"vm-{i:05}"))
        if state == "lost":
            events.append(_event(now - 1800 + i % 1700, "vm_lost", "silent for 10.2 s", vm_id=f"vm-{i:05}"))
        row = vm(f"vm-{i:05}", born, state, host=f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}", **changes)
        rows.append({c.key: getattr(row, c.key) for c in VmRow.__table__.columns if getattr(row, c.key) is not None})
        events.append(_event(born, "vm_requested", "the fleet wants it", vm_id=f"vm-{i:05}"))
    keys = {key for row in rows for key in row}
    async with world.database.write() as session:
        await session.execute(
            insert(VmRow),
            [{**dict.fromkeys(keys), "quarantines": 0, "hangs": 0, "version": 1, **row} for row in rows],
            execution_options=name_changes(),
        )
        await session.execute(insert(EventRow), sorted(events, key=lambda event: event["at"]))


async def fill_job(world: RestWorld, steps: int) -> None:
    """A running job with that many steps in the last hours, one generation for each of SHAPES and a calibration."""
    now = time.time()
    step_s = min(0.4, 20 * HOUR / steps)
    begin = now - steps * step_s - 300
    spec = {"name": "gpt-2b", "workdir": "/srv/gpt", "run": "python train.py", "global_batch": GLOBAL_BATCH}
    await world.add(
        JobRow(
            id=JOB,
            name="gpt-2b",
            active_name="gpt-2b",
            state="running",
            history=[],
            spec=spec,
            created_at=begin - 90,
            started_at=begin - 80,
            reason="6×2 on 12 GPUs is predicted to be twice as fast as 3×2 on 6",
        )
    )
    await world.add(
        generation(
            JOB, 1, begin - 80, kind="calibration", ended_at=begin - 20, end_cause="profiled",
            end_reason="the profile was measured",
        )
    )  # fmt: skip
    share = steps // len(SHAPES)
    for i, (p, d) in enumerate(SHAPES):
        first, last = i * share, (i + 1) * share if i + 1 < len(SHAPES) else steps
        at = begin + first * step_s + i * 40
        ends = i + 1 < len(SHAPES)
        await world.add(
            generation(
                JOB, i + 2, at, state="ended" if ends else "running", plan=_plan(p, d, step_s).to_document(),
                candidates=[_candidate(step_s, *one) for one in CANDIDATES], started_at=at + 9, resumed_step=first,
                last_step=last, last_loss=2.1 + 8.9 / (1 + 12 * last / steps),
                last_step_at=at + (last - first) * step_s, seconds_without_progress=8.7,
                steps_redone=0 if i == IN_PLACE else 3 * i, ended_at=at + (last - first) * step_s + 2 if ends else None,
                end_cause="vm_lost" if ends else None, end_reason="vm-00113 was lost" if ends else None,
                reason=f"{p}×{d} on {p * d} GPUs: the fastest of 23 shapes", in_place=i == IN_PLACE,
                micro_batches_redone=8 if i == IN_PLACE else None,
            ),
            CheckpointRow(
                job_id=JOB, generation=i + 2, step=last, url=f"abfs://ckpt/gpt-2b/varuna_ckpt_{last}",
                total_bytes=24_800_000_000 + i, at=at + (last - first) * step_s,
            ),
        )  # fmt: skip
        await world.emit_event(
            "job_morphed", f"{p}×{d}: the fastest of 23 shapes", job_id=JOB, generation=i + 2, data={}
        )
    p, d = SHAPES[-1]
    newest = len(SHAPES) + 1
    await world.add(*(worker(JOB, newest, rank, f"vm-{rank + 1:05}", "running") for rank in range(p * d)))
    await _fill_steps(world, steps, share, begin, step_s)
    await world.add(*_traces(newest, steps // 100 * 100, p, 16))


async def _fill_steps(world: RestWorld, steps: int, share: int, begin: float, step_s: float) -> None:
    """In SQL: a million rows in seconds. The step time is that of the generation's GPUs, with some noise."""
    speeds = " ".join(f"WHEN {i} THEN {12 / (p * d)}" for i, (p, d) in enumerate(SHAPES))
    epoch = f"min((n - 1) / {share}, {len(SHAPES) - 1})"
    statement = f"""
        INSERT INTO {MetricRow.__tablename__} (job_id, step, loss, step_s, examples, generation, at)
        WITH RECURSIVE steps(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM steps WHERE n < {steps})
        SELECT '{JOB}', n,
            2.1 + 8.9 / (1.0 + 12.0 * n / {steps}) + 0.002 * ((n * 7919) % 101 - 50) / (1 + 4.0 * n / {steps}),
            {step_s} * (CASE {epoch} {speeds} END) * (1 + 0.0006 * ((n * 104729) % 97 - 48)),
            {GLOBAL_BATCH}, 2 + {epoch}, {begin} + n * {step_s} + 40 * {epoch}
        FROM steps"""
    async with world.database.write() as session:
        await session.execute(text(statement))
        await roll_up(session, JOB, 1, steps)


def _plan(p: int, d: int, step_s: float) -> Plan:
    return Plan(
        p=p, d=d, micro_batch=4, global_batch=GLOBAL_BATCH, stage_starts=tuple(range(0, 24, math.ceil(24 / p)))[:p],
        recompute=(True,) * (p - 1) + (False,), memory_bytes=(13 << 30,) * p,
        predicted_minibatch_s=step_s * 12 / (p * d) * 0.97, examples_per_s=GLOBAL_BATCH / step_s,
    )  # fmt: skip


def _candidate(
    step_s: float, p: int, d: int, micro_batch: int, predicted: float | None, fits: bool, reason: str
) -> dict[str, Any]:
    return {
        "p": p,
        "d": d,
        "micro_batch": micro_batch,
        "predicted_minibatch_s": predicted and predicted * step_s,
        "fits": fits,
        "reason": reason,
    }


def _traces(number: int, step: int, p: int, micro_batches: int) -> list[TraceRow]:
    tick_us = 7000.0
    rows = []
    for rank, spans in enumerate(make_timeline(make_schedule(Policy.WORK_CONSERVING, p, micro_batches))):
        ops = [
            [s.action.op.name, s.action.micro_batch, s.start * tick_us + 90.0 * rank, (s.end - s.start) * tick_us - 120]
            for s in spans
        ]
        sums = [["gradients", ops[-1][2] + ops[-1][3], 2.2 * tick_us]]
        rows.append(
            TraceRow(
                job_id=JOB,
                generation=number,
                rank=rank,
                step=step,
                at=time.time() - 20,
                begin_us=0.0,
                spans={"ops": ops, "all_reduce": sums},
            )
        )
    return rows


def _event(at: float, kind: str, message: str, **about: Any) -> dict[str, Any]:
    return {
        "at": at,
        "kind": kind,
        "message": message,
        "job_id": None,
        "generation": None,
        "vm_id": None,
        "data": {},
        **about,
    }
