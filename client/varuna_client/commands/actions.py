"""The commands that act on jobs and VMs: submit, watch, cancel, retry, delete, drain, cordon, uncordon, stacks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from varuna_client.commands.options import (
    AsJson,
    JobName,
    JobNames,
    ManagerUrl,
    VmName,
    connect,
    make_console,
    print_document,
    print_error,
    print_line,
    print_note,
    print_text,
)
from varuna_client.commands.preview import preview, preview_text
from varuna_client.commands.watch_views import LineWatch, LiveWatch, WatchedJob, render_summary
from varuna_client.errors import JobEndedError, RefusedError
from varuna_client.following.follow import follow_job, newest_event_id
from varuna_client.jobfile.jobfile import load_job, submit_job
from varuna_client.jobfile.overrides import parse_overrides
from varuna_client.rest.client import Client
from varuna_client.text.render import whole_rate
from varuna_proto.rest import END_STATES, JobDocument

Watch = Annotated[
    bool,
    typer.Option("--watch", help="Follow the job; exit 0 only if it succeeds, otherwise with its script's exit code."),
]


def submit(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job to run.")],
    watch: Watch = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run, and submit nothing.")] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Replace a setting of the file, such as resources.max_gpus=4; may be repeated.",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME=VALUE", help="Set an environment variable of the job; may be repeated."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name the job; default: as in the file.")] = None,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Submit a job, and show what will run: the plan for the present GPUs, its rate and its cost."""
    overrides = list(parse_overrides(settings or (), env or (), name))
    with connect(manager_url) as client:
        file = load_job(job_file, overrides)
        if dry_run:
            found = preview(client, file.spec)
            print_document(found.to_document(), preview_text(found, file.spec), as_json)
            return
        if not as_json:
            print_text(preview_text(preview(client, file.spec), file.spec))
        job = submit_job(client, file)
        _print_or_watch(client, job, 0, watch=watch, as_json=as_json)


def watch_job(job: JobName, manager_url: ManagerUrl = None, as_json: AsJson = False) -> None:
    """Follow a job to its end; exit 0 only if it succeeds, otherwise with its script's exit code."""
    with connect(manager_url) as client:
        found = client.job(job)
        watch_to_end(client, found, newest_event_id(client, found["id"]), as_json=as_json)


