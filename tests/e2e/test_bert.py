"""BERT's two phases as two jobs of two stages, a VM killed meanwhile: losses and weights of plain PyTorch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

from bert_shards import write_config, write_shard
from example_modules import BERT, example_modules
from manager_world import RunningManager, process_of_last_rank
from varuna_client import Client
from varuna_client.demo.processes import kill_group
from waiting import wait_until

pytestmark = [pytest.mark.xdist_group("examples"), pytest.mark.slow]

MODULES = ("arguments", "lamb", "model", "pretraining_data", "recipe", "reference", "schedule")
STEPS_1, STEPS_2, KILLED_AFTER = 80, 12, 3


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    torch.set_num_threads(1)
    with example_modules(monkeypatch, BERT, *MODULES) as modules:
        yield modules


def write_job(folder: Path, phase: int, *, tokens: int, predictions: int, steps: int, more: str = "") -> Path:
    data = write_shard(folder / f"data{phase}", examples=64, tokens=tokens, predictions=predictions).parent
    job = {
        "name": f"bert-{phase}",
        "workdir": str(BERT),
        "run": f"python train.py --input_dir {data} --config_file {write_config(folder / 'config.json')} "
        f"--max_seq_length {tokens} --max_predictions_per_seq {predictions} --max_steps {steps} --seed 3 "
        f"--learning_rate 0.02 --warmup_proportion 0.2 --json-summary {folder / f'summary{phase}'}{more}",
        "global_batch": 10,
        "plan": {"p": 2, "d": 1},
        "checkpoint": {"url": str(folder / "checkpoints")},
    }
    path = folder / f"phase{phase}.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def losses_in(summary: Path) -> list[tuple[int, float]]:
    """(step, loss) as printed; steps that were done again are printed again."""
    lines = summary.read_text().splitlines(keepends=True) if summary.exists() else []
    entries = [json.loads(line.removeprefix("DLLL ")) for line in lines if line.endswith("\n")]
    return [(entry["step"][1], entry["data"]["step_loss"]) for entry in entries if "step_loss" in entry["data"]]


def submit(manager: RunningManager, job: Path) -> str:
    """The job's name."""
    done = manager.varuna("submit", str(job))
    assert done.returncode == 0, done.stderr
    return str(yaml.safe_load(job.read_text())["name"])


def ended(manager: RunningManager, client: Client, name: str) -> None:
    """Waits for it; it must have succeeded."""
    wait_until(lambda: client.job(name)["state"] in ("succeeded", "failed"), f"the end of {name}")
    assert client.job(name)["state"] == "succeeded", manager.varuna("logs", name).stdout


def kill_one(client: Client, name: str, summary: Path) -> None:
    """A VM on which the job runs, once that has done some steps."""
    pid = process_of_last_rank(client, name)  # asked for before the steps, which are quick
    wait_until(lambda: len(losses_in(summary)) >= KILLED_AFTER, "the first steps")
    kill_group(pid)


def test_two_phases_train_and_export_as_plain_pytorch_does(
    running_manager: RunningManager, example: dict[str, ModuleType], tmp_path: Path
) -> None:
    manager = running_manager
    first = write_job(tmp_path, 1, tokens=16, predictions=3, steps=STEPS_1)
    flags = f" --phase2 --phase1_end_step {STEPS_1}"
    second = write_job(tmp_path, 2, tokens=32, predictions=6, steps=STEPS_2, more=flags)
    reference = example["reference"]
    plain, expected = reference.train([reference.phase_of(first), reference.phase_of(second)])

    with manager.client() as client:
        name = submit(manager, first)
        kill_one(client, name, tmp_path / "summary1")
        ended(manager, client, name)
        generations = [g for g in client.generations(name, brief=True) if g["started_at"] is not None]
        assert len(generations) >= 2, "it went on after its VM was killed"
        assert all(g["p"] == 2 for g in generations[-2:])
        ended(manager, client, submit(manager, second))

    losses = [*losses_in(tmp_path / "summary1"), *((STEPS_1 + k, x) for k, x in losses_in(tmp_path / "summary2"))]
    assert {step for step, _ in losses} == set(range(1, STEPS_1 + STEPS_2 + 1))
    for step, loss in losses:
        assert loss == pytest.approx(expected[step - 1], rel=1e-4), f"step {step}"
    assert expected[STEPS_1 - 1] < expected[0] - 0.5, "it learns to count"

    exported = tmp_path / "model.safetensors"
    done = manager.varuna("export", str(tmp_path / "checkpoints"), "--out", str(exported))
    assert done.returncode == 0, done.stderr
    model = example["model"].load_pretrained(exported, example["model"].read_config(tmp_path / "config.json"))
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.model.state_dict()), rtol=1e-3, atol=1e-4)
