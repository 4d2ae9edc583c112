"""Starts the ranks of one generation on this machine, and ends them together.

    python -m varuna.launcher --nstages 2 --batch_size 8 --chunk_size 2 --ngpus_per_server 4 train.py ...

Run it on each of `--nservers` machines with its `--node_rank`, or let `varuna.run_varuna` do that. The script is given
`--rank --local_rank --stage_to_rank_map --chunk_size --batch-size` before its own arguments (unless `--no_arguments`),
and the same as environment variables. The exit code is 0, or that of the first rank that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from varuna.launching.children import ChildExit, ChildProcesses, StopRequest, make_parent_death_hook
from varuna.launching.layout import LaunchError, RankLayout, make_script_arguments
from varuna.launching.lines import LineRelay, make_stream_writer
from varuna_proto.environment import WorkerEnvironment
from varuna_proto.held_port import hold_port

__all__ = ["PORT_ANNOUNCEMENT", "add_plan_flags", "main", "run"]

PORT_ANNOUNCEMENT = "varuna-rendezvous-port "
"""With `--master_port 0`, the first line on the first machine's standard output is this and the port."""

DEFAULT_PORT = 29500
_GRACE_S = 5.0
_LAST_LINES_S = 1.0
"""How long the last lines of a rank that has ended may take to get here."""
_ORPHANED = 143
_SECRET_BYTES = 32


def add_plan_flags(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """The flags that `varuna.launcher` and `varuna.run_varuna` share."""
    parser.add_argument("--nstages", type=int, required=required, metavar="P", help="pipeline stages")
    parser.add_argument("--batch_size", type=int, required=required, metavar="B", help="examples in the global batch")
    parser.add_argument("--chunk_size", type=int, required=required, metavar="m", help="examples in a micro-batch")
    parser.add_argument("--gpus_per_stage", type=int, default=0, metavar="D", help="replicas (default: as many as fit)")
    parser.add_argument("--code_dir", type=Path, help="folder to run the script in (default: the current one)")
    parser.add_argument(
        "--checkpoint_url", default="", help="where automatic checkpoints go (default: $VARUNA_CHECKPOINT_URL, or none)"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda where there is a GPU"
    )
    parser.add_argument(
        "--no_arguments", action="store_true", help="do not pass --rank, --stage_to_rank_map, ... to the script"
    )
    parser.add_argument("--job_id", default="run", help="name of the run, the same on all machines")
    parser.add_argument(
        "--generation",
        type=int,
        default=1,
        help="number of this run in its checkpoint store",
    )
    parser.add_argument("--resume_step", type=int, help="the step to resume from, for the script")
    script = "the script, followed by its own arguments"
    parser.add_argument("training_script", nargs=None if required else "?", help=script)
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, metavar="...")


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m varuna.launcher", description="Start the ranks of one generation on this machine."
    )
    parser.add_argument("--ngpus_per_server", type=int, default=4, help="ranks per machine (default 4)")
    parser.add_argument("--nservers", type=int, default=1, help="number of machines (default 1)")
    parser.add_argument("--node_rank", type=int, default=0, help="number of this machine, from 0")
    parser.add_argument("--master_addr", default="127.0.0.1", help="address of machine 0")
    parser.add_argument(
        "--master_port",
        type=int,
        default=DEFAULT_PORT,
        help=f"port there (default {DEFAULT_PORT}; 0: any that is free)",
    )
    parser.add_argument(
        "--follow_stdin",
        action="store_true",
        help="take environment variables as a JSON line from standard input, and end when it closes",
    )
    add_plan_flags(parser, required=True)
    flags = parser.parse_args(arguments)
    try:
        return run(flags)
    except LaunchError as error:
        sys.stderr.write(f"varuna.launcher: {error}\n")
        return 1


