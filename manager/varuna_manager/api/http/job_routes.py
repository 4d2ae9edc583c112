"""Jobs: submitting, looking, changing; and their logs."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from varuna_manager.api.http import parameters as by
from varuna_manager.api.http.access import principal_of
from varuna_manager.api.http.examples import JOB_SPECS
from varuna_manager.domain.access import Role
from varuna_manager.domain.spec import JobSpec
from varuna_manager.domain.states import JobState
from varuna_manager.services.documents import Document, without_env_values
from varuna_manager.services.jobs import JobService
from varuna_manager.services.logs import MAX_BYTES, MOST_WAIT_S, LogPart, LogService
from varuna_manager.services.stacks import StackService
from varuna_proto import rest

_MOST_OFFSET = 2**53
_LOG_HEADERS = {
    name: {"description": text, "schema": {"type": "integer"}}
    for name, text in {
        "Log-Generation": "the generation whose log it is",
        "Log-Rank": "the rank",
        "Log-Offset": "where in the log the body begins",
        "Log-Next-Offset": "where what follows begins: ask for it next",
        "Log-Size": "of the whole log, now",
    }.items()
}
_LOG: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the bytes as they were written",
        "content": {"text/plain": {"schema": {"type": "string", "format": "binary"}}},
        "headers": _LOG_HEADERS,
    }
}
_PROFILE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "a document of the schema that `varuna profile schema` prints",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}


class CancelBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    save: bool = Field(default=False, description="finish the step and write a last checkpoint first")


class ChangeBody(BaseModel):
    """What is left out stays as it is."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"priority": 5, "max_gpus": 16}]})

    priority: int = Field(default=0, ge=-100, le=100)
    min_gpus: int = Field(default=1, ge=1, le=by.MOST_INT)
    max_gpus: int | None = Field(default=None, ge=1, le=by.MOST_INT, description="null: all that help")


def job_routes(jobs: JobService) -> APIRouter:
    router = APIRouter()

    @router.post("/jobs", status_code=201)
    async def submit_job(
        spec: Annotated[JobSpec, Body(openapi_examples=JOB_SPECS)],
        idempotency_key: Annotated[
            str | None, Header(max_length=255, description="sent again with the same job, gives the same job again")
        ] = None,
    ) -> rest.Job:
        """Hand in a job."""
        return by.as_told(await jobs.submit(spec, idempotency_key))

    @router.get("/jobs")
    async def list_jobs(
        request: Request,
        response: Response,
        state: Annotated[list[JobState], Query(description="in one of these")] = [],  # noqa: B006
        name: by.Text = None,
        since: by.At = None,
        label: by.Labels = [],  # noqa: B006
        limit: by.JobLimit = by.DEFAULT_LIMIT,
        cursor: by.Cursor = None,
    ) -> list[rest.Job]:
        """The jobs, newest first; `name` is a part of theirs, `since` when they were submitted at the earliest.

        A viewer reads no values of environment variables.
        """
        found = await jobs.page(
            states=state, name=name, since=by.seconds(since), labels=label, limit=limit, cursor=cursor
        )
        by.link_next(request, response, found.next_cursor)
        return by.as_told([_shown_to(request, job) for job in found.items])

    @router.get("/jobs/{job}")
    async def get_job(job: by.JobName, request: Request, response: Response) -> rest.Job:
        """One job. Its ETag changes with its state, its spec and the last decision's reason, not with its steps.

        A viewer reads no values of environment variables.
        """
        return _tagged(_shown_to(request, await jobs.one(job)), response)

    @router.patch("/jobs/{job}")
    async def change_job(
        job: by.JobName,
        body: ChangeBody,
        response: Response,
        if_match: Annotated[str | None, Header(description="an ETag: change nothing if it is another by now")] = None,
    ) -> rest.Job:
        """Give a job that is not over another priority, or other limits of GPUs; it morphs where it must."""
        return _tagged(await jobs.change(job, body.model_dump(exclude_unset=True), _versions(if_match)), response)

    @router.delete("/jobs/{job}")
    async def delete_job(job: by.JobName) -> rest.Deleted:
        """Forget a job that is over, with its steps, generations and events. Its checkpoints stay where they are."""
        return by.as_told(await jobs.delete(job))

    @router.post("/jobs/{job}/cancel")
    async def cancel_job(job: by.JobName, body: CancelBody | None = None) -> rest.Job:
        """Ask for the job's end."""
        return by.as_told(await jobs.cancel(job, save=body is not None and body.save))

    @router.post("/jobs/{job}/retry")
    async def retry_job(job: by.JobName) -> rest.Job:
        """Go on with a job that failed or was cancelled, from its newest checkpoint."""
        return by.as_told(await jobs.retry(job))

    @router.get("/jobs/{job}/profile", response_class=Response, responses=_PROFILE)
    async def get_profile(job: by.JobName) -> Response:
        """The profile document that the job's plans are made from; 404 before it is measured."""
        return Response(await jobs.profile(job), media_type="application/json")

    return router


