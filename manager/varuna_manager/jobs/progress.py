"""A generation's progress: its start, how the time before its first step was spent, its steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import structlog
from sqlalchemy import case, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from varuna_manager.db.changes import name_changes
from varuna_manager.db.engine import after_commit
from varuna_manager.db.job_progress import note_progress
from varuna_manager.db.models import Base, GenerationRow, JobProgressRow, JobRow, MetricRow, WorkerRow
from varuna_manager.domain import accounting, downtime
from varuna_manager.domain.downtime import DowntimePart, MorphMoments
from varuna_manager.domain.keepers import CopiesObstacles
from varuna_manager.domain.states import HOLDING_STOPS, GenerationKind, GenerationState, StopMode, WorkerState
from varuna_manager.history.live import ProgressBoard
from varuna_manager.history.morph_spans import MorphSpans
from varuna_manager.history.step_metrics import roll_up
from varuna_manager.jobs.step_rates import read_generation_rates
from varuna_manager.world.events import EventLog
from varuna_proto.v1 import agent_pb2 as pb

_METRICS = Base.metadata.tables[MetricRow.__tablename__]


class Progress:
    def __init__(self, events: EventLog, board: ProgressBoard | None = None, spans: MorphSpans | None = None) -> None:
        """`board`: gets every newest step; `spans`: every first one."""
        self._events = events
        self._spans = spans or MorphSpans()
        self._board = board
        self._log = structlog.get_logger("varuna.reports")

    async def record_start(self, session: AsyncSession, fact: pb.WorkerStarted, now: float) -> None:
        """A rank has built its part of the model and loaded its state."""
        generation = await generation_row(session, fact.job_id, fact.generation)
        if generation is None:
            return
        progress: dict[str, Any] = {}
        if generation.kind == GenerationKind.TRAINING:
            progress["resumed_step"] = fact.resumed_step
            if generation.in_place:
                # All ranks report the same, but for those of new processes.
                for name in ("micro_batches_redone", "micro_batches_left"):
                    progress[name] = max(getattr(generation, name) or 0, getattr(fact, name))
            if fact.rank == 0:
                self._compare_with_committed(session, generation, fact.resumed_step)
                if not fact.kept_bytes and not fact.peer_bytes:  # what came from memory the job has made itself
                    await self._note_beginning(session, generation, fact.resumed_step)
        if generation.started_at is None:
            reported = [DowntimePart(name=phase.name, seconds=phase.seconds, rank=fact.rank) for phase in fact.phases]
            progress["downtime"] = [
                part.to_document() for part in downtime.choose_slower_start(_start(generation), reported)
            ]
        await _set_progress(session, generation, **progress)
        states = await session.scalars(
            select(WorkerRow.state).where(WorkerRow.job_id == fact.job_id, WorkerRow.generation == fact.generation)
        )
        if generation.state == GenerationState.LAUNCHING and set(states) == {WorkerState.RUNNING.value}:
            generation.move_to_state(GenerationState.RUNNING, now=now, reason="every rank has started")
            generation.running_at = now

    async def record_save_time(self, session: AsyncSession, fact: pb.WorkerExited) -> None:
        """A rank has saved and left. Its agent measures the time, because the manager may have been away.

        After a hold-first stop it has saved only if it holds no state.
        """
        row = GenerationRow
        holding = [] if fact.HasField("held") else [mode.value for mode in HOLDING_STOPS]
        modes = [StopMode.SAVE_FIRST.value, *holding]
        slowest_s = case((row.save_s > fact.save_s, row.save_s), else_=fact.save_s)
        statement = update(row).where(
            row.job_id == fact.job_id, row.number == fact.generation, row.stop_mode.in_(modes)
        )
        options = name_changes(generations=[(fact.job_id, fact.generation)])
        await session.execute(statement.values(save_s=slowest_s), execution_options=options)

    def _compare_with_committed(self, session: AsyncSession, generation: GenerationRow, resumed_step: int) -> None:
        committed_step = generation.committed_step or 0
        if resumed_step >= committed_step:
            return
        self._events.emit_event(
            session,
            "checkpoint_passed_over",
            f"generation {generation.number} goes on from step {resumed_step}, although step {committed_step} was "
            "saved: the log of its rank 0 shows what is wrong with that checkpoint, unless the script chose it",
            job_id=generation.job_id,
            generation=generation.number,
            data={"resumed_step": resumed_step, "committed_step": committed_step},
        )

    async def _note_beginning(self, session: AsyncSession, generation: GenerationRow, resumed_step: int) -> None:
        """Emit an event if the job begins with steps that it has not done itself."""
        row = JobProgressRow
        known_step = await session.scalar(select(row.step).where(row.job_id == generation.job_id)) or 0
        if known_step or not resumed_step:
            return
        job = await session.get_one(JobRow, generation.job_id)
        store = f" in {job.checkpoint_url}" if job.checkpoint_url else ""
        self._events.emit_event(
            session,
            "resumed",
            f"generation {generation.number} begins at step {resumed_step}, from a checkpoint{store} that was there "
            "before the job: the steps up to it are not run again",
            job_id=generation.job_id,
            generation=generation.number,
            data={"step": resumed_step},
        )

    async def record_steps(
        self, session: AsyncSession, job_id: str, number: int, steps: Mapping[int, pb.StepResult], now: float
    ) -> bool:
        """Store `steps`, by their number. Returns whether the controllers should look: only a generation's first step
        decides anything."""
        generation = await generation_row(session, job_id, number)
        if generation is None or not steps:
            self._log.warning("steps of an unknown generation", job=job_id, generation=number)
            return False
        await _write_metrics(session, generation, steps.values(), now)
        last = steps[max(steps)]
        if generation.last_step is not None and last.step <= generation.last_step:
            return False
        is_first = generation.last_step is None
        if is_first:
            await self._first_step(session, generation, min(steps), now)
        await _set_progress(
            session,
            generation,
            last_step=last.step,
            last_loss=_number_or_none(last.loss),
            **self._follow_non_finite(session, generation, steps),
            last_step_at=now,
            copied_step=last.copied_step or None,
            **self._follow_copies(session, generation, last),
            between_s=_add_between(generation, steps),
        )
        first = min(steps) if generation.last_step is None else generation.last_step + 1
        await roll_up(session, job_id, first, last.step)
        if self._board is not None and self._board.is_watched:
            rate = (await read_generation_rates(session, job_id, [number])).get(number)
            loss = _number_or_none(last.loss)
            if rate is not None:  # else a later generation has done its steps again
                after_commit(session, partial(self._board.record_step, job_id, number, last.step, loss=loss, rate=rate))
        return is_first

    def _follow_copies(
        self, session: AsyncSession, generation: GenerationRow, step: pb.StepResult
    ) -> dict[str, str | None]:
        """The columns about what the workers cannot keep. Emits an event for what is new of it."""
        known = {"copies_obstacle": generation.copies_obstacle, "marks_obstacle": generation.marks_obstacle}
        found = {name: before or getattr(step, name) or None for name, before in known.items()}
        if found != known:
            obstacles = CopiesObstacles(found["copies_obstacle"] or "", found["marks_obstacle"] or "")
            text = f"generation {generation.number} keeps less than it was to: {obstacles.reason}"
            if obstacles.states:
                text += ". Its workers save as often as without copies"
            about: dict[str, Any] = {"job_id": generation.job_id, "generation": generation.number}
            self._events.emit_event(session, "copies_not_kept", text, **about, data=found)
        return found

    def _follow_non_finite(
        self, session: AsyncSession, generation: GenerationRow, steps: Mapping[int, pb.StepResult]
    ) -> dict[str, Any]:
        """The columns about steps without a finite loss or gradient, after these steps.

        Emits an event where such steps in a row begin, and one where they end, but only one of each for one report.
        """
        new = [step for number, step in sorted(steps.items()) if number > (generation.last_step or 0)]
        odd = [step for step in new if not _is_finite(step)]
        before = since = generation.not_finite_from
        for step in new:
            since = None if _is_finite(step) else since or step.step
        skipped = generation.steps_skipped + sum(step.skipped for step in odd)
        about: dict[str, Any] = {"job_id": generation.job_id, "generation": generation.number}
        if odd and before is None:
            first = odd[0]
            what = "gradient" if math.isfinite(first.loss) else "loss"
            done = "updated nothing" if first.skipped else "made its update (on_nonfinite: go_on)"
            text = f"the {what} of step {first.step} is not finite (loss {first.loss:g}): the step {done}"
            data = {"step": first.step, "loss": f"{first.loss:g}", "skipped": first.skipped}
            self._events.emit_event(session, "loss_not_finite", text, **about, data=data)
            before = first.step
        if before is not None and since is None:
            again = max((step.step for step in odd), default=new[0].step - 1) + 1
            text = f"loss and gradient are finite again from step {again} on, after step {before}"
            text += f" ({skipped} skipped so far)" if skipped else ""
            data = {"step": again, "first_step": before, "steps_skipped": skipped}
            self._events.emit_event(session, "loss_finite_again", text, **about, data=data)
        return {"not_finite_from": since, "steps_skipped": skipped}

    async def _first_step(self, session: AsyncSession, generation: GenerationRow, step: int, now: float) -> None:
        row = GenerationRow
        query = select(
            row.last_step_at,
            row.resumed_step,
            row.last_step,
            row.stop_requested_at,
            row.ended_at,
            row.kind,
            row.number,
        )
        query = query.where(row.job_id == generation.job_id, row.number < generation.number)
        earlier = (await session.execute(query.order_by(row.number))).all()
        before = earlier[-1] if earlier else None
        progressed_at = max((at for at, *_ in earlier if at is not None), default=None)
        job = await session.get_one(JobRow, generation.job_id)
        resumed_step = generation.resumed_step if generation.resumed_step is not None else step - 1
        last_progress_at = job.started_at or job.created_at if progressed_at is None else progressed_at
        last_progress_at = max(last_progress_at, job.retried_at or 0.0)
        waited_s = accounting.count_seconds_without_progress(last_progress_at=last_progress_at, first_step_at=now)
        redone = accounting.count_steps_redone(
            ((resumed or 0, last) for _, resumed, last, *_ in earlier if last is not None), resumed_step
        )
        moments = MorphMoments(
            last_progress_at=last_progress_at,
            is_calibrated=before is not None and before.kind == GenerationKind.CALIBRATION,
            stop_sent_at=None if before is None else before.stop_requested_at,
            ended_at=None if before is None else before.ended_at,
            left_at=None if before is None else await _find_leave(session, generation, before.number),
            created_at=generation.created_at,
            ready_at=_ready_at(generation),
            first_step_at=now,
        )
        parts = downtime.split_downtime(moments, _start(generation))
        documents = [part.to_document() for part in parts]
        await _set_progress(
            session,
            generation,
            started_at=now,
            resumed_step=resumed_step,
            seconds_without_progress=waited_s,
            steps_redone=redone,
            downtime=documents,
        )
        if generation.state == GenerationState.LAUNCHING:
            generation.move_to_state(GenerationState.RUNNING, now=now, reason="its first step is done")
        export = partial(self._spans.export_morph, generation.job_id, generation.number, parts)
        after_commit(session, partial(export, first_step_at=now, step=step, steps_redone=redone))
        went = downtime.render_longest_parts(parts)
        again = generation.micro_batches_redone
        were = " of the step under way was" if again == 1 else "es of the step under way were"
        rest = f", {again} micro-batch{were} run again" if again else ""
        lost = "1 step was" if redone == 1 else f"{redone} steps were"
        self._events.emit_event(
            session,
            "first_step",
            f"generation {generation.number} completed its first step ({step}) after {waited_s:.1f} s "
            f"without progress{f' ({went})' if went else ''}, {lost} lost{rest}",
            job_id=generation.job_id,
            generation=generation.number,
            data={
                "step": step,
                "seconds_without_progress": waited_s,
                "steps_redone": redone,
                "micro_batches_redone": again,
                "downtime": documents,
            },
        )


def _start(generation: GenerationRow) -> list[DowntimePart]:
    """The slowest rank's start so far."""
    return [DowntimePart.from_document(part) for part in generation.downtime or ()]


