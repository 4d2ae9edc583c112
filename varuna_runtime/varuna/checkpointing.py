"""A worker's checkpoints: those that the script asks for, the job's own, and going on from one."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

import structlog
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from varuna.checkpoint import (
    Asked,
    Cadence,
    Checkpointer,
    CheckpointError,
    Loaded,
    Per,
    Place,
    TrainingState,
    load,
    on_one_disk,
    resume,
)
from varuna.checkpoint.store import CheckpointStore
from varuna.departure import PeerLost
from varuna.error_text import first_line
from varuna.failed_saves import FailedSaves
from varuna.launch import Group
from varuna.partition import Stage
from varuna.partition.model_map import ModelMap, first_names
from varuna.saves import AutomaticSaves, wait_for_save
from varuna.worker import Worker

__all__ = ["Checkpointing", "Registered", "Stateful", "held_state", "state_dict_names"]

_log = structlog.get_logger("varuna")

_LOAD_LIMIT = timedelta(minutes=30)
"""How long ranks wait for each other while they load a checkpoint."""

_LOOK_UP_S = 0.1
"""How often the wait at the script's end looks whether the worker must leave."""


class Stateful(Protocol):
    """What `Varuna.register_state` takes: a scheduler, a sampler, ..."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class Registered:
    """The script's own states, by name; each may be registered before or after a checkpoint is loaded."""

    def __init__(self) -> None:
        self._registered: dict[str, Stateful] = {}
        self._per: dict[str, Per] = {}
        self._unclaimed: dict[str, dict[str, Any]] = {}
        self._loaded: Loaded | None = None

    def add(self, name: str, state: Stateful, *, per: Per = Per.AUTO, replace: bool = False) -> None:
        """Raises ValueError for a name taken, unless `replace`; CheckpointError when what was loaded cannot be its."""
        if name in self._registered and not replace:
            raise ValueError(f"a state named {name!r} is registered already: give each its own name")
        self._registered[name] = state
        # What a scheduler keeps for each parameter group is saved with the groups; the rest is the same on all ranks.
        self._per[name] = Per.JOB if per is Per.AUTO and isinstance(state, LRScheduler) else per
        if name in self._unclaimed:  # registered after the checkpoint was loaded
            self._give(name, state)

    def schedulers(self) -> dict[str, LRScheduler]:
        """Those of the states that belong to parameter groups."""
        return {name: state for name, state in self._registered.items() if isinstance(state, LRScheduler)}

    def _give(self, name: str, state: Stateful) -> None:
        """Loads what the checkpoint has of this name. Raises CheckpointError when that is another rank's."""
        loaded = self._loaded
        if loaded is not None and name in loaded.rank_0s and self._per[name] is not Per.JOB:
            raise CheckpointError(
                f"the checkpoint of step {loaded.step} has the registered state {name!r} of each rank of a "
                f"{loaded.p}x{loaded.d} shape (P x D), and they differ: none is known to be this rank's in another "
                "shape. Go on in that shape; or register the state with per='job', and all ranks get rank 0's. States "
                "whose entries are keyed by names of parameters go into any shape"
            )
        saved = self._unclaimed.pop(name)
        if loaded is not None and isinstance(state, LRScheduler):
            saved = loaded.scheduler_state(name, state, saved)
        state.load_state_dict(saved)

    @property
    def per(self) -> dict[str, Per]:
        return dict(self._per)

    def states(self) -> dict[str, dict[str, Any]]:
        return {name: state.state_dict() for name, state in self._registered.items()}

    def load(self, loaded: Loaded) -> None:
        """Gives every state its own from a checkpoint; what no name claims is kept for later."""
        self._loaded, self._unclaimed = loaded, dict(loaded.user)
        for name, state in self._registered.items():
            if name in self._unclaimed:
                self._give(name, state)
            else:
                _log.warning("the checkpoint has no state of this name", name=name, step=loaded.step)


def state_dict_names(model: nn.Module, model_map: ModelMap) -> dict[str, str]:
    """Every tensor's name in `model.state_dict()`, with its first name, which is the one that it is stored under."""
    buffer_names, _ = first_names(model.named_buffers(remove_duplicate=False))
    first_name = {**model_map.first_name, **buffer_names}
    state = model.state_dict(keep_vars=True)
    return {name: first_name.get(name, name) for name, value in state.items() if isinstance(value, Tensor)}


