"""`varuna inspect`: runs a training script up to its optimizer, and shows how Varuna would cut its model."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from varuna_client.commands.options import AsJson, print_document
from varuna_client.errors import UserError
from varuna_proto.environment import Mode, WorkerEnvironment

__all__ = ["INSPECT_SETTINGS", "inspect", "make_inspection_environment"]

INSPECT_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}


def inspect(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT.py", help="The training script.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's arguments.")] = None,
    measure: Annotated[bool, typer.Option("--time", help="Measure the sections' times on this machine.")] = False,
    profile: Annotated[
        Path | None, typer.Option(metavar="P.json", help="Take the sections' times from this profile.")
    ] = None,
    micro_batch: Annotated[int, typer.Option(min=1, metavar="M", help="Examples per micro-batch for the times.")] = 1,
    device: Annotated[str, typer.Option(help="Where to measure: cpu or cuda.")] = "cpu",
    launcher_arguments: Annotated[
        bool,
        typer.Option("--launcher-arguments", help="Pass --rank, --chunk_size, ... to the script."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show where a script's model would be cut, what crosses the cuts, and what prevents them; needs no manager or GPU.

    The script runs as usual until it calls set_optimizer, and ends there. Options go before its name.
    """
    if importlib.util.find_spec("torch") is None:
        raise UserError("varuna inspect runs the script, which needs the runtime: pip install 'varuna-spot[runtime]'")
    if not script.is_file():
        raise UserError(f"no script {script}")
    if script.suffix in (".yaml", ".yml"):
        raise UserError(f"{script} is a job file: give the script that its `run` starts, and its options")
    if measure and profile is not None:
        raise UserError("give either --time, which measures, or --profile, which is already measured")
    if profile is not None and not profile.is_file():
        raise UserError(f"no profile {profile}")
    times = "measure" if measure else str(profile.absolute()) if profile is not None else ""
    command = ["-u", *(["-m", "varuna.launching.script"] if launcher_arguments else []), str(script)]
    with tempfile.TemporaryDirectory(prefix="varuna-inspect-") as folder:
        report = Path(folder, "report.json")
        environment = make_inspection_environment(report, times, micro_batch, device)
        # The script's output is not a part of the report: it goes to standard error.
        ended = subprocess.run(
            [sys.executable, *command, *(arguments or [])],
            env={**os.environ, **environment.to_environ()},
            stdout=sys.stderr.fileno(),
            check=False,
        )
        if not report.is_file():
            raise UserError(_no_report(script, ended.returncode))
        document: dict[str, Any] = json.loads(report.read_text())
    text = document.pop("text")
    if "optimizer" not in document and "refused" not in document:
        text += f"\n{script} ended without set_optimizer (exit code {ended.returncode})"
    print_document(document, Text(text), as_json)
    if "refused" in document or ended.returncode != 0:
        raise typer.Exit(1)


def make_inspection_environment(report: Path, times: str, micro_batch: int, device: str) -> WorkerEnvironment:
    """That of a lone worker, which is to report."""
    alone = WorkerEnvironment.alone("inspect", micro_batch=micro_batch, global_batch=micro_batch, device=device)
    return replace(alone, mode=Mode.INSPECT, report_path=str(report), report_times=times)


def _no_report(script: Path, code: int) -> str:
    if code == 0:
        return f"{script} ended without making a Varuna(model, ...): nothing to show"
    return f"{script} failed (exit code {code}) before it had made its Varuna(model, ...)"
