"""examples/hf: a pretrained model on `meta` in two stages, a VM killed meanwhile, is fine-tuned as in plain PyTorch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from manager_world import ROOT, RunningManager, process_of_last_rank
from varuna_client import Client
from varuna_client.demo.processes import kill_group
from waiting import DEADLINE_S, wait_until

pytestmark = [pytest.mark.xdist_group("examples"), pytest.mark.slow]

EXAMPLE = ROOT / "examples" / "hf"
STEPS, BATCH = 80, 10
FLAGS = ["--block_size", "16", "--max_train_bytes", "20000", "--learning_rate", "3e-3", "--warmup_steps", "4"]


def plain(*flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLE / "plain.py"), *FLAGS, "--per_device_train_batch_size", str(BATCH), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def output_of(process: subprocess.Popen[str]) -> str:
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert process.returncode == 0
    return output


def values_in(output: str, name: str) -> dict[int, set[float]]:
    """Everything printed for each step, by every rank and by every repetition of the step."""
    found: dict[int, set[float]] = {}
    for step, value in re.findall(rf"step (\d+) {name} ([\d.]+)", output):
        found.setdefault(int(step), set()).add(float(value))
    return found


def write_job(folder: Path, start: Path) -> Path:
    job = {
        "name": "hf",
        "workdir": str(EXAMPLE),
        "run": f"python train.py {' '.join(FLAGS)} --model_name_or_path {start} --meta --max_steps {STEPS}",
        "global_batch": BATCH,
        "plan": {"p": 2, "d": 1},
        "env": {"HF_HUB_OFFLINE": "1"},
        "checkpoint": {"url": str(folder / "checkpoints")},
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def kill_one(client: Client, name: str) -> None:
    """A VM on which the job runs, once that has done a step."""
    pid = process_of_last_rank(client, name)  # asked for before the steps, which are quick
    wait_until(lambda: (client.job(name)["step"] or 0) > 0, "the first step")
    kill_group(pid)


def logs_of(manager: RunningManager, generation: int) -> str:
    done = manager.varuna("logs", "hf", "--all", "--rank", "all", "--generation", str(generation), timeout_s=DEADLINE_S)
    return done.stdout


def test_a_folder_of_from_pretrained_goes_in_and_one_comes_out(running_manager: RunningManager, tmp_path: Path) -> None:
    manager, start, expected = running_manager, tmp_path / "start", tmp_path / "expected"
    output_of(plain("--model_name_or_path", "gemma", "--max_steps", "1", "--output_dir", str(start)))
    reference = plain("--model_name_or_path", str(start), "--max_steps", str(STEPS), "--output_dir", str(expected))
    try:
        with manager.client() as client:
            assert manager.varuna("submit", str(write_job(tmp_path, start)), timeout_s=DEADLINE_S).returncode == 0
            kill_one(client, "hf")
            wait_until(lambda: client.job("hf")["state"] in ("succeeded", "failed"), "the job's end")
            generations = [g for g in client.generations("hf", brief=True) if g["started_at"] is not None]
            logs = "".join(logs_of(manager, generation["number"]) for generation in generations)
            assert client.job("hf")["state"] == "succeeded", logs
        assert len(generations) >= 2, "it went on after its VM was killed"
        assert all(g["p"] == 2 for g in generations[-2:])
    finally:
        output = output_of(reference)

    for name in ("loss", "eval_loss"):
        theirs, ours = values_in(output, name), values_in(logs, name)
        assert theirs.keys() == ours.keys()
        for step, (value,) in theirs.items():
            assert all(other == pytest.approx(value, rel=1e-4) for other in ours[step]), f"{name} of step {step}"
    assert max(values_in(output, "loss")[STEPS]) < min(values_in(output, "loss")[1]) - 0.5, "it learns"

    out = tmp_path / "exported"
    flags = ["--hf", "--out", str(out), "--tokenizer", str(start)]
    done = manager.varuna("export", str(tmp_path / "checkpoints"), *flags, timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} == {path.name for path in expected.iterdir()}
    assert json.loads((out / "config.json").read_text()) == json.loads((expected / "config.json").read_text())
    torch.testing.assert_close(
        load_file(out / "model.safetensors"), load_file(expected / "model.safetensors"), rtol=1e-3, atol=1e-4
    )


def test_the_two_scripts_differ_in_one_line() -> None:
    def body(name: str) -> list[str]:
        lines = (EXAMPLE / name).read_text().splitlines()
        return lines[lines.index("def main() -> None:") :]

    one, two = body("plain.py"), body("train.py")
    added = [line for line in two if line not in one]
    assert len(added) == 1
    assert "Varuna(model" in added[0]
    assert [line for line in two if line not in added] == one