def held_state(
    model_map: ModelMap,
    stage: Stage,
    parameters: Mapping[str, nn.Parameter],
    state_dict: Mapping[str, str],
    place: Place = Place(),  # noqa: B008  # frozen
) -> TrainingState:
    """What this rank has for checkpoints, without what changes its identity in training: optimizer, user states, seed.

    `parameters`: those that the optimizer steps. `state_dict`: the `state_dict_names` of the whole model.
    """
    kept = {*model_map.graph.buffers_changed, *state_dict.values()}
    section_of = {name: model_map.sections_of(name)[0] for name in parameters}
    for section in reversed(model_map.sections):
        section_of |= dict.fromkeys(section.buffers, section.index)
    return TrainingState(
        sections=stage.sections,
        section_count=len(model_map.sections),
        parameters=parameters,
        section_of=section_of,
        buffers={name: buffer for name, buffer in stage.buffers.items() if name in kept},
        tied=model_map.shared,
        state_dict=state_dict,
        place=place,
    )


class Checkpointing:
    """Saves and loads this rank's part, together with the other ranks."""

    def __init__(self, worker: Worker, everyone: Group) -> None:
        self._worker = worker
        self._everyone = everyone
        self._checkpointers: dict[str, Checkpointer] = {}
        self._failed = FailedSaves(worker, everyone)
        environment = worker.environment
        own: Checkpointer | None = None
        if url := environment.checkpoint_url:
            own = self._checkpointer(url, local=_worth_copying(url, environment.local_checkpoint_dir))
        cadence = Cadence(
            stops_per_hour=environment.stops_per_hour, pinned_interval_s=environment.checkpoint_interval_s or None
        )
        self.automatic = AutomaticSaves(own, worker.departure, decides=environment.rank == 0, cadence=cadence)
        """The checkpoints that nobody asks for."""
        atexit.register(self._finish)

    def save(
        self,
        url: str,
        step: int,
        state: TrainingState,
        *,
        asked: Asked,
        tmpdir: str | None = None,
        in_background: bool = False,
    ) -> None:
        """Writes a checkpoint into `url`, and its copies into `tmpdir` (None: where the job's own have theirs).

        Returns when all ranks have written it; `in_background`: as soon as `state` may change again.
        Raises CheckpointError on all ranks when any of them could not write, or could not at the last `in_background`.
        """
        checkpointer = self._checkpointer(url)
        local = None if tmpdir is None else _worth_copying(url, tmpdir)
        self._failed.check_background()
        wait_for_save(checkpointer, self._worker.departure)
        checkpointer.save(step, state, local=local, asked=asked)
        if in_background:
            self._failed.expect(checkpointer)
        else:
            # Rank 0 commits last, so when this has agreed, the checkpoint is there for everybody.
            self._failed.check(checkpointer)

    def load(self, url: str, step: int, state: TrainingState) -> Loaded:
        """Fills `state` from the checkpoint of `step` in `url`. Raises CheckpointError when it cannot be read."""
        return load(url, step, state)

    def resume(self, state: TrainingState, *, allow_fresh_start: bool = False) -> Loaded | None:
        """Fills `state` from the job's newest checkpoint that all ranks can read; None when there is none.

        Raises PeerLost when another rank went away meanwhile, CheckpointError as `varuna.checkpoint.resume` does.
        """
        environment, rendezvous, departure = self._worker.environment, self._worker.rendezvous, self._worker.departure
        if not environment.checkpoint_url:
            return None
        rendezvous.store.set_timeout(_LOAD_LIMIT)
        try:
            return resume(
                environment.checkpoint_url,
                state,
                store=rendezvous.store,
                rank=environment.rank,
                world_size=environment.world_size,
                committed_step=environment.committed_step,
                allow_fresh_start=allow_fresh_start,
                report=lambda step, fault: _log.warning("checkpoint passed over", step=step, fault=fault),
            )
        except torch.distributed.DistError as error:
            departure.leave(PeerLost(f"while resuming: {first_line(error)}"))
            departure.check()
            raise

    def _checkpointer(self, url: str, local: str = "") -> Checkpointer:
        url = CheckpointStore(url).url  # one store has one, however the script spells it
        if url not in self._checkpointers:
            environment = self._worker.environment
            self._checkpointers[url] = Checkpointer(
                url,
                generation=environment.generation,
                rank=environment.rank,
                p=environment.p,
                d=environment.d,
                local=local,
                on_committed=self._worker.link.checkpoint_done,
            )
        return self._checkpointers[url]

    def _finish(self) -> None:
        """At the end of the script: waits for saves that are still being written, unless the worker was to leave."""
        for checkpointer in self._checkpointers.values():
            while self._worker.departure.exit_code is None and checkpointer.in_flight:
                checkpointer.wait(_LOOK_UP_S)
        if self._worker.departure.exit_code is None:
            self._failed.end_script()


def _worth_copying(url: str, folder: str) -> str:
    """`folder`, or "" when the store at `url` is on its disk: the second of two writes there would gain nothing."""
    if not folder or on_one_disk(url, folder):
        return ""
    return folder
