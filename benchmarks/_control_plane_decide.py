"""`decide`: how long the job controller takes for one pass over a whole fleet, and how much memory it needs.

The store holds the VMs and jobs, every VM has sent a heartbeat a moment ago, and no decision is to be made: that is
what the manager does again and again. One look is `load` (the store, and what is known of each VM, as the decisions'
views), then every job's decision, then the comparison with the commands that each agent has been sent. The first load
is that of a manager that has just started: it remembers nothing yet.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from _control_plane_store import RANKS_PER_JOB, fill, job_id, sqlite_url, vm_id
from rich.table import Table

from varuna_manager.agents.sessions import AgentSession, AgentSessions
from varuna_manager.controllers.job_controller import JobController, JobControllerServices, LaunchDefaults
from varuna_manager.controllers.job_view import SnapshotLoader
from varuna_manager.db.engine import Database
from varuna_manager.domain.observed import Rules
from varuna_manager.jobs.stacks import StackService
from varuna_manager.main import collect_garbage_rarely
from varuna_manager.planning.planning import PlanningService
from varuna_manager.planning.rates import RateService
from varuna_manager.world.bell import Bell
from varuna_manager.world.events import EventLog
from varuna_manager.world.vm_registry import Health, VmRegistry
from varuna_manager.world.world import World

TARGET_MS = 100.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vms", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=15)


def run(given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        fill(sqlite_url(Path(folder)), given.vms, given.jobs, "local")
        return asyncio.run(_measure(Path(folder), given))


async def _measure(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    collect_garbage_rarely()
    database = Database(sqlite_url(folder))
    registry, sessions, rules = VmRegistry(), AgentSessions(), Rules(hang_minimum_s=1e9)
    for number in range(given.vms):
        job, rank = divmod(number, RANKS_PER_JOB)
        workers = [Health(job_id=job_id(job), generation=1, rank=rank, step=1)] if job < given.jobs else []
        registry.add_hello(vm_id(number), rendezvous_port=20_000, workers=workers)
        sessions.add_session(AgentSession(vm_id(number), "simulated", [(w.job_id, 1) for w in workers]))
    loader = SnapshotLoader(database, World(database, registry), rules)
    planning = PlanningService(cache_dir=folder / "numba")
    bell = Bell()
    rates, stacks = RateService(bell, cache_dir=folder / "numba"), StackService(database, sessions, bell)
    events = EventLog(database)
    controller = JobController(
        database,
        loader,
        JobControllerServices(sessions=sessions, planning=planning, rates=rates, stacks=stacks, events=events),
        rules,
        LaunchDefaults(checkpoint_root=f"file://{folder}/checkpoints", profile_cache_url=""),
        period_s=0.5,
    )
    before = psutil.Process().memory_info().rss
    began = time.perf_counter()
    await loader.load_snapshot()
    first_ms = (time.perf_counter() - began) * 1e3
    await controller.reconcile_once()  # compiles queries, plans once
    loads, looks = [], []
    for _ in range(given.rounds):
        began = time.perf_counter()
        snapshot = await loader.load_snapshot()
        loaded = time.perf_counter()
        del snapshot
        again = time.perf_counter()
        await controller.reconcile_once()
        looks.append((time.perf_counter() - again) * 1e3)
        loads.append((loaded - began) * 1e3)
    await rates.close()
    memory = psutil.Process().memory_info().rss - before
    await database.close()
    return {
        "vms": given.vms,
        "jobs": given.jobs,
        "first_load_ms": first_ms,
        "load_ms": {"least": min(loads), "median": statistics.median(loads)},
        "look_ms": {"least": min(looks), "median": statistics.median(looks), "most": max(looks)},
        "memory_mb": memory / 1e6,
        "target_ms": TARGET_MS,
    }


def table(report: dict[str, Any]) -> Table:
    shown = Table("what", "least ms", "median ms", title=f"{report['vms']:,} VMs, {report['jobs']} jobs")
    shown.add_row("first load", f"{report['first_load_ms']:.0f}", "")
    shown.add_row("load", *(f"{report['load_ms'][key]:.0f}" for key in ("least", "median")))
    shown.add_row("load, decide, compare", *(f"{report['look_ms'][key]:.0f}" for key in ("least", "median")))
    shown.caption = (
        f"{report['memory_mb']:.0f} MB more than before the first look; to reach: {report['target_ms']:g} ms"
    )
    return shown
