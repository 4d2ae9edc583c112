"""The commands that steer jobs and VMs: submit, watch, cancel, retry, delete, drain, cordon, stacks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from varuna_client.api import Client
from varuna_client.documents import END_STATES, Job
from varuna_client.errors import JobEndedError
from varuna_client.follow import follow_job, newest_event_id
from varuna_client.jobfile import hand_in, load_job
from varuna_client.options import AsJson, JobName, ManagerUrl, VmName, connect, emit, emit_line, note, tell
from varuna_client.preview import preview, preview_text
from varuna_client.watching import LineWatch, LiveWatch, Watched, summary

Watch = Annotated[
    bool,
    typer.Option("--watch", help="Follow the job; exit 0 only when it succeeds, else with its script's exit code."),
]


def submit(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job to run.")],
    watch: Watch = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and submit nothing.")] = False,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Hand in a job, and say what will run: the plan for the GPUs there are now, its rate and cost."""
    with connect(manager_url) as client:
        file = load_job(job_file)
        if dry_run:
            found = preview(client, file.spec)
            emit(found.document(), preview_text(found, file.spec), as_json)
            return
        if not as_json:
            tell(preview_text(preview(client, file.spec), file.spec))
        job = hand_in(client, file)
        _told_or_watched(client, job, 0, watch=watch, as_json=as_json)


def watch_job(job: JobName, manager_url: ManagerUrl = None, as_json: AsJson = False) -> None:
    """Follow a job to its end, as submit --watch does; exit as it does."""
    with connect(manager_url) as client:
        found = client.job(job)
        watch_to_end(client, found, newest_event_id(client, found["id"]), as_json=as_json)


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
        job_id = client.job(job)["id"]
        before = newest_event_id(client, job_id)
        _told_or_watched(client, client.retry(job_id), before, watch=watch, as_json=as_json)


def delete(job: JobName, manager_url: ManagerUrl = None, as_json: AsJson = False) -> None:
    """Forget a job that is over, with its steps, generations and events. Its checkpoints stay where they are."""
    with connect(manager_url) as client:
        deleted = client.delete(client.job(job)["id"])
    emit(deleted, Text(f"job {deleted['name']} ({deleted['id']}) is deleted"), as_json)


def drain(
    vm: VmName,
    deadline: Annotated[
        float | None, typer.Option(min=0, help="Seconds within which it is to be empty, saved or not.")
    ] = None,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Take a VM out of use: its workers finish the step and save, then it is given back.

    A host of your own stays cordoned when its agent is back: `varuna uncordon` takes it into use again.
    """
    with connect(manager_url) as client:
        drained = client.drain(vm, deadline_s=deadline)
    emit(drained, Text(f"VM {drained['id']} is {drained['state']}: {drained['reason']}"), as_json)


def cordon(vm: VmName, manager_url: ManagerUrl = None, as_json: AsJson = False) -> None:
    """Start nothing new on a VM until `varuna uncordon`, also when it restarts; what runs there goes on."""
    with connect(manager_url) as client:
        cordoned = client.cordon(vm)
    busy = ", and its workers go on (varuna drain has them save and leave)" if cordoned["workers"] else ""
    emit(cordoned, Text(f"VM {vm} is cordoned: nothing new starts there{busy}"), as_json)


def uncordon(vm: VmName, manager_url: ManagerUrl = None, as_json: AsJson = False) -> None:
    """Use a VM again that was cordoned or drained."""
    with connect(manager_url) as client:
        found = client.uncordon(vm)
    emit(found, Text(f"VM {vm} may be used again (it is {found['state']})"), as_json)


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


def _told_or_watched(client: Client, job: Job, after: int, *, watch: bool, as_json: bool) -> None:
    """That the job was handed in; with `watch` also all that follows event number `after`, to its end.

    Raises JobEndedError when a watched job does not succeed.
    """
    name = job["name"]
    text = Text(f"job {name} ({job['id']}) is {job['state']}")
    if not watch:
        emit(job, text.append(f": varuna watch {name}, varuna show {name}"), as_json)
        return
    emit_line(job, text, as_json)
    watch_to_end(client, job, after, as_json=as_json)


def watch_to_end(client: Client, job: Job, after: int, *, as_json: bool) -> None:
    """What happens to the job after event number `after`. Raises JobEndedError when it does not succeed."""
    name, job_id = job["name"], job["id"]
    try:
        job = client.job(job_id)
        if job["state"] not in END_STATES:
            _watch(client, job, after, as_json=as_json)
    except KeyboardInterrupt:
        note(f"\njob {name} goes on without you. Back to it: varuna watch {name}; to stop it: varuna cancel {name}")
        raise
    job = client.job(job_id)
    kinds = [generation["kind"] for generation in client.generations(job_id, brief=True)]
    emit_line(job, summary(job, client.time(job_id)["goodput"] if job["step"] else None, kinds), as_json)
    if job["state"] != "succeeded":
        error = (job["error"] or "").strip().splitlines()
        why = f": {error[-1]}" if error else ""
        raise JobEndedError(f"job {name} {job['state']}{why} (varuna show {name})", job.get("exit_code"))


def _watch(client: Client, job: Job, after: int, *, as_json: bool) -> None:
    watched = Watched(job)
    console = Console(highlight=False)
    view = LiveWatch(watched, console) if console.is_terminal and not as_json else LineWatch(watched, as_json=as_json)
    with view:
        for told in follow_job(client, job["id"], after=after):
            if told[0] == "progress":
                watched.note_progress(told[1], time.monotonic())
                view.progress(told[1])
            else:
                watched.last_event = told[1]
                watched.job = client.job(job["id"])
                view.event(told[1])
