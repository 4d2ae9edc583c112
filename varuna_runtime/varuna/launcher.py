"""Starts the ranks of one generation on this machine, and ends them together.

    python -m varuna.launcher --nstages 2 --batch_size 8 --chunk_size 2 --ngpus_per_server 4 train.py ...

Run it on each of `--nservers` machines with its `--node_rank`, or let `varuna.run_varuna` do that. The script is given
`--rank --local_rank --stage_to_rank_map --chunk_size --batch-size` before its own arguments (unless `--no_arguments`),
and the same as environment variables. Ends with 0, or as the first rank that failed.
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
from dataclasses import replace
from pathlib import Path

from varuna.launching.children import Children, Ended, Stop, dies_with_parent
from varuna.launching.layout import LaunchError, Layout, script_arguments
from varuna.launching.lines import Relay, to_stream
from varuna_proto.environment import WorkerEnvironment
from varuna_proto.held_port import hold_port

__all__ = ["ANNOUNCEMENT", "add_plan_flags", "main", "run"]

ANNOUNCEMENT = "varuna-rendezvous-port "
"""With `--master_port 0`, this and the port that was found is the first line on the first machine's standard output."""

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
    parser.add_argument("--code_dir", type=Path, help="folder to run the script in (default: this one)")
    parser.add_argument(
        "--checkpoint_url", default="", help="where automatic checkpoints go (default: $VARUNA_CHECKPOINT_URL, or none)"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda where there is a GPU"
    )
    parser.add_argument(
        "--no_arguments", action="store_true", help="the script takes no --rank, --stage_to_rank_map, ...: pass none"
    )
    parser.add_argument("--job_id", default="run", help="a name that all machines of the run give")
    parser.add_argument("--generation", type=int, default=1, help="counts the runs that share a checkpoint store")
    parser.add_argument("--resume_step", type=int, help="passed on to the script")
    script = "the script, followed by its own arguments"
    parser.add_argument("training_script", nargs=None if required else "?", help=script)
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, metavar="...")


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m varuna.launcher", description="Start the ranks of one generation on this machine."
    )
    parser.add_argument("--ngpus_per_server", type=int, default=4, help="ranks per machine (default 4)")
    parser.add_argument("--nservers", type=int, default=1, help="machines")
    parser.add_argument("--node_rank", type=int, default=0, help="which of them this is")
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
    given = parser.parse_args(arguments)
    try:
        return run(given)
    except LaunchError as error:
        sys.stderr.write(f"varuna.launcher: {error}\n")
        return 1


def run(given: argparse.Namespace) -> int:
    """Starts what the parsed flags say and waits for its end. Raises LaunchError when it cannot be started."""
    layout = Layout(
        machines=given.nservers,
        gpus_per_node=given.ngpus_per_server,
        p=given.nstages,
        global_batch=given.batch_size,
        micro_batch=given.chunk_size,
        replicas=given.gpus_per_stage,
    )
    if not 0 <= given.node_rank < given.nservers:
        raise LaunchError(f"node_rank {given.node_rank}: with {given.nservers} servers it is 0 to {given.nservers - 1}")
    code_dir = (given.code_dir or Path.cwd()).absolute()
    if not (code_dir / given.training_script).is_file():
        raise LaunchError(f"no script {code_dir / given.training_script}: give its path, or --code_dir")
    extra = _environment_from_stdin() if given.follow_stdin else {}
    children = Children(grace_s=_GRACE_S)
    children.stop_on_signals()
    ranks = _start_ranks(children, given, layout, code_dir, {**os.environ, **extra})
    children.watch()
    relay, out, err = Relay(), to_stream(sys.stdout), to_stream(sys.stderr)
    for rank in ranks:
        relay.follow(rank, out, err)
    if given.follow_stdin:
        threading.Thread(target=_watch_stdin, args=(children,), name="stdin", daemon=True).start()
    outcome = children.wait()
    relay.join(_LAST_LINES_S)
    return _told(outcome)


