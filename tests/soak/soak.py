"""Train the example under random disturbances and compare every loss with those of an undisturbed run.

    make soak                       # or, to have the same disturbances again:
    make soak SOAK="--seed 7"

VMs are killed, taken with notice, frozen and added; workers are killed; the manager is killed and started again. The
same seed plays the same disturbances at the same pace; what they meet is up to the machine.
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

import psutil

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / "e2e"), str(TESTS / "support")]

from restartable_manager import RestartableManager
from varuna_client import Client
from varuna_client.demo.processes import DemoProcesses, kill_group
from varuna_client.documents import Job, Vm

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gpt"
GLOBAL_BATCH = 10
MOST_VMS = 4
TOLERANCE = 1e-4
"""Relative, at every step."""
PATIENCE_S = 300.0
"""Without a new step, at any time."""
OVER = ("succeeded", "failed", "cancelled")


class Soak:
    """One job, one manager, and what is done to them."""

    def __init__(self, manager: RestartableManager, chance: random.Random) -> None:
        self.manager = manager
        self.chance = chance
        self.began = time.monotonic()
        self.best_step, self.best_at = 0, time.monotonic()

    def play(self, disturbances: int, steps: int) -> Job:
        """The finished job."""
        with self.manager.client() as client:
            client.set_fleet_target(3)
            client.submit(
                {
                    "name": "soak",
                    "workdir": str(EXAMPLE),
                    "run": f"python train.py --steps {steps}",
                    "global_batch": GLOBAL_BATCH,
                    "resources": {"min_gpus": 1, "max_gpus": MOST_VMS},
                }
            )
        for _ in range(disturbances):
            if self.wait(self.chance.uniform(1.0, 12.0)):
                break
            self.chance.choice(self.repertoire())()
        with self.manager.client() as client:
            client.set_fleet_target(MOST_VMS)
        while not self.wait(1.0):
            pass
        with self.manager.client() as client:
            return client.job("soak")

    def repertoire(self) -> list[Callable[[], None]]:
        often, seldom = [self.kill_vm, self.notice, self.resize, self.restart_manager], [self.kill_worker, self.freeze]
        return [*often, *often, *seldom]

    def wait(self, seconds: float) -> bool:
        """Whether the job is over by then. Fails when it makes no progress."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with self.manager.client() as client:
                job = client.job("soak")
            if job["state"] in OVER:
                return True
            if job["step"] > self.best_step:
                self.best_step, self.best_at = job["step"], time.monotonic()
            assert time.monotonic() - self.best_at < PATIENCE_S, f"no step beyond {self.best_step}: {job['reason']}"
            time.sleep(0.2)
        return False

    def tell(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  step {self.best_step:4d}  {text}", flush=True)

    # ------------------------------------------------------------ disturbances

    def a_vm(self) -> Vm | None:
        with self.manager.client() as client:
            vms = [vm for vm in client.vms() if vm["state"] == "ready"]
        return self.chance.choice(vms) if vms else None

    def kill_vm(self) -> None:
        vm = self.a_vm()
        if vm is not None:
            self.tell(f"VM {vm['id']} is killed")
            kill_group(vm["ref"]["pid"])

    def notice(self) -> None:
        vm, notice_s = self.a_vm(), self.chance.uniform(0.5, 15.0)
        if vm is not None:
            self.tell(f"VM {vm['id']} gets {notice_s:.1f} s notice")
            with self.manager.client() as client:
                client.preempt(vm["id"], notice_s=notice_s)

    def resize(self) -> None:
        target = self.chance.randint(1, MOST_VMS)
        self.tell(f"{target} VMs are wanted")
        with self.manager.client() as client:
            client.set_fleet_target(target)

    def restart_manager(self) -> None:
        away_s = self.chance.choice([0.0, 1.0, 5.0, 12.0])
        self.tell(f"the manager is killed, and is away for {away_s:.0f} s")
        self.manager.kill()
        vms = [json.loads(path.read_text())["pid"] for path in self.manager.folder.glob("vms/*/vm.json")]
        living = [pid for pid in vms if psutil.pid_exists(pid)]
        if living and self.chance.random() < 0.3:
            self.tell("and a VM is killed meanwhile")
            kill_group(self.chance.choice(living))
        time.sleep(away_s)
        self.manager.start()

    def kill_worker(self) -> None:
        vm = self.a_vm()
        pids = [worker["pid"] for worker in vm["workers"] if worker["pid"]] if vm is not None else []
        if pids:
            self.tell(f"worker {pids[0]} is killed")
            with suppress(ProcessLookupError):
                os.kill(pids[0], signal.SIGKILL)

    def freeze(self) -> None:
        """Stop all of a VM's processes for a while, as a host does that is being moved."""
        vm, frozen_s = self.a_vm(), self.chance.choice([2.0, 7.0, 14.0])
        if vm is None:
            return
        self.tell(f"VM {vm['id']} is frozen for {frozen_s:.0f} s")
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


def flaws(client: Client, job: Job, reference: list[float]) -> list[str]:
    """What is not as it must be; empty when all is well."""
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
        manager.start()
        job = Soak(manager, random.Random(options.seed)).play(options.disturbances, options.steps)
        with manager.client() as client:
            found = flaws(client, job, reference)
    for flaw in found:
        print(f"FLAW: {flaw}")
    print(f"seed {options.seed}: {'all well' if not found else f'{len(found)} flaws'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
