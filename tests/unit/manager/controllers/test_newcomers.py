"""What the manager wants of agents ahead of a morph, from one decision to the next."""

from __future__ import annotations

from dataclasses import replace

from decision_views import NOW, RULES, devices, generation, job, plan_for, stopping, vm, worker
from varuna_manager.agents.sessions import AgentSession
from varuna_manager.controllers.newcomers import NewcomerRequests
from varuna_manager.domain.actions import Decision
from varuna_manager.domain.newcomers import WantedNewcomers
from varuna_manager.domain.observed import GenerationView, JobView
from varuna_manager.domain.states import EndCause, GenerationState, StopMode
from varuna_manager.world.vm_registry import Health, NewcomerReport, SentAhead, VmRegistry
from varuna_proto.v1 import agent_pb2 as pb

HERE = devices("a", "b")
WANTED = WantedNewcomers(number=3, plan=plan_for(2), placement=HERE, devices=frozenset(HERE))
WAITS = Decision(reason="waits", newcomers=WANTED)
GOES_ON = Decision(reason="under way")
RUNNING = generation(worker(0, "a"))


class NewcomersWorld:
    """A manager long after its start, and agents' sessions that keep what was sent."""

    def __init__(self) -> None:
        self.now = NOW
        self.registry = VmRegistry(lambda: self.now)
        self.newcomers = NewcomerRequests(self.registry, RULES, lambda: self.now)
        self.now += RULES.restart_grace_s
        self.sessions = {vm_id: AgentSession(vm_id, "1", ()) for vm_id in "ab"}
        for vm_id in self.sessions:
            self.registry.add_hello(vm_id, rendezvous_port=1, workers=())

    def view(self, current: GenerationView = RUNNING, **env: str) -> JobView:
        return self.newcomers.complete_view(job(current), env)

    def decide(self, decision: Decision, current: GenerationView = RUNNING) -> None:
        self.newcomers.follow_decision(self.view(current), decision)

    def report(self, vm_id: str, request: str = WANTED.request, fault: str = "") -> None:
        one = NewcomerReport(job_id="j", request=request, local_rank=0, at_door=not fault, fault=fault)
        self.registry.add_heartbeat(vm_id, rendezvous_port=1, workers=(), newcomers=(one,))

    def send(self) -> list[tuple[str, str]]:
        """What is sent now, by VM."""
        sent = []
        for vm_id, session in self.sessions.items():
            before = len(session._commands)
            self.newcomers.send_commands(session, vm(vm_id), make_start=self.make_start, make_send=self.make_send)
            sent += [(vm_id, str(message.WhichOneof("body"))) for message in list(session._commands)[before:]]
        return sent

    def make_start(self, job_id: str, wanted: WantedNewcomers) -> pb.ManagerMessage:
        launch = pb.Launch(job_id=job_id, generation=wanted.number)
        return pb.ManagerMessage(start_newcomers=pb.StartNewcomers(request=wanted.request, launch=launch))

    def make_send(self, job_id: str, wanted: WantedNewcomers) -> pb.ManagerMessage:
        sent = pb.SendAhead(job_id=job_id, generation=RUNNING.number, request=wanted.request, secret="s")
        return pb.ManagerMessage(send_ahead=sent)


def test_each_vm_is_told_once_on_a_stream_and_told_when_it_is_over() -> None:
    world = NewcomersWorld()
    assert world.send() == []
    world.decide(WAITS)
    assert world.send() == [("a", "start_newcomers"), ("b", "start_newcomers")]
    world.decide(WAITS)
    assert world.send() == []
    world.sessions["b"] = AgentSession("b", "1", ())
    assert world.send() == [("b", "start_newcomers")]
    world.report("a")
    world.decide(GOES_ON)
    assert world.send() == [("a", "end_newcomers")]
    assert world.send() == []
    world.report("b")
    assert world.send() == [("b", "end_newcomers")], "it was not there yet"
    world.decide(WAITS)
    assert world.send() == [("a", "start_newcomers"), ("b", "start_newcomers")]


