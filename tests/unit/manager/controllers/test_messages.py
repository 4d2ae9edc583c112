"""What agents are told of a generation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from decision_views import NOW, RULES, devices, plan_for, vm
from snapshots import loaded
from varuna_manager.controllers.messages import (
    launch_message,
    send_ahead_message,
    start_newcomers_message,
    stop_message,
)
from varuna_manager.domain.commands import StopKey
from varuna_manager.domain.newcomers import WantedNewcomers
from varuna_manager.domain.states import StopMode
from varuna_manager.history.morph_spans import MorphSpans
from varuna_manager.world.facts import GenerationFacts
from varuna_proto.state_use import StateUse
from varuna_proto.v1 import agent_pb2 as pb

URLS = {"default_checkpoint_url": "", "profile_cache_url": ""}


def test_each_vm_is_told_its_zone() -> None:
    plan, here = plan_for(2), devices("a", "b")
    facts = GenerationFacts("j", 1, 1, "training", "launching", plan.to_document(), "a", 1, *[None] * 15)  # type: ignore[arg-type]
    job = replace(loaded("j", has=("a", "b")), generation=facts._replace(in_place=False))
    for name, zone in (("a", "north"), ("b", "south"), ("b", "")):
        started = launch_message(job, vm(name, zone=zone), secrets={}, spans=MorphSpans(), **URLS).launch
        assert ([worker.rank for worker in started.workers], started.zone) == (["ab".index(name)], zone)
        wanted = WantedNewcomers(number=2, plan=plan, placement=here, devices=frozenset(here))
        ahead = start_newcomers_message(job, wanted, vm(name, zone=zone), secrets={}, **URLS).start_newcomers
        assert ([worker.rank for worker in ahead.launch.workers], ahead.launch.zone) == (["ab".index(name)], zone)


def test_each_vm_is_told_who_the_ranks_of_the_next_shape_are_now() -> None:
    """On "b" a new process starts beside the present one, which does not go on; "d" has no part in it."""
    plan, placement = plan_for(3), devices("c", "a", "b")
    facts = GenerationFacts("j", 4, 1, "training", "running", plan_for(2).to_document(), "host", 9, *[None] * 15)  # type: ignore[arg-type]
    job = replace(loaded("j", has=("a", "b")), generation=facts._replace(in_place=False, secret="s3"))
    wanted = WantedNewcomers(number=5, plan=plan, placement=placement, devices=frozenset(devices("b", "c")))
    for name, ranks in (("a", [1]), ("b", [2]), ("c", [0])):
        message = send_ahead_message(job, wanted, vm(name))
        assert message is not None
        sent = message.send_ahead
        assert (sent.job_id, sent.generation, sent.request) == ("j", 4, wanted.request)
        assert [worker.rank for worker in sent.workers] == ranks
        assert list(sent.ranks_before) == [0, 1, 0]
        assert (sent.world_size, sent.rendezvous_host, sent.rendezvous_port, sent.secret) == (2, "host", 9, "s3")
        assert sent.plan.p * sent.plan.d == 3
    assert send_ahead_message(job, wanted, vm("d")) is None


@pytest.mark.parametrize("copies_shares", [True, False])
def test_each_launch_of_a_generation_says_what_was_chosen_for_it(copies_shares: bool) -> None:
    """The choice is in the generation's row, and the job's view has it from there."""
    facts = GenerationFacts("j", 1, 1, "training", "launching", plan_for(2).to_document(), "a", 1, *[None] * 15)  # type: ignore[arg-type]
    job = loaded("j", has=("a", "b"))
    job = replace(
        job,
        generation=facts._replace(in_place=False, copies_shares=copies_shares),
        view=replace(job.view, copies_shares=copies_shares),
    )
    sent = [launch_message(job, vm(name), secrets={}, spans=MorphSpans(), **URLS).launch for name in "ab"]
    assert [launch.copies_shares for launch in sent] == [copies_shares] * 2


def test_a_launch_says_how_often_losses_need_the_checkpoint_with_copies_and_without() -> None:
    """Its workers go by what they really keep."""
    plan = replace(plan_for(2), p=2, d=1)
    facts = GenerationFacts("j", 1, 1, "training", "launching", plan.to_document(), "a", 1, *[None] * 15)  # type: ignore[arg-type]
    job = loaded("j", has=("a", "b"))
    urls: Any = {"secrets": {}, "spans": MorphSpans(), **URLS}

    def launch(keepers: list[int] | None) -> pb.Launch:
        generation = facts._replace(in_place=False, keepers=keepers)
        return launch_message(replace(job, generation=generation), vm("a"), **urls).launch

    with_copies, without = launch([1, 0]), launch(None)
    assert with_copies.stops_per_hour < with_copies.stops_without_copies_per_hour
    assert with_copies.stops_without_copies_per_hour == without.stops_per_hour == without.stops_without_copies_per_hour


@pytest.mark.parametrize("mode", [StopMode.SAVE_FIRST, StopMode.HOLD_FIRST, StopMode.HOLD_WITHIN_STEP])
def test_only_workers_of_a_vm_that_goes_have_no_longer_than_until_then(mode: StopMode) -> None:
    """Where a step is not over before a VM goes, those of the others leave because of a loss."""
    key = StopKey(job_id="j", generation=1, mode=mode)

    def ask(leaves_at: float | None) -> float:
        message = stop_message(
            key, RULES, now=NOW, step_s=50.0, leaves_at=leaves_at, traceparent="", state_use=StateUse(keep=True)
        )
        return message.stop.grace_s

    whole_s = RULES.save_grace_s + 100.0
    assert (ask(None), ask(NOW + 9.0), ask(NOW - 5.0), ask(NOW + 1e6)) == (whole_s, 8.0, 1.0, whole_s)