async def _find_leave(session: AsyncSession, generation: GenerationRow, before: int) -> float | None:
    """When the last survivor of the generation `before` had left it, of those that this one knew of at its start."""
    row = WorkerRow
    query = select(func.max(row.stopped_at)).where(row.job_id == generation.job_id, row.generation == before)
    known = query.where(row.held_step.is_not(None), row.stopped_at <= generation.created_at)
    left_at: float | None = await session.scalar(known)
    return left_at


def _ready_at(generation: GenerationRow) -> float | None:
    moved = [entry["at"] for entry in generation.history if entry["state"] == GenerationState.RUNNING.value]
    return moved[0] if moved else None


async def generation_row(session: AsyncSession, job_id: str, number: int) -> GenerationRow | None:
    query = select(GenerationRow).where(GenerationRow.job_id == job_id, GenerationRow.number == number)
    query = query.options(defer(GenerationRow.plan), defer(GenerationRow.candidates))  # large, and not needed here
    row: GenerationRow | None = await session.scalar(query.execution_options(populate_existing=True))
    return row


async def _set_progress(session: AsyncSession, generation: GenerationRow, **values: Any) -> None:
    """Write progress without changing the row's version, so that steps do not make a decision stale."""
    if values:
        await session.execute(
            update(GenerationRow).where(GenerationRow.id == generation.id).values(**values),
            execution_options=name_changes(generations=[(generation.job_id, generation.number)]),
        )
        await note_progress(session, generation, values)


