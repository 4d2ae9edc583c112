"""All that is only looked at, over one store."""

from __future__ import annotations

from dataclasses import dataclass

from varuna_manager.db.engine import Database
from varuna_manager.domain.retention import KeepDays
from varuna_manager.services.event_list import EventList
from varuna_manager.services.fleet_past import FleetPast
from varuna_manager.services.job_history import JobHistory
from varuna_manager.services.spending import Spending
from varuna_manager.services.step_metrics import StepMetrics
from varuna_manager.services.traces import Traces
from varuna_manager.services.vm_list import VmList
from varuna_manager.services.vm_registry import VmRegistry


@dataclass(frozen=True)
class Views:
    events: EventList
    fleet: FleetPast
    history: JobHistory
    spending: Spending
    steps: StepMetrics
    traces: Traces
    vms: VmList

    @classmethod
    def over(cls, database: Database, registry: VmRegistry, keep: KeepDays | None = None) -> Views:
        """`keep`: how long the store keeps what is over; None: as long as by default."""
        return cls(
            events=EventList(database),
            fleet=FleetPast(database, keep or KeepDays()),
            history=JobHistory(database, registry),
            spending=Spending(database),
            steps=StepMetrics(database),
            traces=Traces(database),
            vms=VmList(database, registry),
        )
