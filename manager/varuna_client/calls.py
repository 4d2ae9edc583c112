"""Every call of the manager's REST API, as data: what is sent, and how the answer is read.

`Client` and `AsyncClient` send them, each in its own way.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Generic, TypeVar, cast
from urllib.parse import quote

import httpx

from varuna_client.documents import (
    AuditEntry,
    Checkpoint,
    Deleted,
    Event,
    Fleet,
    FleetCost,
    FleetHistory,
    Generation,
    Job,
    JobCost,
    JobSpec,
    JobTime,
    LogMatches,
    Metric,
    MetricBuckets,
    NewToken,
    Pipeline,
    PlanRecord,
    Revoked,
    Stack,
    Token,
    Vm,
    VmDetail,
    VmSummary,
    Whoami,
)

T = TypeVar("T")
_UPLOAD_S = 300.0
_PAGE = 1000


@dataclass(frozen=True, kw_only=True)
class Call(Generic[T]):
    """One call. `read` makes the answer of the response, or of all pages' items where `has_pages`."""

    method: str
    path: str
    read: Callable[[Any], T]
    """Of a `has_pages` call: of the list of all items; else of the httpx.Response."""
    params: Sequence[tuple[str, str | int | float | bool]] = ()
    json: Any = None
    content: IO[bytes] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    has_pages: bool = False
    is_repeatable: bool = True
    """Whether it may be sent again when it is not known what became of it."""
    timeout_s: float | None = None
    """Null: the client's own."""


@dataclass(frozen=True, kw_only=True)
class LogChunk:
    """A part of a worker's log, and where to go on."""

    data: bytes
    generation: int
    rank: int
    offset: int
    next_offset: int
    size: int
    """Of the whole log, when it was read."""


def _document(response: httpx.Response) -> Any:
    return response.json()


def _nothing(response: httpx.Response) -> None:
    return None


def _same(items: Any) -> Any:
    return items


def _get(path: str, **params: Any) -> Call[Any]:
    return Call(method="GET", path=path, read=_document, params=_given(params))


def _list(path: str, **params: Any) -> Call[Any]:
    return Call(method="GET", path=path, read=_same, params=_given(params), has_pages=True)


def _given(params: dict[str, Any]) -> list[tuple[str, Any]]:
    """Without those that are None; of a list, each item."""
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


def submit(spec: JobSpec, *, idempotency_key: str | None = None) -> Call[Job]:
    """Hand in a job. The key makes it safe to send again when the answer was lost: the same job comes back."""
    headers = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}
    return Call(method="POST", path="/jobs", read=_document, json=spec, headers=headers)


def jobs(
    *,
    state: Sequence[str] = (),
    name: str | None = None,
    since: str | None = None,
    label: Sequence[str] = (),
    limit: int = _PAGE,
) -> Call[list[Job]]:
    """The jobs, newest first: in one of the states, with `name` in their names, submitted since (ISO 8601), with all
    labels (KEY=VALUE, or KEY for any value).

    `limit`: of a page; all pages are asked for.
    """
    return _list("/jobs", state=list(state), name=name, since=since, label=list(label), limit=limit)


def job(job: str) -> Call[Job]:
    """A job by id or name."""
    return _get(_of(job))


def change(job: str, changes: dict[str, int | None], *, version: int | None = None) -> Call[Job]:
    """Set the `priority`, `min_gpus`, `max_gpus` of a job. `version`: only if it still has it."""
    headers = {} if version is None else {"If-Match": f'"{version}"'}
    return Call(method="PATCH", path=_of(job), read=_document, json=changes, headers=headers, is_repeatable=False)


def cancel(job: str, *, save: bool = False) -> Call[Job]:
    """Ask for the job's end; with `save` after a last checkpoint."""
    return Call(method="POST", path=_of(job, "/cancel"), read=_document, json={"save": save})


def retry(job: str) -> Call[Job]:
    """Queue a job that failed or was cancelled once more."""
    return Call(method="POST", path=_of(job, "/retry"), read=_document)


def delete(job: str) -> Call[Deleted]:
    """Forget a job that is over, with its steps, generations and events; its checkpoints stay."""
    return Call(method="DELETE", path=_of(job), read=_document)


