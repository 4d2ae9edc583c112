"""`python -m varuna_agent.main`: the agent of one VM."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import importlib.metadata
import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import structlog

from varuna_agent.notices import FileNoticeSource
from varuna_agent.runner import AgentRunner
from varuna_agent.settings import AgentSettings
from varuna_agent.state import Identity

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent; returns the process's exit code: 0 left as asked, 1 failed or refused, 2 wrong settings."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _configure_logging(options.log_format, options.vm_id)
    try:
        settings = _settings(options)
        settings.vm_dir.mkdir(parents=True, exist_ok=True)
        lock = _lock(settings.vm_dir)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"varuna agent: {error}\n")
        return EXIT_USAGE
    try:
        return asyncio.run(_run(settings))
    except OSError as error:
        sys.stderr.write(f"varuna agent: {error}\n")
        return 1
    finally:
        os.close(lock)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="varuna agent", description=__doc__)
    parser.add_argument("--manager", required=True, help="host:port of the manager's gRPC service")
    parser.add_argument("--vm-id", required=True, help="the id by which the manager knows this VM")
    parser.add_argument("--vm-dir", required=True, type=Path, help="folder for logs, socket and notices")
    parser.add_argument(
        "--checkpoint-dir",
        type=Path,
        help="folder for copies of checkpoints, on a disk or in RAM (default: in --vm-dir)",
    )
    parser.add_argument("--gpus", type=int, default=1, help="devices that can each run one worker")
    parser.add_argument("--device-memory-bytes", type=int, default=0, help="per device; 0: not known")
    parser.add_argument("--host", default="127.0.0.1", help="address of this VM for the workers of other VMs")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--reconnect-first-s", type=float, default=0.1, help="backoff to the manager: first wait")
    parser.add_argument("--reconnect-most-s", type=float, default=5.0, help="backoff to the manager: longest wait")
    parser.add_argument(
        "--keep-warm-s",
        type=float,
        default=120.0,
        help="keep a process with the job's imports done, from which its next workers start, for so long after its "
        "last worker here; 0: start every worker from nothing",
    )
    parser.add_argument("--log-format", default="console", choices=("console", "json"))
    return parser


def _settings(options: argparse.Namespace) -> AgentSettings:
    return AgentSettings(
        manager=options.manager,
        vm_id=options.vm_id,
        vm_dir=options.vm_dir,
        checkpoint_dir=options.checkpoint_dir,
        gpus=options.gpus,
        device_memory_bytes=options.device_memory_bytes,
        host=options.host,
        device=options.device,
        reconnect_first_s=options.reconnect_first_s,
        reconnect_most_s=options.reconnect_most_s,
        keep_warm_s=options.keep_warm_s,
    )


async def _run(settings: AgentSettings) -> int:
    identity = Identity(
        vm_id=settings.vm_id,
        incarnation=uuid.uuid4().hex,
        version=_version(),
        host=settings.host,
        gpus=settings.gpus,
        device_memory_bytes=settings.device_memory_bytes,
        device=settings.device,
    )
    notices = FileNoticeSource(settings.vm_dir / "notice.json", settings.notice_poll_s)
    runner = AgentRunner(settings, identity, notices, os.environ)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, runner.terminate, f"the agent got {number.name}")
    _log.info("agent starts", manager=settings.manager, gpus=settings.gpus, incarnation=identity.incarnation)
    code = await runner.run()
    _log.info("agent ends", code=code)
    return code


def _lock(vm_dir: Path) -> int:
    """Two agents in one folder would take each other's socket and logs. The kernel lets go when the process ends."""
    path = vm_dir / "agent.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(f"another agent runs in {vm_dir}: stop it, or give this one its own --vm-dir") from None
    return descriptor


def _version() -> str:
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
