"""This rank's part in sending the state ahead: to the processes that are expected to need it in the next shape, while
training goes on, so that it does not move while nobody trains.

The passes of a step do not change the state. So what is sent in a step counts if the job takes its next shape in the
middle of that step. Each step that ends makes it void, and the new state is sent. What is void is freed when the next
step begins, and all of it when the next shape is no longer wanted.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import NamedTuple

import structlog
import torch
from torch._C._distributed_c10d import Store

from varuna.checkpoint import CheckpointError, TrainingState
from varuna.checkpoint.format.manifest import FileKind
from varuna.checkpoint.saving.shares import count_bytes
from varuna.checkpoint.saving.snapshot import HostBuffers, is_tied_file
from varuna.copies.ahead_taker import LARGEST_PART, AheadTaker, address_key
from varuna.copies.memory import describe_shortage
from varuna.copies.next_shape import SectionPart, plan_sends
from varuna.copies.sending import PacedConnection
from varuna.devices.accelerator import is_accelerator, use_stream
from varuna.diagnostics.error_text import first_line
from varuna.distributed.handshake import MeetingKey
from varuna.distributed.lone_store import LoneStore
from varuna.distributed.rendezvous_store import await_value
from varuna.holdings.inventory import HeldFile, HeldFiles, encode_inventory, make_inventory
from varuna.holdings.transfer_protocol import COPY, NUMBER
from varuna.worker.agent_link import AheadCommand
from varuna.worker.worker import WorkerProcess

__all__ = ["RankAhead"]

_log = structlog.get_logger("varuna")

_LEAST_SHARE = 0.25
"""Of the machine's processors: more than copies take in each step, because what is not sent ahead is sent while nobody
trains."""
_LOOK_S = 0.1
_RETRY_S = 1.0
_KINDS = (FileKind.PARAMETERS, FileKind.OPTIMIZER, FileKind.AVERAGE)
"""Of the files that go ahead. The others are small, and come when all have left."""


class _Round(NamedTuple):
    """What is sent in the passes of one step."""

    command: AheadCommand
    step: int
    """The committed step whose state it is."""
    series: int
    state: TrainingState


class _Freeing(NamedTuple):
    """Nothing is sent any longer, so memory for copies of the state is of no use."""


class RankAhead:
    """Of one generation, from its making until `shut_down`."""

    def __init__(
        self,
        worker: WorkerProcess,
        device: torch.device,
        *,
        section_count: int,
        shared: Mapping[str, Sequence[int]],
        is_pipeline_sending: Callable[[], bool],
    ) -> None:
        """`section_count`, `shared`: of the model, as for `plan_sends`.

        `is_pipeline_sending`: whether messages of the pipeline are on their way from here.
        """
        self._worker, self._environment = worker, worker.environment
        self._section_count, self._shared = section_count, shared
        self._is_pipeline_sending = is_pipeline_sending
        self._key = MeetingKey.from_environment(self._environment)
        self._stream = torch.Stream(device) if is_accelerator(device) else None
        self._buffers = HostBuffers()
        self.taker = AheadTaker()
        """What this rank has of what others have."""
        self.series = 0
        """Of the states of this generation: each checkpoint that is loaded begins another one."""
        self._command: AheadCommand | None = None
        """The newest one."""
        self._pass: tuple[int, Callable[[], TrainingState]] | None = None
        """The committed steps before the pass under way, and what makes its state; None: none is under way."""
        self._round: _Round | None = None
        """The present one, also when all is there; None: none has begun in this pass."""
        self._rounds: SimpleQueue[_Round | _Freeing | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._is_capturing = False
        """Whether the state is being copied. Guarded by the condition, as the present round."""
        self._stopped = threading.Event()
        self._sending: PacedConnection | None = None
        self._thread: threading.Thread | None = None
        worker.departure.add_breaker(lambda _: self.shut_down())
        worker.link.follow_ahead(self._note_command)

    # In the script's thread

    def begin_pass(self, step: int, make_state: Callable[[], TrainingState]) -> None:
        """Before the passes of a step, after `step` committed ones. They do not change what `make_state` returns."""
        self._pass = step, make_state
        self.taker.free_outdated(step)
        self.begin_round_if_asked()

    def begin_round_if_asked(self) -> None:
        """Begins to send the state of the step under way if that was asked for and has not begun."""
        command = self._command
        if command is None or self._pass is None:
            return
        if self._round is not None and self._round.command.request == command.request:
            return
        step, make_state = self._pass
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._stream.device))
        with self._changed:
            self._round = _Round(command, step, self.series, make_state())
            self._stop_sending()
            self._rounds.put(self._round)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="varuna-ahead", daemon=True)
            self._thread.start()

    def end_pass(self) -> None:
        """After the passes: what is sent is of no use from now on. Waits until the state may change."""
        with self._changed:
            self._pass = self._round = None
            self._stop_sending()
            self._changed.wait_for(lambda: not self._is_capturing)

    def _stop_sending(self) -> None:
        if (sending := self._sending) is not None:
            sending.shut_down()

    def forget_states(self) -> None:
        """All ranks have loaded another state: nothing that was sent is of use."""
        with self._changed:
            self.series += 1
            self._round = None

    def shut_down(self) -> None:
        """Ends what is under way. What has come stays. From any thread."""
        self._stopped.set()
        self._rounds.put(None)
        self._stop_sending()

    # In threads of its own

    def _note_command(self, command: AheadCommand) -> None:
        if command.generation != self._environment.generation:
            return
        if not command.is_over:
            self._command = command
        elif self._command is not None and self._command.request == command.request:
            self._free_all()

    def _free_all(self) -> None:
        with self._changed:
            self._command = self._round = None
            self._stop_sending()
        self._rounds.put(_Freeing())
        self.taker.free_all()
        self._worker.link.report_sent_ahead("", 0)

    def _run(self) -> None:
        with _Meeting(self._worker) as store:
            while (round_ := self._rounds.get()) is not None:
                if isinstance(round_, _Freeing):
                    self._buffers.free()
                    continue
                try:
                    self._run_round(round_, store)
                except (CheckpointError, OSError, RuntimeError, MemoryError, ValueError, struct.error) as error:
                    if not self._stopped.is_set():
                        _log.warning(
                            "the state does not go ahead to the next shape: it moves when all have left",
                            step=round_.step,
                            reason=first_line(error),
                        )
                finally:
                    del round_

    def _run_round(self, round_: _Round, store: Store) -> None:
        command, environment = round_.command, self._environment
        sends = plan_sends(environment.plan, command.plan, command.ranks_before, self._section_count, self._shared)
        own = {taker: parts for (sender, taker), parts in sends.items() if sender == environment.rank}
        held = self._capture(round_, {part for parts in own.values() for part in parts})
        if command.rank is not None and any(taker == command.rank for _, taker in sends):
            self.taker.open_door(
                store,
                environment,
                host=self._worker.rendezvous.own_address(),
                request=command.request,
                rank=command.rank,
                processes=command.processes,
            )
        for taker, parts in own.items():
            address = self._find_address(round_, store, taker)
            if held is None or not address or not self._send_to(address, _select_files(held, parts), round_):
                return
        self._worker.link.report_sent_ahead(command.request, round_.step)

    def _capture(self, round_: _Round, parts: Collection[SectionPart]) -> HeldFiles | None:
        """A copy of these in host memory; None: there are none, or they are no longer of use."""
        if not parts:
            return None
        with self._changed:
            if not self._is_current(round_):
                return None
            self._is_capturing = True
        try:
            return self._copy_state(round_, _select_state(round_.state, parts))
        finally:
            with self._changed:
                self._is_capturing = False
                self._changed.notify_all()

    def _copy_state(self, round_: _Round, state: TrainingState) -> HeldFiles:
        environment, needed = self._environment, sum(count_bytes(name, state) for name in state.tensors)
        part = LARGEST_PART / max(round_.command.processes, 1)
        if shortage := describe_shortage(needed, part):
            raise MemoryError(shortage)
        with nullcontext() if self._stream is None else use_stream(self._stream):
            return make_inventory(
                state, round_.step, generation=environment.generation, rank=environment.rank, buffers=self._buffers
            )

    def _is_current(self, round_: _Round) -> bool:
        return self._round is round_ and not self._stopped.is_set()

    def _find_address(self, round_: _Round, store: Store, taker: int) -> str:
        """Where the process takes sections that is to be rank `taker`; empty: they are no longer of use."""
        key = address_key(round_.command.request, taker)
        return await_value(store, key, self._stopped, look_s=_LOOK_S, is_wanted=lambda: self._is_current(round_))

    def _send_to(self, address: str, held: HeldFiles, round_: _Round) -> bool:
        """Whether all of it is there. False: it is no longer of use. Raises ValueError when it is refused."""
        while self._is_current(round_):
            self._sending = connection = PacedConnection(
                address, self._key, self._is_pipeline_sending, least_share=_LEAST_SHARE
            )
            try:
                words = [NUMBER.pack(round_.series), NUMBER.pack(0), encode_inventory(held.inventory)]
                connection.send_files(COPY, words, self._iterate_files(held, round_))
            except (OSError, struct.error):
                self._stopped.wait(_RETRY_S)
            else:
                return True
            finally:
                self._sending = None
                connection.drop()
        return False

    def _iterate_files(self, held: HeldFiles, round_: _Round) -> Iterator[HeldFile]:
        for entry in held.inventory.receipt.files:
            if not self._is_current(round_):
                raise ConnectionError("a step has ended since")
            yield held.files[entry.name]


class _Meeting:
    """The store of a generation, which newcomers reach, too. One of one rank has none otherwise."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker
        self._lone_store: LoneStore | None = None

    def __enter__(self) -> Store:
        environment = self._worker.environment
        if environment.world_size == 1:
            with suppress(OSError, RuntimeError):
                self._lone_store = LoneStore(environment, MeetingKey.from_environment(environment))
                return self._lone_store.store
        return self._worker.rendezvous.store

    def __exit__(self, *_: object) -> None:
        if self._lone_store is not None:
            self._lone_store.close()


