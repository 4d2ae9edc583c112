"""Going on with another stage in the same process, or with new processes beside it.

The ranks give one another the sections that they lack (`varuna.holdings.exchange`). Until all have theirs, and have
agreed on the next step, each keeps the state of the stage that it had, so that a loss in between costs no step. In the
middle of a step, sums of gradients and what only its update reads come while the passes run
(`varuna.roles.late_state`).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from varuna.assembly.assembly import stages_of
from varuna.checkpoint import CheckpointError, LoadedCheckpoint, TrainingState
from varuna.checkpoint.format.manifest import FileEntry
from varuna.checkpoint.loading.loader import StagedCheckpoint, list_for_update
from varuna.checkpoint.loading.reader import FileContent
from varuna.copies.ahead_taker import AheadTaker
from varuna.diagnostics.error_text import first_line
from varuna.distributed.handshake import MeetingKey
from varuna.holdings.exchange import MoveObstacle, StateExchange, describe_fault
from varuna.holdings.inventory import HeldFile, HeldFiles
from varuna.optim.awaited_state import AwaitedStates
from varuna.optim.host_parameters import is_own_hook
from varuna.optim.optimizers import allow_empty_stages, find_foreign_state, replace_parameters
from varuna.optim.split_check import check_splittable
from varuna.partition import ModelMap, Stage, recut_stage
from varuna.partition.stages.recutting import list_lost_writes
from varuna.roles.giving import hold_state
from varuna.roles.moved_sums import SumsPlan, add_sums, pack_sums, split_sums
from varuna.roles.training_parts import TrainingParts
from varuna.worker.worker import WorkerProcess
from varuna_proto.environment import WorkerEnvironment

__all__ = ["NewcomerMove", "StageMove", "find_stage_obstacle"]

_NAMED = 3
"""The most names in a reason."""


def find_stage_obstacle(parts: TrainingParts, stage: Stage) -> str:
    """What the script does that keeps its processes from taking other stages; empty: nothing is known."""
    for optimizer in parts.updater.optimizers:
        if kept := find_foreign_state(optimizer):
            return f"{type(optimizer).__name__} keeps {kept}; state by parameter can move"
    for name, parameter in [*stage.parameters.items(), *parts.swap.parameters.items()]:
        if any(not is_own_hook(hook) for hook in (parameter._backward_hooks or {}).values()):
            return f"{name} has a gradient hook of the script"
    return ""


class _Move:
    """What is the same for all: some of the state may be fetched and filled later."""

    def __init__(self, worker: WorkerProcess, ahead: AheadTaker | None, series: int | None = None) -> None:
        """`ahead`: what has come of the state before. `series`: of what this rank has sent ahead; None: it has no
        state."""
        self._worker = worker
        self._exchange = StateExchange(
            lambda name, own: worker.rendezvous.exchange_values(name, worker.topology.everyone, own),
            key=MeetingKey.from_environment(worker.environment),
            rank=worker.environment.rank,
            host=worker.rendezvous.own_address(),
            series=series,
            list_ahead=(lambda generation, step, of_series: ()) if ahead is None else ahead.list_states,
        )
        self._staged: StagedCheckpoint | None = None
        """What this rank lacks for the update; None: nothing."""

    def _fill_values(self, staged: StagedCheckpoint, *, for_passes: bool) -> None:
        """Fills what was staged, with `for_passes` only what passes read."""
        staged.fill_values()
        if for_passes:
            self._staged = staged
        else:
            staged.fill_for_update(staged.read_for_update())

    @property
    def lacks_state(self) -> bool:
        """Whether `read_for_update` has not been called, or what it has returned has not been filled."""
        return self._staged is not None

    @property
    def bytes_for_update(self) -> int:
        """Of the files that `read_for_update` fetches."""
        staged = self._staged
        return 0 if staged is None else self._exchange.count_peer_bytes(list_for_update(staged.manifest, staged.state))

    def read_for_update(self) -> list[tuple[FileEntry, FileContent]]:
        """What this rank lacks for the update, in host memory. From one thread, when it has been staged. Raises
        CheckpointError."""
        return [] if self._staged is None else list(self._staged.read_for_update())

    def fill_for_update(self, files: Sequence[tuple[FileEntry, FileContent]]) -> None:
        """Fills what `read_for_update` has returned."""
        if self._staged is not None:
            self._staged.fill_for_update(files)
        self._staged = None  # nobody may keep parameters: the next move would take it for the script

    def close(self) -> None:
        """Ends the connections of the exchange."""
        self._exchange.close()


class StageMove(_Move):
    """One rank's move to another stage. All ranks make one, and call its methods in the same order."""

    def __init__(self, parts: TrainingParts) -> None:
        """`parts`: of a worker that is in the generation whose ranks move."""
        ahead = parts.ahead
        super().__init__(
            parts.worker, None if ahead is None else ahead.taker, series=0 if ahead is None else ahead.series
        )
        self._parts = parts
        self._before: dict[str, nn.Parameter] = {}
        """The parameters that the script had, by name."""
        self._own_sums: list[dict[str, Tensor]] = []
        """The sums of gradients that stay with this rank, each by first name of the parameter."""

    @property
    def peer_bytes(self) -> int:
        """What has come from other ranks."""
        return self._exchange.peer_bytes

    def share_state(
        self,
        stage: Stage,
        step: int,
        before: WorkerEnvironment,
        *,
        copies: Sequence[HeldFiles] = (),
        sums: SumsPlan | None = None,
        lent: Mapping[int, Mapping[str, Tensor]] | None = None,
    ) -> tuple[HeldFiles | None, MoveObstacle | None]:
        """Offers what this rank, with `stage`, holds after `step` steps. Nothing changes.

        `before`: of the rank that this process was. `copies`: of other ranks' states. `sums`: where the sums of the
        step under way go that count; None: nowhere. `lent`: the copies of other stages' sums that count, by their
        numbers. Returns what it holds, and why the ranks cannot move; None: they can.
        """
        state = self._parts.checkpoints.training_state()
        held: HeldFiles | None = None
        obstacle = find_stage_obstacle(self._parts, stage)
        beside: dict[int, HeldFile] = {}
        try:
            if not obstacle:
                self._check_optimizers()
                held = hold_state(state, step, own=before, published_as=self._worker.environment.rank)
                beside = self._offer_sums(stage, sums, lent or {})
        except (CheckpointError, ValueError) as error:
            obstacle = str(error)
        own = MoveObstacle(obstacle) if obstacle else None
        return held, self._exchange.share_inventories(held, own, beside, copies)

    def _offer_sums(
        self, stage: Stage, plan: SumsPlan | None, lent: Mapping[int, Mapping[str, Tensor]]
    ) -> dict[int, HeldFile]:
        """Keeps the sums that stay with this rank, and returns the others, by the rank that gets them."""
        rank, parts = self._worker.environment.rank, self._parts
        own = {name: one.grad for name, one in stage.parameters.items() if one.grad is not None}
        given: dict[int, dict[str, Tensor]] = {}
        for number, sums in {rank: own, **lent}.items():
            if plan is None or number not in plan.replica_of:
                continue
            split = split_sums(
                sums, rank=rank, replica=plan.replica_of[number], model_map=parts.model_map, stages=parts.stages
            )
            # Copies are added as copies: they may be needed again.
            keeps = {name: sums[name].clone() if number in lent else sums[name] for name in split.pop(rank, ())}
            self._own_sums.append(keeps)
            for to, names in split.items():
                _join_sums(given.setdefault(to, {}), {name: sums[name] for name in names})
        return pack_sums(given)

    def _check_optimizers(self) -> None:
        environment, parts = self._worker.environment, self._parts
        sections = parts.checkpoints.held.section_count
        for optimizer in parts.updater.optimizers:
            check_splittable(optimizer, environment, sections)

    def take_stage(
        self, before: Stage, model_map: ModelMap, *, for_passes: bool, without_sums: bool
    ) -> tuple[Stage | None, MoveObstacle | None]:
        """Makes another stage of `before`, which nothing may use now, and fills it.

        `for_passes`: only with what passes read; `read_for_update` and `fill_for_update` follow. `without_sums`: those
        of other ranks do not come yet, but with `read_sums`. Returns it when all ranks have theirs, or else the
        obstacle. Then nothing of either stage is of use here, but what `share_state` has returned.
        """
        taken: Stage | None = None
        state: TrainingState | None = None
        left: list[tuple[str, weakref.ref[Tensor]]] = []
        own: MoveObstacle | None = None
        try:
            taken, state, left = self._recut(before, model_map)
        except Exception as error:  # the script's classes may raise anything, and memory may be short
            own = MoveObstacle(first_line(error) or type(error).__name__)
        del before
        staged, obstacle = self._exchange.stage_state(state, own)
        if staged is not None:
            try:
                if kept := self._fill(staged, left, for_passes=for_passes):
                    obstacle = MoveObstacle(kept)
                else:
                    self._add_sums(taken, without_others=without_sums)
            except Exception as error:
                obstacle = describe_fault(error)
        obstacle = self._exchange.agree(obstacle)
        return (None, obstacle) if obstacle else (taken, None)

    def read_sums(self) -> list[dict[str, Tensor]]:
        """The sums of gradients that this rank gets from others, each by first name of the parameter. After the stage
        has been staged. Raises HolderError."""
        return list(self._exchange.take_beside())

    def keep_stage(self) -> MoveObstacle | None:
        """As `take_stage`, where this rank and all that were there before keep their stages, and new ones take theirs.

        Returns why these cannot; None: they have.
        """
        _, obstacle = self._exchange.stage_state(None, None)
        return self._exchange.agree(obstacle)

    def _recut(
        self, before: Stage, model_map: ModelMap
    ) -> tuple[Stage, TrainingState, list[tuple[str, weakref.ref[Tensor]]]]:
        """The new stage, the part of its state that this process lacks, and the tensors that it has no use for."""
        worker, parts = self._worker, self._parts
        updater, checkpoints = parts.updater, parts.checkpoints
        host, average = updater.host, updater.average
        had = set(checkpoints.held.tensors)
        self._before = parts.swap.parameters
        stages = stages_of(worker, len(model_map.sections))
        for parameter in before.parameters.values():
            parameter.grad = None
        lost_writes = list_lost_writes(parts.swap.module)
        parts.swap.hold_pass_tensors()
        stage = recut_stage(
            before,
            parts.retracer.skeleton,
            model_map,
            stages[worker.topology.stage],
            wrapped_map=parts.wrapped_map,
            trains=parts.changes.trains,
            lost_writes=lost_writes,
        )
        if worker.topology.p > 1:
            allow_empty_stages(self._optimizer_device)
        if host is not None:
            host.follow_stage(stage.parameters)
        parameters = stage.parameters if host is None else host.parameters
        if average is not None:
            average.follow_stage(parameters)
        updater.follow_stage(stage.parameters, parameters)
        left = parts.swap.follow_stage(stage, parameters)
        parts.changes.follow_stage(stage.parameters, parameters)
        parts.retracer.follow_stages(stages)
        checkpoints.follow_stage(stage)
        checkpoints.hold_stage(model_map)
        state = checkpoints.training_state()
        lacking = replace(
            state,
            parameters={name: x for name, x in state.parameters.items() if name not in had},
            buffers={name: x for name, x in state.buffers.items() if name not in had},
            averages={name: x for name, x in state.averages.items() if name not in had},
        )
        return stage, lacking, left

    def _fill(
        self, staged: StagedCheckpoint, left: Iterable[tuple[str, weakref.ref[Tensor]]], *, for_passes: bool
    ) -> str:
        """Gives the optimizers the new stage's parameters, and fills what is lacking, with `for_passes` only what
        passes read; returns why that cannot be."""
        parts = self._parts
        updater = parts.updater
        members = staged.loaded.options.find_members(updater.optimizers)
        replace_parameters(updater.optimizers, members, self._before, parts.swap.parameters, self._optimizer_device)
        self._before = {}
        if kept := _find_kept(left):
            more = f" and {len(kept) - _NAMED} more" if len(kept) > _NAMED else ""
            return (
                f"the script or a module keeps {', '.join(kept[:_NAMED])}{more} in variables of its own; without them, "
                "model.named_parameters() gives the present ones"
            )
        self._fill_values(staged, for_passes=for_passes)
        return ""

    def _add_sums(self, stage: Stage | None, *, without_others: bool) -> None:
        """Gives the new stage's parameters the sums that stay with this rank, and those that it gets."""
        assert stage is not None, "its state was staged"
        for sums in (*self._own_sums, *(() if without_others else self.read_sums())):
            add_sums(stage.parameters, sums)
        self._own_sums = []

    @property
    def _optimizer_device(self) -> torch.device:
        return self._parts.device if self._parts.updater.host is None else torch.device("cpu")