def run(flags: argparse.Namespace) -> int:
    """Starts this machine's ranks and waits for their end. Raises LaunchError when they cannot be started."""
    layout = RankLayout(
        machines=flags.nservers,
        gpus_per_node=flags.ngpus_per_server,
        p=flags.nstages,
        global_batch=flags.batch_size,
        micro_batch=flags.chunk_size,
        replicas=flags.gpus_per_stage,
    )
    if not 0 <= flags.node_rank < flags.nservers:
        raise LaunchError(f"node_rank {flags.node_rank}: with {flags.nservers} servers it is 0 to {flags.nservers - 1}")
    code_dir = (flags.code_dir or Path.cwd()).absolute()
    if not (code_dir / flags.training_script).is_file():
        raise LaunchError(f"no script {code_dir / flags.training_script}: give its path, or --code_dir")
    extra = _read_environment_from_stdin() if flags.follow_stdin else {}
    children = ChildProcesses(grace_s=_GRACE_S)
    children.stop_on_signals()
    held = _hold_port(flags.master_addr, flags.master_port) if 0 in layout.list_ranks(flags.node_rank) else None
    with held or nullcontext():
        port = held.getsockname()[1] if held else flags.master_port
        ranks = _start_ranks(children, flags, layout, port=port, code_dir=code_dir, environ={**os.environ, **extra})
        if flags.master_port == 0 and held is not None:
            sys.stdout.write(f"{PORT_ANNOUNCEMENT}{port}\n")
            sys.stdout.flush()
        children.watch_exits()
        relay, out, err = LineRelay(), make_stream_writer(sys.stdout), make_stream_writer(sys.stderr)
        for rank in ranks:
            relay.relay_process(rank, out, err)
        if flags.follow_stdin:
            threading.Thread(target=_watch_stdin, args=(children,), name="stdin", daemon=True).start()
        outcome = children.wait()
        relay.wait_for_end(_LAST_LINES_S)
    return _report_outcome(outcome)


def _start_ranks(
    children: ChildProcesses,
    flags: argparse.Namespace,
    layout: RankLayout,
    *,
    port: int,
    code_dir: Path,
    environ: Mapping[str, str],
) -> list[subprocess.Popen[bytes]]:
    started = []
    secret = environ.get("VARUNA_SECRET") or (secrets.token_hex(_SECRET_BYTES) if flags.nservers == 1 else "")
    for rank in layout.list_ranks(flags.node_rank):
        environment = layout.make_environment(
            rank,
            job_id=flags.job_id,
            generation=flags.generation,
            host=flags.master_addr,
            port=port,
            checkpoint_url=flags.checkpoint_url or environ.get("VARUNA_CHECKPOINT_URL", ""),
            device=_choose_device(flags.device, environ),
        )
        environment = replace(environment, secret=secret)
        passed = [] if flags.no_arguments else make_script_arguments(environment, flags.resume_step)
        command = [sys.executable, "-u", flags.training_script, *passed, *flags.training_script_args]
        contract = environment.to_environ()
        if flags.resume_step is not None:
            contract["VARUNA_RESUME_STEP"] = str(flags.resume_step)
        try:
            process = children.start_child(
                f"rank {rank}",
                command,
                cwd=code_dir,
                env=_make_worker_environ(environ, contract, environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=make_parent_death_hook(),
            )
            started.append(process)
        except OSError as error:
            children.end_all()
            raise LaunchError(f"cannot start rank {rank}: {error}") from error
    return started


def _hold_port(host: str, port: int) -> socket.socket:
    """A bound socket that keeps rank 0's port from other processes while the script may still listen there."""
    try:
        return hold_port(host, port)
    except socket.gaierror as error:
        raise LaunchError(f"master_addr {host!r}: {error.strerror or error}") from error
    except OSError as error:
        raise LaunchError(
            f"cannot use {host}:{port} for the ranks to meet: {error.strerror or error}; give this machine's own "
            "address with --master_addr and a free port with --master_port"
        ) from error


def _choose_device(requested: str, environ: Mapping[str, str]) -> str:
    if requested != "auto":
        return requested
    hidden = environ.get("CUDA_VISIBLE_DEVICES") == ""
    return "cuda" if Path("/dev/nvidia0").exists() and not hidden else "cpu"


def _make_worker_environ(
    environ: Mapping[str, str], contract: Mapping[str, str], environment: WorkerEnvironment
) -> dict[str, str]:
    worker = {name: value for name, value in environ.items() if not name.startswith("VARUNA_")}
    worker["PYTHONUNBUFFERED"] = "1"
    if environment.device == "cpu":
        worker.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores
    return {**worker, **contract}


def _read_environment_from_stdin() -> dict[str, str]:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)  # unbuffered: the thread that waits for the end reads the rest
        if not byte:
            raise LaunchError("--follow_stdin: standard input closed before a JSON line of environment variables")
        line += byte
    extra: dict[str, str] = json.loads(line)
    return extra


def _watch_stdin(children: ChildProcesses) -> None:
    while os.read(0, 4096):
        continue
    children.events.put(StopRequest(_ORPHANED, "the process that started this launcher closed its standard input"))


def _report_outcome(outcome: ChildExit | StopRequest | None) -> int:
    if outcome is None:
        return 0
    if isinstance(outcome, StopRequest):
        sys.stderr.write(f"varuna.launcher: stopped all ranks of this machine: {outcome.reason}\n")
    else:
        sys.stderr.write(f"varuna.launcher: {outcome.name} failed with exit code {outcome.code}; stopped all others\n")
    return outcome.code
