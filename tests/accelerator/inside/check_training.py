"""Training on the simulated device is plain PyTorch's there, and no rank ends with a race."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import device_rows
import simulated
from repository import TRAINING_SCRIPTS
from simulated import device_of
from small_gpt import Task, Trained, train_plainly
from training_matrix import assert_equal
from training_world import Ranks, Zygote
from varuna.checkpoint import TrainingState, load_checkpoint, read_parameters
from varuna.checkpoint.format.manifest import MANIFEST
from varuna.checkpoint.saving import writer as writer_module
from varuna.checkpoint.saving.writer import CheckpointWriter
from varuna.checkpoint.state.rank_state import ShapePosition
from varuna.checkpoint.storage.store import folder_of
from waiting import DEADLINE_S


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


@pytest.mark.parametrize(
    ("user", "is_beside"), [({"mean": {"sums": [1.0]}}, True), ({"mean": {"sums": [torch.ones(1)]}}, False)]
)
def test_states_that_the_script_may_change_in_a_pass_are_copied_before(
    user: dict[str, Any], is_beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_copy, make = threading.Event(), writer_module.make_snapshot
    if not is_beside:
        may_copy.set()

    def wait_and_make(*arguments: Any, **more: Any) -> Any:
        assert may_copy.wait(DEADLINE_S)
        return make(*arguments, **more)

    monkeypatch.setattr(writer_module, "make_snapshot", wait_and_make)
    value = torch.nn.Parameter(torch.ones(4, device=device_of(0)))
    state = TrainingState(sections=range(1), section_count=1, parameters={"w": value}, section_of={"w": 0}, user=user)
    writer = CheckpointWriter(str(tmp_path), generation=1, position=ShapePosition(rank=0, p=1, d=1))
    assert writer.start_save(1, state, beside_passes=True)
    if is_beside:
        assert not writer._is_copied.is_set()
    user["mean"]["sums"][0] += 1
    may_copy.set()
    writer.finish_copy()
    outcome = writer.wait(DEADLINE_S)
    assert outcome is not None
    assert outcome.result == "committed", outcome.error
    fresh = replace(state, parameters={"w": torch.nn.Parameter(torch.zeros(4, device=device_of(0)))}, user={})
    assert float(load_checkpoint(str(tmp_path), 1, fresh).user["mean"]["sums"][0]) == 1


def test_a_process_with_a_race_that_nothing_has_raised_ends_badly() -> None:
    program = """
import ctypes, torch
x = torch.ones(8, device="sim")
ctypes.c_float.from_address(x.data_ptr()).value
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, "the host touched memory of device 0" in done.stderr) == (simulated.EXIT_RACES, True)
