"""The HTTP application: REST under /api/v1, health, and the dashboard at /."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, Request

from varuna_manager.agents.agent_wheel import AgentWheel
from varuna_manager.api.http import description, problems
from varuna_manager.api.http.access import AccessMiddleware, AccessServices
from varuna_manager.api.http.access_routes import access_routes
from varuna_manager.api.http.agent_routes import agent_routes
from varuna_manager.api.http.archives import archive_routes
from varuna_manager.api.http.event_routes import event_routes
from varuna_manager.api.http.fleet_routes import fleet_routes
from varuna_manager.api.http.history_routes import history_routes
from varuna_manager.api.http.job_routes import job_routes, log_routes
from varuna_manager.api.http.metrics_routes import metrics_route, time_requests
from varuna_manager.api.http.overview_routes import overview_routes
from varuna_manager.api.http.page_files import PageFiles, library_routes
from varuna_manager.fleet.drains import DrainService
from varuna_manager.fleet.fleet import FleetService
from varuna_manager.history.live import LiveFeed
from varuna_manager.history.overviews import Overviews
from varuna_manager.history.views import Views
from varuna_manager.jobs.archives import ArchiveService
from varuna_manager.jobs.jobs import JobService
from varuna_manager.jobs.logs import LogService
from varuna_manager.jobs.stacks import StackService
from varuna_manager.metrics.exposition import MetricsService
from varuna_manager.planning.dry_runs import DryRuns


@dataclass(frozen=True, kw_only=True)
class Services:
    jobs: JobService
    fleet: FleetService
    live: LiveFeed
    views: Views
    logs: LogService
    drains: DrainService
    stacks: StackService
    archives: ArchiveService
    access: AccessServices
    agent_wheel: AgentWheel
    metrics: MetricsService


def make_app(services: Services) -> FastAPI:
    """The application that answers from these services."""
    app = FastAPI(
        title="Varuna manager",
        version="1",
        docs_url="/docs",
        redoc_url=None,
        responses=problems.RESPONSES,
        generate_unique_id_function=lambda route: route.name,
        openapi_tags=description.TAGS,
    )
    problems.install(app)
    views = services.views
    dry_runs = DryRuns(views.database, views.vms, services.jobs.explain_no_place)
    app.include_router(job_routes(services.jobs, dry_runs), prefix="/api/v1", tags=["jobs"])
    app.include_router(overview_routes(Overviews(services.fleet, views)), prefix="/api/v1")
    app.include_router(history_routes(views), prefix="/api/v1", tags=["history"])
    app.include_router(log_routes(services.logs, services.stacks), prefix="/api/v1", tags=["logs"])
    app.include_router(fleet_routes(services.fleet, services.drains, views), prefix="/api/v1", tags=["fleet"])
    app.include_router(event_routes(views.events, services.live, services.jobs), prefix="/api/v1", tags=["events"])
    app.include_router(access_routes(services.access), prefix="/api/v1", tags=["access"])
    app.include_router(agent_routes(services.agent_wheel), prefix="/api/v1", tags=["agents"])
    app.include_router(archive_routes(services.archives), prefix="/api/v1", tags=["archives"])
    for prefix in ("", "/api/v1"):
        app.include_router(_health(services), prefix=prefix, tags=["health"], include_in_schema=not prefix)
    app.include_router(metrics_route(services.metrics))
    app.include_router(library_routes())
    app.add_middleware(AccessMiddleware, services=services.access)
    time_requests(app, services.metrics)
    app.mount("/", PageFiles(), name="dashboard")
    description.complete(app)
    return app


def _health(services: Services) -> APIRouter:
    router = APIRouter()

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Answers if the process runs."""
        return {"status": "ok"}

    @router.get("/readyz")
    async def readyz(request: Request) -> dict[str, Any]:
        """Answers if the store answers too."""
        fleet = await services.fleet.describe_fleet()
        return {"status": "ready", "vms": fleet["vms"]}

    return router
