"""`heartbeats` and `reconnect`: many agents on one manager.

A heartbeat is handled when its acknowledgement is back at the agent. Every agent has a connection, and so a TLS
session, of its own; all agents of the fleet share one process (two with 10,000), whose own work is in the times, too.
Jobs of 100 workers train on all of them: the store, the decisions and the reports of steps are real.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from _control_plane_store import RANKS_PER_JOB
from _control_plane_world import Fleet, ManagerProcess, percentile, world
from rich.table import Table


class Load(NamedTuple):
    agents: int
    interval_s: float
    target_p99_ms: float
    target_cpu: float = 0.5

    @property
    def name(self) -> str:
        return f"{self.agents:,} agents, a heartbeat each {self.interval_s:g} s"


LOADS = (Load(1_000, 1.0, 20.0), Load(10_000, 10.0, 150.0))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=20.0, help="for which heartbeats are measured")
    parser.add_argument("--plain", action="store_true", help="without TLS")
    parser.add_argument(
        "--agents", type=int, action="append", choices=[load.agents for load in LOADS], help="only so many"
    )
    parser.add_argument("--reconnect", action=argparse.BooleanOptionalAction, default=True)


def run(given: argparse.Namespace) -> dict[str, Any]:
    rows, back = [], []
    for load in [load for load in LOADS if given.agents is None or load.agents in given.agents]:
        with tempfile.TemporaryDirectory() as name:
            jobs = load.agents // RANKS_PER_JOB
            processes = 1 if load.agents <= 1000 else 2
            with world(Path(name), load.agents, jobs, load.interval_s, mtls=not given.plain, processes=processes) as (
                manager,
                fleet,
            ):
                time.sleep(load.interval_s + 5.0)  # until the work of connecting has ended
                rows.append(_heartbeats(load, manager, fleet, given.seconds))
                if given.reconnect:
                    back.append(_reconnect(load, manager, fleet))
    return {"mtls": not given.plain, "heartbeats": rows, "reconnect": back}


def _heartbeats(load: Load, manager: ManagerProcess, fleet: Fleet, seconds: float) -> dict[str, Any]:
    fleet.ask("reset")
    began, cpu_s, agents_cpu_s = time.monotonic(), manager.cpu_s(), fleet.cpu_s()
    time.sleep(seconds)
    took_s, cpu_s, agents_cpu_s = time.monotonic() - began, manager.cpu_s() - cpu_s, fleet.cpu_s() - agents_cpu_s
    answers = fleet.ask("report")
    handled_ms = [1e3 * value for answer in answers for value in answer["handled_s"]]
    lost = [reason for answer in answers for reason in answer["lost"]]
    return {
        "load": load.name,
        "heartbeats_per_s": len(handled_ms) / took_s,
        "p50_ms": percentile(handled_ms, 0.5),
        "p99_ms": percentile(handled_ms, 0.99),
        "most_ms": max(handled_ms),
        "target_p99_ms": load.target_p99_ms,
        "cores": cpu_s / took_s,
        "target_cores": load.target_cpu,
        "agents_cores": agents_cpu_s / took_s,
        "memory_mb": manager.memory_mb(),
        "streams_lost": len(lost),
        "first_lost": lost[:1],
    }


def _reconnect(load: Load, manager: ManagerProcess, fleet: Fleet) -> dict[str, Any]:
    """SIGKILL the manager, start another, and wait until all agents are back."""
    fleet.ask("reset")
    manager.kill()
    killed = time.monotonic()
    manager.start()
    serves = time.monotonic()
    fleet.await_connected(load.agents)
    back, agents_cpu_s = time.monotonic(), fleet.cpu_s()
    answers = fleet.ask("report")
    away_s = [value for answer in answers for value in answer["away_s"]]
    welcomed_ms = [1e3 * value for answer in answers for value in answer["welcomed_s"]]
    return {
        "agents": load.agents,
        "killed_to_serving_s": serves - killed,
        "serving_to_all_back_s": back - serves,
        "away_p50_s": percentile(away_s, 0.5),
        "away_most_s": max(away_s),
        "hello_to_welcome_p50_ms": percentile(welcomed_ms, 0.5),
        "hello_to_welcome_p99_ms": percentile(welcomed_ms, 0.99),
        "dials": sum(answer["dials"] for answer in answers),
        "cpu_s": manager.cpu_s(),
        "agents_cpu_s": agents_cpu_s,
        "memory_mb": manager.memory_mb(),
    }


def table(report: dict[str, Any]) -> Table:
    kind = "mutual TLS" if report["mtls"] else "no TLS"
    shown = Table(
        "load", "per s", "p50 ms", "p99 ms", "aim", "cores", "aim", "agents' cores", "MB", title=f"heartbeats, {kind}"
    )
    for row in report["heartbeats"]:
        figures = (f"{row[key]:.1f}" for key in ("heartbeats_per_s", "p50_ms", "p99_ms", "target_p99_ms"))
        shown.add_row(
            row["load"],
            *figures,
            f"{row['cores']:.2f}",
            f"{row['target_cores']:g}",
            f"{row['agents_cores']:.2f}",
            f"{row['memory_mb']:.0f}",
        )
    shown.caption = "\n".join(
        f"{back['agents']:,} agents back {back['serving_to_all_back_s']:.1f} s after the new manager served, which was "
        f"{back['killed_to_serving_s']:.1f} s after the old one was killed; longest away {back['away_most_s']:.1f} s; "
        f"Hello to Welcome p50 {back['hello_to_welcome_p50_ms']:.0f}, p99 {back['hello_to_welcome_p99_ms']:.0f} ms; "
        f"manager {back['cpu_s']:.1f} s, agents {back['agents_cpu_s']:.1f} s of processor, {back['memory_mb']:.0f} MB"
        for back in report["reconnect"]
    )
    return shown
