"""The manager's process: one event loop with the agents' gRPC server, REST, and the controllers.

It may be killed at any instant. What it must remember is in the store and in `<data_dir>/manager.json` (its addresses:
a restart takes the same ports, so that agents find it again). On SIGTERM it closes its servers and ends; the local
VMs go on without it, unless `local_ephemeral`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import grpc
import structlog
import uvicorn
from pydantic import ValidationError

from varuna_manager.api.grpc.gateway import AgentGateway
from varuna_manager.api.http.app import Services, make_app
from varuna_manager.controllers.compute_controller import ComputeController
from varuna_manager.controllers.fleet_controller import FleetController
from varuna_manager.controllers.job_controller import JobController
from varuna_manager.controllers.job_view import SnapshotLoader
from varuna_manager.controllers.loop import run_controller
from varuna_manager.db.engine import Database
from varuna_manager.providers.local import LocalMachine, LocalProvider
from varuna_manager.services.bell import Bell
from varuna_manager.services.compute_times import ComputeTimes
from varuna_manager.services.events import EventLog
from varuna_manager.services.fleet import FleetService
from varuna_manager.services.jobs import JobService
from varuna_manager.services.logs import LogService
from varuna_manager.services.planning import PlanningService
from varuna_manager.services.reports import ReportService
from varuna_manager.services.sessions import AgentSessions
from varuna_manager.services.vm_registry import VmRegistry
from varuna_manager.settings import ManagerSettings
from varuna_proto.v1 import agent_pb2_grpc

__all__ = ["ManagerSettings", "StartError", "main", "run", "serve"]

_SHUTDOWN_S = 3
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_GRPC_OPTIONS = (
    ("grpc.so_reuseport", 0),  # else a second manager would silently share the port
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
)


class StartError(Exception):
    """The manager cannot start; `str()` is one line with the way out."""


def serve(settings: ManagerSettings) -> int:
    """Run the manager until it is told to end. The exit status; a start that fails says why in one line on stderr."""
    _configure_logging(settings.log_level)
    try:
        asyncio.run(run(settings))
    except StartError as error:
        sys.stderr.write(f"varuna manager: {error}\n")
        return 1
    return 0


async def run(settings: ManagerSettings) -> None:
    """The manager, from its lock to its end. Raises StartError."""
    data_dir = settings.data_dir.resolve()
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(f"data_dir {data_dir} cannot be made ({error.strerror}): give another --data-dir") from error
    with _lock(data_dir):
        await _run_locked(settings, data_dir)


async def _run_locked(settings: ManagerSettings, data_dir: Path) -> None:
    remembered = _remembered_addresses(data_dir)
    http_socket = _http_socket(settings.host, settings.http_port, remembered.get("http"))
    database = Database(settings.database_url or f"sqlite:///{data_dir / 'manager.db'}")
    server = grpc.aio.server(options=_GRPC_OPTIONS)
    try:
        grpc_address = _bind_grpc(server, settings.host, settings.grpc_port, remembered.get("grpc"))
        await database.migrate()
        http_address = f"{settings.host}:{http_socket.getsockname()[1]}"
        _remember_addresses(data_dir, http_address, grpc_address)
        await _serve(settings, data_dir, database, server, http_socket, grpc_address)
    finally:
        await server.stop(grace=None)
        await database.close()
        http_socket.close()


async def _serve(
    settings: ManagerSettings,
    data_dir: Path,
    database: Database,
    server: grpc.aio.Server,
    http_socket: socket.socket,
    grpc_address: str,
) -> None:
    """Wire the parts, run them, take them down."""
    rules, bell, sessions, registry = settings.rules(), Bell(), AgentSessions(), VmRegistry()
    machine = LocalMachine(
        gpus=settings.gpus_per_vm,
        device_memory_bytes=settings.device_memory_bytes,
        host=settings.host,
        agent_command=settings.agent_command or LocalMachine.agent_command,
    )
    provider = LocalProvider(data_dir, grpc_address, machine, settings.capacity)
    events = EventLog(database)
    planning = PlanningService(cache_dir=data_dir / "numba")
    reports = ReportService(database, events, planning, bell)
    fleet = FleetService(database, events, registry, provider, reports, bell)
    if settings.vms is not None:
        await fleet.set_target(settings.vms)
    loader = SnapshotLoader(database, registry, rules)
    times = ComputeTimes()
    period_s = settings.reconcile_interval_s
    cache_url = settings.profile_cache(data_dir)
    controllers = (
        JobController(database, loader, registry, sessions, planning, events, rules, data_dir, cache_url, period_s),
        FleetController(database, registry, provider, fleet, events, bell, rules, period_s),
        ComputeController(database, times, planning, events, bell, rules),
    )
    gateway = AgentGateway(
        fleet=fleet, reports=reports, registry=registry, times=times, sessions=sessions, bell=bell, rules=rules
    )
    agent_pb2_grpc.add_AgentServiceServicer_to_server(gateway, server)
    jobs, logs = JobService(database, events, bell), LogService(database, sessions, provider)
    http = _http_server(Services(jobs=jobs, fleet=fleet, events=events, logs=logs))
    await server.start()
    log = structlog.get_logger("varuna.manager")
    http_address = "{}:{}".format(*http_socket.getsockname()[:2])
    log.info("the manager serves", http=f"http://{http_address}/", grpc=grpc_address, data_dir=str(data_dir))
    tasks = [asyncio.create_task(run_controller(controller, bell)) for controller in controllers]
    tasks.append(asyncio.create_task(http.serve(sockets=[http_socket])))
    warming_up = asyncio.create_task(planning.warm_up())
    try:
        await _until_told_to_end(tasks)
    finally:
        http.should_exit = True
        events.close()
        for task in tasks[:-1]:
            task.cancel()
        warming_up.cancel()
        await asyncio.gather(*tasks, warming_up, return_exceptions=True)
        sessions.close_all()
        await server.stop(grace=1.0)
        await provider.close(end_vms=settings.local_ephemeral)
        log.info("the manager ended", vms="ended too" if settings.local_ephemeral else "left running")


async def _until_told_to_end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for SIGTERM or SIGINT; raise when one of the tasks ends by itself, for none should."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    waiting = asyncio.create_task(told.wait())
    done, _ = await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    for task in done:
        if task is not waiting:
            task.result()
            raise RuntimeError("a part of the manager ended by itself")


# ---------------------------------------------------------------- addresses


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def _http_socket(host: str, port: int, remembered: str | None) -> socket.socket:
    """A listening socket: on `port`, or for 0 on the remembered one, else on a free one. Raises StartError."""
    kept = _port_of(remembered) if port == 0 else 0
    if kept:
        with contextlib.suppress(OSError):
            return _listen(host, kept)
    try:
        return _listen(host, port)
    except OSError as error:
        raise StartError(
            f"HTTP port {port} of {host} cannot be used ({error.strerror}): "
            "stop what has it, or give another --http-port"
        ) from error


def _bind_grpc(server: grpc.aio.Server, host: str, port: int, remembered: str | None) -> str:
    """The address for agents. A remembered port is not given up for another: agents dial it. Raises StartError."""
    wanted = port or _port_of(remembered)
    shown = f"[{host}]" if ":" in host else host
    try:
        # Tried with a plain socket first: gRPC tells of a failure in lines of its own.
        _listen(host, wanted).close()
        bound = server.add_insecure_port(f"{shown}:{wanted}")
    except (OSError, RuntimeError) as error:
        kept = "" if port else " (kept from the last start, since agents dial it)"
        raise StartError(
            f"gRPC port {wanted}{kept} of {host} is in use: stop what has it, or give another --grpc-port"
        ) from error
    return f"{shown}:{bound}"


def _port_of(address: str | None) -> int:
    return int(address.rpartition(":")[2]) if address else 0


def _remembered_addresses(data_dir: Path) -> dict[str, str]:
    try:
        document: dict[str, Any] = json.loads((data_dir / "manager.json").read_text())
    except FileNotFoundError:
        return {}
    return {name: document[name] for name in ("http", "grpc") if name in document}


def _remember_addresses(data_dir: Path, http: str, grpc_address: str) -> None:
    part = data_dir / "manager.json.part"
    part.write_text(json.dumps({"http": http, "grpc": grpc_address, "pid": os.getpid()}))
    part.replace(data_dir / "manager.json")


@contextlib.contextmanager
def _lock(data_dir: Path) -> Iterator[None]:
    """Hold the data directory. The kernel lets go of it when this process ends, however it ends."""
    with (data_dir / "manager.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StartError(
                f"another manager runs on data_dir {data_dir}: stop it, or give another --data-dir"
            ) from error
        yield


# ---------------------------------------------------------------- process


class _Http(uvicorn.Server):
    """Signals are the manager's own business, not uvicorn's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _http_server(services: Services) -> uvicorn.Server:
    config = uvicorn.Config(
        make_app(services),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=_SHUTDOWN_S,
        ws="none",
    )
    return _Http(config)


