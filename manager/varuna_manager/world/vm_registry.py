"""What is known about VMs this minute: in memory, never written.

Silence is measured with a monotonic clock, so a clock that is set cannot lose a VM; and with one that stands while the
manager does not listen (`AttendedClock`), so its own stalls cannot, either. After a restart of the manager no agent has
connected yet: silence then counts from the start.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from varuna_manager.domain.observed import VmView
from varuna_manager.domain.states import WaitKind
from varuna_manager.world.facts import VmFacts

_PORT_REUSE_S = 30.0
"""After this time, an offer of a used port's number means a new port with the same number."""


class SentAhead(NamedTuple):
    """A worker has sent all that it was to send of a state."""

    request: str
    """The `WantedNewcomers` for which it was sent."""
    step: int
    """The committed step whose state it was."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """One worker, as its agent last reported it."""

    job_id: str
    generation: int
    rank: int
    step: int
    forward_us: int = 0
    backward_us: int = 0
    memory_bytes: int = 0
    wait_us: int = 0
    evaluated: int = 0
    """Micro-batches of evaluations since the worker started."""
    waiting_for: WaitKind | None = None
    quiet_ranks: frozenset[int] = frozenset()
    """Those that do not answer it while it waits."""
    sent_ahead: SentAhead | None = None
    """What it has sent last of the state to the next shape; None: nothing."""

    @property
    def key(self) -> tuple[str, int, int]:
        """Job, generation and rank."""
        return self.job_id, self.generation, self.rank


@dataclass(frozen=True, kw_only=True)
class NewcomerReport:
    """A process that was started ahead, as its agent last reported it."""

    job_id: str
    request: str
    """The `WantedNewcomers` for which it was started."""
    local_rank: int
    at_door: bool
    fault: str


@dataclass(kw_only=True)
class _Live:
    last_message_at: float | None = None
    """None: its agent has not connected since the manager started."""
    expected_since: float | None = None
    """From when on its agent's first message is expected; None: since the manager started."""
    is_late: bool = False
    """Whether the missing heartbeat counts as a change already."""
    connected: bool = False
    changed_at: float
    """When it connected or disconnected."""
    rendezvous_port: int = 0
    used_port: int = 0
    used_at: float = 0.0
    listed: bool | None = None
    end_reason: str = ""
    """Why the VM has ended, by its provider."""
    workers: tuple[Health, ...] = field(default_factory=tuple)
    running: frozenset[tuple[str, int]] = frozenset()
    """Job and generation of these workers. The object stays the same while they do."""
    preparing: frozenset[str] = frozenset()
    prepared: frozenset[str] = frozenset()
    setting_up: frozenset[str] = frozenset()
    warm: frozenset[str] = frozenset()
    newcomers: tuple[NewcomerReport, ...] = ()
    held_bytes: int = 0
    evaluated: dict[tuple[str, int, int], _Evaluated] = field(default_factory=dict)
    """By job, generation and rank."""
    changed_in: int = 0
    """The number of its last change. A heartbeat alone is none."""

    @property
    def port_free_at(self) -> float:
        """When the present port may be used."""
        return self.used_at + _PORT_REUSE_S if self.used_port == self.rendezvous_port else -math.inf


@dataclass(frozen=True)
class _Evaluated:
    micro_batches: int
    at: float
    """When this number was first reported."""