def log_routes(logs: LogService, stacks: StackService) -> APIRouter:
    router = APIRouter()

    @router.get("/jobs/{job}/logs", response_class=Response, responses=_LOG)
    async def get_log(
        job: by.JobName,
        generation: by.GenerationNumber = None,
        rank: by.Number = 0,
        offset: Annotated[
            int, Query(ge=-_MOST_OFFSET, le=_MOST_OFFSET, description="of the first byte; negative: from the end")
        ] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_BYTES, description="the most bytes")] = MAX_BYTES,
        wait_s: Annotated[
            float, Query(ge=0, le=MOST_WAIT_S, description="wait so long for more, where the log ends at `offset`")
        ] = 0.0,
    ) -> Response:
        """What a worker wrote. To follow it, ask again from Log-Next-Offset, with `wait_s`."""
        part = await logs.read(job, generation, rank, offset, limit=limit, wait_s=wait_s)
        return Response(part.data, media_type="text/plain; charset=utf-8", headers=_log_headers(part))

    @router.get("/jobs/{job}/logs/search")
    async def search_log(
        job: by.JobName,
        q: Annotated[str, Query(min_length=1, max_length=1000, description="the text to look for")],
        generation: by.GenerationNumber = None,
        rank: by.Number = 0,
        limit: Annotated[int, Query(ge=1, le=1000, description="the most lines")] = 100,
        ignore_case: bool = True,
    ) -> rest.LogMatches:
        """The lines of a worker's log with a text in them, in its first 64 MiB."""
        return by.as_told(await logs.search(job, generation, rank, q, limit=limit, ignore_case=ignore_case))

    @router.get("/jobs/{job}/stacks")
    async def list_stacks(
        job: by.JobName, generation: Annotated[int | None, Query(ge=1, le=by.MOST_INT)] = None
    ) -> list[rest.Stack]:
        """Where the ranks of a generation that hung stood; without `generation`: of all that did."""
        return by.as_told(await stacks.read(job, generation))

    return router


def _shown_to(request: Request, job: Document) -> Document:
    """The job as its caller may read it."""
    return job if principal_of(request).role.covers(Role.USER) else without_env_values(job)


def _tagged(document: Document, response: Response) -> rest.Job:
    response.headers["ETag"] = f'"{document["version"]}"'
    return by.as_told(document)


def _versions(if_match: str | None) -> frozenset[int] | None:
    """Those that an If-Match header names; None: any will do. What is no version of ours never matches."""
    if if_match is None or if_match.strip() == "*":
        return None
    return frozenset(int(number) for number in re.findall(r'(?<!W/)"(\d{1,18})"', if_match))


def _log_headers(part: LogPart) -> dict[str, str]:
    values = (part.generation, part.rank, part.offset, part.next_offset, part.size)
    return {name: str(value) for name, value in zip(_LOG_HEADERS, values, strict=True)}
