"""`rest`: the cost of REST calls on a large store: 10,000 VMs, a job of 1,000,000 steps, 1,000,000 events.

The manager is the real process with SQLite, without agents; each call is made several times over one connection. Its
processor time is the manager's while the calls were made, less what it uses in as much time without any. Times are
from the request to the answer's last byte, and so contain whatever else the manager was doing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import yaml
from _control_plane_store import RANKS_PER_JOB, fill, job_id, sqlite_url, vm_id
from _control_plane_world import ManagerProcess
from rich.table import Table
from sqlalchemy import text

from varuna_manager.db.engine import Database
from varuna_manager.db.job_progress import sum_up_all
from varuna_manager.history.step_metrics import roll_up

LONG_JOB = job_id(0)
_IDLE_S, _MOST_IDLE = 3.0, 20
_AT_REST = 0.2
"""Cores."""
_COUNT = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :count) "
_PAST_JOBS = """INSERT INTO jobs (id, name, spec, state, history, created_at, started_at, finished_at, version)
    SELECT printf('past-%04d', i), printf('past-%04d', i), (SELECT spec FROM jobs WHERE id = :job), 'succeeded', '[]',
           :now - i, :now - i, :now - i, 1 FROM n"""
_PAST_GENERATIONS = """INSERT INTO generations (job_id, number, kind, state, history, plan, candidates, rendezvous_host,
        rendezvous_port, reason, created_at, started_at, last_step, last_step_at, ended_at, resumed_step, version)
    SELECT printf('past-%04d', i), 1, 'training', 'ended', '[]', (SELECT plan FROM generations WHERE job_id = :job),
           '[]', '127.0.0.1', 1, 'the job was submitted', :now - i, :now - i, 100, :now - i, :now - i, 0, 1 FROM n"""
_STEPS = """INSERT INTO metrics (job_id, step, loss, step_s, examples, generation, at)
    SELECT :job, i, 10.0 / (1 + i / 1e5), 1 + (i % 7) / 100.0, 8192, 1, :now - :count + i FROM n"""
_EVENTS = """INSERT INTO events (at, job_id, vm_id, kind, message, data)
    SELECT :now - :count + i, :job, printf('vm-%05d', i % 1000), iif(i % 100, 'checkpoint', 'morph'),
           'something that happened', '{"step": 1}' FROM n"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vms", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=1_000_000, help="steps of one job, and events")
    parser.add_argument("--rounds", type=int, default=10)


def calls(given: argparse.Namespace) -> dict[str, tuple[str, float | None]]:
    """By name: a call, and how many milliseconds of processor time it may take."""
    job = f"jobs/{LONG_JOB}"
    return {
        f"{given.vms:,} VMs, one page": ("vms?limit=10000", 300.0),
        "200 of the VMs": ("vms?limit=200", None),
        "VMs in numbers": ("vms/summary", None),
        "the fleet's cost": ("fleet/cost", 300.0),
        f"{given.jobs:,} jobs, one page": ("jobs?limit=1000", None),
        "one job": (job, None),
        f"chart of {given.rows:,} steps, 2,000 points": (f"{job}/metrics/buckets?points=2000", None),
        f"newest 1,000 of {given.rows:,} events": ("events?order=desc&limit=1000", None),
        "of one VM and kind, 100": ("events?order=desc&limit=100&vm=vm-00100&kind=morph", None),
    }


def run(given: argparse.Namespace) -> dict[str, Any]:
    assert given.vms >= RANKS_PER_JOB, f"--vms {given.vms}: at least one job's {RANKS_PER_JOB}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        busy = given.vms // RANKS_PER_JOB
        fill(sqlite_url(folder), given.vms, busy, "static")
        asyncio.run(_fill_past(folder, given.jobs - busy, given.rows))
        hosts = folder / "hosts.yaml"
        hosts.write_text(yaml.safe_dump({"hosts": [{"name": vm_id(number)} for number in range(given.vms)]}))
        flags = ["--provider", f"static:{hosts}", "--http-port", "0", "--grpc-port", "0"]
        # No agent ever comes, so none may be missed.
        flags += ["--suspect-after-s", "1e6", "--lost-after-s", "2e6", "--lease-s", "3e6", "--hang-minimum-s", "1e9"]
        manager = ManagerProcess(folder, tuple(flags))
        manager.start()
        try:
            return _measure(manager, given)
        finally:
            manager.kill()


async def _fill_past(folder: Path, jobs: int, rows: int) -> None:
    database = Database(sqlite_url(folder))
    values = {"job": LONG_JOB, "now": time.time()}
    async with database.write() as session:
        for statement, count in ((_PAST_JOBS, jobs), (_PAST_GENERATIONS, jobs), (_STEPS, rows), (_EVENTS, rows)):
            into, _, source = statement.partition("SELECT")
            await session.execute(text(f"{into} {_COUNT} SELECT {source}"), {**values, "count": count})
        await roll_up(session, LONG_JOB, 1, rows)
        await session.execute(
            text("UPDATE generations SET last_step = :rows WHERE job_id = :job"), {**values, "rows": rows}
        )
        await sum_up_all(session)
    await database.close()


def _measure(manager: ManagerProcess, given: argparse.Namespace) -> dict[str, Any]:
    address = json.loads((manager.folder / "manager.json").read_text())["http"]
    with httpx.Client(base_url=f"http://{address}/api/v1/", timeout=60.0, trust_env=False) as http:
        for path, _ in calls(given).values():
            http.get(path).raise_for_status()  # queries are compiled
        idle = _idle_cores(manager)
        rows = [
            {"call": name, "path": path, "aim_cpu_ms": aim, **_time(http, manager, path, given.rounds, idle)}
            for name, (path, aim) in calls(given).items()
        ]
    return {"calls": rows, "idle_cores": idle, "rounds": given.rounds}


def _idle_cores(manager: ManagerProcess) -> float:
    """The manager's own use of the processor once the work of starting has ended."""
    for _ in range(_MOST_IDLE):
        before = manager.cpu_s()
        time.sleep(_IDLE_S)
        idle = (manager.cpu_s() - before) / _IDLE_S
        if idle < _AT_REST:
            return idle
    raise RuntimeError(f"the manager uses {idle:.2f} of a core without being asked anything")


def _time(http: httpx.Client, manager: ManagerProcess, path: str, rounds: int, idle: float) -> dict[str, float]:
    took_ms, before, began = [], manager.cpu_s(), time.perf_counter()
    for _ in range(rounds):
        start = time.perf_counter()
        size = len(http.get(path).raise_for_status().content)
        took_ms.append((time.perf_counter() - start) * 1e3)
    elapsed_s = time.perf_counter() - began
    cpu_s = max(manager.cpu_s() - before - idle * elapsed_s, 0.0)
    return {
        "cpu_ms": cpu_s / rounds * 1e3,
        "least_ms": min(took_ms),
        "median_ms": statistics.median(took_ms),
        "bytes": size,
    }


def table(report: dict[str, Any]) -> Table:
    shown = Table("call", "processor ms", "aim", "median ms", "least ms", "KB", title="REST")
    for row in report["calls"]:
        aim = "" if row["aim_cpu_ms"] is None else f"{row['aim_cpu_ms']:g}"
        times = (f"{row[key]:.1f}" for key in ("median_ms", "least_ms"))
        shown.add_row(row["call"], f"{row['cpu_ms']:.1f}", aim, *times, f"{row['bytes'] / 1e3:.0f}")
    shown.caption = (
        f"{report['rounds']} times each; without any call the manager takes {report['idle_cores']:.3f} cores"
    )
    return shown
