"""The manager's process: it leads, or stands by.

It may be killed at any instant. Its state is in the store and in `<data_dir>/manager.json` (its addresses: a restart
takes the same ports, so that agents find it again). On SIGTERM and SIGINT it closes its servers and ends. On SIGTERM
the local VMs go on without it, because a service that is upgraded is stopped so; on SIGINT, a user's Ctrl-C, they end.
`keep_vms` decides otherwise.

On SQLite the manager leads as long as it lives: a lock on the store keeps other managers out. On PostgreSQL it leads
while it holds the lease (`varuna_manager.world.leadership`). Otherwise it stands by: it answers reads from the store
and refuses everything else with the leader's address.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import signal
import socket
import ssl
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import grpc.aio
import structlog
import uvicorn
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.types import ASGIApp

from varuna_manager.api.grpc.limits import SERVER_OPTIONS
from varuna_manager.api.grpc.roles import LeaderInterceptor, StandbyHandler
from varuna_manager.api.http.access import MAX_HEADER_BYTES
from varuna_manager.api.http.connections import LimitedListener, PatientHttp
from varuna_manager.api.http.roles import CutOffApp, StandbyApp
from varuna_manager.db.engine import Database, NotLeaderError, Outage, StoreAwayError
from varuna_manager.db.schema import TooNewError
from varuna_manager.errors import StartError
from varuna_manager.history.morph_spans import MorphSpans
from varuna_manager.jobs.secrets import Secrets
from varuna_manager.metrics.instruments import Instruments
from varuna_manager.planning.planning import PlanningService
from varuna_manager.server.addresses import bind_grpc, bind_ports, write_addresses
from varuna_manager.server.assembly import ProcessParts, TermParts
from varuna_manager.server.locks import hold_data_dir, hold_sqlite
from varuna_manager.server.security import open_security
from varuna_manager.server.texts import ENDED_VMS, KEPT_VMS, render_welcome
from varuna_manager.settings import ManagerSettings
from varuna_manager.world.leadership import Candidate, Leadership, Standing, Term, connection_name
from varuna_proto import spans
from varuna_proto.hosts import Network, mapped

_SHUTDOWN_S = 3
_MAX_CONNECTIONS = 1000
_KEEP_IDLE_S = 5
"""How long an idle connection is kept open. Callers should stop using theirs earlier, as our client does."""
_STANDBY_LOOK_S = 0.5


async def run(settings: ManagerSettings) -> None:
    """Run the manager until a stop signal. Raises StartError."""
    data_dir = settings.data_dir.resolve()
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(f"data_dir {data_dir} cannot be made ({error.strerror}): give another --data-dir") from error
    url = settings.database_url or f"sqlite:///{data_dir / 'manager.db'}"
    with hold_data_dir(data_dir), hold_sqlite(url):
        security = open_security(settings, data_dir)
        if settings.database_url is None:  # it contains jobs' environments and hashes of tokens
            (data_dir / "manager.db").touch(mode=0o600)
        ports = bind_ports(settings.host, settings.http_port, settings.grpc_port, data_dir)
        instruments = Instruments(importlib.metadata.version("varuna-spot"))
        planning = PlanningService(cache_dir=data_dir / "numba", note=instruments.record_plan)
        exporter = spans.exporter(os.environ, "varuna-manager")
        base = ProcessParts(
            settings=settings,
            data_dir=data_dir,
            ports=ports,
            planning=planning,
            instruments=instruments,
            spans=MorphSpans(exporter),
            secrets=Secrets.of_manager(
                settings.secrets_dir or data_dir / "secrets", os.environ, settings.secrets_vault
            ),
            security=security,
        )
        background = [asyncio.create_task(planning.warm_up()), asyncio.create_task(instruments.time_event_loop())]
        if security is not None:
            background.append(asyncio.create_task(security.tls.run()))
        try:
            if Database.is_shared(url):
                await _take_turns(base, url, _catch_stop_signals())
            else:
                await _lead_alone(base, url, _catch_stop_signals())
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            ports.close()
            await base.secrets.close()
            if exporter is not None:
                await asyncio.to_thread(exporter.close)


async def _lead_alone(base: ProcessParts, url: str, stop_signal: StopSignal) -> None:
    database = Database(url)
    try:
        await _migrate(database)
        write_addresses(base.ports, base.data_dir, base.scheme)
        await _lead(base, database, stop_signal, is_start=True)
    finally:
        await database.close()


async def _take_turns(base: ProcessParts, url: str, stop_signal: StopSignal) -> None:
    """Lead while the lease is ours and stand by otherwise, until the stop signal."""
    log = structlog.get_logger("varuna.manager")
    outage, term = Outage(), None
    elections = Database(url, application_name="varuna/candidate", outage=outage)
    try:
        await _migrate(elections)
        write_addresses(base.ports, base.data_dir, base.scheme)
        leadership = Leadership(elections, _make_candidate(base), base.settings.leader_lease_s)
        standing, is_start = Standing(), True
        term = await _campaign(leadership, standing)
        while not stop_signal.is_set():
            if term is None:
                is_start = False
                term = await _stand_by(
                    base, Database(url, fence=_refuse_write, outage=outage), leadership, standing, stop_signal
                )
                continue
            name = connection_name(leadership.me.holder, term.epoch)
            database = Database(url, fence=term.hold_lease, application_name=name, outage=outage)
            try:
                await _lead(base, database, stop_signal, term=term, is_start=is_start)
            except (NotLeaderError, StoreAwayError) as error:
                log.warning("this manager no longer leads", reason=str(error), epoch=term.epoch)
                is_start, term = False, await _campaign(leadership, standing)
            finally:
                await database.close()
    finally:
        if term is not None:
            await term.release_lease()
        await elections.close()


async def _campaign(leadership: Leadership, standing: Standing) -> Term | None:
    """Try to become the leader; on failure, `standing` has the reason."""
    try:
        async with asyncio.timeout(leadership.lease_s):
            found = await leadership.run_for_leader()
    except (StoreAwayError, TimeoutError) as error:
        standing.leader, standing.away = None, str(error) or "the store did not answer in time"
        return None
    standing.away = ""
    if isinstance(found, Term):
        standing.leader = None
        found.start_keeping()
        return found
    standing.leader = found
    return None


async def _stand_by(
    base: ProcessParts, database: Database, leadership: Leadership, standing: Standing, stop_signal: StopSignal
) -> Term | None:
    """Answer as a standby until this manager leads. Returns None after a stop signal. Closes the database."""
    structlog.get_logger("varuna.manager").info(
        "the manager stands by", **_addresses(base), reason=standing.describe_leader()
    )
    parts = TermParts(base, database)

    def refuse_agents(server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((StandbyHandler(standing),))

    try:
        async with _serve(base, StandbyApp(parts.make_http_app(), standing), refuse_agents, parts.hang_up) as serving:
            term = None
            while term is None and not stop_signal.is_set():
                await _wait_for_stop(stop_signal, [serving], timeout_s=_STANDBY_LOOK_S)
                term = await _campaign(leadership, standing)
        return term
    finally:
        await parts.close(end_vms=False)
        await database.close()


async def _lead(
    base: ProcessParts, database: Database, stop_signal: StopSignal, *, term: Term | None = None, is_start: bool
) -> None:
    """Serve and decide until the stop signal. Raises NotLeaderError if the term ends before."""
    log = structlog.get_logger("varuna.manager")
    parts = TermParts(base, database)
    interceptors = () if term is None else (LeaderInterceptor(term),)
    tasks = [] if term is None else [term.start_keeping()]
    try:
        await parts.start_leading(is_start=is_start, epoch=None if term is None else term.epoch)
        async with _serve(base, parts.make_http_app(), parts.serve_agents, parts.hang_up, interceptors) as serving:
            log.info("the manager serves", **_addresses(base), data_dir=str(base.data_dir))
            if base.settings.logs_text:
                ends_vms = base.settings.ends_vms(is_interrupt=True, is_shared=term is not None)
                log.info(render_welcome(base.settings, base.http_url, base.data_dir, ends_vms=ends_vms))
            base.instruments.record_leading(True)
            tasks += [asyncio.create_task(loop) for loop in parts.make_loops()]
            try:
                await _wait_for_stop(stop_signal, [*tasks, serving])
            finally:
                for task in tasks:
                    task.cancel()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        base.instruments.record_leading(False)
        end_vms = stop_signal.is_set() and base.settings.ends_vms(
            is_interrupt=stop_signal.is_interrupt, is_shared=term is not None
        )
        await parts.close(end_vms=end_vms)
    log.info("the manager ended", vms=ENDED_VMS if end_vms else KEPT_VMS)


async def _wait_for_stop(
    stop_signal: StopSignal, tasks: Sequence[asyncio.Task[None]], timeout_s: float | None = None
) -> None:
    """Wait for the stop signal, at most `timeout_s`. Raises if one of the tasks ends by itself, which none should."""
    waiting = asyncio.create_task(stop_signal.wait())
    done, _ = await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED, timeout=timeout_s)
    waiting.cancel()
    for task in done:
        if task is not waiting:
            task.result()
            raise RuntimeError("a task of the manager ended by itself")


# ---------------------------------------------------------------- servers


@asynccontextmanager
async def _serve(
    base: ProcessParts,
    app: ASGIApp,
    add_handlers: Callable[[grpc.aio.Server], None],
    hang_up: Callable[[], None],
    interceptors: Sequence[LeaderInterceptor] = (),
) -> AsyncIterator[asyncio.Task[None]]:
    """Run both servers during the block; yields the task that serves HTTP. They leave the manager's ports bound.

    `hang_up` ends streams that would go on for ever; it is called when the servers accept no new ones.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=interceptors)
    add_handlers(server)
    security, ports = base.security, base.ports
    bind_grpc(server, ports, None if security is None else security.grpc_credentials())
    http = _make_http_server(app, None if security is None else security.tls.https, base.settings.proxies)
    await server.start()
    listener = LimitedListener(
        ports.http_socket.dup(),  # a copy, because the server closes its sockets and the next one needs this one
        most=2 * _MAX_CONNECTIONS,  # uvicorn answers 503 beyond half of them
        most_per_address=base.settings.connections_per_address,
        proxies=base.settings.proxies,
    )
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    try:
        yield serving
    finally:
        http.should_exit = True
        stopping = asyncio.create_task(server.stop(grace=1.0))
        await asyncio.sleep(0)  # the stop has begun, so that no stream is opened again
        hang_up()
        await asyncio.gather(serving, stopping, return_exceptions=True)


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the manager has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _make_http_server(app: ASGIApp, tls: ssl.SSLContext | None, proxies: Sequence[Network]) -> uvicorn.Server:
    config = uvicorn.Config(
        CutOffApp(app),
        http=PatientHttp,
        ssl_context_factory=None if tls is None else lambda config, default: tls,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_keep_alive=_KEEP_IDLE_S,
        proxy_headers=bool(proxies),  # only for proxies: otherwise callers could forge their address
        forwarded_allow_ips=[str(network) for network in (*proxies, *filter(None, map(mapped, proxies)))],
        server_header=False,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=_SHUTDOWN_S,
        ws="none",
    )
    return _HttpServer(config)


