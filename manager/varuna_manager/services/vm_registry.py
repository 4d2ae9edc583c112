"""What is known about VMs this minute: in memory, never written.

Silence is measured with the monotonic clock, so a clock that is set cannot lose a VM. After a restart of the manager
nobody has been heard yet: silence then counts from the start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from varuna_manager.db.models import VmRow
from varuna_manager.domain.observed import VmView
from varuna_manager.domain.states import VmState

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
    evaluated: dict[tuple[str, int, int], _Evaluated] = field(default_factory=dict)
    """By job, generation and rank."""


@dataclass(frozen=True)
class _Evaluated:
    micro_batches: int
    at: float
    """When there were first so many."""


class VmRegistry:
    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._now = monotonic
        self._started_at = monotonic()
        self._live: dict[str, _Live] = {}

    def _of(self, vm_id: str) -> _Live:
        return self._live.setdefault(vm_id, _Live(changed_at=self._now()))

    def hello(self, vm_id: str, *, rendezvous_port: int, workers: Sequence[Health]) -> None:
        live = self._of(vm_id)
        live.connected, live.changed_at = True, self._now()
        self.heartbeat(vm_id, rendezvous_port=rendezvous_port, workers=workers)

    def heartbeat(self, vm_id: str, *, rendezvous_port: int, workers: Sequence[Health]) -> bool:
        """Note that the VM lives; whether this is news for the decisions (another port, heard after silence)."""
        live = self._of(vm_id)
        was_silent = live.heard_at is None or self._now() - live.heard_at > 1.5
        news = was_silent or live.rendezvous_port != rendezvous_port
        live.heard_at, live.rendezvous_port, live.workers = self._now(), rendezvous_port, tuple(workers)
        self._note_evaluations(live)
        return news

    def _note_evaluations(self, live: _Live) -> None:
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
            for live in self._live.values()
            for (of_job, number, _), evaluated in live.evaluated.items()
            if (of_job, number) == (job_id, generation)
        ]
        return self._now() - max(at) if at else None

    def disconnected(self, vm_id: str) -> None:
        live = self._of(vm_id)
        live.connected, live.changed_at = False, self._now()

    def set_listed(self, vm_id: str, listed: bool) -> None:
        self._of(vm_id).listed = listed

    def forget(self, vm_id: str) -> None:
        self._live.pop(vm_id, None)

    def rendezvous_port(self, vm_id: str) -> int | None:
        """A port that the agent holds open and that no generation has used; None: it has not offered one yet."""
        live = self._live.get(vm_id)
        if live is None or not live.rendezvous_port:
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
        return any(not live.connected and self._now() - live.changed_at < within_s for live in self._live.values())

    def view(self, row: VmRow, *, now: float, workers: int) -> VmView:
        """The row and what is known of it now. `now`: the wall clock, for ages; `workers`: those not stopped there."""
        live = self._live.get(row.id) or _Live(changed_at=self._started_at)
        heard_at = live.heard_at if live.heard_at is not None else self._started_at
        return VmView(
            id=row.id,
            state=VmState(row.state),
            gpus=row.gpus,
            device_memory_bytes=row.device_memory_bytes,
            connected=live.connected,
            heard_since_start=live.heard_at is not None,
            silent_s=self._now() - heard_at,
            ready_for_s=self._now() - live.changed_at if live.connected else 0.0,
            age_s=now - row.created_at,
            listed=live.listed,
            notice_deadline=row.notice_deadline,
            slow_ratio=row.slow_ratio,
            slow_reason=row.slow_reason or "",
            quarantined=row.quarantined_until is not None and now < row.quarantined_until,
            quarantines=row.quarantines,
            workers=workers,
            has_rendezvous_port=self.rendezvous_port(row.id) is not None,
            reason=row.reason or "",
        )
