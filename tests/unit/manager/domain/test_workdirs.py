"""Workdirs are made ready only where their job will run, one at a time; one VM that fails is not the job's fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decision_views import NOW, RULES, decide, devices, generation, job, kinds, vm, worker
from snapshots import loaded, snapshot
from varuna_manager.agents.sessions import AgentSession
from varuna_manager.controllers.job_view import DevicePool, LoadedJob, Snapshot
from varuna_manager.controllers.preparations import Preparations
from varuna_manager.controllers.shares import ShareOut, Shares
from varuna_manager.domain.actions import FinishJob, StartGeneration
from varuna_manager.domain.observed import VmView
from varuna_manager.domain.preparing import Tenant, assign_places, choose_workdir, list_stale_jobs
from varuna_manager.domain.setups import SetupFailure, SetupProgress, list_failed_vms
from varuna_manager.domain.sharing import Contender, hold_back_shares, share_gpus
from varuna_manager.domain.states import VmState
from varuna_manager.planning.rates import RateService
from varuna_manager.world.bell import Bell
from varuna_proto.plan import Device
from varuna_proto.v1 import agent_pb2 as pb

# ---------------------------------------------------------------- where


def tenant(name: str, most: int | None = None, *, least: int = 1, **changes: object) -> Tenant:
    return replace(Tenant(id=name, makes_workdir=True, min_gpus=least, most_gpus=most), **changes)


def note_flaw(job_id: str, error: Exception) -> None:
    pytest.fail(f"agents cannot prepare {job_id}: {error}")


def fleet(*vms: VmView) -> dict[str, VmView]:
    return {one.id: one for one in vms}


def test_a_workdir_is_made_ready_on_as_many_vms_as_its_job_may_have() -> None:
    vms = fleet(vm("a", gpus=2), vm("b", gpus=2), vm("c", gpus=2), vm("d", quarantined=True), vm("e", connected=False))
    assert assign_places([tenant("x", 3)], vms).to_prepare == {"a": ("x",), "b": ("x",)}
    assert assign_places([tenant("x")], vms).by_job == {"x": {"a": 2, "b": 2, "c": 2}}
    both = assign_places([tenant("x", 3), tenant("y")], vms)
    assert both.to_prepare == {"a": ("x",), "b": ("x", "y"), "c": ("y",)}


def test_a_job_that_the_fleet_cannot_hold_prepares_nowhere() -> None:
    vms = fleet(*(vm(f"vm-{number}") for number in range(12)))
    jobs = [tenant(f"job-{number}", least=50) for number in range(12)]
    assert assign_places(jobs, vms).to_prepare == {}
    coming = fleet(*vms.values(), vm("new", gpus=38, state=VmState.REQUESTED, connected=False))
    found = assign_places([*jobs, tenant("now")], coming)
    assert found.by_job.keys() == {"now"}
    assert set(found.to_prepare.values()) == {("now", *(job.id for job in jobs))}, "the others are on their way"


def test_vms_whose_gpus_are_not_as_a_job_asks_are_no_place_for_it() -> None:
    vms = fleet(vm("a", gpus=2), vm("b", gpus=2), vm("c", gpus=2))
    choosy = tenant("x", 4, unfit_on=frozenset({"a"}))
    assert assign_places([choosy, tenant("y")], vms).by_job == {"x": {"b": 2, "c": 2}, "y": {"a": 2}}
    assert assign_places([tenant("x", least=5, unfit_on=frozenset({"a"}))], vms).to_prepare == {}, "4 GPUs fit"
    failed = tenant("x", 2, unfit_on=frozenset({"a"}), failed_on=frozenset({"a", "b", "c"}))
    assert assign_places([failed], vms).to_prepare == {"b": ("x",)}
    coming = fleet(*vms.values(), vm("new", gpus=9, state=VmState.REQUESTED, connected=False))
    waiting = tenant("x", least=7, unfit_on=frozenset({"a"}))
    assert assign_places([waiting], coming).to_prepare.keys() == {"b", "c"}


def test_a_job_without_a_share_prepares_nowhere() -> None:
    assert assign_places([tenant("x", 0)], fleet(vm("a"))).to_prepare == {}


def test_places_stay_where_the_job_runs_or_is_prepared_and_leave_those_where_it_failed() -> None:
    ready, begun = vm("b", prepared=frozenset({"x"})), vm("c", setting_up=frozenset({"x"}))
    vms = fleet(vm("a"), ready, begun, vm("d"), vm("e"))
    assert list(assign_places([tenant("x", 2)], vms).by_job["x"]) == ["b", "c"]
    assert list(assign_places([tenant("x", 2, runs_on={"e": 1})], vms).by_job["x"]) == ["e", "b"]
    busy = tenant("y", 2, makes_workdir=False, runs_on={"a": 1, "d": 1})
    assert list(assign_places([tenant("x", 3), busy], vms).by_job["x"]) == ["b", "c", "e"], "nobody runs there"
    assert list(assign_places([tenant("z", 3), busy], vms).by_job["z"]) == ["b", "c", "e"]
    failed = tenant("x", 4, failed_on=frozenset({"a", "b"}))
    assert list(assign_places([failed], vms).by_job["x"]) == ["b", "c", "d", "e"], "on b it was mended"


def test_where_nothing_is_to_be_made_ready_no_places_are_assigned() -> None:
    assert assign_places([tenant("x", makes_workdir=False)], fleet(vm("a"))).by_job == {}


VM_STATES = st.builds(
    lambda gpus, usable, ready: {"gpus": gpus, "connected": usable, "prepared": frozenset({"0"} if ready else set())},
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
)


@given(
    st.lists(VM_STATES, max_size=6),
    st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 8)), st.integers(1, 8)), max_size=5),
)
def test_no_gpu_has_two_places_and_none_is_of_a_vm_that_cannot_be_used(
    states: list[dict[str, object]], jobs: list[tuple[int | None, int]]
) -> None:
    vms = fleet(*(vm(f"vm-{number}", **state) for number, state in enumerate(states)))
    tenants = [tenant(str(number), most, least=least) for number, (most, least) in enumerate(jobs)]
    places = assign_places(tenants, vms)
    for name, one in vms.items():
        taken = sum(place.get(name, 0) for place in places.by_job.values())
        assert taken <= (one.gpus if one.usable else 0)
    for each in tenants:
        assert each.most_gpus is None or sum(places.by_job.get(each.id, {}).values()) <= each.most_gpus


# ---------------------------------------------------------------- when


def test_a_vm_works_on_one_workdir_at_a_time_and_a_failed_one_keeps_nobody_waiting() -> None:
    planned = ("x", "y")
    assert choose_workdir(vm("a"), planned, {}, RULES) == "x"
    assert choose_workdir(vm("a"), planned, {"x": 1.0}, RULES) is None, "its agent is about to begin"
    assert choose_workdir(vm("a", setting_up=frozenset({"x"})), planned, {"x": 30.0}, RULES) is None
    assert choose_workdir(vm("a", setting_up=frozenset({"x"})), planned, {"x": 300.0}, RULES) is None
    assert choose_workdir(vm("a", prepared=frozenset({"x"})), planned, {"x": 1.0}, RULES) == "y"
    assert choose_workdir(vm("a"), planned, {"x": 30.0}, RULES) == "y", "x has failed"
    assert choose_workdir(vm("a"), planned, {"x": 30.0, "y": 20.0}, RULES) is None
    assert choose_workdir(vm("a"), planned, {"x": RULES.prepare_again_s, "y": 20.0}, RULES) == "x"


def test_what_is_prepared_for_a_job_that_is_over_and_what_is_begun_for_one_that_runs_elsewhere_is_stale() -> None:
    one = vm("a", prepared=frozenset({"over", "runs", "waits"}), setting_up=frozenset({"waits too", "planned"}))
    unfinished = {"waits", "waits too", "planned"}
    assert list_stale_jobs(one, ("planned",), unfinished, {"runs"}) == {"over", "waits too"}


def made(name: str, **changes: object) -> LoadedJob:
    """A job with a setup."""
    one = loaded(name, **changes)  # type: ignore[arg-type]
    return replace(one, spec=one.spec.model_copy(update={"setup": "true"}))


def list_sent(
    preparations: Preparations, session: AgentSession, one: VmView, *jobs: LoadedJob
) -> list[pb.ManagerMessage]:
    """The messages that one look sends to the VM's agent while all jobs are idle."""
    planned = assign_places([tenant(each.row.id) for each in jobs], {one.id: one}).to_prepare.get(one.id, ())
    known = {each.row.id: each for each in jobs}
    preparations.send_prepare(session, one, known, planned=planned, running=(), growing=None, is_idle=True)
    found = []
    while session._commands:
        found.append(session._commands.popleft())
    return found


