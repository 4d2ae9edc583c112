"""How the manager calls the planner: it never blocks, and a failure there becomes a reason."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decision_views import generation, worker
from planner_faults import DISK_FULL, FailsOnce, SteppedClock
from varuna_manager.domain.memory_margin import MOST_LESSONS, NO_MARGIN, MemoryMargin, MemoryShortage, learn_margin
from varuna_manager.domain.spec import JobSpec
from varuna_manager.planning import planning
from varuna_manager.planning.planning import GpuOfVm, PlanningService, PlanQuestion
from varuna_planner.liveput.morph_cost import NO_MOVES
from varuna_planner.profile.document import GpuTypeSpeeds, Measurement, Profile, SectionProfile
from varuna_proto.plan import Device, Plan
from waiting import DEADLINE_S

SPEC = JobSpec(name="n", workdir="/", run="true", global_batch=4)
MEASURED = Measurement(
    micro_batch=1,
    forward_us=1000,
    backward_us=2000,
    recompute_us=1000,
    output_bytes=1,
    input_bytes=1,
    activation_bytes=1,
)


def profile(sections: int = 2) -> Profile:
    one = {"parameter_bytes": 8, "optimizer_bytes": 8, "gradient_bytes": 8, "measurements": (MEASURED,)}
    return Profile(sections=tuple(SectionProfile(index=index, name=str(index), **one) for index in range(sections)))


def question(profile_json: str, previous_p: int | None = None) -> PlanQuestion:
    return PlanQuestion(
        profile_json=profile_json,
        spec=SPEC,
        devices=(Device("a", 0), Device("b", 0)),
        device_memory_bytes=10**9,
        gpus_per_vm=1,
        previous_p=previous_p,
    )


async def test_the_loop_goes_on_while_the_planner_is_loaded_and_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, calls = asyncio.get_running_loop(), list[str]()
    for name in ("_warm_up", "_answer"):
        call = getattr(planning, name)

        def goes_on(*given: Any, name: str = name, call: Callable[..., Any] = call) -> Any:
            turned = threading.Event()
            loop.call_soon_threadsafe(turned.set)
            assert turned.wait(DEADLINE_S), "the planner holds the loop"
            calls.append(name)
            return call(*given)

        monkeypatch.setattr(planning, name, goes_on)
    work = asyncio.create_task(_warm_up_and_ask(PlanningService()))
    # By this process' own processor time: how long the machine leaves it standing says nothing.
    longest, before = 0.0, time.process_time()
    while not work.done():
        await asyncio.sleep(0.01)
        longest, before = max(longest, time.process_time() - before), time.process_time()
    assert work.result() == 2, "two devices are used"
    assert calls == ["_warm_up", "_answer"]
    assert longest < 5.0, "heartbeats must get through while the planner computes"


async def _warm_up_and_ask(service: PlanningService) -> int:
    await service.warm_up()
    answer = await service.propose_plan(question(profile().to_json()))
    assert answer.plan is not None
    return answer.plan.p * answer.plan.d


@pytest.mark.parametrize("document", ["", "no profile", "{}", "[" * 100_000, '{"schema": "varuna.profile/1"}'])
async def test_what_is_no_profile_is_told(document: str) -> None:
    assert await PlanningService().check_profile(document)


async def test_a_defect_of_the_planner_fails_a_new_job_and_lets_a_trained_one_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("varuna_planner.search.zones.choose_plan", broken)
    new = await PlanningService().propose_plan(question(profile().to_json()))
    assert new.plan is None
    assert not new.possible
    assert new.reason == "the planner failed on 2 GPUs: ZeroDivisionError: division by zero"
    trained = await PlanningService().propose_plan(question(profile().to_json(), previous_p=1))
    assert trained.possible


@pytest.mark.processes
def test_a_machine_where_numba_may_write_nowhere_uses_the_data_directory(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from numba.core import caching
caching.CacheImpl._locator_classes = [caching.UserProvidedCacheLocator]  # as where no folder of its own is writable
from varuna_manager.planning.planner import load_planner
load_planner(Path(sys.argv[1]))
import varuna_planner.search.auto_config
"""
    cache = tmp_path / "numba"
    subprocess.run([sys.executable, "-c", script, str(cache)], check=True, timeout=DEADLINE_S)
    assert cache.is_dir()


