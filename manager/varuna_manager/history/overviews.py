"""What a page of the dashboard or a command shows together, from one moment of the store."""

from __future__ import annotations

import time
from collections.abc import Callable

from varuna_manager.answers.documents import format_time
from varuna_manager.fleet.fleet import FleetService
from varuna_manager.fleet.vm_list import VmFilter
from varuna_manager.history.event_list import EventFilter
from varuna_manager.history.generation_times import read_generation_records
from varuna_manager.history.job_cost import read_job_bill
from varuna_manager.history.spending import MOST_VMS, account_job_time
from varuna_manager.history.step_metrics import collect_buckets
from varuna_manager.history.views import Views
from varuna_manager.jobs.jobs import find_job_row, make_whole_document
from varuna_proto.rest_fleet import FleetOverviewDocument, JobOverviewDocument, JobReportDocument

_VMS_OF_JOB = 5000
_GENERATIONS = 1000
_QUARANTINED = 100


class Overviews:
    def __init__(self, fleet: FleetService, views: Views, now: Callable[[], float] = time.time) -> None:
        self._fleet = fleet
        self._views = views
        self._now = now

    async def read_job(self, id_or_name: str) -> JobOverviewDocument:
        """Raises MissingError."""
        views = self._views
        async with views.database.read_snapshot() as session:
            row = await find_job_row(session, id_or_name)
            job = await make_whole_document(session, row)
            generation = await views.history.read_generation(session, row)
            vms = []
            if generation is not None and generation["ended_at"] is None:
                wanted = VmFilter(gone=False, job=row.id)
                vms = (await views.vms.read_page(session, wanted, limit=_VMS_OF_JOB)).items
            return {"at": format_time(self._now()), "job": job, "generation": generation, "vms": vms}

    async def read_report(self, id_or_name: str, *, brief: bool, points: int, most_events: int) -> JobReportDocument:
        """`points`: of the course. Raises MissingError."""
        views = self._views
        async with views.database.read_snapshot() as session:
            row = await find_job_row(session, id_or_name)
            now = self._now()
            generations = await views.history.read_generations(
                session, row, brief=brief, descending=True, limit=_GENERATIONS
            )
            records = await read_generation_records(session, row.id)
            events, _ = await views.events.read_events(
                session, EventFilter(job=row.id), descending=True, limit=most_events
            )
            job = await make_whole_document(session, row)
            plan = await views.history.read_plan(session, row, None)
            cost = await read_job_bill(session, row.id, now, most_vms=0 if brief else MOST_VMS)
            course = await collect_buckets(session, row.id, points)
            checkpoint = await views.history.read_newest_checkpoint(session, row)
        return {
            "at": format_time(now),
            "job": job,
            "generations": generations.items[::-1],
            "plan": plan,
            "time": await account_job_time(row, records, now),
            "cost": cost,
            "course": course,
            "checkpoint": checkpoint,
            "events": events[::-1],
        }

    async def read_fleet(self, wanted: VmFilter, *, limit: int, cursor: str | None) -> FleetOverviewDocument:
        """`wanted`, `limit`, `cursor`: of the VMs."""
        views = self._views
        async with views.database.read_snapshot() as session:
            fleet = await self._fleet.read_fleet(session)
            summary = await views.vms.read_summary(session)
            quarantined = await views.vms.read_page(session, VmFilter(gone=False, quarantined=True), limit=_QUARANTINED)
            page = await views.vms.read_page(session, wanted, limit=limit, cursor=cursor)
            return {
                "at": format_time(self._now()),
                "fleet": fleet,
                "summary": summary,
                "quarantined": quarantined.items,
                "vms": page.items,
                "next_cursor": page.next_cursor,
            }
