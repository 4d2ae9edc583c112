"""Whatever is lost, cut off, killed or taken, in whatever order: the jobs come to the end that they would come to.

All state machines together: jobs, generations, VMs, workers, leases and the agents' own states, with the invariants of
`fleet_invariants` after every commit. VARUNA_TRACES is how many traces are played.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from disturbed_fleet import QUICK, books_are_right
from fleet_world import fleet_world
from simulated_vm import SimulatedVm

PICK = strategies.integers(0, 1000)


class Fleet(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        self.folder = tempfile.TemporaryDirectory()

    @initialize(seed=PICK, gpus=strategies.integers(1, 2))
    def start(self, seed: int, gpus: int) -> None:
        world = fleet_world(Path(self.folder.name), seed, rules=QUICK, gpus=gpus)
        self.world = self.runner.run(self.stack.enter_async_context(world))
        self.runner.run(self.world.manager.fleet.set_target(3))
        self.jobs = [self.runner.run(self.world.submit(name, steps=6, save_every=2)) for name in ("one", "two")]

    def some_vm(self, pick: int) -> SimulatedVm | None:
        vms = [vm for vm in self.world.market.vms.values() if vm.alive]
        return vms[pick % len(vms)] if vms else None

    @rule(seconds=strategies.sampled_from([0.1, 1.0, 5.0, 20.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.runner.run(self.world.run(seconds))

    @rule(pick=PICK)
    def a_stream_breaks(self, pick: int) -> None:
        if vm := self.some_vm(pick):
            vm.break_stream()

    @rule(pick=PICK, seconds=strategies.sampled_from([5.0, 40.0, 90.0]))
    def a_vm_is_cut_off(self, pick: int, seconds: float) -> None:
        if vm := self.some_vm(pick):
            vm.reachable = False
            self.world.time.after(seconds, vm.reach_again)

    @rule(pick=PICK)
    def an_agent_is_killed(self, pick: int) -> None:
        if vm := self.some_vm(pick):
            vm.restart_agent()

    @rule(pick=PICK, notice_s=strategies.sampled_from([0.0, 5.0, 30.0]))
    def a_vm_is_taken(self, pick: int, notice_s: float) -> None:
        if vm := self.some_vm(pick):
            self.runner.run(self.world.market.preempt(vm.vm_id, notice_s))

    @rule(point=strategies.integers(0, 10))
    def the_manager_is_killed(self, point: int) -> None:
        self.world.manager.dies_in = point

    def teardown(self) -> None:
        try:
            if hasattr(self, "world"):
                self.runner.run(self.come_to_the_end())
        finally:
            self.runner.close()
            self.folder.cleanup()

    async def come_to_the_end(self) -> None:
        async with self.stack:
            await self.world.run_until_over(20_000)
            await self.world.run(200)
            self.world.invariants.at_rest()
            assert set(self.world.invariants.job_states().values()) == {"succeeded"}
            for job in self.jobs:
                books_are_right(self.world, job)
            self.world.nothing_leaked()


TestFleet = Fleet.TestCase
TestFleet.settings = settings(
    max_examples=int(os.environ.get("VARUNA_TRACES", "3")),
    stateful_step_count=12,
    deadline=None,
    phases=(Phase.generate,),  # a failing trace is told with its event log; to make it shorter would take hours
    suppress_health_check=list(HealthCheck),
)
