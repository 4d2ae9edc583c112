"""A year of a busy manager, week by week, with retention after each: how large and slow its store becomes.

    python benchmarks/compressed_year.py [--scale 1.0] [--rounds N] [--json]

At scale 1: 200 jobs of 2,000 generations, five at a time; 100,000 VMs gone; 5,000,000 events; 4,000,000 steps. After
each week `Retention` deletes by the default settings. Then the calls of the REST API that the dashboard makes, and what
the controllers look at, are timed against a young store: the same jobs and VMs, with ten generations each, the first
events, and nobody gone. Times are of the processor, since the machine may be busy; the aim is twice the young store's.
The store is SQLite.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path += [
    str(Path(__file__).resolve().parents[1] / "tests" / "support" / room) for room in ("", "managers", "simulation")
]

import structlog
from _control_plane_store import profile_json
from rich.console import Console
from rich.table import Table

from migrated_stores import migrated
from rest_world import RestWorld, rest_world
from varuna_manager.controllers.job_view import SnapshotLoader
from varuna_manager.db.engine import Database
from varuna_manager.db.job_progress import sum_up_all
from varuna_manager.domain.observed import Rules
from varuna_manager.domain.retention import DAY_S, KeepDays
from varuna_manager.domain.spec import JobSpec
from varuna_manager.fleet.fleet import job_wants
from varuna_manager.history.retention import Retention
from varuna_manager.jobs.archives import ArchiveService
from varuna_manager.metrics.from_store import StoreMetrics, StoreSamples
from varuna_manager.providers.base import VmOffer
from varuna_manager.world.events import EventLog
from varuna_manager.world.vm_registry import VmRegistry
from varuna_manager.world.world import World
from varuna_proto.plan import Plan

YEAR_S, WEEK_S = 364 * DAY_S, 7 * DAY_S
AT_ONCE, RANKS, STEPS = 5, 4, 10
"""Jobs that run at a time; ranks of a generation, each on a VM of its own; steps of a generation."""
MOST_RATIO = 2.0
MOST_BYTES = 1e9
_YOUNG_GENERATIONS, _YOUNG_EVENTS = 10, 1000
_BY_HAND = 1.0
"""Milliseconds: calls that take less are not compared."""

_COUNT = "WITH RECURSIVE n(i) AS (SELECT :first UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :stop)"
_GENERATIONS = """INSERT INTO generations (job_id, number, kind, state, history, plan, candidates, rendezvous_host,
        rendezvous_port, reason, created_at, started_at, ended_at, end_cause, end_reason, resumed_step, last_step,
        last_loss, last_step_at, seconds_without_progress, steps_redone, downtime, version)
    SELECT :job, i, 'training', 'ended', :history, :plan, :candidates, '10.0.0.7', 29500,
        'VM vm-' || i || ' is gone: its provider no longer has it', :start + i * :each_s, :start + i * :each_s + 5,
        :start + (i + 0.95) * :each_s, 'vm_lost', 'VM vm-' || i || ' is gone: its provider no longer has it',
        i * :steps, (i + 1) * :steps, 2.5, :start + (i + 0.9) * :each_s, 5.0, 1, '[]', 3 FROM n"""
_WORKERS = """INSERT INTO workers (job_id, generation, rank, state, history, vm_id, local_rank, pid, resumed_step,
        cause, exit_code, error_text, stopped_at)
    SELECT :job, i, rank, 'exited', :history,
        'vm-' || max(cast((:start + i * :each_s - :year) * :vm_rate AS INTEGER) - :slot * :ranks - rank, 0), 0, 4242,
        i * :steps, 'generation_ended', 0, '', :start + (i + 0.95) * :each_s
    FROM n, (SELECT 0 AS rank UNION SELECT 1 UNION SELECT 2 UNION SELECT 3)"""
_TRACES = """INSERT INTO traces (job_id, generation, rank, step, at, begin_us, spans)
    SELECT :job, i, rank, i * :steps + 3, :start + (i + 0.5) * :each_s, 0.0, :spans
    FROM n, (SELECT 0 AS rank UNION SELECT 1)"""
_CHECKPOINTS = """INSERT INTO checkpoints (job_id, generation, step, url, total_bytes, at)
    SELECT :job, i, (i + 1) * :steps, 'abfs://checkpoints/' || :job || '/varuna_ckpt_' || i, 1200000000,
        :start + (i + 0.9) * :each_s FROM n"""
_METRICS = """INSERT INTO metrics (job_id, step, loss, step_s, examples, generation, at)
    SELECT :job, i + 1, 10.0 / (1 + i / 1e3), 1 + (i % 7) / 100.0, 8192, i / :steps,
        :start + i * :each_s / :steps FROM n"""
_VMS = """INSERT INTO vms (id, provider, state, history, gpus, device_memory_bytes, host, ref, incarnation, created_at,
        gone_at, reason, quarantines, hangs, request, price_per_hour, version)
    SELECT 'vm-' || i, 'local', 'gone', :vm_history, 1, 17179869184, '10.0.0.7', '{"name": "vm"}', 'incarnation',
        :year + i / :vm_rate, :year + (i + :there) / :vm_rate, 'its provider no longer has it', 0, 0, 'request', 0.9, 4
    FROM n"""
_TOKENS = """INSERT INTO tokens (id, name, secret_sha256, created_at, created_by, expires_at, last_used_at,
        single_use, vm_id)
    SELECT printf('%016x', i), 'provider-vm-' || i, printf('%064x', i), :year + i / :vm_rate, 'the manager',
        :year + i / :vm_rate + 3600, :year + i / :vm_rate + 60, 1, 'vm-' || i FROM n"""
_ENROLMENTS = """INSERT INTO enrolments (vm_id, enrolment, token_id, key_sha256, joined_at)
    SELECT 'vm-' || i, printf('%032x', i), printf('%016x', i), printf('%064x', i), :year + i / :vm_rate + 60 FROM n"""
_EVENTS = """INSERT INTO events (at, job_id, generation, vm_id, kind, message, data)
    SELECT :year + i / :event_rate, CASE WHEN i % 3 THEN :prefix || (:live + i % :at_once) END, i % 2000,
        CASE WHEN i % 2 THEN 'vm-' || cast(i * :vm_per_event AS INTEGER) END,
        CASE i % 8 WHEN 0 THEN 'vm_requested' WHEN 1 THEN 'vm_ready' WHEN 2 THEN 'vm_gone' WHEN 3 THEN 'first_step'
            WHEN 4 THEN 'generation_started' WHEN 5 THEN 'generation_ended' WHEN 6 THEN 'checkpoint'
            ELSE 'decision' END,
        'VM vm-' || i || ' is gone: its provider no longer has it', '{"ref": {"name": "vm"}, "silent_s": 1.25}'
    FROM n"""


@dataclass(frozen=True, kw_only=True)
class YearSize:
    jobs: int
    generations: int
    vms: int
    events: int

    @classmethod
    def of(cls, scale: float, generations: int) -> YearSize:
        return cls(
            jobs=max(round(200 * scale), 2 * AT_ONCE),
            generations=generations,
            vms=max(round(100_000 * scale), 1000),
            events=max(round(5_000_000 * scale), 10_000),
        )


class Year:
    """Writes a store's rows by plain SQL: through the manager itself a year takes days."""

    def __init__(self, path: Path, size: YearSize, now: float) -> None:
        self.size = size
        self.starts_at = now - YEAR_S
        self._store = sqlite3.connect(path, isolation_level=None)
        self._store.execute("PRAGMA synchronous=OFF")
        self._each_s = YEAR_S / size.jobs
        """From job to job."""
        self._life_s = self._each_s * AT_ONCE
        self._texts = {
            "plan": json.dumps(_PLAN.to_document()),
            "candidates": json.dumps([_CANDIDATE] * 24),
            "history": _history(now, "launching", "running", "ended"),
            "vm_history": _history(now, "requested", "ready", "gone"),
            "spans": json.dumps({"ops": [["F", n, 1234.5 * n, 1000.25] for n in range(96)], "all_reduce": []}),
        }

    def add_week(self, number: int) -> None:
        begin, end = self.starts_at + number * WEEK_S, self.starts_at + (number + 1) * WEEK_S
        self._store.execute("BEGIN")
        for job in range(self.size.jobs):
            ends_at = self.starts_at + (job + 1) * self._each_s
            first = max(begin, ends_at - self._life_s)
            if first < min(end, ends_at):
                self._add_part(job, ends_at, first, min(end, ends_at))
        self._add_fleet(begin, end)
        self._store.execute("COMMIT")
        self._store.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # no manager writes a week in one transaction

    def _add_part(self, job: int, ends_at: float, begin: float, end: float) -> None:
        """What a job does between the two times."""
        starts_at, each_s = ends_at - self._life_s, self._life_s / self.size.generations
        is_live = job >= self.size.jobs - AT_ONCE
        self._add_job(job, starts_at, None if is_live else ends_at)
        numbers = (round((begin - starts_at) / each_s), round((end - starts_at) / each_s))
        about = {
            **self._texts,
            "job": f"job-{job}",
            "start": starts_at,
            "each_s": each_s,
            "steps": STEPS,
            "slot": job % AT_ONCE,
            "ranks": RANKS,
            "year": self.starts_at,
            "vm_rate": self.size.vms / YEAR_S,
        }
        for statement in (_GENERATIONS, _WORKERS, _TRACES, _CHECKPOINTS):
            self._insert(statement, numbers, about)
        self._insert(_METRICS, (numbers[0] * STEPS, numbers[1] * STEPS), about)

    def _add_job(self, job: int, starts_at: float, ends_at: float | None) -> None:
        name = f"job-{job}"
        spec = JobSpec(name=name, workdir="/shared", run="python train.py", global_batch=8192)
        row = {
            "id": name,
            "name": name,
            "active_name": name if ends_at is None else None,
            "spec": spec.model_dump_json(),
            "state": "running" if ends_at is None else "succeeded",
            "history": self._texts["history"],
            "created_at": starts_at,
            "started_at": starts_at,
            "finished_at": ends_at,
            "profile_json": profile_json(),
            "profiled_at": starts_at,
            "cancel_saves": 0,
            "version": 1,
        }
        names = ", ".join(row)
        self._store.execute(
            f"INSERT OR IGNORE INTO jobs ({names}) VALUES ({', '.join(f':{name}' for name in row)})", row
        )

    def _add_fleet(self, begin: float, end: float) -> None:
        size, live = self.size, int((begin - self.starts_at) / self._each_s)
        about = {
            **self._texts,
            "year": self.starts_at,
            "vm_rate": size.vms / YEAR_S,
            "there": AT_ONCE * RANKS,
            "event_rate": size.events / YEAR_S,
            "vm_per_event": size.vms / size.events,
            "prefix": "job-",
            "live": live,
            "at_once": AT_ONCE,
        }
        for statement, count in (
            (_VMS, size.vms),
            (_TOKENS, size.vms),
            (_ENROLMENTS, size.vms),
            (_EVENTS, size.events),
        ):
            part = tuple(round((at - self.starts_at) / YEAR_S * count) for at in (begin, end))
            self._insert(statement, (part[0], part[1]), about)

    def _insert(self, statement: str, numbers: tuple[int, int], about: dict[str, Any]) -> None:
        if numbers[0] < numbers[1]:
            into, _, source = statement.partition("SELECT")
            bound = {**about, "first": numbers[0], "stop": numbers[1]}
            self._store.execute(f"{into} {_COUNT} SELECT {source}", bound)

    def finish(self) -> None:
        """The jobs that are not over have a generation that runs, on VMs that are there."""
        self._store.execute(f"UPDATE vms SET state = 'ready', gone_at = NULL WHERE rowid IN (SELECT rowid FROM vms "
                            f"ORDER BY created_at DESC LIMIT {AT_ONCE * RANKS})")  # fmt: skip
        live = "(SELECT id FROM jobs WHERE state = 'running')"
        newest = f"SELECT job_id, max(number) FROM generations WHERE job_id IN {live} GROUP BY job_id"
        self._store.execute(
            "UPDATE generations SET state = 'running', ended_at = NULL, end_cause = NULL, end_reason = NULL "
            f"WHERE (job_id, number) IN ({newest})"
        )
        self._store.execute(f"UPDATE workers SET state = 'running' WHERE (job_id, generation) IN ({newest})")

    def make_young(self, jobs: int) -> None:
        """As many jobs and VMs, and little behind them."""
        now = self.starts_at + YEAR_S
        self._store.execute("BEGIN")
        for job in range(self.size.jobs - jobs, self.size.jobs):
            each_s = self._life_s / self.size.generations
            ends_at = self.starts_at + (job + 1) * self._each_s
            self._add_part(job, ends_at, ends_at - self._life_s, ends_at - self._life_s + _YOUNG_GENERATIONS * each_s)
        self._store.execute("COMMIT")
        begin = now - YEAR_S * max(_YOUNG_EVENTS / self.size.events, AT_ONCE * RANKS / self.size.vms)
        self._store.execute("BEGIN")
        self._add_fleet(begin, now)
        self._store.execute("COMMIT")

    def close(self) -> None:
        self._store.close()


