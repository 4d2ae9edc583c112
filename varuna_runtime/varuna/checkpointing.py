"""A worker's checkpoints: those that the script asks for, the job's own, and going on from one."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

import structlog
import torch
from torch import Tensor, nn

from varuna.agreement import Totals, agree
from varuna.checkpoint import Cadence, Checkpointer, Loaded, TrainingState, load, on_one_disk, resume
from varuna.departure import PeerLost
from varuna.error_text import first_line
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
        self._unclaimed: dict[str, dict[str, Any]] = {}

    def add(self, name: str, state: Stateful, *, replace: bool = False) -> None:
        """Raises ValueError for a name taken, unless `replace`."""
        if name in self._registered and not replace:
            raise ValueError(f"a state named {name!r} is registered already: give each its own name")
        self._registered[name] = state
        if name in self._unclaimed:  # registered after the checkpoint was loaded
            state.load_state_dict(self._unclaimed.pop(name))

    def states(self) -> dict[str, dict[str, Any]]:
        return {name: state.state_dict() for name, state in self._registered.items()}

    def load(self, loaded: Loaded) -> None:
        """Gives every state its own from a checkpoint; what no name claims is kept for later."""
        self._unclaimed = dict(loaded.user)
        for name, state in self._registered.items():
            if name in self._unclaimed:
                state.load_state_dict(self._unclaimed.pop(name))
            else:
                _log.warning("the checkpoint has no state of this name", name=name, step=loaded.step)


def state_dict_names(model: nn.Module, model_map: ModelMap) -> dict[str, str]:
    """Every tensor's name in `model.state_dict()`, with its first name, which is the one that it is stored under."""
    buffer_names, _ = first_names(model.named_buffers(remove_duplicate=False))
    first_name = {**model_map.first_name, **buffer_names}
    state = model.state_dict(keep_vars=True)
    return {name: first_name.get(name, name) for name, value in state.items() if isinstance(value, Tensor)}


def held_state(
    model_map: ModelMap, stage: Stage, parameters: Mapping[str, nn.Parameter], state_dict: Mapping[str, str]
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
    )


class Checkpointing:
    """Saves and loads this rank's part, together with the other ranks."""

    def __init__(self, worker: Worker, everyone: Group) -> None:
        self._worker = worker
        self._everyone = everyone
        self._checkpointers: dict[str, Checkpointer] = {}
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
        self, url: str, step: int, state: TrainingState, *, tmpdir: str | None = None, in_background: bool = False
    ) -> bool:
        """Writes a checkpoint into `url`, and its copies into `tmpdir` (None: where the job's own have theirs).

        Returns whether all ranks have written it; `in_background`: as soon as `state` may change again.
        """
        checkpointer = self._checkpointer(url)
        local = None if tmpdir is None else _worth_copying(url, tmpdir)
        wait_for_save(checkpointer, self._worker.departure)
        checkpointer.save(step, state, local=local)
        if in_background:
            return True
        outcome = wait_for_save(checkpointer, self._worker.departure)
        failed = outcome is None or outcome.result == "failed"
        # Rank 0 commits last, so when this reduction is through, the checkpoint is there for everybody.
        return agree(self._everyone, Totals(loss_sum=float(failed), examples=0)).loss_sum == 0

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


def _worth_copying(url: str, folder: str) -> str:
    """`folder`, or "" when the store at `url` is on its disk: the second of two writes there would gain nothing."""
    if not folder or on_one_disk(url, folder):
        return ""
    return folder