async def test_a_profile_that_the_workers_disagree_with_is_corrected() -> None:
    service = PlanningService()
    plan = Plan(p=2, d=1, micro_batch=1, global_batch=4, stage_starts=(0, 1))
    true = await service.compare_profile(profile().to_json(), plan, {0: 3000.0, 1: 3000.0})
    assert (true.expected_us, true.corrected_json, true.drift) == ((3000.0, 3000.0), None, None)
    assert (true.gpu_types, true.guessed_types) == (("", ""), frozenset())
    found = await service.compare_profile(profile().to_json(), plan, {0: 4500.0, 1: 4500.0})
    assert found.corrected_json is not None
    sections = Profile.from_json(found.corrected_json).sections
    assert [section.measurements[0].backward_us for section in sections] == [3000, 3000]
    assert "1.50" in (found.drift or "")


async def test_each_rank_is_compared_with_the_times_of_its_type() -> None:
    speeds = GpuTypeSpeeds(gpu_type="A100", section_speeds=(2.0, 3.0))
    known = profile().model_copy(update={"gpu_type": "V100", "other_gpu_types": (speeds,)}).to_json()
    plan = Plan(p=2, d=2, micro_batch=1, global_batch=4, stage_starts=(0, 1), gpu_types=("V100", "V100", "A100", "K80"))
    found = await PlanningService().compare_profile(known, plan, {0: 3000.0, 1: 3000.0, 2: 1500.0, 3: 3000.0})
    assert found.expected_us == (3000.0, 3000.0, 1500.0, 3000.0)
    assert (found.gpu_types, found.guessed_types) == (plan.gpu_types, {"K80"})
    assert found.drift is not None
    assert found.drift.startswith("forward and backward on K80 take 1.00 times as long as on V100")


async def test_a_rank_without_a_time_does_not_count() -> None:
    plan = Plan(p=2, d=2, micro_batch=1, global_batch=2, stage_starts=(0, 1), gpu_types=("V100", "V100", "K80", "K80"))
    known = profile().model_copy(update={"gpu_type": "V100"}).to_json()
    found = await PlanningService().compare_profile(known, plan, {0: 4500.0, 1: 4500.0})
    assert found.drift == "forward and backward on V100 take 1.50, 1.50 times as long as profiled: the profile is " + (
        "corrected as a whole"
    )
    assert found.expected_us == (3000.0,) * 4
    assert found.corrected_json is not None
    assert Profile.from_json(found.corrected_json).known_gpu_types == {"V100"}, "nobody knows the speed of the other"


async def test_a_plan_without_types_is_for_the_profiles_own() -> None:
    plan = Plan(p=2, d=1, micro_batch=1, global_batch=4, stage_starts=(0, 1))
    known = profile().model_copy(update={"gpu_type": "V100"}).to_json()
    found = await PlanningService().compare_profile(known, plan, {0: 3000.0, 1: 3000.0})
    assert (found.gpu_types, found.guessed_types) == (("V100", "V100"), frozenset())


async def test_growth_is_weighed_by_one_profile() -> None:
    service = PlanningService()
    present = Plan(p=1, d=1, micro_batch=1, global_batch=4, stage_starts=(0,), examples_per_s=1e9)
    answer = await service.propose_plan(replace(question(profile().to_json()), present=present))
    assert answer.present_examples_per_s == pytest.approx(1e6 / 6000, rel=0.2), "not what the old profile promised"
    for other in (replace(present, p=3, stage_starts=(0, 1, 2)), replace(present, p=3, stage_starts=())):
        answer = await service.propose_plan(replace(question(profile().to_json()), present=other))
        assert answer.plan is not None
        assert answer.present_examples_per_s is None, "it was made by the profile of another model"


def several_sizes(kept_for: str) -> str:
    """Of a model that is fastest with 4 examples in a micro-batch."""
    at = [MEASURED.model_copy(update={"micro_batch": m, "activation_bytes": 100 * m}) for m in (1, 2, 4)]
    made = profile()
    sections = tuple(section.model_copy(update={"measurements": tuple(at)}) for section in made.sections)
    return made.model_copy(update={"sections": sections, "micro_batch_kept_for": kept_for}).to_json()


