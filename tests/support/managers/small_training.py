"""A real job that trains until the test ends it, under managers that come and go."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil

from manager_world import all_ready
from restartable_manager import RestartableManager
from varuna_client import Client
from varuna_client.errors import VarunaError
from waiting import wait_until

T = TypeVar("T")

SMALL_MODEL = """
    import os
    import time
    from pathlib import Path

    import torch
    from torch import nn
    from varuna import CutPoint, Varuna
    from varuna.data import Batches

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.cut, self.second = nn.Linear(8, 8), CutPoint(), nn.Linear(8, 1)

        def forward(self, x):
            return self.second(self.cut(self.first(x))).square().mean()

    torch.manual_seed(0)
    data = [{"x": torch.full((8,), float(i))} for i in range(16)]
    model = Varuna(Small(), get_batch_fn=lambda size, device=None: {"x": torch.ones(size, 8)})
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
"""
"""The beginning of a training script, up to its loop; everything that such loops use is imported."""
SCRIPT = (
    SMALL_MODEL
    + """
    for step, batch in Batches(data, first_step=model.resume() + 1, last_step=100_000):
        model.step(batch)
        print("step", step, flush=True)
        if Path("end").exists() and step >= int(Path("end").read_text()):
            break  # on every rank at the same step
        time.sleep(0.02)
"""
)


class SmallTraining:
    """A job that trains until `end`. Requests go to whichever of `managers` leads."""

    def __init__(self, managers: Sequence[RestartableManager], vms: Path, workdir: Path) -> None:
        self._managers = managers
        self._vms = vms
        self._workdir = workdir
        workdir.mkdir()
        (workdir / "train.py").write_text(textwrap.dedent(SCRIPT))

    def ask(self, question: Callable[[Client], T]) -> T:
        """The leader's answer, whoever that is when it comes: on a busy machine a lease may lapse at any time."""

        def answers() -> list[T]:
            for manager in self._managers:
                if manager.is_up:
                    with suppress(VarunaError), manager.client() as client:
                        if client.is_ready():
                            return [question(client)]
            return []

        return wait_until(answers, "a leader's answer")[0]

    def begin(self) -> None:
        wait_until(lambda: self.ask(lambda client: all_ready(client, 2)), "two VMs")
        spec = {"name": "small", "workdir": str(self._workdir), "run": "python train.py", "global_batch": 4}
        spec |= {"plan": {"p": 2, "d": 1, "micro_batch": 1}}
        self.ask(lambda client: client.submit(spec, idempotency_key="small"))
        self.reach(3)
        self._generations = self.ask(lambda client: client.generations("small"))

    def reach(self, step: int) -> None:
        """Wait until a leader knows of this step."""
        wait_until(lambda: self.ask(lambda client: client.job("small")["step"]) >= step, f"step {step}")

    def step(self) -> int:
        """The newest that any rank has printed."""
        texts = [path.read_text() for path in self._vms.glob("*/jobs/*/g*/rank*.log")]
        return max((int(step) for text in texts for step in re.findall(r"^step (\d+)$", text, re.MULTILINE)), default=0)

    def go_on(self, steps: int = 20) -> int:
        """Wait for this many more steps, whoever leads; returns the newest."""
        at_least = self.step() + steps
        wait_until(lambda: self.step() >= at_least, f"{steps} steps")
        return at_least

    def end(self) -> None:
        """End the job, and check that no step was lost or done twice."""
        last = self.step() + 50
        (self._workdir / "end.part").write_text(str(last))
        (self._workdir / "end.part").rename(self._workdir / "end")
        over = ("succeeded", "failed", "cancelled")
        wait_until(lambda: self.ask(lambda client: client.job("small")["state"]) in over, "the job's end")
        job = self.ask(lambda client: client.job("small"))
        after = self.ask(lambda client: client.generations("small"))
        assert (job["state"], job["error"]) == ("succeeded", None)
        assert len(self._generations) == len(after) == 2, "calibration, and one training generation for all of it"
        assert after[-1]["placement"] == self._generations[-1]["placement"]
        metrics = self.ask(lambda client: client.metrics("small"))
        # On a busy machine it may have been past that step before it could read of it.
        assert [metric["step"] for metric in metrics] == list(range(1, max(metrics[-1]["step"], last) + 1))
        assert all(metric["loss"] is not None for metric in metrics)
        pids = [worker["pid"] for generation in after for worker in generation["workers"]]
        wait_until(lambda: not any(map(self._runs, pids)), "the workers' end")

    def _runs(self, pid: int) -> bool:
        """Whether that is a worker, and not another process that has the number by now."""
        try:
            return psutil.Process(pid).cwd() == str(self._workdir)
        except psutil.Error:  # one that has ended, or is another user's
            return False
