"""Train the example under random disturbances and compare every loss with those of an undisturbed run.

    make soak                       # or, to have the same disturbances again:
    make soak SOAK="--seed 7"
    make soak SOAK="--kills-for-min 30 --steps 3600"

VMs are killed, taken with notice, frozen and added; workers are killed; the manager is killed and started again. The
same seed plays the same disturbances at the same pace; what they hit depends on the machine.

With `--kills-for-min`, a worker or a VM is killed every 20 to 40 seconds for so many minutes; the oldest VM is spared,
so that some workers live for long. Then nothing may be left over: the manager, the agents and the workers that lived
for long must not have grown, and no process and no shared memory may outlive them. The job has two stages, and so
replicas. Over some thousands of steps losses differ by rounding alone: it doubles about every 250 steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

SUPPORT = Path(__file__).resolve().parents[1] / "support"
sys.path[:0] = [str(SUPPORT), *(str(SUPPORT / room) for room in ("training", "managers", "simulation"))]

from restartable_manager import RestartableManager
from varuna_client import Client
from varuna_client.demo.processes import DemoProcesses, kill_group
from varuna_proto.rest import JobDocument
from varuna_proto.rest_fleet import VmDocument

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gpt"
GLOBAL_BATCH = 10
MOST_VMS = 4
TOLERANCE = 1e-4
"""The largest relative difference at any step."""
PATIENCE_S = 300.0
"""The longest time without a new step."""
OVER = ("succeeded", "failed", "cancelled")
SAMPLE_S = 5.0
MOST_GROWTH = 0.05
"""Of what a process uses, from the middle of a run to its end."""
ROLES = {"varuna_manager.main": "manager", "varuna_agent.main": "agent"}
"""Of a process, by the module that it runs."""
LONG_LIFE_S = 240.0
"""Of a worker: one that is left over after a loss ends, also on the VM that is spared."""
WARM_S = 300.0
"""Longer than an agent keeps a process without a rank."""


class Usage(NamedTuple):
    """What a process uses at some time."""

    at: float
    resident_bytes: int
    descriptors: int
    threads: int


class ResourceUsage:
    """What the managers, agents and workers use, over time."""

    def __init__(self, processes: DemoProcesses) -> None:
        self._processes = processes
        self._samples: dict[tuple[int, str], list[Usage]] = {}
        self._next_at = 0.0

    def add_sample(self, client: Client) -> None:
        """Cheap when the last one is not `SAMPLE_S` old."""
        now = time.monotonic()
        if now < self._next_at:
            return
        self._next_at = now + SAMPLE_S
        workers = {worker["pid"] for vm in client.vms() for worker in vm["workers"]}
        for process in self._processes.list_marked():
            with suppress(psutil.Error, OSError):
                # A worker is a fork of its agent's, with the agent's command line.
                module = next((word for word in process.cmdline() if word in ROLES), None)
                role = "worker" if process.pid in workers else ROLES.get(module or "")
                if role is not None:
                    usage = Usage(now, process.memory_info().rss, process.num_fds(), count_threads(process.pid))
                    self._samples.setdefault((process.pid, role), []).append(usage)

    def find_growth(self, minutes: float) -> list[str]:
        """Processes that lived for at least half of the time, or workers for some minutes, and used more at the end of
        their lives than in the middle."""
        found = []
        for (pid, role), samples in self._samples.items():
            first, last = samples[0].at, samples[-1].at
            if last - first < (min(LONG_LIFE_S, 30.0 * minutes) if role == "worker" else 30.0 * minutes):
                continue
            middle = [one for one in samples if 0.4 <= (one.at - first) / (last - first) <= 0.6]
            end = [one for one in samples if (one.at - first) / (last - first) >= 0.8]
            line = f"{role} {pid}, {(last - first) / 60:.0f} min:"
            for name in ("resident_bytes", "descriptors", "threads"):
                before, after = (median(getattr(one, name) for one in part) for part in (middle, end))
                line += f" {name} {before:.0f} to {after:.0f},"
                if after > before * (1 + MOST_GROWTH) and after - before > 4:
                    found.append(f"{role} {pid} has grown: {name} {before:.0f} to {after:.0f}")
            print(line.rstrip(","))
        return found


def count_threads(pid: int) -> int:
    """Without those of the checkpoint store's client, which come and go with its work."""
    names = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/comm")]
    return sum(not name.startswith("tokio-") for name in names)


