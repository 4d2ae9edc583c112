"""What the leader has learned of the fleet survives a restart and a change of the leader."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from disturbed_fleet import QUICK
from fleet_world import FleetWorld, fleet_world
from varuna_manager.domain.fleet_past import FleetPast, LivesSummary, VmLife, summarize_lives
from varuna_manager.domain.fleet_watch import FleetWatch
from varuna_manager.domain.observed import VmView
from varuna_manager.domain.states import VmState

HOUR_S = 3600.0


async def seen(world: FleetWorld) -> FleetPast:
    """The history as the decisions see it."""
    (job,) = (await world.manager.loader.load_snapshot()).jobs
    return job.view.fleet


async def test_a_new_manager_knows_losses_hours_and_joins_of_the_one_before(tmp_path: Path) -> None:
    async with fleet_world(tmp_path, seed=1, rules=QUICK) as world:
        await world.manager.fleet.set_target(4)
        await world.submit("long", steps=10_000)
        for number in range(1, 4):
            await world.run(400)
            await world.market.preempt_vm(f"vm-{number}", 30.0 if number == 2 else 0.0)
        await world.run(400)
        before = await seen(world)
        morphs = (await world.manager.loader.load_snapshot()).jobs[0].view.morphs
        assert len(before.losses_at) == 3
        assert before.vm_hours > 1.0
        assert morphs.measured
        await world.manager.die()
        await world.manager.start(world.provider)
        after = await seen(world)
        assert after.losses_at == pytest.approx(before.losses_at, abs=1.0)
        assert after.stable_since == pytest.approx(before.stable_since, abs=1.0)
        assert after.join_s == pytest.approx(before.join_s, abs=1.0)
        assert after.vm_hours == pytest.approx(before.vm_hours, rel=0.02)
        assert after.removals == pytest.approx(before.removals, rel=0.01)
        assert after.stops_per_hour(4) == pytest.approx(before.stops_per_hour(4), rel=0.02)
        assert (await world.manager.loader.load_snapshot()).jobs[0].view.morphs == morphs, (
            "these are made of the generations"
        )


@pytest.mark.parametrize("seed", range(5))
def test_looking_back_gives_what_looking_on_gave(seed: int) -> None:
    """For three days VMs come, fall silent, get notice, are drained and go, at most one a minute."""
    chance, watch, now = Random(seed), FleetWatch(0.0), 0.0
    views: dict[str, VmView] = {}
    states: dict[str, list[tuple[float, VmState]]] = {}
    goes_at: dict[str, float] = {}
    for minute in range(3 * 24 * 60):
        now = minute * 60.0
        for name, view in chance.sample(list(views.items()), min(1, len(views))):
            new = changed(view, chance, now)
            if new is not None:
                if new.notice_deadline is not None:
                    goes_at[name] = new.notice_deadline
                views[name] = new
                states[name].append((now, new.state))
                if new.state is VmState.GONE:
                    del views[name]
        if len(views) < 5 and chance.random() < 0.05:
            name = f"vm-{len(states)}"
            views[name] = VmView(id=name, state=VmState.REQUESTED, created_at=now)
            states[name] = [(now, VmState.REQUESTED)]
        past = watch.observe_vms(views, now)
    lives = [VmLife(created_at=of[0][0], states=of, notice_deadline=goes_at.get(name)) for name, of in states.items()]
    history = summarize_lives(lives, now)
    assert len(history.losses_at) > 10
    assert past.losses_at == history.losses_at[-len(past.losses_at) :]
    assert past.stable_since == history.stable_since
    assert past.removals == pytest.approx(history.removals, rel=1e-3)
    assert 0 < past.announced < past.removals
    assert past.announced == pytest.approx(history.announced, rel=1e-3)
    assert past.vm_hours == pytest.approx(history.vm_hours, rel=1e-3)
    again = FleetWatch(now)
    again.add_past(history)
    assert again.observe_vms(views, now).join_s == past.join_s


def changed(view: VmView, chance: Random, now: float) -> VmView | None:
    match view.state:
        case VmState.REQUESTED if chance.random() < 0.5:
            return replace(view, state=VmState.READY)
        case VmState.READY if chance.random() < 0.05:
            state = chance.choice([VmState.GONE, VmState.LOST, VmState.SUSPECT, VmState.DRAINING])
            notice = now + chance.choice([5.0, 30.0]) if state is VmState.DRAINING and chance.random() < 0.5 else None
            return replace(view, state=state, notice_deadline=notice)
        case VmState.SUSPECT | VmState.LOST if chance.random() < 0.5:
            return replace(view, state=chance.choice([VmState.READY, VmState.GONE]))
        case VmState.DRAINING if chance.random() < 0.5:
            return replace(view, state=VmState.GONE)
    return None


def test_a_fleet_without_a_past_has_nothing_to_tell() -> None:
    assert summarize_lives([], HOUR_S) == LivesSummary()
