"""A store with one job, `j`, and generations for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from migrated_stores import migrated
from rest_world import SPEC
from varuna_manager.db.engine import Database
from varuna_manager.db.models import GenerationRow, JobRow
from varuna_manager.domain.spec import JobSpec
from varuna_proto.plan import Plan

STEP_S = 180.0
"""What a step should take."""
_PLAN = Plan(p=1, d=2, micro_batch=2, global_batch=8, predicted_minibatch_s=STEP_S, examples_per_s=8 / STEP_S)


async def store_job(folder: Path) -> Database:
    migrated(folder / "manager.db")
    database = Database(f"sqlite:///{folder / 'manager.db'}")
    spec = JobSpec(**{**SPEC, "name": "j"}).model_dump()
    async with database.write() as session:
        session.add(JobRow(id="j", name="j", state="running", spec=spec, history=[], created_at=1.0))
    return database


def make_generation(number: int, **changes: Any) -> GenerationRow:
    """A training generation of the job, in place, that has ended."""
    values = {
        "job_id": "j",
        "number": number,
        "kind": "training",
        "state": "ended",
        "history": [],
        "plan": _PLAN.to_document(),
        "candidates": [],
        "rendezvous_host": "h",
        "rendezvous_port": 1,
        "reason": "test",
        "in_place": True,
        **changes,
    }
    return GenerationRow(**values)
