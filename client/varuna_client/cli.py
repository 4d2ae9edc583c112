"""The `varuna` command. Each subcommand makes a few calls of the client. An error is one line and a non-zero exit."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.text import Text

from varuna_client.commands.access import audit, revoke, token_app
from varuna_client.commands.actions import cancel, cordon, delete, drain, retry, stacks, submit, uncordon, watch_job
from varuna_client.commands.backups import backup, restore
from varuna_client.commands.inspection import INSPECT_SETTINGS, inspect
from varuna_client.commands.options import AsJson, print_document, print_error
from varuna_client.commands.reading import events, list_jobs, logs, metrics, show, vms
from varuna_client.commands.setup_commands import PROGRAM, completion, config, prepare_completion
from varuna_client.commands.top import top
from varuna_client.errors import UserError, VarunaError
from varuna_client.jobfile.jobfile import JobFileError, load_job
from varuna_client.jobfile.schema import job_schema
from varuna_client.planning.estimates import calibrate, estimate
from varuna_client.planning.plans import plan
from varuna_client.planning.profile_run import run as run_profile
from varuna_client.planning.profile_run import schema as profile_schema
from varuna_client.planning.profiles import profile_app
from varuna_client.planning.simulate import simulate
from varuna_proto.environment import PROGRAM_VARIABLE

app = typer.Typer(
    help="Train PyTorch models too large for one GPU on spot VMs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
INTERRUPTED = 130


def main() -> None:
    """The entry point: a VarunaError becomes one line on standard error and its exit code."""
    prepare_completion()
    try:
        app(prog_name=PROGRAM)
    except VarunaError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"{PROGRAM} {importlib.metadata.version('varuna-spot')}")
        raise typer.Exit


@app.callback()
def common(
    token_file: Annotated[
        str | None, typer.Option(help="File with your token (or set VARUNA_TOKEN_FILE, or VARUNA_TOKEN itself).")
    ] = None,
    ca: Annotated[
        str | None,
        typer.Option(help="PEM file with the authority of the manager's certificate (or set VARUNA_CA)."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Train PyTorch models too large for one GPU on spot VMs."""
    for name, value in (("VARUNA_TOKEN_FILE", token_file), ("VARUNA_CA", ca)):
        if value is not None:
            os.environ[name] = value  # `find_config` reads it when a client is made


@app.command(context_settings=PASS_ON)
def manager(context: typer.Context) -> None:
    """Run the manager (its own options: varuna manager --help)."""
    _become("varuna_manager.main", context.args)


@app.command(context_settings=PASS_ON)
def agent(context: typer.Context) -> None:
    """Run the agent of a VM (its own options: varuna agent --help)."""
    os.environ[PROGRAM_VARIABLE] = str(Path(sys.argv[0]).absolute())
    _become("varuna_agent.main", context.args)


@app.command(context_settings=PASS_ON)
def export(context: typer.Context) -> None:
    """Write a checkpoint's model as one safetensors file (its own options: varuna export --help)."""
    # In its own process: the client starts fast and runs on machines without PyTorch.
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("obstore") is None:
        raise UserError("varuna export reads checkpoints, which needs the runtime: pip install 'varuna-spot[runtime]'")
    _become("varuna.checkpoint.export", context.args)


@app.command()
def validate(
    job_file: Annotated[Path | None, typer.Argument(metavar="JOB.yaml", help="The job file.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of job files, for editors.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check a job file without a manager; list each error with its line."""
    if schema:
        print_document(job_schema(), Text(), True)
        return
    if job_file is None:
        raise UserError("varuna validate: name a job file, or give --schema")
    try:
        spec = load_job(job_file).spec
    except JobFileError as error:
        found = [{"line": problem.line, "where": problem.where, "text": problem.text} for problem in error.problems]
        lines = [f"{job_file}:{problem.line}: {problem}" for problem in error.problems]
        print_document({"valid": False, "problems": found}, Text("\n".join(lines)), as_json)
        raise typer.Exit(1) from None
    print_document({"valid": True, "problems": []}, Text(f"{job_file}: job {spec['name']} is fine"), as_json)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="File for the report.")] = Path("demo-report.json"),
    folder: Annotated[Path, typer.Option("--dir", help="Folder for the files of the manager and the VMs.")] = Path(
        "demo-out"
    ),
    steps: Annotated[int | None, typer.Option(min=30, help="Training steps (160; short: 120).")] = None,
    short: Annotated[bool, typer.Option("--short", help="Make fewer steps between the disturbances.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a GPT on four local spot VMs; lose one, gain one, preempt one; check every loss against plain PyTorch."""
    from varuna_client.demo.director import run_demo  # the other commands start faster without it

    if not run_demo(out=out, folder=folder, steps=steps, short=short, as_json=as_json):
        raise typer.Exit(1)


app.command()(submit)
app.command("watch")(watch_job)
app.command("ps")(list_jobs)
app.command()(show)
app.command()(logs)
app.command()(events)
app.command()(metrics)
app.command()(vms)
app.command()(top)
app.command()(cancel)
app.command()(retry)
app.command()(delete)
app.command()(drain)
app.command()(cordon)
app.command()(uncordon)
app.command()(stacks)
app.add_typer(token_app, name="token")
app.command()(audit)
app.command()(revoke)
app.command()(plan)
profile_app.command("run")(run_profile)
profile_app.command("schema")(profile_schema)
app.add_typer(profile_app, name="profile")
app.command()(estimate)
app.command()(calibrate)
app.command()(simulate)
app.command(context_settings=INSPECT_SETTINGS)(inspect)
app.command()(backup)
app.command()(restore)
app.command()(config)
app.command()(completion)


def _become(module: str, arguments: list[str]) -> NoReturn:
    """Replace this process by a Varuna module, with this interpreter's folder first on the path.

    So a job's `python` is the one in which Varuna is installed, even if no environment is activated.
    """
    programs = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = path if path.split(os.pathsep)[0] == programs else programs + os.pathsep + path
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


if __name__ == "__main__":
    main()
