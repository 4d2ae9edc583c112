"""A job of one replica loses a VM under a real manager, and goes on from the copy that another VM keeps."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent

import pytest

from manager_world import find_copied, find_training, kill_vm, start_manager
from waiting import wait_until

SCRIPT = """
    import time

    import torch
    from torch import nn
    from varuna import CutPoint, Varuna
    from varuna.data import Batches

    torch.set_num_threads(1)

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.cut, self.second = nn.Linear(8, 8), CutPoint(), nn.Linear(8, 8)
            self.other_cut, self.third = CutPoint(), nn.Linear(8, 1)

        def forward(self, x):
            x = self.other_cut(self.second(self.cut(self.first(x))))
            time.sleep(0.05)
            return self.third(x).square().mean()

    torch.manual_seed(0)
    data = [{"x": torch.full((8,), float(i))} for i in range(16)]
    model = Varuna(Small(), get_batch_fn=lambda size, device=None: {"x": torch.ones(size, 8)})
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9))
    for step, batch in Batches(data, first_step=model.resume() + 1, last_step=100_000):
        model.step(batch)
"""


@pytest.mark.slow
def test_the_loss_of_a_vm_costs_no_section(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(dedent(SCRIPT))
    with start_manager(tmp_path, 4) as client:
        spec = {"name": "one", "workdir": str(tmp_path), "run": f"{sys.executable} train.py", "global_batch": 4}
        job = client.submit({**spec, "plan": {"p": 3, "d": 1}, "copies": "on"})["id"]  # type: ignore[typeddict-item]
        first = wait_until(lambda: find_training(client, job, 0, steps=20), "twenty steps")
        first = wait_until(lambda: find_copied(client, job, first["number"]), "copies of all stages")
        assert 0 < first["copied_step"] < first["last_step"]  # type: ignore[operator]
        lost = first["placement"][1]["vm_id"]
        kill_vm(client, lost)
        second = wait_until(lambda: find_training(client, job, first["number"], steps=1), "a step after the loss")
        assert lost not in {place["vm_id"] for place in second["placement"]}
        assert second["state_from"] is not None
        assert second["state_from"]["peers"] > 0, second
        assert second["state_from"]["store"] == 0, second
        events = client.events(job=job, kind=["generation_started"])
        [started] = [event for event in events if event["generation"] == first["number"]]
        keepers = started["data"]["keepers"]
        assert sorted(keepers) == [0, 1, 2]
        assert all(keeper != rank for rank, keeper in enumerate(keepers))
