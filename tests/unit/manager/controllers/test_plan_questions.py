"""What the job controller asks the planner."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decision_views import devices, generation, job, worker
from planner_profiles import make_profile
from rest_world import generation as generation_row
from snapshots import loaded
from varuna_manager.controllers.job_controller import _make_question
from varuna_manager.db.models import JobRow
from varuna_manager.domain.observed import VmView
from varuna_manager.domain.states import GenerationState, VmState
from varuna_manager.planning.planning import PlanningService
from varuna_planner.profile.document import Link, Links
from varuna_proto.plan import Plan

NAMES = tuple(f"{zone}{number}" for zone in ("east", "west") for number in range(4))
VMS = {name: VmView(id=name, state=VmState.READY, zone=name[:4]) for name in NAMES}


@pytest.mark.parametrize("left_out", [NAMES[0], NAMES[7]])
async def test_the_present_rate_is_that_of_the_zones_in_which_the_job_runs(left_out: str) -> None:
    fast, slow = Link(latency_us=10, bandwidth_bytes_per_s=1e9), Link(latency_us=5000, bandwidth_bytes_per_s=1e6)
    links = Links(same_vm=fast, other_vm=fast, other_zone=slow)
    plan = Plan(p=4, d=2, micro_batch=1, global_batch=8, stage_starts=(0, 1, 2, 3))
    live = generation(*(worker(rank, name) for rank, name in enumerate(NAMES)), plan=plan)
    profile = make_profile([1] * 4, links=links, messages=[1000] * 4).to_json()
    running = replace(
        loaded("j", has=NAMES),
        row=JobRow(id="j", name="j", profile_json=profile),
        generation=generation_row("j", 1, 0.0, plan=plan.to_document()),
        view=replace(job(live), id="j", name="j"),
    )
    rates = []
    for asked in (NAMES, tuple(name for name in NAMES if name != left_out)):
        question = _make_question(running, running.view, devices(*asked), VMS)
        rates.append((await PlanningService().propose_plan(question)).present_examples_per_s)
    assert rates[0] == rates[1] is not None, "both replicas lie whole in their zones, whatever is proposed"


@pytest.mark.parametrize("state", [GenerationState.RUNNING, GenerationState.ENDED])
def test_the_planner_is_asked_for_the_rate_of_the_last_shape_too(state: GenerationState) -> None:
    """What the next steps should take is judged by how the last ones compare with the same profile."""
    plan = Plan(p=1, d=1, micro_batch=1, global_batch=8)
    last = generation(worker(0, NAMES[0]), plan=plan, state=state)
    asking = replace(
        loaded("j", has=NAMES[:1]),
        generation=generation_row("j", 1, 0.0, plan=plan.to_document()),
        view=replace(job(last), id="j", name="j"),
    )
    assert _make_question(asking, asking.view, devices(NAMES[0]), VMS).present == plan
