"""Jobs and their logs."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from varuna_manager.api.http import parameters as by
from varuna_manager.api.http.access import get_principal
from varuna_manager.api.http.examples import JOB_SPECS
from varuna_manager.domain.access import Role
from varuna_manager.domain.spec import JobSpec
from varuna_manager.domain.states import JobState
from varuna_manager.jobs.documents import hide_env_values
from varuna_manager.jobs.jobs import JobService
from varuna_manager.jobs.logs import MAX_BYTES, MOST_WAIT_S, LogPart, LogService
from varuna_manager.jobs.stacks import StackService
from varuna_manager.planning.dry_runs import DryRuns
from varuna_proto import rest

_MOST_OFFSET = 2**53
_LOG_HEADERS = {
    name: {"description": text, "schema": {"type": "integer"}}
    for name, text in {
        "Log-Generation": "the worker's generation",
        "Log-Rank": "the worker's rank",
        "Log-Offset": "position of the body in the log",
        "Log-Next-Offset": "`offset` of the next request",
        "Log-Size": "size of the whole log now",
    }.items()
}
_LOG: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the bytes as the worker wrote them",
        "content": {"text/plain": {"schema": {"type": "string", "format": "binary"}}},
        "headers": _LOG_HEADERS,
    }
}
_PROFILE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "a document with the schema that `varuna profile schema` prints",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}


class CancelBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    save: bool = Field(default=False, description="finish the step and write a checkpoint before the job ends")


class ChangeBody(BaseModel):
    """Fields that are left out keep their values."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"priority": 5, "max_gpus": 16}]})

    priority: int = Field(default=0, ge=-100, le=100)
    min_gpus: int = Field(default=1, ge=1, le=by.MOST_INT)
    max_gpus: int | None = Field(default=None, ge=1, le=by.MOST_INT, description="null: as many as help")


class DryRunBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    text: str = Field(max_length=256 * 1024, description="a job in YAML or JSON, as POST /jobs takes it")


def job_routes(jobs: JobService, dry_runs: DryRuns) -> APIRouter:
    router = APIRouter()

    @router.post("/jobs/dry-run")
    async def try_job(body: DryRunBody) -> rest.DryRunDocument:
        """Check a job's text, and plan it for the GPUs that are free. Nothing is changed."""
        return await dry_runs.try_job(body.text)

    @router.post("/jobs", status_code=201)
    async def submit_job(
        spec: Annotated[JobSpec, Body(openapi_examples=JOB_SPECS)],
        idempotency_key: Annotated[
            str | None,
            Header(max_length=255, description="the same key with the same job returns the first job again"),
        ] = None,
    ) -> rest.JobDocument:
        """Submit a job."""
        return await jobs.submit_job(spec, idempotency_key)

    @router.get("/jobs")
    async def list_jobs(
        request: Request,
        response: Response,
        state: Annotated[list[JobState], Query(description="only in one of these states")] = [],  # noqa: B006
        name: by.Text = None,
        since: by.At = None,
        label: by.Labels = [],  # noqa: B006
        limit: by.JobLimit = by.DEFAULT_LIMIT,
        cursor: by.Cursor = None,
    ) -> list[rest.JobDocument]:
        """The jobs, newest first. `name`: only with this text in the name; `since`: only submitted since then.

        A viewer does not see the values of environment variables.
        """
        found = await jobs.list_jobs(
            states=state, name=name, since=by.seconds(since), labels=label, limit=limit, cursor=cursor
        )
        by.link_next(request, response, found.next_cursor)
        return [show_job(request, job) for job in found.items]

    @router.get("/jobs/{job}")
    async def get_job(job: by.JobName, request: Request, response: Response) -> rest.JobDocument:
        """One job. Its ETag changes with its state, its spec and the last decision's reason, not with its steps.

        A viewer does not see the values of environment variables.
        """
        return _tagged(show_job(request, await jobs.find_job(job)), response)

    @router.patch("/jobs/{job}")
    async def change_job(
        job: by.JobName,
        body: ChangeBody,
        response: Response,
        if_match: Annotated[
            str | None, Header(description="an ETag: change nothing if the job has another one")
        ] = None,
    ) -> rest.JobDocument:
        """Change the priority or the GPU limits of a job that is not over. The job morphs if it has to."""
        return _tagged(await jobs.change_job(job, body.model_dump(exclude_unset=True), _versions(if_match)), response)

    @router.delete("/jobs/{job}")
    async def delete_job(job: by.JobName) -> rest.DeletedJobDocument:
        """Delete a job that is over, with its steps, generations and events. Its checkpoints stay where they are."""
        return await jobs.delete_job(job)

    @router.post("/jobs/{job}/cancel")
    async def cancel_job(job: by.JobName, body: CancelBody | None = None) -> rest.JobDocument:
        """End the job."""
        return await jobs.cancel_job(job, save=body is not None and body.save)

    @router.post("/jobs/{job}/retry")
    async def retry_job(job: by.JobName) -> rest.JobDocument:
        """Resume a job that failed or was cancelled, from its newest checkpoint."""
        return await jobs.retry_job(job)

    @router.get("/jobs/{job}/profile", response_class=Response, responses=_PROFILE)
    async def get_profile(job: by.JobName) -> Response:
        """The profile that the job's plans are made from; 404 before it is measured."""
        return Response(await jobs.find_profile(job), media_type="application/json")

    return router