def _configure_logging(level: str) -> None:
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(number, logging.WARNING), stream=sys.stderr)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


def _parser() -> argparse.ArgumentParser:
    """One flag per setting."""
    parser = argparse.ArgumentParser(prog="varuna manager", description="Keep jobs training on the VMs that there are.")
    for name, field in ManagerSettings.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        default = "" if field.default is None else f" (default: {field.default})"
        text = f"{field.description}{default}"
        if field.annotation is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            kinds = [kind.__name__ for kind in get_args(field.annotation) if kind is not type(None)]
            metavar = (kinds or [getattr(field.annotation, "__name__", "value")])[0].upper()
            parser.add_argument(flag, metavar=metavar, help=text)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: flags, then environment, then defaults."""
    given = {name: value for name, value in vars(_parser().parse_args(arguments)).items() if value is not None}
    if "agent_command" in given:
        given["agent_command"] = json.loads(given["agent_command"])
    try:
        settings = ManagerSettings(**given)
    except ValidationError as error:
        for entry in error.errors():
            flag = "--" + ".".join(map(str, entry["loc"])).replace("_", "-")
            message = str(entry["msg"]).removeprefix("Value error, ")
            sys.stderr.write(f"varuna manager: {flag} {entry['input']!r}: {message}\n")
        return 2
    return serve(settings)


if __name__ == "__main__":
    sys.exit(main())
