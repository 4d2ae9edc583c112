"""`varuna profile run`: a job's model is measured on the fleet, without training; the second time it is known."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import pytest

from manager_world import RunningManager
from varuna_planner.profile.document import Profile

SCRIPT = """
    import torch
    from torch import nn
    from varuna import CutPoint, Varuna

    torch.set_num_threads(1)

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.cut, self.second = nn.Linear(4, 8), CutPoint(), nn.Linear(8, 1)

        def forward(self, x):
            return self.second(self.cut(self.first(x))).square().mean()

    model = Varuna(Small(), get_batch_fn=lambda size, device=None: {"x": torch.ones(size, 4)})
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    raise SystemExit("it was to be measured only")
"""


@pytest.mark.slow
def test_a_model_is_measured_once_and_not_trained(running_manager: RunningManager, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(dedent(SCRIPT))
    job = tmp_path / "job.yaml"
    job.write_text("name: small\nrun: python train.py\nglobal_batch: 4\n")
    out = tmp_path / "P.json"

    first = running_manager.varuna("profile", "run", str(job), "--out", str(out))
    assert first.returncode == 0, first.stderr
    assert "the job's profile is measured" in first.stderr
    assert f"{out}: 2 sections" in first.stdout
    profile = Profile.from_json(out.read_text())
    assert profile.environment["ranks"] == "2"
    assert running_manager.varuna("profile", "validate", str(out)).returncode == 0

    second = running_manager.varuna("profile", "run", str(job), "--json")
    assert second.returncode == 0, second.stderr
    taken = f"profile taken from the cache (measured {profile.environment['measured_at']} on 2 × cpu: "
    assert taken in second.stderr
    assert json.loads(second.stdout) == json.loads(out.read_text())

    with running_manager.client() as client:
        assert client.job("small-profile")["state"] == "succeeded"
        assert [generation["kind"] for generation in client.generations("small-profile")] == ["calibration"]
