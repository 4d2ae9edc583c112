"""A VM is lost, and the processes on the others take the stages of another shape, under a real manager and agents."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from repository import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from _recovery_trial import ModelSize, RecoveryWay, TrialOptions, run_trial

pytestmark = pytest.mark.xdist_group("e2e")

SIZE = ModelSize(name="small", width=64, layers=24, global_batch=32, micro_batch=4, example_ms=0.25)
OPTIONS = replace(TrialOptions.undisturbed(2, 2), steps_before=5, kill_at=0.5, steps_after=3)


@pytest.mark.slow
def test_survivors_of_a_lost_vm_take_other_stages_in_place(tmp_path: Path) -> None:
    figures = run_trial(SIZE, RecoveryWay(name="other cuts", changes_cuts=True), OPTIONS, tmp_path)
    assert (figures["shape_before"], figures["shape_after"]) == ("2×2", "3×1")
    assert figures["kind_of_morph"] == "reshape", (figures["reason"], figures["obstacles"])
    assert figures["steps_redone"] == figures["reported"]["steps_redone"] == 0
    assert figures["kept_bytes"] > 0
    assert figures["peer_bytes"] > 0
    assert figures["checkpoint_bytes"] == 0
