"""Resuming: all ranks continue from the same state, or all stop, or all begin at step 0.

The state is what processes of the generation before hold in memory, or else a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import structlog

from varuna.checkpoint.errors import CheckpointError, HolderError, MismatchError, StoreError
from varuna.checkpoint.format.manifest import MANIFEST, set_aside_name
from varuna.checkpoint.loading.complete_checkpoints import (
    ReportPassedOver,
    newest_readable_step,
    open_to_load,
    read_manifest,
)
from varuna.checkpoint.loading.loader import LoadedCheckpoint, StagedCheckpoint, stage_checkpoint
from varuna.checkpoint.state.rank_state import TrainingState
from varuna.checkpoint.storage.answers import ask_store
from varuna.checkpoint.storage.store import CheckpointStore, folder_of

if TYPE_CHECKING:
    from varuna.distributed.rendezvous import KeyValueStore

__all__ = ["HeldStateProposal", "HeldStateSource", "resume_checkpoint"]

_log = structlog.get_logger(__name__)

_KEY = "varuna.resume"

_WAY_OUT = (
    "go on with the script that wrote it, give another checkpoint store, or call resume(allow_fresh_start=True), which "
    "sets it aside"
)

_KINDS: dict[str, type[CheckpointError]] = {
    kind.__name__: kind for kind in (CheckpointError, HolderError, MismatchError, StoreError)
}


class HeldStateProposal(NamedTuple):
    """A state that processes of the generation before hold."""

    step: int
    document: str
    """Describes to all ranks what is where."""


class HeldStateSource(Protocol):
    """The state in the memories of other processes; `varuna.holdings` has it."""

    def propose_state(self) -> HeldStateProposal | None:
        """Rank 0: the newest state that is held whole; None: there is none."""

    def stage_state(
        self, document: str, state: TrainingState, exchange: Callable[[str], list[str]]
    ) -> StagedCheckpoint:
        """Makes the proposed state ready to be loaded. All ranks call this, and `exchange`, which gathers a text from
        each, exactly once. Raises CheckpointError."""

    def exclude_holders(self, ranks: Iterable[int]) -> None:
        """Rank 0: the processes that had these ranks are not asked again."""

    def announce_end(self, *, is_loaded: bool) -> None:
        """Rank 0: all ranks have a state, so the processes may end. `is_loaded`: it is the one that they hold."""

    def close(self) -> None:
        """Every rank: ends what connects this process to the others."""


def resume_checkpoint(  # noqa: PLR0913  # the ranks' meeting is three of them
    url: str,
    state: TrainingState,
    *,
    store: KeyValueStore | None = None,
    rank: int = 0,
    world_size: int = 1,
    committed_step: int = 0,
    allow_fresh_start: bool = False,
    report: ReportPassedOver | None = None,
    memory: HeldStateSource | None = None,
) -> LoadedCheckpoint | None:
    """Fill every rank's `state` from the newest state that all ranks can read; None: start at step 0.

    Rank 0 proposes what `memory` holds, if that is as new as the newest checkpoint, and else a checkpoint. All ranks
    verify their part, and no rank changes its state until all have succeeded. If the state is damaged, rank 0 proposes
    another one: from the processes that are left, then from checkpoints; it calls `report` for each. `store` is
    the generation's rendezvous store, needed when there are other ranks.

    `url`: "" if there is no checkpoint store. `committed_step`: the newest step known to have had a checkpoint; 0:
    none. `allow_fresh_start` (rank 0's counts): a checkpoint that does not fit is set aside, and the one before is
    proposed.

    Raises, on every rank: MismatchError when the newest whole checkpoint is of another model or optimizer; StoreError
    when the store could not be read; CheckpointError when there was a checkpoint, and now none can be read, or when
    the state that processes held was lost after `state` had been changed, and there is no checkpoint.
    """
    if world_size > 1 and store is None:
        raise ValueError(f"rank {rank} of {world_size} needs the rendezvous store to agree with the others")
    # Ranks count their calls, so that a second one does not read what the first agreed on.
    call = 1 if store is None else store.add(f"{_KEY}/calls/{rank}", 1)
    ranks = _RankExchange(store, rank, world_size, f"{_KEY}/{call}")
    stored = _CheckpointProposer(open_to_load(url), committed_step, allow_fresh_start, report) if url else None
    leader = _StateProposer(memory, stored, committed_step)
    while True:
        decision = ranks.share_decision(leader.propose_state)
        if decision.error is not None:
            raise decision.error
        if decision.step is None:
            loaded = None
            break
        staged, fault = _try_stage(url, decision, state, memory, ranks)
        faults = ranks.gather_faults(fault)
        if not faults and staged is not None:
            if not decision.document:
                loaded = staged.fill_state()
                break
            leader.is_filling = True
            loaded, fault = _try_fill(staged)
            faults = ranks.gather_faults(fault)
            if not faults:
                break
        decision = ranks.share_decision(partial(leader.judge_faults, decision, faults))
        if decision.error is not None:
            raise decision.error
    if memory is not None:
        if rank == 0:
            memory.announce_end(is_loaded=bool(decision.document))
        memory.close()
    return loaded


@dataclass(frozen=True)
class _LoadFault:
    """Why a rank cannot use a proposed state."""

    kind: str
    """The name of the error's class."""
    text: str
    holders: tuple[int, ...] = ()
    """The ranks that processes had before which did not give their state."""

    @classmethod
    def from_error(cls, error: CheckpointError) -> _LoadFault:
        kinds = (HolderError, MismatchError, StoreError, CheckpointError)
        kind = next(kind for kind in kinds if isinstance(error, kind))
        return cls(kind.__name__, str(error), error.holders if isinstance(error, HolderError) else ())

    @property
    def error(self) -> CheckpointError:
        return _KINDS[self.kind](self.text)


@dataclass(frozen=True)
class _ResumeDecision:
    """What rank 0 decides for all: the step to try (None: there is none), or the fault that stops them."""

    step: int | None = None
    document: str = ""
    """Of the state that processes hold; "": a checkpoint is proposed."""
    fault: _LoadFault | None = None

    @property
    def error(self) -> CheckpointError | None:
        return None if self.fault is None else self.fault.error


class _StateProposer:
    """Rank 0's part: proposes what processes hold, as long as there is something, and then checkpoints."""

    def __init__(self, memory: HeldStateSource | None, stored: _CheckpointProposer | None, committed_step: int) -> None:
        self._memory = memory
        self._stored = stored
        self._committed_step = committed_step
        self._lost = ""
        self.is_filling = False
        """Whether the ranks have begun to take over what processes hold, so that no rank keeps its first state."""

    def propose_state(self) -> _ResumeDecision:
        proposal = None if self._memory is None else self._memory.propose_state()
        if proposal is not None:
            newest = self._committed_step if self._stored is None else self._stored.find_newest(proposal.step)
            if proposal.step >= newest:
                return _ResumeDecision(step=proposal.step, document=proposal.document)
            _log.warning("the processes hold an older state than the checkpoint", step=proposal.step, newest=newest)
        self._memory = None
        decision = _ResumeDecision() if self._stored is None else self._stored.propose_step()
        if decision.step is None and self.is_filling:
            raise CheckpointError(
                "the state that processes held was lost while it was taken over, and there is no checkpoint: "
                + self._lost
            )
        return decision

    def judge_faults(self, decision: _ResumeDecision, faults: list[_LoadFault]) -> _ResumeDecision:
        """Decides about a state that some ranks cannot use: stop, or try another."""
        assert decision.step is not None
        if not decision.document:
            assert self._stored is not None
            return self._stored.judge_faults(decision.step, faults)
        self._lost = faults[0].text
        _log.warning("the state in memory cannot be loaded", step=decision.step, reason=self._lost)
        if self._memory is not None and all(fault.holders for fault in faults):
            self._memory.exclude_holders({holder for fault in faults for holder in fault.holders})
        else:
            self._memory = None
        return decision


class _CheckpointProposer:
    """Proposes checkpoints, the newest first, and judges why one cannot be used."""

    def __init__(
        self, store: CheckpointStore, committed_step: int, allow_fresh_start: bool, report: ReportPassedOver | None
    ) -> None:
        self._store = store
        self._committed_step = committed_step
        self._allow_fresh_start = allow_fresh_start
        self._report = report
        self._before: int | None = None
        self._passed_over: list[str] = []
        self._misfit = ""

    def find_newest(self, step: int) -> int:
        """The newest checkpoint, if that is newer than `step`; 0: there is none.

        A store that cannot be read, or does not answer in time, is not waited for: then the newest that the job knows
        of counts.
        """
        return ask_store(self._store.url, partial(self._look_for_newest, step), otherwise=self._committed_step)

    def _look_for_newest(self, step: int) -> int:
        try:
            readable = 0
            if any(newer > step for newer in self._store.list_steps()):
                readable = newest_readable_step(self._store) or 0
            # If it is there, but no checkpoint any longer, it is harmed, or was given up when the script went back.
            is_lost = self._committed_step > step and not self._store.list_sizes(self._committed_step)
            return max(readable, self._committed_step) if is_lost else readable
        except CheckpointError as error:
            _log.warning("the checkpoint store cannot be read", reason=str(error))
            return self._committed_step

    def propose_step(self) -> _ResumeDecision:
        step = newest_readable_step(self._store, before=self._before, report=self._pass_over, strict=True)
        if step is None and self._committed_step and not self._has_set_aside():
            raise CheckpointError(self._lost())
        if step is None and self._misfit and not self._allow_fresh_start:
            raise MismatchError(f"{self._misfit}; {_WAY_OUT}")
        self._before = step
        return _ResumeDecision(step=step)

    def judge_faults(self, step: int, faults: list[_LoadFault]) -> _ResumeDecision:
        """Decides about a checkpoint that some ranks cannot use: stop, or try the one before."""
        by_kind = {fault.kind: fault.text for fault in reversed(faults)}
        if (text := by_kind.get(StoreError.__name__)) is not None:
            raise StoreError(
                f"{text}; that does not show that the checkpoint is harmed, so no older one was taken: restore the "
                "access to the store and start again"
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
        return _ResumeDecision(step=step)

    def _may_be_harmed(self, step: int) -> bool:
        """Whether its manifest has no checksum (an earlier version wrote it), and may therefore be damaged."""
        return not read_manifest(self._store.url, step).is_sealed

    def _pass_over(self, step: int, fault: str) -> None:
        self._passed_over.append(fault)
        if self._report is not None:
            self._report(step, fault)

    def _set_aside(self, step: int, why: str) -> None:
        """Renames the manifest, so that newer checkpoints are found and kept; the other files stay."""
        folder = folder_of(step)
        data = self._store.get(f"{folder}/{MANIFEST}")
        assert data is not None, "it was whole a moment ago"
        number = 1
        while not self._store.create(f"{folder}/{set_aside_name(number)}", data):
            number += 1
        self._store.delete_file(f"{folder}/{MANIFEST}")
        _log.warning(
            "a checkpoint does not fit and is set aside, as allow_fresh_start permits",
            step=step,
            why=why,
            manifest=f"{self._store.url_of(step)}/{set_aside_name(number)}",
        )

    def _has_set_aside(self) -> bool:
        return any(set_aside_name(1) in self._store.list_sizes(step) for step in self._store.list_steps())

    def _lost(self) -> str:
        found = f"none there can be read; the newest: {self._passed_over[0]}" if self._passed_over else "none is there"
        return (
            f"step {self._committed_step} was saved at {self._store.url}, and {found}. Bring the checkpoints back and "
            "retry the job, or submit it with checkpoint.may_start_over to train from step 0 again"
        )


class _RankExchange:
    """Exchanges decisions and faults between the ranks of a generation, over its store."""

    def __init__(self, store: KeyValueStore | None, rank: int, world_size: int, prefix: str) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._prefix = prefix
        self._messages = 0

    def share_decision(self, decide: Callable[[], _ResumeDecision]) -> _ResumeDecision:
        """Returns rank 0's decision on every rank. Errors are decisions, too."""
        decision = _ResumeDecision()
        if self._rank == 0:
            try:
                decision = decide()
            except CheckpointError as error:
                decision = _ResumeDecision(fault=_LoadFault.from_error(error))
        if self._store is None:
            return decision
        key = self._key("decided")
        if self._rank == 0:
            self._store.set(key, json.dumps(asdict(decision)))
        agreed: dict[str, Any] = json.loads(self._store.get(key))
        return _ResumeDecision(**agreed | {"fault": _LoadFault(**agreed["fault"]) if agreed["fault"] else None})

    def gather_faults(self, fault: _LoadFault | None) -> list[_LoadFault]:
        """The faults of all ranks, the same list on every rank."""
        every = (json.loads(text) for text in self.gather_texts(json.dumps(fault and asdict(fault))))
        return [_LoadFault(one["kind"], one["text"], tuple(one["holders"])) for one in every if one]

    def gather_texts(self, own: str) -> list[str]:
        """The texts of all ranks, in their order, the same list on every rank."""
        if self._store is None:
            return [own]
        key = self._key("gathered")
        self._store.set(f"{key}/rank{self._rank}", own)
        if self._rank == 0:
            every = [self._store.get(f"{key}/rank{other}").decode() for other in range(self._world_size)]
            self._store.set(key, json.dumps(every))
        gathered: list[str] = json.loads(self._store.get(key))
        return gathered

    def _key(self, what: str) -> str:
        self._messages += 1
        return f"{self._prefix}/{self._messages}/{what}"


def _try_stage(
    url: str, decision: _ResumeDecision, state: TrainingState, memory: HeldStateSource | None, ranks: _RankExchange
) -> tuple[StagedCheckpoint | None, _LoadFault | None]:
    assert decision.step is not None
    try:
        if not decision.document:
            return stage_checkpoint(url, decision.step, state), None
        if memory is None:
            raise ValueError("rank 0 has a source of held state, and this rank has none")
        return memory.stage_state(decision.document, state, ranks.gather_texts), None
    except CheckpointError as error:
        return None, _LoadFault.from_error(error)


def _try_fill(staged: StagedCheckpoint) -> tuple[LoadedCheckpoint | None, _LoadFault | None]:
    try:
        return staged.fill_state(), None
    except CheckpointError as error:
        return None, _LoadFault.from_error(error)
