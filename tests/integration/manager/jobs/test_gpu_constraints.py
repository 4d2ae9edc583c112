"""A job that asks for certain GPUs is launched on those and no others, and only VMs that may have them are wanted."""

from __future__ import annotations

from pathlib import Path

from migrated_stores import migrated
from rest_world import SPEC
from scripted_manager import ScriptedManager
from varuna_manager.db.engine import Database
from varuna_manager.domain.spec import JobSpec
from varuna_manager.fleet.fleet import job_wants
from varuna_manager.jobs.jobs import JobService
from varuna_manager.providers.base import VmOffer
from varuna_manager.world.bell import Bell
from varuna_manager.world.events import EventLog
from waiting import until

A100, V100 = "NVIDIA A100 80GB PCIe", "Tesla V100-PCIE-16GB\0"


async def test_a_job_is_launched_only_where_the_gpus_are_as_it_asks(manager: ScriptedManager) -> None:
    await manager.start("--vms", "3")
    agents = await manager.connect_vms(3, gpu_types=[A100, V100, ""])
    await manager.submit(resources={"gpu_type": "a100", "min_gpus": 2})
    waits = (
        "1 GPU is free for this job and it needs 2: waiting for more "
        "(2 others do not match its resources: gpu_type a100)"
    )

    async def reason() -> bool:
        return bool((await manager.get("jobs/train"))["reason"] == waits)

    await until(reason, "the reason")
    await manager.submit(name="second", resources={"gpu_type": "A100"})
    launch = await agents[0].launch(1)
    assert launch.world_size == 1
    await manager.submit(name="third", resources={"min_gpu_memory_gib": 1, "min_gpus": 2})
    assert (await agents[1].launch(1)).world_size == 2
    assert len(agents[0].commands("launch")) == 1
    types = {vm["id"]: vm["gpu_type"] for vm in await manager.get("vms")}
    assert [types[agent.vm_id] for agent in agents] == [A100, "Tesla V100-PCIE-16GB", None]


async def test_vms_that_no_job_could_use_are_not_wanted(tmp_path: Path) -> None:
    migrated(tmp_path / "manager.db")
    database = Database(f"sqlite:///{tmp_path / 'manager.db'}")
    jobs = JobService(database, EventLog(database), Bell())
    for name, resources in {"any": {}, "big": {"min_gpu_memory_gib": 40}, "a100": {"gpu_type": "A100"}}.items():
        await jobs.submit_job(JobSpec.model_validate({**SPEC, "name": name, "resources": resources}), None)

    async def unfit(offer: VmOffer) -> int:
        async with database.read() as session:
            wants, others = await job_wants(session, [offer])
        assert len(wants) + others == 3
        return others

    assert await unfit(VmOffer(gpus=1)) == 0, "nothing is known of what is on offer"
    assert await unfit(VmOffer(gpus=1, device_memory_bytes=16 << 30, gpu_type=V100)) == 2
    assert await unfit(VmOffer(gpus=1, device_memory_bytes=80 << 30, gpu_type=A100)) == 0
    await database.close()
