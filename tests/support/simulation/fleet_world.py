"""A whole fleet without processes: real manager, real agents' states, simulated VMs, workers, market, network, time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, TypeVar
from zlib import crc32

from structlog.testing import capture_logs

from fleet_invariants import Invariants
from inline_sqlite import inline_sqlite
from manager_death import ManagerDiedError
from simulated_manager import ManagerEnd, Pace
from simulated_market import SimulatedMarket
from simulated_training import KILLED, Carriage, JobTruth, SimulatedTraining
from simulated_vm import SimulatedVm
from varuna_manager.domain.observed import Rules
from varuna_manager.domain.spec import JobSpec
from varuna_manager.providers.replay import ReplayProvider, ReplaySettings
from varuna_planner.hardware.table import built_in
from varuna_planner.liveput.spot_trace import SpotTrace
from varuna_planner.profile.shapes import ModelFamily, ModelShape
from varuna_planner.profile.synthesis import synthesise
from virtual_time import VirtualTime

T = TypeVar("T")


@cache
def profile_json(layers: int = 24) -> str:
    """A GPT-2 on V100s over 10 Gb/s Ethernet."""
    shape = ModelShape(family=ModelFamily.GPT2, layers=layers, hidden=1920, seq=1024, fused_attention=False)
    return synthesise(shape, built_in(), "v100-16gb", "ethernet-10g").to_json()


@dataclass(frozen=True, kw_only=True)
class Disturbances:
    """Mean seconds between those of each kind; 0: none."""

    manager_death_s: float = 0.0
    stream_break_s: float = 0.0
    partition_s: float = 0.0
    agent_death_s: float = 0.0
    process_death_s: float = 0.0
    """Of workers, and of processes that have left their generation."""
    process_freeze_s: float = 0.0
    partition_lasts_s: tuple[float, float] = (1.0, 100.0)
    manager_away_s: tuple[float, float] = (0.1, 40.0)
    worker_fault_rate: float = 0.0
    """Share of training generations in which something goes wrong."""
    pace: Pace = field(default_factory=Pace)


class FleetWorld:
    """See the module's text. All chance comes from `seed`."""

    def __init__(self, folder: Path, seed: int, rules: Rules, disturbances: Disturbances, gpus: int = 1) -> None:
        self.seed = seed
        self.chance = Random(seed)
        self.time = VirtualTime()
        self.began_at = self.time.now
        self.disturbances = disturbances
        self.calm = False
        """From now on nothing is disturbed."""
        self._folder = folder
        self.training = SimulatedTraining(
            self.time,
            self.chance,
            lambda job, number: self.invariants.plan_seconds(job, number),
            lambda job, number: self.invariants.is_moved(job, number),
        )
        self.training.fault_rate = disturbances.worker_fault_rate
        self.invariants = Invariants(folder / "manager.db", self.training, self.time.read)
        self.manager = ManagerEnd(folder, self.time, self.chance, rules, self.invariants.check, disturbances.pace)
        self.market = SimulatedMarket(self.time, self.chance, self._make_vm, self.manager.interrupted, gpus)
        self.markets = {"vm": self.market}
        self.provider: Any = self.market
        self.deaths = 0
        self.expected_errors: set[str] = set()
        """What the manager may log as an error."""
        self._agents = 0
        self._specs: dict[str, JobSpec] = {}

    def _make_vm(self, vm_id: str, gpus: int) -> SimulatedVm:
        return SimulatedVm(vm_id, f"i-{vm_id}", gpus, self.time, self.chance, self.training, self.manager)

    def make_market(self, name: str, boot_s: tuple[float, float] = (2.0, 30.0)) -> SimulatedMarket:
        """One more market, whose VMs' names begin with its own."""
        made = SimulatedMarket(
            self.time, self.chance, self._make_vm, self.manager.interrupted, prefix=name, boot_s=boot_s
        )
        self.markets[name] = made
        return made

    def new_vm(self, vm_id: str, gpus: int) -> SimulatedVm:
        """A machine on which somebody starts an agent."""
        self._agents += 1
        vm = SimulatedVm(vm_id, f"i-{self._agents}", gpus, self.time, self.chance, self.training, self.manager)
        self.time.after(1.0, vm.boot)
        return vm

    async def change_provider(self, provider: Any) -> None:
        """A new manager, with another provider."""
        await self.manager.die()
        self.provider = provider
        await self.manager.start(provider)

    async def replay(self, trace: SpotTrace, settings: ReplaySettings) -> None:
        """Let the trace drive the market, from now on and for a new manager."""
        memory = self._folder / "replay.json"
        await self.change_provider(ReplayProvider(self.market, trace, settings, memory, self.time.read))
        self.time.after(0.0, self._at_next_change)

    def _at_next_change(self) -> None:
        """Make the manager look at each time of the trace: a quiet one would see a change only later."""
        due_at = self.provider.next_change_at()
        if due_at is not None:
            if self.manager.is_up and due_at <= self.time.now:
                self.manager.bell.notify_listeners()
            self.time.at(max(due_at, self.time.now + 0.5), self._at_next_change)

    # ------------------------------------------------------------ jobs

    async def submit(
        self,
        name: str,
        *,
        steps: int,
        global_batch: int = 512,
        save_every: int = 10,
        carriage: Carriage = Carriage.IN_PLACE,
        layers: int = 24,
        setup_s: float = 1.0,
        **spec: Any,
    ) -> str:
        """Hand in a job; it takes `steps` steps. `layers`: of the model; the fewer, the fewer stages. `setup_s`: time
        that its `setup` takes, if it has one."""
        self._specs[name] = JobSpec(name=name, workdir="/", run="true", global_batch=global_batch, **spec)
        job_id = await self.handed_in(self.manager, name)
        self.training.jobs[job_id] = JobTruth(
            job_id=job_id,
            steps=steps,
            profile_json=profile_json(layers),
            save_every=save_every,
            carriage=carriage,
            setup_s=setup_s,
        )
        return job_id

    async def handed_in(self, manager: ManagerEnd, name: str) -> str:
        """The id of the job, whose idempotency key is its name."""
        return str((await manager.jobs.submit_job(self._specs[name], name))["id"])

    # ------------------------------------------------------------ time

    async def run(self, seconds: float) -> None:
        """Let virtual time pass."""
        end = self.time.now + seconds
        while self.time.next_at <= end:
            await self._step()
        self.time.now = end

    async def run_until(self, condition: Callable[[], bool], deadline_s: float) -> None:
        """Wait until the condition holds, at most `deadline_s`."""
        end = self.time.now + deadline_s
        while not condition() and self.time.now < end:
            await self.run(1.0)

    async def run_until_over(self, deadline_s: float) -> None:
        """Wait until every job is over and nothing runs. Raises AssertionError when that takes longer."""
        end = self.time.now + deadline_s
        while not await self._is_over():
            assert self.time.now < end, f"not over after {deadline_s:.0f} s: {self.invariants.job_states()}"
            await self.run(10.0)

    async def _is_over(self) -> bool:
        over = self.manager.is_up and all(
            state in ("succeeded", "failed", "cancelled") for state in self.invariants.job_states().values()
        )
        return over and not self.training.alive()

    async def _step(self) -> None:
        try:
            await self.time.step()
        except ManagerDiedError:
            await self._manager_died()

    async def _manager_died(self) -> None:
        self.deaths += 1
        await self.manager.die()
        away_s = self.chance.uniform(*self.disturbances.manager_away_s)
        self.time.after(away_s, lambda: self.manager.start(self.provider))

    async def ask(self, request: Callable[[ManagerEnd], Awaitable[T]]) -> T:
        """Repeat a user's request until an answer comes, and then once more, which must change nothing."""
        while True:
            while not self.manager.is_up:
                await self.run(1.0)
            try:
                answer = await request(self.manager)
                break
            except ManagerDiedError:
                await self._manager_died()
        decided = self.invariants.all_that_is_decided()
        doom, self.manager.dies_in = self.manager.dies_in, None
        again = await request(self.manager)
        self.manager.dies_in = doom
        assert again == answer, f"{again} the second time, {answer} the first"
        now_decided = self.invariants.all_that_is_decided()
        assert now_decided == decided, f"asked again: {now_decided} instead of {decided}"
        return answer

    # ------------------------------------------------------------ disturbances

    def disturb(self) -> None:
        """Begin with them."""
        wanted = self.disturbances
        for mean_s, what in (
            (wanted.manager_death_s, self._doom_manager),
            (wanted.stream_break_s, self._break_stream),
            (wanted.partition_s, self._partition),
            (wanted.agent_death_s, self._kill_agent),
            (wanted.process_death_s, lambda: self.kill_process(self.chance.randrange(1000))),
            (wanted.process_freeze_s, lambda: self.freeze_process(self.chance.randrange(1000))),
        ):
            if mean_s:
                self._again(mean_s, what)

    def end_disturbances(self) -> None:
        self.calm = True
        self.training.fault_rate = 0.0

    def story(self) -> str:
        """What happened, in figures, and a sum over the event log: the same seed gives the same."""
        jobs = self.training.jobs.values()
        generations = sum(job.newest_generation for job in jobs)
        redone = sum(job.redone for job in jobs)
        return (
            f"{self.time.now - self.began_at:.0f} s, {self.market.made} VMs, {generations} generations, "
            f"{self.training.steps_done} steps, {redone} of them again, "
            f"{self.training.steps_left} left in their middle, {self.training.left_late} processes left late, "
            f"the manager died {self.deaths} times, "
            f"{self.invariants.checks} commits checked, log {crc32(self.invariants.log().encode()):08x}"
        )

    def nothing_leaked(self) -> None:
        """The store and the provider know of the same VMs."""
        there = {vm_id for market in self.markets.values() for vm_id, vm in market.vms.items() if vm.alive}
        assert set(self.invariants.vm_states()) == there, f"{self.invariants.vm_states()} in the store, {there} exist"

    def _again(self, mean_s: float, what: Any) -> None:
        def happen() -> None:
            if not self.calm:
                what()
                self._again(mean_s, what)

        self.time.after(self.chance.expovariate(1 / mean_s), happen)

    def _doom_manager(self) -> None:
        if self.manager.is_up and self.manager.dies_in is None:
            self.manager.dies_in = self.chance.randrange(12)

    def _some_vm(self) -> SimulatedVm | None:
        vms = [vm for vm in self.market.vms.values() if vm.alive and vm.stream is not None]
        return self.chance.choice(vms) if vms else None

    def _break_stream(self) -> None:
        vm = self._some_vm()
        if vm is not None:
            vm.break_stream()

    def _kill_agent(self) -> None:
        vm = self._some_vm()
        if vm is not None:
            vm.restart_agent()

    def kill_process(self, pick: int) -> None:
        """A worker, or one that has left its generation."""
        if processes := self.training.alive():
            self.training.end(processes[pick % len(processes)], KILLED)

    def freeze_process(self, pick: int) -> None:
        """It takes no rank, gives no state, makes no step and does not leave."""
        if processes := self.training.alive():
            processes[pick % len(processes)].frozen = True

    def _partition(self) -> None:
        vm = self._some_vm()
        if vm is not None:
            vm.reachable = False
            self.time.after(self.chance.uniform(*self.disturbances.partition_lasts_s), lambda: vm.reach_again())


@asynccontextmanager
async def fleet_world(
    folder: Path, seed: int, *, rules: Rules | None = None, disturbances: Disturbances | None = None, gpus: int = 1
) -> AsyncIterator[FleetWorld]:
    """A world that is closed at the end of the block. A failure prints the seed and the manager's event log."""
    world = FleetWorld(folder, seed, rules or Rules(), disturbances or Disturbances(), gpus)
    with inline_sqlite(), capture_logs() as logs:
        try:
            await world.manager.start(world.provider)
            yield world
            # The manager survives its own defects, and logs them.
            errors = [entry for entry in logs if entry["log_level"] in ("error", "critical")]
            defects = [entry for entry in errors if entry["event"] not in world.expected_errors]
            assert not defects, defects
        except BaseException:
            print(f"seed {seed}, at {world.time.now:.2f}; the manager's event log:\n{world.invariants.log()}")
            raise
        finally:
            if world.manager.is_up:
                await world.manager.die()
            world.invariants.close()
