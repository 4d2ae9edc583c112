"""A VM of a real fleet is made slow: it is found, quarantined, and the job goes on without it.

    .venv/bin/python tests/soak/slow_vm.py [--dir test-artifacts/slow-vm] [--slowdown 3]

Its worker is stopped and continued every few milliseconds (SIGSTOP, SIGCONT), so that it takes --slowdown times as
long for the same work. Not part of `make test`: it takes more than a minute, and on a machine whose cores are busy with
other things every VM is slow now and then. Exits 0 when the event log has `vm_slow`, `vm_quarantined` and a generation
without it.
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

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/e2e")]

from manager_world import all_ready, wait_until  # noqa: E402
from restartable_manager import RestartableManager  # noqa: E402
from varuna_client.demo.processes import DemoProcesses  # noqa: E402

RUNS_S = 0.004
"""At a time; in between it stands still."""
DEADLINE_S = 240.0
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
    data = [{"x": torch.full((1024,), i / 256)} for i in range(256)]
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
        manager = RestartableManager(processes, folder, "--vms", "3", "--slow-looks", "2")
        manager.start()
        with manager.client() as client:
            wait_until(lambda: all_ready(client, 3), "three VMs")
            spec = {"workdir": str(folder / "job"), "run": "python train.py", "global_batch": 48}
            job = client.submit({"name": "wide", "plan": {"p": 1, "micro_batch": 4}, **spec})["id"]
            wait_until(lambda: client.job(job)["step"] >= 5, "five steps", DEADLINE_S)
            first = client.generations(job)[-1]
            assert first["d"] == 3, first
            victim = first["workers"][-1]
            say(f"making VM {victim['vm_id']} slow (rank {victim['rank']}, process {victim['pid']})")
            with slowed(victim["pid"], given.slowdown):
                found = wait_until(lambda: events(client, job, "vm_quarantined"), "the quarantine", DEADLINE_S)
            after = wait_until(
                lambda: (
                    (last := client.generations(job)[-1])["number"] > first["number"] and last["last_step"] and last
                ),
                "a step of the next generation",
                DEADLINE_S,
            )
            for event in client.events(job):
                if event["kind"] in ("vm_slow", "vm_quarantined", "generation_stopping", "generation_started"):
                    say(f"{event['kind']}: {event['message']}")
            assert [event["vm_id"] for event in found] == [victim["vm_id"]]
            assert victim["vm_id"] not in {place["vm_id"] for place in after["placement"]}
            assert after["steps_redone"] == 0
            client.cancel(job)
    say(f"VM {victim['vm_id']} was left, and no step was done twice")
    return 0


def events(client: Any, job: str, kind: str) -> list[Any]:
    return [event for event in client.events(job) if event["kind"] == kind]


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
