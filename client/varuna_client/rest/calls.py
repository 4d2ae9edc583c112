"""Every call of the manager's REST API as data: the request, and how to read the answer.

`Client` and `AsyncClient` send them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Generic, TypeVar, cast
from urllib.parse import quote

import httpx

from varuna_proto.rest import (
    CheckpointDocument,
    DeletedJobDocument,
    EventDocument,
    GenerationDocument,
    JobCostDocument,
    JobDocument,
    JobSpecDocument,
    JobTimeDocument,
    LoggedSeriesDocument,
    LogMatchesDocument,
    MetricBucketsDocument,
    PipelineDocument,
    PlanRecordDocument,
    StackDocument,
    StepMetricsDocument,
)
from varuna_proto.rest_fleet import (
    AuditEntryDocument,
    CallerDocument,
    FleetCostDocument,
    FleetDocument,
    FleetHistoryDocument,
    JobReportDocument,
    NewTokenDocument,
    RevokedVmDocument,
    TokenDocument,
    VmDetailDocument,
    VmDocument,
    VmSummaryDocument,
)

T = TypeVar("T")
_UPLOAD_S = 300.0
_PAGE = 1000


@dataclass(frozen=True, kw_only=True)
class ApiCall(Generic[T]):
    """One call. `read` turns the response into the answer; if `has_pages`, it gets the items of all pages."""

    method: str
    path: str
    read: Callable[[Any], T]
    """Takes the list of all items if `has_pages`, else the httpx.Response."""
    params: Sequence[tuple[str, str | int | float | bool]] = ()
    json: Any = None
    content: IO[bytes] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    has_pages: bool = False
    is_repeatable: bool = True
    """Whether the call may be sent again if its result is unknown."""
    is_patient: bool = False
    """Whether it is sent again also when there was no answer in time, because its result matters more than the wait."""
    unknown: str = ""
    """What to tell if its result stays unknown: what it may have done, and how to find out."""
    timeout_s: float | None = None
    """None: the client's own."""


@dataclass(frozen=True, kw_only=True)
class LogChunk:
    """A part of a worker's log, and the position after it."""

    data: bytes
    generation: int
    rank: int
    offset: int
    next_offset: int
    size: int
    """Bytes of the whole log when it was read."""


def _document(response: httpx.Response) -> Any:
    return response.json()


def _nothing(response: httpx.Response) -> None:
    return None


def _same(items: Any) -> Any:
    return items


def _get(path: str, **params: Any) -> ApiCall[Any]:
    return ApiCall(method="GET", path=path, read=_document, params=_given(params))


def _list(path: str, **params: Any) -> ApiCall[Any]:
    return ApiCall(method="GET", path=path, read=_same, params=_given(params), has_pages=True)


def _given(params: dict[str, Any]) -> list[tuple[str, Any]]:
    """The parameters that are not None, with one entry for each item of a list."""
    found: list[tuple[str, Any]] = []
    for name, value in params.items():
        if isinstance(value, list | tuple):
            found += [(name, item) for item in value]
        elif value is not None:
            found.append((name, value))
    return found


def _segment(name: str) -> str:
    """A name as one segment of a path."""
    return quote(name, safe="")


def _of(job: str, what: str = "") -> str:
    return f"/jobs/{_segment(job)}{what}"


# ---------------------------------------------------------------- jobs


def submit(spec: JobSpecDocument, *, idempotency_key: str | None = None) -> ApiCall[JobDocument]:
    """Submit a job. With the key it is safe to send again: the answer is the same job."""
    headers = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}
    unknown = (
        f"job {spec.get('name')!r} may have been submitted: 'varuna ps' lists it as soon as the manager answers; "
        "submitting again is safe, because there is at most one job of this name that has not ended"
    )
    return ApiCall(
        method="POST", path="/jobs", read=_document, json=spec, headers=headers, is_patient=True, unknown=unknown
    )


