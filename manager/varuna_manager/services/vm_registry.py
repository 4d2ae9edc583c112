"""What is known about VMs this minute: in memory, never written.

Silence is measured with the monotonic clock, so a clock that is set cannot lose a VM. After a restart of the manager
nobody has been heard yet: silence then counts from the start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from varuna_manager.domain.observed import VmView
from varuna_manager.services.vm_rows import VmFacts

_PORT_REUSE_S = 30.0
"""After so long, an agent that still offers a port that was used means a new one with the same number."""


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
    """Micro-batches of evaluations, since it started."""

    @property
    def key(self) -> tuple[str, int, int]:
        """Job, generation and rank."""
        return self.job_id, self.generation, self.rank


@dataclass(kw_only=True)
class _Live:
    heard_at: float | None = None
    connected: bool = False
    changed_at: float
    """When it connected or disconnected."""
    rendezvous_port: int = 0
    used_port: int = 0
    used_at: float = 0.0
    listed: bool | None = None
    workers: tuple[Health, ...] = field(default_factory=tuple)
    running: frozenset[tuple[str, int]] = frozenset()
    """Job and generation of these workers: the same object for as long as they are the same."""
    preparing: frozenset[str] = frozenset()
    prepared: frozenset[str] = frozenset()
    setting_up: frozenset[str] = frozenset()
    warm: frozenset[str] = frozenset()
    evaluated: dict[tuple[str, int, int], _Evaluated] = field(default_factory=dict)
    """By job, generation and rank."""
    changed_in: int = 0
    """Which change was the last in which more than its times became another."""


@dataclass(frozen=True)
class _Evaluated:
    micro_batches: int
    at: float
    """When there were first so many."""


class VmRegistry:
    def __init__(self, monotonic: Callable[[], float] = time.monotonic, *, heartbeat_interval_s: float = 1.0) -> None:
        self._now = monotonic
        self._silent_after_s = 1.5 * heartbeat_interval_s
        self._started_at = monotonic()
        self._live: dict[str, _Live] = {}
        self._changes = 0
        self._evaluating: set[str] = set()
        """VMs whose workers have told of evaluations: few, if any."""
        self._away: set[str] = set()
        """VMs that were connected once and are not now."""
        self._quarantines: dict[str, tuple[float, float]] = {}
        """By VM: until when by the wall clock, and by the monotonic one."""
        self.market_hazard: float | None = None
        """Removals per VM-hour to expect, by what the provider says; None: it says nothing."""

    def _of(self, vm_id: str) -> _Live:
        live = self._live.get(vm_id)
        if live is None:
            live = self._live[vm_id] = _Live(changed_at=self._now())
        return live

    def monotonic_s(self) -> float:
        """The clock by which silence is measured."""
        return self._now()

    def is_quarantined(self, vm_id: str, until: float | None, now: float) -> bool:
        """Whether its quarantine lasts, which ends at `until`.

        `now`: the wall clock, which is asked once. From then on the monotonic one tells when the quarantine is over.
        """
        if until is None:
            self._quarantines.pop(vm_id, None)
            return False
        known = self._quarantines.get(vm_id)
        if known is None or known[0] != until:
            known = self._quarantines[vm_id] = (until, self._now() + max(until - now, 0.0))
        return self._now() < known[1]

    def hello(self, vm_id: str, *, rendezvous_port: int, workers: Sequence[Health]) -> None:
        live = self._of(vm_id)
        live.connected, live.changed_at = True, self._now()
        self._note_change(live)
        self._away.discard(vm_id)
        # Its first heartbeat tells what is prepared; until then that is taken to be as it was.
        self.heartbeat(
            vm_id,
            rendezvous_port=rendezvous_port,
            workers=workers,
            prepared=live.prepared,
            setting_up=live.setting_up,
        )

    def heartbeat(
        self,
        vm_id: str,
        *,
        rendezvous_port: int,
        workers: Sequence[Health],
        preparing: Iterable[str] = (),
        prepared: Iterable[str] = (),
        setting_up: Iterable[str] = (),
        warm: Iterable[str] = (),
    ) -> bool:
        """Note that the VM lives; whether this is news for the decisions (another port, heard after silence, ...)."""
        live = self._of(vm_id)
        now = self._now()
        was_silent = live.heard_at is None or now - live.heard_at > self._silent_after_s
        jobs = frozenset(preparing), frozenset(prepared), frozenset(setting_up), frozenset(warm)
        known = live.preparing, live.prepared, live.setting_up, live.warm
        news = was_silent or live.rendezvous_port != rendezvous_port or known != jobs
        live.preparing, live.prepared, live.setting_up, live.warm = jobs
        if known != jobs or live.heard_at is None:
            self._note_change(live)
        live.heard_at, live.rendezvous_port, live.workers = now, rendezvous_port, tuple(workers)
        running = frozenset([(worker.job_id, worker.generation) for worker in workers])
        if running != live.running:
            live.running = running
        if live.evaluated or any(worker.evaluated for worker in workers):
            self._note_evaluations(vm_id, live)
        return news

    def _note_evaluations(self, vm_id: str, live: _Live) -> None:
        self._evaluating.add(vm_id)
        before, live.evaluated = live.evaluated, {}
        for worker in live.workers:
            key = worker.key
            known = before.get(key, _Evaluated(0, 0.0))
            if worker.evaluated > known.micro_batches:
                known = _Evaluated(worker.evaluated, self._now())
            if known.micro_batches:  # a hello does not say how many: they are not forgotten for that
                live.evaluated[key] = known

    def evaluated_s(self, job_id: str, generation: int, vm_ids: Collection[str]) -> float | None:
        """How long ago a worker of the generation was first heard to have evaluated more; None: that never was.

        `vm_ids`: where its workers are: of them, no other agent is heard.
        """
        at = [
            evaluated.at
            for vm_id in self._evaluating.intersection(vm_ids)
            for (of_job, number, _), evaluated in self._live[vm_id].evaluated.items()
            if (of_job, number) == (job_id, generation)
        ]
        return self._now() - max(at) if at else None

    def disconnected(self, vm_id: str) -> None:
        live = self._of(vm_id)
        live.connected, live.changed_at = False, self._now()
        self._note_change(live)
        self._away.add(vm_id)

    def set_listed(self, vm_id: str, listed: bool) -> None:
        live = self._of(vm_id)
        if live.listed is not listed:
            live.listed = listed
            self._note_change(live)

    def forget(self, vm_id: str) -> None:
        self._live.pop(vm_id, None)
        self._evaluating.discard(vm_id)
        self._away.discard(vm_id)
        self._quarantines.pop(vm_id, None)

    def rendezvous_port(self, vm_id: str) -> int | None:
        """A port that the agent holds open and that no generation has used; None: it has not offered one yet."""
        live = self._live.get(vm_id)
        return None if live is None else self.port(live)

    def use_rendezvous_port(self, vm_id: str, port: int) -> None:
        live = self._of(vm_id)
        live.used_port, live.used_at = port, self._now()

    def workers(self, vm_id: str) -> tuple[Health, ...]:
        live = self._live.get(vm_id)
        return live.workers if live is not None else ()

    def running(self, vm_id: str) -> frozenset[tuple[str, int]]:
        """Job and generation of the workers that its agent said run there, when it was last heard."""
        live = self._live.get(vm_id)
        return live.running if live is not None else frozenset()

    def last_heard_s(self, vm_id: str) -> float | None:
        live = self._live.get(vm_id)
        return None if live is None or live.heard_at is None else self._now() - live.heard_at

    def just_disconnected(self, within_s: float) -> bool:
        """Whether a stream broke a moment ago: the provider may need that moment to see why."""
        return any(self._now() - self._live[vm_id].changed_at < within_s for vm_id in self._away)

    def steps(self, job_id: str, generation: int, places: Mapping[int, str]) -> dict[int, int]:
        """By rank, the last step that each worker has completed, as its agent last said; heard ones only.

        `places`: by rank, the VM of the worker: no other agent is heard of it.
        """
        return {
            health.rank: health.step
            for vm_id in set(places.values()) & self._live.keys()
            for health in self._live[vm_id].workers
            if (health.job_id, health.generation) == (job_id, generation) and places.get(health.rank) == vm_id
        }

    def changed_since(self, seen: int) -> tuple[int, set[str]]:
        """(how many changes there were by now, the VMs with one after the first `seen`). That a VM is heard is none."""
        return self._changes, {vm_id for vm_id, live in self._live.items() if live.changed_in > seen}

    def _note_change(self, live: _Live) -> None:
        self._changes += 1
        live.changed_in = self._changes

    def view(self, row: VmFacts, *, now: Callable[[], float], workers: int) -> VmView:
        """The row and what is known of the VM. Its times are those of when they are asked for.

        Args:
            now: the wall clock, for ages.
            workers: those that have not stopped there.
        """
        view = object.__new__(_TimedView)  # the constructor would set the times
        live = self._live.get(row.id) or _Live(changed_at=self._started_at)
        view.__dict__.update(
            _registry=self,
            _live=live,
            _now=now,
            _created_at=row.created_at,
            id=row.id,
            state=row.vm_state,
            gpus=row.gpus,
            device_memory_bytes=row.device_memory_bytes,
            gpu_type=row.gpu_type or "",
            connected=live.connected,
            heard_since_start=live.heard_at is not None,
            listed=live.listed,
            notice_deadline=row.notice_deadline,
            drain_deadline=row.drain_deadline,
            slow_ratio=row.slow_ratio,
            slow_reason=row.slow_reason or "",
            quarantined=self.is_quarantined(row.id, row.quarantined_until, now()),
            quarantines=row.quarantines,
            hangs=row.hangs,
            deaths=row.deaths,
            last_death_at=row.last_death_at,
            cordoned=row.cordoned_at is not None,
            workers=workers,
            preparing=live.preparing,
            prepared=live.prepared,
            setting_up=live.setting_up,
            warm=live.warm,
            reason=row.reason or "",
        )
        return view

    def silent_s(self, live: _Live) -> float:
        return self._now() - (self._started_at if live.heard_at is None else live.heard_at)

    def ready_for_s(self, live: _Live) -> float:
        return self._now() - live.changed_at if live.connected else 0.0

    def port(self, live: _Live) -> int | None:
        """One that is open and that no generation has used."""
        if not live.rendezvous_port:
            return None
        used = live.rendezvous_port == live.used_port and self._now() - live.used_at < _PORT_REUSE_S
        return None if used else live.rendezvous_port


class _TimedView(VmView):
    """A view that stays true for as long as nothing but time passes."""

    _registry: VmRegistry
    _live: _Live
    _now: Callable[[], float]
    _created_at: float

    @property
    def silent_s(self) -> float:
        return self._registry.silent_s(self._live)

    @property
    def ready_for_s(self) -> float:
        return self._registry.ready_for_s(self._live)

    @property
    def age_s(self) -> float:
        return self._now() - self._created_at

    @property
    def has_rendezvous_port(self) -> bool:
        return self._registry.port(self._live) is not None