def test_they_are_there_when_their_agents_say_so() -> None:
    world = NewcomersWorld()
    world.decide(WAITS)
    world.report("a")
    world.report("b", request="another")
    view = world.view().newcomers
    assert view is not None
    assert (view.at_door, view.since) == (frozenset(HERE[:1]), world.now)
    assert world.view(VARUNA_AHEAD="0").starts_ahead is False


def test_they_stay_from_the_stop_until_the_next_generation_takes_them() -> None:
    """Whatever the stop is for: a loss may use them, too."""
    world = NewcomersWorld()
    world.decide(WAITS)
    world.send()
    world.report("b")
    world.decide(Decision.stop_generation(RUNNING, StopMode.LEAVE_NOW, EndCause.VM_LOST, "lost"))
    stopped = stopping(StopMode.LEAVE_NOW, EndCause.VM_LOST, worker(0, "a"))
    world.decide(GOES_ON, stopped)
    ended = replace(RUNNING, state=GenerationState.ENDED, end_cause=EndCause.VM_LOST, ended_at=world.now)
    world.decide(GOES_ON, ended)
    assert world.send() == []
    world.decide(GOES_ON, replace(RUNNING, number=3))
    assert world.send() == [("b", "end_newcomers")]


def test_a_plan_that_changes_does_not_begin_the_wait_again() -> None:
    world = NewcomersWorld()
    world.decide(WAITS)
    first = world.now
    world.now += 5
    other = replace(WANTED, placement=HERE[::-1])
    world.decide(Decision(reason="waits", newcomers=other))
    view = world.view().newcomers
    assert view is not None
    assert (view.wanted, view.since) == (other, first)
    world.decide(Decision(reason="waits", newcomers=replace(other, number=4)), replace(RUNNING, number=3))
    later = world.view().newcomers
    assert later is not None
    assert later.since == world.now


def test_why_they_did_not_come_is_remembered_for_a_while() -> None:
    world = NewcomersWorld()
    world.decide(WAITS)
    world.report("b", fault="KeyError: 'x'")
    world.decide(Decision.stop_generation(RUNNING, StopMode.HOLD_FIRST, EndCause.GROWTH, "growth"))
    assert world.view().newcomers_obstacle == "the process for rank 1 on VM b: KeyError: 'x'"
    world.now += 601
    assert world.view().newcomers_obstacle == ""


def test_newcomers_that_a_generation_has_taken_are_not_missed() -> None:
    world = NewcomersWorld()
    world.decide(WAITS)
    world.now += RULES.newcomers_wait_s + 1
    stopped = stopping(StopMode.HOLD_FIRST, EndCause.GROWTH, worker(0, "a"))
    world.decide(GOES_ON, stopped)
    world.decide(GOES_ON, replace(RUNNING, number=3))
    assert world.view().newcomers_obstacle == ""


def test_a_manager_that_has_just_started_does_not_end_what_it_may_want_again() -> None:
    world = NewcomersWorld()
    world.newcomers = NewcomerRequests(world.registry, RULES, lambda: world.now)
    world.report("a")
    assert world.send() == []
    world.now += RULES.restart_grace_s
    world.report("a")
    assert world.send() == [("a", "end_newcomers")]


SENDS = Decision(reason="sends", newcomers=replace(WANTED, sends_state=True))


def report_sent(world: NewcomersWorld, request: str, step: int, *, generation_number: int = RUNNING.number) -> bool:
    sent = SentAhead(request, step)
    health = Health(job_id="j", generation=generation_number, rank=0, step=step, sent_ahead=sent)
    return world.registry.add_heartbeat("a", rendezvous_port=1, workers=(health,))


