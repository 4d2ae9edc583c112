"""`varuna profile run`: have a job's model measured on the manager's fleet, and no more."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from varuna_client import render
from varuna_client.documents import Job, JobSpec
from varuna_client.errors import UserError
from varuna_client.follow import follow_job, is_event
from varuna_client.jobfile import hand_in, load_job
from varuna_client.options import AsJson, ManagerUrl, connect, emit, make_console
from varuna_client.planning.files import write_text
from varuna_client.planning.profiles import profile_document, profile_page

_LONGEST_NAME = 63


def run(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job whose model is measured.")],
    out: Annotated[Path | None, typer.Option(metavar="P.json", help="Where the profile goes.")] = None,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Measure a job's model on the manager's GPUs, without training it; --json prints the profile itself."""
    from varuna_planner.profile import Profile

    told = make_console(stderr=True)
    with connect(manager_url) as client:
        file = load_job(job_file)
        job = hand_in(client, replace(file, spec=profiling_job(file.spec)))
        for news in follow_job(client, job["id"]):
            if is_event(news):
                told.print(render.event_line(news[1]), soft_wrap=True)
        job = client.job(job["id"])
        if job["state"] != "succeeded":
            raise UserError(_why_not(job))
        text = client.profile(job["id"])
    profile = Profile.from_json(text)
    if out is not None:
        write_text(out, text, "profile")
    if as_json:
        emit(json.loads(text), Text(), as_json)
    elif out is None:
        emit(None, profile_page(profile_document(profile, profile.micro_batches[-1])), as_json)
    else:
        emit(None, Text(f"{out}: {len(profile.sections)} sections: varuna profile show {out}"), as_json)


def profiling_job(spec: JobSpec) -> JobSpec:
    """The job that measures what `spec` would train, under a name beside its own."""
    name = f"{str(spec['name'])[: _LONGEST_NAME - len('-profile')]}-profile"
    return {**spec, "name": name, "profile_only": True}


def schema() -> None:
    """Print the JSON schema of profiles."""
    from varuna_planner.profile import Profile

    typer.echo(json.dumps(Profile.model_json_schema(by_alias=True), indent=2))


def _why_not(job: Job) -> str:
    error = (job["error"] or "").strip().splitlines()
    return f"job {job['name']} {job['state']}{': ' + error[-1] if error else ''} (varuna show {job['name']})"
