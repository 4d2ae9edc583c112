"""The states that the script has registered, on the way into checkpoints and back."""

from __future__ import annotations

from typing import Any, Protocol

import structlog
from torch.optim.lr_scheduler import LRScheduler

from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.format.manifest import StateScope
from varuna.checkpoint.loading.loader import LoadedCheckpoint

__all__ = ["OWN_PREFIX", "RegisteredStates", "Stateful"]

_log = structlog.get_logger("varuna")


class Stateful(Protocol):
    """What `Varuna.register_state` takes: a scheduler, a sampler, ..."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


OWN_PREFIX = "varuna."
"""How the names of Varuna's own states begin."""


class RegisteredStates:
    """The script's own states, by name; each may be registered before or after a checkpoint is loaded."""

    def __init__(self) -> None:
        self._registered: dict[str, Stateful] = {}
        self._per: dict[str, StateScope] = {}
        self._unclaimed: dict[str, dict[str, Any]] = {}
        self._loaded: LoadedCheckpoint | None = None

    def register_state(
        self, name: str, state: Stateful, *, per: StateScope = StateScope.AUTO, replace: bool = False
    ) -> None:
        """Raises ValueError for a name in use, unless `replace`; CheckpointError when the loaded state does not fit."""
        if name in self._registered and not replace:
            raise ValueError(f"a state named {name!r} is registered already: give each its own name")
        self._registered[name] = state
        # A scheduler's entries for parameter groups are saved with the groups; the rest is the same on all ranks.
        self._per[name] = StateScope.JOB if per is StateScope.AUTO and isinstance(state, LRScheduler) else per
        if name in self._unclaimed:  # registered after the checkpoint was loaded
            self._load_state(name, state)

    @property
    def schedulers(self) -> dict[str, LRScheduler]:
        """The registered LR schedulers, whose state belongs to parameter groups."""
        return {name: state for name, state in self._registered.items() if isinstance(state, LRScheduler)}

    def list_others(self) -> list[str]:
        """The names of the script's own states that are no LR schedulers."""
        return [
            name
            for name, state in self._registered.items()
            if not isinstance(state, LRScheduler) and not name.startswith(OWN_PREFIX)
        ]

    def _load_state(self, name: str, state: Stateful) -> None:
        """Loads the checkpoint's state of this name. Raises CheckpointError when it is another rank's."""
        loaded = self._loaded
        if loaded is not None and name in loaded.rank_0s and self._per[name] is not StateScope.JOB:
            raise CheckpointError(
                f"the checkpoint of step {loaded.step} has the registered state {name!r} of each rank of a "
                f"{loaded.p}x{loaded.d} shape (P x D), and they differ: none belongs to this rank in another "
                "shape. Resume in that shape, or register the state with per='job', and all ranks get rank 0's. States "
                "whose entries are keyed by names of parameters load in any shape"
            )
        saved = self._unclaimed.pop(name)
        if loaded is not None and isinstance(state, LRScheduler):
            saved = loaded.scheduler_state(name, state, saved)
        state.load_state_dict(saved)

    @property
    def scopes(self) -> dict[str, StateScope]:
        return dict(self._per)

    def collect_states(self) -> dict[str, dict[str, Any]]:
        return {name: state.state_dict() for name, state in self._registered.items()}

    def load_states(self, loaded: LoadedCheckpoint) -> None:
        """Loads every registered state from a checkpoint; states that no name claims yet are kept for later."""
        self._loaded, self._unclaimed = loaded, dict(loaded.user)
        for name, state in self._registered.items():
            if name in self._unclaimed:
                self._load_state(name, state)
            else:
                _log.warning("the checkpoint has no registered state of this name", name=name, step=loaded.step)
