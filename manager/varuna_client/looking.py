"""The commands that look: ps, vms, show, logs, events."""

from __future__ import annotations

import asyncio
import codecs
import re
import sys
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer
from rich.text import Text

from varuna_client import render
from varuna_client.api import Client
from varuna_client.calls import LogChunk
from varuna_client.documents import Event
from varuna_client.errors import JobEndedError, NotFoundError, UserError
from varuna_client.follow import is_event, newest_event_id, telling_rank
from varuna_client.log_follow import ALL, LogFollower, Ranks
from varuna_client.options import (
    AsJson,
    JobName,
    ManagerUrl,
    complete_job,
    complete_vm,
    connect,
    connect_later,
    emit,
    emit_line,
    note,
)
from varuna_client.pages import EVENTS_SHOWN, JobParts, job_page

LOG_TAIL_BYTES = 64 * 1024
_POINTS = 40
"""Of the loss, in one line."""
_STEPS = 1000
"""That `show --json` has one by one, the newest."""
_PERIOD = re.compile(r"(\d{1,9})([smhd])")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_RANK_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def list_jobs(
    state: Annotated[list[str] | None, typer.Option("--state", help="Only in this state; may be repeated.")] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="KEY[=VALUE]", help="Only with this label; may be repeated: with all of them."),
    ] = None,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """List the jobs."""
    with connect(manager_url) as client:
        jobs = client.jobs(state=state or (), label=label or ())
    nothing = "no such jobs" if state or label else "no jobs yet: varuna submit JOB.yaml"
    emit(jobs, render.jobs_table(jobs, datetime.now(UTC)) if jobs else Text(nothing), as_json)


