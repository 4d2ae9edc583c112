"""A manager's parts, built over one store.

Each term of leading, and each wait for one, has parts of its own, so that it knows nothing from an earlier term's
memory, exactly as after a restart of the process.
"""

from __future__ import annotations

import socket
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from fastapi import FastAPI

from varuna_manager.agents.agent_wheel import AgentWheel
from varuna_manager.agents.compute_times import ComputeTimes
from varuna_manager.agents.reports import ReportService
from varuna_manager.agents.sessions import AgentSessions
from varuna_manager.answers.errors import MissingError
from varuna_manager.api.grpc.gateway import AgentGateway
from varuna_manager.api.http import roles
from varuna_manager.api.http.app import Services, make_app
from varuna_manager.controllers.compute_controller import ComputeController
from varuna_manager.controllers.fleet_controller import FleetController
from varuna_manager.controllers.job_controller import JobController, JobControllerServices, LaunchDefaults
from varuna_manager.controllers.job_view import SnapshotLoader
from varuna_manager.controllers.loop import run_controller
from varuna_manager.controllers.vm_requests import FleetSettings
from varuna_manager.db.engine import Database
from varuna_manager.domain.fleet_decision import FleetLimits, VmRange
from varuna_manager.errors import StartError
from varuna_manager.fleet.drains import DrainService
from varuna_manager.fleet.fleet import FleetService
from varuna_manager.fleet.pools import check_pools
from varuna_manager.fleet.vm_usage import UsageBoard, UsageKeeper
from varuna_manager.history.live import LiveFeed, ProgressBoard
from varuna_manager.history.morph_spans import MorphSpans
from varuna_manager.history.retention import Retention
from varuna_manager.history.views import Views
from varuna_manager.history.webhooks import WebhookSender
from varuna_manager.jobs.archives import ArchiveService
from varuna_manager.jobs.jobs import JobService
from varuna_manager.jobs.logs import LogService
from varuna_manager.jobs.secrets import Secrets
from varuna_manager.jobs.stacks import StackService
from varuna_manager.metrics.exposition import MetricsService
from varuna_manager.metrics.from_store import StoreMetrics
from varuna_manager.metrics.instruments import Instruments
from varuna_manager.planning.planning import PlanningService
from varuna_manager.planning.rates import RateService
from varuna_manager.providers.base import Provider
from varuna_manager.providers.choice import (
    ProviderChoice,
    get_agent_start,
    has_local_vms,
    make_local_provider,
    make_provider,
)
from varuna_manager.providers.kind import AgentStart, BootSettings, Origin, ProviderContext
from varuna_manager.providers.local import LocalMachine, LocalProvider
from varuna_manager.providers.measured import measure_provider
from varuna_manager.server.addresses import ListenPorts
from varuna_manager.server.security import AccessControl, Security
from varuna_manager.settings import ManagerSettings, is_wildcard
from varuna_manager.world.attended_clock import AttendedClock
from varuna_manager.world.bell import Bell
from varuna_manager.world.events import EventLog
from varuna_manager.world.vm_registry import VmRegistry
from varuna_manager.world.world import World
from varuna_proto.v1 import agent_pb2_grpc


@dataclass(frozen=True, kw_only=True)
class ProcessParts:
    """What stays the same during the life of the process."""

    settings: ManagerSettings
    data_dir: Path
    ports: ListenPorts
    planning: PlanningService
    instruments: Instruments
    spans: MorphSpans
    secrets: Secrets
    security: Security | None
    """None: a manager without access control."""

    @property
    def http_url(self) -> str:
        return f"{self.scheme}://{self.http_address}"

    @property
    def scheme(self) -> str:
        return "http" if self.security is None else "https"

    @property
    def http_address(self) -> str:
        """host:port at which others reach this manager."""
        return self._advertised(self.ports.http_address)

    @property
    def grpc_address(self) -> str:
        return self._advertised(self.ports.grpc_address)

    @property
    def manager_addresses(self) -> str:
        """host:port of every manager, for the agents that are started here; separated by commas."""
        return self.settings.managers or self.grpc_address

    def _advertised(self, address: str) -> str:
        host, _, port = address.rpartition(":")
        if is_wildcard(self.settings.host):
            host = socket.gethostname()  # the certificate contains it, and no wildcard
        return f"{self.settings.advertise_host or host}:{port}"


