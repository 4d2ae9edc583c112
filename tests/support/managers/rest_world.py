"""The REST API over HTTP, with its real services and a store that the test fills; no loops decide anything."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from sqlalchemy import delete

from http_limits import ONE_CALL_EACH
from varuna_manager.access.audit import AuditLog
from varuna_manager.agents.agent_wheel import AgentWheel
from varuna_manager.agents.reports import ReportService
from varuna_manager.agents.sessions import AgentSessions
from varuna_manager.api.http.access import AccessServices, RequestLimits
from varuna_manager.api.http.app import Services, make_app
from varuna_manager.db.changes import name_changes
from varuna_manager.db.engine import Database
from varuna_manager.db.models import Base, GenerationRow, JobRow, VmRow, WorkerRow
from varuna_manager.fleet.drains import DrainService
from varuna_manager.fleet.fleet import FleetService
from varuna_manager.history.live import LiveFeed, ProgressBoard
from varuna_manager.history.views import Views
from varuna_manager.jobs.archives import ArchiveService
from varuna_manager.jobs.jobs import JobService
from varuna_manager.jobs.logs import LogService
from varuna_manager.jobs.stacks import StackService
from varuna_manager.metrics.exposition import MetricsService
from varuna_manager.metrics.from_store import StoreMetrics
from varuna_manager.metrics.instruments import Instruments
from varuna_manager.planning.planning import PlanningService
from varuna_manager.providers.local import LocalMachine, LocalProvider
from varuna_manager.world.bell import Bell
from varuna_manager.world.events import EventLog
from varuna_manager.world.vm_registry import VmRegistry
from varuna_proto.plan import Plan
from varuna_proto.v1 import agent_pb2 as pb
from waiting import DEADLINE_S, until

SPEC = {"name": "gpt", "workdir": "/w", "run": "true", "global_batch": 8}


@dataclass
class RestWorld:
    database: Database
    provider: LocalProvider
    events: EventLog
    reports: ReportService
    live: LiveFeed
    services: Services
    server: uvicorn.Server
    url: str
    http: httpx.AsyncClient

    async def ask(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        return await self.http.request(method, path, **arguments)

    async def add(self, *rows: Any) -> None:
        async with self.database.write() as session:
            session.add_all(rows)

    async def change(self, job_id: str, **values: Any) -> None:
        await self._change(JobRow, job_id, values)

    async def change_vm(self, vm_id: str, **values: Any) -> None:
        await self._change(VmRow, vm_id, values)

    async def _change(self, kind: type[JobRow] | type[VmRow], row_id: str, values: Mapping[str, Any]) -> None:
        async with self.database.write() as session:
            row = await session.get_one(kind, row_id)
            for name, value in values.items():
                setattr(row, name, value)

    async def empty(self) -> None:
        """Leave nothing in the store but its schema."""
        async with self.database.write() as session:
            for table in reversed(Base.metadata.sorted_tables):
                await session.execute(delete(table), execution_options=name_changes())  # no World follows this store

    async def emit_event(self, kind: str, message: str = "", **about: Any) -> None:
        async with self.database.write() as session:
            self.events.emit_event(session, kind, message, **about)


@asynccontextmanager
async def rest_world(folder: Path, url: str | None = None) -> AsyncIterator[RestWorld]:
    """Over the store at `url`; None: the one in `folder/manager.db`."""
    database = Database(url or f"sqlite:///{folder / 'manager.db'}")
    events, bell, registry, sessions = EventLog(database), Bell(), VmRegistry(), AgentSessions()
    views, board, instruments = Views.make_views(database, registry), ProgressBoard(), Instruments()
    live = LiveFeed(events, views.events, board)
    reports = ReportService(database, events, PlanningService(), bell, board=board)
    provider = LocalProvider(folder, "127.0.0.1:1", LocalMachine(), None)
    fleet = FleetService(database, events, registry, provider, reports, bell, emulated=provider)
    archives = ArchiveService(database, folder / "archives")
    await archives.remove_remains()
    services = Services(
        jobs=JobService(database, events, bell, checkpoint_root="file:///checkpoints"),
        fleet=fleet,
        live=live,
        views=views,
        logs=LogService(database, sessions, provider),
        drains=DrainService(database, fleet, events, bell),
        stacks=StackService(database, sessions, bell),
        archives=archives,
        access=AccessServices(audit=AuditLog(database), tokens=None, enrolments=None, limits=RequestLimits()),
        agent_wheel=AgentWheel(None),
        metrics=MetricsService(instruments, StoreMetrics(database, "local"), lambda: 0),
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        config = uvicorn.Config(make_app(services), log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started, "the server")
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        http = httpx.AsyncClient(base_url=address, trust_env=False, timeout=DEADLINE_S, limits=ONE_CALL_EACH)
        try:
            yield RestWorld(database, provider, events, reports, live, services, server, address, http)
        finally:
            await http.aclose()
            events.close()
            live.close()
            server.should_exit = True
            await serving
            await database.close()


def generation(job_id: str, number: int, created_at: float, **changes: Any) -> GenerationRow:
    """A training generation of two stages on two VMs."""
    values: dict[str, Any] = {
        "job_id": job_id,
        "number": number,
        "kind": "training",
        "state": "ended",
        "history": [],
        "plan": Plan(
            p=2,
            d=1,
            micro_batch=2,
            global_batch=8,
            stage_starts=(0, 4),
            recompute=(False, False),
            memory_bytes=(1, 1),
            predicted_minibatch_s=0.5,
            examples_per_s=16.0,
        ).to_document(),
        "candidates": [
            {"p": 2, "d": 1, "micro_batch": 2, "predicted_minibatch_s": 0.5, "fits": True, "reason": "the fastest"},
            {"p": 1, "d": 2, "micro_batch": 2, "predicted_minibatch_s": None, "fits": False, "reason": "too large"},
        ],
        "rendezvous_host": "h",
        "rendezvous_port": 1,
        "reason": "test",
        "created_at": created_at,
    }
    return GenerationRow(**{**values, **changes})


def worker(job_id: str, number: int, rank: int, vm_id: str, state: str = "exited") -> WorkerRow:
    return WorkerRow(job_id=job_id, generation=number, rank=rank, vm_id=vm_id, local_rank=0, state=state, history=[])


def vm(vm_id: str, created_at: float = 1000.0, state: str = "ready", **changes: Any) -> VmRow:
    history = [{"at": created_at, "state": state, "reason": "test"}]
    values: dict[str, Any] = {"gpus": 1, "ref": {}, "host": "127.0.0.1", "history": history, **changes}
    if state == "gone":
        values.setdefault("gone_at", values["history"][-1]["at"])
    return VmRow(id=vm_id, provider="local", state=state, created_at=created_at, **values)


def report(job_id: str, number: int, steps: range, loss: float) -> pb.Report:
    results = [
        pb.StepResult(step=step, loss=loss + step % 10, step_us=500_000 if step % 2 else 1_500_000, examples=8)
        for step in steps
    ]
    return pb.Report(number=1, steps_completed=pb.StepsCompleted(job_id=job_id, generation=number, steps=results))
