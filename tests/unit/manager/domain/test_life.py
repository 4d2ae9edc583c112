"""Whatever happens to a job, its generations grow one by one and never two live."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from decision_views import NOW, RULES, generation, job, proposal, vm, worker
from varuna_manager.domain.actions import (
    EndGeneration,
    FinishJob,
    LiftQuarantine,
    QuarantineVms,
    RecordHang,
    RequestStacks,
    RequeueJob,
    StartGeneration,
    StopGeneration,
)
from varuna_manager.domain.commands import GenerationOnVm, LaunchKey, StopKey, list_commands
from varuna_manager.domain.devices import choose_devices
from varuna_manager.domain.job_decision import decide_job, wants_plan
from varuna_manager.domain.observed import GenerationView, JobView, RankStack, StackAnswers, StopView, VmView
from varuna_manager.domain.states import (
    ExitCause,
    GenerationKind,
    GenerationState,
    JobState,
    StopMode,
    VmState,
    WaitKind,
    WorkerState,
)
from varuna_proto.plan import Device


@dataclass
class SmallFleet:
    """A small fleet with one job, that applies decisions as the controller does."""

    vms: dict[str, VmView]
    view: JobView = field(default_factory=lambda: job(profiled_at=None))
    now: float = NOW
    started: list[int] = field(default_factory=list)

    def look(self) -> None:
        """Decide and apply until nothing is left to do."""
        for _ in range(20):
            usable = [one for one in self.vms.values() if one.usable]
            free = tuple(Device(one.id, 0) for one in usable if not one.quarantined)
            kept_out = tuple(Device(one.id, 0) for one in usable if one.quarantined)
            self.view = replace(self.view, devices=free, quarantined=kept_out, proposal=None)
            wanted = choose_devices(self.now, self.view, self.vms, RULES)
            if wants_plan(self.view, wanted, self.vms):
                self.view = replace(self.view, proposal=proposal(wanted))
            decision = decide_job(self.now, self.view, self.vms, RULES)
            assert decision.reason
            if not decision.actions:
                return
            for action in decision.actions:
                self.apply(action)
        raise AssertionError("it never comes to rest")

    def apply(self, action: object) -> None:
        current = self.view.generation
        match action:
            case StartGeneration():
                assert current is None or not current.live, "two live generations"
                assert not self.started or action.number == self.started[-1] + 1
                assert all(self.vms[device.vm_id].usable for device in action.placement)
                self.started.append(action.number)
                workers = [worker(rank, device.vm_id) for rank, device in enumerate(action.placement)]
                launched = generation(*workers, number=action.number, kind=action.kind, plan=action.plan)
                launched = replace(launched, state=GenerationState.LAUNCHING, last_step=None, progress_at=self.now)
                self.view = replace(self.view, generation=launched, state=JobState.RUNNING)
            case StopGeneration():
                assert current is not None
                stop = StopView(mode=action.mode, cause=action.cause, reason=action.reason, requested_at=self.now)
                stopped = replace(current, state=GenerationState.STOPPING, stop=stop)
                self.view = replace(self.view, generation=stopped)
            case EndGeneration():
                assert current is not None
                assert any(one.stopped for one in current.workers), "nothing is known to have stopped"
                ended = replace(current, state=GenerationState.ENDED, end_reason=action.reason)
                self.view = replace(self.view, generation=ended)
            case FinishJob():
                assert current is None or not current.live
                self.view = replace(self.view, state=action.state)
            case RequestStacks():
                assert current is not None
                assert current.live
                waiting = [replace(one, waiting_for=WaitKind.STEP) for one in current.workers[:-1]]
                current = replace(current, workers=(*waiting, current.workers[-1]))
                self.view = replace(self.view, generation=current, stacks=self.answered(current))
            case RecordHang():
                assert action.suspect is None or action.suspect.vm_id in self.vms
            case RequeueJob():
                assert current is None or not current.live
                self.view = replace(self.view, state=JobState.QUEUED)
            case QuarantineVms():
                assert set(action.vm_ids) < set(self.vms), "never all of them"
                for name in action.vm_ids:
                    self.vms[name] = replace(self.vms[name], quarantined=True, slow_ratio=None)
            case LiftQuarantine():
                for name in action.vm_ids:
                    self.vms[name] = replace(self.vms[name], quarantined=False)

    def answered(self, current: GenerationView) -> StackAnswers:
        """Every rank waits for the others, but the last one."""
        waits = 'Current thread 0x1 (most recent call first):\n  File "/w/varuna/d.py", line 9 in wait_until\n'
        last = current.workers[-1].rank
        answers = {one.rank: RankStack(text="stuck" if one.rank == last else waits) for one in current.workers}
        return StackAnswers(generation=current.number, asked_at=self.now, answers=answers)

    def change_worker(self, rank: int, **changes: object) -> None:
        current = self.view.generation
        if current is None or not current.live or current.workers[rank % len(current.workers)].stopped:
            return
        workers = list(current.workers)
        workers[rank % len(workers)] = replace(workers[rank % len(workers)], **changes)
        self.view = replace(self.view, generation=replace(current, workers=tuple(workers)))

    def lose(self, name: str) -> None:
        self.vms.pop(name, None)
        current = self.view.generation
        for rank, one in enumerate(current.workers if current is not None else ()):
            if one.device.vm_id == name:
                gone = {"state": WorkerState.LOST, "cause": ExitCause.VM_GONE, "stopped_at": self.now}
                self.change_worker(rank, **gone)


EVENTS = st.one_of(
    st.tuples(st.just("lose"), st.sampled_from("abcd")),
    st.tuples(st.just("join"), st.sampled_from("abcd")),
    st.tuples(st.just("notice"), st.sampled_from("abcd")),
    st.tuples(
        st.just("exit"), st.integers(0, 3), st.sampled_from([c for c in ExitCause if c is not ExitCause.VM_GONE])
    ),
    st.tuples(st.just("step")),
    st.tuples(st.just("profile")),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 3.0, 40.0, 200.0])),
    st.tuples(st.just("cancel")),
    st.tuples(st.just("slow"), st.sampled_from("abcd"), st.sampled_from([1.2, 3.0])),
    st.tuples(st.just("probation"), st.sampled_from("abcd")),
    st.tuples(st.just("share"), st.sampled_from([None, 0, 1, 2, 4])),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(EVENTS, max_size=25))
def test_whatever_happens_generations_grow_one_by_one_and_never_two_live(events: list[tuple]) -> None:
    world = SmallFleet({name: vm(name) for name in "ab"})
    world.look()
    for event in events:
        current = world.view.generation
        match event:
            case ("lose", name):
                world.lose(name)
            case ("join", name):
                world.vms.setdefault(name, vm(name))
            case ("notice", name) if name in world.vms:
                world.vms[name] = replace(world.vms[name], state=VmState.DRAINING)
            case ("exit", rank, cause):
                world.change_worker(rank, state=WorkerState.EXITED, cause=cause, stopped_at=world.now, error="x")
            case ("step",) if current is not None and current.live and current.kind is GenerationKind.TRAINING:
                stepped = replace(current, last_step=(current.last_step or 0) + 1, progress_at=world.now)
                if stepped.state is GenerationState.LAUNCHING:
                    stepped = replace(stepped, state=GenerationState.RUNNING)
                world.view = replace(world.view, generation=stepped)
            case ("profile",):
                world.view = replace(world.view, profiled_at=world.view.profiled_at or world.now)
            case ("wait", seconds):
                world.now += seconds
            case ("slow", name, ratio) if name in world.vms:
                world.vms[name] = replace(world.vms[name], slow_ratio=ratio, slow_reason="it is slow")
            case ("probation", name) if name in world.vms:
                world.vms[name] = replace(world.vms[name], quarantined=False)
            case ("share", share):
                world.view = replace(world.view, share=share, share_reason="other jobs come first")
            case ("cancel",) if world.view.state in (JobState.QUEUED, JobState.RUNNING):
                world.view = replace(world.view, state=JobState.CANCELLING)
        world.look()
    assert world.started == list(range(1, len(world.started) + 1))


# ---------------------------------------------------------------- what happens in the midst of a morph


def test_several_vms_lost_while_a_generation_leaves_end_it_and_the_next_uses_what_is_left() -> None:
    names = "abcd"
    world = SmallFleet({name: vm(name) for name in names}, view=job())
    world.look()
    first = world.view.generation
    assert first is not None
    world.view = replace(world.view, generation=replace(first, state=GenerationState.RUNNING, last_step=3))
    world.vms["a"] = replace(world.vms["a"], state=VmState.DRAINING, notice_deadline=NOW + 30)
    world.look()
    leaving = world.view.generation
    assert leaving is not None
    assert leaving.stop is not None
    assert leaving.stop.mode is StopMode.HOLD_FIRST
    world.vms["b"] = replace(world.vms["b"], state=VmState.LOST, reason="silent")
    world.look()
    assert world.view.generation is not None
    assert world.view.generation.stop is not None
    assert world.view.generation.stop.mode is StopMode.LEAVE_NOW, "nobody can finish the step now"
    world.lose("a")
    world.lose("b")
    world.look()
    after = world.view.generation
    assert after is not None
    assert (after.number, {one.device.vm_id for one in after.workers}) == (2, {"c", "d"})
    world.lose("c")
    world.look()
    assert world.view.generation is not None
    assert [one.device.vm_id for one in world.view.generation.workers] == ["d"]
    assert world.started == [1, 2, 3]


def presence(state: GenerationState, number: int, mode: StopMode | None, *workers: WorkerState) -> GenerationOnVm:
    return GenerationOnVm(job_id="j", generation=number, state=state, stop_mode=mode, worker_states=workers)


def test_a_manager_that_died_in_a_morph_tells_the_agents_again_what_they_lack() -> None:
    stopping_ = presence(GenerationState.STOPPING, 2, StopMode.SAVE_FIRST, WorkerState.RUNNING)
    stop = StopKey(job_id="j", generation=2, mode=StopMode.SAVE_FIRST)
    assert list_commands([stopping_], [("j", 2)], frozenset(), draining=False) == (stop,)
    launching = presence(GenerationState.LAUNCHING, 3, None, WorkerState.ASSIGNED)
    launch = LaunchKey(job_id="j", generation=3)
    assert list_commands([launching], [], frozenset({("j", 2)}), draining=False) == (launch,)
    assert list_commands([launching], [], frozenset({("j", 3)}), draining=False) == (), "it has started them already"


def test_a_manager_that_died_between_stop_and_start_starts_the_same_generation_once() -> None:
    ended = generation(worker(0, "a", ExitCause.GENERATION_ENDED), state=GenerationState.ENDED, end_reason="growth")
    view = job(ended, devices=(Device("a", 0), Device("b", 0)), proposal=proposal((Device("a", 0), Device("b", 0))))
    back = {name: vm(name) for name in "ab"}
    waiting = decide_job(NOW, replace(view, returning_vms=2), back, RULES)
    assert not waiting.actions
    (start,) = decide_job(NOW, view, back, RULES).actions
    assert isinstance(start, StartGeneration)
    assert start.number == 3
    launched = generation(worker(0, "a"), worker(1, "b"), number=3, state=GenerationState.LAUNCHING, last_step=None)
    assert not decide_job(NOW, replace(view, generation=launched), back, RULES).actions, "the store has it: no second"


def test_an_agent_that_returns_with_an_old_generation_is_told_to_end_it() -> None:
    current = presence(GenerationState.RUNNING, 5, None, WorkerState.RUNNING)
    leave = StopKey(job_id="j", generation=3, mode=StopMode.LEAVE_NOW)
    assert list_commands([current], [("j", 3), ("j", 5)], frozenset(), draining=False) == (leave,)
    given_up = presence(GenerationState.ENDED, 3, StopMode.SAVE_FIRST, WorkerState.RUNNING)
    assert list_commands([given_up], [("j", 3)], frozenset(), draining=False) == (leave,), "too late to save"