def jobs(
    *,
    state: Sequence[str] = (),
    name: str | None = None,
    since: str | None = None,
    label: Sequence[str] = (),
    limit: int = _PAGE,
) -> ApiCall[list[JobDocument]]:
    """List jobs, newest first: in one of the states, with `name` in their names, submitted since (ISO 8601), with all
    labels (KEY=VALUE, or KEY for any value).

    `limit`: jobs per page; all pages are fetched.
    """
    return _list("/jobs", state=list(state), name=name, since=since, label=list(label), limit=limit)


def job(job: str) -> ApiCall[JobDocument]:
    """Fetch a job by id or name."""
    return _get(_of(job))


def change(job: str, changes: dict[str, int | None], *, version: int | None = None) -> ApiCall[JobDocument]:
    """Set the `priority`, `min_gpus` or `max_gpus` of a job. `version`: only if the job still has this version."""
    headers = {} if version is None else {"If-Match": f'"{version}"'}
    return ApiCall(method="PATCH", path=_of(job), read=_document, json=changes, headers=headers, is_repeatable=False)


def cancel(job: str, *, save: bool = False) -> ApiCall[JobDocument]:
    """Stop the job; with `save`, after a last checkpoint."""
    return ApiCall(method="POST", path=_of(job, "/cancel"), read=_document, json={"save": save})


def retry(job: str) -> ApiCall[JobDocument]:
    """Queue a failed or cancelled job again."""
    return ApiCall(method="POST", path=_of(job, "/retry"), read=_document)


def delete(job: str) -> ApiCall[DeletedJobDocument]:
    """Delete a finished job with its steps, generations and events; its checkpoints stay."""
    return ApiCall(method="DELETE", path=_of(job), read=_document)


def profile(job: str) -> ApiCall[str]:
    """Fetch the job's profile, a JSON document. Raises NotFoundError before it is measured."""
    return ApiCall(method="GET", path=_of(job, "/profile"), read=lambda response: response.text)


def archive_size(sha256: str) -> ApiCall[int]:
    """The bytes of a packed workdir. Raises NotFoundError if the manager does not have it."""
    return ApiCall(method="GET", path=f"/archives/{sha256}", read=lambda found: cast(int, found.json()["total_bytes"]))


def upload_archive(sha256: str, file: IO[bytes]) -> ApiCall[None]:
    """Upload a packed workdir, from the file's present position on."""
    path = f"/archives/{sha256}"
    return ApiCall(method="PUT", path=path, read=_nothing, content=file, timeout_s=_UPLOAD_S, is_repeatable=False)


# ---------------------------------------------------------------- what a job has behind it


def report(job: str, *, brief: bool = True, points: int = 40, events: int = 10) -> ApiCall[JobReportDocument]:
    """Fetch the job with its generations, plan, time, cost, course and newest events, all of one moment.

    `brief`: the generations without candidates, placement and workers, the cost without VMs. `points`: at most so many
    buckets of the course.
    """
    return _get(_of(job, "/report"), brief=brief, points=points, events=events)


def generations(job: str, *, brief: bool = False) -> ApiCall[list[GenerationDocument]]:
    """List all generations, oldest first; `brief`: without candidates, placement and workers."""
    return _list(_of(job, "/generations"), brief=brief or None)


def generation(job: str, number: int) -> ApiCall[GenerationDocument]:
    return _get(_of(job, f"/generations/{number}"))


def plans(job: str) -> ApiCall[list[PlanRecordDocument]]:
    """List the plans by which the job trained, newest first, without the candidates."""
    return _list(_of(job, "/plans"))


def plan(job: str, generation: int | None = None) -> ApiCall[PlanRecordDocument]:
    """Fetch a generation's plan with its candidates; None: the newest. Raises NotFoundError before there is one."""
    return _get(_of(job, f"/plans/{'newest' if generation is None else generation}"))


def metrics(job: str, *, after_step: int = 0, limit: int = 10_000) -> ApiCall[list[StepMetricsDocument]]:
    """List the steps after `after_step`, oldest first, at most `limit`."""
    return _get(_of(job, "/metrics"), after_step=after_step, limit=limit)


