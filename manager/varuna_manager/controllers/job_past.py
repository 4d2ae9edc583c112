"""What the past says to the decisions: a job's ended generations, and the fleet's last minutes."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import quantiles

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from varuna_manager.db.models import GenerationRow, JobRow, VmRow
from varuna_manager.domain.fleet_history import HALF_LIFE_S, FleetHistory, VmLife
from varuna_manager.domain.fleet_history import look_back as look_back_on_vms
from varuna_manager.domain.fleet_past import FleetPast
from varuna_manager.domain.morphs import RECENT, Morphs, PastShape, look_back
from varuna_manager.domain.observed import Plan, VmView
from varuna_manager.domain.setbacks import PastGeneration, Setbacks, count_setbacks
from varuna_manager.domain.states import EndCause, GenerationKind, GenerationState, VmState

_JOINS_KEPT = 20
_LOSSES_KEPT = 200
_VMS_LOOKED_BACK = 5000
"""The newest, gone or not: what has become of them tells how long others will last."""


@dataclass(frozen=True, kw_only=True)
class _Known:
    of: tuple[int, int | None]
    """What it was read from."""
    setbacks: Setbacks
    morphs: Morphs


class JobPasts:
    """Read anew only when another generation has ended, or the job was retried."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def keep_only(self, job_ids: Collection[str]) -> None:
        self._known = {job_id: known for job_id, known in self._known.items() if job_id in job_ids}

    async def of(self, session: AsyncSession, job: JobRow, ended: int | None) -> tuple[Setbacks, Morphs]:
        """`ended`: how often something of its ended generations has changed; None: there are none."""
        if ended is None:
            return Setbacks(), Morphs()
        known, read_from = self._known.get(job.id), (ended, job.retried_after)
        if known is None or known.of != read_from:
            setbacks, morphs = await _setbacks(session, job), await _morphs(session, job.id)
            known = _Known(of=read_from, setbacks=setbacks, morphs=morphs)
            self._known[job.id] = known
        return known.setbacks, known.morphs


async def _setbacks(session: AsyncSession, job: JobRow) -> Setbacks:
    """Without the rows' documents: a job on spot VMs comes to have thousands of generations."""
    row = GenerationRow
    query = select(row.number, row.end_cause, row.end_reason, row.last_step, row.ended_at)
    query = query.where(row.job_id == job.id, row.state == GenerationState.ENDED.value).order_by(row.number)
    return count_setbacks(
        PastGeneration(
            cause=None if cause is None else EndCause(cause),
            reason=reason or "",
            last_step=last_step,
            ended_at=ended_at or 0.0,
            forgiven=number <= (job.retried_after or 0),
        )
        for number, cause, reason, last_step, ended_at in await session.execute(query)
    )


async def _morphs(session: AsyncSession, job_id: str) -> Morphs:
    row = GenerationRow
    query = select(row).options(defer(row.candidates), defer(row.history))
    query = query.where(
        row.job_id == job_id, row.state == GenerationState.ENDED.value, row.kind == GenerationKind.TRAINING.value
    )
    rows = (await session.scalars(query.order_by(row.number.desc()).limit(RECENT + 1))).all()
    before = {new.number: old for new, old in pairwise(rows)}
    return look_back([_past_shape(ended, before.get(ended.number)) for ended in rows[:RECENT]])


def _past_shape(row: GenerationRow, before: GenerationRow | None) -> PastShape:
    """`before`: the training generation before it."""
    ended_at = row.ended_at or row.created_at
    morph_s = None
    if row.resumed_step and row.seconds_without_progress is not None:  # one that starts at 0 waited for other things
        waited_s = 0.0 if before is None or before.ended_at is None else row.created_at - before.ended_at
        one_s = Plan.from_document(row.plan).predicted_minibatch_s
        morph_s = max(0.0, row.seconds_without_progress - waited_s - one_s)
    return PastShape(lifetime_s=ended_at - row.created_at, morph_s=morph_s, save_s=row.save_s)


