"""The checks in `inside/`, each file in a process of its own.

A process must load the device before its first backward, which starts a thread for each device that torch then knows;
and other tests must not find an accelerator.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SUPPORT = HERE.parent / "support"
IMPORTS = [HERE, HERE / "entry_points", SUPPORT, SUPPORT / "training"]

_QUICK = "2x2 and float16 and not bfloat16"
"""The rows of training that are not slow: one is there."""

pytestmark = pytest.mark.needs("g++")


def run_checks(name: str, *, only: str = "", devices: int = 2) -> None:
    """Runs the tests of `inside/check_{name}.py`; torch loads the simulated device there and in its children.

    `only`: as in pytest's `-k`.
    """
    checks = HERE / "inside" / f"check_{name}.py"
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, IMPORTS)),
        "SIM_DEVICES": str(devices),
        "OMP_NUM_THREADS": "1",
    }
    environ.pop("PYTEST_PLUGINS", None)
    # pytest's own handler of faults would come after the device's.
    command = [sys.executable, "-m", "pytest", "-p", "no:faulthandler", "-p", "no:xdist", "-k", only, str(checks)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_races_are_found_and_their_absence_too() -> None:
    run_checks("races")


def test_races_between_host_threads_are_found_and_their_absence_too() -> None:
    run_checks("threads")


def test_the_device_computes_as_the_cpu_does() -> None:
    run_checks("device")


def test_a_step_waits_for_the_device_as_little_as_it_says() -> None:
    run_checks("steps")


@pytest.mark.slow
def test_stages_take_the_memory_that_was_planned() -> None:
    run_checks("memory")


@pytest.mark.slow
def test_links_may_stay_on_the_devices() -> None:
    run_checks("device_links")


@pytest.mark.slow
def test_stages_move_between_devices() -> None:
    run_checks("moves")


@pytest.mark.slow
def test_each_ordering_of_the_product_is_needed() -> None:
    run_checks("orderings")


@pytest.mark.long
def test_training_is_plain_pytorchs() -> None:
    run_checks("training", only=f"plain and {_QUICK}")


@pytest.mark.slow
def test_training_of_other_shapes_and_types_is_plain_pytorchs() -> None:
    run_checks("training", only=f"not (plain and {_QUICK})")
