"""This process as a worker of a generation: its environment, its agent, its peers, and how it ends."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from varuna.devices.worker_device import measure_memory_bytes
from varuna.diagnostics.loading_progress import LOADING_PROGRESS
from varuna.diagnostics.start_phases import StartPhases
from varuna.diagnostics.start_spans import StartSpans
from varuna.diagnostics.step_clock import StepTimes
from varuna.distributed.calls import CallChecker, CallKind
from varuna.distributed.departure import Departure, GenerationEnded, PeerLost
from varuna.distributed.presence import RankPresence
from varuna.distributed.rendezvous import Rendezvous
from varuna.distributed.topology import Topology
from varuna.distributed.torch_rendezvous import check_arguments_agree, meet_through_torch
from varuna.distributed.worker_environment import record_environment
from varuna.pipeline.pass_state import PassResult
from varuna.worker.agent_link import AgentLink, install_excepthook
from varuna.worker.interpreter_exit import leave_interpreter
from varuna_proto.environment import WorkerEnvironment
from varuna_proto.plan import Plan
from varuna_proto.stage_map import StageMap
from varuna_proto.v1 import agent_pb2, worker_pb2

__all__ = ["WorkerProcess"]


@dataclass(kw_only=True)
class WorkerProcess:
    """What every part of the runtime needs of this process.

    A process that goes on in the next generation gets new values for all but `link` (`join_next`).
    """

    environment: WorkerEnvironment
    topology: Topology
    departure: Departure
    link: AgentLink
    rendezvous: Rendezvous
    phases: StartPhases
    """Of its start in this generation: from the connection to the agent on, or from the end of the one before."""
    spans: StartSpans
    calls: CallChecker
    """The calls that this rank makes together with the others."""
    presence: RankPresence | None
    """None if there are no other ranks."""
    unclean_ends: int = 0
    """Generations that this process has left without getting rid of all their threads and descriptors."""

    @classmethod
    def join_generation(cls, environment: WorkerEnvironment, link: AgentLink | None = None) -> WorkerProcess:
        """Reports to the agent, meets the other ranks, and makes sure that this process never hangs when it ends.

        `link`: of a process that was a newcomer; None: there is no connection to the agent yet.

        Raises ConnectionError when the agent is not there, PeerLost when the other ranks do not come.
        """
        departure = Departure()
        if link is None:
            link = AgentLink(environment, departure)
        else:
            link.greet_as(environment, departure)
        # A process that leaves has threads inside gloo, for which interpreter shutdown would wait: it ends before that.
        atexit.register(lambda: leave_interpreter(link.departure))
        departure.set_unreached_callback(link.report_unreached)
        LOADING_PROGRESS.report_to(link.report_progress)
        phases = StartPhases()
        if environment.world_size > 1 or environment.agent_socket:
            install_excepthook(link)
        environment = replace(environment, secret=link.secret)
        if environment.launcher_map and environment.world_size > 1:
            environment = meet_through_torch(environment, departure)
            if environment.plan.global_batch:
                record_environment(environment)
        met = _meet_ranks(environment, departure, link)
        if met.presence is not None and environment.launcher_map:
            check_arguments_agree(environment, met.rendezvous.store)
        if environment.joins_survivors:
            met.rendezvous.be_patient()  # sections of the state move, which all know to be up
        phases.end_phase("meet")
        return cls(
            environment=environment,
            topology=Topology(environment.plan.p, environment.plan.d, environment.rank),
            departure=departure,
            link=link,
            rendezvous=met.rendezvous,
            phases=phases,
            spans=StartSpans(environment, phases),
            calls=met.calls,
            presence=met.presence,
        )

    def take_place(self, plan: Plan) -> bool:
        """Makes this process a rank of a plan that the ranks have made after they met. Ranks keep their numbers.

        Returns False, and changes nothing, on a rank for which the plan has no place.
        """
        if self.environment.rank >= plan.p * plan.d:
            return False
        self.environment = replace(
            self.environment,
            plan=plan,
            world_size=plan.p * plan.d,
            launcher_map=str(StageMap.of_shape(plan.p, plan.d)),
        )
        self.topology = Topology(plan.p, plan.d, self.environment.rank)
        record_environment(self.environment)
        return True

    def wait_without_place(self) -> int:
        """Waits until the ranks that train have ended, and returns the exit code for this process, which is theirs.

        Raises PeerLost when one of them is lost.
        """
        presence = self.presence
        assert presence is not None, "a lone rank always has a place"
        code = presence.wait_for_training()
        atexit.unregister(presence.announce_leaving)
        return code

    def end_membership(self, *, links_ended: bool) -> None:
        """Ends what is left of this process's part in a generation that it has left, if that was not done before.

        `links_ended`: no thread waits in a group.
        """
        _end_presence(self.presence)
        self.presence = None
        self.unclean_ends += not self.rendezvous.end(links_ended=links_ended)

    def join_next(
        self,
        environment: WorkerEnvironment,
        phases: StartPhases,
        try_to_stay: Callable[[GenerationEnded | PeerLost], bool],
        find_obstacle: Callable[[], str],
    ) -> None:
        """Joins the next generation in the same process.

        `phases`: of this start, which is under way; the others: as for `Departure.offer_to_stay`.

        Raises PeerLost, GenerationEnded when this worker must leave that generation, too.
        """
        self.environment, self.phases = environment, phases
        self.topology = Topology(environment.plan.p, environment.plan.d, environment.rank)
        self.departure = Departure()
        self.departure.offer_to_stay(try_to_stay, find_obstacle)
        self.departure.set_unreached_callback(self.link.report_unreached)
        self.spans = StartSpans(environment, phases)
        self.link.greet_as(environment, self.departure)
        met = _meet_ranks(environment, self.departure, self.link)
        self.rendezvous, self.calls, self.presence = met.rendezvous, met.calls, met.presence
        self.rendezvous.be_patient()
        phases.end_phase("meet")

    def report_step(
        self,
        step: int,
        loss: float,
        *,
        examples: int,
        passed: PassResult,
        times: StepTimes,
        device: torch.device,
        update: UpdateFigures,
        copies: CopiesFigures,
    ) -> None:
        """Reports a finished step to the agent."""
        self.link.report_step(
            worker_pb2.StepDone(
                step=step,
                loss=loss,
                step_us=times.whole_ns // 1000,
                examples=examples,
                forward_us=passed.forward_us,
                backward_us=passed.backward_us,
                wait_us=passed.wait_us,
                memory_bytes=measure_memory_bytes(device),
                skipped=update.skipped,
                between=agent_pb2.BetweenSteps(
                    data_us=times.data_ns // 1000,
                    evaluation_us=times.evaluation_ns // 1000,
                    checkpoint_us=times.checkpoint_ns // 1000,
                    script_us=times.script_ns // 1000,
                ),
                copied_step=copies.whole_step,
                copies_obstacle=copies.obstacle,
                marks_obstacle=copies.marks_obstacle,
                gradient_norm=update.gradient_norm,
                learning_rate=update.learning_rate,
            )
        )
        self.spans.end_start(step, times.call_ns / 1e9)


class UpdateFigures(NamedTuple):
    """What is reported of a step's update."""

    skipped: bool
    """The loss or the gradient was not finite, so the step has updated nothing."""
    gradient_norm: float
    learning_rate: float | None


