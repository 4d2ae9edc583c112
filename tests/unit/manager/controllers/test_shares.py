"""Who gets which devices: the pool of free ones, and shares by the real planner's rates."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from decision_views import RULES, vm
from planner_faults import DISK_FULL, FailsOnce, SteppedClock
from snapshots import PROFILE, loaded, snapshot
from varuna_manager.controllers.gpu_types import GpuTypes
from varuna_manager.controllers.job_view import DevicePool, Snapshot
from varuna_manager.controllers.shares import ShareOut, Shares, _question
from varuna_manager.domain.gpu_types import OnlyType
from varuna_manager.domain.sharing import EACH_SIZE
from varuna_manager.domain.spec import JobSpec, Resources
from varuna_manager.planning import rates as rates_module
from varuna_manager.planning.rates import RateQuestion, RateService
from varuna_manager.world.bell import Bell
from varuna_proto.plan import Device
from waiting import DEADLINE_S


def test_a_job_gets_its_own_devices_first_and_what_is_taken_is_not_given_again() -> None:
    vms = [vm("a"), vm("b", gpus=2), vm("c", quarantined=True), vm("d", connected=False)]
    pool = DevicePool(snapshot(vms, loaded("x", has=("b",))))
    own, free = Device("b", 0), (Device("a", 0), Device("b", 1))
    assert pool.for_job("x", None) == ((free[0], own, free[1]), (Device("c", 0),))
    assert pool.for_job("x", 1)[0] == (own,)
    assert pool.for_job("x", 2)[0] == (free[0], own)
    assert pool.for_job("y", None)[0] == free
    pool.take_devices([own, free[0], Device("c", 0)])
    assert pool.for_job("y", None) == ((free[1],), ())


def test_a_device_where_a_process_waits_is_its_jobs() -> None:
    """Also to a job that comes before it."""
    vms = [vm("a"), vm("b")]
    waiting = Device("a", 0)
    pool = DevicePool(snapshot(vms, loaded("x")), waiting={waiting: "x"})
    assert pool.for_job("y", None)[0] == (Device("b", 0),)
    assert pool.for_job("x", None)[0] == (waiting, Device("b", 0))
    assert pool.keep_free("x", [waiting]) == {waiting}
    assert pool.keep_free("y", [waiting]) == frozenset()
    quarantined = DevicePool(snapshot([vm("a", quarantined=True)], loaded("x")), waiting={waiting: "x"})
    assert quarantined.keep_free("x", [waiting]) == frozenset()


def test_whoever_takes_any_gpu_leaves_those_that_others_ask_for() -> None:
    vms = [vm("a", gpu_type="NVIDIA A100"), vm("b", gpu_type="Tesla V100"), vm("c", gpu_type="NVIDIA A100")]
    asked = loaded("x")
    choosy = replace(asked, spec=asked.spec.model_copy(update={"resources": Resources(gpu_type="A100")}))
    shown = snapshot(vms, loaded("y"), choosy)
    pool = DevicePool(shown)
    assert pool.for_job("y", 1)[0] == (Device("b", 0),)
    assert pool.for_job("x", None, resources=choosy.spec.resources)[0] == (Device("a", 0), Device("c", 0))
    assert pool.count_unfit(choosy.spec.resources) == 1
    assert (shown.gpus, shown.find_gpus(choosy.spec.resources).gpus) == (3, 2)


def test_all_gpus_of_a_job_that_shares_the_fleet_are_of_one_type() -> None:
    names = {"a": "V100", "b": "V100", "c": "A100", "d": "A100", "e": "A100", "f": "A100", "g": ""}
    vms = {name: vm(name, gpu_type=gpu_type) for name, gpu_type in names.items()}
    occupied = {Device("a", 0): "x", Device("b", 0): "x", Device("c", 0): "y"}
    types = GpuTypes(vms, occupied, jobs=2)
    shared = "several jobs share the fleet"
    found = types.find_only_type("x", Resources(), {"a", "b"})
    assert found == OnlyType("V100", shared), "there are 3 A100 for it, and it has 2 V100"
    assert types.find_only_type("new", Resources(), ()) is None, "other jobs have all V100"
    assert types.find_only_type("x", Resources(gpu_type="v100"), {"a"}) is None, "it takes no other"
    rest = GpuTypes(vms, {Device("c", 0): "y"}, jobs=2)
    assert rest.find_only_type("new", Resources(), ()) == OnlyType("A100", shared)
    free = GpuTypes(vms, {}, jobs=2)
    assert free.find_only_type("x", Resources(), {"a", "b"}) == OnlyType("A100", shared), "there is twice as much"
    alike = {name: one for name, one in vms.items() if one.gpu_type != "A100"}
    assert GpuTypes(alike, {}, jobs=2).find_only_type("x", Resources(), {"a"}) is None, "all that is known are V100"


def test_a_job_that_has_the_fleet_to_itself_mixes_types_unless_it_forbids_that() -> None:
    vms = {name: vm(name, gpu_type=gpu_type) for name, gpu_type in {"a": "V100", "b": "A100"}.items()}
    alone = GpuTypes(vms, {}, jobs=1)
    assert alone.find_only_type("x", Resources(), {"a"}) is None
    assert alone.find_only_type("x", Resources(max_gpus=2), {"a"}) is None
    enough = alone.find_only_type("x", Resources(max_gpus=1), {"a"})
    assert enough == OnlyType("V100", "there are enough for resources.max_gpus 1")
    forbidden = alone.find_only_type("x", Resources(mix_gpu_types=False), {"a"})
    assert forbidden == OnlyType("V100", "resources.mix_gpu_types is false")


def test_a_job_that_uses_few_gpus_keeps_the_large_ones() -> None:
    sizes = {"a": ("A100", 80), "b": ("A100", 80), "c": ("T4", 16), "d": ("T4", 16), "e": ("T4", 16), "f": ("T4", 16)}
    vms = {name: vm(name, gpu_type=kind, device_memory_bytes=gib << 30) for name, (kind, gib) in sizes.items()}
    found = GpuTypes(vms, {}, jobs=1).find_only_type("new", Resources(max_gpus=2), ())
    assert found == OnlyType("A100", "there are enough for resources.max_gpus 2")


def test_a_job_that_moves_to_another_type_keeps_none_of_the_old() -> None:
    vms = [vm("a", gpu_type="V100"), vm("b", gpu_type="A100"), vm("c", gpu_type="A100")]
    job = replace(loaded("x", has=("a",)), only_type=OnlyType("A100", "several jobs share the fleet"))
    devices, _ = DevicePool(snapshot(vms, job)).for_job("x", None, resources=job.resources)
    assert devices == (Device("b", 0), Device("c", 0))


def test_gpus_that_can_be_shared_out_are_the_usable_ones_and_those_in_use() -> None:
    vms = [vm("a"), vm("b", gpus=2), vm("c", quarantined=True), vm("d", connected=False), vm("e", connected=False)]
    assert snapshot(vms).gpus == 3
    assert snapshot(vms, loaded("x", has=("a", "d"))).gpus == 4


async def test_a_job_alone_has_no_share_and_two_get_theirs_by_the_planners_rates() -> None:
    vms = [vm(name, device_memory_bytes=10**9) for name in "abcd"]
    rates = RateService(Bell())
    shares = ShareOut(rates, RULES)
    alone = loaded("x", has=("a", "b", "c", "d"))
    assert (await shares.compute_shares(snapshot(vms, alone))).with_share(alone.view) == alone.view
    other = loaded("y")
    both = snapshot(vms, alone, other)
    given = await until(shares, both, {"x": 2, "y": 2})
    assert given.with_share(other.view).share_due
    assert not given.with_share(alone.view).share_due
    assert await shares.compute_shares(both) is given, "nothing has changed"
    urgent = loaded("z", priority=1, min_gpus=4)
    await until(shares, snapshot(vms, alone, urgent), {"x": 0, "z": 4})
    await rates.close()


async def test_a_job_that_trains_keeps_its_gpus_beside_a_vm_whose_memory_no_plan_fits() -> None:
    rates = RateService(Bell())
    vms = [*(vm(name, device_memory_bytes=10**9) for name in "abc"), vm("small", device_memory_bytes=1)]
    trains, waits = loaded("x", has=("a", "b", "c")), loaded("y", priority=-1)
    both = snapshot(vms, trains, waits)
    async with asyncio.timeout(DEADLINE_S):
        while await rates.list_rate_curves([_question(trains, both, both.gpus)]) != [()]:
            pass
    given = await ShareOut(rates, RULES).compute_shares(both)
    assert given.by_job["x"].gpus == 3
    assert not given.over
    await rates.close()


async def until(shares: ShareOut, snapshot: Snapshot, wanted: dict[str, int]) -> Shares:
    """The planner is loaded first and answers later: until then no GPUs are moved between jobs."""
    async with asyncio.timeout(DEADLINE_S):  # it may have to be compiled
        while True:
            given = await shares.compute_shares(snapshot)
            if {name: share.gpus for name, share in given.by_job.items()} == wanted:
                return given
            await asyncio.sleep(0.05)


async def test_rates_are_asked_once_for_each_number_of_gpus() -> None:
    rates = RateService(Bell())
    spec = JobSpec(name="n", workdir="/", run="true", global_batch=8)
    question = RateQuestion(profile_json=PROFILE, spec=spec, most=4, device_memory_bytes=10**9, gpus_per_vm=1)

    async def curve(question: RateQuestion) -> tuple[int, ...]:
        while True:
            (found,) = await rates.list_rate_curves([question])
            if found is not None:
                assert all(point.examples_per_s > 0 for point in found)
                return tuple(point.gpus for point in found)

    assert await curve(question) == (1, 2, 3, 4)
    assert await curve(replace(question, most=EACH_SIZE // 4)) == tuple(range(1, EACH_SIZE // 4 + 1))
    assert await rates.list_rate_curves([question]) == await rates.list_rate_curves([question])
    assert await curve(replace(question, device_memory_bytes=1)) == (), "no plan fits"
    assert await curve(replace(question, profile_json="{}")) == (), "it is no profile"
    await rates.close()


async def test_a_failure_of_the_planner_moves_no_gpus_and_it_is_asked_again_a_minute_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask = FailsOnce(rates_module._rates, DISK_FULL)
    monkeypatch.setattr(rates_module, "_rates", ask)
    clock, bell = SteppedClock(), Bell()
    rung = bell.add_listener()
    rates = RateService(bell, monotonic=clock)
    shares = ShareOut(rates, RULES)
    runs, waits = loaded("x", has=("a", "b", "c", "d")), loaded("y", priority=-1)
    both = snapshot([vm(name, device_memory_bytes=10**9) for name in "abcde"], runs, waits)
    await shares.compute_shares(both)
    async with asyncio.timeout(DEADLINE_S):
        await rung.wait()
    for seconds in (0.0, 59.0):
        clock.now += seconds
        given = await shares.compute_shares(both)
        assert {name: share.gpus for name, share in given.by_job.items()} == {"x": 4, "y": 1}
    assert ask.calls == 1, "a steady failure is not looked for at every look"
    clock.now += 2.0
    async with asyncio.timeout(DEADLINE_S):
        while (await rates.list_rate_curves([_question(runs, both, both.gpus)])) == [None]:
            pass
    assert ask.calls == 2
    await rates.close()


async def test_looks_do_not_wait_for_a_planner_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job's rates take long meanwhile."""
    ask = FailsOnce(rates_module._rates, DISK_FULL)
    monkeypatch.setattr(rates_module, "_rates", ask)
    rates = RateService(Bell())
    question = _question(loaded("x"), snapshot([vm("a")]), 1)
    assert await rates.list_rate_curves([question]) == [None]
    held = threading.Event()
    monkeypatch.setattr(rates_module, "_rates", lambda *given: held.wait(DEADLINE_S) and {})
    other = replace(question, gpus_per_vm=2)
    assert await rates.list_rate_curves([other]) == [None]
    monkeypatch.setattr(rates_module, "_PATIENCE_S", DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S / 2):
        assert await rates.list_rate_curves([question]) == [None]
    monkeypatch.setattr(rates_module, "_rates", lambda _, missing, __: dict.fromkeys(missing))
    held.set()
    await rates.close()