def _start_ranks(
    children: Children, given: argparse.Namespace, layout: Layout, code_dir: Path, environ: Mapping[str, str]
) -> list[subprocess.Popen[bytes]]:
    started = []
    ranks = layout.ranks(given.node_rank)
    listening = _listen(given.master_addr, given.master_port) if 0 in ranks else None
    port = listening.getsockname()[1] if listening else given.master_port
    secret = environ.get("VARUNA_SECRET") or (secrets.token_hex(_SECRET_BYTES) if given.nservers == 1 else "")
    try:
        for rank in ranks:
            environment = layout.environment(
                rank,
                job_id=given.job_id,
                generation=given.generation,
                host=given.master_addr,
                port=port,
                checkpoint_url=given.checkpoint_url or environ.get("VARUNA_CHECKPOINT_URL", ""),
                device=_device(given.device, environ),
            )
            environment = replace(environment, secret=secret)
            passed = [] if given.no_arguments else script_arguments(environment, given.resume_step)
            command = [sys.executable, "-u", given.training_script, *passed, *given.training_script_args]
            contract = environment.to_environ()
            if given.resume_step is not None:
                contract["VARUNA_RESUME_STEP"] = str(given.resume_step)
            files: tuple[int, ...] = ()
            if rank == 0 and listening is not None:
                files = (listening.fileno(),)
                contract["VARUNA_RENDEZVOUS_FD"] = str(listening.fileno())
            try:
                process = children.start(
                    f"rank {rank}",
                    command,
                    cwd=code_dir,
                    env=_worker_environ(environ, contract, environment),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=files,
                    preexec_fn=dies_with_parent(),
                )
                started.append(process)
            except OSError as error:
                children.end()
                raise LaunchError(f"cannot start rank {rank}: {error}") from error
    finally:
        if listening is not None:
            listening.close()  # rank 0 has it now
    if given.master_port == 0 and listening is not None:
        sys.stdout.write(f"{ANNOUNCEMENT}{port}\n")
        sys.stdout.flush()
    return started


def _listen(host: str, port: int) -> socket.socket:
    """A socket bound for rank 0: until the script's own init_process_group listens there, nobody can take the port."""
    try:
        return hold_port(host, port)
    except socket.gaierror as error:
        raise LaunchError(f"master_addr {host!r}: {error.strerror or error}") from error
    except OSError as error:
        raise LaunchError(
            f"cannot use {host}:{port} for the ranks to meet: {error.strerror or error}; give this machine's own "
            "address with --master_addr and a free port with --master_port"
        ) from error


def _device(asked: str, environ: Mapping[str, str]) -> str:
    if asked != "auto":
        return asked
    hidden = environ.get("CUDA_VISIBLE_DEVICES") == ""
    return "cuda" if Path("/dev/nvidia0").exists() and not hidden else "cpu"


def _worker_environ(
    environ: Mapping[str, str], contract: Mapping[str, str], environment: WorkerEnvironment
) -> dict[str, str]:
    worker = {name: value for name, value in environ.items() if not name.startswith("VARUNA_")}
    worker["PYTHONUNBUFFERED"] = "1"
    if environment.device == "cpu":
        worker.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores
    return {**worker, **contract}


def _environment_from_stdin() -> dict[str, str]:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)  # no buffer: what follows is for the thread that waits for the end
        if not byte:
            raise LaunchError("--follow_stdin: standard input closed before a JSON line of environment variables")
        line += byte
    extra: dict[str, str] = json.loads(line)
    return extra


def _watch_stdin(children: Children) -> None:
    while os.read(0, 4096):
        continue
    children.events.put(Stop(_ORPHANED, "whoever started this launcher has ended or wants it to end"))


def _told(outcome: Ended | Stop | None) -> int:
    if outcome is None:
        return 0
    if isinstance(outcome, Stop):
        sys.stderr.write(f"varuna.launcher: all ranks of this machine ended: {outcome.reason}\n")
    else:
        sys.stderr.write(f"varuna.launcher: {outcome.name} failed with exit code {outcome.code}; all others ended\n")
    return outcome.code


if __name__ == "__main__":
    sys.exit(main())
