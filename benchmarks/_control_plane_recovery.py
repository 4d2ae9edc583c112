"""`recovery`: how soon the loss of a VM of the example's job is detected, and how soon the job trains again.

Real manager, real agents, real workers, four local VMs. `killed`: SIGKILL to everything of a VM. `silent`: SIGSTOP to
its agent; the machine exists but is silent. For comparison torchrun, four processes of the same model under plain
DDP that save after each step. One of them is killed, and torchrun restarts them all on the same machine. All times are
seconds after the signal, by the clock of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from varuna_client import Client
from varuna_client.demo.director import find_example, job_spec
from varuna_client.demo.processes import DemoProcesses, kill_group
from varuna_proto.rest import EventDocument

VMS = 4
_DEADLINE_S = 120.0
_STEPS_BEFORE = 5
"""The age of a generation before it is disturbed. Its warmed processes are ready by then."""
_SETTLE_S = 12.0
_TORCHRUN = Path(__file__).with_name("_control_plane_torchrun.py")
TARGETS = {"killed": {"seen_s": 0.5, "first_step_s": 1.5}, "silent": {"seen_s": 6.0}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="VMs that are killed, and workers under torchrun")
    parser.add_argument("--silent", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--torchrun", action=argparse.BooleanOptionalAction, default=True)


def run(given: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, DemoProcesses(Path(name)) as processes:
        client = _start(processes, Path(name))
        report["killed"] = [_disturb(client, signal.SIGKILL) for _ in range(given.rounds)]
        if given.silent:
            report["silent"] = [_disturb(client, signal.SIGSTOP)]
        client.close()
        processes.end_all()
    if given.torchrun:
        with tempfile.TemporaryDirectory() as name:
            report["torchrun"] = _torchrun(Path(name), given.rounds)
    return report


def _start(processes: DemoProcesses, folder: Path) -> Client:
    """A client of a manager whose job trains."""
    data, log = folder / "manager", folder / "manager.log"
    flags = ["--data-dir", str(data), "--http-port", "0", "--grpc-port", "0", "--vms", str(VMS), "--no-keep-vms"]
    flags += ["--growth-settle-s", "0.5", "--storm-losses", "1000", "--device-memory-bytes", str(64 * 2**20)]
    processes.start(["-m", "varuna_manager.main", *flags], log)
    _until((data / "manager.json").exists, "the manager")
    client = Client(f"http://{json.loads((data / 'manager.json').read_text())['http']}")
    _until(client.is_ready, "the manager")
    _until(lambda: sum(vm["state"] == "ready" for vm in client.vms()) == VMS, "the VMs")
    client.submit(job_spec(find_example(), 1_000_000))
    return client


def _until(condition: Callable[[], Any], what: str) -> Any:
    give_up = time.monotonic() + _DEADLINE_S
    while not (value := condition()):
        if time.monotonic() > give_up:
            raise RuntimeError(f"{what}: not within {_DEADLINE_S:.0f} s")
        time.sleep(0.05)
    return value


def _training(client: Client) -> dict[str, Any] | None:
    """The generation that trains on all VMs, some steps after its first."""
    generations = client.generations(client.jobs()[0]["id"])
    newest = generations[-1] if generations else None
    if newest is None or newest["kind"] != "training" or newest["state"] != "running":
        return None
    steps = (newest["last_step"] or 0) - (newest["resumed_step"] or 0)
    return dict(newest) if steps >= _STEPS_BEFORE and len(newest["placement"]) == VMS else None


def _disturb(client: Client, number: signal.Signals) -> dict[str, float | None]:
    generation = _until(lambda: _training(client), f"training on {VMS} VMs")
    time.sleep(_SETTLE_S)
    generation = _until(lambda: _training(client), f"training on {VMS} VMs")
    last = max(generation["placement"], key=lambda place: place["rank"])["vm_id"]
    pid = next(vm["ref"]["pid"] for vm in client.vms() if vm["id"] == last)
    known = client.events()[-1]["id"]
    at = time.time()
    if number is signal.SIGKILL:
        kill_group(pid)
    else:
        os.kill(pid, number)
    events: list[EventDocument] = []

    def trains_again() -> bool:
        events.extend(client.events(after=events[-1]["id"] if events else known))
        return any(e["kind"] == "first_step" and e["generation"] > generation["number"] for e in events)

    _until(trains_again, "training after the disturbance")
    return {
        "seen_s": _after(events, at, lambda e: e["vm_id"] == last and e["kind"] in ("vm_gone", "vm_suspect")),
        "given_up_s": _after(events, at, lambda e: e["kind"] == "generation_stopping"),
        "relaunched_s": _after(events, at, lambda e: e["kind"] == "generation_started"),
        "first_step_s": _after(events, at, lambda e: e["kind"] == "first_step"),
    }


def _after(events: list[EventDocument], at: float, what: Callable[[EventDocument], bool]) -> float | None:
    found = [datetime.fromisoformat(event["at"]).timestamp() for event in events if what(event)]
    return round(found[0] - at, 3) if found else None


def _torchrun(folder: Path, rounds: int) -> list[dict[str, float | None]]:
    record, log = folder / "steps", folder / "log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={VMS}"]
    command += [f"--max-restarts={rounds}", str(_TORCHRUN), str(record)]
    # Otherwise torch 2.13's restarted ranks find the addresses of the killed one in the agent's store and wait for it.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, env=environment)
    taken: list[dict[str, float | None]] = []
    try:
        for _ in range(rounds):
            began = len(_lines(record))

            def trains(began: int = began) -> bool:
                assert process.poll() is None, log.read_text()[-2000:]
                return len(_lines(record)) >= began + _STEPS_BEFORE

            _until(trains, "torchrun's training")
            victim = int(_lines(record)[-1].split()[-1])
            at = time.time()
            os.kill(victim, signal.SIGKILL)
            first = _until(partial(_first_without, record, victim), "torchrun's training after the kill")
            taken.append({"first_step_s": round(first - at, 3)})
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()
    return taken


def _lines(record: Path) -> list[str]:
    return record.read_text().splitlines() if record.exists() else []


def _first_without(record: Path, victim: int) -> float | None:
    """When the first step was done by processes that came after the victim."""
    lines = _lines(record)
    last = max(i for i, line in enumerate(lines) if str(victim) in line.split()[2:])
    return float(lines[last + 1].split()[1]) if last + 1 < len(lines) else None


def table(report: dict[str, Any]) -> Table:
    names = ("seen_s", "given_up_s", "relaunched_s", "first_step_s")
    shown = Table(
        "what", "rounds", *(name.removesuffix("_s").replace("_", " ") for name in names), title="seconds after"
    )
    for kind in ("killed", "silent", "torchrun"):
        rounds = report.get(kind) or []
        if rounds:
            cells = []
            for name in names:
                values = [each[name] for each in rounds if each.get(name) is not None]
                target = TARGETS.get(kind, {}).get(name)
                aim = f" (aim {target:g})" if target else ""
                cells.append(f"{statistics.median(values):.2f}, most {max(values):.2f}{aim}" if values else "")
            shown.add_row(kind, str(len(rounds)), *cells)
    return shown