# ---------------------------------------------------------------- helpers


class StopSignal(asyncio.Event):
    """SIGTERM or SIGINT has come."""

    is_interrupt = False
    """Whether it was SIGINT."""

    def interrupt(self) -> None:
        self.is_interrupt = self.is_interrupt or not self.is_set()
        self.set()


def _catch_stop_signals() -> StopSignal:
    stop_signal = StopSignal()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop_signal.set)
    loop.add_signal_handler(signal.SIGINT, stop_signal.interrupt)
    return stop_signal


async def _migrate(database: Database) -> None:
    """Raises StartError."""
    try:
        await database.migrate_schema()
    except (StoreAwayError, TooNewError) as error:
        raise StartError(str(error)) from error


async def _refuse_write(session: AsyncSession) -> None:
    raise NotLeaderError("this manager does not lead: nothing was written")


def _make_candidate(base: ProcessParts) -> Candidate:
    """This manager as a candidate, named after its machine and its data directory, which stay the same."""
    path = base.data_dir / "manager.id"
    if not path.exists():
        path.write_text(uuid.uuid4().hex)
    return Candidate(
        holder=f"{socket.gethostname()}:{path.read_text().strip()}",
        http_url=base.http_url,
        grpc_address=base.grpc_address,
    )


def _addresses(base: ProcessParts) -> dict[str, str]:
    return {"http": f"{base.http_url}/", "grpc": base.grpc_address}