def test_twelve_jobs_for_one_vm_are_prepared_for_one_after_the_other_and_forgotten_when_they_are_over() -> None:
    now = [NOW]
    preparations = Preparations(RULES, lambda: now[0], note_flaw)
    session, one = AgentSession("a", "1", ()), vm("a", gpus=12)
    first, second = made("x"), made("y")
    (message,) = list_sent(preparations, session, one, first)
    assert (message.prepare.job_id, message.prepare.setup_timeout_s) == ("x", 3600.0)
    for wait_s in (0.5, 4.0, 100.0, 3000.0):
        now[0] += wait_s
        one = replace(one, setting_up=frozenset({"x"}))
        assert list_sent(preparations, session, one, first) == []
    (message,) = list_sent(preparations, session, one, second)
    assert list(message.keep_prepared.job_ids) == ["y"], "x was cancelled"
    assert list_sent(preparations, session, one, second) == [], "sent once"
    (message,) = list_sent(preparations, session, replace(one, setting_up=frozenset()), second)
    assert message.prepare.job_id == "y"
    (message,) = list_sent(preparations, session, vm("a", prepared=frozenset({"y"})))
    assert list(message.keep_prepared.job_ids) == []


# ---------------------------------------------------------------- whose turn


def unprofiled(job: LoadedJob, **changes: object) -> LoadedJob:
    """The planner is not asked about it."""
    return replace(job, view=replace(job.view, profiled_at=None, **changes))