class Soak:
    """One job, one manager, and what is done to them."""

    def __init__(self, manager: RestartableManager, chance: random.Random, usage: ResourceUsage) -> None:
        self.manager = manager
        self.chance = chance
        self.usage = usage
        self.spares_oldest = False
        self.began = time.monotonic()
        self.best_step, self.best_at = 0, time.monotonic()

    def submit_job(self, steps: int, plan: dict[str, int], vms: int = 3) -> None:
        """`plan`: what is pinned of it."""
        with self.manager.client() as client:
            client.set_fleet_target(vms)
            client.submit(
                {
                    "name": "soak",
                    "workdir": str(EXAMPLE),
                    "run": f"python train.py --steps {steps}",
                    "global_batch": GLOBAL_BATCH,
                    "plan": plan,
                    "resources": {"min_gpus": 1, "max_gpus": MOST_VMS},
                }
            )

    def play_disturbances(self, number: int) -> None:
        for _ in range(number):
            if self.wait(self.chance.uniform(1.0, 12.0)):
                break
            self.chance.choice(self.list_disturbances())()
        with self.manager.client() as client:
            client.set_fleet_target(MOST_VMS)

    def play_kills(self, minutes: float) -> None:
        self.spares_oldest = True
        until = time.monotonic() + 60.0 * minutes
        while time.monotonic() < until:
            if self.wait(self.chance.uniform(20.0, 40.0)):
                break
            self.chance.choice([self.kill_worker, self.kill_worker, self.kill_vm])()

    def finish_job(self) -> JobDocument:
        """The finished job."""
        while not self.wait(1.0):
            pass
        with self.manager.client() as client:
            return client.job("soak")

    def list_disturbances(self) -> list[Callable[[], None]]:
        often, seldom = [self.kill_vm, self.notice, self.resize, self.restart_manager], [self.kill_worker, self.freeze]
        return [*often, *often, *seldom]

    def wait(self, seconds: float) -> bool:
        """Whether the job is over by then. Fails when it makes no progress."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with self.manager.client() as client:
                job = client.job("soak")
                self.usage.add_sample(client)
            if job["state"] in OVER:
                return True
            if job["step"] > self.best_step:
                self.best_step, self.best_at = job["step"], time.monotonic()
            assert time.monotonic() - self.best_at < PATIENCE_S, f"no step beyond {self.best_step}: {job['reason']}"
            time.sleep(0.2)
        return False

    def log(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  step {self.best_step:4d}  {text}", flush=True)

    # ------------------------------------------------------------ disturbances

    def a_vm(self) -> VmDocument | None:
        with self.manager.client() as client:
            vms = [vm for vm in client.vms() if vm["state"] == "ready"]
        if self.spares_oldest:
            vms = sorted(vms, key=lambda vm: vm["created_at"])[1:]
        return self.chance.choice(vms) if vms else None

    def kill_vm(self) -> None:
        vm = self.a_vm()
        if vm is not None:
            self.log(f"VM {vm['id']} is killed")
            kill_group(vm["ref"]["pid"])

    def notice(self) -> None:
        vm, notice_s = self.a_vm(), self.chance.uniform(0.5, 15.0)
        if vm is not None:
            self.log(f"VM {vm['id']} gets {notice_s:.1f} s notice")
            with self.manager.client() as client:
                client.preempt(vm["id"], notice_s=notice_s)

    def resize(self) -> None:
        target = self.chance.randint(1, MOST_VMS)
        self.log(f"{target} VMs are wanted")
        with self.manager.client() as client:
            client.set_fleet_target(target)

    def restart_manager(self) -> None:
        away_s = self.chance.choice([0.0, 1.0, 5.0, 12.0])
        self.log(f"the manager is killed, and is away for {away_s:.0f} s")
        self.manager.kill()
        vms = [json.loads(path.read_text())["pid"] for path in self.manager.folder.glob("vms/*/vm.json")]
        living = [pid for pid in vms if psutil.pid_exists(pid)]
        if living and self.chance.random() < 0.3:
            self.log("and a VM is killed meanwhile")
            kill_group(self.chance.choice(living))
        time.sleep(away_s)
        self.manager.start()

    def kill_worker(self) -> None:
        vm = self.a_vm()
        pids = [worker["pid"] for worker in vm["workers"] if worker["pid"]] if vm is not None else []
        if pids:
            self.log(f"worker {pids[0]} is killed")
            with suppress(ProcessLookupError):
                os.kill(pids[0], signal.SIGKILL)

    def freeze(self) -> None:
        """Stop all of a VM's processes for a while, like a host that is being moved."""
        vm, frozen_s = self.a_vm(), self.chance.choice([2.0, 7.0, 14.0])
        if vm is None:
            return
        self.log(f"VM {vm['id']} is frozen for {frozen_s:.0f} s")
        agent = psutil.Process(vm["ref"]["pid"])
        processes = [agent, *agent.children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        self.wait(frozen_s)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


# ---------------------------------------------------------------- the verdict


def flaws(client: Client, job: JobDocument, reference: list[float]) -> list[str]:
    """What is wrong; empty when all is well."""
    found = [] if job["state"] == "succeeded" else [f"the job {job['state']}: {job['error']}"]
    losses = {metric["step"]: metric["loss"] for metric in client.metrics("soak")}
    missing = [step for step in range(1, len(reference) + 1) if losses.get(step) is None]
    if missing:
        found.append(f"no loss of steps {missing}")
    wrong = [
        f"step {step}: {losses[step]!r} instead of {expected!r}"
        for step, expected in enumerate(reference, 1)
        if (loss := losses.get(step)) is not None and abs(loss - expected) > TOLERANCE * abs(expected)
    ]
    if wrong:
        found.append(f"{len(wrong)} losses differ, the first at {wrong[0]}")
    generations = client.generations("soak")
    if [generation["number"] for generation in generations] != list(range(1, len(generations) + 1)):
        found.append("generations are not numbered one by one")
    for generation in generations:
        seconds = generation["seconds_without_progress"]
        print(
            f"{generation['number']:3d} {generation['p']}×{generation['d']} m={generation['micro_batch']} "
            f"to step {generation['last_step'] or '-'}, {generation['steps_redone'] or 0} redone, "
            f"{'-' if seconds is None else f'{seconds:.1f}'} s without progress: {generation['reason']}"
        )
    return found


def find_leftovers(manager: RestartableManager, processes: DemoProcesses, shared_memory: set[str]) -> list[str]:
    """What is left of a job that is over, and of VMs that are gone."""
    with manager.client() as client:
        client.set_fleet_target(0)
    give_up = time.monotonic() + WARM_S
    while True:
        left = []
        for process in processes.list_marked():
            with suppress(psutil.Error):
                words = process.cmdline()
                if "varuna_manager.main" not in words and "varuna_client.cli" not in words:
                    left.append(f"process {process.pid} is left: {' '.join(words)[:200]}")
        left += [f"/dev/shm/{name} is left" for name in list_shared_memory() - shared_memory]
        if not left or time.monotonic() > give_up:
            return left
        time.sleep(1.0)


def list_shared_memory() -> set[str]:
    """That of PyTorch and of Python's multiprocessing."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("torch_", "psm_"))}


def reference_losses(steps: int, folder: Path) -> list[float]:
    out = folder / f"reference-{steps}.json"
    command = ["reference.py", "--steps", str(steps), "--global-batch", str(GLOBAL_BATCH), "--out", str(out)]
    if not out.exists():  # a folder may serve again
        subprocess.run([sys.executable, *command], cwd=EXAMPLE, check=True)
    losses: list[float] = json.loads(out.read_text())["losses"]
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: another one each time")
    parser.add_argument("--disturbances", type=int, default=12)
    parser.add_argument("--kills-for-min", type=float, help="kill every 20 to 40 s for so many minutes instead")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--dir", type=Path, help="folder to keep; default: one that is removed when all is well")
    options = parser.parse_args()
    folder = options.dir or Path(tempfile.mkdtemp(prefix="varuna-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {options.seed}, files in {folder}", flush=True)
    reference = reference_losses(options.steps, folder)
    with DemoProcesses(folder) as processes:
        manager = RestartableManager(processes, folder / f"seed{options.seed}")
        manager.folder.mkdir()
        shared_memory = list_shared_memory()
        manager.start()
        usage = ResourceUsage(processes)
        soak = Soak(manager, random.Random(options.seed), usage)
        if options.kills_for_min is None:
            soak.submit_job(options.steps, {})
            soak.play_disturbances(options.disturbances)
        else:
            soak.submit_job(options.steps, {"p": 2}, MOST_VMS)
            soak.play_kills(options.kills_for_min)
        job = soak.finish_job()
        with manager.client() as client:
            found = flaws(client, job, reference)
        if options.kills_for_min is not None:
            found += usage.find_growth(options.kills_for_min)
            found += find_leftovers(manager, processes, shared_memory)
    for flaw in found:
        print(f"FLAW: {flaw}")
    print(f"seed {options.seed}: {'all well' if not found else f'{len(found)} flaws'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
