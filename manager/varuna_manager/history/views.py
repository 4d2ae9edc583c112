"""All readers of one store."""

from __future__ import annotations

from dataclasses import dataclass

from varuna_manager.db.engine import Database
from varuna_manager.domain.retention import KeepDays
from varuna_manager.fleet.vm_list import VmList
from varuna_manager.fleet.vm_usage import UsageBoard, UsageList
from varuna_manager.history.event_list import EventList
from varuna_manager.history.fleet_history import FleetHistoryService
from varuna_manager.history.job_history import JobHistory
from varuna_manager.history.logged_values import LoggedValues
from varuna_manager.history.spending import Spending
from varuna_manager.history.step_metrics import StepMetrics
from varuna_manager.history.traces import Traces
from varuna_manager.world.vm_registry import VmRegistry


@dataclass(frozen=True)
class Views:
    database: Database
    events: EventList
    fleet: FleetHistoryService
    history: JobHistory
    logged: LoggedValues
    spending: Spending
    steps: StepMetrics
    traces: Traces
    vms: VmList
    usage: UsageList

    @classmethod
    def make_views(
        cls,
        database: Database,
        registry: VmRegistry,
        keep: KeepDays | None = None,
        board: UsageBoard | None = None,
    ) -> Views:
        """`keep`: how long the store keeps ended things; None: the default. `board`: what is not stored yet of the VMs'
        usage."""
        return cls(
            database=database,
            events=EventList(database),
            fleet=FleetHistoryService(database, keep or KeepDays()),
            history=JobHistory(database, registry),
            logged=LoggedValues(database),
            spending=Spending(database),
            steps=StepMetrics(database),
            traces=Traces(database),
            vms=VmList(database, registry),
            usage=UsageList(database, board),
        )