def metric_buckets(
    job: str, *, points: int = 2000, from_step: int = 1, to_step: int | None = None
) -> ApiCall[MetricBucketsDocument]:
    """Fetch the steps' metrics in at most `points` buckets, as columns."""
    return _get(_of(job, "/metrics/buckets"), points=points, from_step=from_step, to_step=to_step)


def logged_values(
    job: str, *, names: Sequence[str] | None = None, points: int = 2000, after_step: int | None = None
) -> ApiCall[list[LoggedSeriesDocument]]:
    """Fetch what the script has logged by `varuna.log`, at most `points` values of each name."""
    return _get(_of(job, "/metrics/logged"), name=names, points=points, after_step=after_step)


def time(job: str) -> ApiCall[JobTimeDocument]:
    """Fetch how the job has used its time."""
    return _get(_of(job, "/time"))


def cost(job: str) -> ApiCall[JobCostDocument]:
    """Fetch the job's VM-hours and their price."""
    return _get(_of(job, "/cost"))


def pipeline(job: str, *, generation: int | None = None) -> ApiCall[PipelineDocument]:
    """Fetch the newest traced mini-batch. Raises NotFoundError before there is one."""
    return _get(_of(job, "/pipeline"), generation=generation)


def checkpoints(job: str) -> ApiCall[list[CheckpointDocument]]:
    """List the checkpoints that were committed, oldest first, with those that newer ones have replaced since."""
    return _list(_of(job, "/checkpoints"))


# ---------------------------------------------------------------- events, logs


def events(
    job: str | None = None,
    *,
    after: int = 0,
    vm: str | None = None,
    kind: Sequence[str] = (),
    since: str | None = None,
    until: str | None = None,
) -> ApiCall[list[EventDocument]]:
    """List the events after number `after`, oldest first: all, or those of one job, VM, kind or time (ISO 8601)."""
    path = "/events" if job is None else _of(job, "/events")
    return _list(path, after=after, vm=vm, kind=list(kind), since=since, until=until)


def newest_events(
    job: str | None = None, *, limit: int = 100, before: int | None = None
) -> ApiCall[list[EventDocument]]:
    """List at most `limit` events before number `before` (None: the newest), newest first."""
    path = "/events" if job is None else _of(job, "/events")
    return _get(path, order="desc", limit=limit, before=before)


def logs(job: str, *, generation: int | None = None, rank: int = 0, offset: int = 0) -> ApiCall[bytes]:
    """Fetch a worker's log from byte `offset` on (negative: from the end), as much as the manager sends at once."""
    params = _given({"generation": generation, "rank": rank, "offset": offset})
    return ApiCall(method="GET", path=_of(job, "/logs"), read=lambda response: response.content, params=params)


def log_chunk(
    job: str,
    *,
    generation: int | None = None,
    rank: int = 0,
    offset: int = 0,
    limit: int | None = None,
    wait_s: float = 0.0,
) -> ApiCall[LogChunk]:
    """Like `logs`, with the next position. `wait_s`: at the log's end, wait this long for more (at most 30 s)."""
    given = {"generation": generation, "rank": rank, "offset": offset, "limit": limit, "wait_s": wait_s or None}
    return ApiCall(
        method="GET", path=_of(job, "/logs"), read=_log_chunk, params=_given(given), timeout_s=15.0 + 1.5 * wait_s
    )


def _log_chunk(response: httpx.Response) -> LogChunk:
    def number(name: str) -> int:
        return int(response.headers[name])

    return LogChunk(
        data=response.content,
        generation=number("Log-Generation"),
        rank=number("Log-Rank"),
        offset=number("Log-Offset"),
        next_offset=number("Log-Next-Offset"),
        size=number("Log-Size"),
    )


def search_log(
    job: str, text: str, *, generation: int | None = None, rank: int = 0, limit: int = 100, ignore_case: bool = True
) -> ApiCall[LogMatchesDocument]:
    """Find the lines of a worker's log that contain the text."""
    return _get(
        _of(job, "/logs/search"), q=text, generation=generation, rank=rank, limit=limit, ignore_case=ignore_case
    )


def stacks(job: str, *, generation: int | None = None) -> ApiCall[list[StackDocument]]:
    """List the stacks of a generation that hung; without `generation`, of all that hung."""
    return _get(_of(job, "/stacks"), generation=generation)


