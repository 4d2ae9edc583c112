"""The commands that only read: ps, vms, show, logs, metrics, events."""

from __future__ import annotations

import asyncio
import codecs
import re
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer
from rich.text import Text

from varuna_client.commands.options import (
    AsJson,
    JobName,
    ManagerUrl,
    complete_job,
    complete_vm,
    connect,
    connect_async,
    print_document,
    print_line,
    print_note,
)
from varuna_client.errors import JobEndedError, UserError
from varuna_client.following.follow import is_event, newest_event_id
from varuna_client.following.log_follow import ALL, LogFollower, Ranks
from varuna_client.following.past_logs import PastLogs
from varuna_client.rest.calls import LogChunk
from varuna_client.rest.client import Client
from varuna_client.text import render
from varuna_client.text.pages import EVENTS_SHOWN, JobParts, job_page
from varuna_proto.rest import CheckpointDocument, EventDocument, StepMetricsDocument

LOG_TAIL_BYTES = 64 * 1024
_LOSS_POINTS = 40
"""Points of the loss line."""
_MOST_LOGGED = 10_000
"""More than the manager keeps of the values that a script logs under a name."""
_NEWEST_STEPS = 1000
"""Steps that `show --json` lists one by one."""
_PERIOD = re.compile(r"(\d{1,9})([smhd])")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_RANK_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def list_jobs(
    state: Annotated[list[str] | None, typer.Option("--state", help="Only in this state; may be repeated.")] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="KEY[=VALUE]", help="Only with this label; if repeated, with all of them."),
    ] = None,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """List the jobs."""
    with connect(manager_url) as client:
        jobs = client.jobs(state=state or (), label=label or ())
    nothing = "no such jobs" if state or label else "no jobs yet: varuna submit JOB.yaml"
    print_document(jobs, render.jobs_table(jobs, datetime.now(UTC)) if jobs else Text(nothing), as_json)


