"""The demo's disturbances: each comes once, after the morph caused by the one before has made steps."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna_client.demo.scenario import DemoSnapshot, KillVm, OfferVm, PreemptVm, next_disturbance


def generation(number: int, *, kind: str = "training", state: str = "running", ranks: int = 4) -> dict[str, Any]:
    placement = [{"rank": rank, "vm_id": f"vm-{rank}", "local_rank": 0} for rank in range(ranks)]
    return {"number": number, "kind": kind, "state": state, "placement": placement}


def observed(generations: list[dict[str, Any]], steps: dict[int, int], job: str = "running") -> DemoSnapshot:
    """A run in which generation n has made steps[n] steps."""
    metrics = [{"generation": number, "step": step} for number, count in steps.items() for step in range(count)]
    vms = [{"id": f"vm-{rank}", "ref": {"pid": 100 + rank}} for rank in range(4)]
    return DemoSnapshot(
        job={"state": job},  # type: ignore[typeddict-item]
        generations=tuple(generations),  # type: ignore[arg-type]
        metrics=tuple(metrics),  # type: ignore[arg-type]
        events=(),
        vms=tuple(vms),  # type: ignore[arg-type]
    )


def test_the_first_vm_is_killed_once_the_first_training_generation_has_made_its_steps() -> None:
    generations = [generation(1, kind="calibration", state="ended"), generation(2)]
    assert next_disturbance(0, 0, observed(generations, {2: 4}), steps_between=5) is None
    assert next_disturbance(0, 0, observed(generations, {2: 5}), steps_between=5) == KillVm(vm_id="vm-3", pid=103)


def test_the_next_waits_for_the_generation_that_answers_it() -> None:
    hit = observed([generation(2)], {2: 30})
    assert next_disturbance(1, 2, hit, steps_between=5) is None
    answered = observed([generation(2, state="ended"), generation(3, ranks=3)], {2: 30, 3: 5})
    assert next_disturbance(1, 2, answered, steps_between=5) == OfferVm()
    grown = observed([generation(4)], {4: 5})
    assert next_disturbance(2, 3, grown, steps_between=5) == PreemptVm(vm_id="vm-0", pid=100)


def test_a_generation_that_is_stopping_is_left_alone() -> None:
    assert next_disturbance(0, 0, observed([generation(2, state="stopping")], {2: 50}), steps_between=5) is None


@given(st.integers(0, 5), st.integers(0, 3), st.integers(0, 50), st.sampled_from(["succeeded", "failed", "cancelled"]))
def test_nothing_happens_after_the_job_or_after_the_last_scene(scene: int, hit: int, steps: int, state: str) -> None:
    running = [generation(4)]
    assert next_disturbance(scene, hit, observed(running, {4: steps}, job=state), steps_between=1) is None
    assert next_disturbance(3, hit, observed(running, {4: steps}), steps_between=1) is None


@pytest.mark.parametrize("scene", [0, 1, 2])
def test_each_disturbance_says_what_it_does(scene: int) -> None:
    due = next_disturbance(scene, 1, observed([generation(4)], {4: 9}), steps_between=5)
    assert due is not None
    assert len(due.story) > 20
