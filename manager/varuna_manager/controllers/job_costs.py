"""The costs so far of jobs with a cost limit, without a sum over their whole past at each look."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.history.job_cost import read_job_bill
from varuna_manager.world.facts import JobFacts


@dataclass(frozen=True, kw_only=True)
class _KnownCost:
    of: tuple[Any, ...]
    at: float
    cost: float
    """Then."""
    per_s: float
    """Of the generation that has not ended."""


class JobCosts:
    """Reads a job's generations again only when one of them has begun or ended, or a price of its VMs has changed."""

    def __init__(self) -> None:
        self._known: dict[str, _KnownCost] = {}

    def keep_only(self, job_ids: Collection[str]) -> None:
        self._known = {job_id: known for job_id, known in self._known.items() if job_id in job_ids}

    async def read_cost(self, session: AsyncSession, job: JobFacts, depends_on: tuple[Any, ...], now: float) -> float:
        """Since the job's submission or its last retry. `depends_on`: changes whenever one of its generations begins or
        ends, and whenever a price of its VMs changes."""
        read_from = (depends_on, job.retried_after)
        known = self._known.get(job.id)
        if known is None or known.of != read_from:
            bill = await read_job_bill(session, job.id, now, after=job.retried_after or 0)
            known = _KnownCost(
                of=read_from, at=now, cost=bill["cost"] or 0.0, per_s=(bill["cost_per_hour"] or 0.0) / 3600.0
            )
            self._known[job.id] = known
        return known.cost + max(now - known.at, 0.0) * known.per_s