def vms(
    gone: Annotated[bool, typer.Option("--all", help="Also those that are gone.")] = False,
    job: Annotated[
        str | None, typer.Option("--job", help="Only those on which it runs.", autocompletion=complete_job)
    ] = None,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """List the fleet's VMs."""
    with connect(manager_url) as client:
        fleet = client.vms(gone=gone, job=client.job(job)["id"] if job else None)
    nothing = f"job {job} runs on no VM now" if job else "no VMs: start the manager with --vms N"
    emit(fleet, render.vms_table(fleet) if fleet else Text(nothing), as_json)


def show(job: JobName, manager_url: ManagerUrl = None, as_json: AsJson = False) -> None:
    """Show a job: state, plan, generations with their reasons, where its time went, the traceback if it failed."""
    with connect(manager_url) as client:
        parts = job_parts(client, job, whole=as_json)
    emit(parts.document(), job_page(parts, datetime.now(UTC)), as_json)


def job_parts(client: Client, name: str, *, whole: bool) -> JobParts:
    """`whole`: with all that is known of each generation, and all events. Raises NotFoundError."""
    job = client.job(name)
    job_id = job["id"]
    try:
        plan = client.plan(job_id)
    except NotFoundError:  # it has not been planned yet
        plan = None
    return JobParts(
        job=job,
        generations=client.generations(job_id, brief=not whole),
        plan=plan,
        time=client.time(job_id),
        cost=client.cost(job_id),
        metrics=client.metrics(job_id, after_step=max(job["step"] - _STEPS, 0), limit=_STEPS),
        course=client.metric_buckets(job_id, points=_POINTS),
        checkpoints=client.checkpoints(job_id),
        events=client.events(job_id) if whole else client.newest_events(job_id, limit=EVENTS_SHOWN)[::-1],
    )


def logs(
    job: JobName,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on until the job ends; if it fails, with its exit code.")
    ] = False,
    rank: Annotated[
        str | None,
        typer.Option(metavar="N|all", help="Which worker; if not given, the one whose script failed, else 0."),
    ] = None,
    generation: Annotated[int | None, typer.Option(min=1, help="Which generation; the newest if not given.")] = None,
    whole: Annotated[bool, typer.Option("--all", help="From the beginning, not only the end.")] = False,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Print what the workers wrote."""
    ranks = _ranks(rank)
    writer = LogWriter(has_prefix=ranks == ALL, as_json=as_json)
    if follow:
        asyncio.run(_follow_logs(manager_url, job, ranks, generation, writer))
        return
    with connect(manager_url) as client:
        job_id = client.job(job)["id"]
        if isinstance(ranks, int):
            wanted = [ranks]
        else:
            found = client.generations(job_id)
            number = generation or (found[-1]["number"] if found else None)
            placed = [len(each["placement"]) for each in found if each["number"] == number]
            wanted = list(range(placed[0])) if ranks == ALL and placed else [telling_rank(found, number)]
        for each in wanted:
            _print_log(client, job_id, generation, each, writer, whole=whole)
    writer.close()


def _ranks(text: str | None) -> Ranks:
    if text is None or text == ALL:
        return text
    if not text.isdecimal():
        raise UserError(f"--rank {text!r}: expected a number from 0, or all")
    return int(text)


def _print_log(
    client: Client, job_id: str, generation: int | None, rank: int, writer: LogWriter, *, whole: bool
) -> None:
    chunk = client.log_chunk(job_id, generation=generation, rank=rank, offset=0 if whole else -LOG_TAIL_BYTES)
    if chunk.offset > 0:
        note(f"rank {rank}: the first {render.size(chunk.offset)} are left out (--all)")
    while True:
        writer.write(chunk)
        if not whole or not chunk.data or chunk.next_offset >= chunk.size:
            return
        chunk = client.log_chunk(job_id, generation=chunk.generation, rank=rank, offset=chunk.next_offset)


async def _follow_logs(url: str | None, job: str, ranks: Ranks, generation: int | None, writer: LogWriter) -> None:
    """Raises JobEndedError when the job fails."""
    async with connect_later(url) as client:
        job_id = (await client.job(job))["id"]
        async for chunk in LogFollower(client, job_id, ranks, generation).chunks():
            writer.write(chunk)
        writer.close()
        ended = await client.job(job_id)
        if ended["state"] == "failed" and generation in (None, ended["generation"]):
            raise JobEndedError(f"job {job} failed (varuna show {job})", ended["exit_code"])


class LogWriter:
    """Writes logs to standard output: as they are; line by line with the rank before each; or as JSON."""

    def __init__(self, *, has_prefix: bool, as_json: bool) -> None:
        self._has_prefix = has_prefix
        self._as_json = as_json
        self._decoders: dict[tuple[int, int], codecs.IncrementalDecoder] = {}
        self._rests: dict[tuple[int, int], str] = {}
        self._source: tuple[int, int] | None = None
        """The generation and rank of what was written last."""

    def write(self, chunk: LogChunk) -> None:
        if not chunk.data:
            return
        source = (chunk.generation, chunk.rank)
        decoder = self._decoders.setdefault(source, codecs.getincrementaldecoder("utf-8")(errors="replace"))
        text = decoder.decode(chunk.data)
        if self._as_json:
            document = {"generation": chunk.generation, "rank": chunk.rank, "offset": chunk.offset, "log": text}
            emit_line(document, "", as_json=True)
        elif self._has_prefix:
            *lines, self._rests[source] = (self._rests.get(source, "") + text).split("\n")
            self._tell(source, lines)
        else:
            if self._source not in (None, source):
                note(f"== rank {chunk.rank} in generation {chunk.generation}")
            self._source = source
            sys.stdout.write(text)
            sys.stdout.flush()

    def close(self) -> None:
        """Tell the beginnings of lines whose ends did not come."""
        for source, rest in self._rests.items():
            self._tell(source, [rest] if rest else [])
        self._rests.clear()

    def _tell(self, source: tuple[int, int], lines: list[str]) -> None:
        generation, rank = source
        prefix = f"g{generation} r{rank} | "
        if sys.stdout.isatty():
            prefix = _coloured(prefix, _RANK_COLOURS[rank % len(_RANK_COLOURS)])
        sys.stdout.write("".join(f"{prefix}{line}\n" for line in lines))
        sys.stdout.flush()


def _coloured(text: str, colour: str) -> str:
    from rich.console import Console

    console = Console()
    with console.capture() as captured:
        console.print(text, style=colour, end="", highlight=False, markup=False)
    return captured.get()


def events(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="Only this job's.", autocompletion=complete_job)
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as they come.")] = False,
    kind: Annotated[
        list[str] | None, typer.Option("--kind", help="Only of this kind, such as vm_lost; may be repeated.")
    ] = None,
    vm: Annotated[str | None, typer.Option("--vm", help="Only of this VM.", autocompletion=complete_vm)] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="Not before: 10m, 2h, 1d, or ISO 8601.")] = None,
    last: Annotated[int | None, typer.Option("-n", "--last", min=0, help="At most so many of the past.")] = None,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """List what happened and what was decided, with the reasons."""
    with connect(manager_url) as client:
        job_id = client.job(job)["id"] if job else None
        newest = newest_event_id(client, job_id)
        past = client.events(job_id, vm=vm, kind=kind or (), since=_moment(since))
        for event in past if last is None else past[len(past) - min(last, len(past)) :]:
            _tell_event(event, as_json)
        if not follow:
            return
        for told in client.stream(job_id, after=max(newest, past[-1]["id"] if past else 0)):
            if is_event(told) and is_wanted(told[1], kind, vm):
                _tell_event(told[1], as_json)


def is_wanted(event: Event, kinds: list[str] | None, vm: str | None) -> bool:
    return (not kinds or event["kind"] in kinds) and vm in (None, event["vm_id"])


def _tell_event(event: Event, as_json: bool) -> None:
    emit_line(event, render.event_row(event), as_json)


def _moment(text: str | None) -> str | None:
    """ISO 8601 of a moment that is given so, or by how long it is ago."""
    if text is None:
        return None
    period = _PERIOD.fullmatch(text)
    try:
        if period:
            return (datetime.now(UTC) - timedelta(seconds=int(period[1]) * _UNITS_S[period[2]])).isoformat()
        return datetime.fromisoformat(text).astimezone(UTC).isoformat()
    except (ValueError, OverflowError):
        raise UserError(f"--since {text!r}: expected 90s, 30m, 2h, 7d or a time such as 2026-01-31T12:00") from None
