"""Has agents start processes ahead for the next generations of jobs, send these the state, and end those that are no
longer wanted.

All of it is in memory: a manager that has just started decides what it wants, which are the same requests as
before if nothing has changed, and ends what is left of others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from varuna_manager.agents.sessions import AgentSession
from varuna_manager.domain.actions import Decision
from varuna_manager.domain.newcomers import NewcomersView, WantedNewcomers, explain_giving_up
from varuna_manager.domain.observed import JobView, Rules, VmView
from varuna_manager.domain.states import JobState
from varuna_manager.world.vm_registry import VmRegistry
from varuna_proto.plan import Device
from varuna_proto.v1 import agent_pb2 as pb

_SWITCH = "VARUNA_AHEAD"
"""`0` in a job's env: none of its processes is started ahead."""
_AGAIN_S = 600.0
"""Time after which processes of a job are started ahead again that had not come to Varuna()."""


class NewcomerRequests:
    def __init__(self, registry: VmRegistry, rules: Rules, now: Callable[[], float]) -> None:
        self._registry = registry
        self._rules = rules
        self._now = now
        self._started_at = now()
        self._wanted: dict[str, NewcomersView] = {}
        """By job, without what agents report."""
        self._obstacles: dict[str, tuple[float, str]] = {}
        """By job: since when its processes are not started ahead, and why."""
        self._unwanted: dict[str, int] = {}
        """By job: the generation that trains on without what it has sent ahead, as far as it has sent some."""

    def keep_only(self, job_ids: Collection[str]) -> None:
        """Forget the jobs that are over."""
        self._wanted = {job_id: one for job_id, one in self._wanted.items() if job_id in job_ids}
        self._obstacles = {job_id: one for job_id, one in self._obstacles.items() if job_id in job_ids}
        self._unwanted = {job_id: one for job_id, one in self._unwanted.items() if job_id in job_ids}

    def complete_view(self, view: JobView, env: Mapping[str, str]) -> JobView:
        """With the job's newcomers. `env`: of the job file."""
        if env.get(_SWITCH) == "0":
            return replace(view, starts_ahead=False)
        since, obstacle = self._obstacles.get(view.id, (0.0, ""))
        if obstacle and self._now() - since >= _AGAIN_S:
            del self._obstacles[view.id]
            obstacle = ""
        return replace(view, newcomers=self._observe(view), newcomers_obstacle=obstacle)

    def _observe(self, view: JobView) -> NewcomersView | None:
        known = self._wanted.get(view.id)
        if known is None:
            return None
        at_door: set[Device] = set()
        faults: dict[Device, str] = {}
        for vm_id in {device.vm_id for device in known.wanted.devices}:
            for report in self._registry.list_newcomers(vm_id):
                if (report.job_id, report.request) == (view.id, known.wanted.request):
                    device = Device(vm_id, report.local_rank)
                    if report.at_door:
                        at_door.add(device)
                    if report.fault:
                        faults[device] = report.fault
        sent_steps = self._list_sent_steps(view, known.wanted) if known.sending_since is not None else {}
        return replace(known, at_door=frozenset(at_door), faults=faults, sent_steps=sent_steps)

    def _list_sent_steps(self, view: JobView, wanted: WantedNewcomers) -> dict[int, int]:
        generation = view.generation
        if generation is None:
            return {}
        places = {worker.rank: worker.device.vm_id for worker in generation.workers}
        return {
            rank: health.sent_ahead.step
            for rank, health in self._registry.list_healths(view.id, generation.number, places).items()
            if health.sent_ahead is not None and health.sent_ahead.request == wanted.request
        }

    def follow_decision(self, view: JobView, decision: Decision) -> None:
        """Want from now on what was decided about the job."""
        known, wanted, now = self._wanted.get(view.id), decision.newcomers, self._now()
        if view.newcomers is not None and not view.newcomers_obstacle and _is_awaiting(view, view.newcomers.wanted):
            obstacle = explain_giving_up(now, view.newcomers, self._rules.newcomers_wait_s)
            if obstacle:
                self._obstacles[view.id] = (now, obstacle)
        if wanted is not None:
            is_same_generation = known is not None and known.wanted.number == wanted.number
            since = known.since if known is not None and is_same_generation else now
            is_same_shape = known is not None and known.wanted.request == wanted.request
            began = known.sending_since if known is not None and is_same_shape else None
            sending_since = (now if began is None else began) if wanted.sends_state else None
            self._wanted[view.id] = NewcomersView(wanted=wanted, since=since, sending_since=sending_since)
        elif known is not None and not _stay(view, decision, known.wanted):
            del self._wanted[view.id]
        self._note_unwanted(view, known)

    def _note_unwanted(self, view: JobView, before: NewcomersView | None) -> None:
        """Note whether what was sent ahead is of no use any longer; what a generation that stops has sent is about to
        be used. `before`: what was wanted before the newest decision."""
        present = self._wanted.get(view.id)
        if present is not None and present.sending_since is not None:
            self._unwanted.pop(view.id, None)
        elif before is not None and before.sending_since is not None and _is_awaiting(view, before.wanted):
            assert view.generation is not None
            self._unwanted[view.id] = view.generation.number

    def find_wanted(self, job_id: str, vm_id: str) -> WantedNewcomers | None:
        """The processes that the VM is to start for the job."""
        known = self._wanted.get(job_id)
        is_there = known is not None and any(device.vm_id == vm_id for device in known.wanted.devices)
        return known.wanted if known is not None and is_there else None

    def send_commands(
        self,
        session: AgentSession,
        vm: VmView,
        *,
        make_start: Callable[[str, WantedNewcomers], pb.ManagerMessage | None],
        make_send: Callable[[str, WantedNewcomers], pb.ManagerMessage | None],
    ) -> None:
        """Send what the VM is to start ahead, what its workers are to send ahead, and what it is to end.

        `make_start`, `make_send`: the messages for a job; None if one cannot be made now, or is none of the VM's.
        """
        sent = session.newcomers_sent
        for job_id in self._wanted:
            wanted = self.find_wanted(job_id, vm.id)
            if wanted is None or sent.get(job_id) == wanted.request or not vm.trusted:
                continue
            message = make_start(job_id, wanted)
            if message is not None:
                session.send(message)
                sent[job_id] = wanted.request
        self._send_ahead(session, vm, make_send)
        for job_id in sorted({one.job_id for one in self._registry.list_newcomers(vm.id)}):
            # Those of a manager before may be wanted again as soon as this one has seen all VMs.
            is_left = job_id not in sent and self._now() - self._started_at < self._rules.restart_grace_s
            if self.find_wanted(job_id, vm.id) is None and sent.get(job_id) != "" and not is_left:
                session.send(pb.ManagerMessage(end_newcomers=pb.EndNewcomers(job_id=job_id)))
                sent[job_id] = ""

    def _send_ahead(
        self, session: AgentSession, vm: VmView, make_send: Callable[[str, WantedNewcomers], pb.ManagerMessage | None]
    ) -> None:
        for job_id, known in self._wanted.items():
            sent = session.ahead_sent.get(job_id)
            if known.sending_since is None or (sent is not None and sent.request == known.wanted.request):
                continue
            message = make_send(job_id, known.wanted) if vm.trusted else None
            if message is not None:
                session.send(message)
                session.ahead_sent[job_id] = message.send_ahead
        for job_id, sent in list(session.ahead_sent.items()):
            wanted = self._wanted.get(job_id)
            if (wanted is None or wanted.sending_since is None) and self._unwanted.get(job_id) == sent.generation:
                over = pb.SendAhead()
                over.CopyFrom(sent)
                over.is_over = True
                session.send(pb.ManagerMessage(send_ahead=over))
                del session.ahead_sent[job_id]


def _is_awaiting(view: JobView, wanted: WantedNewcomers) -> bool:
    """Whether the generation before the wanted one runs, and nobody has stopped it."""
    generation = view.generation
    is_before = generation is not None and generation.live and generation.number < wanted.number
    return generation is not None and is_before and generation.stop is None


def _stay(view: JobView, decision: Decision, wanted: WantedNewcomers) -> bool:
    """Whether the newcomers are still of use although no decision asks for them now: a generation is about to take
    them."""
    generation = view.generation
    if view.state is not JobState.RUNNING or generation is None or generation.number >= wanted.number:
        return False
    return not _is_awaiting(view, wanted) or bool(decision.actions)
