"""The HTTP application: REST under /api/v1, health, and the status page at /."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ConfigDict, Field

from varuna_manager.api.http import problems
from varuna_manager.api.http.access import AccessMiddleware, AccessServices
from varuna_manager.api.http.access_routes import access_routes
from varuna_manager.domain.spec import JobSpec
from varuna_manager.services import documents
from varuna_manager.services.documents import Document
from varuna_manager.services.drains import DrainService
from varuna_manager.services.events import EventLog
from varuna_manager.services.fleet import FleetService
from varuna_manager.services.jobs import JobService
from varuna_manager.services.logs import LogService
from varuna_manager.services.stacks import StackService

_PAGE = 1000
_MAX_PAGE = 10_000
_MAX_INT = 2**31 - 1
_MAX_OFFSET = 2**53
"""Of the store's columns."""


@dataclass(frozen=True, kw_only=True)
class Services:
    jobs: JobService
    fleet: FleetService
    events: EventLog
    logs: LogService
    drains: DrainService
    stacks: StackService
    access: AccessServices


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PreemptBody(_Body):
    notice_s: float = Field(default=0.0, ge=0, description="0: taken at once, without notice")


class CancelBody(_Body):
    save: bool = Field(default=False, description="finish the step and write a last checkpoint first")


class DrainBody(_Body):
    deadline_s: float | None = Field(
        default=None, ge=0, le=7 * 86400, description="the VM is to be empty by then, saved or not; null: when it is"
    )


class FleetBody(_Body):
    target: int = Field(ge=0, le=100_000, description="VMs that are wanted")


class LocalBody(_Body):
    capacity: int | None = Field(ge=0, description="VMs that the emulated market grants; null: any number")


Limit = Annotated[int, Query(ge=1, le=_MAX_PAGE)]
Number = Annotated[int, Query(ge=0, le=_MAX_INT)]


def make_app(services: Services) -> FastAPI:
    """The application over these services."""
    app = FastAPI(title="Varuna manager", version="1", docs_url="/docs", redoc_url=None, responses=problems.RESPONSES)
    problems.install(app)
    app.include_router(_jobs(services), prefix="/api/v1", tags=["jobs"])
    app.include_router(_fleet(services), prefix="/api/v1", tags=["fleet"])
    app.include_router(_events(services), prefix="/api/v1", tags=["events"])
    app.include_router(access_routes(services.access), prefix="/api/v1", tags=["access"])
    for prefix in ("", "/api/v1"):
        app.include_router(_health(services), prefix=prefix, tags=["health"], include_in_schema=not prefix)
    dashboard = Path(str(resources.files("varuna_manager") / "dashboard"))
    app.add_middleware(AccessMiddleware, services=services.access)
    app.mount("/", StaticFiles(directory=dashboard, html=True), name="dashboard")
    return app


