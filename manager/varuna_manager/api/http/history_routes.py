"""A job's history: generations, plans, steps, time, cost, the pipeline, checkpoints."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from varuna_manager.api.http import parameters as by
from varuna_manager.api.http.parameters import Direction
from varuna_manager.history.spending import MOST_VMS
from varuna_manager.history.views import Views
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
        brief: Annotated[bool, Query(description="leave out candidates, placement and workers")] = False,
        order: by.Order = Direction.ASC,
        limit: by.Limit = by.DEFAULT_LIMIT,
        cursor: by.Cursor = None,
    ) -> list[rest.GenerationDocument]:
        """The job's generations, each with its phases."""
        found = await views.history.list_generations(
            job, brief=brief, descending=order is Direction.DESC, limit=limit, cursor=cursor
        )
        by.link_next(request, response, found.next_cursor)
        return found.items

    @router.get("/generations/{generation}")
    async def get_generation(job: by.JobName, generation: _Generation) -> rest.GenerationDocument:
        """One generation."""
        return await views.history.find_generation(job, generation)

    @router.get("/plans")
    async def list_plans(
        request: Request,
        response: Response,
        job: by.JobName,
        limit: by.JobLimit = 100,
        cursor: by.Cursor = None,
    ) -> list[rest.PlanRecordDocument]:
        """The plans of the job's training generations, newest first, with predicted and actual step times."""
        found = await views.history.list_plans(job, limit=limit, cursor=cursor)
        by.link_next(request, response, found.next_cursor)
        return found.items

    @router.get("/plans/newest")
    async def get_newest_plan(job: by.JobName) -> rest.PlanRecordDocument:
        """The newest plan, with the other candidates and why they lost."""
        return await views.history.find_plan(job, None)

    @router.get("/plans/{generation}")
    async def get_plan(job: by.JobName, generation: _Generation) -> rest.PlanRecordDocument:
        """The plan of a generation, with the other candidates and why they lost."""
        return await views.history.find_plan(job, generation)

    @router.get("/checkpoints")
    async def list_checkpoints(
        request: Request,
        response: Response,
        job: by.JobName,
        order: by.Order = Direction.ASC,
        limit: by.Limit = by.DEFAULT_LIMIT,
        cursor: by.Cursor = None,
    ) -> list[rest.CheckpointDocument]:
        """The checkpoints that were committed, with those that newer ones have replaced since."""
        descending = order is Direction.DESC
        found = await views.history.list_checkpoints(job, descending=descending, limit=limit, cursor=cursor)
        by.link_next(request, response, found.next_cursor)
        return found.items


def _account_routes(router: APIRouter, views: Views) -> None:
    @router.get("/metrics")
    async def list_steps(
        job: by.JobName,
        after_step: Annotated[int, Query(ge=0, le=2**53)] = 0,
        limit: by.Limit = 10_000,
    ) -> list[rest.StepMetricsDocument]:
        """Every step after `after_step`. For charts, use /metrics/buckets."""
        return await views.steps.list_steps(job, after_step, limit)

    @router.get("/metrics/buckets")
    async def get_metric_buckets(
        job: by.JobName,
        points: Annotated[int, Query(ge=1, le=10_000, description="most buckets")] = 2000,
        from_step: by.Step = 1,
        to_step: Annotated[int | None, Query(ge=1, le=2**53, description="null: the newest step")] = None,
    ) -> rest.MetricBucketsDocument:
        """Loss, step time and examples per second over any number of steps, as columns for a chart.

        Wide buckets start at a multiple of 100 steps, so that the first one may start before `from_step`.
        """
        return await views.steps.read_buckets(job, points, from_step, to_step)

    @router.get("/metrics/logged")
    async def list_logged_values(
        job: by.JobName,
        name: Annotated[list[str] | None, Query(description="only these names; null: all", max_length=64)] = None,
        points: Annotated[int, Query(ge=1, le=10_000, description="most values of each name")] = 2000,
        after_step: Annotated[int | None, Query(ge=0, le=2**53, description="null: all steps")] = None,
    ) -> list[rest.LoggedSeriesDocument]:
        """What the job's script has logged by `varuna.log`, by name.

        Of many values, the last in each run of steps is listed.
        """
        return await views.logged.read_series(job, name, points=points, after_step=after_step)

    @router.get("/time")
    async def get_time(job: by.JobName) -> rest.JobTimeDocument:
        """Where the job's time went: training, bubbles, morphs, redone steps, waiting for VMs, calibration."""
        return await views.spending.read_time(job)

    @router.get("/cost")
    async def get_cost(
        job: by.JobName,
        vms: Annotated[int, Query(ge=0, le=MOST_VMS, description="most entries of by_vm")] = MOST_VMS,
    ) -> rest.JobCostDocument:
        """The job's VM-hours, and their cost where the provider has prices."""
        return await views.spending.read_cost(job, vms)

    @router.get("/pipeline")
    async def get_pipeline(
        job: by.JobName, generation: Annotated[int | None, Query(ge=1, le=by.MOST_INT)] = None
    ) -> rest.PipelineDocument:
        """What each stage did in the newest traced mini-batch; 404 before there is one."""
        return await views.traces.find_newest_trace(job, generation)