class TermParts:
    """`close` them at the end."""

    def __init__(self, base: ProcessParts, database: Database) -> None:
        self._base, self._database = base, database
        settings, rules = base.settings, base.settings.make_rules()
        self.bell, self.sessions, times = Bell(), AgentSessions(), ComputeTimes()
        self._silence_clock = AttendedClock()
        registry = VmRegistry(self._silence_clock.read_s, heartbeat_interval_s=settings.heartbeat_interval_s)
        world = World(database, registry)
        instruments = base.instruments
        instruments.time_store(database.engine)
        self._events = EventLog(database, on_event=instruments.record_event)
        self._access = access = AccessControl(base.security, settings, database, self._events, self.sessions)
        chosen = _chosen(base, access)
        self.provider: Provider = measure_provider(chosen.provider, instruments.record_provider)
        usage, board = UsageBoard(), ProgressBoard()
        views = Views.make_views(database, registry, settings.make_keep_days(), usage)
        self._live = LiveFeed(self._events, views.events, board)
        reports = ReportService(
            database, self._events, base.planning, self.bell, board=board, spans=base.spans, sessions=self.sessions
        )
        self.fleet = FleetService(
            database, self._events, registry, self.provider, reports, self.bell, emulated=chosen.emulated
        )
        self._rates = RateService(self.bell, cache_dir=base.data_dir / "numba", note=instruments.record_plan)
        stacks = StackService(database, self.sessions, self.bell)
        period_s = settings.reconcile_interval_s
        self._fleet_controller = FleetController(
            database,
            world,
            self.fleet,
            self._events,
            self.bell,
            FleetSettings(
                rules=rules,
                limits=FleetLimits(max_vms=settings.max_vms, max_cost_per_hour=settings.max_cost_per_hour),
                period_s=period_s,
                spare_after_s=settings.spare_after_s,
            ),
        )
        self._controllers = (
            JobController(
                database,
                SnapshotLoader(database, world, rules),
                JobControllerServices(
                    sessions=self.sessions,
                    planning=base.planning,
                    rates=self._rates,
                    stacks=stacks,
                    events=self._events,
                    spans=base.spans,
                    secrets=base.secrets,
                ),
                rules,
                LaunchDefaults(
                    checkpoint_root=f"file://{base.data_dir}/checkpoints",
                    profile_cache_url=settings.profile_cache(base.data_dir),
                ),
                period_s=period_s,
            ),
            self._fleet_controller,
            ComputeController(database, times, base.planning, self._events, self.bell, rules),
        )
        self._archives = archives = ArchiveService(database, base.data_dir / "archives")
        keep = settings.make_keep_days()
        self._retention = Retention(database, self._events, archives, keep, chosen.emulated)
        self._usage_keeper = UsageKeeper(database, usage)
        self._gateway = AgentGateway(
            fleet=self.fleet,
            reports=reports,
            registry=registry,
            times=times,
            sessions=self.sessions,
            bell=self.bell,
            rules=rules,
            peers=access.peers,
            archives=archives,
            instruments=instruments,
            usage=usage,
        )
        self._services = Services(
            jobs=_job_service(base, database, self._events, self.bell),
            fleet=self.fleet,
            live=self._live,
            views=views,
            logs=LogService(database, self.sessions, chosen.emulated),
            drains=DrainService(database, self.fleet, self._events, self.bell),
            stacks=stacks,
            archives=archives,
            access=access.services,
            agent_wheel=AgentWheel(settings.agent_wheel),
            metrics=MetricsService(
                instruments,
                StoreMetrics(database, self.provider.name),
                lambda: len(self.sessions.list_sessions()),
                self.sessions.first_certificate_end,
            ),
        )

    async def start_leading(self, *, is_start: bool, epoch: int | None) -> None:
        """A leader's first actions. `epoch`: of its lease, if there is one."""
        await check_pools(self._database, self.provider)
        await self._access.ensure_admin_token(self._base.data_dir)
        await self._archives.remove_remains()
        settings = self._base.settings
        if is_start and settings.vms is not None:
            await self.fleet.set_target(settings.vms)  # not at a takeover: it may have been changed since
        if is_start and settings.max_vms is not None:
            await self.fleet.follow_jobs(VmRange(min_vms=settings.min_vms or 0, max_vms=settings.max_vms))
        if epoch is not None:
            async with self._database.write() as session:
                text = f"the manager at {self._base.http_address} leads now (epoch {epoch})"
                self._events.emit_event(session, "manager_leads", text, data={"epoch": epoch})

    def make_http_app(self) -> FastAPI:
        app = make_app(self._services)
        roles.install(app)
        return app

    def serve_agents(self, server: grpc.aio.Server) -> None:
        agent_pb2_grpc.add_AgentServiceServicer_to_server(self._gateway, server)
        self._access.serve_agents(server)

    def make_loops(self) -> list[Coroutine[Any, Any, None]]:
        """A leader's endless tasks."""
        look = self._base.instruments.time_round
        deciding = [run_controller(controller, self.bell, look) for controller in self._controllers]
        beside = [self._silence_clock.keep_attending()]
        beside += [
            run_controller(each, Bell(), look) for each in (self._retention, self._usage_keeper)
        ]  # no event wakes these
        target = self._base.settings.make_webhook_target()
        if target is not None:
            beside.append(WebhookSender(self._database, self._events, target).run())
        return [*deciding, *beside]

    def hang_up(self) -> None:
        """End every stream: of agents, and of followers of the events."""
        self._events.close()
        self._live.close()
        self.sessions.close_all()

    async def close(self, *, end_vms: bool) -> None:
        await self._rates.close()
        await self._fleet_controller.close()
        if end_vms:
            await self.fleet.give_up_vms()
        await self.provider.close(end_vms=end_vms)


