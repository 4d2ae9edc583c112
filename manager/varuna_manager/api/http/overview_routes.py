"""A job, and the fleet, as their pages show them: all parts of one moment."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from varuna_manager.api.http import parameters as by
from varuna_manager.api.http.job_routes import show_job
from varuna_manager.domain.states import VmState
from varuna_manager.fleet.vm_list import VmFilter
from varuna_manager.history.overviews import Overviews
from varuna_proto import rest_fleet as rest


def overview_routes(overviews: Overviews) -> APIRouter:
    router = APIRouter()

    @router.get("/jobs/{job}/overview", tags=["jobs"])
    async def get_job_overview(job: by.JobName, request: Request) -> rest.JobOverviewDocument:
        """The job, its newest generation and the VMs of that one, all of one moment.

        A viewer does not see the values of environment variables.
        """
        found = await overviews.read_job(job)
        return {**found, "job": show_job(request, found["job"])}

    @router.get("/jobs/{job}/report", tags=["jobs"])
    async def get_job_report(
        job: by.JobName,
        request: Request,
        brief: Annotated[bool, Query(description="leave out candidates, placement, workers and the cost by VM")] = True,
        points: Annotated[int, Query(ge=1, le=2000, description="most buckets of the course")] = 40,
        events: Annotated[int, Query(ge=1, le=1000, description="most events")] = 10,
    ) -> rest.JobReportDocument:
        """The job, its generations, its plan, its time, its cost, its course and its newest events, all of one moment.

        A viewer does not see the values of environment variables.
        """
        found = await overviews.read_report(job, brief=brief, points=points, most_events=events)
        return {**found, "job": show_job(request, found["job"])}

    @router.get("/fleet/overview", tags=["fleet"])
    async def get_fleet_overview(
        gone: Annotated[bool, Query(description="include VMs that are gone")] = False,
        state: Annotated[list[VmState], Query(description="only VMs in one of these states")] = [],  # noqa: B006
        q: by.Text = None,
        limit: by.Limit = 100,
        cursor: by.Cursor = None,
    ) -> rest.FleetOverviewDocument:
        """The fleet in numbers and a page of its VMs, oldest first, all of one moment. `q`: only VMs with this text in
        id or host."""
        return await overviews.read_fleet(VmFilter(gone=gone, states=state, text=q), limit=limit, cursor=cursor)

    return router