async def test_a_job_keeps_the_micro_batch_that_its_random_numbers_depend_on() -> None:
    service, one = PlanningService(), (Device("a", 0),)
    first = replace(question(several_sizes("model.py:3")), devices=one)
    chosen = await service.propose_plan(first)
    assert chosen.plan is not None
    assert chosen.plan.micro_batch == 4
    later = replace(first, trained_micro_batch=2)
    kept = await service.propose_plan(later)
    assert kept.plan is not None
    assert kept.plan.micro_batch == 2
    assert "the micro-batch stays 2, because random numbers depend on it: model.py:3" in kept.reason
    free = await service.propose_plan(replace(later, profile_json=several_sizes("")))
    assert free.plan is not None
    assert free.plan.micro_batch == 4
    pinned = SPEC.model_copy(update={"plan": SPEC.plan.model_copy(update={"micro_batch": 1})})
    users = await service.propose_plan(replace(later, spec=pinned))
    assert users.plan is not None
    assert users.plan.micro_batch == 1, "the user knows best"


async def test_a_job_that_cannot_keep_its_micro_batch_waits() -> None:
    document = several_sizes("model.py:3")
    large = replace(question(document), devices=(Device("a", 0),), trained_micro_batch=4, device_memory_bytes=None)
    assert (await PlanningService().propose_plan(large)).plan is not None
    small = Profile.from_json(document)
    for memory in range(100, 10**4, 100):  # the least memory in which micro-batches of one example fit
        asked = replace(large, device_memory_bytes=memory, trained_micro_batch=None)
        if (await PlanningService().propose_plan(asked)).plan is not None:
            break
    kept = await PlanningService().propose_plan(replace(asked, trained_micro_batch=4))
    assert small.micro_batches == (1, 2, 4)
    assert kept.plan is None
    assert kept.possible, "on other VMs"
    assert "the micro-batch stays 4" in kept.reason


async def test_a_job_that_has_had_a_plan_waits_where_the_devices_that_are_left_are_too_small() -> None:
    async def may_fit(**given: Any) -> bool:
        found = await PlanningService().propose_plan(replace(question(profile().to_json()), **given))
        assert found.plan is None
        return found.possible

    assert await may_fit(has_fitted=True, device_memory_bytes=1), "it had larger ones"
    assert not await may_fit(device_memory_bytes=1)
    needs_more = MemoryMargin(factor=1e9, lessons=1)
    assert not await may_fit(previous_p=1, margin=needs_more), "it has run out of memory"
    assert await may_fit(has_fitted=True, margin=needs_more), "but has trained with what it learned from that"
    sizes = (GpuOfVm("a", "T4", 1), GpuOfVm("b", "A100", 10**9))
    assert await may_fit(device_memory_bytes=1, devices=(Device("a", 0),), gpu_types=sizes)


async def test_the_answer_after_a_loss_has_a_plan_that_keeps_the_step() -> None:
    """On the devices of the survivors alone: the best one if the step can go on with it, else with its micro-batch."""
    service, asked = PlanningService(), question(several_sizes(""))
    assert (await service.propose_plan(asked)).keeping is None

    async def keep(micro_batch: int, *, pinned: int | None = None) -> int | None:
        """The micro-batch with which a step of this one is kept; None: there is no such plan."""
        spec = SPEC.model_copy(update={"plan": SPEC.plan.model_copy(update={"micro_batch": pinned})})
        wanted = replace(asked, spec=spec, survivors=(Device("b", 0),), kept_micro_batch=micro_batch)
        answer = await service.propose_plan(wanted)
        assert answer.plan is not None
        if answer.keeping is None or answer.keeping.plan is None:
            return None
        assert answer.keeping.placement == (Device("b", 0),)
        return answer.keeping.plan.micro_batch

    assert [await keep(size) for size in (1, 2, 4)] == [4, 4, 4]
    assert await keep(3) == 3, "4 would throw the step away"
    assert await keep(4, pinned=2) == 2
    assert await keep(3, pinned=2) is None, "the job file asks for it"
    bound = replace(question(several_sizes("model.py:3")), trained_micro_batch=2)
    answer = await service.propose_plan(replace(bound, survivors=(Device("b", 0),), kept_micro_batch=2))
    assert answer.keeping is not None
    assert answer.keeping.plan is not None
    assert answer.keeping.plan.micro_batch == 2, "random numbers depend on it"


async def test_after_a_want_of_memory_plans_become_more_careful_until_none_fits() -> None:
    """Whatever plan is made, its stages turn out to need a little more than their device has."""
    service, asked = PlanningService(), replace(question(several_sizes("")), device_memory_bytes=1200)
    limit, margin, seen = 1200, NO_MARGIN, list[int]()
    for _ in range(MOST_LESSONS + 1):
        proposed = await service.propose_plan(replace(asked, margin=margin))
        if proposed.plan is None:
            break
        needed = max(proposed.plan.memory_bytes)
        assert not seen or needed < seen[-1]
        seen.append(needed)
        stage = proposed.plan.memory_bytes.index(needed)
        short = MemoryShortage(limit_bytes=limit, asked_bytes=1)
        lesson = learn_margin(generation(worker(stage, "a", shortage=short), plan=proposed.plan), margin)
        assert lesson is not None
        margin = lesson.margin
    assert len(seen) > 1, "there was more than one plan"
    assert proposed.plan is None
    assert "it has run out of memory, so stages count" in proposed.reason


