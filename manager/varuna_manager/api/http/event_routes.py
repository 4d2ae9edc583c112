"""The event log and the live stream of events."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from varuna_manager.api.http import parameters as by
from varuna_manager.api.http.parameters import Direction
from varuna_manager.api.http.server_sent import ServerSentEvents
from varuna_manager.history.event_list import EventFilter, EventList
from varuna_manager.history.live import LiveFeed
from varuna_manager.jobs.jobs import JobService
from varuna_proto import rest

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "events (`id`: number, `event`: kind), `progress`, and comments",
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
    q: by.Text = None,
) -> EventFilter:
    """The parameters of both lists of events."""
    since_s, until_s = by.seconds(since), by.seconds(until)
    return EventFilter(vm_id=vm, kinds=kind, since=since_s, until=until_s, after=after, before=before, text=q)


Wanted = Annotated[EventFilter, Depends(_wanted)]


def event_routes(events: EventList, live: LiveFeed, jobs: JobService) -> APIRouter:
    router = APIRouter()

    @router.get("/events/kinds")
    async def list_event_kinds() -> list[str]:
        """The kinds of events that have occurred."""
        return await events.list_kinds()

    @router.get("/events/stream", response_class=StreamingResponse, responses=_STREAM)
    async def stream_events(
        job: by.Text = None,
        after: by.Number = 0,
        last_event_id: Annotated[int | None, Header(ge=0, le=by.MOST_INT, description="overrides `after`")] = None,
    ) -> ServerSentEvents:
        """Stream every event after number `after`, past and future, of all jobs or of one, as server-sent events; and
        `progress`, at most once a second for each job, which is not stored and has no id.

        When the stream ends, request it again with Last-Event-ID: the manager stopped, or the reader was too slow.
        """
        job_id = None if job is None else (await jobs.find_job(job))["id"]
        return ServerSentEvents(live.stream_messages(after if last_event_id is None else last_event_id, job_id))

    @router.get("/events")
    async def list_events(
        request: Request,
        response: Response,
        wanted: Wanted,
        job: by.Text = None,
        order: by.Order = Direction.ASC,
        limit: by.Limit = by.DEFAULT_LIMIT,
    ) -> list[rest.EventDocument]:
        """The events with numbers between `after` and `before`, both excluded."""
        return await _page(events, replace(wanted, job=job), order, limit, request, response)

    @router.get("/jobs/{job}/events")
    async def list_job_events(
        request: Request,
        response: Response,
        job: by.JobName,
        wanted: Wanted,
        order: by.Order = Direction.ASC,
        limit: by.Limit = by.DEFAULT_LIMIT,
    ) -> list[rest.EventDocument]:
        """The events of one job."""
        return await _page(events, replace(wanted, job=job), order, limit, request, response)

    return router


async def _page(
    events: EventList, wanted: EventFilter, order: Direction, limit: int, request: Request, response: Response
) -> list[rest.EventDocument]:
    descending = order is Direction.DESC
    found, more = await events.list_events(wanted, descending=descending, limit=limit)
    if more:
        by.link_to(request, response, **{"before" if descending else "after": found[-1]["id"]})
    return found