class NewcomerMove(_Move):
    """A new process's part where the others make a `StageMove`."""

    def __init__(self, worker: WorkerProcess, ahead: AheadTaker) -> None:
        """`ahead`: what has come of the state before."""
        super().__init__(worker, ahead)
        self._awaited: AwaitedStates | None = None
        """What the script finds in the place of its optimizers' states that are late."""
        self._sums: list[dict[str, Tensor]] | None = None
        """Of the step under way, each of another rank; None: they have not been read."""

    def take_state(
        self, state: TrainingState, *, for_passes: bool, without_sums: bool
    ) -> tuple[LoadedCheckpoint | None, MoveObstacle | None]:
        """Fills `state` with what the others hold. Returns what was loaded, or None and the obstacle, which all ranks
        get. `for_passes`, `without_sums`: as of `StageMove.take_stage`."""
        obstacle = self._exchange.share_inventories(None, None)
        if obstacle:
            return None, obstacle
        loaded: LoadedCheckpoint | None = None
        staged, obstacle = self._exchange.stage_state(state, None)
        if staged is not None:
            try:
                self._fill_values(staged, for_passes=for_passes)
                loaded = staged.count_loaded()
                if not without_sums:
                    self.read_sums()
            except (CheckpointError, OSError, ValueError) as error:
                obstacle = describe_fault(error)
        obstacle = self._exchange.agree(obstacle)
        return (None, obstacle) if obstacle else (loaded, None)

    def hide_late_state(self, wait: Callable[[], None]) -> None:
        """From now on the script waits where it looks into an optimizer's state that is late. `wait`: returns when that
        has been filled."""
        if self._staged is not None:
            self._awaited = AwaitedStates(self._staged.state.optimizers, wait)

    def fill_for_update(self, files: Sequence[tuple[FileEntry, FileContent]]) -> None:
        if self._awaited is not None:
            self._awaited.release()
            self._awaited = None
        super().fill_for_update(files)

    def read_sums(self) -> list[dict[str, Tensor]]:
        """As of `StageMove`."""
        if self._sums is None:
            self._sums = list(self._exchange.take_beside())
        return self._sums


def _join_sums(into: dict[str, Tensor], sums: Mapping[str, Tensor]) -> None:
    """Adds sums for the same rank. Two have one parameter in common if their stages are tied by it."""
    for name, tensor in sums.items():
        into[name] = into[name] + tensor.to(into[name].device) if name in into else tensor


def _find_kept(left: Iterable[tuple[str, weakref.ref[Tensor]]]) -> list[str]:
    """The names of tensors that somebody keeps, though nothing trains them any longer."""
    left = list(left)
    if any(reference() is not None for _, reference in left):
        gc.collect()  # exceptions of the ended generation may hold frames in cycles
    return list(dict.fromkeys(name for name, reference in left if reference() is not None))
