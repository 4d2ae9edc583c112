"""The event log, and the stream of what happens."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from varuna_manager.api.http import parameters as by
from varuna_manager.api.http.parameters import Direction
from varuna_manager.api.http.server_sent import ServerSentEvents
from varuna_manager.services.documents import Document
from varuna_manager.services.event_list import EventFilter, EventList
from varuna_manager.services.jobs import JobService
from varuna_manager.services.live import LiveFeed
from varuna_proto import rest

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "events with their numbers as `id` and their kinds as `event`; `progress`; comments",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


def _wanted(
    vm: by.Text = None,
    kind: by.Texts = [],  # noqa: B006
    since: by.At = None,
    until: by.At = None,
    after: by.Number = 0,
    before: Annotated[int | None, Query(ge=0, le=by.MOST_INT)] = None,
) -> EventFilter:
    """What both lists of events are asked for, of all jobs."""
    return EventFilter(
        vm_id=vm, kinds=kind, since=by.seconds(since), until=by.seconds(until), after=after, before=before
    )


Wanted = Annotated[EventFilter, Depends(_wanted)]


def event_routes(events: EventList, live: LiveFeed, jobs: JobService) -> APIRouter:
    router = APIRouter()

    @router.get("/events/kinds")
    async def list_event_kinds() -> list[str]:
        """The kinds of events that have occurred."""
        return await events.kinds()

    @router.get("/events/stream", response_class=StreamingResponse, responses=_STREAM)
    async def stream_events(
        job: by.Text = None,
        after: by.Number = 0,
        last_event_id: Annotated[int | None, Header(ge=0, le=by.MOST_INT, description="beats `after`")] = None,
    ) -> ServerSentEvents:
        """Server-sent events: every event after number `after`, past and to come, of all or of one job; and
        `progress`, at most once a second for each job, which is not stored and has no id.

        Ask again with Last-Event-ID when it ends: the manager may be going away, or the reader was too slow.
        """
        job_id = None if job is None else (await jobs.one(job))["id"]
        return ServerSentEvents(live.follow(after if last_event_id is None else last_event_id, job_id))

    @router.get("/events")
    async def list_events(
        request: Request,
        response: Response,
        wanted: Wanted,
        job: by.Text = None,
        order: by.Order = Direction.ASC,
        limit: by.Limit = by.DEFAULT_LIMIT,
    ) -> list[rest.Event]:
        """What happened and what was decided, by number: those between `after` and `before`, neither included."""
        return by.as_told(await _page(events, replace(wanted, job=job), order, limit, request, response))

    @router.get("/jobs/{job}/events")
    async def list_job_events(
        request: Request,
        response: Response,
        job: by.JobName,
        wanted: Wanted,
        order: by.Order = Direction.ASC,
        limit: by.Limit = by.DEFAULT_LIMIT,
    ) -> list[rest.Event]:
        """Those of one job."""
        return by.as_told(await _page(events, replace(wanted, job=job), order, limit, request, response))

    return router


async def _page(
    events: EventList, wanted: EventFilter, order: Direction, limit: int, request: Request, response: Response
) -> list[Document]:
    descending = order is Direction.DESC
    found, more = await events.page(wanted, descending=descending, limit=limit)
    if more:
        by.link_to(request, response, **{"before" if descending else "after": found[-1]["id"]})
    return found