def _jobs(services: Services) -> APIRouter:
    router = APIRouter()
    jobs = services.jobs

    @router.post("/jobs", status_code=201)
    async def submit(spec: JobSpec, idempotency_key: Annotated[str | None, Header(max_length=255)] = None) -> Document:
        return await jobs.submit(spec, idempotency_key)

    @router.get("/jobs")
    async def all_jobs() -> list[Document]:
        return await jobs.all()

    @router.get("/jobs/{job}")
    async def one(job: str) -> Document:
        return await jobs.one(job)

    @router.post("/jobs/{job}/cancel")
    async def cancel(job: str, body: CancelBody | None = None) -> Document:
        return await jobs.cancel(job, save=body is not None and body.save)

    @router.post("/jobs/{job}/retry")
    async def retry(job: str) -> Document:
        """Go on with a job that failed or was cancelled, from its newest checkpoint."""
        return await jobs.retry(job)

    @router.get("/jobs/{job}/generations")
    async def generations(job: str) -> list[Document]:
        return await jobs.generations(job)

    @router.get("/jobs/{job}/metrics")
    async def metrics(job: str, after_step: Number = 0, limit: Limit = _MAX_PAGE) -> list[Document]:
        return await jobs.metrics(job, after_step, limit)

    @router.get("/jobs/{job}/events")
    async def events(job: str, after: Number = 0, limit: Limit = _PAGE) -> list[Document]:
        return [documents.event_document(row) for row in await jobs.events(job, after, limit)]

    @router.get("/jobs/{job}/checkpoints")
    async def checkpoints(job: str) -> list[Document]:
        return await jobs.checkpoints(job)

    @router.get("/jobs/{job}/stacks")
    async def stacks(job: str, generation: Annotated[int | None, Query(ge=1, le=_MAX_INT)] = None) -> list[Document]:
        """Where the ranks of a generation that hung stood; without `generation`: of all that did."""
        return await services.stacks.read(job, generation)

    @router.get("/jobs/{job}/profile", response_class=Response)
    async def profile(job: str) -> Response:
        """The profile document that the job's plans are made from; 404 before it is measured."""
        return Response(await jobs.profile(job), media_type="application/json")

    @router.get("/jobs/{job}/logs", response_class=Response)
    async def logs(
        job: str,
        generation: Annotated[int | None, Query(ge=1, le=_MAX_INT)] = None,
        rank: Number = 0,
        offset: Annotated[int, Query(ge=-_MAX_OFFSET, le=_MAX_OFFSET)] = 0,
    ) -> Response:
        data = await services.logs.read(job, generation, rank, offset)
        return Response(data, media_type="text/plain; charset=utf-8")

    return router


def _fleet(services: Services) -> APIRouter:
    router = APIRouter()
    fleet = services.fleet

    @router.get("/vms")
    async def vms(gone: bool = True) -> list[Document]:
        """All VMs, the oldest first; `gone=false` leaves out those that are no more."""
        return await fleet.vms(with_gone=gone)

    @router.post("/vms/{vm}/preempt")
    async def preempt(vm: str, body: PreemptBody) -> Document:
        return await fleet.preempt(vm, body.notice_s)

    @router.post("/vms/{vm}/drain")
    async def drain(vm: str, body: DrainBody | None = None) -> Document:
        """Take the VM out of use: its workers save and leave, then it is given back."""
        return await services.drains.drain(vm, None if body is None else body.deadline_s)

    @router.get("/fleet")
    async def get_fleet() -> Document:
        return await fleet.fleet()

    @router.put("/fleet")
    async def put_fleet(body: FleetBody) -> Document:
        return await fleet.set_target(body.target)

    @router.put("/providers/local")
    async def put_local(body: LocalBody) -> Document:
        return await fleet.set_capacity(body.capacity)

    return router


def _events(services: Services) -> APIRouter:
    router = APIRouter()

    @router.get("/events")
    async def events(after: Number = 0, limit: Limit = _PAGE) -> list[Document]:
        return [documents.event_document(row) for row in await services.events.after(after, limit=limit)]

    @router.get("/events/stream", response_class=StreamingResponse)
    async def stream(
        after: Number = 0, last_event_id: Annotated[int | None, Header(ge=0, le=_MAX_INT)] = None
    ) -> StreamingResponse:
        """Server-sent events: what comes after Last-Event-ID (or `after`), and all that follows."""
        start = after if last_event_id is None else last_event_id
        return StreamingResponse(_server_sent(services.events, start), media_type="text/event-stream")

    return router


async def _server_sent(events: EventLog, after: int) -> AsyncIterator[str]:
    async for row in events.follow(after):
        if row is None:
            yield ": still here\n\n"
        else:
            data = json.dumps(documents.event_document(row))
            yield f"id: {row.id}\nevent: {row.kind}\ndata: {data}\n\n"


def _health(services: Services) -> APIRouter:
    router = APIRouter()

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        """The process answers."""
        return {"status": "ok"}

    @router.get("/readyz")
    async def readyz(request: Request) -> dict[str, Any]:
        """The store answers too."""
        fleet = await services.fleet.fleet()
        return {"status": "ready", "vms": fleet["vms"]}

    return router
