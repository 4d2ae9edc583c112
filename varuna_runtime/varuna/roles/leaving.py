"""What a process does with its state when it leaves its generation.

If it can, it stays with the state for its part in the next generation: a rank, or to give the state to new processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from varuna.checkpoint import CheckpointError, TrainingState
from varuna.copies.parting import Parting
from varuna.copies.share_marks import ShareMark
from varuna.diagnostics.error_text import first_line
from varuna.diagnostics.start_phases import StartPhases
from varuna.distributed.departure import GenerationEnded, PeerLost, end_process
from varuna.holdings.inventory import HeldFiles
from varuna.roles.early_end import AgreedEnd
from varuna.roles.failing import are_finite
from varuna.roles.giving import give_until_taken, hold_state, leave_in_memory
from varuna.roles.kept_shares import KeptShare
from varuna.roles.reshaping import can_hold_state, describe_script_obstacle, may_end_step
from varuna.roles.training_parts import TrainingParts
from varuna.worker.agent_link import GiveCommand, StoreCommand
from varuna_proto.environment import EXIT_GENERATION_ENDED, WorkerEnvironment

__all__ = ["StateHolder"]

_log = structlog.get_logger("varuna")

_MOST_UNCLEAN_ENDS = 5
"""gloo sometimes leaves a thread in a receive whose connection is gone; with it stay some fifteen threads and
descriptors. A new process begins without them."""
_AGREEMENT_SPREAD_S = 1.0
"""An agreement reaches the ranks within milliseconds of one another; on a machine that is too busy, later."""


class StateHolder:
    """This process with what it holds: the state of its stage or, while it moves to another one, that of the stage
    before.
    """

    def __init__(self, parts: TrainingParts) -> None:
        """Offers the worker's `Departure` to stay, if the process may hold its state."""
        self._parts = parts
        self._held: HeldFiles | None = None
        """The state before this process moved to its stage, until all ranks have agreed on a step there."""
        self._unmoved: WorkerEnvironment | None = None
        """Of the rank that it was, while it moves to another stage, or when it could not: it can take no rank."""
        self.is_between_stages = False
        """Whether it has only the state before, and no stage."""
        self._has_left = False
        self._leaving = threading.Lock()
        """Held while it is settled which came first: that this process left, or that it began to move."""
        worker = parts.worker
        if can_hold_state(worker.environment):
            worker.departure.offer_to_stay(self._try_to_stay, self.find_obstacle)
            worker.link.store_on_failure(self._store_after_failure, wait_first=self._await_agreement_elsewhere)

    # Leaving

    def find_obstacle(self) -> str:
        """Why this process cannot go on in the next generation, and only gives its state to it; empty: it can."""
        return self._find_process_obstacle() or self.find_script_obstacle()

    def find_obstacle_in_step(self) -> str:
        """Why this process cannot even end the step under way in the next generation; empty: it can."""
        accumulates = self._parts.updater.accumulation.is_active
        if self._parts.inputs.has_given_up:
            return self.find_obstacle() or "its generation was to end one step only"
        if self._parts.inputs.can_end_step and may_end_step(accumulates=accumulates):
            return self._find_process_obstacle()
        return self.find_obstacle()

    def _find_process_obstacle(self) -> str:
        unclean_ends = self._parts.worker.unclean_ends
        if self._parts.progress.newest_step is None:
            return "it has not begun to train"
        if unclean_ends >= _MOST_UNCLEAN_ENDS:
            return f"connections of {unclean_ends} earlier generations could not be ended in it"
        return ""

    def find_script_obstacle(self) -> str:
        """What the script does that keeps its processes from going on in place; empty: nothing is known."""
        newest, accumulates = self._parts.progress.newest_step, self._parts.updater.accumulation.is_active
        if newest is None:
            return ""
        return describe_script_obstacle(has_own_inputs=newest.batch is None, accumulates=accumulates)

    def _try_to_stay(self, exit_: GenerationEnded | PeerLost) -> bool:
        """Whether this process goes on in the next generation. Any thread calls it when the worker leaves this one."""
        progress, accumulation = self._parts.progress, self._parts.updater.accumulation
        if not progress.is_ready:
            return False
        if reason := self.find_script_obstacle():
            self._parts.worker.link.report_script_obstacle(reason)
        if accumulation.is_pending or progress.is_half_loaded:
            return False
        if progress.other_call is not None and not (progress.can_reevaluate and not self.find_obstacle()):
            _log.info(f"this process ends with its generation: it is in {progress.other_call.name.lower()}()")
            return False
        step = progress.find_committed(progress.newest_step)
        with self._leaving:
            self._has_left, is_moving = True, self._unmoved is not None
        if not is_moving and self._parts.lacks_state and not self._parts.has_late_state:
            _log.info("this new process ends with its generation: it has not got its whole state")
            return False
        obstacle = "it was to take another stage" if is_moving else self.find_obstacle_in_step()
        if obstacle:
            _log.info(f"this process takes no part in the next generation and only gives its state: {obstacle}")
        elif reason:
            _log.info(f"this process can only end the step under way in the next generation: {reason}")
        self._parts.worker.link.report_generation_left(
            int(str(exit_.code)),
            step,
            self._parts.checkpoints.state_bytes,
            gives_only=bool(obstacle),
            # One that was to take another stage has them still, under ranks that the manager knows by its holders.
            copies=[] if is_moving else [(one.inventory.rank, one.inventory.step) for one in self._list_copies()],
        )
        return True

    def prepare_parting(self, share: KeptShare, agreed: AgreedEnd, without_sums: Sequence[range]) -> Callable[[], None]:
        """Copies what this rank leaves to others, if ranks do not go on when all leave in the middle of the step.

        `share`: what `.grad` has of the step. `without_sums`: the sections of each of the first stages that get no
        gradients. What it returns sends the copies, and takes what others leave. What cannot be copied is lost with the
        VM that leaves, as without its notice.
        """
        parts, environment = self._parts, self._parts.worker.environment
        parts.parting = None
        if not agreed.leaving:
            return lambda: None
        sharers = agreed.hosts.count(agreed.hosts[environment.rank])
        parts.parting = parting = Parting(parts.worker, parts.progress.step + 1, agreed.leaving, sharers=sharers)
        try:
            self._fill_parting(parting, share, without_sums)
        except (CheckpointError, RuntimeError, MemoryError) as error:
            _log.warning("this rank cannot leave what it has to others", reason=first_line(error))
        return parting.exchange

    def _fill_parting(self, parting: Parting, share: KeptShare, without_sums: Sequence[range]) -> None:
        parts, environment = self._parts, self._parts.worker.environment
        step, stage = parts.progress.step, parts.assembly.stage
        if parting.loses_rank and share.numbers and stage.sections not in without_sums:
            mark = ShareMark.of_pass(
                share.numbers,
                share.passed,
                generation=environment.generation,
                replica=parts.worker.topology.replica,
                step=step + 1,
                sections=stage.sections,
                micro_batch=share.micro_batch,
                without_sums=without_sums,
            )
            parting.copy_sums(mark, {name: one.grad for name, one in stage.parameters.items() if one.grad is not None})
        if parting.gives_state and parts.can_copy_state:
            state = parts.checkpoints.training_state()
            parting.offer_state(hold_state(state, step, own=environment, published_as=environment.rank))

    def join_next(self, environment: WorkerEnvironment, phases: StartPhases) -> None:
        """Joins the next generation, as `WorkerProcess.join_next`. This process may leave that in the same way.

        With another stage, or with new processes, this process moves from then on until `end_move`: if one does not
        come, the others give what they had before to new ones.
        """
        before = self._parts.worker.environment
        now, then = ((one.plan.p, one.plan.stage_starts, one.rank % one.plan.p) for one in (environment, before))
        with self._leaving:
            self._has_left = False
            if now != then or environment.survivors:
                self._unmoved = before
        self._parts.worker.join_next(environment, phases, self._try_to_stay, self.find_obstacle)

    # Moving to another stage

    @property
    def is_moving(self) -> bool:
        """Whether it has begun a move to another stage that it has not ended, and perhaps cannot end."""
        return self._unmoved is not None

    def begin_move(self, before: WorkerEnvironment) -> None:
        """This process begins to take another stage. `before`: of the rank that it was.

        Raises GenerationEnded, PeerLost when it has left the generation, with its stage, already.
        """
        with self._leaving:
            self._unmoved, has_left = before, self._has_left
        if has_left:
            self._parts.worker.departure.wait_until(lambda: False)

    def release_stage(self, held: HeldFiles | None) -> None:
        """From now on this process has no stage, but `held`, the state of that before."""
        self._held, self.is_between_stages = held, True

    def hold_stage(self) -> None:
        """This process has its stage, though some of its state may be late."""
        self.is_between_stages = False

    def end_move(self) -> None:
        """This process has the whole state of its stage, and keeps that of the stage before until `drop_state_before`.

        If it has left the generation before, it was still moving. From any thread.
        """
        with self._leaving:
            if not self._has_left:
                self._unmoved = None

    def drop_state_before(self) -> None:
        """The state before a move is of no use: all ranks have agreed on a step, or leave with their stages."""
        self._held = None

    # Giving

    def give_state(self, command: GiveCommand | StoreCommand) -> None:
        """Gives the state to new processes, or leaves it to them in memory, and ends this process.

        After a move, until a step is agreed on: it gives the states of both stages, and leaves that of the one before.
        """
        self._give(command, self._parts.progress.step, self._held)

    def give_copies(self, command: GiveCommand | StoreCommand) -> None:
        """Gives only what this process has copied of the states after earlier steps, as `give_state`; returns if that
        is nothing, or not known under its present rank."""
        rank = self._parts.worker.environment.rank
        own = [held for held in self._list_copies() if held.inventory.rank == rank]
        if own:
            newest = max(own, key=lambda held: held.inventory.step)
            self._give(command, newest.inventory.step, newest)

    def _give(self, command: GiveCommand | StoreCommand, step: int, held: HeldFiles | None) -> None:
        """`held`: what it gives; None: the state."""
        state, worker = self._parts.checkpoints.training_state(), self._parts.worker
        if isinstance(command, GiveCommand):
            given = self._give_until_taken(command, state, step, held)
            held = held or given
        own = self._unmoved or worker.environment
        leave_in_memory(state, step, own=own, published_as=worker.environment, held=held)
        end_process(EXIT_GENERATION_ENDED)

    def _give_until_taken(
        self, command: GiveCommand, state: TrainingState, step: int, held: HeldFiles | None
    ) -> HeldFiles:
        worker = self._parts.worker
        copies = [copy for copy in self._list_copies() if held is None or copy.files is not held.files]
        if held is not None and held is self._held and self._has_whole_stage:
            # Who is left may lack some of the stages before, or of the present ones: the others need either.
            own = worker.environment
            try:
                present = hold_state(state, step, own=own, published_as=own.rank)
            except (CheckpointError, RuntimeError, MemoryError) as error:
                _log.warning("this process gives only the stage that it had before", reason=first_line(error))
            else:
                copies.append(self._publish_apart(held))
                held = present
        return give_until_taken(
            state,
            step,
            own=self._unmoved or worker.environment,
            published_as=worker.environment.rank,
            command=command,
            link=worker.link,
            held=held,
            copies=copies,
        )

    @property
    def _has_whole_stage(self) -> bool:
        """Whether this process is in no move, and has all of its stage's state."""
        return self._unmoved is None and not self.is_between_stages and not self._parts.lacks_state

    def _await_agreement_elsewhere(self) -> None:
        """The script has raised an exception: gives the other ranks time to receive the newest agreement.

        One that leaves before has the state of the step before, and no new process can begin with that and this
        rank's.
        """
        departure = self._parts.worker.departure
        if self._parts.progress.committed_totals is not None and self._parts.worker.environment.world_size > 1:
            with departure.condition:
                departure.condition.wait_for(lambda: departure.exit_code is not None, _AGREEMENT_SPREAD_S)

    def _store_after_failure(self) -> None:
        """The script has raised an exception: leaves the state in memory if it is that after a step, for a script that
        begins with the next one."""
        parts, progress = self._parts, self._parts.progress
        step, environment = progress.newest_step, parts.worker.environment
        if step is None or parts.worker.departure.exit_code is not None:
            return
        if progress.is_broken:
            is_whole = step.totals is None  # no update has begun
        else:
            is_whole = parts.habits.is_between_steps(parts.updater.optimizers, parts.checkpoints.registered)
        is_whole &= not (progress.has_call_failed or progress.is_half_loaded or parts.updater.accumulation.is_pending)
        is_whole &= self._held is None and self._has_whole_stage
        if not is_whole or not are_finite(parts.parameters.values()):
            _log.warning("the script failed where its state is of no use to another process")
            return
        leave_in_memory(parts.checkpoints.training_state(), progress.step, own=environment, published_as=environment)

    def list_copies_of_others(self, step: int) -> list[HeldFiles]:
        """The copies of other ranks' states after `step` steps."""
        states = self._parts.copies
        own_rank = None if states is None else states.rank
        return [
            self._publish_copy(held)
            for held in self._list_kept()
            if held.inventory.step == step and held.inventory.receipt.rank != own_rank
        ]

    def _list_copies(self) -> list[HeldFiles]:
        """The copies of states that this process has, of its own and of others'."""
        return [self._publish_copy(held) for held in self._list_kept()]

    def _list_kept(self) -> list[HeldFiles]:
        """The copies as they were made, in the newest generation here whose ranks have all connected."""
        states, parting = self._parts.copies, self._parts.parting
        return [
            *([] if states is None else states.list_copies()),
            *([] if parting is None else parting.list_copies()),
        ]

    def _publish_copy(self, held: HeldFiles) -> HeldFiles:
        """As one of the generation of which this process gives its own state: those between had the same stages, but
        perhaps fewer replicas.

        While it moves, copies are offered under ranks that no process has, because those of their owners are other
        processes' now.
        """
        states, present, inventory = self._parts.copies, self._parts.worker.environment, held.inventory
        own = self._unmoved or present
        if inventory.receipt.generation != own.generation:
            change = {"generation": own.generation, "world_size": own.world_size}
            is_own = states is not None and inventory.receipt.rank == states.rank
            inventory = inventory.model_copy(
                update={
                    "receipt": inventory.receipt.model_copy(update=change),
                    "p": own.plan.p,
                    "d": own.plan.d,
                    "published_as": present.rank if is_own else None,
                }
            )
            held = replace(held, inventory=inventory)
        return held if self._unmoved is None else self._publish_apart(held)

    def _publish_apart(self, held: HeldFiles) -> HeldFiles:
        """Under a rank that no process has."""
        rank = self._parts.worker.environment.world_size + held.inventory.receipt.rank
        return replace(held, inventory=held.inventory.model_copy(update={"published_as": rank}))