class Fleet:
    """Four VMs. "x" runs on all of them, while "y" waits."""

    def __init__(self, **waiting: object) -> None:
        self.now = NOW
        self._rates = RateService(Bell())
        self._shares = ShareOut(self._rates, RULES, lambda: self.now)
        running = unprofiled(loaded("x", has=("a", "b", "c", "d")))
        self._jobs = running, unprofiled(made("y", **waiting), max_gpus=2)

    def snapshot(self, *ready: str) -> Snapshot:
        """`ready`: the VMs that have the workdir of "y"."""
        vms = [vm(name, prepared=frozenset({"y"} if name in ready else set())) for name in "abcd"]
        return snapshot(vms, *self._jobs)

    async def shares(self, *ready: str) -> Shares:
        return await self._shares.compute_shares(self.snapshot(*ready))

    async def of_running(self, *ready: str) -> int:
        return (await self.shares(*ready)).by_job["x"].gpus

    async def close(self) -> None:
        await self._rates.close()


async def test_a_running_job_gives_way_when_the_other_is_prepared_and_on_its_vms() -> None:
    fleet = Fleet(priority=1, min_gpus=2)
    found = await fleet.shares()
    assert ({name: share.gpus for name, share in found.by_job.items()}, found.over) == (
        {"x": 4, "y": 2},
        set(),
    )
    assert {name: set(place) for name, place in found.places.by_job.items()} == {"y": {"a", "b"}, "x": {"c", "d"}}
    assert await fleet.of_running("a") == 4, "one is not enough"
    fleet.now += RULES.growth_prepare_s
    assert await fleet.of_running("a") == 4, "and never will be"
    found = await fleet.shares("a", "b")
    assert (found.by_job["x"].gpus, found.over) == (2, {"x"})
    stopped = replace(fleet.snapshot("a", "b"), occupied={})  # the running one has stopped, and both want GPUs
    pool = DevicePool(stopped, found.places)
    assert pool.for_job("x", 2)[0] == (Device("c", 0), Device("d", 0)), "though a and b come first by their names"
    assert pool.for_job("y", 2, only_prepared=True)[0] == (Device("a", 0), Device("b", 0))
    await fleet.close()


