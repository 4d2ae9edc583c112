"""The scripts of examples/migrate train, after they were brought to Varuna, as they did before."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from migration_page import FRAMEWORKS, SCRIPTS
from waiting import DEADLINE_S

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("examples")]

STEPS = 40  # 16 examples each: they begin a second time to go through the 512
ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
NEEDED = {"accelerate": "accelerate", "trainer": "accelerate", "lightning": "lightning"}
FLAGS = ("--in-order", "--steps", str(STEPS))


def run(*command: str, folder: Path, environ: Mapping[str, str]) -> str:
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, **quiet, **environ},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def find_values(output: str, name: str) -> dict[int, float]:
    """By step; every rank prints the same."""
    found: dict[int, float] = {}
    for step, value in re.findall(rf"step (\d+) {name} ([\d.]+)", output):
        assert found.setdefault(int(step), float(value)) == float(value)
    return found


@pytest.mark.parametrize(
    "framework",
    [pytest.param(name, marks=pytest.mark.needs(NEEDED[name]) if name in NEEDED else ()) for name in FRAMEWORKS],
)
def test_the_losses_stay(framework: str, tmp_path: Path) -> None:
    """Before in one process; after in two stages."""
    before_script, after_script = (str(SCRIPTS / f"{framework}_{when}.py") for when in ("before", "after"))
    one = ONE_PROCESS if framework in ("ddp", "fsdp") else {}
    before = run(before_script, *FLAGS, "--checkpoint", str(tmp_path / "saved"), folder=tmp_path, environ=one)

    (tmp_path / "machines.txt").write_text("127.0.0.1\n")
    shape = ("--machine_list", "machines.txt", "--gpus_per_node", "2", "--nstages", "2")
    sizes = ("--batch_size", "16", "--chunk_size", "4", "--no_arguments", "--device", "cpu")
    launcher = ("-m", "varuna.run_varuna", *shape, *sizes)
    after = run(*launcher, after_script, *FLAGS, folder=tmp_path, environ={})

    for name, count in (("loss", STEPS), ("validation", STEPS // 8)):
        was, became = find_values(before, name), find_values(after, name)
        assert len(was) == count
        assert became == pytest.approx(was, rel=1e-4), name
    assert find_values(after, "loss")[STEPS] < find_values(after, "loss")[1]