def typed_question(own: str, *types: str, present: Plan | None = None, **speeds: float) -> PlanQuestion:
    """One VM of each type (empty: not known by name); the profile is of `own`, and knows the speeds of others."""
    measured = profile().model_copy(
        update={
            "gpu_type": own,
            "other_gpu_types": tuple(
                GpuTypeSpeeds(gpu_type=name, section_speeds=(speed, speed)) for name, speed in speeds.items()
            ),
        }
    )
    names = [f"vm{number}" for number in range(len(types))]
    devices = tuple(Device(name, 0) for name in names)
    return PlanQuestion(
        profile_json=measured.to_json(),
        spec=SPEC.model_copy(update={"global_batch": 32}),
        devices=devices,
        device_memory_bytes=10**9,
        gpus_per_vm=1,
        gpu_types=tuple(GpuOfVm(name, of_vm, 10**9) for name, of_vm in zip(names, types, strict=True) if of_vm),
        previous=devices if present is not None else (),
        present=present,
    )


async def test_what_only_updates_read_is_told_apart_of_the_time_in_which_the_state_moves() -> None:
    here = tuple(Device(name, 0) for name in "cd")
    asked = replace(
        question(profile().to_json(), 1), devices=here, previous=(Device("a", 0),), previous_starts=(0,), present=None
    )
    moved = await PlanningService().propose_plan(asked)
    assert moved.plan is not None
    whole_s, late_s = moved.moves.in_place
    assert moved.moves.to_new_s == whole_s > 0
    assert late_s == pytest.approx(whole_s / 2), "half of each section's bytes are the optimizer's"
    stays = await PlanningService().propose_plan(replace(asked, devices=asked.previous))
    assert stays.moves.to_new_s > stays.moves.in_place.whole_s > 0, "a process has what it had"
    first = await PlanningService().propose_plan(replace(asked, previous=(), previous_starts=()))
    assert first.moves == NO_MOVES


async def test_copies_that_autocast_makes_are_neither_saved_nor_moved() -> None:
    measured = profile()
    half = measured.model_copy(
        update={"sections": tuple(one.model_copy(update={"cast_bytes": 4}) for one in measured.sections)}
    )
    saves, moves = [], []
    for one in (measured, half):
        asked = replace(
            question(one.to_json(), 1), devices=(Device("c", 0),), previous=(Device("a", 0),), previous_starts=(0,)
        )
        proposed = await PlanningService().propose_plan(asked)
        assert proposed.plan is not None
        saves.append((await PlanningService().predict_save(one.to_json(), proposed.plan)).write_s)
        moves.append(proposed.moves)
    assert saves[1] == pytest.approx(saves[0] * (16 - 4) / 16)
    assert moves[1].to_new_s == pytest.approx(moves[0].to_new_s * (16 - 4) / 16)
    late = [one.in_place.late_s for one in moves]
    assert late[1] == pytest.approx(late[0]), "what passes do not read has none"


@pytest.mark.parametrize(("device", "beside_passes"), [("cuda:0", True), ("cpu", False), (None, False)])
async def test_states_on_accelerators_are_copied_beside_the_passes(device: str | None, beside_passes: bool) -> None:
    measured = profile().model_copy(update={"environment": {} if device is None else {"device": device}})
    proposed = await PlanningService().propose_plan(question(measured.to_json()))
    assert proposed.plan is not None
    assert (await PlanningService().predict_save(measured.to_json(), proposed.plan)).beside_passes is beside_passes


async def test_gpus_of_two_types_get_a_plan_that_is_placed_by_type() -> None:
    found = await PlanningService().propose_plan(typed_question("V100", "V100", "A100", "V100", A100=4.0))
    assert found.plan is not None
    assert sorted(found.plan.gpu_types) == ["A100", "V100", "V100"]
    by_vm = {"vm0": "V100", "vm1": "A100", "vm2": "V100"}
    assert tuple(by_vm[device.vm_id] for device in found.placement) == found.plan.gpu_types
    assert max(found.plan.shares) >= 3 * min(found.plan.shares)