def vms(
    gone: Annotated[bool, typer.Option("--all", help="Include VMs that are gone.")] = False,
    job: Annotated[
        str | None, typer.Option("--job", help="Only VMs on which this job runs.", autocompletion=complete_job)
    ] = None,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """List the fleet's VMs."""
    with connect(manager_url) as client:
        fleet = client.vms(gone=gone, job=client.job(job)["id"] if job else None)
    nothing = f"job {job} runs on no VM now" if job else "no VMs: start the manager with --vms N"
    print_document(fleet, render.vms_table(fleet) if fleet else Text(nothing), as_json)


def show(job: JobName, manager_url: ManagerUrl = None, as_json: AsJson = False) -> None:
    """Show a job: state, plan, generations with their reasons, use of time, and the traceback if it failed."""
    with connect(manager_url) as client:
        parts = fetch_job_parts(client, job, whole=as_json)
    print_document(parts.to_document(), job_page(parts, datetime.now(UTC)), as_json)


def fetch_job_parts(client: Client, name: str, *, whole: bool) -> JobParts:
    """All parts are of the moment of one answer. Raises NotFoundError.

    `whole`: with all details of each generation, the newest steps, and all checkpoints and events up to that moment.
    """
    report = client.report(name, brief=not whole, points=_LOSS_POINTS, events=EVENTS_SHOWN)
    job, generations, newest = report["job"], report["generations"], report["checkpoint"]
    job_id = job["id"]
    if generations and generations[0]["number"] > 1:  # the report has the newest ones only; the others have ended
        first = generations[0]["number"]
        older = client.generations(job_id, brief=not whole)
        generations = [*(one for one in older if one["number"] < first), *generations]
    parts = JobParts(
        job=job,
        generations=generations,
        plan=report["plan"],
        time=report["time"],
        cost=report["cost"],
        course=report["course"],
        checkpoints=[newest] if newest else [],
        events=report["events"],
    )
    return _add_lists(client, parts) if whole else parts


def _add_lists(client: Client, parts: JobParts) -> JobParts:
    """Add the newest steps, all checkpoints and all events, up to those that `parts` has."""
    job_id, step = parts.job["id"], parts.job["step"]
    steps = client.metrics(job_id, after_step=max(step - _NEWEST_STEPS, 0), limit=_NEWEST_STEPS)
    checkpoints = client.checkpoints(job_id) if parts.checkpoints else []
    last_event = parts.events[-1]["id"] if parts.events else 0
    return replace(
        parts,
        metrics=[one for one in steps if one["step"] <= step],
        checkpoints=[one for one in checkpoints if _order_key(one) <= _order_key(parts.checkpoints[-1])],
        events=[one for one in client.events(job_id) if one["id"] <= last_event],
    )


def _order_key(checkpoint: CheckpointDocument) -> tuple[int, int]:
    """Its place in the list of a job's checkpoints."""
    return checkpoint["generation"], checkpoint["step"]


def logs(
    job: JobName,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Follow until the job ends; if it fails, exit with its exit code.")
    ] = False,
    rank: Annotated[
        str | None,
        typer.Option(metavar="N|all", help="Which worker (default: the one whose script failed, or else 0)."),
    ] = None,
    generation: Annotated[
        int | None, typer.Option(min=1, help="Which generation (default: all; with -f from the newest on).")
    ] = None,
    whole: Annotated[
        bool, typer.Option("--all", help="Print from the job's beginning, not only the last 64 KiB of each worker.")
    ] = False,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Print the output of a job's workers, over all its generations."""
    ranks = _parse_ranks(rank)
    writer = LogWriter(has_prefix=ranks == ALL, as_json=as_json)
    if follow:
        asyncio.run(_follow_logs(manager_url, job, ranks, generation, writer, whole=whole))
        return
    with connect(manager_url) as client:
        past = PastLogs(client, client.job(job)["id"], ranks, generation)
        for part in past.read_all() if whole else past.read_tail(LOG_TAIL_BYTES):
            if isinstance(part, str):
                print_note(part)
            else:
                writer.write(part)
    writer.close()


def _parse_ranks(text: str | None) -> Ranks:
    if text is None or text == ALL:
        return text
    if not text.isdecimal():
        raise UserError(f"--rank {text!r}: expected a number from 0, or all")
    return int(text)


async def _follow_logs(
    url: str | None, job: str, ranks: Ranks, generation: int | None, writer: LogWriter, *, whole: bool
) -> None:
    """Raises JobEndedError when the job fails."""
    async with connect_async(url) as client:
        job_id = (await client.job(job))["id"]
        async for chunk in LogFollower(client, job_id, ranks, generation, from_first=whole).follow_chunks():
            writer.write(chunk)
        writer.close()
        ended = await client.job(job_id)
        if ended["state"] == "failed" and generation in (None, ended["generation"]):
            raise JobEndedError(f"job {job} failed (varuna show {job})", ended["exit_code"])


class LogWriter:
    """Writes logs to standard output: unchanged, line by line with the rank before each, or as JSON."""

    def __init__(self, *, has_prefix: bool, as_json: bool) -> None:
        self._has_prefix = has_prefix
        self._as_json = as_json
        self._decoders: dict[tuple[int, int], codecs.IncrementalDecoder] = {}
        self._rests: dict[tuple[int, int], str] = {}
        self._source: tuple[int, int] | None = None
        """The generation and rank of the last chunk."""

    def write(self, chunk: LogChunk) -> None:
        if not chunk.data:
            return
        source = (chunk.generation, chunk.rank)
        decoder = self._decoders.setdefault(source, codecs.getincrementaldecoder("utf-8")(errors="replace"))
        text = decoder.decode(chunk.data)
        if self._as_json:
            document = {"generation": chunk.generation, "rank": chunk.rank, "offset": chunk.offset, "log": text}
            print_line(document, "", as_json=True)
        elif self._has_prefix:
            *lines, self._rests[source] = (self._rests.get(source, "") + text).split("\n")
            self._write_lines(source, lines)
        else:
            if self._source not in (None, source):
                print_note(f"== rank {chunk.rank} in generation {chunk.generation}")
            self._source = source
            sys.stdout.write(text)
            sys.stdout.flush()

    def close(self) -> None:
        """Write the incomplete last lines."""
        for source, rest in self._rests.items():
            self._write_lines(source, [rest] if rest else [])
        self._rests.clear()

    def _write_lines(self, source: tuple[int, int], lines: list[str]) -> None:
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


def metrics(
    job: JobName,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print comma-separated values: times in UTC, all digits, empty if unknown.")
    ] = False,
    last: Annotated[int | None, typer.Option("-n", "--last", min=1, help="Only this many of the newest steps.")] = None,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """List a job's steps: time, loss, examples per second, seconds, generation, and what the script has logged."""
    if as_csv and as_json:
        raise UserError("varuna metrics: give --csv or --json, not both")
    with connect(manager_url) as client:
        found = client.job(job)
        after = 0 if last is None else max(found["step"] - last, 0)
        steps = _list_steps(client, found["id"], after)
        series = client.logged_values(found["id"], points=_MOST_LOGGED, after_step=after or None)
    logged = {one["name"]: dict(zip(one["step"], one["value"], strict=True)) for one in series}
    if as_csv:
        sys.stdout.write(render.steps_csv(steps, logged))
        return
    nothing = Text(f"job {job} has made no step yet: it is {found['state']}")
    documents = [{**step, "logged": _list_logged(logged, step["step"])} for step in steps]
    print_document(documents, render.steps_table(steps, logged) if steps else nothing, as_json)


def _list_logged(logged: render.LoggedValues, step: int) -> dict[str, float]:
    """By name: what the script has logged at this step."""
    return {name: values[step] for name, values in logged.items() if step in values}


def _list_steps(client: Client, job_id: str, after: int) -> list[StepMetricsDocument]:
    steps: list[StepMetricsDocument] = []
    while page := client.metrics(job_id, after_step=steps[-1]["step"] if steps else after):
        steps += page
    return steps


def events(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="Only events of this job.", autocompletion=complete_job)
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow new events.")] = False,
    kind: Annotated[
        list[str] | None, typer.Option("--kind", help="Only events of this kind, such as vm_lost; may be repeated.")
    ] = None,
    vm: Annotated[str | None, typer.Option("--vm", help="Only events of this VM.", autocompletion=complete_vm)] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="Since when: 10m, 2h, 1d, or ISO 8601.")] = None,
    last: Annotated[int | None, typer.Option("-n", "--last", min=0, help="Only this many past events.")] = None,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """List events and decisions with their reasons."""
    with connect(manager_url) as client:
        job_id = client.job(job)["id"] if job else None
        newest = newest_event_id(client, job_id)
        past = client.events(job_id, vm=vm, kind=kind or (), since=_parse_time(since))
        for event in past if last is None else past[len(past) - min(last, len(past)) :]:
            _print_event(event, as_json)
        if not follow:
            return
        for item in client.stream(job_id, after=max(newest, past[-1]["id"] if past else 0)):
            if is_event(item) and is_wanted(item[1], kind, vm):
                _print_event(item[1], as_json)


def is_wanted(event: EventDocument, kinds: list[str] | None, vm: str | None) -> bool:
    return (not kinds or event["kind"] in kinds) and vm in (None, event["vm_id"])


def _print_event(event: EventDocument, as_json: bool) -> None:
    print_line(event, render.event_row(event), as_json)


def _parse_time(text: str | None) -> str | None:
    """The ISO 8601 text of a time that is given in ISO 8601 or as an age."""
    if text is None:
        return None
    period = _PERIOD.fullmatch(text)
    try:
        if period:
            return (datetime.now(UTC) - timedelta(seconds=int(period[1]) * _UNITS_S[period[2]])).isoformat()
        return datetime.fromisoformat(text).astimezone(UTC).isoformat()
    except (ValueError, OverflowError):
        raise UserError(f"--since {text!r}: expected 90s, 30m, 2h, 7d or a time such as 2026-01-31T12:00") from None
