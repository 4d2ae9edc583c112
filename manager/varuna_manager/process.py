"""The manager's process: it leads, or waits to lead.

It may be killed at any instant. What it must remember is in the store and in `<data_dir>/manager.json` (its addresses:
a restart takes the same ports, so that agents find it again). On SIGTERM it closes its servers and ends; the local
VMs go on without it, unless `local_ephemeral`.

On SQLite the manager leads for as long as it lives: a lock on the store keeps others out. On PostgreSQL it leads while
it has the lease (`varuna_manager.services.leadership`), and otherwise stands by: it answers what is asked of the store,
and refuses all else with the leader's address.
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

from varuna_manager.addresses import bind_grpc, remember_place, take_place
from varuna_manager.api.grpc.limits import MAX_MESSAGE_BYTES, STREAMS_PER_CONNECTION
from varuna_manager.api.grpc.roles import LeaderInterceptor, StandbyHandler
from varuna_manager.api.http.access import MAX_HEADER_BYTES
from varuna_manager.api.http.connections import Listener, PatientHttp
from varuna_manager.api.http.roles import CutOff, Standby
from varuna_manager.assembly import Base, Parts
from varuna_manager.db.engine import Database, NotLeaderError, Outage, StoreAwayError
from varuna_manager.db.schema import TooNewError
from varuna_manager.errors import StartError
from varuna_manager.locks import hold_data_dir, hold_sqlite
from varuna_manager.security import open_security
from varuna_manager.services.leadership import Candidate, Leadership, Standing, Term, connection_name
from varuna_manager.services.metrics.instruments import Instruments
from varuna_manager.services.morph_spans import MorphSpans
from varuna_manager.services.planning import PlanningService
from varuna_manager.services.secrets import Secrets
from varuna_manager.settings import ManagerSettings
from varuna_proto import spans
from varuna_proto.hosts import Network, mapped

_SHUTDOWN_S = 3
_MAX_CONNECTIONS = 1000
_STANDBY_LOOK_S = 0.5
_GRPC_OPTIONS = (
    ("grpc.so_reuseport", 0),  # else a second manager would silently share the port
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
)


async def run(settings: ManagerSettings) -> None:
    """The manager, from its locks to its end. Raises StartError."""
    data_dir = settings.data_dir.resolve()
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(f"data_dir {data_dir} cannot be made ({error.strerror}): give another --data-dir") from error
    url = settings.database_url or f"sqlite:///{data_dir / 'manager.db'}"
    with hold_data_dir(data_dir), hold_sqlite(url):
        security = open_security(settings, data_dir)
        if settings.database_url is None:  # jobs' environments are in it, and hashes of tokens
            (data_dir / "manager.db").touch(mode=0o600)
        place = take_place(settings.host, settings.http_port, settings.grpc_port, data_dir)
        instruments = Instruments(importlib.metadata.version("varuna-spot"))
        planning = PlanningService(cache_dir=data_dir / "numba", note=instruments.note_plan)
        exporter = spans.exporter(os.environ, "varuna-manager")
        base = Base(
            settings=settings,
            data_dir=data_dir,
            place=place,
            planning=planning,
            instruments=instruments,
            spans=MorphSpans(exporter),
            secrets=Secrets.of_manager(
                settings.secrets_dir or data_dir / "secrets", os.environ, settings.secrets_vault
            ),
            security=security,
        )
        beside = [asyncio.create_task(planning.warm_up()), asyncio.create_task(instruments.watch_loop())]
        if security is not None:
            beside.append(asyncio.create_task(security.tls.keep_fresh()))
        try:
            if Database.is_shared(url):
                await _take_turns(base, url, _told_to_end())
            else:
                await _lead_alone(base, url, _told_to_end())
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            place.close()
            await base.secrets.close()
            if exporter is not None:
                await asyncio.to_thread(exporter.close)


async def _lead_alone(base: Base, url: str, told: asyncio.Event) -> None:
    database = Database(url)
    try:
        await _migrate(database)
        remember_place(base.place, base.data_dir, base.scheme)
        await _lead(base, database, told, is_start=True)
    finally:
        await database.close()


async def _take_turns(base: Base, url: str, told: asyncio.Event) -> None:
    """Lead when the lease is ours, stand by when it is not, until told to end."""
    log = structlog.get_logger("varuna.manager")
    outage, term = Outage(), None
    elections = Database(url, application_name="varuna/candidate", outage=outage)
    try:
        await _migrate(elections)
        remember_place(base.place, base.data_dir, base.scheme)
        leadership = Leadership(elections, _candidate(base), base.settings.leader_lease_s)
        standing, is_start = Standing(), True
        term = await _campaign(leadership, standing)
        while not told.is_set():
            if term is None:
                is_start = False
                term = await _stand_by(base, Database(url, fence=_refuse, outage=outage), leadership, standing, told)
                continue
            name = connection_name(leadership.me.holder, term.epoch)
            database = Database(url, fence=term.fence, application_name=name, outage=outage)
            try:
                await _lead(base, database, told, term=term, is_start=is_start)
            except (NotLeaderError, StoreAwayError) as error:
                log.warning("this manager leads no more", reason=str(error), epoch=term.epoch)
                is_start, term = False, await _campaign(leadership, standing)
            finally:
                await database.close()
    finally:
        if term is not None:
            await term.release()
        await elections.close()


async def _campaign(leadership: Leadership, standing: Standing) -> Term | None:
    """Try to lead; when that is not to be, `standing` says why."""
    try:
        async with asyncio.timeout(leadership.lease_s):
            found = await leadership.campaign()
    except (StoreAwayError, TimeoutError) as error:
        standing.leader, standing.away = None, str(error) or "the store did not answer in time"
        return None
    standing.away = ""
    if isinstance(found, Term):
        standing.leader = None
        found.kept()
        return found
    standing.leader = found
    return None


async def _stand_by(
    base: Base, database: Database, leadership: Leadership, standing: Standing, told: asyncio.Event
) -> Term | None:
    """Answer what can be answered, until this manager leads; None: it is told to end. Closes the database."""
    structlog.get_logger("varuna.manager").info("the manager stands by", **_addresses(base), reason=standing.text())
    parts = Parts(base, database)

    def refuse_agents(server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((StandbyHandler(standing),))

    try:
        async with _answering(base, Standby(parts.app(), standing), refuse_agents, parts.hang_up) as serving:
            term = None
            while term is None and not told.is_set():
                await _first_of(told, [serving], timeout_s=_STANDBY_LOOK_S)
                term = await _campaign(leadership, standing)
        return term
    finally:
        await parts.close(end_vms=False)
        await database.close()


async def _lead(
    base: Base, database: Database, told: asyncio.Event, *, term: Term | None = None, is_start: bool
) -> None:
    """Serve and decide, until told to end. Raises NotLeaderError when the term is over before that."""
    log = structlog.get_logger("varuna.manager")
    parts = Parts(base, database)
    interceptors = () if term is None else (LeaderInterceptor(term),)
    tasks = [] if term is None else [term.kept()]
    try:
        await parts.begin(is_start=is_start, epoch=None if term is None else term.epoch)
        async with _answering(base, parts.app(), parts.serve_agents, parts.hang_up, interceptors) as serving:
            log.info("the manager serves", **_addresses(base), data_dir=str(base.data_dir))
            base.instruments.note_leading(True)
            tasks += [asyncio.create_task(loop) for loop in parts.loops()]
            try:
                await _first_of(told, [*tasks, serving])
            finally:
                for task in tasks:
                    task.cancel()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        base.instruments.note_leading(False)
        end_vms = base.settings.local_ephemeral and told.is_set()
        await parts.close(end_vms=end_vms)
    log.info("the manager ended", vms="ended too" if end_vms else "left running")


async def _first_of(told: asyncio.Event, tasks: Sequence[asyncio.Task[None]], timeout_s: float | None = None) -> None:
    """Wait until told to end, or for so long; raise when one of the tasks ends by itself, for none should."""
    waiting = asyncio.create_task(told.wait())
    done, _ = await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED, timeout=timeout_s)
    waiting.cancel()
    for task in done:
        if task is not waiting:
            task.result()
            raise RuntimeError("a part of the manager ended by itself")


# ---------------------------------------------------------------- servers


@asynccontextmanager
async def _answering(
    base: Base,
    app: ASGIApp,
    add_handlers: Callable[[grpc.aio.Server], None],
    hang_up: Callable[[], None],
    interceptors: Sequence[LeaderInterceptor] = (),
) -> AsyncIterator[asyncio.Task[None]]:
    """Both servers, for the block; the task that serves HTTP. The ports are the place's before and after.

    `hang_up` ends what would go on for ever: called when nobody can come in any more.
    """
    server = grpc.aio.server(options=_GRPC_OPTIONS, interceptors=interceptors)
    add_handlers(server)
    security, place = base.security, base.place
    bind_grpc(server, place, None if security is None else security.grpc_credentials())
    http = _http_server(app, None if security is None else security.tls.https, base.settings.proxies)
    await server.start()
    listener = Listener(
        place.http_socket.dup(),  # the server closes the sockets that it is given: this one is to be used again
        most=2 * _MAX_CONNECTIONS,  # beyond the half of them the answer is 503
        most_per_address=base.settings.connections_per_address,
        proxies=base.settings.proxies,
    )
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    try:
        yield serving
    finally:
        http.should_exit = True
        stopping = asyncio.create_task(server.stop(grace=1.0))
        await asyncio.sleep(0)  # it has begun: a stream that is ended now is not opened again
        hang_up()
        await asyncio.gather(serving, stopping, return_exceptions=True)


class _Http(uvicorn.Server):
    """Signals are the manager's own business, not uvicorn's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _http_server(app: ASGIApp, tls: ssl.SSLContext | None, proxies: Sequence[Network]) -> uvicorn.Server:
    config = uvicorn.Config(
        CutOff(app),
        http=PatientHttp,
        ssl_context_factory=None if tls is None else lambda config, default: tls,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        limit_concurrency=_MAX_CONNECTIONS,
        proxy_headers=bool(proxies),  # else callers could say that they are somebody else
        forwarded_allow_ips=[str(network) for network in (*proxies, *filter(None, map(mapped, proxies)))],
        server_header=False,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=_SHUTDOWN_S,
        ws="none",
    )
    return _Http(config)


# ---------------------------------------------------------------- small things


def _told_to_end() -> asyncio.Event:
    """Set by SIGTERM and SIGINT."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    return told


async def _migrate(database: Database) -> None:
    """Raises StartError."""
    try:
        await database.migrate()
    except (StoreAwayError, TooNewError) as error:
        raise StartError(str(error)) from error


async def _refuse(session: AsyncSession) -> None:
    raise NotLeaderError("this manager does not lead: nothing was written")


def _candidate(base: Base) -> Candidate:
    """This manager, by a name that it keeps: that of its machine and its data directory."""
    path = base.data_dir / "manager.id"
    if not path.exists():
        path.write_text(uuid.uuid4().hex)
    return Candidate(
        holder=f"{socket.gethostname()}:{path.read_text().strip()}",
        http_url=base.http_url,
        grpc_address=base.grpc_address,
    )


def _addresses(base: Base) -> dict[str, str]:
    return {"http": f"{base.http_url}/", "grpc": base.grpc_address}
