"""The job controller over a store that the test fills. Agents are their sessions; no process runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rest_world import RestWorld
from varuna_manager.agents.sessions import AgentSession, AgentSessions
from varuna_manager.controllers.job_controller import JobController, JobControllerServices, LaunchDefaults
from varuna_manager.controllers.job_view import SnapshotLoader
from varuna_manager.domain.observed import Rules
from varuna_manager.jobs.stacks import StackService
from varuna_manager.planning.planning import PlanningService
from varuna_manager.planning.rates import RateService
from varuna_manager.world.bell import Bell
from varuna_manager.world.vm_registry import VmRegistry
from varuna_manager.world.world import World


@dataclass(frozen=True)
class ControllerWorld:
    controller: JobController
    loader: SnapshotLoader
    sessions: AgentSessions


def registry_of(vm_ids: Iterable[str]) -> VmRegistry:
    """Of agents that have just connected."""
    registry = VmRegistry()
    for vm_id in vm_ids:
        registry.add_hello(vm_id, rendezvous_port=20_000, workers=())
    return registry


@asynccontextmanager
async def controller_over(
    world: RestWorld,
    vm_ids: Iterable[str],
    *,
    checkpoint_root: str = "file:///checkpoints",
    registry: VmRegistry | None = None,
) -> AsyncIterator[ControllerWorld]:
    """`vm_ids`: of the connected agents, whose VMs are in the store. `registry`: with their Hellos."""
    database, bell, sessions, rules = world.database, Bell(), AgentSessions(), Rules()
    for vm_id in vm_ids:
        sessions.add_session(AgentSession(vm_id, "1", ()))
    rates = RateService(bell)
    loader = SnapshotLoader(database, World(database, registry or registry_of(vm_ids)), rules)
    services = JobControllerServices(
        sessions=sessions,
        planning=PlanningService(),
        rates=rates,
        stacks=StackService(database, sessions, bell),
        events=world.events,
    )
    defaults = LaunchDefaults(checkpoint_root=checkpoint_root, profile_cache_url="")
    controller = JobController(database, loader, services, rules, defaults, period_s=0.5)
    try:
        yield ControllerWorld(controller, loader, sessions)
    finally:
        await rates.close()
