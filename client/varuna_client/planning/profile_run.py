"""`varuna profile run`: measures a job's model on the manager's fleet, without training it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from varuna_client.commands.options import AsJson, ManagerUrl, connect, make_console, print_document
from varuna_client.errors import UserError
from varuna_client.following.follow import follow_job, is_event
from varuna_client.jobfile.jobfile import load_job, submit_job
from varuna_client.planning.files import write_text
from varuna_client.planning.profiles import profile_document, profile_page
from varuna_client.text import render
from varuna_proto.rest import JobDocument, JobSpecDocument

_LONGEST_NAME = 63


def run(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job whose model to measure.")],
    out: Annotated[Path | None, typer.Option(metavar="P.json", help="File for the profile.")] = None,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Measure a job's model on the manager's GPUs, without training it; --json prints the profile itself."""
    from varuna_planner.profile.document import Profile

    progress = make_console(stderr=True)
    with connect(manager_url) as client:
        file = load_job(job_file)
        job = submit_job(client, replace(file, spec=profiling_job(file.spec)))
        for item in follow_job(client, job["id"]):
            if is_event(item):
                progress.print(render.event_line(item[1]), soft_wrap=True)
        job = client.job(job["id"])
        if job["state"] != "succeeded":
            raise UserError(_why_not(job))
        text = client.profile(job["id"])
    profile = Profile.from_json(text)
    if out is not None:
        write_text(out, text, "profile")
    if as_json:
        print_document(json.loads(text), Text(), as_json)
    elif out is None:
        print_document(None, profile_page(profile_document(profile, profile.micro_batches[-1])), as_json)
    else:
        print_document(None, Text(f"{out}: {len(profile.sections)} sections: varuna profile show {out}"), as_json)


def profiling_job(spec: JobSpecDocument) -> JobSpecDocument:
    """The job that measures what `spec` would train, under a name beside its own."""
    name = f"{str(spec['name'])[: _LONGEST_NAME - len('-profile')]}-profile"
    return {**spec, "name": name, "profile_only": True}


def schema() -> None:
    """Print the JSON schema of profiles."""
    from varuna_planner.profile.document import Profile

    typer.echo(json.dumps(Profile.model_json_schema(by_alias=True), indent=2))


def _why_not(job: JobDocument) -> str:
    error = (job["error"] or "").strip().splitlines()
    return f"job {job['name']} {job['state']}{': ' + error[-1] if error else ''} (varuna show {job['name']})"
