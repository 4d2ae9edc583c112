"""Training on the simulated device is plain PyTorch's there, and no rank ends with a race."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import device_rows
import simulated
from repository import TRAINING_SCRIPTS
from simulated import device_of
from small_gpt import Task, Trained, train_plainly
from training_matrix import assert_equal
from training_world import Ranks, Zygote
from varuna.checkpoint import read_parameters
from varuna.checkpoint.format.manifest import MANIFEST
from varuna.checkpoint.storage.store import folder_of


@pytest.mark.parametrize("precision", device_rows.PRECISIONS)
@pytest.mark.parametrize("shape", device_rows.SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_training_is_plain_pytorchs(zygote: Zygote, tmp_path: Path, shape: tuple[int, int], precision: str) -> None:
    device_rows.check_rows(zygote, tmp_path, device_of, shape, precision)


def test_the_optimizer_may_be_on_the_host(zygote: Zygote, tmp_path: Path) -> None:
    device_rows.check_host_optimizer(zygote, tmp_path, device_of)


def test_dropout_does_not_depend_on_the_shape(zygote: Zygote, tmp_path: Path) -> None:
    device_rows.check_dropout(zygote, tmp_path, device_of)


def test_checkpoints_are_copied_while_passes_run(zygote: Zygote, tmp_path: Path) -> None:
    """Each is the state after its step, which the update of the next one changes."""
    task, store = Task(steps=6, optimizer="adamw"), str(tmp_path / "store")
    more = {
        "script": TRAINING_SCRIPTS / "saving_script.py",
        "checkpoint_url": store,
        "environ": {"VARUNA_CHECKPOINT_INTERVAL_S": "0.01"},
        "wanted": {"pause_s": 0.3},
    }
    with Ranks(zygote, tmp_path, task, 2, 1, device=device_of, **more) as world:
        outcome = world.finish()
        assert all((world.out / f"beside.rank{rank}").exists() for rank in (0, 1))

    def train(steps: int) -> Trained:
        return train_plainly(replace(task, steps=steps), world.micro_batch, device=torch.device(device_of(0)))

    assert_equal(outcome, train(task.steps), task.precision)
    saved = [step for step in range(1, task.steps) if (tmp_path / "store" / folder_of(step) / MANIFEST).exists()]
    assert saved
    for step in saved:
        expected = train(step).parameters
        for name, value in read_parameters(store, step).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


def test_a_process_with_a_race_that_nothing_has_raised_ends_badly() -> None:
    program = """
import ctypes, torch
x = torch.ones(8, device="sim")
ctypes.c_float.from_address(x.data_ptr()).value
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, "the host touched memory of device 0" in done.stderr) == (simulated.EXIT_RACES, True)
