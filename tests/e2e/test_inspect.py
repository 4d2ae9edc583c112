"""`varuna inspect` runs a training script up to its optimizer and shows how Varuna sees the model."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from varuna.inspection.text import render_document
from varuna.partition import PartitionError
from varuna_client.commands import inspection
from varuna_client.commands.inspection import make_inspection_environment
from varuna_client.errors import UserError
from waiting import DEADLINE_S

MODEL = """
import sys, torch
from torch import nn
from varuna import Varuna

SCALE = torch.tensor([1.0, 2.0, 3.0, 4.0])

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3))
        self.memory = None

    def forward(self, tokens):
        first = x = self.table(tokens)
        for block in self.blocks:
            x = block(x) * SCALE
        BODY
        return ((x + first) @ self.table.weight.t()).square().mean()
"""
SCRIPT = """
class Normed(torch.optim.SGD):
    def step(self, closure=None):
        gradients = [p.grad for p in self.param_groups[0]["params"]]
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        return super().step(closure)

print("the script prints", sys.argv[1:])
model = Varuna(Model(), get_batch_fn={"tokens": torch.arange(6)}, device="cuda:0")
model.set_optimizer(Normed(model.parameters(), lr=0.1))
raise AssertionError("training has begun")
"""


def inspect(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    command = [str(Path(sys.executable).with_name("varuna")), "inspect", *options, "train.py", "--steps", "3"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environ, text=True, capture_output=True, timeout=DEADLINE_S, check=False
    )


@pytest.mark.slow
def test_a_report_of_everything_that_was_found(tmp_path: Path) -> None:
    ended = inspect(tmp_path, MODEL.replace("BODY", "") + SCRIPT, "--time", "--micro-batch", "2", "--json")
    assert ended.returncode == 0, ended.stderr
    assert "the script prints ['--steps', '3']" in ended.stderr
    found = json.loads(ended.stdout)
    assert [section["name"] for section in found["sections"]] == [
        "table … blocks.0",
        "blocks.1",
        "blocks.2",
        "section 3",
    ]
    assert sum(section["work"] for section in found["sections"]) == pytest.approx(1)
    assert found["sections"][0]["sends"][0] == {
        "name": "table",
        "bytes": 16,
        "shape": [1, 4],
        "dtype": "float32",
        "has_gradient": True,
    }
    assert found["shared"] == [{"parameter": "table.weight", "sections": [0, 3]}]
    assert found["long_lived"] == [{"name": "table", "made_in": 0, "used_in": [3]}]
    buffer = next(x for x in found["buffers"] if x["buffer"] == "blocks.1.1.running_mean")
    assert buffer["sections"] == [1]
    assert buffer["written_at"].startswith("train.py:")
    (constant,) = found["constants"]
    assert constant["place"].startswith("a constant at train.py:")
    assert constant["sections"] == [1, 2, 3]
    (finding,) = found["optimizer"]["findings"]
    assert finding["place"].startswith("train.py:")
    assert "global_gradient_norm" in finding["way_out"]
    assert found["times"]["micro_batch"] == 2
    assert min(*found["times"]["forward_us"], *found["times"]["backward_us"]) > 0
    text = render_document(found)
    for part in ("forward", "shared by sections 0, 3: table.weight", "long-lived: table", "follow replica 0", "Normed"):
        assert part in text


def test_what_cannot_be_trained_is_reported_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "x = x if self.memory is None else x + self.memory; self.memory = x.detach()"
    script, report = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(MODEL.replace("BODY", body) + SCRIPT)
    for name, value in make_inspection_environment(report, "", 1, "cpu").to_environ().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PartitionError, match="left behind") as refused:
        runpy.run_path(str(script), run_name="__main__")
    assert json.loads(report.read_text()) == {"refused": str(refused.value), "text": str(refused.value)}
    assert "in forward a tensor of shape (2, 4) that an earlier forward left behind (kept in memory)" in str(
        refused.value
    )


def test_what_is_no_training_script_is_refused(tmp_path: Path) -> None:
    ended = inspect(tmp_path, "print('hello')")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        "varuna: train.py ended without making a Varuna(model, ...): nothing to show"
    )
    ended = inspect(tmp_path, "", "--time", "--profile", "p.json")
    assert "give either --time" in ended.stderr
    job_file = tmp_path / "job.yaml"
    job_file.write_text("run: python train.py")
    with pytest.raises(UserError, match=r"job\.yaml is a job file"):
        inspection.inspect(job_file)
