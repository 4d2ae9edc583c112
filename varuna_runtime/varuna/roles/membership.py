"""Taking part in the next generation: in the middle of the script's call, with the state that this process holds.

The ranks of the next generation agree on the newest committed step, give one another the sections of the state that
they lack, and connect. A new process among them does the same in its script's `resume`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import structlog
import torch
from torch import Tensor

from varuna.assembly.assembly import connect_stage
from varuna.data.batches import follow_shape
from varuna.devices.generators import keep_global_generators
from varuna.diagnostics.start_phases import StartPhases
from varuna.distributed.agreement import StepTotals, agree_on_totals
from varuna.distributed.calls import CallKind
from varuna.distributed.departure import GenerationEnded, PeerLost, end_process
from varuna.holdings.exchange import MoveObstacle
from varuna.partition import Stage
from varuna.pipeline.micro_batches import split_spans
from varuna.roles.kept_shares import KeptShare, StepRest
from varuna.roles.late_state import are_sums_late, may_be_late
from varuna.roles.leaving import StateHolder
from varuna.roles.meeting import GenerationMeeting, Meeting
from varuna.roles.moved_sums import add_sums
from varuna.roles.moving import NewcomerMove, StageMove
from varuna.roles.progress import TrainingStep
from varuna.roles.replica_options import describe_options, explain_different_options
from varuna.roles.reshaping import (
    GenerationMember,
    SettledSums,
    count_left,
    explain_apart,
    explain_lost_step,
    fits_in_place,
    follow_sums,
    list_only_copied,
    must_move,
)
from varuna.roles.role import report_ready
from varuna.roles.training_parts import TrainingParts
from varuna.worker.agent_link import GiveCommand, StateSources, StoreCommand
from varuna_proto.environment import EXIT_PEER_LOST, WorkerEnvironment
from varuna_proto.state_use import OTHER_STAGES

__all__ = ["GenerationMembership"]

_log = structlog.get_logger("varuna")

_FLOAT_MASK = (1 << 24) - 1
"""Of the integers that a float32 has exactly."""
_LINKS_END_S = 2.0
"""How long to wait for the threads of links whose connections are broken: they end within milliseconds."""


class FirstStep(NamedTuple):
    """What a process that joins others before a step finds of it, if they have begun it."""

    rest: StepRest | None = None
    """What its replica runs of it; None: its share."""
    kept: KeptShare | None = None
    """What the sums have that it has got; None: it has got none."""
    sums: Sequence[Mapping[str, Tensor]] = ()


class GenerationMembership:
    """This process as a member of one generation after another."""

    def __init__(self, parts: TrainingParts, holder: StateHolder) -> None:
        self._parts = parts
        self._holder = holder
        self._awaited_in = CallKind.RESUME if parts.worker.environment.joins_survivors else None
        """The call of the script in which survivors wait for this new process; None: it is one of them."""
        self._first_step = FirstStep()
        """What this process finds of the next step that its script begins, if others are in it."""
        self._give_command: GiveCommand | StoreCommand | None = None
        """Given when the step under way had been agreed on: the script's next call gives the state."""
        self._compared_after = 0
        """The step after which the ranks compare the options of their replicas: the first with new processes. 0: there
        are none."""
        self._last_step: TrainingStep | None = None
        """The step that this process ends though its script cannot follow the shape: new processes go on after it."""
        self._meeting = GenerationMeeting(parts, holder, self._prepare_last_step)

    def report_ready(self) -> None:
        """Reports once that the script has prepared everything."""
        parts = self._parts
        if parts.progress.is_ready:
            return
        parts.progress.is_ready = True
        environment = parts.worker.environment
        if environment.checkpoint_url and environment.generation > 1 and not parts.checkpoints.were_loaded:
            _log.warning("the script trains from step 0 again: call resume() after set_optimizer() to continue")
        if parts.progress.step and not parts.checkpoints.state_bytes:
            parts.checkpoints.count_state()
        sources = replace(parts.checkpoints.sources, late_bytes=parts.late_bytes)
        report_ready(parts.worker, parts.progress.step, sources)

    # A new process among survivors

    @property
    def is_awaited_in_resume(self) -> bool:
        """Whether this is a new process and survivors wait for it (`join_survivors`)."""
        return self._awaited_in is CallKind.RESUME

    def join_survivors(self) -> None:
        """Takes part in a generation of survivors with this new process, whose script resumes: it takes the state of
        its stage from them, and goes on where they are in their scripts: at the beginning of a step.

        If that cannot be, all leave again, and new processes take the state.
        """
        parts = self._parts
        worker, stage = parts.worker, parts.assembly.stage
        worker.phases.end_phase("script")
        meeting = self._meeting.meet(None, None)
        settled, rest = meeting.settled, meeting.rest
        self._require_alike(meeting)
        self._require_together(settled.members)
        move, are_late = NewcomerMove(worker, parts.taken_ahead), are_sums_late(rest)
        is_late = self._is_state_late(settled.members)
        try:
            loaded, obstacle = move.take_state(
                parts.checkpoints.training_state(), for_passes=is_late, without_sums=are_late
            )
            parts.taken_ahead.close()
            self._require_moved(obstacle)
            if is_late or are_late:
                parts.await_late_state(move, end_move=lambda: None)
                parts.checkpoints.count_state(late_bytes=parts.late_bytes)
                move.hide_late_state(self._await_late_state)
        finally:
            if parts.late is None:
                move.close()
        assert loaded is not None
        parts.checkpoints.continue_from(loaded)
        parts.changes.follow_agreement({*split_spans(meeting.survivors[0].agreed_changes)})
        self._first_step = FirstStep(rest)
        if rest is not None and rest.sums is not None:
            kept = follow_sums(rest.sums, settled, worker.environment, rest.expected_weight)
            self._first_step = FirstStep(rest, kept, () if are_late else move.read_sums())
        worker.phases.end_phase("load")
        parts.assembly.disconnect(_LINKS_END_S)
        self._connect_anew(stage, meeting)
        if parts.late is not None:
            parts.late.begin()
        self._awaited_in = CallKind.STEP
        self.report_ready()

    def _await_late_state(self) -> None:
        """The script of this new process looks into the state of an optimizer that is late. If the others wait for it
        to connect, all leave again, and new processes take the state."""
        late = self._parts.late
        assert late is not None, "it stays until the update"
        if not late.has_begun:
            self._require_success("a registered state looks into the optimizer's when it is loaded")
        late.fill()

    def _is_state_late(self, members: Sequence[GenerationMember]) -> bool:
        """Whether what only the update reads comes while the passes of a step run. The same on all ranks, whose scripts
        are at the beginning of a step or in it.

        Where new processes join others that keep their stages, these train on at once, and change the state. One
        replica copies its new stages in the rest of the step, because another loss in it needs the copies. Those of a
        stage that no process has are not kept beyond the move.
        """
        parts, environment = self._parts, self._parts.worker.environment
        needs_all = bool(environment.keepers and environment.plan.d == 1)
        needs_all |= bool(list_only_copied(members, parts.section_count))
        return must_move(members, parts.stages) and not needs_all and may_be_late()

    def check_call(self, kind: CallKind) -> None:
        """Leaves, together with the survivors, where the script of this new process makes another call than theirs, or
        would train with fewer parameter groups than theirs do."""
        if self._awaited_in not in (None, kind):
            awaited = self._awaited_in.name.lower()
            self._require_success(
                f"a new process calls {kind.name.lower()}() before {awaited}(), where the others wait for it"
            )
        if self._awaited_in is CallKind.STEP:
            self._require_success(self._parts.checkpoints.explain_lost_groups())
        self._awaited_in = None

    def require_batch(self, step: TrainingStep) -> None:
        """Leaves, together with the survivors, where the script of this new process gives other inputs than theirs, so
        that a rest of the step cannot be made."""
        if step.batch is None:
            self._require_success("a new process does not pass the batches of varuna.data.Batches as they are")

    def compare_replicas(self) -> None:
        """In the second step with new processes, together with all other ranks: leaves where the script of one has made
        another learning rate, say, of what it had got for the first, so that new processes take the state.

        The updates so far were equal.
        """
        parts, topology = self._parts, self._parts.worker.topology
        if not self._compared_after or self._compared_after != parts.progress.step:
            return
        own = describe_options(parts.updater.optimizers)
        digests = torch.zeros(len(topology.everyone))
        digests[topology.rank] = zlib.crc32(own.encode()) & _FLOAT_MASK
        parts.assembly.everyone.all_reduce([digests])
        if (digests.view(topology.d, topology.p) == digests[: topology.p]).all():
            return
        described = parts.worker.rendezvous.exchange_values("options", topology.everyone, own)
        self._require_success(explain_different_options(described, topology.p))

    def begin_first_step(self, step: TrainingStep) -> None:
        """In the first step after this process has joined others before it: makes `.grad` what it has got of the step,
        if that is not late."""
        first, self._first_step = self._first_step, FirstStep()
        step.rest, step.kept = first.rest, first.kept
        for sums in first.sums:
            add_sums(self._parts.assembly.stage.parameters, sums)

    # A script that cannot follow the shape

    def is_last_step(self, step: TrainingStep) -> bool:
        """Whether this process only ends this step in a shape that its script cannot follow."""
        return step is self._last_step

    def leave_after_last_step(self, step: TrainingStep | None) -> None:
        """Leaves, together with all other ranks, if the last step is done, so that new processes go on.

        `step`: the call that begins; None: it is another call.
        """
        if self._last_step is None or step is self._last_step or self._parts.worker.departure.stays:
            return
        self._parts.inputs.give_up()
        # A rank that left earlier might keep another one from learning that the step is agreed on.
        with suppress(PeerLost, GenerationEnded):
            agree_on_totals(self._parts.assembly.everyone, StepTotals(loss_sum=0.0, examples=1))
            self._leave("the script has batches for the shape before, so new processes go on")
        if not self._parts.worker.departure.stays:
            self._parts.worker.departure.raise_if_leaving()

    def leave_changed_step(self, step: TrainingStep) -> None:
        """The script has changed the model, so the whole step is run again: leaves where the inputs are missing."""
        if self.is_last_step(step):
            self._leave_before_step("the script has changed the model")

    def _prepare_last_step(self, step: TrainingStep | None, settled: SettledSums) -> None:
        """Gets the inputs of the rest of the step under way, together with all other ranks. If one cannot, all leave
        again, and new processes take the state."""
        parts, worker = self._parts, self._parts.worker
        rest = None if step is None else step.rest
        if reason := explain_lost_step(settled.members, rest, parts.stages):
            self._leave_before_step(reason)
        assert step is not None, "all ranks are in one step"
        assert rest is not None, "something of it is kept"
        reason = parts.inputs.gather_inputs(worker, parts.progress.step + 1, rest, step.inputs)
        if reason:
            self._leave_before_step(reason)
        self._last_step = step

    def _leave_before_step(self, reason: str) -> None:
        self._parts.inputs.give_up()
        self._leave(f"the step under way cannot be ended in place: {reason}")
        self._parts.worker.departure.raise_if_leaving()

    def _leave(self, reason: str) -> None:
        self._parts.worker.departure.leave_generation(GenerationEnded(reason))

    # Going on in the next generation

    def join_next(self, step: TrainingStep | None) -> None:
        """Takes part in the next generation, with the state of the newest committed step. `step`: the call under way.

        Returns when all ranks of that generation stand there, or when this process has to complete a step before it can
        give its state. Raises as a worker that leaves when that cannot be done.
        """
        while True:
            try:
                self._rejoin(step)
            except (GenerationEnded, PeerLost):
                if not self._parts.worker.departure.stays:
                    raise
            except (RuntimeError, OSError, ValueError) as error:
                _log.warning("this process cannot go on in the next generation: it ends", reason=str(error))
                end_process(EXIT_PEER_LOST)
            except Exception:  # a flaw of Varuna is not the script's fault, which could fail the job
                _log.exception("this process cannot go on in the next generation: it ends")
                end_process(EXIT_PEER_LOST)
            else:
                return

    def _rejoin(self, step: TrainingStep | None) -> None:
        parts, worker, holder = self._parts, self._parts.worker, self._holder
        before, phases = worker.environment, StartPhases()
        if self._give_command is not None:
            self._give_state(self._give_command, step)
        parts.progress.is_broken = False
        parts.leave_late_state(step)
        worker.end_membership(links_ended=holder.is_between_stages or parts.assembly.disconnect(_LINKS_END_S))
        parts.finish_captures()
        parts.checkpoints.checkpointing.abandon_saves()
        phases.end_phase("leave")
        command = worker.link.wait_for_command()
        if isinstance(command, GiveCommand | StoreCommand):
            self._give_state(command, step)
            return
        environment = command.environment
        if holder.is_moving or not fits_in_place(environment, before):
            raise RuntimeError(f"rank {environment.rank} of the next generation needs another process")
        phases.end_phase("wait")
        holder.join_next(environment, phases)
        meeting = self._meeting.meet(step, before)
        self._require_alike(meeting)
        holder.drop_state_before()
        if step is None:  # others may have begun the next step, if this rank has missed the end of an evaluation
            self._first_step = FirstStep(meeting.rest)
        peer_bytes, stage = 0, parts.assembly.stage
        moves = must_move(meeting.members, parts.stages)
        if moves:
            del stage  # nothing may keep it but the assembly
            stage, peer_bytes = self._move(meeting, before, step)
            phases.end_phase("load")
        elif environment.survivors:
            self._give_to_new(meeting.members, before)
            phases.end_phase("load")
        if not moves:
            holder.end_move()
        self._connect_anew(stage, meeting)
        if moves:  # a rank that is lost before leaves the others without a stage that is connected
            holder.hold_stage()
            self._end_move()
        late_bytes = parts.late_bytes
        sources = StateSources(
            kept_bytes=max(parts.checkpoints.state_bytes - peer_bytes - late_bytes, 0),
            peer_bytes=peer_bytes,
            late_bytes=late_bytes,
        )
        committed, redone = parts.progress.find_committed(step), 0 if step is None else step.redone
        worker.link.report_ready(
            committed,
            phases.durations_s,
            sources,
            micro_batches_redone=redone,
            micro_batches_left=count_left(meeting.rest, environment),
        )
        _log.info(
            "this process goes on in the next generation",
            generation=environment.generation,
            rank=environment.rank,
            step=committed,
            micro_batches_redone=redone,
        )

    def _give_state(self, command: GiveCommand | StoreCommand, step: TrainingStep | None) -> None:
        """Gives the state to new processes, which begin where this script is in its call of `step`, or leaves it to
        them in memory, and ends this one. Between two steps it gives what it has copied of those before.

        Returns only if that step has been agreed on, so that the script has to follow it first.
        """
        if step is None and not self._is_between_steps():
            self._holder.give_copies(command)
            raise RuntimeError("the script is between two steps, where no other process can begin")
        if step is not None and step.totals is not None:
            self._give_command, step.was_interrupted = command, True
            return
        self._holder.give_state(command)

    def _is_between_steps(self) -> bool:
        """Whether the last step is done, and the script has done all that it does before it begins the next one."""
        parts = self._parts
        is_done = self._last_step is not None and self._last_step.is_updated
        return is_done and parts.habits.is_between_steps(parts.updater.optimizers, parts.checkpoints.registered)

    def _give_to_new(self, members: Sequence[GenerationMember], before: WorkerEnvironment) -> None:
        """Gives new processes the state of their stages, while all others keep theirs. `before`: as for `_move`.

        If one cannot take it, all leave again, and new processes take the state.
        """
        self._require_together(members)
        move = StageMove(self._parts)
        try:
            committed = self._parts.progress.step
            copies = self._holder.list_copies_of_others(committed)
            _, obstacle = move.share_state(self._parts.assembly.stage, committed, before, copies=copies)
            self._require_moved(obstacle or move.keep_stage())
        finally:
            move.close()

    def _move(self, meeting: Meeting, before: WorkerEnvironment, step: TrainingStep | None) -> tuple[Stage, int]:
        """Takes another stage, together with all other ranks. `before`: of the rank that this process was.

        Returns the stage, and the bytes of state that came from other processes. In the middle of a step, sums and what
        only its update reads are late then. If one rank cannot move, all leave again, with the state of the stages that
        they had. New processes take it.
        """
        parts, rest = self._parts, None if step is None else step.rest
        is_late = step is not None and self._is_state_late(meeting.members)
        sums, are_late = None if rest is None else rest.sums, are_sums_late(rest)
        self._holder.begin_move(before)
        self._require_together(meeting.members)
        committed = parts.progress.step
        copies = self._holder.list_copies_of_others(committed)
        move = StageMove(parts)
        try:
            held, obstacle = move.share_state(
                parts.assembly.stage, committed, before, copies=copies, sums=sums, lent=meeting.lent
            )
            self._require_moved(obstacle)
            self._holder.release_stage(held)
            parts.show_tensors({}, {})
            with keep_global_generators(parts.device):
                stage, obstacle = move.take_stage(
                    self._release_stage(), parts.model_map, for_passes=is_late, without_sums=are_late
                )
            self._require_moved(obstacle)
            assert stage is not None
            peer_bytes = move.peer_bytes
            if is_late or are_late:
                parts.await_late_state(move, end_move=self._holder.end_move)
        finally:
            if parts.late is None:
                move.close()
        parts.show_tensors(parts.swap.parameters, parts.swap.buffers)
        parts.checkpoints.count_state(late_bytes=parts.late_bytes)
        if step is not None and rest is not None and sums is not None:
            step.kept = follow_sums(sums, meeting.settled, parts.worker.environment, rest.expected_weight)
        parts.copies = parts.shares = parts.parting = None  # of stages that are no more
        return stage, peer_bytes

    def _end_move(self) -> None:
        """Ends the move to another stage, now or when all ranks have their late state."""
        late = self._parts.late
        if late is None or not late.lacks_state:
            self._holder.end_move()
        if late is not None:
            late.begin()

    def _release_stage(self) -> Stage:
        """The stage, whose connections have ended; nothing else here keeps it."""
        stage = self._parts.assembly.stage
        del self._parts.assembly
        return stage

    def _require_alike(self, meeting: Meeting) -> None:
        """Leaves, together with all others, if a loss has come when some had the outcome of an exchange of the script's
        changes, and perhaps traced the model anew, and others had not."""
        first, *others = meeting.survivors
        if any(other.agreed_changes != first.agreed_changes for other in others):
            self._leave_unmoved("they have agreed on different changes by the script")

    def _require_together(self, members: Sequence[GenerationMember]) -> None:
        if reason := explain_apart(members, self._parts.section_count):
            self._leave_unmoved(reason)

    def _require_moved(self, obstacle: MoveObstacle | None) -> None:
        """`obstacle`: why ranks cannot take their stages in place; None: they have. What passes is not the script's:
        new processes take the state, and the job moves in place the next time."""
        if obstacle is not None:
            if obstacle.is_passing:
                self._leave_unmoved(obstacle.reason)
            self._require_success(obstacle.reason)

    def _require_success(self, reason: str) -> None:
        """`reason`: why ranks cannot take their stages in place, which is the script's; empty: they have."""
        if reason:
            self._parts.worker.link.report_script_obstacle(OTHER_STAGES + reason)
            self._leave_unmoved(reason)

    def _leave_unmoved(self, reason: str) -> None:
        """Leaves the generation, whose ranks cannot take their stages, so that new processes take the state."""
        self._leave(f"the ranks cannot go on in place: {reason}")
        self._parts.worker.departure.raise_if_leaving()

    def _connect_anew(self, stage: Stage, meeting: Meeting) -> None:
        """Connects this rank, with its state, to the others of its generation."""
        parts = self._parts
        with keep_global_generators(parts.device):
            parts.assembly = connect_stage(
                stage,
                parts.model_map,
                parts.worker,
                device=parts.device,
                precision=parts.precision,
                link_kind=parts.link_kind,
            )
        self._follow_generation(meeting)
        parts.worker.phases.end_phase("connect")

    def _follow_generation(self, meeting: Meeting) -> None:
        """Everything that knows the other ranks knows those of the new generation from now on."""
        parts, environment = self._parts, self._parts.worker.environment
        if parts.copies is not None:
            parts.copies.finish_capture()
            parts.copies = None
        parts.shares = parts.parting = None
        if parts.ahead is not None:
            parts.ahead.taker.close()
            parts.ahead = None
        parts.expected_weight.follow_replicas(parts.assembly.replicas)
        have_exchanged = all(member.has_exchanged for member in meeting.survivors)
        parts.changes.follow_ranks(parts.assembly.everyone, exchanges=not have_exchanged)
        parts.non_finite.set_logging(logs=environment.rank == 0)
        if environment.survivors:
            parts.non_finite.count_anew()
            self._compared_after = parts.progress.step + 1
        parts.scalars.follow_generation(environment)
        parts.checkpoints.follow_ranks(parts.assembly.everyone, parts.model_map)
        follow_shape(environment)