async def fleet_history(session: AsyncSession, now: float) -> FleetHistory:
    """What the leader before, or this manager's former self, had seen of the fleet, from what it wrote down."""
    row = VmRow
    query = select(row.created_at, row.notice_deadline, row.history).order_by(row.created_at.desc())
    rows = await session.execute(query.limit(_VMS_LOOKED_BACK))
    return look_back_on_vms(
        (
            VmLife(
                created_at=created_at,
                states=[(entry["at"], VmState(entry["state"])) for entry in history],
                had_notice=notice_deadline is not None,
            )
            for created_at, notice_deadline, history in rows
        ),
        now,
    )


class FleetWatch:
    """Remembers, from look to look, which VMs were lost and how long new ones took to join; and what was so before this
    manager came, which `recall` tells it."""

    def __init__(self, now: float) -> None:
        self._stable_since = now
        self._losses: deque[float] = deque(maxlen=_LOSSES_KEPT)
        self._joins_s: deque[float] = deque(maxlen=_JOINS_KEPT)
        self._states: dict[str, VmState] = {}
        self._warms_s: deque[float] = deque(maxlen=_JOINS_KEPT)
        self._warming: dict[tuple[str, str], float] = {}
        """By VM and job, since when it does the imports of its workers."""
        self._looked_at = now
        self._removals = self._vm_hours = 0.0
        """Older ones fade: by half in `HALF_LIFE_S`."""

    def recall(self, history: FleetHistory) -> None:
        """Before the first look."""
        self._losses.extend(history.losses_at)
        self._joins_s.extend(history.joins_s)
        self._removals, self._vm_hours = history.removals, history.vm_hours
        if history.stable_since is not None:
            self._stable_since = history.stable_since

    def look(self, vms: Mapping[str, VmView], now: float, market_hazard: float | None = None) -> FleetPast:
        """`vms`: all that are not gone. `market_hazard`: see FleetPast."""
        elapsed_s, self._looked_at = max(0.0, now - self._looked_at), now
        fading = 0.5 ** (elapsed_s / HALF_LIFE_S)
        self._removals *= fading
        self._vm_hours *= fading
        states = {vm_id: vm.state for vm_id, vm in vms.items()}
        there = sum(state is VmState.READY or state is VmState.SUSPECT for state in self._states.values())
        self._vm_hours += there * elapsed_s / 3600
        for vm_id, before in self._states.items() if states != self._states else ():
            vm = vms.get(vm_id)
            if before in (VmState.READY, VmState.SUSPECT) and (vm is None or _is_lost(vm)):
                self._removals += 1
                self._losses.append(now)
                self._stable_since = now
            elif before is VmState.REQUESTED and vm is not None and vm.state is VmState.READY:
                self._joins_s.append(vm.age_s)
        self._states = states
        self._note_warmth(vms, now)
        coming = [vms[vm_id].age_s for vm_id, state in states.items() if state is VmState.REQUESTED]
        return FleetPast(
            losses_at=tuple(self._losses),
            stable_since=self._stable_since,
            join_s=_upper_quartile(self._joins_s),
            warm_s=_upper_quartile(self._warms_s),
            coming_ages_s=tuple(coming),
            removals=self._removals,
            vm_hours=self._vm_hours,
            market_hazard=market_hazard,
        )

    def _note_warmth(self, vms: Mapping[str, VmView], now: float) -> None:
        warming = {(vm.id, job_id): now for vm in vms.values() if vm.preparing for job_id in vm.preparing}
        for key, since in self._warming.items():
            vm_id, job_id = key
            if key in warming:
                warming[key] = since
            elif vm_id in vms and job_id in vms[vm_id].warm:
                self._warms_s.append(now - since)
        self._warming = warming


def _is_lost(vm: VmView) -> bool:
    """By the market, that is: one that a user drains is not."""
    return vm.state is VmState.LOST or (vm.state is VmState.DRAINING and vm.notice_deadline is not None)


def _upper_quartile(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return quantiles(values, n=4, method="inclusive")[2]
