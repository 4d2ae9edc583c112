"""What is stored with a generation's first step: where the time without progress before it went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import select

from stored_job import make_generation, store_job
from varuna_manager.db.models import GenerationRow, WorkerRow
from varuna_manager.jobs.progress import Progress
from varuna_manager.world.events import EventLog
from varuna_proto.v1 import agent_pb2 as pb

LOST_AT, LEFT_AT, CREATED_AT, STEPPED_AT = 1010.0, 1040.0, 1040.5, 1060.0


def worker(rank: int, stopped_at: float, **more: Any) -> WorkerRow:
    names = {"job_id": "j", "generation": 1, "vm_id": f"vm-{rank}", "local_rank": 0}
    return WorkerRow(rank=rank, stopped_at=stopped_at, state="exited", history=[], **names, **more)


async def test_survivors_that_end_their_shares_keep_no_planner_waiting(tmp_path: Path) -> None:
    """The generation has ended with its lost rank; another that held its state came after the next one had begun."""
    database = await store_job(tmp_path)
    running = [{"state": "running", "at": CREATED_AT + 0.5, "reason": ""}]
    async with database.write() as session:
        lost = {"created_at": 1.0, "last_step": 4, "last_step_at": 1000.0}
        session.add(make_generation(1, **lost, stop_requested_at=LOST_AT, ended_at=LOST_AT))
        session.add(make_generation(2, state="running", history=running, resumed_step=4, created_at=CREATED_AT))
        await session.flush()
        session.add_all([worker(0, LEFT_AT, held_step=4), worker(1, LOST_AT), worker(2, CREATED_AT + 9, held_step=4)])
    async with database.write() as session:
        steps = {5: pb.StepResult(step=5, loss=1.0, step_us=1, examples=8)}
        await Progress(EventLog(database)).record_steps(session, "j", 2, steps, STEPPED_AT)
    async with database.read() as session:
        documents = await session.scalar(select(GenerationRow.downtime).where(GenerationRow.number == 2))
    await database.close()
    assert {part["name"]: part["seconds"] for part in documents or ()} == {
        "notice": 10.0,
        "share": LEFT_AT - LOST_AT,
        "plan": CREATED_AT - LEFT_AT,
        "launch": 0.5,
        "step": STEPPED_AT - CREATED_AT - 0.5,
    }