def cancel(
    jobs: JobNames,
    save: Annotated[bool, typer.Option("--save", help="Finish the step and write a last checkpoint first.")] = False,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Stop jobs. Their checkpoints stay: `varuna retry` continues from the newest one."""
    refusals: list[RefusedError] = []
    with connect(manager_url) as client:
        for job in dict.fromkeys(jobs):
            try:
                cancelled = client.cancel(client.job(job)["id"], save=save)
            except RefusedError as error:  # the others are cancelled all the same
                refusals.append(error)
                continue
            print_line(cancelled, Text(f"job {cancelled['name']} is {cancelled['state']}"), as_json)
    if refusals:
        *others, last = refusals
        for refusal in others:
            print_error(refusal)
        raise last


def retry(job: JobName, watch: Watch = False, manager_url: ManagerUrl = None, as_json: AsJson = False) -> None:
    """Continue a failed or cancelled job from its newest checkpoint."""
    with connect(manager_url) as client:
        job_id = client.job(job)["id"]
        before = newest_event_id(client, job_id)
        _print_or_watch(client, client.retry(job_id), before, watch=watch, as_json=as_json)


def delete(job: JobName, manager_url: ManagerUrl = None, as_json: AsJson = False) -> None:
    """Delete a finished job with its steps, generations and events. Its checkpoints stay in their store."""
    with connect(manager_url) as client:
        deleted = client.delete(client.job(job)["id"])
    print_document(deleted, Text(f"job {deleted['name']} ({deleted['id']}) is deleted"), as_json)


def drain(
    vm: VmName,
    deadline: Annotated[
        float | None, typer.Option(min=0, help="Seconds until the VM must be empty, saved or not.")
    ] = None,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Take a VM out of use: its workers finish their step, save what no other VM holds, and leave; its provider gets it
    back.

    Your own host stays cordoned when its agent returns: `varuna uncordon` puts it back into use.
    """
    with connect(manager_url) as client:
        drained = client.drain(vm, deadline_s=deadline)
    print_document(drained, Text(f"VM {drained['id']} is {drained['state']}: {drained['reason']}"), as_json)


def cordon(vm: VmName, manager_url: ManagerUrl = None, as_json: AsJson = False) -> None:
    """Start nothing new on a VM until `varuna uncordon`, even after it restarts. Its workers continue."""
    with connect(manager_url) as client:
        cordoned = client.cordon(vm)
    busy = ", and its workers continue (varuna drain lets them save and leave)" if cordoned["workers"] else ""
    print_document(cordoned, Text(f"VM {vm} is cordoned: nothing new starts there{busy}"), as_json)


def uncordon(vm: VmName, manager_url: ManagerUrl = None, as_json: AsJson = False) -> None:
    """Put a cordoned or drained VM back into use."""
    with connect(manager_url) as client:
        found = client.uncordon(vm)
    print_document(found, Text(f"VM {vm} may be used again (it is {found['state']})"), as_json)


def stacks(
    job: JobName,
    generation: Annotated[int | None, typer.Option(min=1, help="Which generation (default: all that hung).")] = None,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show the stacks of a job's ranks from when it hung."""
    with connect(manager_url) as client:
        found = client.stacks(client.job(job)["id"], generation=generation)
    lines = []
    for stack in found:
        head = f"generation {stack['generation']}, rank {stack['rank']} on VM {stack['vm_id']}"
        lines.append(f"== {head}\n{stack['text'] or '(none: ' + stack['error'] + ')'}\n")
    print_document(found, Text("\n".join(lines) if lines else f"no generation of job {job} has hung"), as_json)


def _print_or_watch(client: Client, job: JobDocument, after: int, *, watch: bool, as_json: bool) -> None:
    """Print the job's state; with `watch` follow it to its end, from event number `after` on.

    Raises JobEndedError when a watched job does not succeed.
    """
    name = job["name"]
    text = Text(f"job {name} ({job['id']}) is {job['state']}")
    if not watch:
        print_document(job, text.append(f": varuna watch {name}, varuna show {name}"), as_json)
        return
    print_line(job, text, as_json)
    watch_to_end(client, job, after, as_json=as_json)


def watch_to_end(client: Client, job: JobDocument, after: int, *, as_json: bool) -> None:
    """Follow the job from event number `after` to its end. Raises JobEndedError if it does not succeed."""
    name, job_id = job["name"], job["id"]
    try:
        job = client.job(job_id)
        if job["state"] not in END_STATES:
            _watch(client, job, after, as_json=as_json)
    except KeyboardInterrupt:
        print_note(f"\njob {name} continues. To follow it again: varuna watch {name}; to stop it: varuna cancel {name}")
        raise
    job = client.job(job_id)
    kinds = [generation["kind"] for generation in client.generations(job_id, brief=True)]
    has_steps = bool(job["step"])
    goodput = client.time(job_id)["goodput"] if has_steps else None
    whole = whole_rate(client.metric_buckets(job_id, points=1)) if has_steps else None
    print_line(job, render_summary(job, goodput, kinds, whole), as_json)
    if job["state"] != "succeeded":
        error = (job["error"] or "").strip().splitlines()
        why = f": {error[-1]}" if error else ""
        raise JobEndedError(f"job {name} {job['state']}{why} (varuna show {name})", job.get("exit_code"))


def _watch(client: Client, job: JobDocument, after: int, *, as_json: bool) -> None:
    watched = WatchedJob(job)
    console = make_console()
    view = LiveWatch(watched, console) if console.is_terminal and not as_json else LineWatch(watched, as_json=as_json)
    with view:
        for item in follow_job(client, job["id"], after=after):
            if item[0] == "progress":
                watched.add_progress(item[1], time.monotonic())
                view.show_progress(item[1])
            else:
                watched.last_event = item[1]
                watched.job = client.job(job["id"])
                view.show_event(item[1])