async def test_a_running_job_gives_way_once_and_not_for_each_vm_that_becomes_ready() -> None:
    fleet = Fleet()
    one, other = sorted((await fleet.shares()).places.by_job["y"])
    assert await fleet.of_running(one) == 4
    fleet.now += RULES.growth_prepare_s
    assert await fleet.of_running(one) == 3, "the other takes too long"
    assert await fleet.of_running(one, other) == 2
    await fleet.close()


JOBS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(1, 4), st.one_of(st.none(), st.integers(0, 8))),
    min_size=2,
    max_size=5,
)


@given(JOBS, st.integers(0, 12))
def test_while_others_are_late_no_job_gets_less_than_it_has_of_its_share_nor_more_than_either(
    jobs: list[tuple[int, int, int, int | None]], spare: int
) -> None:
    contenders = [
        Contender(
            id=str(number),
            name=str(number),
            priority=priority,
            created_at=float(number),
            min_gpus=least,
            max_gpus=None,
            has=max(has, least) if has else 0,
            runs=has > 0,
        )
        for number, (priority, has, least, _) in enumerate(jobs)
    ]
    gpus = sum(each.has for each in contenders) + spare
    ready = {str(number): count for number, (*_, count) in enumerate(jobs) if count is not None}
    wishes = share_gpus(contenders, gpus)
    held = hold_back_shares(wishes, contenders, gpus, ready)
    late = {name for name, count in ready.items() if count < wishes[name].gpus}
    if not late:
        assert held == wishes
    for each in contenders:
        wish, given_ = wishes[each.id].gpus, held[each.id].gpus
        if each.id in late:
            assert given_ == wish, "it is prepared for all of its share"
        else:
            assert given_ >= min(wish, each.has), "nobody loses by waiting for others"
            assert given_ <= max(wish, each.has), "nobody grows into what others wait for"


# ---------------------------------------------------------------- whose fault


@pytest.mark.parametrize(
    ("setups", "fault"),
    [
        (SetupProgress(failed_on=frozenset("a"), untried=1), ""),
        (SetupProgress(failed_on=frozenset("a"), untried=0), "on the only VM"),
        (SetupProgress(failed_on=frozenset("ab"), untried=0), "on all 2 VMs"),
        (SetupProgress(failed_on=frozenset("ab"), untried=9), ""),
        (SetupProgress(failed_on=frozenset("abc"), untried=9), "on 3 VMs"),
        (SetupProgress(failed_on=frozenset("abc"), untried=9, under_way=9), ""),
        (SetupProgress(failed_on=frozenset("abc"), untried=9, ready_gpus=1), ""),
        (SetupProgress(untried=0), ""),
    ],
)
def test_a_setup_that_fails_is_the_jobs_fault_on_several_vms_or_on_all(setups: SetupProgress, fault: str) -> None:
    assert setups.find_own_fault(RULES.setup_failures) == fault
    view = job(setups=setups, setup_error="on VM a: no wheel\nat all", setup_exit_code=7)
    decision = decide(view)
    if fault:
        (finish,) = decision.actions
        assert isinstance(finish, FinishJob)
        assert (finish.exit_code, finish.error) == (
            7,
            f"its workdir could not be prepared {fault}; the last error: on VM a: no wheel\nat all",
        )
    else:
        assert decision.actions == ()
    if setups.failed_on and not fault:
        assert "on VM a: no wheel" in decision.reason or "at all" in decision.reason


