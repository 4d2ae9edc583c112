"""Starts a training script on the machines of a list, or submits it to a manager, which morphs it as they change.

    python -m varuna.run_varuna --machine_list machines.txt --gpus_per_node 4 --nstages 4 --batch_size 512 \\
        --chunk_size 8 --no_morphing train.py --data /data

On each machine a `varuna.launcher` starts the ranks: here as a child process, elsewhere through ssh. When one rank
fails, all ranks are stopped, and this command ends with that rank's exit code. Ctrl-C stops them, too. Each launcher's
standard input is a pipe from here, so that no rank outlives this process, even when it is killed.

With `--manager_ip` and without `--no_morphing` the script becomes a job of that manager: its machines, its shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from varuna.launching.children import ChildExit, ChildProcesses, PortAnnouncement, StopRequest
from varuna.launching.last_run import load_last_run, record_run
from varuna.launching.launcher import PORT_ANNOUNCEMENT, add_plan_flags
from varuna.launching.layout import LaunchError, RankLayout, make_script_arguments
from varuna.launching.lines import ByteWriter, LineRelay, make_stream_writer
from varuna.launching.machines import is_this_machine, make_launcher_command, read_env_file, read_machine_list
from varuna.launching.submit import make_job_document, parse_manager_address, submit_job

__all__ = ["main"]

_GRACE_S = 12.0
"""More than a launcher gives its ranks."""
_LAST_LINES_S = 1.0
"""How long the last lines of a machine may take to get here once it has ended."""
_SSH_FAILED = 255


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        if given.resume:
            given = _merge_last_flags(parser, given, arguments)
        return run(given)
    except LaunchError as error:
        sys.stderr.write(f"run_varuna: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m varuna.run_varuna",
        description="Train a script on several machines, in pipeline and data parallel.",
    )
    parser.add_argument(
        "--machine_list",
        type=Path,
        default=Path("available_machines.out"),
        help="file with one address per line, reachable by ssh (default: available_machines.out)",
    )
    parser.add_argument("--gpus_per_node", type=int, default=4, help="ranks per machine (default 4)")
    parser.add_argument("--manager_ip", metavar="HOST[:PORT]", help="submit the script as a job to this Varuna manager")
    parser.add_argument("--no_morphing", action="store_true", help="run the script from here, without a manager")
    parser.add_argument("--env_file", type=Path, help="file of NAME=value lines, more environment for the ranks")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="resume from the newest complete checkpoint; flags that are left out are the last run's",
    )
    parser.add_argument("--python", default=sys.executable, help="the interpreter on every machine (default: this one)")
    add_plan_flags(parser, required=False)
    return parser


def _merge_last_flags(
    parser: argparse.ArgumentParser, given: argparse.Namespace, arguments: list[str] | None
) -> argparse.Namespace:
    """The given flags, completed by those of the last run in this code folder."""
    kept = load_last_run(given, _code_dir(given))
    script_arguments_kept = kept.pop("training_script_args", [])
    parser.set_defaults(**kept)
    merged = parser.parse_args(arguments)
    if given.training_script is None:
        merged.training_script_args = script_arguments_kept
    return merged


def _code_dir(given: argparse.Namespace) -> Path:
    code_dir: Path = (given.code_dir or Path.cwd()).absolute()
    return code_dir


def run(given: argparse.Namespace) -> int:
    """Submits or starts the script. Raises LaunchError when that fails."""
    env = read_env_file(given.env_file) if given.env_file else {}
    code_dir = _code_dir(given)
    url = _absolute(
        given.checkpoint_url or env.get("VARUNA_CHECKPOINT_URL") or os.environ.get("VARUNA_CHECKPOINT_URL"), code_dir
    )
    if given.training_script is None:
        no_run = " and no run to resume in this folder" if given.resume else ""
        raise LaunchError(f"no script{no_run}: give its path, after all flags and before its own arguments")
    if given.batch_size is None:
        raise LaunchError("--batch_size is missing: how many examples make a global batch?")
    if given.resume and not url:
        raise LaunchError(
            "--resume needs a checkpoint store: give --checkpoint_url, or VARUNA_CHECKPOINT_URL in --env_file"
        )
    if given.manager_ip and not given.no_morphing:
        document = make_job_document(
            script=given.training_script,
            arguments=given.training_script_args,
            workdir=code_dir,
            global_batch=given.batch_size,
            p=given.nstages,
            micro_batch=given.chunk_size,
            checkpoint_url=url,
            env=env,
            pass_arguments=not given.no_arguments,
        )
        submit_job(parse_manager_address(given.manager_ip), document)
        record_run(given, code_dir, url)
        return 0
    for flag, value in (("nstages", given.nstages), ("chunk_size", given.chunk_size)):
        if value is None:
            raise LaunchError(f"--{flag} is missing: only a manager (--manager_ip) can choose it")
    return _run_here(given, env, code_dir, url)


def _run_here(given: argparse.Namespace, env: dict[str, str], code_dir: Path, url: str) -> int:
    machines = read_machine_list(given.machine_list)
    layout = RankLayout(
        machines=len(machines),
        gpus_per_node=given.gpus_per_node,
        p=given.nstages,
        global_batch=given.batch_size,
        micro_batch=given.chunk_size,
        replicas=given.gpus_per_stage,
    )
    generation, resume_step = _inspect_store(url, given)
    if not given.no_arguments:
        probe = layout.make_environment(0, job_id="", generation=1, host="", port=0, checkpoint_url="", device="cpu")
        make_script_arguments(probe, resume_step)  # refuses sizes that the arguments cannot express
    record_run(given, code_dir, url)
    sys.stderr.write(
        f"run_varuna: P={layout.p} stages x D={layout.d} replicas on {layout.machines_used} of {len(machines)} "
        "machines; this run does not morph\n"
    )
    flags = [
        *("--ngpus_per_server", str(layout.gpus_per_node), "--nservers", str(len(machines))),
        *("--master_addr", machines[0].rpartition("@")[2], "--follow_stdin"),
        *("--nstages", str(layout.p), "--gpus_per_stage", str(layout.d)),
        *("--batch_size", str(layout.global_batch), "--chunk_size", str(layout.micro_batch)),
        *("--code_dir", str(code_dir), "--device", given.device),
        *("--job_id", f"run-{uuid.uuid4().hex[:8]}", "--generation", str(generation)),
        *(("--checkpoint_url", url) if url else ()),
        *(("--resume_step", str(resume_step)) if resume_step is not None else ()),
        *(("--no_arguments",) if given.no_arguments else ()),
    ]
    # It goes through standard input, where no other user of the machines sees it.
    env = {"VARUNA_SECRET": secrets.token_hex(32), **env}
    nodes = _Launchers(machines, given.python, flags, [given.training_script, *given.training_script_args], env)
    return nodes.run(layout.machines_used)


def _absolute(url: str | None, code_dir: Path) -> str:
    """`url` with a relative path made absolute, so that the launcher and all ranks mean the same folder."""
    if not url:
        return ""
    return url if "://" in url else str(code_dir / url)


def _inspect_store(url: str, given: argparse.Namespace) -> tuple[int, int | None]:
    """This run's generation, above all that wrote to the store, and the step to resume from."""
    if not url:
        return given.generation, given.resume_step
    from varuna.checkpoint import (  # takes a second to import
        CheckpointError,
        last_written_generation,
        newest_complete,
    )

    def report_skipped(step: int, fault: str) -> None:
        sys.stderr.write(f"run_varuna: skipped a checkpoint: {fault}\n")

    try:
        step = given.resume_step
        if given.resume and step is None:
            step = newest_complete(url, report=report_skipped)
        return max(given.generation, last_written_generation(url) + 1), step
    except (CheckpointError, ValueError) as error:
        raise LaunchError(str(error)) from error