# ---------------------------------------------------------------- fleet


def vms(
    *,
    gone: bool = False,
    state: Sequence[str] = (),
    job: str | None = None,
    quarantined: bool | None = None,
    text: str | None = None,
) -> ApiCall[list[VmDocument]]:
    """List the VMs, oldest first; `gone`: also past ones; `text`: a part of their ids or hosts."""
    return _list("/vms", gone=gone, state=list(state), job=job, quarantined=quarantined, q=text)


def vm(vm_id: str) -> ApiCall[VmDetailDocument]:
    return _get(f"/vms/{_segment(vm_id)}")


def vm_summary() -> ApiCall[VmSummaryDocument]:
    """Fetch the numbers of VMs by state."""
    return _get("/vms/summary")


def drain(vm_id: str, *, deadline_s: float | None = None) -> ApiCall[VmDocument]:
    """Take a VM out of use: its workers save and leave within `deadline_s`. It stays cordoned."""
    body = {"deadline_s": deadline_s}
    return ApiCall(method="POST", path=f"/vms/{_segment(vm_id)}/drain", read=_document, json=body)


def cordon(vm_id: str) -> ApiCall[VmDocument]:
    """Start nothing new on a VM until it is uncordoned, even after it restarts. Its workers continue."""
    return ApiCall(method="POST", path=f"/vms/{_segment(vm_id)}/cordon", read=_document)


def uncordon(vm_id: str) -> ApiCall[VmDocument]:
    """Put a VM back into use."""
    return ApiCall(method="POST", path=f"/vms/{_segment(vm_id)}/uncordon", read=_document)


def preempt(vm_id: str, *, notice_s: float) -> ApiCall[None]:
    """Send a VM the preemption notice of a spot provider, if its provider can emulate one."""
    path, body = f"/vms/{_segment(vm_id)}/preempt", {"notice_s": notice_s}
    return ApiCall(method="POST", path=path, read=_nothing, json=body, is_repeatable=False)


def fleet() -> ApiCall[FleetDocument]:
    return _get("/fleet")


def fleet_history(
    *, since: str | None = None, until: str | None = None, points: int = 200
) -> ApiCall[FleetHistoryDocument]:
    """Fetch the numbers of VMs over time."""
    return _get("/fleet/history", since=since, until=until, points=points)


def fleet_cost(*, since: str | None = None) -> ApiCall[FleetCostDocument]:
    return _get("/fleet/cost", since=since)


def set_fleet_target(target: int) -> ApiCall[None]:
    """Set how many VMs the manager requests from its providers."""
    return ApiCall(method="PUT", path="/fleet", read=_nothing, json={"target": target})


def set_local_capacity(capacity: int) -> ApiCall[None]:
    """Set how many VMs the local provider's emulated spot market grants."""
    return ApiCall(method="PUT", path="/providers/local", read=_nothing, json={"capacity": capacity})


# ---------------------------------------------------------------- access


def whoami() -> ApiCall[CallerDocument]:
    """Fetch the name and role that the manager gives the caller."""
    return _get("/whoami")


def create_token(body: dict[str, Any]) -> ApiCall[NewTokenDocument]:
    """Make a token of the API (`name`, `role`) or for joining (`join`); only this answer has its text (`token`)."""
    return ApiCall(method="POST", path="/tokens", read=_document, json=body, is_repeatable=False)


def tokens() -> ApiCall[list[TokenDocument]]:
    return _get("/tokens")


def revoke_token(id_or_name: str) -> ApiCall[TokenDocument]:
    return ApiCall(method="DELETE", path=f"/tokens/{_segment(id_or_name)}", read=_document)


def revoke_vm(vm_id: str) -> ApiCall[RevokedVmDocument]:
    return ApiCall(method="POST", path=f"/vms/{_segment(vm_id)}/revoke", read=_document)


def audit(*, after: int = 0) -> ApiCall[list[AuditEntryDocument]]:
    """The entries after number `after`, oldest first."""
    return _list("/audit", after=after)
