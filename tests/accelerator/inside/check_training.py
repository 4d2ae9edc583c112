"""Training on the simulated device is plain PyTorch's there, and no rank ends with a race."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import device_rows
import simulated
from simulated import device_of
from training_world import Zygote


@pytest.mark.parametrize("precision", device_rows.PRECISIONS)
@pytest.mark.parametrize("shape", device_rows.SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_training_is_plain_pytorchs(zygote: Zygote, tmp_path: Path, shape: tuple[int, int], precision: str) -> None:
    device_rows.check_rows(zygote, tmp_path, device_of, shape, precision)


def test_the_optimizer_may_be_on_the_host(zygote: Zygote, tmp_path: Path) -> None:
    device_rows.check_host_optimizer(zygote, tmp_path, device_of)


def test_dropout_does_not_depend_on_the_shape(zygote: Zygote, tmp_path: Path) -> None:
    device_rows.check_dropout(zygote, tmp_path, device_of)


def test_a_process_with_a_race_that_nothing_has_raised_ends_badly() -> None:
    program = """
import ctypes, torch
x = torch.ones(8, device="sim")
ctypes.c_float.from_address(x.data_ptr()).value
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, "the host touched memory of device 0" in done.stderr) == (simulated.EXIT_RACES, True)
