"""A worker's checkpoints: those that the script requests, the job's automatic ones, and resuming from one."""

from __future__ import annotations

import atexit

import structlog
import torch

from varuna.checkpoint import (
    CheckpointRequest,
    CheckpointWriter,
    LoadedCheckpoint,
    ShapePosition,
    TrainingState,
    load_checkpoint,
    on_one_disk,
    resume_checkpoint,
)
from varuna.checkpoint.loading.resuming import HeldStateSource
from varuna.checkpoint.saving.automatic import AutomaticCheckpoints, wait_for_save
from varuna.checkpoint.saving.failures import SaveFailures
from varuna.checkpoint.saving.later import LaterCheckpoints
from varuna.checkpoint.storage.store import CheckpointStore
from varuna.diagnostics.error_text import first_line
from varuna.distributed.departure import PeerLost
from varuna.distributed.groups import RankGroup
from varuna.worker.worker import WorkerProcess
from varuna_planner.liveput.checkpoint_interval import Cadence

__all__ = ["WorkerCheckpoints"]

_log = structlog.get_logger("varuna")

_LOOK_UP_S = 0.1
"""How often the wait at the script's end checks whether the worker must leave."""


class WorkerCheckpoints:
    """Saves and loads this rank's part, together with the other ranks."""

    def __init__(self, worker: WorkerProcess, everyone: RankGroup, before: WorkerCheckpoints | None = None) -> None:
        """`before`: of this process in the generation before; None: it is new."""
        self._worker = worker
        self._everyone = everyone
        self._writers: dict[str, CheckpointWriter] = {}
        self._failed = SaveFailures(worker, everyone)
        environment = worker.environment
        own: CheckpointWriter | None = None
        self._copy_folder: str = "" if before is None else before._copy_folder
        """For copies of the automatic checkpoints' files; it stays as long as the process."""
        if url := environment.checkpoint_url:
            if before is None:
                self._copy_folder = _choose_copy_folder(url, environment.local_checkpoint_dir)
            own = self._open_writer(url, local=self._copy_folder)
        self._own = own
        cadence = Cadence(
            stops_per_hour=environment.stops_per_hour,
            uncopied_stops_per_hour=environment.stops_without_copies_per_hour,
            pinned_interval_s=environment.checkpoint_interval_s or None,
        )
        self.automatic: AutomaticCheckpoints = AutomaticCheckpoints(
            own,
            worker.departure,
            decides=environment.rank == 0,
            cadence=cadence,
            committed_step=environment.committed_step,
            before=None if before is None else before.automatic,
        )
        """The automatic checkpoints."""
        self.later: LaterCheckpoints = LaterCheckpoints(worker, None if before is None else before.later)
        """The job's checkpoints of later steps than that from which training goes on."""
        atexit.register(self._finish)

    def save_checkpoint(
        self,
        url: str,
        step: int,
        state: TrainingState,
        *,
        request: CheckpointRequest,
        tmpdir: str | None = None,
        in_background: bool = False,
    ) -> None:
        """Writes a checkpoint into `url`, and its copies into `tmpdir` (None: where automatic ones have theirs).

        Returns when all ranks have written it, or with `in_background` as soon as `state` may change again.
        Raises CheckpointError on all ranks when one of them failed to write this one, or the last one `in_background`.
        """
        writer = self._open_writer(url)
        local = None if tmpdir is None else _choose_copy_folder(url, tmpdir)
        self._failed.check_background()
        wait_for_save(writer, self._worker.departure)
        writer.start_save(step, state, local=local, request=request)
        if in_background:
            self._failed.watch_save(writer)
        else:
            # Rank 0 commits last, so once the ranks agree here, the checkpoint is there for all.
            self._failed.check_save(writer)

    def load_checkpoint(self, url: str, step: int, state: TrainingState) -> LoadedCheckpoint:
        """Fills `state` from the checkpoint of `step` in `url`. Raises CheckpointError when it cannot be read."""
        loaded = load_checkpoint(url, step, state)
        self.later.note_load(url, loaded.step)
        return loaded

    def finish_own_save(self) -> None:
        """Waits until this rank's save into the job's store has ended. Raises what makes the worker leave."""
        if self._own is not None:
            wait_for_save(self._own, self._worker.departure)

    def resume_newest(
        self, state: TrainingState, *, memory: HeldStateSource | None, allow_fresh_start: bool = False
    ) -> LoadedCheckpoint | None:
        """Fills `state` from `memory`, or from the job's newest checkpoint that all ranks can read; None when there is
        neither.

        Raises PeerLost when another rank is lost meanwhile, CheckpointError as `resume_checkpoint` does.
        """
        environment, rendezvous, departure = self._worker.environment, self._worker.rendezvous, self._worker.departure
        if not environment.checkpoint_url and memory is None:
            return None
        self.finish_own_save()
        try:
            loaded = resume_checkpoint(
                environment.checkpoint_url,
                state,
                store=rendezvous.store,
                rank=environment.rank,
                world_size=environment.world_size,
                committed_step=environment.committed_step,
                allow_fresh_start=allow_fresh_start,
                report=lambda step, fault: _log.warning("checkpoint passed over", step=step, fault=fault),
                memory=memory,
            )
        except torch.distributed.DistError as error:
            departure.leave_generation(PeerLost(f"while resuming: {first_line(error)}"))
            departure.raise_if_leaving()
            raise
        self.later.note_resume(0 if loaded is None else loaded.step)
        return loaded

    def abandon_saves(self) -> None:
        """Ends this rank's part for a process that goes on in another generation. Saves under way are not waited for:
        their files are written, and those that lack another rank's part are never committed."""
        atexit.unregister(self._finish)
        for writer in self._writers.values():
            writer.abandon()

    def _open_writer(self, url: str, local: str = "") -> CheckpointWriter:
        url = CheckpointStore(url).url  # one writer for a store, however the script spells its URL
        if url not in self._writers:
            environment = self._worker.environment
            self._writers[url] = CheckpointWriter(
                url,
                generation=environment.generation,
                position=ShapePosition(rank=environment.rank, p=environment.plan.p, d=environment.plan.d),
                local=local,
                on_committed=self._worker.link.report_checkpoint,
            )
        return self._writers[url]

    def _finish(self) -> None:
        """At the end of the script: waits for saves that are still being written, unless the worker leaves."""
        for writer in self._writers.values():
            while self._worker.departure.exit_code is None and writer.in_flight:
                writer.wait(_LOOK_UP_S)
        if self._worker.departure.exit_code is None:
            self._failed.end_script()


def _choose_copy_folder(url: str, folder: str) -> str:
    """`folder`, or "" when the store at `url` is on the same disk, where a second write would gain nothing."""
    if not folder or on_one_disk(url, folder):
        return ""
    return folder