@pytest.mark.parametrize(("there", "missing"), [("", 4), ("a", 3), ("abc", 1)])
def test_a_job_waits_for_its_workdir_in_the_same_words_however_many_vms_have_it(there: str, missing: int) -> None:
    view = job(devices=devices(*there), setups=SetupProgress(ready_gpus=len(there), missing_gpus=missing))
    decision = decide(view, *map(vm, "abcd"))
    assert (decision.reason, decision.actions) == ("waiting for VMs that are preparing its workdir", ())


def test_a_job_that_needs_more_gpus_than_prepare_for_it_says_how_many_are_there() -> None:
    setups = SetupProgress(missing_gpus=1, failed_on=frozenset("c"), untried=1)
    view = job(min_gpus=4, devices=devices("a"), setups=setups, setup_error="on VM c: no wheel")
    assert decide(view, *map(vm, "ab")).reason == (
        "1 GPU is free for this job and it needs 4: waiting for more "
        "(preparing its workdir failed on 1 VM; the last error: on VM c: no wheel)"
    )


def test_a_job_that_ran_before_does_not_fail_by_a_setup() -> None:
    setups = SetupProgress(failed_on=frozenset("abc"))
    assert kinds(decide(job(generation(worker(0, "a")), devices=devices("a"), setups=setups), vm("a"))) == []


def test_a_download_that_failed_counts_when_it_fails_again_and_again_and_a_setup_at_once() -> None:
    failures = {
        "once": SetupFailure(times=1, exit_code=None),
        "often": SetupFailure(times=3, exit_code=None),
        "setup": SetupFailure(times=1, exit_code=1),
        "mended": SetupFailure(times=5, exit_code=1),
    }
    assert list_failed_vms(failures, {"mended"}) == {"often", "setup"}


def test_a_vm_where_it_failed_keeps_nobody_waiting_before_it_tries_again() -> None:
    failing = replace(made("x"), setup_failures={"b": SetupFailure(times=1, exit_code=1)})
    preparations = Preparations(RULES, lambda: NOW, note_flaw)

    def setups(**of_b: object) -> SetupProgress:
        state = snapshot([vm("a", prepared=frozenset({"x"})), vm("b", **of_b), vm("c", gpus=2)], failing)
        places = assign_places([tenant("x", failed_on=failing.failed_on)], state.vms)
        return preparations.setups_of(failing, state, DevicePool(state, places))

    assert (setups().missing_gpus, setups().ready_gpus) == (2, 1)
    assert (setups().failed_on, setups().untried) == ({"b"}, 2)
    assert setups(setting_up=frozenset({"x"})).missing_gpus == 3


def test_a_manager_that_has_just_started_waits_for_what_agents_have_ready() -> None:
    now = [NOW]
    preparations = Preparations(RULES, lambda: now[0], note_flaw)
    failing = replace(made("x"), setup_failures={name: SetupFailure(times=1, exit_code=1) for name in "abc"})

    def failed(**one: object) -> frozenset[str]:
        state = snapshot([vm(name, **one) for name in "abcd"], failing)
        return preparations.setups_of(failing, state, DevicePool(state)).failed_on

    assert failed(connected=False, ready_for_s=0.0) == frozenset()
    assert failed(ready_for_s=1.0) == frozenset(), "its first heartbeat is on its way"
    assert failed(ready_for_s=10.0) == frozenset("abc")
    now[0] += 3600
    assert failed(ready_for_s=1.0) == frozenset("abc"), "a VM that is new, long after the start"
    assert StartGeneration not in kinds(decide(failing.view))
