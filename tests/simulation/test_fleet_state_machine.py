"""Whatever is lost, repeated, late, killed, taken or requested, in any order, the jobs come to their right end.

All state machines together: jobs, generations, VMs, workers, leases and the agents' own states, with the invariants of
`fleet_invariants` after every commit. Processes go on in place, with the same stages or others, give their state to
new ones, keep copies, are started ahead, and are killed or freeze in any phase of that. Users' requests (drain,
cancel, retry, submit, size of the fleet) are repeated until there is an answer, and then once more, which changes
nothing. VARUNA_FLEET_TRACES: the number of traces.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from disturbed_fleet import QUICK, books_are_right
from fleet_world import fleet_world
from simulated_manager import ManagerEnd
from simulated_training import Carriage
from simulated_vm import SimulatedVm
from varuna_manager.answers.errors import ConflictError, MissingError
from varuna_proto.rest_fleet import VmDocument

pytestmark = pytest.mark.slow


PICK = strategies.integers(0, 1000)
VMS, STEPS = 6, 12
MOST_FAULTS = 3
"""Fewer than break a job (`Rules.breaker`)."""


class Fleet(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        self.folder = tempfile.TemporaryDirectory()

    @initialize(
        seed=PICK,
        gpus=strategies.integers(1, 2),
        carriages=strategies.tuples(*[strategies.sampled_from(Carriage)] * 2),
        layers=strategies.sampled_from([6, 12]),
        trains=strategies.booleans(),
    )
    def start(self, seed: int, gpus: int, carriages: tuple[Carriage, Carriage], layers: int, trains: bool) -> None:
        world = fleet_world(Path(self.folder.name), seed, rules=QUICK, gpus=gpus)
        self.world = self.runner.run(self.stack.enter_async_context(world))
        self.runner.run(self.world.manager.fleet.set_target(VMS))
        sizes: list[dict[str, Any]] = [{"global_batch": 1024}, {"global_batch": 64, "resources": {"max_gpus": 2}}]
        self.jobs = {
            self.runner.run(
                self.world.submit(name, steps=STEPS, save_every=4, carriage=carriage, layers=layers, **size)
            ): name
            for name, carriage, size in zip(("one", "two"), carriages, sizes, strict=True)
        }
        self.faults = 0
        if trains:  # otherwise few traces come as far as a reshape
            self.runner.run(self.world.run_until(lambda: self.world.training.steps_done > 0, 1000.0))
        self.ends = dict.fromkeys(self.jobs, "succeeded")

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

    @rule(pick=PICK, after_s=strategies.sampled_from([0.1, 2.0]), read_after_s=strategies.sampled_from([0.1, 1.0, 4.0]))
    def a_stream_breaks_and_is_read_later(self, pick: int, after_s: float, read_after_s: float) -> None:
        if vm := self.some_vm(pick):
            vm.break_stream_late(after_s, read_after_s)

    @rule(pick=PICK)
    def a_stream_says_everything_twice(self, pick: int) -> None:
        if (vm := self.some_vm(pick)) and vm.stream is not None:
            vm.stream.twice = True

    @rule(pick=PICK, seconds=strategies.sampled_from([5.0, 40.0, 90.0]))
    def a_vm_is_cut_off(self, pick: int, seconds: float) -> None:
        if vm := self.some_vm(pick):
            vm.reachable = False
            self.world.time.after(seconds, vm.reach_again)

    @rule(pick=PICK)
    def an_agent_is_killed(self, pick: int) -> None:
        if vm := self.some_vm(pick):
            vm.restart_agent()

    @precondition(lambda self: self.faults < MOST_FAULTS)
    @rule(pick=PICK)
    def a_process_is_killed(self, pick: int) -> None:
        """A worker, or one that has left its generation."""
        self.faults += 1
        self.world.kill_process(pick)

    @precondition(lambda self: self.faults < MOST_FAULTS)
    @rule(pick=PICK)
    def a_process_freezes(self, pick: int) -> None:
        """It takes no rank, gives no state, makes no step and does not leave."""
        self.faults += 1
        self.world.freeze_process(pick)

    @rule(pick=PICK, notice_s=strategies.sampled_from([0.0, 5.0, 30.0, 60.0]))
    def a_vm_is_taken(self, pick: int, notice_s: float) -> None:
        if vm := self.some_vm(pick):
            self.runner.run(self.world.market.preempt_vm(vm.vm_id, notice_s))

    @rule(point=strategies.integers(0, 10))
    def the_manager_is_killed(self, point: int) -> None:
        self.world.manager.dies_in = point

    # ------------------------------------------------------------ users

    @rule(pick=PICK, deadline_s=strategies.sampled_from([None, 0.0, 10.0]))
    def a_vm_is_drained(self, pick: int, deadline_s: float | None) -> None:
        if vm := self.some_vm(pick):

            async def drain(manager: ManagerEnd) -> VmDocument | str:
                try:
                    return await manager.drains.drain_vm(vm.vm_id, deadline_s)
                except (ConflictError, MissingError) as error:  # a manager that died may not have stored it
                    return str(error)

            self.runner.run(self.world.ask(drain))

    @rule(pick=PICK, save=strategies.booleans())
    def a_job_is_cancelled(self, pick: int, save: bool) -> None:
        job_id = self.some_job(pick)

        async def cancel(manager: ManagerEnd) -> str:
            try:
                return str((await manager.jobs.cancel_job(job_id, save=save))["state"])
            except ConflictError:
                return str((await manager.jobs.find_job(job_id))["state"])

        state = self.runner.run(self.world.ask(cancel))
        assert state in ("succeeded", "cancelling", "cancelled"), state
        self.ends[job_id] = "succeeded" if state == "succeeded" else "cancelled"

    @rule(pick=PICK)
    def a_job_is_retried(self, pick: int) -> None:
        job_id = self.some_job(pick)

        async def retry(manager: ManagerEnd) -> str:
            try:
                return str((await manager.jobs.retry_job(job_id))["state"])
            except ConflictError as error:
                return str(error)

        if self.runner.run(self.world.ask(retry)) in ("queued", "running"):
            self.ends[job_id] = "succeeded"

    @rule(pick=PICK)
    def a_job_is_submitted_again_with_its_key(self, pick: int) -> None:
        job_id = self.some_job(pick)
        assert (
            self.runner.run(self.world.ask(lambda manager: self.world.handed_in(manager, self.jobs[job_id]))) == job_id
        )

    @rule()
    def the_fleet_is_wanted_as_large_as_it_is(self) -> None:
        self.runner.run(self.world.ask(lambda manager: manager.fleet.set_target(VMS)))

    def some_job(self, pick: int) -> str:
        return list(self.jobs)[pick % len(self.jobs)]

    # ------------------------------------------------------------ the end

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
            assert self.world.invariants.job_states() == self.ends
            for job in self.jobs:
                if self.ends[job] == "succeeded":
                    books_are_right(self.world, job)
            self.world.nothing_leaked()


TestFleet = Fleet.TestCase
TestFleet.settings = settings(
    max_examples=int(os.environ.get("VARUNA_FLEET_TRACES", "3")),
    stateful_step_count=20,
    deadline=None,
    phases=(Phase.generate,),  # a failing trace is printed with its event log; shrinking it would take hours
    suppress_health_check=list(HealthCheck),
)