_PLAN = Plan(
    p=2,
    d=2,
    micro_batch=4,
    global_batch=8192,
    stage_starts=(0, 4),
    recompute=(True, False),
    predicted_minibatch_s=1.0,
    examples_per_s=8192.0,
    memory_bytes=(2**33, 2**33),
)
_CANDIDATE = {"p": 2, "d": 2, "micro_batch": 4, "predicted_minibatch_s": 0.41, "fits": True, "reason": "15 % slower"}


def _history(at: float, *states: str) -> str:
    return json.dumps([{"at": at, "state": state, "reason": "every rank has started"} for state in states])


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in (path, path.with_name(f"{path.name}-wal")) if file.exists())


async def live_through(folder: Path, size: YearSize, note: Callable[[str], None]) -> dict[str, Any]:
    """Plays the year. Returns the times of retention."""
    path, now = folder / "manager.db", time.time()
    migrated(path)
    year, database = Year(path, size, now), Database(f"sqlite:///{path}")
    today = year.starts_at
    events, archives = EventLog(database, lambda: today), ArchiveService(database, folder / "archives")
    retention = Retention(database, events, archives, KeepDays(), now=lambda: today)
    held_ms, sizes, filling_s, deleting_s = [], [], 0.0, 0.0
    for week in range(52):
        began = time.perf_counter()
        year.add_week(week)
        filling_s += time.perf_counter() - began
        today = year.starts_at + (week + 1) * WEEK_S
        began = time.perf_counter()
        while await retention.delete_some():
            held_ms.append(retention.held_s * 1e3)
        deleting_s += time.perf_counter() - began
        sizes.append(size_of(path))
        note(f"week {week + 1}: {sizes[-1] / 1e6:.0f} MB, {len(held_ms)} batches")
    year.finish()
    async with database.write() as session:
        await sum_up_all(session)
    await database.close()
    year.close()
    held_ms.sort()
    return {
        "filling_s": filling_s,
        "deleting_s": deleting_s,
        "batches": len(held_ms),
        "writer_held_ms": {
            "median": statistics.median(held_ms),
            "99 %": held_ms[int(len(held_ms) * 0.99)],
            "most": held_ms[-1],
        },
        "most_bytes": max(sizes),
        "rows": _rows(path),
    }