def _is_among(parts: Collection[SectionPart], section: int, *, is_tied: bool) -> bool:
    return SectionPart(section, False) in parts or (is_tied and SectionPart(section, True) in parts)


def _select_state(state: TrainingState, parts: Collection[SectionPart]) -> TrainingState:
    """What lies in files of these, as `_KINDS` says."""

    def is_there(name: str) -> bool:
        return _is_among(parts, state.section_of[name], is_tied=name in state.tied)

    return replace(
        state,
        parameters={name: value for name, value in state.parameters.items() if is_there(name)},
        buffers={name: value for name, value in state.buffers.items() if is_there(name)},
        averages={name: value for name, value in state.averages.items() if is_there(name)},
        user={},
        user_scopes={},
        schedulers={},
    )


def _select_files(held: HeldFiles, parts: Collection[SectionPart]) -> HeldFiles:
    receipt = held.inventory.receipt
    files = tuple(
        entry
        for entry in receipt.files
        if entry.kind in _KINDS and _is_among(parts, entry.section, is_tied=is_tied_file(entry.name))
    )
    names = {entry.name for entry in files}
    headers = {name: header for name, header in held.inventory.headers.items() if name in names}
    inventory = held.inventory.model_copy(
        update={"receipt": receipt.model_copy(update={"files": files}), "headers": headers}
    )
    return HeldFiles(inventory, {name: held.files[name] for name in names})
