"""What agents report of ranks that wait in vain reaches the decision, and the silence of a VM is found soon."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import select

from controller_world import controller_over
from migrated_stores import migrated
from rest_world import SPEC, rest_world, vm
from varuna_manager.db.models import GenerationRow, JobRow
from varuna_manager.domain.states import WaitKind
from varuna_manager.world.vm_registry import Health, VmRegistry

VMS = ("vm-0", "vm-1")


async def test_the_job_of_a_silent_vm_stops_when_its_other_rank_gets_no_answer(tmp_path: Path) -> None:
    migrated(tmp_path / "manager.db")
    passed_s = 100.0
    registry = VmRegistry(lambda: passed_s)  # a busy machine makes nobody silent
    for vm_id in VMS:
        registry.add_hello(vm_id, rendezvous_port=20_000, workers=())

    def beat(rank: int, *quiet: int) -> bool:
        waiting = WaitKind.STEP if quiet else None
        health = Health(job_id="j", generation=1, rank=rank, step=1, waiting_for=waiting, quiet_ranks=frozenset(quiet))
        return registry.add_heartbeat(VMS[rank], rendezvous_port=20_001, workers=[health])

    async with rest_world(tmp_path) as world:
        job = JobRow(id="j", name="gpt", active_name="gpt", spec=SPEC, state="queued", history=[], created_at=1.0)
        await world.add(job, *(vm(vm_id) for vm_id in VMS))
        async with controller_over(world, VMS, registry=registry) as over:
            assert await over.controller.reconcile_once() == 0.0, "it starts the calibration"
            beat(1)
            beat(0)
            assert await over.controller.reconcile_once() == 0.5
            assert beat(0, 1), "the bell rings"
            assert await over.controller.reconcile_once() == 0.1, "both agents have sent heartbeats"
            passed_s += 2.5
            beat(0, 1)
            assert await over.controller.reconcile_once() == 0.0
        async with world.database.read() as session:
            (generation,) = await session.scalars(select(GenerationRow))
        assert (generation.state, generation.stop_cause) == ("stopping", "vm_lost")
        assert generation.stop_reason.startswith(
            "VM vm-1 is given up for this job: rank 1 there does not answer rank 0"
        )