def _rows(path: Path) -> dict[str, int]:
    store = sqlite3.connect(path)
    names = ("jobs", "generations", "workers", "metrics", "traces", "events", "vms", "tokens")
    found = {name: store.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in names}
    store.close()
    return found


async def be_young(folder: Path, size: YearSize, jobs: int) -> None:
    path = folder / "manager.db"
    migrated(path)
    year = Year(path, size, time.time())
    year.make_young(jobs)
    year.finish()
    year.close()
    database = Database(f"sqlite:///{path}")
    async with database.write() as session:
        await sum_up_all(session)
    await database.close()


# ---------------------------------------------------------------- what is timed


def calls(job: str) -> list[str]:
    """The requests of the dashboard's pages and of the commands."""
    about = f"jobs/{job}"
    return [
        "jobs",
        about,
        f"{about}/generations?brief=true&order=desc&limit=50",
        f"{about}/generations?brief=true&order=desc&limit=100",
        f"{about}/generations?brief=true&order=desc&limit=1000",
        f"{about}/plans?limit=30",
        f"{about}/plans/newest",
        f"{about}/metrics/buckets?points=400",
        f"{about}/time",
        f"{about}/cost?vms=100",
        f"{about}/cost",
        f"{about}/pipeline",
        f"events?job={job}&order=desc&limit=100",
        "events?order=desc&limit=100",
        "events?kind=vm_gone&order=desc&limit=100",
        "events/kinds",
        "vms?gone=false&limit=200",
        "vms/summary",
        "fleet",
        "fleet/history?points=180",
        "fleet/cost",
        "jobs?state=running",
    ]