def _chosen(base: ProcessParts, access: AccessControl) -> ProviderChoice:
    """The source of VMs. Raises StartError."""
    settings = base.settings
    if not has_local_vms(settings.provider):
        try:
            return ProviderChoice(make_provider(settings.provider, _context(base, access)))
        except ValueError as error:
            raise StartError(f"--provider {settings.provider}: {error}") from error
    machine = LocalMachine(
        gpus=settings.gpus_per_vm,
        device_memory_bytes=settings.device_memory_bytes,
        host="127.0.0.1" if is_wildcard(settings.host) else settings.host,
        agent_command=settings.agent_command or LocalMachine.agent_command,
    )
    vms_dir = (settings.local_dir or base.data_dir).resolve()
    local = LocalProvider(
        vms_dir, base.manager_addresses, machine, settings.capacity, access.make_join_token, base.http_url
    )
    emulated = make_local_provider(settings.provider, local, settings.make_replay_settings(), vms_dir)
    return ProviderChoice(emulated, emulated)


def _context(base: ProcessParts, access: AccessControl) -> ProviderContext:
    """Raises StartError."""
    start = get_agent_start(base.settings.provider)
    boot = None if start is AgentStart.BY_OPERATOR else _boot(base, access, start)
    return ProviderContext(needs_prices=base.settings.max_cost_per_hour is not None, boot_settings=boot)


def _boot(base: ProcessParts, access: AccessControl, start: AgentStart) -> BootSettings:
    """Raises StartError if remote machines could not become VMs of this manager."""
    security, settings = base.security, base.settings
    if security is None:
        raise StartError(
            f"--host {settings.host!r}: VMs of {settings.provider.partition(':')[0]} cannot reach a manager on a "
            "loopback address: give --host 0.0.0.0, and --advertise-host with the address by which they reach it"
        )
    if start is AgentStart.FROM_MANAGER:
        try:
            AgentWheel(settings.agent_wheel).find_wheel()
        except MissingError as error:
            raise StartError(f"--agent-wheel: {error}") from error
    port = base.http_address.rpartition(":")[2]
    hosts = dict.fromkeys(address.strip().rpartition(":")[0] for address in base.manager_addresses.split(","))

    async def join_token(vm_id: str) -> str:
        token = await access.make_join_token(vm_id)
        assert token is not None, "a secure manager has tokens"
        return token

    origin = Origin(
        managers=base.manager_addresses,
        urls=tuple(f"https://{host}:{port}" for host in hosts),
        ca_pem=None if settings.tls_cert is not None else security.authority.ca_pem.decode(),
    )
    return BootSettings(origin=origin, join_token=join_token)


def _job_service(base: ProcessParts, database: Database, events: EventLog, bell: Bell) -> JobService:
    is_shared = Database.is_shared(database.url)
    return JobService(
        database,
        events,
        bell,
        checkpoint_root=base.settings.checkpoint_root(base.data_dir, is_shared=is_shared),
        no_root_because=base.settings.explain_no_checkpoint_root(is_shared=is_shared),
        secrets=base.secrets,
    )
