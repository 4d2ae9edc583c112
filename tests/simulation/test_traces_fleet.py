"""The fleet controller and each VM's life, with a provider whose answers are lost, repeated, late or wrong for a while.

The controller, the service and the store are real. Answers to requests are lost, so the requests are repeated; a VM is
taken and the provider still lists it for a while; another exists and is not listed for a while, one hangs; deletions
fail; notices come again and again, from the provider and from the agent; agents fall silent, come back on a new stream,
or as a new incarnation; the manager dies between any two transactions. In the end there are as many VMs as are wanted,
each known to both, ready, and none is paid for that nobody knows of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from hypothesis import strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sqlalchemy import select
from sqlalchemy.orm.exc import StaleDataError

from manager_death import ManagerDiedError
from traces import Store, traces
from varuna_manager.agents.reports import ReportService
from varuna_manager.answers.errors import UnavailableError
from varuna_manager.controllers.fleet_controller import FleetController
from varuna_manager.controllers.vm_requests import FleetSettings
from varuna_manager.db.models import VmRow
from varuna_manager.domain.observed import Rules
from varuna_manager.domain.states import VmState
from varuna_manager.fleet.fleet import FleetService
from varuna_manager.planning.planning import PlanningService
from varuna_manager.providers.base import CreatedVms, ProviderNotice, ProviderVm, UnknownVmError, VmOffer
from varuna_manager.world.bell import Bell
from varuna_manager.world.events import EventLog
from varuna_manager.world.vm_registry import VmRegistry
from varuna_manager.world.world import World
from varuna_proto.v1 import agent_pb2 as pb

RULES = Rules()
PICK = strategies.integers(0, 1000)
MOST = 3


class AwayError(Exception):
    """The error of a provider that does not answer."""


@dataclass
class Machine:
    """A VM as it really is. `request`: the tag that it was made for."""

    id: str
    request: str
    made_at: float
    incarnation: int = 1
    connected: bool = False
    speaks: bool = True
    hangs: bool = False
    """For good: its agent is silent, and the VM is still paid for."""


class Cloud:
    """The provider: `machines` are those that are there; `trouble` what goes wrong with the next call."""

    name = "cloud"
    is_elastic = True
    capacity: int | None = None

    def __init__(self, machine: Fleet) -> None:
        self._fleet = machine
        self.machines: dict[str, Machine] = {}
        self.gone: set[str] = set()
        self.listed_late: set[str] = set()
        """Gone, and still listed."""
        self.hidden: set[str] = set()
        """Existing, and not yet listed."""
        self.under_way = ""
        """The tag of a request whose answer has not come: no other may be made."""
        self.notices_told: dict[str, ProviderNotice] = {}
        self.trouble = ""
        self.made = 0

    def _take_trouble(self, *kinds: str) -> str:
        trouble = self.trouble
        if trouble in kinds:
            self.trouble = ""
            return trouble
        return ""

    async def list(self) -> Sequence[ProviderVm]:
        if self._take_trouble("away"):
            raise AwayError
        names = [*(name for name in self.machines if name not in self.hidden), *self.listed_late]
        return [self.as_listed(self._fleet.machines_ever[name]) for name in names]

    def as_listed(self, machine: Machine) -> ProviderVm:
        return ProviderVm(
            id=machine.id,
            gpus=1,
            device_memory_bytes=2**30,
            host="127.0.0.1",
            created_at=machine.made_at,
            request=machine.request,
        )

    async def create(self, count: int, request: str) -> CreatedVms:
        assert self.under_way in ("", request), "the request before was forgotten"
        self.under_way = request
        trouble = self._take_trouble("refused", "answer lost", "dies")
        if trouble == "refused":
            raise AwayError
        have = [machine for machine in self.machines.values() if machine.request == request]
        for _ in range(count - len(have)):
            self.made += 1
            machine = Machine(f"vm-{self.made}", request, self._fleet.now)
            self.machines[machine.id] = self._fleet.machines_ever[machine.id] = machine
            have.append(machine)
        if trouble == "answer lost":
            raise AwayError
        if trouble == "dies":
            raise ManagerDiedError
        self.under_way = ""
        return CreatedVms(vms=tuple(map(self.as_listed, have)), refusal=None)

    async def delete(self, vm_ids: Sequence[str]) -> None:
        trouble = self._take_trouble("refused", "answer lost", "dies")
        if trouble == "refused":
            raise AwayError
        for vm_id in vm_ids:
            self.end(vm_id)
        if trouble == "answer lost":
            raise AwayError
        if trouble == "dies":
            raise ManagerDiedError

    def end(self, vm_id: str) -> None:
        if self.machines.pop(vm_id, None) is not None:
            self.gone.add(vm_id)

    async def list_notices(self) -> Sequence[ProviderNotice]:
        return [notice for vm_id, notice in self.notices_told.items() if vm_id in self.machines]

    async def get_offer(self) -> VmOffer:
        return VmOffer(gpus=1)

    async def set_capacity(self, capacity: int | None) -> None:
        self.capacity = capacity

    async def preempt_vm(self, vm_id: str, notice_s: float) -> None:
        raise UnknownVmError(vm_id)

    def log_path(self, vm_id: str, job_id: str, generation: int, rank: int) -> Path:
        raise FileNotFoundError(vm_id)

    async def close(self, *, end_vms: bool) -> None:
        pass


class Fleet(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = Store.empty()
        self.now = 1000.0
        self.machines_ever: dict[str, Machine] = {}
        self.cloud = Cloud(self)
        self.target = 0
        self.states: dict[str, VmState] = {}

    @initialize(wanted=strategies.integers(1, MOST))
    def begin(self, wanted: int) -> None:
        self.a_manager_starts()
        self.somebody_wants(wanted)

    def a_manager_starts(self) -> None:
        """A new process over the same store. It has no agents yet."""
        database, bell, now = self.store.database, Bell(), lambda: self.now
        events = EventLog(database, now)
        self.registry = VmRegistry(now)
        self.reports = ReportService(database, events, PlanningService(), bell, now)
        self.fleet = FleetService(database, events, self.registry, self.cloud, self.reports, bell, now)
        self.controller = FleetController(
            database,
            World(database, self.registry, now),
            self.fleet,
            events,
            bell,
            FleetSettings(rules=RULES),
            now=now,
            chance=Random(1),
        )
        for machine in self.cloud.machines.values():
            machine.connected = False

    # ------------------------------------------------------------ what goes wrong

    @rule(trouble=strategies.sampled_from(["away", "refused", "answer lost", "dies"]))
    def the_next_call_fails(self, trouble: str) -> None:
        self.cloud.trouble = trouble

    @rule()
    def the_manager_dies(self) -> None:
        self.a_manager_starts()

    @precondition(lambda self: self.cloud.machines)
    @rule(pick=PICK, listed=strategies.booleans())
    def a_vm_is_taken(self, pick: int, listed: bool) -> None:
        """`listed`: its provider sees that only later."""
        machine = self.some(pick)
        self.cloud.end(machine.id)
        if machine.connected:
            machine.connected = False
            self.registry.add_disconnect(machine.id)
        if listed:
            self.cloud.listed_late.add(machine.id)

    @rule()
    def the_list_is_right_again(self) -> None:
        self.cloud.listed_late.clear()
        self.cloud.hidden.clear()

    @precondition(lambda self: self.cloud.machines)
    @rule(pick=PICK, by_agent=strategies.booleans())
    def notice_is_given(self, pick: int, by_agent: bool) -> None:
        """Every look at the provider shows the notice, and the agent may report it first."""
        machine = self.some(pick)
        notice = ProviderNotice(id=f"n-{machine.id}", vm_id=machine.id, deadline_unix_s=self.now + 30.0)
        self.cloud.notices_told.setdefault(machine.id, notice)
        if by_agent and machine.connected:
            fact = pb.PreemptionNotice(notice_id=notice.id, seconds_left=30.0, source="test")
            self.store.run(self.reports.apply_reports(machine.id, [pb.Report(number=1, preemption_notice=fact)]))

    # ------------------------------------------------------------ agents

    @precondition(lambda self: self.cloud.machines)
    @rule(pick=PICK, again=strategies.booleans())
    def an_agent_says_hello(self, pick: int, again: bool) -> None:
        """`again`: as a new process."""
        machine = self.some(pick)
        machine.incarnation += again
        machine.speaks = True
        self.hello(machine)

    def hello(self, machine: Machine) -> None:
        hello = pb.Hello(vm_id=machine.id, incarnation=str(machine.incarnation), gpus=1, host="127.0.0.1")
        try:
            refusal = self.store.run(self.fleet.admit_agent(hello))
        except (AwayError, UnavailableError):
            return  # it dials again
        if refusal is not None:
            assert "gave it up" in refusal or "no provider of it" in refusal
            return
        machine.connected = True
        self.registry.add_hello(machine.id, rendezvous_port=1, workers=())

    @precondition(lambda self: self.cloud.machines)
    @rule(pick=PICK)
    def an_agent_falls_silent(self, pick: int) -> None:
        self.some(pick).speaks = False

    @precondition(lambda self: self.cloud.machines)
    @rule(pick=PICK)
    def a_stream_breaks(self, pick: int) -> None:
        machine = self.some(pick)
        if machine.connected:
            machine.connected = False
            self.registry.add_disconnect(machine.id)

    @rule(seconds=strategies.sampled_from([0.5, 4.0, 8.0, 40.0, 130.0]))
    def time_passes(self, seconds: float) -> None:
        """Agents that are connected and not silent send a heartbeat."""
        self.now += seconds
        for machine in self.cloud.machines.values():
            if machine.connected and machine.speaks:
                self.registry.add_heartbeat(machine.id, rendezvous_port=1, workers=())

    # ------------------------------------------------------------ the manager

    @rule(wanted=strategies.integers(0, MOST))
    def somebody_wants(self, wanted: int) -> None:
        self.target = wanted
        self.store.run(self.fleet.set_target(wanted))

    @rule()
    def the_manager_looks(self) -> None:
        try:
            for _ in range(100):
                if self.store.run(self.controller.reconcile_once()) > 0:
                    return
            raise AssertionError("it never comes to rest")
        except StaleDataError:
            return
        except ManagerDiedError:
            self.a_manager_starts()

    # ------------------------------------------------------------ what holds

    @invariant()
    def no_more_is_made_than_was_ever_wanted(self) -> None:
        assert len(self.cloud.machines) <= 2 * MOST, "requests are made over and over"

    def rows(self) -> dict[str, VmState]:
        async def read() -> dict[str, VmState]:
            async with self.store.database.read() as session:
                rows = await session.execute(select(VmRow.id, VmRow.state))
                return {vm_id: VmState(state) for vm_id, state in rows}

        return self.store.run(read())

    def some(self, pick: int) -> Machine:
        return list(self.cloud.machines.values())[pick % len(self.cloud.machines)]

    def teardown(self) -> None:
        """From now on nothing goes wrong."""
        if not hasattr(self, "fleet"):
            return
        self.come_to_rest()
        # Whatever the trace was: a VM that is silent, one that was given up for a while, a request without an answer.
        self.somebody_wants(MOST)
        self.come_to_rest()
        hangs, hidden, _ = self.cloud.machines.values()
        hangs.hangs = True
        self.cloud.hidden.add(hidden.id)
        self.a_stream_breaks(list(self.cloud.machines).index(hidden.id))
        self.time_passes(130.0)
        self.the_manager_looks()
        self.come_to_rest(trouble="refused")  # the giving back
        self.somebody_wants(MOST + 1)
        self.the_next_call_fails("dies")
        self.the_manager_looks()
        if self.cloud.made % 2:
            self.the_manager_looks()
        self.somebody_wants(0)
        self.come_to_rest()

    def come_to_rest(self, trouble: str = "") -> None:
        self.cloud.trouble = trouble
        self.the_list_is_right_again()
        for _ in range(150):
            self.the_manager_looks()
            for machine in list(self.cloud.machines.values()):
                machine.speaks = not machine.hangs
                if machine.speaks and not machine.connected:
                    self.hello(machine)
            self.time_passes(10.0)
            for vm_id, notice in self.cloud.notices_told.items():
                if notice.deadline_unix_s <= self.now:
                    self.cloud.end(vm_id)
            there = {vm_id: state for vm_id, state in self.rows().items() if state is not VmState.GONE}
            if there == dict.fromkeys(self.cloud.machines, VmState.READY) and len(there) == self.target:
                return
        raise AssertionError(f"{self.target} are wanted, {list(self.cloud.machines)} exist, the store has {there}")


class TestFleet(Fleet.TestCase):  # type: ignore[valid-type]
    settings = traces(25, steps=25)

    @classmethod
    def tearDownClass(cls) -> None:
        Store.close()