async def _write_metrics(
    session: AsyncSession, generation: GenerationRow, steps: Iterable[pb.StepResult], now: float
) -> None:
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    rows = [
        {
            "job_id": generation.job_id,
            "step": step.step,
            "loss": _number_or_none(step.loss),
            "step_s": step.step_us / 1e6,
            "examples": step.examples,
            "generation": generation.number,
            "at": now,
            "between_s": sum(_between_s(step).values()),
            "gradient_norm": _number_or_none(step.gradient_norm) if step.HasField("gradient_norm") else None,
            "learning_rate": _number_or_none(step.learning_rate) if step.HasField("learning_rate") else None,
        }
        for step in steps
    ]
    statement = insert(_METRICS)  # compiled once for any number of rows, because they are passed apart from it
    new = statement.excluded
    statement = statement.on_conflict_do_update(
        index_elements=["job_id", "step"],
        set_={column.name: new[column.name] for column in _METRICS.columns if not column.primary_key},
        where=new.generation >= MetricRow.generation,
    )
    await session.execute(statement, rows)


def _between_s(step: pb.StepResult) -> dict[str, float]:
    """Seconds by the names of `accounting.BETWEEN_STEPS`."""
    between = step.between
    parts_us = (between.data_us, between.evaluation_us, between.checkpoint_us, between.script_us)
    return {cause: part_us / 1e6 for cause, part_us in zip(accounting.BETWEEN_STEPS, parts_us, strict=True)}


def _add_between(generation: GenerationRow, steps: Mapping[int, pb.StepResult]) -> dict[str, float]:
    """The generation's sums with these steps. What lies before its first step belongs to the morph."""
    known = min(steps) if generation.last_step is None else generation.last_step
    sums = {cause: (generation.between_s or {}).get(cause, 0.0) for cause in accounting.BETWEEN_STEPS}
    for number, step in steps.items():
        if number > known:
            for cause, seconds in _between_s(step).items():
                sums[cause] += seconds
    return sums


def _is_finite(step: pb.StepResult) -> bool:
    return math.isfinite(step.loss) and not step.skipped


def _number_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
