"""The `varuna` command. Each subcommand is a few calls of the client; errors end as one line and a non-zero exit."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.text import Text

from varuna_client import render
from varuna_client.access import audit, revoke, token_app
from varuna_client.control import Watch, cancel, drain, retry, stacks, tell
from varuna_client.errors import UserError, VarunaError
from varuna_client.follow import follow_events, follow_log, telling_rank
from varuna_client.jobfile import JobFileError, hand_in, job_schema, load_job
from varuna_client.options import AsJson, JobName, ManagerUrl, connect, emit, emit_line
from varuna_client.planning.estimates import calibrate, estimate
from varuna_client.planning.plans import plan
from varuna_client.planning.profile_run import run as run_profile
from varuna_client.planning.profile_run import schema as profile_schema
from varuna_client.planning.profiles import profile_app
from varuna_client.planning.simulate import simulate

app = typer.Typer(
    help="Train PyTorch models too large for one GPU on spot VMs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
LOG_TAIL_BYTES = 64 * 1024


def main() -> None:
    """The entry point: a VarunaError becomes one line on standard error and its exit code."""
    try:
        app(prog_name="varuna")
    except VarunaError as error:
        typer.echo(f"varuna: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


@app.callback()
def common(
    token_file: Annotated[
        str | None, typer.Option(envvar="VARUNA_TOKEN_FILE", help="Holds your token (or set VARUNA_TOKEN).")
    ] = None,
    ca: Annotated[
        str | None, typer.Option(envvar="VARUNA_CA", help="PEM file: who signed the manager's certificate.")
    ] = None,
) -> None:
    """Train PyTorch models too large for one GPU on spot VMs."""
    for name, value in (("VARUNA_TOKEN_FILE", token_file), ("VARUNA_CA", ca)):
        if value is not None:
            os.environ[name] = value  # read where a client is made


@app.command(context_settings=PASS_ON)
def manager(context: typer.Context) -> None:
    """Run the manager (its own options: varuna manager --help)."""
    _become("varuna_manager.main", context.args)


@app.command(context_settings=PASS_ON)
def agent(context: typer.Context) -> None:
    """Run the agent of a VM (its own options: varuna agent --help)."""
    _become("varuna_agent.main", context.args)


@app.command(context_settings=PASS_ON)
def export(context: typer.Context) -> None:
    """Write a checkpoint's model as one safetensors file (its own options: varuna export --help)."""
    # A process of its own: the client starts fast and runs on machines that have no PyTorch.
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("obstore") is None:
        raise UserError("varuna export reads checkpoints, which needs the runtime: pip install 'varuna-spot[runtime]'")
    _become("varuna.checkpoint.export", context.args)


