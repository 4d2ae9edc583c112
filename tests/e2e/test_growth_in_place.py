"""A VM comes back, and a new process joins those that are there, under a real manager and agents."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from repository import ROOT
from waiting import DEADLINE_S

sys.path.append(str(ROOT / "benchmarks"))

from _recovery_trial import ModelSize, RecoveryWay, TrialOptions, run_trial

pytestmark = pytest.mark.xdist_group("e2e")

SIZE = ModelSize(name="small", width=64, layers=8, global_batch=32, micro_batch=4, example_ms=1.0)
OPTIONS = replace(
    TrialOptions.undisturbed(1, 2), steps_before=5, kill_at=0.5, steps_after=3, growth_wait_s=float(DEADLINE_S)
)


@pytest.mark.slow
def test_a_job_grows_with_the_process_that_trains_and_a_new_one(tmp_path: Path) -> None:
    figures = run_trial(SIZE, RecoveryWay(name="in place"), OPTIONS, tmp_path)
    growth = figures["growth"]
    assert growth is not None, "it did not grow"
    assert (growth["kind_of_morph"], growth["steps_redone"]) == ("reshape", 0)
    taken = growth["state_from"]
    assert taken["store"] == 0
    assert taken["kept"] > 0, "the process that was there has loaded nothing"
    assert taken["peers"] > 0, "and the new one has it from there"
