"""A job whose device has less memory than anybody knew: real workers on the simulated accelerator."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from manager_world import all_ready
from repository import ROOT
from varuna_client import Client
from varuna_client.demo.processes import DemoProcesses
from waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.needs("g++")

SCRIPT = """
    import os, sys, time

    os.environ["VARUNA_DEVICE"], os.environ["SIM_MEMORY_MIB"] = "sim", "6"
    sys.path.insert(0, ACCELERATOR)
    import simulated

    simulated.register()

    import torch
    from torch import nn
    from varuna import CutPoint, Varuna
    from varuna.data import Batches

    torch.set_num_threads(1)
    WIDTH, TOKENS, BALLAST = 16, 512, 5 << 19

    if os.environ["VARUNA_MODE"] == "train":
        kept = torch.empty(BALLAST, dtype=torch.uint8, device="sim")  # which no calibration has seen

    class Deep(nn.Module):
        '''Keeps 256 KiB for each example. Large micro-batches take as long as small ones: it wants those.'''

        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
            self.cuts = nn.ModuleList(CutPoint() for _ in range(3))

        def forward(self, x):
            time.sleep(0.01)  # in each section's measurement, too: all sizes take half of a calibration's time
            for number, block in enumerate(self.blocks):
                x = torch.tanh(block(x))
                x = self.cuts[number // 2](x) if number in (1, 3, 5) else x
            return x.square().mean()

    torch.manual_seed(0)
    data = [{"x": torch.full((TOKENS, WIDTH), i / 64)} for i in range(64)]
    model = Varuna(Deep(), get_batch_fn=lambda size, device=None: {"x": torch.ones(size, TOKENS, WIDTH)})
    model.set_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    for step, batch in Batches(data, first_step=model.resume() + 1, last_step=4):
        model.step(batch)
"""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    """A manager with one VM."""
    accelerator = ROOT / "tests" / "accelerator"
    (tmp_path / "train.py").write_text(dedent(SCRIPT).replace("ACCELERATOR", repr(str(accelerator))))
    folder = tmp_path / "manager"
    options = ["--data-dir", str(folder), "--http-port", "0", "--grpc-port", "0", "--vms", "1"]
    with DemoProcesses(folder) as processes:
        processes.start(["-m", "varuna_client.cli", "manager", *options], tmp_path / "manager.log")
        wait_until((folder / "manager.json").exists, "the manager's address")
        address = json.loads((folder / "manager.json").read_text())["http"]
        with Client(f"http://{address}", timeout_s=DEADLINE_S) as client:
            wait_until(lambda: client.is_ready() and all_ready(client, 1), "the manager and its VM")
            yield client


@pytest.mark.slow
def test_a_job_that_runs_out_of_memory_is_planned_anew_and_trains_to_its_end(client: Client, tmp_path: Path) -> None:
    job = client.submit(
        {"name": "deep", "workdir": str(tmp_path), "run": f"{sys.executable} train.py", "global_batch": 64}
    )["id"]
    done = wait_until(
        lambda: (found := client.job(job))["state"] in ("succeeded", "failed") and found, "the job to end"
    )
    training = [one for one in client.generations(job) if one["kind"] == "training"]
    assert done["state"] == "succeeded", (done["error"], training)
    causes = [one["end_cause"] for one in training]
    assert causes[-1] == "finished"
    assert set(causes[:-1]) == {"out_of_memory"}, [one["plan"] for one in training]
    needed = [max(one["plan"]["memory_bytes"]) for one in training]
    assert needed == sorted(set(needed), reverse=True), "each plan is more careful"
    events = [event for event in client.events(job) if event["kind"] == "out_of_memory"]
    assert [event["data"]["limit_bytes"] for event in events] == [6 << 20] * (len(training) - 1)
    assert all(event["data"]["asked_bytes"] > 0 for event in events)
