"""`heartbeats` and `reconnect`: many agents on one manager.

A heartbeat is handled when its acknowledgement is back at the agent. Every agent has a channel, and so a connection and
a TLS session, of its own; all agents of the fleet share one process (two with 10,000), whose own work is in the times,
too. 100 of each 1,000 VMs' jobs train on them: the store, the decisions and the reports of steps are as in earnest.
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
    parser.add_argument("--most-agents", type=int, default=1_000, help="10000 needs 5 GB and some minutes")
    parser.add_argument("--reconnect", action=argparse.BooleanOptionalAction, default=True)


def run(given: argparse.Namespace) -> dict[str, Any]:
    rows, back = [], None
    loads = [load for load in LOADS if load.agents <= given.most_agents]
    for load in loads:
        with tempfile.TemporaryDirectory() as name:
            jobs = load.agents // RANKS_PER_JOB
            processes = 1 if load.agents <= 1000 else 2
            with world(Path(name), load.agents, jobs, load.interval_s, mtls=not given.plain, processes=processes) as (
                manager,
                fleet,
            ):
                time.sleep(load.interval_s + 5.0)  # what connecting has set going comes to rest
                rows.append(_heartbeats(load, manager, fleet, given.seconds))
                if given.reconnect and load == loads[-1]:
                    back = _reconnect(load, manager, fleet)
    return {"mtls": not given.plain, "heartbeats": rows, "reconnect": back}


def _heartbeats(load: Load, manager: ManagerProcess, fleet: Fleet, seconds: float) -> dict[str, Any]:
    fleet.ask("reset")
    began, cpu_s = time.monotonic(), manager.cpu_s()
    time.sleep(seconds)
    took_s, cpu_s = time.monotonic() - began, manager.cpu_s() - cpu_s
    answers = fleet.ask("tell")
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
        "memory_mb": manager.memory_mb(),
        "streams_lost": len(lost),
        "first_lost": lost[:1],
    }


def _reconnect(load: Load, manager: ManagerProcess, fleet: Fleet) -> dict[str, Any]:
    """SIGKILL the manager, start another, and wait until all agents are back."""
    manager.kill()
    time.sleep(1.0)
    fleet.ask("reset")
    manager.start()
    began, cpu_s = time.monotonic(), manager.cpu_s()
    fleet.await_connected(load.agents)
    back_s = time.monotonic() - began
    answers = fleet.ask("tell")
    welcomed_ms = [1e3 * value for answer in answers for value in answer["welcomed_s"]]
    return {
        "agents": load.agents,
        "back_s": back_s,
        "hello_to_welcome_p50_ms": percentile(welcomed_ms, 0.5),
        "hello_to_welcome_p99_ms": percentile(welcomed_ms, 0.99),
        "dials": sum(answer["dials"] for answer in answers),
        "cpu_s": manager.cpu_s() - cpu_s,
        "memory_mb": manager.memory_mb(),
    }


def table(report: dict[str, Any]) -> Table:
    kind = "mutual TLS" if report["mtls"] else "no TLS"
    shown = Table("load", "per s", "p50 ms", "p99 ms", "aim", "cores", "aim", "MB", title=f"heartbeats, {kind}")
    for row in report["heartbeats"]:
        figures = (f"{row[key]:.1f}" for key in ("heartbeats_per_s", "p50_ms", "p99_ms", "target_p99_ms"))
        shown.add_row(
            row["load"], *figures, f"{row['cores']:.2f}", f"{row['target_cores']:g}", f"{row['memory_mb']:.0f}"
        )
    back = report["reconnect"]
    if back is not None:
        shown.caption = (
            f"{back['agents']:,} agents back {back['back_s']:.1f} s after the new manager served; Hello to Welcome p50 "
            f"{back['hello_to_welcome_p50_ms']:.0f}, p99 {back['hello_to_welcome_p99_ms']:.0f} ms; "
            f"{back['cpu_s']:.1f} s of processor, {back['memory_mb']:.0f} MB"
        )
    return shown