@dataclass
class _Launchers:
    """The launchers of all machines."""

    machines: list[str]
    python: str
    flags: list[str]
    script: list[str]
    env: dict[str, str]

    def run(self, used: int) -> int:
        """Starts machine 0's launcher, which chooses the port, then the others, and waits for their end."""
        children = ChildProcesses(grace_s=_GRACE_S, request_end=_close_stdin)
        children.stop_on_signals()
        children.watch_exits()
        relay, out, err = LineRelay(), make_stream_writer(sys.stdout), make_stream_writer(sys.stderr)
        relay.relay_process(self._start_launcher(children, 0, 0), _filter_port(out, children), err)
        outcome = children.receive_event()  # the port, or a failure before it is known
        if not isinstance(outcome, PortAnnouncement):
            children.end_all()
            relay.wait_for_end(_LAST_LINES_S)
            return self._report_outcome(outcome)
        for node in range(1, used):
            relay.relay_process(self._start_launcher(children, node, outcome.port), out, err)
        ended = children.wait()
        relay.wait_for_end(_LAST_LINES_S)
        return self._report_outcome(ended)

    def _start_launcher(self, children: ChildProcesses, node: int, port: int) -> subprocess.Popen[bytes]:
        machine = self.machines[node]
        flags = [*self.flags, "--node_rank", str(node), "--master_port", str(port), *self.script]
        try:
            process = children.start_child(
                self._machine_name(node),
                make_launcher_command(machine, self.python, flags),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            children.end_all()
            raise LaunchError(f"cannot start a launcher for {machine}: {error}") from error
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # the launcher has ended, and an event reports that
            process.stdin.write(json.dumps(self.env).encode() + b"\n")
            process.stdin.flush()
        return process

    def _machine_name(self, node: int) -> str:
        return f"machine {node} ({self.machines[node]})"

    def _report_outcome(self, outcome: ChildExit | StopRequest | None) -> int:
        if outcome is None:
            return 0
        if isinstance(outcome, StopRequest):
            sys.stderr.write(f"run_varuna: stopped all ranks: {outcome.reason}\n")
            return outcome.code
        node = next(n for n in range(len(self.machines)) if self._machine_name(n) == outcome.name)
        through_ssh = outcome.code == _SSH_FAILED and not is_this_machine(self.machines[node])
        why = f"ssh to it failed: try 'ssh {self.machines[node]} true'" if through_ssh else "its output above says why"
        sys.stderr.write(f"run_varuna: {outcome.name} ended with exit code {outcome.code}; {why}\n")
        return outcome.code


def _close_stdin(process: subprocess.Popen[bytes]) -> None:
    """Ends a launcher, also through ssh: it exits when its standard input closes."""
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()


def _filter_port(write: ByteWriter, children: ChildProcesses) -> ByteWriter:
    """Passes on machine 0's output except the line with the port, which becomes an event."""
    announced = False

    def write_rest(piece: bytes) -> None:
        nonlocal announced
        for line in [piece] if announced else piece.splitlines(keepends=True):
            if not announced and line.startswith(PORT_ANNOUNCEMENT.encode()):
                announced = True
                children.events.put(PortAnnouncement(int(line[len(PORT_ANNOUNCEMENT) :])))
            else:
                write(line)

    return write_rest
