"""What agents are told of a generation."""

from __future__ import annotations

from dataclasses import replace

from decision_views import devices, plan_for, vm
from snapshots import loaded
from varuna_manager.controllers.messages import launch_message, start_newcomers_message
from varuna_manager.domain.newcomers import WantedNewcomers
from varuna_manager.history.morph_spans import MorphSpans
from varuna_manager.world.facts import GenerationFacts

URLS = {"default_checkpoint_url": "", "profile_cache_url": ""}


def test_each_vm_is_told_its_zone() -> None:
    plan, here = plan_for(2), devices("a", "b")
    facts = GenerationFacts("j", 1, 1, "training", "launching", plan.to_document(), "a", 1, *[None] * 14)  # type: ignore[arg-type]
    job = replace(loaded("j", has=("a", "b")), generation=facts._replace(in_place=False))
    for name, zone in (("a", "north"), ("b", "south"), ("b", "")):
        started = launch_message(job, vm(name, zone=zone), secrets={}, spans=MorphSpans(), **URLS).launch
        assert ([worker.rank for worker in started.workers], started.zone) == (["ab".index(name)], zone)
        wanted = WantedNewcomers(number=2, plan=plan, placement=here, devices=frozenset(here))
        ahead = start_newcomers_message(job, wanted, vm(name, zone=zone), secrets={}, **URLS).start_newcomers
        assert ([worker.rank for worker in ahead.launch.workers], ahead.launch.zone) == (["ab".index(name)], zone)
