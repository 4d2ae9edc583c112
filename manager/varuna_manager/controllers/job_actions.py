"""Writes the decisions about a job, each with its event, in the transaction of the decision."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm.exc import StaleDataError

from varuna_manager.db.models import GenerationRow, JobRow, VmRow, WorkerRow
from varuna_manager.domain.actions import (
    Action,
    EndGeneration,
    FinishJob,
    LiftQuarantine,
    QuarantineVms,
    RaiseMargin,
    RecordDeath,
    RecordHang,
    RequestStacks,
    RequeueJob,
    StartGeneration,
    StopGeneration,
)
from varuna_manager.domain.causes import extract_last_line
from varuna_manager.domain.keepers import Copies, CopiesChoice, CopiesFacts, VmPlace, choose_copies
from varuna_manager.domain.spec import read_spec
from varuna_manager.domain.states import GenerationKind, GenerationState, JobState, StopMode, VmState, WorkerState
from varuna_manager.jobs.checkpoints import newest_committed
from varuna_manager.jobs.stacks import StackService
from varuna_manager.world.events import EventLog
from varuna_manager.world.vm_registry import VmRegistry
from varuna_planner.search.layouts import describe_gpu_types

_SECRET_BYTES = 32
_VERBS = {JobState.SUCCEEDED: "succeeded", JobState.FAILED: "failed", JobState.CANCELLED: "was cancelled"}
_STOPS = {
    StopMode.LEAVE_NOW: "at once",
    StopMode.SAVE_FIRST: "after its step and a checkpoint",
    StopMode.HOLD_FIRST: "after its step, with its state kept in memory",
    StopMode.HOLD_WITHIN_STEP: "within its step, with its state and what is done of the step kept in memory",
}
"""What its workers do first."""


class JobActions:
    def __init__(
        self, registry: VmRegistry, events: EventLog, stacks: StackService, now: Callable[[], float] = time.time
    ) -> None:
        self._registry = registry
        self._events = events
        self._stacks = stacks
        self._now = now

    async def apply_action(
        self, session: AsyncSession, row: JobRow, action: Action, copies_facts: CopiesFacts | None = None
    ) -> None:
        """`copies_facts`: for a StartGeneration."""
        match action:
            case StartGeneration():
                await self._start(session, row, action, copies_facts or CopiesFacts())
            case StopGeneration():
                await self._stop(session, row, action)
            case EndGeneration():
                await self._end(session, row, action)
            case FinishJob():
                self._finish(session, row, action)
            case RequeueJob():
                self._requeue(session, row, action)
            case RequestStacks():
                text = f"{row.reason}: the stacks of its ranks come with event hang"
                self._events.emit_event(session, "hang_suspected", text, job_id=row.id, generation=action.number)
            case RecordHang():
                await self._note_hang(session, row, action)
            case RecordDeath():
                vm = await session.get_one(VmRow, action.vm_id)
                vm.deaths, vm.last_death_at = action.deaths, self._now()
            case RaiseMargin():
                self._raise_margin(session, row, action)
            case QuarantineVms() | LiftQuarantine():
                await self._quarantine(session, row, action)

    async def _check_placement(self, session: AsyncSession, action: StartGeneration) -> int:
        """The rendezvous port of rank 0. Raises StaleDataError if a VM was lost or taken out of use after the decision.

        While the planner thinks, other controllers and users go on. A worker that is assigned to a lost VM is never
        stopped; one that is assigned to a VM that is draining makes its generation stop as soon as it has started.
        """
        vm_ids = {device.vm_id for device in action.placement}
        over = (VmState.DRAINING.value, VmState.LOST.value, VmState.GONE.value)
        is_out = or_(VmRow.state.in_(over), VmRow.cordoned_at.is_not(None))
        out = await session.scalar(select(VmRow.id).where(VmRow.id.in_(vm_ids), is_out).limit(1))
        first = action.placement[0].vm_id
        port = self._registry.rendezvous_port(first)
        if out is not None or port is None:
            raise StaleDataError(
                f"generation {action.number} was to start on VM {out or first}, which cannot be used since"
            )
        return port

    async def _start(
        self, session: AsyncSession, row: JobRow, action: StartGeneration, copies_facts: CopiesFacts
    ) -> None:
        now = self._now()
        first = action.placement[0].vm_id
        port = await self._check_placement(session, action)
        host = await self._host_of(session, first)
        is_training, holders = action.kind is GenerationKind.TRAINING, action.holders
        copies = await self._choose_copies(session, row, action, copies_facts) if is_training else CopiesChoice()
        not_finite_from, steps_skipped = await _non_finite_steps(session, row.id, action.number - 1)
        generation = GenerationRow(
            job_id=row.id,
            number=action.number,
            kind=action.kind.value,
            state=GenerationState.LAUNCHING.value,
            history=[{"at": now, "state": GenerationState.LAUNCHING.value, "reason": action.reason}],
            plan=action.plan.to_document(),
            candidates=[dict(candidate) for candidate in action.candidates],
            rendezvous_host=host,
            rendezvous_port=port,
            secret=secrets.token_hex(_SECRET_BYTES),
            committed_step=await newest_committed(session, row) if is_training else None,
            in_place=action.in_place,
            holders_generation=None if holders is None else holders.generation,
            holders=None if holders is None else [holder.to_document() for holder in holders.members],
            keepers=list(copies.keepers) or None,
            copies_shares=copies.marks,
            copies_reason=copies.reason or None,
            not_finite_from=not_finite_from,
            steps_skipped=steps_skipped,
            reason=action.reason,
            created_at=now,
        )
        session.add(generation)
        for rank, device in enumerate(action.placement):
            session.add(
                WorkerRow(
                    job_id=row.id,
                    generation=action.number,
                    rank=rank,
                    vm_id=device.vm_id,
                    local_rank=device.local_rank,
                    state=WorkerState.ASSIGNED.value,
                    history=[{"at": now, "state": WorkerState.ASSIGNED.value, "reason": action.reason}],
                )
            )
        if row.job_state is JobState.QUEUED:
            row.move_to_state(JobState.RUNNING, now=now, reason=action.reason)
            row.started_at = row.started_at or now  # one that was preempted or retried starts again
            row.run_since = row.run_since or now
        plan = action.plan
        given = ""
        if holders is not None and action.in_place:
            new = len(action.placement) - len(holders.members)
            given = f", with {new} new process{'es' if new > 1 else ''}" if new else " with other stages"
        elif holders is not None:
            count = len(holders.members)
            given = f", with the state of {count} process{'es' if count > 1 else ''} of generation {holders.generation}"
        types = describe_gpu_types(plan)
        over = f", over {types}" if types else ""
        copied = ", with a copy of each stage on another VM" if copies.keepers else ""
        weighed = f"; {copies.reason}" if copies.reason else ""
        self._events.emit_event(
            session,
            "generation_started",
            f"generation {action.number} ({action.kind.value}) starts{' in place' if action.in_place else ''} as "
            f"{plan.p}×{plan.d}, micro-batch {plan.micro_batch}{over}{given}{copied}: {action.reason}{weighed}",
            job_id=row.id,
            generation=action.number,
            data={
                "kind": action.kind.value,
                "p": plan.p,
                "d": plan.d,
                "micro_batch": plan.micro_batch,
                "shares": list(plan.shares),
                "gpu_types": list(plan.gpu_types),
                "in_place": action.in_place,
                "holders": [] if holders is None else [holder.rank for holder in holders.members],
                "holders_generation": None if holders is None else holders.generation,
                "keepers": list(copies.keepers),
                "copies_shares": copies.marks,
                "copies_reason": copies.reason,
                "reason": action.reason,
            },
        )

    async def _choose_copies(
        self, session: AsyncSession, row: JobRow, action: StartGeneration, facts: CopiesFacts
    ) -> CopiesChoice:
        spec, _ = read_spec(row.spec)
        if not spec.holds_state:
            return CopiesChoice()
        vm_ids = [device.vm_id for device in action.placement]
        found = await session.scalars(select(VmRow).where(VmRow.id.in_(set(vm_ids))))
        places = {vm.id: VmPlace(vm.host or "", vm.zone or vm.pool or "") for vm in found}
        return choose_copies(Copies(spec.copies), action.plan, vm_ids, places, facts)

    async def _host_of(self, session: AsyncSession, vm_id: str) -> str:
        vm = await session.get_one(VmRow, vm_id)
        return vm.host or "127.0.0.1"

    async def _stop(self, session: AsyncSession, row: JobRow, action: StopGeneration) -> None:
        now = self._now()
        generation = await _generation(session, row.id, action.number)
        if generation.generation_state is not GenerationState.STOPPING:
            generation.move_to_state(GenerationState.STOPPING, now=now, reason=action.reason)
        generation.stop_mode, generation.stop_cause = action.mode.value, action.cause.value
        generation.stop_reason, generation.stop_requested_at = action.reason, now
        self._events.emit_event(
            session,
            "generation_stopping",
            f"generation {action.number} is to stop, {_STOPS[action.mode]}: {action.reason}",
            job_id=row.id,
            generation=action.number,
            data={"mode": action.mode.value, "cause": action.cause.value},
        )

    async def _end(self, session: AsyncSession, row: JobRow, action: EndGeneration) -> None:
        now = self._now()
        generation = await _generation(session, row.id, action.number)
        generation.move_to_state(GenerationState.ENDED, now=now, reason=action.reason)
        generation.ended_at, generation.end_cause, generation.end_reason = now, action.cause.value, action.reason
        generation.secret = None
        self._events.emit_event(
            session,
            "generation_ended",
            f"generation {action.number} ended: {action.reason}",
            job_id=row.id,
            generation=action.number,
            data={"cause": action.cause.value},
        )

    def _finish(self, session: AsyncSession, row: JobRow, action: FinishJob) -> None:
        now = self._now()
        reason = extract_last_line(action.error or "") or action.note or action.state.value
        row.move_to_state(action.state, now=now, reason=reason)
        row.error, row.finished_at, row.active_name = action.error, now, None
        row.exit_code = action.exit_code
        suffix = f": {reason}" if action.error else f", {action.note}" if action.note else ""
        text = f"job {row.name!r} {_VERBS[action.state]}{suffix}"
        data = {"exit_code": action.exit_code, **({"note": action.note} if action.note else {})}
        self._events.emit_event(session, f"job_{action.state.value}", text, job_id=row.id, data=data)

    def _requeue(self, session: AsyncSession, row: JobRow, action: RequeueJob) -> None:
        row.move_to_state(JobState.QUEUED, now=self._now(), reason=f"preempted: {action.reason}")
        text = f"job {row.name!r} is preempted and waits again: {action.reason}"
        self._events.emit_event(session, "job_preempted", text, job_id=row.id)

    async def _note_hang(self, session: AsyncSession, row: JobRow, action: RecordHang) -> None:
        self._stacks.store_answers(session, row.id, action.number)
        suspect = action.suspect
        data: dict[str, Any] = {"silent_s": round(action.silent_s, 3)}
        if suspect is not None:
            vm = await session.get_one(VmRow, suspect.vm_id)
            vm.hangs += 1
            data |= {"rank": suspect.rank, "why": suspect.why, "stack": suspect.stack, "hangs_of_vm": vm.hangs}
        self._events.emit_event(
            session,
            "hang",
            f"generation {action.number}: {action.reason}",
            job_id=row.id,
            generation=action.number,
            vm_id=None if suspect is None else suspect.vm_id,
            data=data,
        )

    def _raise_margin(self, session: AsyncSession, row: JobRow, action: RaiseMargin) -> None:
        lesson = action.lesson
        row.memory_margin = lesson.margin.to_document()
        data = {
            "rank": lesson.rank,
            "stage": lesson.stage,
            **lesson.shortage.to_document(),
            "planned_bytes": lesson.planned_bytes,
            "shortfall_bytes": lesson.shortfall_bytes,
            "factor": round(lesson.margin.factor, 4),
            "lessons": lesson.margin.lessons,
        }
        text = f"generation {action.number}: {action.reason}"
        self._events.emit_event(session, "out_of_memory", text, job_id=row.id, generation=action.number, data=data)

    async def _quarantine(self, session: AsyncSession, row: JobRow, action: QuarantineVms | LiftQuarantine) -> None:
        for vm_id in action.vm_ids:
            vm = await session.get_one(VmRow, vm_id)
            if isinstance(action, QuarantineVms):
                vm.quarantined_until, vm.quarantines = action.until, vm.quarantines + 1
                vm.slow_ratio = vm.slow_reason = None
                text = f"VM {vm_id} is quarantined for {action.until - self._now():.0f} s: {action.reason}"
                self._events.emit_event(session, "vm_quarantined", text, job_id=row.id, vm_id=vm_id)
            elif vm.quarantined_until is not None:
                vm.quarantined_until = None
                text = f"VM {vm_id} is out of quarantine: it is needed, since {action.reason}"
                self._events.emit_event(session, "vm_released", text, job_id=row.id, vm_id=vm_id)


async def _non_finite_steps(session: AsyncSession, job_id: str, number: int) -> tuple[int | None, int]:
    """`not_finite_from` and `steps_skipped` of the generation."""
    query = select(GenerationRow.not_finite_from, GenerationRow.steps_skipped)
    query = query.where(GenerationRow.job_id == job_id, GenerationRow.number == number)
    found = (await session.execute(query)).first()
    return (None, 0) if found is None else (found.not_finite_from, found.steps_skipped)


async def _generation(session: AsyncSession, job_id: str, number: int) -> GenerationRow:
    query = select(GenerationRow).where(GenerationRow.job_id == job_id, GenerationRow.number == number)
    return (await session.scalars(query)).one()
