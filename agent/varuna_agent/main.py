"""`python -m varuna_agent.main`: the agent of one VM."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import importlib.metadata
import logging
import os
import random
import signal
import sys
import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import structlog

from varuna_agent.errors import CopiesError, JoinError
from varuna_agent.identity.gpu_type import read_gpu_type
from varuna_agent.identity.own_address import AUTO, own_address
from varuna_agent.notices.metadata import make_metadata_source
from varuna_agent.notices.notices import FileNoticeSource, NoticeSource
from varuna_agent.notices.slurm import SlurmNotices
from varuna_agent.observability.observers import Observers
from varuna_agent.observability.rank_spans import RankSpans
from varuna_agent.runner import AgentMemory, AgentRunner
from varuna_agent.settings import NOTICE_SOURCES, AgentSettings
from varuna_agent.state import Identity
from varuna_agent.threads import open_thread_pool
from varuna_agent.workers.control_groups import JobGroups, NoGroupsError
from varuna_agent.workers.isolation import JobUser, hide_this_process, keep_private
from varuna_agent.workers.memory_files import MemoryFiles, choose_limit
from varuna_agent.workers.worker_starter import WorkerHost
from varuna_proto import spans
from varuna_proto.environment import PROGRAM_VARIABLE
from varuna_proto.names import clean_gpu_type

if TYPE_CHECKING:
    from varuna_agent.identity.certificate import AgentIdentity
    from varuna_agent.observability.metrics import AgentMetrics

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent; returns the exit code: 0 stopped on request (on SIGUSR2, another agent
    takes the place of this process instead), 1 failed or refused, 2 wrong settings."""
    parser = _make_parser()
    options = parser.parse_args(arguments)
    _configure_logging(options.log_format, options.vm_id)
    try:
        settings = _make_settings(options)
        notice_source = _make_notice_source(settings)
        user = JobUser.find_user(settings.run_as) if settings.run_as else None
        keep_private(settings.vm_dir, user)
        lock = _lock_folder(settings.vm_dir)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"varuna agent: {error}\n")
        return EXIT_USAGE
    hide_this_process()
    # Neither is for workers.
    program, notify_socket = os.environ.pop(PROGRAM_VARIABLE, ""), os.environ.pop("NOTIFY_SOCKET", "")
    files = MemoryFiles(choose_limit(settings.memory_part), notify_socket)
    memory = AgentMemory(files, files.adopt_files(os.environ))
    try:
        end = asyncio.run(_run(settings, notice_source, user, memory, keeps_memory=bool(notify_socket)))
    except (OSError, JoinError, CopiesError) as error:
        sys.stderr.write(f"varuna agent: {error}\n")
        return 1
    finally:
        os.close(lock)
    if end.is_replaced and end.code == 0:
        _replace_process(files, notify_socket, program)
    files.leave_to_store()
    return end.code


