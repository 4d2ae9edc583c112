"""A VM of a real fleet is made slow. It is found, quarantined and left; once well again, it is taken back on probation.

    .venv/bin/python tests/soak/slow_vm.py [--dir test-artifacts/slow-vm] [--slowdown 3]

Its worker is stopped and continued (SIGSTOP, SIGCONT), so that it takes --slowdown times as long for the same work.
Not part of `make test`: it takes some minutes. Exits 0 when the event log has the whole story: `vm_slow`,
`vm_quarantined`, a generation without the VM, `vm_released`, and a generation with it that trains on.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).resolve().parents[1] / "support"
sys.path[:0] = [str(SUPPORT), *(str(SUPPORT / room) for room in ("training", "managers", "simulation"))]

from manager_world import all_ready
from restartable_manager import RestartableManager
from varuna_client.demo.processes import DemoProcesses
from varuna_client.errors import UnreachableError
from waiting import wait_until

RUNS_S = 0.02
"""How long the worker runs between two stops. It is longer than the turn that the kernel gives a process that has just
slept, because on busy cores such a process gets its turns before all others and is no slower than they are. It is
shorter than an op, so that every op is slowed down alike."""
DEADLINE_S = 600.0
QUARANTINE_S = 20.0
STEPS_AFTER = 40
"""Steps with the VM back: more than a whole window of its compute times."""
MICRO_BATCH = 64
"""A model whose forward takes a core some 40 ms, and its backward twice that."""
TOLD = (
    "vm_slow",
    "vm_well",
    "vm_quarantined",
    "vm_released",
    "generation_stopping",
    "generation_started",
    "first_step",
)
SCRIPT = """
    import torch
    from torch import nn
    from varuna import CutPoint, Varuna
    from varuna.data import Batches

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.cut, self.second = nn.Linear(1024, 1024), CutPoint(), nn.Linear(1024, 1024)

        def forward(self, x):
            for _ in range(8):
                x = self.first(x).tanh()
            return self.second(self.cut(x)).square().mean()

    torch.set_num_threads(1)
    data = [{"x": torch.full((1024,), i / 1024)} for i in range(1024)]
    model = Varuna(Wide(), get_batch_fn=lambda size, device=None: {"x": torch.ones(size, 1024)})
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
    for step, batch in Batches(data, first_step=model.resume() + 1, last_step=1_000_000):
        model.step(batch)
"""


@contextmanager
def slowed(pid: int, slowdown: float) -> Iterator[None]:
    """The process stands still for all but 1/slowdown of the time."""
    over = threading.Event()

    def stop_and_go() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(RUNS_S * (slowdown - 1))
                os.kill(pid, signal.SIGCONT)
                time.sleep(RUNS_S)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("test-artifacts/slow-vm"))
    parser.add_argument("--slowdown", type=float, default=3.0)
    given = parser.parse_args()
    folder = given.dir.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "job").mkdir(parents=True)
    (folder / "job" / "train.py").write_text(textwrap.dedent(SCRIPT))
    with DemoProcesses(folder) as processes:
        manager = RestartableManager(processes, folder, "--vms", "3", "--quarantine-s", f"{QUARANTINE_S:g}")
        manager.start()
        with manager.client() as client:
            wait_until(lambda: all_ready(client, 3), "three VMs")
            spec = {"workdir": str(folder / "job"), "run": "python train.py", "global_batch": 6 * MICRO_BATCH}
            job = client.submit({"name": "wide", "plan": {"p": 1, "micro_batch": MICRO_BATCH}, **spec})["id"]
            wait_until(lambda: client.job(job)["step"] >= 5, "five steps")
            first = client.generations(job)[-1]
            assert first["d"] == 3, first
            victim = first["workers"][-1]
            log(f"making VM {victim['vm_id']} slow (rank {victim['rank']}, process {victim['pid']})")
            with slowed(victim["pid"], given.slowdown):
                found = wait_until(lambda: events(client, job, "vm_quarantined"), "the quarantine")
            without = wait_until(lambda: stepping(client, job, first["number"]), "a step without it")
            wait_until(lambda: events(client, job, "vm_released"), "its probation")
            back = wait_until(lambda: stepping(client, job, without["number"]), "a step with it")
            wait_until(lambda: client.job(job)["step"] >= back["last_step"] + STEPS_AFTER, "more steps")
            for event in client.events():
                if event["kind"] in TOLD:
                    log(f"{event['kind']}: {event['message']}")
            assert [event["vm_id"] for event in found] == [victim["vm_id"]]
            assert victim["vm_id"] not in vms_of(without)
            assert victim["vm_id"] in vms_of(back)
            causes = [generation["end_cause"] for generation in client.generations(job)]
            assert causes == ["profiled", "slow_vm", "growth", None], "it is slow no more, and stays"
            assert len(events(client, job, "vm_quarantined")) == 1
            assert without["steps_redone"] == back["steps_redone"] == 0
            client.cancel(job)
    log(f"VM {victim['vm_id']} was left and taken back, and no step was done twice")
    return 0


def stepping(client: Any, job: str, after: int) -> Any:
    """The newest generation, once it has completed a step and comes after the generation `after`; else None."""
    last = client.generations(job)[-1]
    return last if last["number"] > after and last["last_step"] else None


def vms_of(generation: Any) -> set[str]:
    return {place["vm_id"] for place in generation["placement"]}


def events(client: Any, job: str, kind: str) -> list[Any]:
    """The events of the job or of a VM; none if the manager does not answer in time on a busy machine."""
    with contextlib.suppress(UnreachableError):
        return [event for event in client.events() if event["kind"] == kind and event["job_id"] in (job, None)]
    return []


def log(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