def test_the_state_is_sent_when_the_processes_are_there_and_the_view_says_how_far_it_is() -> None:
    world = NewcomersWorld()
    world.decide(WAITS)
    world.send()
    world.now += 5
    world.decide(SENDS)
    assert world.send() == [("a", "send_ahead"), ("b", "send_ahead")]
    world.now += 5
    world.decide(SENDS)
    assert world.send() == []
    world.sessions["b"] = AgentSession("b", "1", ())
    assert world.send() == [("b", "start_newcomers"), ("b", "send_ahead")]
    view = world.view().newcomers
    assert view is not None
    assert (view.since, view.sending_since, view.sent_steps) == (world.now - 10, world.now - 5, {})
    assert report_sent(world, WANTED.request, 7), "a decision may change"
    assert not report_sent(world, WANTED.request, 7)
    view = world.view().newcomers
    assert view is not None
    assert view.sent_steps == {0: 7}


def test_what_was_sent_for_another_shape_or_by_another_generation_does_not_count() -> None:
    world = NewcomersWorld()
    world.decide(SENDS)
    report_sent(world, "other", 7)
    view = world.view().newcomers
    assert view is not None
    assert view.sent_steps == {}
    report_sent(world, WANTED.request, 7, generation_number=RUNNING.number - 1)
    view = world.view().newcomers
    assert view is not None
    assert view.sent_steps == {}
    other = replace(WANTED, placement=HERE[::-1], sends_state=True)
    world.now += 9
    world.decide(Decision(reason="sends", newcomers=other))
    view = world.view().newcomers
    assert view is not None
    assert view.sending_since == world.now, "another shape begins again"


def list_over(world: NewcomersWorld) -> list[tuple[str, str, bool]]:
    """Of the commands that are sent now about the state: the VM, the request, and whether it is over."""
    before = {vm_id: len(session._commands) for vm_id, session in world.sessions.items()}
    world.send()
    commands = [
        (vm_id, message.send_ahead)
        for vm_id, session in world.sessions.items()
        for message in list(session._commands)[before[vm_id] :]
        if message.WhichOneof("body") == "send_ahead"
    ]
    assert all(command.secret == "s" for _, command in commands), "agents of an earlier version read all of it"
    return [(vm_id, command.request, command.is_over) for vm_id, command in commands]


def test_what_was_sent_for_a_growth_that_is_not_made_is_freed() -> None:
    world, request = NewcomersWorld(), WANTED.request
    world.decide(SENDS)
    assert list_over(world) == [("a", request, False), ("b", request, False)]
    world.decide(GOES_ON)
    assert list_over(world) == [("a", request, True), ("b", request, True)]
    assert list_over(world) == []
    world.decide(SENDS)
    assert list_over(world) == [("a", request, False), ("b", request, False)], "it is wanted again"
    world.decide(WAITS)
    assert list_over(world) == [("a", request, True), ("b", request, True)], "the processes wait without the state"


def test_what_was_sent_stays_until_the_next_generation_has_it() -> None:
    world = NewcomersWorld()
    world.decide(SENDS)
    world.send()
    world.decide(Decision.stop_generation(RUNNING, StopMode.HOLD_WITHIN_STEP, EndCause.GROWTH, "growth"))
    world.decide(GOES_ON, stopping(StopMode.HOLD_WITHIN_STEP, EndCause.GROWTH, worker(0, "a")))
    assert list_over(world) == []
    world.decide(GOES_ON, replace(RUNNING, number=3))
    assert list_over(world) == []


def test_what_is_wanted_again_stays_when_the_generation_stops() -> None:
    world = NewcomersWorld()
    for decision in (SENDS, GOES_ON, SENDS):
        world.decide(decision)
        world.send()
    world.decide(Decision.stop_generation(RUNNING, StopMode.HOLD_WITHIN_STEP, EndCause.GROWTH, "growth"))
    world.decide(GOES_ON, replace(RUNNING, number=3))
    assert list_over(world) == []


def test_another_shape_replaces_what_was_sent() -> None:
    world = NewcomersWorld()
    world.decide(SENDS)
    world.send()
    other = replace(WANTED, placement=HERE[::-1], sends_state=True)
    world.decide(Decision(reason="sends", newcomers=other))
    assert list_over(world) == [("a", other.request, False), ("b", other.request, False)]