def _replace_process(files: MemoryFiles, notify_socket: str, program: str) -> NoReturn:
    """Start the agent that is installed now, in this process and with its arguments; it has the memory files.

    `program`: the path of `varuna` by which this one was started; empty: it was not. It may lead to another version
    now, with an interpreter of its own.
    """
    _log.info("the agent starts again in this process", version=_read_version())
    files.leave_to_successor(os.environ)
    if notify_socket:
        os.environ["NOTIFY_SOCKET"] = notify_socket
    sys.stdout.flush()
    sys.stderr.flush()
    if os.access(program, os.X_OK):
        os.execv(program, [program, "agent", *sys.argv[1:]])
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="varuna agent", description=__doc__)
    parser.add_argument(
        "--manager", required=True, help="host:port of the manager's gRPC service; of several, separated by commas"
    )
    parser.add_argument("--vm-id", required=True, help="the id by which the manager knows this VM")
    parser.add_argument("--vm-dir", required=True, type=Path, help="folder for logs, socket and notices")
    parser.add_argument(
        "--checkpoint-dir",
        type=Path,
        help="folder for copies of checkpoints, on a disk or in RAM (default: in --vm-dir)",
    )
    parser.add_argument("--gpus", type=int, default=1, help="devices that can each run one worker")
    parser.add_argument("--device-memory-bytes", type=int, default=0, help="per device; 0: not known")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address of this VM for the workers of other VMs; auto: the one from which it reaches the manager",
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--gpu-type",
        default="",
        help="the GPUs' type, for jobs that ask for some (default: with --device cuda, what NVIDIA's driver reports)",
    )
    parser.add_argument("--reconnect-first-s", type=float, default=0.1, help="backoff to the manager: first wait")
    parser.add_argument("--reconnect-most-s", type=float, default=5.0, help="backoff to the manager: longest wait")
    parser.add_argument(
        "--keep-warm-s",
        type=float,
        default=120.0,
        help="keep a process with the job's imports done, from which its next workers start, for this time after its "
        "last worker here, and a process that holds the job's state for as long without a rank; 0: start every worker "
        "from nothing",
    )
    parser.add_argument(
        "--memory-part",
        type=float,
        default=AgentSettings.memory_part,
        help="keep the states of workers that have ended for their job's next generation, up to this part of the VM's "
        "memory; 0: keep none (default: 0.4)",
    )
    parser.add_argument(
        "--join-token-file",
        type=Path,
        help="holds a token with which this VM joins the manager (default: the token in VARUNA_JOIN_TOKEN)",
    )
    parser.add_argument(
        "--join-url",
        default="",
        help="the manager's REST API, or each, separated by commas (default: https, port 8750 of --manager's hosts)",
    )
    parser.add_argument(
        "--join-ca", type=Path, help="PEM of who signed --join-url's certificate, if that is not the manager itself"
    )
    parser.add_argument(
        "--run-as",
        default="",
        metavar="USER",
        help="run jobs as this user; only an agent that runs as root can (default: as the agent's own user)",
    )
    parser.add_argument(
        "--notices",
        default="file",
        choices=NOTICE_SOURCES,
        help="source of preemption notices: the cloud's metadata service, SIGUSR1 in a Slurm job, or notice.json in "
        "--vm-dir (default: file)",
    )
    parser.add_argument(
        "--metrics-port", type=int, default=0, help="have Prometheus read this agent's metrics at this port; 0: not"
    )
    parser.add_argument("--metrics-host", default="127.0.0.1", help="the address of --metrics-port (default: loopback)")
    parser.add_argument(
        "--log-bytes",
        type=int,
        default=AgentSettings.log_bytes,
        help="keep so much of each log of a worker or setup, and of the agent's own: the newest (default: 256 MiB)",
    )
    parser.add_argument(
        "--old-logs-bytes",
        type=int,
        default=AgentSettings.old_logs_bytes,
        help="keep so much of the logs of generations that are over, together: the newest (default: 4 GiB)",
    )
    parser.add_argument("--log-format", default="text", choices=("text", "json"))
    return parser


def _make_settings(options: argparse.Namespace) -> AgentSettings:
    return AgentSettings(
        manager=options.manager,
        vm_id=options.vm_id,
        vm_dir=options.vm_dir,
        checkpoint_dir=options.checkpoint_dir,
        gpus=options.gpus,
        device_memory_bytes=options.device_memory_bytes,
        host=own_address(options.manager) if options.host == AUTO else options.host,
        device=options.device,
        gpu_type=clean_gpu_type(options.gpu_type or (read_gpu_type() if options.device == "cuda" else "")),
        reconnect_first_s=options.reconnect_first_s,
        reconnect_most_s=options.reconnect_most_s,
        keep_warm_s=options.keep_warm_s,
        memory_part=options.memory_part,
        run_as=options.run_as,
        notices=options.notices,
        log_bytes=options.log_bytes,
        old_logs_bytes=options.old_logs_bytes,
        metrics_port=options.metrics_port,
        metrics_host=options.metrics_host,
        join_token=_read_join_token(options.join_token_file),
        join_url=options.join_url,
        join_ca=options.join_ca,
    )


class _RunEnd(NamedTuple):
    code: int
    is_replaced: bool
    """A signal asked for another process of the agent in the place of this one."""