class CopiesFigures(NamedTuple):
    """What is reported of a generation's copies."""

    whole_step: int = 0
    """The newest step whose state other VMs have a whole copy of; 0: there is none."""
    obstacle: str = ""
    """Why it keeps no copies of states, which it was to keep; empty: nothing is known against it."""
    marks_obstacle: str = ""
    """The same for copies of the sums of long steps."""


class _Meeting(NamedTuple):
    rendezvous: Rendezvous
    calls: CallChecker
    presence: RankPresence | None


def _meet_ranks(environment: WorkerEnvironment, departure: Departure, link: AgentLink) -> _Meeting:
    calls = CallChecker(environment.rank, departure)
    departure.report_waiting_to(lambda waits: link.send_waiting(_wait_kind(calls, waits=waits)))
    with departure.explaining_errors():
        rendezvous = Rendezvous(environment, departure)
        if environment.world_size == 1:
            return _Meeting(rendezvous, calls, None)
        try:
            presence = RankPresence.join_generation(
                environment.rank,
                environment.world_size,
                rendezvous.store,
                address=rendezvous.own_address(),
                departure=departure,
                calls=calls,
            )
        except BaseException:
            rendezvous.end(links_ended=True)
            raise
    _follow_waits(departure, link, calls, presence)
    atexit.register(presence.announce_leaving)  # runs before `leave_interpreter`
    return _Meeting(rendezvous, calls, presence)


def _follow_waits(departure: Departure, link: AgentLink, calls: CallChecker, presence: RankPresence) -> None:
    """Reports to the agent where this rank waits, and who does not answer meanwhile."""
    roll_call = presence.make_roll_call(
        lambda quiet_ranks: link.send_waiting(_wait_kind(calls, waits=True), quiet_ranks)
    )

    def report_wait(waits: bool) -> None:
        if waits:
            link.send_waiting(_wait_kind(calls, waits=True))
            roll_call.begin()
        else:
            roll_call.end()
            link.send_waiting(_wait_kind(calls, waits=False))

    departure.report_waiting_to(report_wait)


def _end_presence(presence: RankPresence | None) -> None:
    if presence is not None:
        atexit.unregister(presence.announce_leaving)
        presence.close()


_WAIT_KINDS = {
    None: agent_pb2.WAIT_KIND_RENDEZVOUS,
    CallKind.STEP: agent_pb2.WAIT_KIND_STEP,
    CallKind.EVALUATE: agent_pb2.WAIT_KIND_EVALUATION,
    CallKind.CHECKPOINT: agent_pb2.WAIT_KIND_CHECKPOINT,
    CallKind.LOAD: agent_pb2.WAIT_KIND_LOAD,
    CallKind.RESUME: agent_pb2.WAIT_KIND_RESUME,
    CallKind.FULL_STATE_DICT: agent_pb2.WAIT_KIND_CHECKPOINT,
}


def _wait_kind(calls: CallChecker, *, waits: bool) -> agent_pb2.WaitKind.ValueType:
    return _WAIT_KINDS[calls.operation] if waits else agent_pb2.WAIT_KIND_UNSPECIFIED