def looked_at(world: RestWorld, job: str) -> dict[str, Callable[[], Awaitable[Any]]]:
    """What is timed over one store, by its name."""
    loader = SnapshotLoader(world.database, World(world.database, VmRegistry()), Rules())
    figures = StoreMetrics(world.database, "local")

    async def wants() -> None:
        async with world.database.read() as session:
            await job_wants(session, [VmOffer(gpus=1)])

    async def ask(path: str) -> None:
        (await world.ask("GET", f"/api/v1/{path}")).raise_for_status()

    return {
        "look: jobs": loader.load_snapshot,
        "look: what the fleet wants": wants,
        "metrics": lambda: figures.collect_samples(StoreSamples()),
        **{f"GET {path.replace(job, '{job}')}": partial(ask, path) for path in calls(job)},
    }


async def measure(old: Path, young: Path, job: str, rounds: int) -> list[dict[str, Any]]:
    """The median milliseconds of the processor. The stores take turns, so that other programs disturb both alike."""
    rows = []
    async with rest_world(old) as one, rest_world(young) as other:
        of_young = looked_at(other, job)
        for name, call in looked_at(one, job).items():
            for _ in range(3):
                await call()
                await of_young[name]()
            pairs = [(await _time(call), await _time(of_young[name])) for _ in range(rounds)]
            old_ms, young_ms = (statistics.median(side) for side in zip(*pairs, strict=True))
            rows.append({"call": name, "old_ms": old_ms, "young_ms": young_ms, "ratio": old_ms / young_ms})
    return rows


