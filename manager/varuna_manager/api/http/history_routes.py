"""What a job has behind it: generations, plans, steps, time, cost, the pipeline, checkpoints."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from varuna_manager.api.http import parameters as by
from varuna_manager.api.http.parameters import Direction
from varuna_manager.services.spending import MOST_VMS
from varuna_manager.services.views import Views
from varuna_proto import rest

_Generation = Annotated[int, Path(ge=1, le=by.MOST_INT)]


def history_routes(views: Views) -> APIRouter:
    router = APIRouter(prefix="/jobs/{job}")
    _generation_routes(router, views)
    _account_routes(router, views)
    return router


def _generation_routes(router: APIRouter, views: Views) -> None:
    @router.get("/generations")
    async def list_generations(
        request: Request,
        response: Response,
        job: by.JobName,
        brief: Annotated[bool, Query(description="without candidates, placement and workers, which are long")] = False,
        order: by.Order = Direction.ASC,
        limit: by.Limit = by.DEFAULT_LIMIT,
        cursor: by.Cursor = None,
    ) -> list[rest.Generation]:
        """The job's generations, each with its phases."""
        found = await views.history.generations(
            job, brief=brief, descending=order is Direction.DESC, limit=limit, cursor=cursor
        )
        by.link_next(request, response, found.next_cursor)
        return by.as_told(found.items)

    @router.get("/generations/{generation}")
    async def get_generation(job: by.JobName, generation: _Generation) -> rest.Generation:
        """One of them."""
        return by.as_told(await views.history.generation(job, generation))

    @router.get("/plans")
    async def list_plans(
        request: Request,
        response: Response,
        job: by.JobName,
        limit: by.JobLimit = 100,
        cursor: by.Cursor = None,
    ) -> list[rest.PlanRecord]:
        """The plans by which the job trained, newest first: what was predicted, and what it was."""
        found = await views.history.plans(job, limit=limit, cursor=cursor)
        by.link_next(request, response, found.next_cursor)
        return by.as_told(found.items)

    @router.get("/plans/newest")
    async def get_newest_plan(job: by.JobName) -> rest.PlanRecord:
        """The newest plan, with all that was considered and why it lost."""
        return by.as_told(await views.history.plan(job, None))

    @router.get("/plans/{generation}")
    async def get_plan(job: by.JobName, generation: _Generation) -> rest.PlanRecord:
        """The plan of a generation, with all that was considered and why it lost."""
        return by.as_told(await views.history.plan(job, generation))

    @router.get("/checkpoints")
    async def list_checkpoints(
        request: Request,
        response: Response,
        job: by.JobName,
        order: by.Order = Direction.ASC,
        limit: by.Limit = by.DEFAULT_LIMIT,
        cursor: by.Cursor = None,
    ) -> list[rest.Checkpoint]:
        """The checkpoints that were committed."""
        descending = order is Direction.DESC
        found = await views.history.checkpoints(job, descending=descending, limit=limit, cursor=cursor)
        by.link_next(request, response, found.next_cursor)
        return by.as_told(found.items)


def _account_routes(router: APIRouter, views: Views) -> None:
    @router.get("/metrics")
    async def list_steps(
        job: by.JobName,
        after_step: Annotated[int, Query(ge=0, le=2**53)] = 0,
        limit: by.Limit = 10_000,
    ) -> list[rest.Metric]:
        """Every step after `after_step`. For charts: /metrics/buckets."""
        return by.as_told(await views.steps.steps(job, after_step, limit))

    @router.get("/metrics/buckets")
    async def get_metric_buckets(
        job: by.JobName,
        points: Annotated[int, Query(ge=1, le=10_000, description="the most buckets")] = 2000,
        from_step: by.Step = 1,
        to_step: Annotated[int | None, Query(ge=1, le=2**53, description="null: the newest")] = None,
    ) -> rest.MetricBuckets:
        """Loss, step time and examples per second of any number of steps, as columns for a chart.

        Of wide buckets the first begins at a multiple of a hundred steps, at or before `from_step`.
        """
        return by.as_told(await views.steps.buckets(job, points, from_step, to_step))

    @router.get("/time")
    async def get_time(job: by.JobName) -> rest.JobTime:
        """Where the job's time went: training, bubbles, morphs, redone steps, waiting for VMs, calibration."""
        return by.as_told(await views.spending.time(job))

    @router.get("/cost")
    async def get_cost(
        job: by.JobName,
        vms: Annotated[int, Query(ge=0, le=MOST_VMS, description="the most VMs in by_vm")] = MOST_VMS,
    ) -> rest.JobCost:
        """The job's VM-hours, and what they cost where the provider tells prices."""
        return by.as_told(await views.spending.cost(job, vms))

    @router.get("/pipeline")
    async def get_pipeline(
        job: by.JobName, generation: Annotated[int | None, Query(ge=1, le=by.MOST_INT)] = None
    ) -> rest.Pipeline:
        """What each stage did in the newest mini-batch that was traced; 404 before there is one."""
        return by.as_told(await views.traces.newest(job, generation))