def profile(job: str) -> Call[str]:
    """The job's profile, a JSON document. Raises NotFoundError before it is measured."""
    return Call(method="GET", path=_of(job, "/profile"), read=lambda response: response.text)


def archive_size(sha256: str) -> Call[int]:
    """Of a packed workdir. Raises NotFoundError when the manager does not have it."""
    return Call(method="GET", path=f"/archives/{sha256}", read=lambda found: cast(int, found.json()["total_bytes"]))


def upload_archive(sha256: str, file: IO[bytes]) -> Call[None]:
    """Give the manager a packed workdir, from the file's present position on."""
    path = f"/archives/{sha256}"
    return Call(method="PUT", path=path, read=_nothing, content=file, timeout_s=_UPLOAD_S, is_repeatable=False)


# ---------------------------------------------------------------- what a job has behind it


def generations(job: str, *, brief: bool = False) -> Call[list[Generation]]:
    """All generations, oldest first; the `brief` ones without candidates, placement and workers."""
    return _list(_of(job, "/generations"), brief=brief or None)


def generation(job: str, number: int) -> Call[Generation]:
    return _get(_of(job, f"/generations/{number}"))


def plans(job: str) -> Call[list[PlanRecord]]:
    """Every plan by which it trained, newest first, without the candidates."""
    return _list(_of(job, "/plans"))


def plan(job: str, generation: int | None = None) -> Call[PlanRecord]:
    """A plan with its candidates; None: the newest. Raises NotFoundError before there is one."""
    return _get(_of(job, f"/plans/{'newest' if generation is None else generation}"))


def metrics(job: str, *, after_step: int = 0, limit: int = 10_000) -> Call[list[Metric]]:
    """The steps after `after_step`, oldest first, so many at most."""
    return _get(_of(job, "/metrics"), after_step=after_step, limit=limit)


def metric_buckets(
    job: str, *, points: int = 2000, from_step: int = 1, to_step: int | None = None
) -> Call[MetricBuckets]:
    """Any number of steps in at most so many buckets, as columns."""
    return _get(_of(job, "/metrics/buckets"), points=points, from_step=from_step, to_step=to_step)


def time(job: str) -> Call[JobTime]:
    """Where the job's time went."""
    return _get(_of(job, "/time"))


def cost(job: str) -> Call[JobCost]:
    """The job's VM-hours and their price."""
    return _get(_of(job, "/cost"))


def pipeline(job: str, *, generation: int | None = None) -> Call[Pipeline]:
    """The newest traced mini-batch. Raises NotFoundError before there is one."""
    return _get(_of(job, "/pipeline"), generation=generation)


def checkpoints(job: str) -> Call[list[Checkpoint]]:
    """All that were committed, oldest first."""
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
) -> Call[list[Event]]:
    """The events after number `after`, oldest first: all, or those of one job, VM, kind, time (ISO 8601)."""
    path = "/events" if job is None else _of(job, "/events")
    return _list(path, after=after, vm=vm, kind=list(kind), since=since, until=until)


def newest_events(job: str | None = None, *, limit: int = 100, before: int | None = None) -> Call[list[Event]]:
    """So many events before number `before` (None: the newest), the newest first."""
    path = "/events" if job is None else _of(job, "/events")
    return _get(path, order="desc", limit=limit, before=before)


def logs(job: str, *, generation: int | None = None, rank: int = 0, offset: int = 0) -> Call[bytes]:
    """A worker's log from byte `offset` on (negative: from the end), as much as the manager sends at once."""
    params = _given({"generation": generation, "rank": rank, "offset": offset})
    return Call(method="GET", path=_of(job, "/logs"), read=lambda response: response.content, params=params)


def log_chunk(
    job: str,
    *,
    generation: int | None = None,
    rank: int = 0,
    offset: int = 0,
    limit: int | None = None,
    wait_s: float = 0.0,
) -> Call[LogChunk]:
    """As `logs`, and where to go on. `wait_s`: wait so long (at most 30 s) for more where the log ends at `offset`."""
    given = {"generation": generation, "rank": rank, "offset": offset, "limit": limit, "wait_s": wait_s or None}
    return Call(
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
) -> Call[LogMatches]:
    """The lines of a worker's log with the text in them."""
    return _get(
        _of(job, "/logs/search"), q=text, generation=generation, rank=rank, limit=limit, ignore_case=ignore_case
    )


