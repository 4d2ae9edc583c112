"""The workers on VMs that have not stopped, as documents of VMs need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.models import JobRow, WorkerRow
from varuna_manager.jobs.jobs import ALIVE


class ListedWorker(NamedTuple):
    """The columns of a worker's row that its document needs, and its job's name."""

    job_id: str
    generation: int
    rank: int
    vm_id: str
    local_rank: int
    state: str
    pid: int | None
    cause: str | None
    exit_code: int | None
    error_text: str | None
    job_name: str


_WORKERS = (
    select(*(WorkerRow.__table__.c[name] for name in ListedWorker._fields[:-1]), JobRow.name)
    .join(JobRow, JobRow.id == WorkerRow.job_id)
    .where(WorkerRow.state.in_(ALIVE))
    .order_by(WorkerRow.job_id, WorkerRow.generation, WorkerRow.rank)
)
_BY_ID = 500
"""The workers of up to so many VMs are queried by VM; for more, all workers are."""


async def read_workers_on(session: AsyncSession, vm_ids: Sequence[str]) -> dict[str, list[ListedWorker]]:
    """The workers that have not stopped, by VM."""
    query = _WORKERS if len(vm_ids) > _BY_ID else _WORKERS.where(WorkerRow.vm_id.in_(vm_ids))
    by_vm: dict[str, list[ListedWorker]] = {}
    for worker in map(ListedWorker._make, await session.execute(query)):
        by_vm.setdefault(worker.vm_id, []).append(worker)
    return by_vm
