"""On which VMs a generation runs: only their agents may report on it, until its workers there have stopped."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.models import WorkerRow
from varuna_manager.jobs.jobs import ALIVE


class Placements:
    """Looks each generation up once in a transaction, however many VMs report on it."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], frozenset[str]] = {}

    async def runs_on(self, session: AsyncSession, vm_id: str, job_id: str, generation: int) -> bool:
        """Whether a rank of the generation is on the VM, and has not stopped."""
        key = (job_id, generation)
        if key not in self._known:
            row = WorkerRow
            query = select(row.vm_id).where(row.job_id == job_id, row.generation == generation, row.state.in_(ALIVE))
            self._known[key] = frozenset((await session.scalars(query.distinct())).all())
        return vm_id in self._known[key]