def stacks(job: str, *, generation: int | None = None) -> Call[list[Stack]]:
    """Where the ranks of a generation that hung stood; of all that did, without `generation`."""
    return _get(_of(job, "/stacks"), generation=generation)


# ---------------------------------------------------------------- fleet


def vms(
    *,
    gone: bool = False,
    state: Sequence[str] = (),
    job: str | None = None,
    quarantined: bool | None = None,
    text: str | None = None,
) -> Call[list[Vm]]:
    """The VMs that there are, oldest first; with `gone` also those that there were. `text`: in their ids or hosts."""
    return _list("/vms", gone=gone, state=list(state), job=job, quarantined=quarantined, q=text)


def vm(vm_id: str) -> Call[VmDetail]:
    return _get(f"/vms/{_segment(vm_id)}")


def vm_summary() -> Call[VmSummary]:
    """The fleet in numbers."""
    return _get("/vms/summary")


def drain(vm_id: str, *, deadline_s: float | None = None) -> Call[Vm]:
    """Take a VM out of use: its workers save and leave; it is to be empty within `deadline_s`. It stays cordoned."""
    body = {"deadline_s": deadline_s}
    return Call(method="POST", path=f"/vms/{_segment(vm_id)}/drain", read=_document, json=body)


def cordon(vm_id: str) -> Call[Vm]:
    """Start nothing new on a VM until it is uncordoned, also when it restarts. What runs there goes on."""
    return Call(method="POST", path=f"/vms/{_segment(vm_id)}/cordon", read=_document)


def uncordon(vm_id: str) -> Call[Vm]:
    """Use a VM again."""
    return Call(method="POST", path=f"/vms/{_segment(vm_id)}/uncordon", read=_document)


def preempt(vm_id: str, *, notice_s: float) -> Call[None]:
    """Give a VM the notice that a spot provider would give. Only providers that can emulate it."""
    path, body = f"/vms/{_segment(vm_id)}/preempt", {"notice_s": notice_s}
    return Call(method="POST", path=path, read=_nothing, json=body, is_repeatable=False)


def fleet() -> Call[Fleet]:
    return _get("/fleet")


def fleet_history(*, since: str | None = None, until: str | None = None, points: int = 200) -> Call[FleetHistory]:
    """VMs over time."""
    return _get("/fleet/history", since=since, until=until, points=points)


def fleet_cost(*, since: str | None = None) -> Call[FleetCost]:
    return _get("/fleet/cost", since=since)


def set_fleet_target(target: int) -> Call[None]:
    """How many VMs the manager should ask its providers for."""
    return Call(method="PUT", path="/fleet", read=_nothing, json={"target": target})


def set_local_capacity(capacity: int) -> Call[None]:
    """How many VMs the emulated spot market of the local provider grants."""
    return Call(method="PUT", path="/providers/local", read=_nothing, json={"capacity": capacity})


# ---------------------------------------------------------------- access


def whoami() -> Call[Whoami]:
    """Whom the manager takes the caller for."""
    return _get("/whoami")


def create_token(body: dict[str, Any]) -> Call[NewToken]:
    """A token of the API (`name`, `role`) or for joining (`join`); only this answer has its text (`token`)."""
    return Call(method="POST", path="/tokens", read=_document, json=body, is_repeatable=False)


def tokens() -> Call[list[Token]]:
    return _get("/tokens")


def revoke_token(id_or_name: str) -> Call[Token]:
    return Call(method="DELETE", path=f"/tokens/{_segment(id_or_name)}", read=_document)


def revoke_vm(vm_id: str) -> Call[Revoked]:
    return Call(method="POST", path=f"/vms/{_segment(vm_id)}/revoke", read=_document)


def audit(*, after: int = 0) -> Call[list[AuditEntry]]:
    """The entries after number `after`, oldest first."""
    return _list("/audit", after=after)