async def _run(
    settings: AgentSettings,
    notice_source: NoticeSource,
    user: JobUser | None,
    memory: AgentMemory,
    *,
    keeps_memory: bool,
) -> _RunEnd:
    """`keeps_memory`: the memory files outlive an agent that a signal ends."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(open_thread_pool())
    if isinstance(notice_source, SlurmNotices):  # before all that takes long: nobody else handles the signal
        loop.add_signal_handler(signal.SIGUSR1, notice_source.announce_end)
    manager_identity = await _open_identity(settings) if settings.is_certified else None
    identity = Identity(
        vm_id=settings.vm_id,
        incarnation=uuid.uuid4().hex,
        version=_read_version(),
        host=settings.host,
        gpus=settings.gpus,
        device_memory_bytes=settings.device_memory_bytes,
        device=settings.device,
        gpu_type=settings.gpu_type,
    )
    metrics = _make_metrics(identity.version) if settings.metrics_port else None
    exporter = spans.exporter(os.environ, "varuna-agent", **{"varuna.vm": settings.vm_id})
    runner = AgentRunner(
        settings=settings,
        identity=identity,
        notice_source=notice_source,
        host=WorkerHost(base_environ=os.environ, user=user, groups=_open_job_groups()),
        observers=Observers(metrics, None if exporter is None else RankSpans(exporter, settings.vm_id)),
        manager_identity=manager_identity,
        memory=memory,
    )
    signals: list[signal.Signals] = []

    def handle_signal(number: signal.Signals) -> None:
        signals.append(number)
        is_kept = keeps_memory or number == signal.SIGUSR2
        runner.request_termination(f"the agent got {number.name}", keeps_memory=is_kept)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        loop.add_signal_handler(number, handle_signal, number)
    _log.info("agent starts", manager=settings.manager, gpus=settings.gpus, incarnation=identity.incarnation)
    with nullcontext() if metrics is None else metrics.serve_metrics(settings.metrics_host, settings.metrics_port):
        code = await runner.run()
    _log.info("agent ends", code=code)
    return _RunEnd(code, is_replaced=signals[-1:] == [signal.SIGUSR2])


def _open_job_groups() -> JobGroups | None:
    try:
        return JobGroups.open_groups()
    except NoGroupsError as error:
        _log.info("jobs run without control groups, and so without limits", reason=str(error))
        return None


def _make_metrics(version: str) -> AgentMetrics:
    from varuna_agent.observability.metrics import AgentMetrics  # agents without metrics start sooner

    return AgentMetrics(version)


def _make_notice_source(settings: AgentSettings) -> NoticeSource:
    if settings.notices == "file":
        return FileNoticeSource(settings.vm_dir / "notice.json", settings.notice_poll_s)
    if settings.notices == "slurm":
        return SlurmNotices(os.environ)
    return make_metadata_source(settings.notices)


async def _open_identity(settings: AgentSettings) -> AgentIdentity | None:
    """This VM's certificate. Raises JoinError."""
    from varuna_agent.identity.certificate import JoinToken, open_identity  # agents of an open manager start sooner

    token = JoinToken.parse_text(settings.join_token) if settings.join_token else None
    return await open_identity(
        settings.identity_dir,
        settings.vm_id,
        token,
        urls=settings.join_urls,
        ca_file=settings.join_ca,
        chance=random.Random(),
    )


def _read_join_token(file: Path | None) -> str:
    """From the file or VARUNA_JOIN_TOKEN; not from the command line, which every user of the VM can see."""
    if file is not None:
        return file.read_text().strip()
    return os.environ.get("VARUNA_JOIN_TOKEN", "")


def _lock_folder(vm_dir: Path) -> int:
    """Keep a second agent from using the same socket and logs. The kernel frees the lock when the process ends."""
    path = vm_dir / "agent.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(f"another agent runs in {vm_dir}: stop it, or give this one its own --vm-dir") from None
    return descriptor


def _read_version() -> str:
    try:
        return importlib.metadata.version("varuna-spot")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _configure_logging(log_format: str, vm_id: str) -> None:
    renderer: structlog.typing.Processor
    if log_format == "json":
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(vm=vm_id)


if __name__ == "__main__":
    sys.exit(main())
