"""What is known about VMs this minute: in memory, never written.

Silence is measured with the monotonic clock, so a clock that is set cannot lose a VM. After a restart of the manager
nobody has been heard yet: silence then counts from the start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from varuna_manager.db.models import VmRow
from varuna_manager.domain.observed import VmView
from varuna_manager.domain.states import VmState

_STATES = {state.value: state for state in VmState}
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
    preparing: frozenset[str] = frozenset()
    evaluated: dict[tuple[str, int, int], _Evaluated] = field(default_factory=dict)
    """By job, generation and rank."""


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
        self._evaluating: set[str] = set()
        """VMs whose workers have told of evaluations: few, if any."""
        self._away: set[str] = set()
        """VMs that were connected once and are not now."""

    def _of(self, vm_id: str) -> _Live:
        live = self._live.get(vm_id)
        if live is None:
            live = self._live[vm_id] = _Live(changed_at=self._now())
        return live

    def hello(self, vm_id: str, *, rendezvous_port: int, workers: Sequence[Health]) -> None:
        live = self._of(vm_id)
        live.connected, live.changed_at = True, self._now()
        self._away.discard(vm_id)
        self.heartbeat(vm_id, rendezvous_port=rendezvous_port, workers=workers)

    def heartbeat(
        self, vm_id: str, *, rendezvous_port: int, workers: Sequence[Health], preparing: Iterable[str] = ()
    ) -> bool:
        """Note that the VM lives; whether this is news for the decisions (another port, heard after silence, ...)."""
        live = self._of(vm_id)
        now = self._now()
        was_silent = live.heard_at is None or now - live.heard_at > self._silent_after_s
        jobs = frozenset(preparing)
        news = was_silent or live.rendezvous_port != rendezvous_port or live.preparing != jobs
        live.preparing = jobs
        live.heard_at, live.rendezvous_port, live.workers = now, rendezvous_port, tuple(workers)
        if live.evaluated or any(worker.evaluated for worker in workers):
            self._note_evaluations(vm_id, live)
        return news

    def _note_evaluations(self, vm_id: str, live: _Live) -> None:
        self._evaluating.add(vm_id)
        before, live.evaluated = live.evaluated, {}
        for worker in live.workers:
            key = (worker.job_id, worker.generation, worker.rank)
            known = before.get(key, _Evaluated(0, 0.0))
            if worker.evaluated > known.micro_batches:
                known = _Evaluated(worker.evaluated, self._now())
            if known.micro_batches:  # a hello does not say how many: they are not forgotten for that
                live.evaluated[key] = known

    def evaluated_s(self, job_id: str, generation: int) -> float | None:
        """How long ago a worker of the generation was first heard to have evaluated more; None: that never was."""
        at = [
            evaluated.at
            for vm_id in self._evaluating
            for (of_job, number, _), evaluated in self._live[vm_id].evaluated.items()
            if (of_job, number) == (job_id, generation)
        ]
        return self._now() - max(at) if at else None

    def disconnected(self, vm_id: str) -> None:
        live = self._of(vm_id)
        live.connected, live.changed_at = False, self._now()
        self._away.add(vm_id)

    def set_listed(self, vm_id: str, listed: bool) -> None:
        self._of(vm_id).listed = listed

    def forget(self, vm_id: str) -> None:
        self._live.pop(vm_id, None)
        self._evaluating.discard(vm_id)
        self._away.discard(vm_id)

    def rendezvous_port(self, vm_id: str) -> int | None:
        """A port that the agent holds open and that no generation has used; None: it has not offered one yet."""
        live = self._live.get(vm_id)
        return None if live is None else self._port(live)

    def _port(self, live: _Live) -> int | None:
        if not live.rendezvous_port:
            return None
        used = live.rendezvous_port == live.used_port and self._now() - live.used_at < _PORT_REUSE_S
        return None if used else live.rendezvous_port

    def use_rendezvous_port(self, vm_id: str, port: int) -> None:
        live = self._of(vm_id)
        live.used_port, live.used_at = port, self._now()

    def workers(self, vm_id: str) -> tuple[Health, ...]:
        live = self._live.get(vm_id)
        return live.workers if live is not None else ()

    def last_heard_s(self, vm_id: str) -> float | None:
        live = self._live.get(vm_id)
        return None if live is None or live.heard_at is None else self._now() - live.heard_at

    def just_disconnected(self, within_s: float) -> bool:
        """Whether a stream broke a moment ago: the provider may need that moment to see why."""
        return any(self._now() - self._live[vm_id].changed_at < within_s for vm_id in self._away)

    def view(self, row: VmRow, *, now: float, workers: int) -> VmView:
        """The row and what is known of it now. `now`: the wall clock, for ages; `workers`: those not stopped there."""
        live = self._live.get(row.id) or _Live(changed_at=self._started_at)
        heard_at = live.heard_at if live.heard_at is not None else self._started_at
        at = self._now()
        # By the constructor it takes three times as long, for it sets each of the frozen fields by a call: at ten
        # thousand VMs that is most of a look.
        view = object.__new__(VmView)
        view.__dict__.update(
            id=row.id,
            state=_STATES[row.state],
            gpus=row.gpus,
            device_memory_bytes=row.device_memory_bytes,
            connected=live.connected,
            heard_since_start=live.heard_at is not None,
            silent_s=at - heard_at,
            ready_for_s=at - live.changed_at if live.connected else 0.0,
            age_s=now - row.created_at,
            listed=live.listed,
            notice_deadline=row.notice_deadline,
            drain_deadline=row.drain_deadline,
            slow_ratio=row.slow_ratio,
            slow_reason=row.slow_reason or "",
            quarantined=row.quarantined_until is not None and now < row.quarantined_until,
            quarantines=row.quarantines,
            hangs=row.hangs,
            workers=workers,
            has_rendezvous_port=self._port(live) is not None,
            preparing=live.preparing,
            reason=row.reason or "",
        )
        return view