@app.command()
def submit(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job to run.")],
    watch: Watch = False,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Hand in a job."""
    with connect(manager_url) as client:
        job = hand_in(client, load_job(job_file))
        text = Text(f"job {job['name']} ({job['id']}) is {job['state']}: varuna show {job['name']}")
        tell(client, job, text, watch=watch, as_json=as_json)


@app.command()
def validate(
    job_file: Annotated[Path | None, typer.Argument(metavar="JOB.yaml", help="The job file.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of job files, for editors.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check a job file, without a manager; say what is wrong and in which line."""
    if schema:
        emit(job_schema(), Text(), True)
        return
    if job_file is None:
        raise UserError("varuna validate: name a job file, or give --schema")
    try:
        spec = load_job(job_file).spec
    except JobFileError as error:
        found = [{"line": problem.line, "where": problem.where, "text": problem.text} for problem in error.problems]
        lines = [f"{job_file}:{problem.line}: {problem}" for problem in error.problems]
        emit({"valid": False, "problems": found}, Text("\n".join(lines)), as_json)
        raise typer.Exit(1) from None
    emit({"valid": True, "problems": []}, Text(f"{job_file}: job {spec['name']} is fine"), as_json)


@app.command("ps")
def list_jobs(manager_url: ManagerUrl = None, as_json: AsJson = False) -> None:
    """List the jobs."""
    with connect(manager_url) as client:
        jobs = client.jobs()
    emit(jobs, render.jobs_table(jobs) if jobs else Text("no jobs yet: varuna submit JOB.yaml"), as_json)


@app.command()
def show(job: JobName, manager_url: ManagerUrl = None, as_json: AsJson = False) -> None:
    """Show a job: state, plan, generations with their reasons, loss, the traceback if it failed."""
    with connect(manager_url) as client:
        found = client.job(job)
        generations = client.generations(found["id"])
        metrics = client.metrics(found["id"])
        events = client.events(found["id"])
        checkpoints = client.checkpoints(found["id"])
    document = {**found, "generations": generations, "metrics": metrics, "events": events, "checkpoints": checkpoints}
    emit(document, render.job_page(found, generations, metrics, events), as_json)


@app.command()
def logs(
    job: JobName,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job ends.")] = False,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Which worker; if not given, the one whose script failed, else 0.")
    ] = None,
    generation: Annotated[int | None, typer.Option(min=1, help="Which generation; the newest if not given.")] = None,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Print what a worker wrote."""
    with connect(manager_url) as client:
        found = client.job(job)
        if follow:
            for chunk in follow_log(client, found["id"], rank, generation):
                _write_log(chunk, as_json)
            return
        if rank is None:
            rank = telling_rank(client.generations(found["id"]), generation)
        _write_log(client.logs(found["id"], generation=generation, rank=rank, offset=-LOG_TAIL_BYTES), as_json)


@app.command()
def events(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Only this job's.")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as they come.")] = False,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """List what happened and what was decided, with the reasons."""
    with connect(manager_url) as client:
        job_id = client.job(job)["id"] if job else None
        for event in follow_events(client, job_id) if follow else client.events(job_id):
            emit_line(event, render.event_line(event), as_json)


@app.command()
def vms(
    gone: Annotated[bool, typer.Option("--all", help="Also those that are gone.")] = False,
    manager_url: ManagerUrl = None,
    as_json: AsJson = False,
) -> None:
    """List the fleet's VMs."""
    with connect(manager_url) as client:
        fleet = client.vms(gone=gone)
    emit(fleet, render.vms_table(fleet) if fleet else Text("no VMs: start the manager with --vms N"), as_json)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("demo-report.json"),
    folder: Annotated[Path, typer.Option("--dir", help="Where the manager and the VMs keep their files.")] = Path(
        "demo-out"
    ),
    steps: Annotated[int | None, typer.Option(min=30, help="Training steps (120; short: 60).")] = None,
    short: Annotated[bool, typer.Option("--short", help="Fewer steps between the disturbances.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a GPT on four local spot VMs; lose one, gain one, drain one; check every loss against plain PyTorch."""
    from varuna_client.demo.run import run_demo  # the other commands start faster without it

    if not run_demo(out=out, folder=folder, steps=steps, short=short, as_json=as_json):
        raise typer.Exit(1)


app.add_typer(token_app, name="token")
app.command()(audit)
app.command()(revoke)
app.command()(cancel)
app.command()(retry)
app.command()(drain)
app.command()(stacks)
app.command()(plan)
profile_app.command("run")(run_profile)
profile_app.command("schema")(profile_schema)
app.add_typer(profile_app, name="profile")
app.command()(estimate)
app.command()(calibrate)
app.command()(simulate)


def _become(module: str, arguments: list[str]) -> NoReturn:
    """This process goes on as a module of ours, with our interpreter's programs first on the path.

    So a job's `python` is the one in which Varuna is installed, without activating anything.
    """
    programs = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = path if path.split(os.pathsep)[0] == programs else programs + os.pathsep + path
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def _write_log(chunk: bytes, as_json: bool) -> None:
    text = chunk.decode(errors="replace")
    if as_json:
        emit_line({"log": text}, text, as_json)
    else:
        sys.stdout.write(text)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
