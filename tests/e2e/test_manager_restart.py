"""The manager is killed while a real job trains under real agents: training goes on, and is adopted."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from manager_world import all_ready, wait_until
from restartable_manager import RestartableManager
from varuna_client.demo.processes import DemoProcesses

pytestmark = [pytest.mark.xdist_group("e2e"), pytest.mark.timeout(240)]

SCRIPT = """
    import time
    import torch
    from pathlib import Path
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
    end = Path("end")
    for step, batch in Batches(data, first_step=model.resume() + 1, last_step=100_000):
        model.step(batch)
        print("step", step, flush=True)
        if end.exists() and step >= int(end.read_text()):
            break  # on every rank at the same step
        time.sleep(0.02)
"""


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[RestartableManager]:
    folder = tmp_path / "manager"
    folder.mkdir()
    with DemoProcesses(tmp_path) as processes:
        manager = RestartableManager(processes, folder, "--vms", "2")
        manager.start()
        yield manager


def steps_in_logs(manager: RestartableManager) -> int:
    """The newest step that any rank has printed."""
    texts = [path.read_text() for path in manager.folder.glob("vms/*/jobs/*/g*/rank*.log")]
    return max((int(step) for text in texts for step in re.findall(r"^step (\d+)$", text, re.MULTILINE)), default=0)


def test_training_goes_on_while_the_manager_is_dead_and_is_adopted_by_the_next(
    manager: RestartableManager, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    with manager.client() as client:
        wait_until(lambda: all_ready(client, 2), "two VMs")
        client.submit({"name": "small", "workdir": str(tmp_path), "run": "python train.py", "global_batch": 4})
        wait_until(lambda: client.job("small")["step"] >= 3, "three steps")
        before = client.generations("small")
    manager.kill()
    at_death = steps_in_logs(manager)
    wait_until(lambda: steps_in_logs(manager) >= at_death + 20, "steps without a manager")
    manager.start()
    with manager.client() as client:
        wait_until(lambda: client.job("small")["step"] >= at_death + 20, "the steps that were made meanwhile")
        adopted = client.generations("small")
        last = steps_in_logs(manager) + 50
        (tmp_path / "end.part").write_text(str(last))
        (tmp_path / "end.part").rename(tmp_path / "end")
        wait_until(lambda: client.job("small")["state"] not in ("queued", "running"), "the job's end")
        job, after = client.job("small"), client.generations("small")
        assert (job["state"], job["error"]) == ("succeeded", None)
        assert len(before) == len(adopted) == len(after) == 2, "calibration, and one training generation for all of it"
        assert after[-1]["placement"] == before[-1]["placement"]
        assert [metric["step"] for metric in client.metrics("small")] == list(range(1, last + 1))
        assert all(metric["loss"] is not None for metric in client.metrics("small"))