def log_routes(logs: LogService, stacks: StackService) -> APIRouter:
    router = APIRouter()

    @router.get("/jobs/{job}/logs", response_class=Response, responses=_LOG)
    async def get_log(
        job: by.JobName,
        generation: by.GenerationNumber = None,
        rank: by.Number = 0,
        offset: Annotated[
            int,
            Query(ge=-_MOST_OFFSET, le=_MOST_OFFSET, description="of the first byte; negative: from the end"),
        ] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_BYTES, description="most bytes")] = MAX_BYTES,
        wait_s: Annotated[
            float, Query(ge=0, le=MOST_WAIT_S, description="if the log ends at `offset`, how long to wait for more")
        ] = 0.0,
    ) -> Response:
        """What a worker wrote. To follow the log, repeat the request from Log-Next-Offset with `wait_s`."""
        part = await logs.read_log(job, generation, rank, offset, limit=limit, wait_s=wait_s)
        return Response(part.data, media_type="text/plain; charset=utf-8", headers=_log_headers(part))

    @router.get("/jobs/{job}/logs/search")
    async def search_log(
        job: by.JobName,
        q: Annotated[str, Query(min_length=1, max_length=1000, description="text to find")],
        generation: by.GenerationNumber = None,
        rank: by.Number = 0,
        limit: Annotated[int, Query(ge=1, le=1000, description="most lines")] = 100,
        ignore_case: bool = True,
    ) -> rest.LogMatchesDocument:
        """The lines that contain a text, in the first 64 MiB of a worker's log."""
        return await logs.search_log(job, generation, rank, q, limit=limit, ignore_case=ignore_case)

    @router.get("/jobs/{job}/stacks")
    async def list_stacks(
        job: by.JobName, generation: Annotated[int | None, Query(ge=1, le=by.MOST_INT)] = None
    ) -> list[rest.StackDocument]:
        """The stacks of the ranks of a generation that hung; without `generation`, of all of them."""
        return await stacks.list_stacks(job, generation)

    return router


def show_job(request: Request, job: rest.JobDocument) -> rest.JobDocument:
    """The job as its caller may see it."""
    return job if get_principal(request).role.is_at_least(Role.USER) else hide_env_values(job)


def _tagged(document: rest.JobDocument, response: Response) -> rest.JobDocument:
    response.headers["ETag"] = f'"{document["version"]}"'
    return document


def _versions(if_match: str | None) -> frozenset[int] | None:
    """The versions that an If-Match header names; None: any. Something that is not a version of ours never matches."""
    if if_match is None or if_match.strip() == "*":
        return None
    return frozenset(int(number) for number in re.findall(r'(?<!W/)"(\d{1,18})"', if_match))


def _log_headers(part: LogPart) -> dict[str, str]:
    values = (part.generation, part.rank, part.offset, part.next_offset, part.size)
    return {name: str(value) for name, value in zip(_LOG_HEADERS, values, strict=True)}
