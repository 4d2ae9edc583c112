"""With a real run's recorded op times, the simulator predicts the time that the run took."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from repository import TRAINING_SCRIPTS
from schedules import check_schedule
from sleeping_script import BLOCKS as P
from sleeping_script import N
from small_gpt import Task
from training_world import Ranks, Zygote
from varuna.diagnostics.timeline import merge_ranks
from varuna_planner.cutting.pipeline import Pipeline
from varuna_planner.schedule.actions import Action, Schedule
from varuna_planner.schedule.policies import Op, Policy
from varuna_planner.simulator.simulation import MinibatchTimes, fixed_order, simulate

pytestmark = pytest.mark.slow


STEPS = 6
ERROR = 0.02
"""The simulator's largest error in the quietest of the steps. (Measured on a busy machine: 0.003.)"""
ROUNDING_US = 10.0


@dataclass(frozen=True)
class Recorded:
    """A step of a real run."""

    order: Schedule
    makespan_us: float
    course: MinibatchTimes


def record(trace: dict[str, Any]) -> Recorded:
    """Ops with their times, and when each message came after its sender's op: that ends a little after it has sent."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    ops = [
        sorted((e for e in events if e["pid"] == rank and e["cat"] == "ops"), key=lambda e: e["ts"])
        for rank in range(P)
    ]
    order = tuple(tuple(Action(Op[e["name"][0]], int(e["name"][1:])) for e in row) for row in ops)
    action_us, ends_us = np.zeros((3, P, N)), np.zeros((3, P, N))
    for rank, row in enumerate(ops):
        for (op, number), event in zip(order[rank], row, strict=True):
            action_us[op, rank, number] = event["dur"]
            ends_us[op, rank, number] = event["ts"] + event["dur"]
    delay_us = np.zeros((2, P, N))
    for event in events:
        kind, _, sender = event["cat"].partition(" from rank ")
        if sender:
            number, arrived_us = event["args"]["micro_batch"], event["ts"] + event["dur"]
            sent_us = ends_us[Op.F if kind == "activations" else Op.B, int(sender), number]
            delay_us[int(kind == "gradients"), event["pid"], number] = arrived_us - sent_us
    begun_us = min(row[0]["ts"] for row in ops)
    return Recorded(order, ends_us.max() - begun_us, MinibatchTimes(action_us=action_us, delay_us=delay_us))


def pipeline_of(course: MinibatchTimes, recompute: tuple[bool, ...]) -> Pipeline:
    usual = np.repeat(np.median(course.action_us, axis=2)[:, None], 2, axis=1)
    none = np.zeros((2, P))
    return Pipeline(
        micro_batches=N,
        forward_us=usual[0],
        recompute_us=usual[1],
        backward_us=usual[2],
        activation_transfer_us=none,
        gradient_transfer_us=none,
        latency_us=np.zeros(P),
        finish_us=np.zeros(P),
        recompute=np.array(recompute),
    )


def test_a_real_run_replayed_takes_what_it_took(zygote: Zygote, tmp_path: Path) -> None:
    traces, recompute = tmp_path / "traces", (True, True, False)
    steps = range(2, STEPS + 1)
    environ = {"VARUNA_TRACE_STEPS": ",".join(map(str, steps)), "VARUNA_TRACE_DIR": str(traces)}
    with Ranks(
        zygote,
        tmp_path,
        Task(global_batch=N),
        P,
        1,
        micro_batch=1,
        run_ahead=2,
        recompute=recompute,
        script=TRAINING_SCRIPTS / "sleeping_script.py",
        wanted={"forward_ms": 8, "backward_ms": 16, "steps": STEPS},
        environ=environ,
    ) as world:
        assert world.exit_codes() == [0] * P, world.logs()

    replayed, policies = [], []
    for step in steps:
        recorded = record(json.loads(json.dumps(merge_ranks(traces, step))))
        assert check_schedule(recorded.order) == N
        pipeline = pipeline_of(recorded.course, recompute)
        as_it_was = fixed_order(pipeline, recorded.order, jitter=recorded.course)
        # The engine's own time between ops is in no op, so the replay is never slower.
        assert as_it_was <= recorded.makespan_us + ROUNDING_US
        replayed.append(1 - as_it_was / recorded.makespan_us)
        chosen = simulate(pipeline, Policy.WORK_CONSERVING, run_ahead=2, jitter=recorded.course)
        policies.append(abs(1 - chosen.makespan_us / recorded.makespan_us))
    assert min(replayed) < ERROR, replayed
    assert min(policies) < ERROR, policies