class VmRegistry:
    def __init__(self, monotonic: Callable[[], float] = time.monotonic, *, heartbeat_interval_s: float = 1.0) -> None:
        self._now = monotonic
        self._silent_after_s = 1.5 * heartbeat_interval_s
        self._started_at = monotonic()
        self._live: dict[str, _Live] = {}
        self._changes = 0
        self._evaluating: set[str] = set()
        """VMs whose workers have reported evaluations: few, if any."""
        self._witnesses: dict[str, frozenset[tuple[str, int]]] = {}
        """By VM: the jobs and generations of its workers that get no answer from other ranks: few, if any."""
        self._away: set[str] = set()
        """VMs that were connected once and are not now."""
        self._quarantines: dict[str, tuple[float, float]] = {}
        """By VM: the end by the wall clock, and by the monotonic one."""
        self.market_hazard: float | None = None
        """Removals per VM-hour that the provider expects. None: it gives no rate."""

    def _of(self, vm_id: str) -> _Live:
        live = self._live.get(vm_id)
        if live is None:
            live = self._live[vm_id] = _Live(changed_at=self._now())
        return live

    def monotonic_s(self) -> float:
        """The clock that measures silence."""
        return self._now()

    def is_quarantined(self, vm_id: str, until: float | None, now: float) -> bool:
        """Whether its quarantine lasts, which ends at `until`.

        `now`: the wall clock, which is read once. After that the monotonic clock decides when the quarantine is over.
        """
        if until is None:
            self._quarantines.pop(vm_id, None)
            return False
        known = self._quarantines.get(vm_id)
        if known is None or known[0] != until:
            known = self._quarantines[vm_id] = (until, self._now() + max(until - now, 0.0))
        return self._now() < known[1]

    def add_hello(self, vm_id: str, *, rendezvous_port: int, workers: Sequence[Health]) -> None:
        live = self._of(vm_id)
        live.connected, live.changed_at = True, self._now()
        self._note_change(live)
        self._away.discard(vm_id)
        # Its first heartbeat reports what is prepared; until then the last report stays valid.
        self.add_heartbeat(
            vm_id,
            rendezvous_port=rendezvous_port,
            workers=workers,
            prepared=live.prepared,
            setting_up=live.setting_up,
            newcomers=live.newcomers,
        )

    def expect_hello(self, vm_id: str) -> None:
        """Expect the first message of a listed VM's agent from now on: the manager did not know the VM before, or could
        not admit its agent."""
        live = self._live.get(vm_id)  # none of others, because whoever dials gives a name
        if live is not None:
            live.expected_since = self._now()
            self._note_change(live)

    def add_heartbeat(
        self,
        vm_id: str,
        *,
        rendezvous_port: int,
        workers: Sequence[Health],
        preparing: Iterable[str] = (),
        prepared: Iterable[str] = (),
        setting_up: Iterable[str] = (),
        warm: Iterable[str] = (),
        newcomers: Sequence[NewcomerReport] = (),
    ) -> bool:
        """Record that the VM lives. Returns whether a decision may change (a new port, the end of a silence, ...).

        Nothing is kept of a VM that was forgotten, whose stream may last for a while.
        """
        live = self._live.get(vm_id)
        if live is None:
            return False
        was_silent = live.last_message_at is None or self._is_late(live)
        jobs = frozenset(preparing), frozenset(prepared), frozenset(setting_up), frozenset(warm)
        known = live.preparing, live.prepared, live.setting_up, live.warm
        news = was_silent or live.rendezvous_port != rendezvous_port or known != jobs
        news = news or live.newcomers != tuple(newcomers) or _list_sent(live.workers) != _list_sent(workers)
        live.newcomers = tuple(newcomers)
        live.preparing, live.prepared, live.setting_up, live.warm = jobs
        if news:
            self._note_change(live)
        live.last_message_at, live.is_late = self._now(), False
        live.rendezvous_port, live.workers = rendezvous_port, tuple(workers)
        running = frozenset([(worker.job_id, worker.generation) for worker in workers])
        if running != live.running:
            live.running = running
        if live.evaluated or any(worker.evaluated for worker in workers):
            self._note_evaluations(vm_id, live)
        return self._note_witnesses(vm_id, workers) or news

    def _note_witnesses(self, vm_id: str, workers: Sequence[Health]) -> bool:
        """Returns whether other generations than before have a worker there that gets no answer."""
        unanswered = frozenset([(worker.job_id, worker.generation) for worker in workers if worker.quiet_ranks])
        is_new = unanswered != self._witnesses.get(vm_id, frozenset())
        if unanswered:
            self._witnesses[vm_id] = unanswered
        else:
            self._witnesses.pop(vm_id, None)
        return is_new

    def has_witness(self, job_id: str, generation: int) -> bool:
        """Whether a worker of the generation gets no answer from another rank, by the last heartbeats."""
        return any((job_id, generation) in unanswered for unanswered in self._witnesses.values())

    def _note_evaluations(self, vm_id: str, live: _Live) -> None:
        self._evaluating.add(vm_id)
        before, live.evaluated = live.evaluated, {}
        for worker in live.workers:
            key = worker.key
            known = before.get(key, _Evaluated(0, 0.0))
            if worker.evaluated > known.micro_batches:
                known = _Evaluated(worker.evaluated, self._now())
            if known.micro_batches:  # a hello does not contain them, so the old ones stay
                live.evaluated[key] = known

    def evaluated_s(self, job_id: str, generation: int, vm_ids: Collection[str]) -> float | None:
        """How long ago a worker of the generation last reported more evaluated micro-batches; None: never.

        `vm_ids`: where its workers are. What other agents report of them is ignored.
        """
        at = [
            evaluated.at
            for vm_id in self._evaluating.intersection(vm_ids)
            for (of_job, number, _), evaluated in self._live[vm_id].evaluated.items()
            if (of_job, number) == (job_id, generation)
        ]
        return self._now() - max(at) if at else None

    def add_disconnect(self, vm_id: str) -> None:
        live = self._live.get(vm_id)
        if live is None:  # the provider's word on its end was here first
            return
        live.connected, live.changed_at = False, self._now()
        self._note_change(live)
        self._away.add(vm_id)

    def set_listed(self, vm_id: str, listed: bool, end_reason: str = "") -> None:
        """`end_reason`: why it has ended, if the provider says so."""
        live = self._of(vm_id)
        if live.listed is not listed:
            live.listed, live.end_reason = listed, end_reason
            self._note_change(live)

    def forget_vm(self, vm_id: str) -> None:
        self._live.pop(vm_id, None)
        self._evaluating.discard(vm_id)
        self._witnesses.pop(vm_id, None)
        self._away.discard(vm_id)
        self._quarantines.pop(vm_id, None)

    def rendezvous_port(self, vm_id: str) -> int | None:
        """A port that the agent holds open and that no generation has used. None: it has not offered one yet."""
        live = self._live.get(vm_id)
        return None if live is None else self._free_port(live)

    def use_rendezvous_port(self, vm_id: str, port: int) -> None:
        live = self._live.get(vm_id)
        if live is not None:
            live.used_port, live.used_at = port, self._now()
            self._note_change(live)

    def list_workers(self, vm_id: str) -> tuple[Health, ...]:
        live = self._live.get(vm_id)
        return live.workers if live is not None else ()

    def list_running(self, vm_id: str) -> frozenset[tuple[str, int]]:
        """Job and generation of the workers that run there, according to the last heartbeat."""
        live = self._live.get(vm_id)
        return live.running if live is not None else frozenset()

    def list_newcomers(self, vm_id: str) -> tuple[NewcomerReport, ...]:
        """The processes that were started ahead there, according to the last heartbeat."""
        live = self._live.get(vm_id)
        return live.newcomers if live is not None else ()

    def record_held_bytes(self, vm_id: str, held_bytes: int) -> None:
        """What the VM's heartbeat says of `get_held_bytes`. No decision depends on it."""
        live = self._live.get(vm_id)
        if live is not None:
            live.held_bytes = held_bytes

    def get_held_bytes(self, vm_id: str) -> int:
        """The state of workers that have ended in the VM's memory, according to the last heartbeat."""
        live = self._live.get(vm_id)
        return live.held_bytes if live is not None else 0

    def silence_s(self, vm_id: str) -> float | None:
        """Time since its agent's last message; None: its agent has not connected since the manager started."""
        live = self._live.get(vm_id)
        return None if live is None or live.last_message_at is None else self._now() - live.last_message_at

    def just_disconnected(self, within_s: float) -> bool:
        """Whether the stream broke a moment ago: the provider may need that moment to see why."""
        return any(self._now() - self._live[vm_id].changed_at < within_s for vm_id in self._away)

    def list_healths(self, job_id: str, generation: int, places: Mapping[int, str]) -> dict[int, Health]:
        """The health of each worker that its agent has reported, by rank.

        `places`: by rank, the VM of the worker. What other agents report of it is ignored.
        """
        return {
            health.rank: health
            for vm_id in set(places.values()) & self._live.keys()
            for health in self._live[vm_id].workers
            if (health.job_id, health.generation) == (job_id, generation) and places.get(health.rank) == vm_id
        }

    def changed_since(self, seen: int) -> tuple[int, set[str]]:
        """(how many changes there were by now, the VMs with one after the first `seen`).

        A heartbeat is no change, but the first one that is missing is.
        """
        for live in self._live.values():
            if not live.is_late and self._is_late(live):
                live.is_late = True
                self._note_change(live)
        return self._changes, {vm_id for vm_id, live in self._live.items() if live.changed_in > seen}

    def _note_change(self, live: _Live) -> None:
        self._changes += 1
        live.changed_in = self._changes

    def make_view(self, row: VmFacts, *, now: float, workers: int) -> VmView:
        """The row and what is known of the VM. Its moments are by the wall clock.

        Args:
            now: the wall clock.
            workers: those that have not stopped there.
        """
        live = self._live.get(row.id) or _Live(changed_at=self._started_at)
        ahead_s = now - self._now()
        expected_since = self._started_at if live.expected_since is None else live.expected_since
        last_message_at = expected_since if live.last_message_at is None else live.last_message_at
        is_silent = live.last_message_at is None or self._is_late(live)
        return VmView(
            id=row.id,
            state=row.vm_state,
            gpus=row.gpus,
            device_memory_bytes=row.device_memory_bytes,
            gpu_type=row.gpu_type or "",
            zone=row.zone or row.pool or "",
            created_at=row.created_at,
            connected=live.connected,
            connected_since_start=live.last_message_at is not None,
            silent_since=last_message_at + ahead_s if is_silent else None,
            ready_since=live.changed_at + ahead_s if live.connected else None,
            port_free_at=live.port_free_at + ahead_s if live.rendezvous_port else None,
            listed=live.listed,
            end_reason=live.end_reason,
            notice_deadline=row.notice_deadline,
            drain_deadline=row.drain_deadline,
            slow_ratio=row.slow_ratio,
            slow_reason=row.slow_reason or "",
            quarantined=self.is_quarantined(row.id, row.quarantined_until, now),
            quarantines=row.quarantines,
            hangs=row.hangs,
            deaths=row.deaths,
            last_death_at=row.last_death_at,
            cordoned=row.cordoned_at is not None,
            drained=row.drained_at is not None,
            workers=workers,
            preparing=live.preparing,
            prepared=live.prepared,
            setting_up=live.setting_up,
            warm=live.warm,
            reason=row.reason or "",
        )

    def _is_late(self, live: _Live) -> bool:
        """Whether a heartbeat is missing."""
        return live.last_message_at is not None and self._now() - live.last_message_at > self._silent_after_s

    def _free_port(self, live: _Live) -> int | None:
        """An open port that no generation has used."""
        return live.rendezvous_port if live.rendezvous_port and self._now() >= live.port_free_at else None


def _list_sent(workers: Iterable[Health]) -> set[tuple[tuple[str, int, int], SentAhead]]:
    return {(worker.key, worker.sent_ahead) for worker in workers if worker.sent_ahead is not None}
