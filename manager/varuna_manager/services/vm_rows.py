"""All VMs that are not gone, from the store, as often as a look needs them: only what has changed is read again.

Every change of a VM's row raises its version (`db.models.VmRow`), whoever made it and in whatever process: rows whose
version is known are as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from varuna_manager.db.models import VmRow
from varuna_manager.domain.states import VmState

_STATES = {state.value: state for state in VmState}
_AT_ONCE = 500
"""Ids in one query."""


class VmFacts(NamedTuple):
    """The columns of a VmRow that looks at all VMs need: not its history."""

    id: str
    version: int
    state: str
    gpus: int
    device_memory_bytes: int | None
    created_at: float
    reason: str | None
    notice_deadline: float | None
    drain_deadline: float | None
    slow_ratio: float | None
    slow_reason: str | None
    quarantined_until: float | None
    quarantines: int
    hangs: int
    deaths: int
    last_death_at: float | None
    cordoned_at: float | None
    request: str | None
    price_per_hour: float | None
    gpu_type: str | None = None

    @property
    def vm_state(self) -> VmState:
        return _STATES[self.state]


# The queries are made once: making one, and the key that finds its compiled form, takes as long as a small answer.
# By the states that there are, and not by "not gone": so the stores pass over the gone ones, of which there are many.
NOT_GONE = VmRow.state.in_([state.value for state in VmState if state is not VmState.GONE])
_VERSIONS = select(VmRow.id, VmRow.version).where(NOT_GONE)
_FACTS = select(*(VmRow.__table__.c[name] for name in VmFacts._fields)).where(NOT_GONE)


class VmRows:
    """Remembers what it has read. For one reader at a time."""

    def __init__(self) -> None:
        self._known: dict[str, VmFacts] = {}

    async def read(self, session: AsyncSession) -> Mapping[str, VmFacts]:
        """By id."""
        versions: dict[str, int] = dict((await session.execute(_VERSIONS)).all())
        known = self._known
        changed = [
            vm_id for vm_id, version in versions.items() if vm_id not in known or known[vm_id].version != version
        ]
        if changed or len(versions) != len(known):
            found = {facts.id: facts for facts in await _read(session, changed)}
            # One that went between the queries is in the first only: it is left out.
            gone = set(changed) - found.keys()
            self._known = {vm_id: found.get(vm_id) or known[vm_id] for vm_id in versions if vm_id not in gone}
        return self._known


async def _read(session: AsyncSession, vm_ids: Sequence[str]) -> Iterable[VmFacts]:
    found: list[VmFacts] = []
    for first in range(0, len(vm_ids), _AT_ONCE):
        query = _FACTS.where(VmRow.id.in_(vm_ids[first : first + _AT_ONCE]))
        found += map(VmFacts._make, (await session.execute(query)).all())
    return found