async def test_shares_that_do_not_fit_the_speeds_are_seen_in_the_present_rate() -> None:
    even = Plan(
        p=1, d=2, micro_batch=1, global_batch=32, stage_starts=(0,), recompute=(False,), gpu_types=("V100", "A100")
    )
    found = await PlanningService().propose_plan(typed_question("V100", "V100", "A100", present=even, A100=3.0))
    assert found.plan is not None
    assert found.present_examples_per_s is not None
    assert found.plan.examples_per_s > 1.5 * found.present_examples_per_s


async def test_one_known_type_is_named_and_one_that_is_not_known_is_not() -> None:
    known = await PlanningService().propose_plan(typed_question("V100", "A100", "A100", A100=2.0))
    assert known.plan is not None
    assert set(known.plan.gpu_types) == {"A100"}
    slower = await PlanningService().propose_plan(typed_question("V100", "V100", "V100"))
    assert slower.plan is not None
    assert known.plan.examples_per_s == pytest.approx(2 * slower.plan.examples_per_s, rel=0.05)
    unnamed = await PlanningService().propose_plan(typed_question("", "V100", "V100"))
    assert unnamed.plan is not None
    assert unnamed.plan.gpu_types == ()


async def test_a_vm_whose_gpus_have_no_name_is_used_where_it_counts_as_the_others() -> None:
    own = await PlanningService().propose_plan(typed_question("V100", "V100", "V100", "V100", ""))
    assert own.plan is not None
    assert (len(own.placement), own.plan.gpu_types) == (4, ()), "a type that is not known counts as the profile's"
    other = await PlanningService().propose_plan(typed_question("V100", "A100", "A100", "A100", "", A100=2.0))
    assert other.plan is not None
    assert {device.vm_id for device in other.placement} == {"vm0", "vm1", "vm2"}
    assert set(other.plan.gpu_types) == {"A100"}
    loss = replace(typed_question("V100", "A100", "A100", "", A100=2.0), kept_micro_batch=1)
    kept = await PlanningService().propose_plan(replace(loss, survivors=loss.devices[1:]))
    assert kept.keeping is not None
    assert kept.keeping.placement == (Device("vm1", 0),)


async def test_an_error_of_the_placement_fails_no_job_that_has_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> None:
        raise ValueError("1×4 needs 4 devices and there are 3")

    monkeypatch.setattr("varuna_planner.placement.place", broken)
    found = await PlanningService().propose_plan(question(profile().to_json(), previous_p=1))
    assert (found.plan, found.possible) == (None, True)


@pytest.mark.parametrize("error", [DISK_FULL, MemoryError(), ZeroDivisionError("division by zero")])
async def test_a_planner_that_has_failed_is_asked_the_same_again_a_minute_later(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    clock, choose = SteppedClock(), FailsOnce(planning._choose, error)
    monkeypatch.setattr(planning, "_choose", choose)
    service, asked = PlanningService(monotonic=clock), question(profile().to_json(), previous_p=1)
    failed = await service.propose_plan(asked)
    assert (failed.plan, failed.possible) == (None, True)
    text = f"the planner failed on 2 GPUs: {type(error).__name__}: {error}; it is asked again each minute"
    assert failed.reason == text
    clock.now += 59.0
    assert await service.propose_plan(asked) == failed
    assert choose.calls == 1, "a steady failure is not looked for at every look"
    clock.now += 2.0
    assert (await service.propose_plan(asked)).plan is not None
    clock.now += 3600.0
    assert (await service.propose_plan(asked)).plan is not None
    assert choose.calls == 2, "an answer is kept"


NO_CACHE = RuntimeError("cannot cache function 'f': no locator available for file 'f.py'")
"""By numba, where no folder for compiled code is writable, or the disk is full."""


@pytest.mark.parametrize("error", [DISK_FULL, MemoryError(), NO_CACHE])
async def test_what_the_machine_lacks_fails_no_new_job(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(planning, "_choose", FailsOnce(planning._choose, error))
    found = await PlanningService().propose_plan(question(profile().to_json()))
    assert (found.plan, found.possible) == (None, True)


async def test_the_first_question_loads_the_planner_where_it_could_not_be_warmed_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    load = FailsOnce(planning.load_planner, NO_CACHE)
    monkeypatch.setattr(planning, "load_planner", load)
    service = PlanningService(cache_dir=tmp_path)
    await service.warm_up()
    assert (await service.propose_plan(question(profile().to_json()))).plan is not None
    assert load.calls == 2
