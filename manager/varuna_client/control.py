"""The commands that steer jobs and VMs: cancel, retry, drain, stacks; and watching a job to its end."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from varuna_client import render
from varuna_client.api import Client
from varuna_client.documents import Job
from varuna_client.errors import JobEndedError
from varuna_client.follow import follow_job
from varuna_client.options import AsJson, JobName, ManagerUrl, connect, emit, emit_line

Watch = Annotated[
    bool,
    typer.Option("--watch", help="Follow the job; exit 0 only when it succeeds, else with its script's exit code."),
]


def cancel(
    job: JobName,
    save: Annotated[bool, typer.Option("--save", help="Finish the step and write a last checkpoint first.")] = False,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Stop a job. What it has saved stays: `varuna retry` goes on from there."""
    with connect(manager_url) as client:
        cancelled = client.cancel(client.job(job)["id"], save=save)
    emit(cancelled, Text(f"job {cancelled['name']} is {cancelled['state']}"), as_json)


def retry(job: JobName, watch: Watch = False, manager_url: ManagerUrl = None, as_json: AsJson = False) -> None:
    """Go on with a job that failed or was cancelled, from its newest checkpoint."""
    with connect(manager_url) as client:
        queued = client.retry(client.job(job)["id"])
        text = Text(f"job {queued['name']} ({queued['id']}) is {queued['state']}: varuna show {queued['name']}")
        tell(client, queued, text, watch=watch, as_json=as_json)


def drain(
    vm: Annotated[str, typer.Argument(metavar="VM", help="The VM's id: varuna vms.")],
    deadline: Annotated[
        float | None, typer.Option(min=0, help="Seconds within which it is to be empty, saved or not.")
    ] = None,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Take a VM out of use: its workers finish the step and save, then it is given back."""
    with connect(manager_url) as client:
        drained = client.drain(vm, deadline_s=deadline)
    emit(drained, Text(f"VM {drained['id']} is {drained['state']}: {drained['reason']}"), as_json)


def stacks(
    job: JobName,
    generation: Annotated[int | None, typer.Option(min=1, help="Which generation; all that hung if not given.")] = None,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show where the ranks of a job stood when it hung."""
    with connect(manager_url) as client:
        found = client.stacks(client.job(job)["id"], generation=generation)
    lines = []
    for stack in found:
        head = f"generation {stack['generation']}, rank {stack['rank']} on VM {stack['vm_id']}"
        lines.append(f"== {head}\n{stack['text'] or '(none: ' + stack['error'] + ')'}\n")
    emit(found, Text("\n".join(lines) if lines else f"no generation of job {job} was found hanging"), as_json)


def tell(client: Client, job: Job, text: Text, *, watch: bool, as_json: bool) -> None:
    """That the job was handed in; with `watch` also all that follows, to its end.

    Raises JobEndedError when a watched job does not succeed.
    """
    if not watch:
        emit(job, text, as_json)
        return
    emit_line(job, text, as_json)
    for latest, metrics, events in follow_job(client, job["id"]):
        job = latest
        for event in events:
            emit_line(event, render.event_line(event), as_json)
        for metric in metrics:
            line = f"step {metric['step']}  loss {render.number(metric['loss'])}  {metric['step_s']:.3f} s"
            emit_line(metric, Text(f"{render.clock(metric['at'])}  {line}  g{metric['generation']}"), as_json)
    emit_line(job, Text(f"job {job['name']} {job['state']} at step {job['step']}"), as_json)
    if job["state"] != "succeeded":
        error = (job["error"] or "").strip().splitlines()
        why = f": {error[-1]}" if error else ""
        message = f"job {job['name']} {job['state']}{why} (varuna show {job['name']})"
        raise JobEndedError(message, job.get("exit_code"))
