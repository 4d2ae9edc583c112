"""Resuming: all ranks go on from the same checkpoint, or all of them stop, or all begin at step 0."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from varuna.checkpoint.errors import CheckpointError, MismatchError, StoreError
from varuna.checkpoint.loading import Loaded, Report, Staged, find_newest, read_manifest, stage_checkpoint
from varuna.checkpoint.manifest import MANIFEST, set_aside_name
from varuna.checkpoint.state import TrainingState
from varuna.checkpoint.store import CheckpointStore, folder_of

if TYPE_CHECKING:
    from varuna.launch import KeyValueStore

__all__ = ["resume"]

_log = structlog.get_logger(__name__)

_KEY = "varuna.resume"

_WAY_OUT = (
    "go on with the script that wrote it, give another checkpoint store, or call resume(allow_fresh_start=True), which "
    "sets it aside"
)

_KINDS: dict[str, type[CheckpointError]] = {
    kind.__name__: kind for kind in (CheckpointError, MismatchError, StoreError)
}


def resume(
    url: str,
    state: TrainingState,
    *,
    store: KeyValueStore | None = None,
    rank: int = 0,
    world_size: int = 1,
    committed_step: int = 0,
    allow_fresh_start: bool = False,
    report: Report | None = None,
) -> Loaded | None:
    """Fill every rank's `state` from the newest checkpoint that all ranks can read; None: start from nothing.

    Rank 0 proposes, all ranks verify their part, and only when all could does any of them change its state. Where one
    is torn or harmed, rank 0 proposes the one before, and `report` is told on rank 0. `store` is the generation's
    rendezvous store, needed when there are other ranks.

    `committed_step`: of the newest checkpoint that is known to have been there; 0: none is. `allow_fresh_start` (rank
    0's counts): a checkpoint that does not fit is set aside, and the one before is proposed.

    Raises, on every rank: MismatchError when the newest whole checkpoint is not of this model or optimizer; StoreError
    when the store could not be read; CheckpointError when there was a checkpoint, and now none can be read.
    """
    if world_size > 1 and store is None:
        raise ValueError(f"rank {rank} of {world_size} needs the rendezvous store to agree with the others")
    # Ranks count their calls, so that a second one does not read what the first agreed on.
    call = 1 if store is None else store.add(f"{_KEY}/calls/{rank}", 1)
    ranks = _Ranks(store, rank, world_size, f"{_KEY}/{call}")
    leader = _Leader(CheckpointStore(url), committed_step, allow_fresh_start, report)
    while True:
        verdict = ranks.share(leader.propose)
        if verdict.error is not None:
            raise verdict.error
        if verdict.step is None:
            return None
        staged, fault = _try_stage(url, verdict.step, state)
        faults = ranks.gather(fault)
        if not faults and staged is not None:
            staged.apply()
            return staged.loaded
        verdict = ranks.share(partial(leader.judge, verdict.step, faults))
        if verdict.error is not None:
            raise verdict.error


@dataclass(frozen=True)
class _Fault:
    """Why a rank cannot use a checkpoint."""

    kind: str
    """The name of the error's class."""
    text: str

    @classmethod
    def of(cls, error: CheckpointError) -> _Fault:
        kind = next(kind for kind in (MismatchError, StoreError, CheckpointError) if isinstance(error, kind))
        return cls(kind.__name__, str(error))

    @property
    def error(self) -> CheckpointError:
        return _KINDS[self.kind](self.text)


@dataclass(frozen=True)
class _Verdict:
    """What rank 0 decides for all: the step to try (None: there is none), or the fault that stops them."""

    step: int | None = None
    fault: _Fault | None = None

    @property
    def error(self) -> CheckpointError | None:
        return None if self.fault is None else self.fault.error


class _Leader:
    """Rank 0's part: proposes checkpoints, the newest first, and judges why one cannot be used."""

    def __init__(
        self, store: CheckpointStore, committed_step: int, allow_fresh_start: bool, report: Report | None
    ) -> None:
        self._store = store
        self._committed_step = committed_step
        self._allow_fresh_start = allow_fresh_start
        self._report = report
        self._before: int | None = None
        self._passed_over: list[str] = []
        self._misfit = ""

    def propose(self) -> _Verdict:
        step = find_newest(self._store, before=self._before, report=self._pass_over, strict=True)
        if step is None and self._committed_step and not self._has_set_aside():
            raise CheckpointError(self._lost())
        if step is None and self._misfit and not self._allow_fresh_start:
            raise MismatchError(f"{self._misfit}; {_WAY_OUT}")
        self._before = step
        return _Verdict(step=step)

    def judge(self, step: int, faults: list[_Fault]) -> _Verdict:
        """What to do about a checkpoint that some ranks cannot use: stop, or try the one before."""
        by_kind = {fault.kind: fault.text for fault in reversed(faults)}
        if (text := by_kind.get(StoreError.__name__)) is not None:
            raise StoreError(
                f"{text}; that does not say that it is harmed, so no older one was taken: mend the access "
                "to the store and start again"
            )
        if (text := by_kind.get(MismatchError.__name__)) is not None and self._may_be_harmed(step):
            self._misfit = self._misfit or text
            self._pass_over(step, text)
        elif text is not None:
            if not self._allow_fresh_start:
                raise MismatchError(f"{text}; {_WAY_OUT}")
            self._set_aside(step, text)
        else:
            self._pass_over(step, "; ".join(fault.text for fault in faults))
        return _Verdict(step=step)

    def _may_be_harmed(self, step: int) -> bool:
        """Whether its manifest has no checksum (an earlier version wrote it), so that what it says may be wrong."""
        return not read_manifest(self._store.url, step).is_sealed

    def _pass_over(self, step: int, fault: str) -> None:
        self._passed_over.append(fault)
        if self._report is not None:
            self._report(step, fault)

    def _set_aside(self, step: int, why: str) -> None:
        """Makes it no checkpoint any longer, so that the next ones are found and kept; its files stay."""
        folder = folder_of(step)
        data = self._store.get(f"{folder}/{MANIFEST}")
        assert data is not None, "it was whole a moment ago"
        number = 1
        while not self._store.create(f"{folder}/{set_aside_name(number)}", data):
            number += 1
        self._store.remove(f"{folder}/{MANIFEST}")
        _log.warning(
            "a checkpoint does not fit and is set aside, as allow_fresh_start says",
            step=step,
            why=why,
            manifest=f"{self._store.url_of(step)}/{set_aside_name(number)}",
        )

    def _has_set_aside(self) -> bool:
        return any(set_aside_name(1) in self._store.sizes(step) for step in self._store.steps())

    def _lost(self) -> str:
        found = f"none there can be read; the newest: {self._passed_over[0]}" if self._passed_over else "none is there"
        return (
            f"step {self._committed_step} was saved at {self._store.url}, and {found}. Bring the checkpoints back and "
            "retry the job, or submit it with checkpoint.may_start_over to train from step 0 again"
        )


class _Ranks:
    """What the ranks of a generation tell each other meanwhile, over its store."""

    def __init__(self, store: KeyValueStore | None, rank: int, world_size: int, prefix: str) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._prefix = prefix
        self._messages = 0

    def share(self, decide: Callable[[], _Verdict]) -> _Verdict:
        """What rank 0 decides, on every rank. Errors are decisions, too."""
        verdict = _Verdict()
        if self._rank == 0:
            try:
                verdict = decide()
            except CheckpointError as error:
                verdict = _Verdict(fault=_Fault.of(error))
        if self._store is None:
            return verdict
        key = self._key("decided")
        if self._rank == 0:
            fault = verdict.fault
            self._store.set(key, json.dumps({"step": verdict.step, "fault": fault and [fault.kind, fault.text]}))
        agreed: dict[str, Any] = json.loads(self._store.get(key))
        return _Verdict(step=agreed["step"], fault=_Fault(*agreed["fault"]) if agreed["fault"] else None)

    def gather(self, fault: _Fault | None) -> list[_Fault]:
        """The faults of all ranks, the same list on every rank."""
        if self._store is None:
            return [fault] if fault else []
        key = self._key("faults")
        self._store.set(f"{key}/rank{self._rank}", json.dumps(fault and [fault.kind, fault.text]))
        if self._rank == 0:
            every = [json.loads(self._store.get(f"{key}/rank{other}")) for other in range(self._world_size)]
            self._store.set(key, json.dumps([one for one in every if one]))
        return [_Fault(*one) for one in json.loads(self._store.get(key))]

    def _key(self, what: str) -> str:
        self._messages += 1
        return f"{self._prefix}/{self._messages}/{what}"


def _try_stage(url: str, step: int, state: TrainingState) -> tuple[Staged | None, _Fault | None]:
    try:
        return stage_checkpoint(url, step, state), None
    except CheckpointError as error:
        return None, _Fault.of(error)