async def _time(call: Callable[[], Awaitable[Any]]) -> float:
    began = time.process_time()
    await call()
    return (time.process_time() - began) * 1e3


async def run(scale: float, generations: int, rounds: int, note: Callable[[str], None]) -> dict[str, Any]:
    size = YearSize.of(scale, generations)
    with tempfile.TemporaryDirectory(prefix="varuna-year-") as name:
        old, young = Path(name) / "old", Path(name) / "young"
        for folder in (old, young):
            folder.mkdir()
        retention = await live_through(old, size, note)
        await be_young(young, size, retention["rows"]["jobs"])
        job = f"job-{size.jobs - 1}"
        rows = await measure(old, young, job, rounds)
    return {"scale": scale, "size": vars(size), "retention": retention, "calls": rows, "rounds": rounds}


def tables(report: dict[str, Any]) -> list[Table | str]:
    shown = Table("call", "old ms", "young ms", "ratio", title="A year's store against a young one (processor time)")
    for row in report["calls"]:
        too_slow = row["ratio"] > MOST_RATIO and row["old_ms"] > _BY_HAND
        times = (f"{row['old_ms']:.1f}", f"{row['young_ms']:.1f}")
        shown.add_row(row["call"], *times, f"{row['ratio']:.2f}{' !' if too_slow else ''}")
    found = report["retention"]
    batch = ", ".join(f"{name} {ms:.0f}" for name, ms in found["writer_held_ms"].items())
    kept = ", ".join(f"{count:,} {name}" for name, count in found["rows"].items())
    return [
        f"{report['size']}; kept at the end: {kept}",
        f"largest file: {found['most_bytes'] / 1e6:,.0f} MB of {MOST_BYTES / 1e6:,.0f}",
        f"{found['batches']:,} batches of retention took {found['deleting_s']:.0f} s; ms with the writer: {batch}",
        shown,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="of the year's jobs, VMs and events")
    parser.add_argument("--generations", type=int, default=2000, help="of a job")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    progress = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    report = asyncio.run(run(given.scale, given.generations, given.rounds, progress))
    if given.json:
        print(json.dumps(report, indent=2))
        return
    for part in tables(report):
        Console().print(part)


if __name__ == "__main__":
    main()
