"""Whatever a hostile or broken agent sends on its stream, the whole manager goes on for everyone else."""

from __future__ import annotations

import hashlib
import io
import tarfile

import grpc
import pytest

from scripted_manager import ScriptedAgent, ScriptedManager
from varuna_manager.api.grpc.limits import find_hello_flaw
from varuna_proto.bounds import MOST_GPUS_OF_A_VM
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.v1 import agent_pb2_grpc
from waiting import until

ENVIRONMENT = {"SECRET": "only for those who run it"}
PATIENCE = ("--suspect-after-s", "3600", "--lost-after-s", "3600")
"""However long this machine stands still, no VM is lost, and so none replaced."""


async def test_a_report_that_is_too_large_ends_no_stream_and_an_exit_in_it_counts(manager: ScriptedManager) -> None:
    await manager.start("--vms", "2", *PATIENCE)
    await manager.submit(env=ENVIRONMENT, resources={"max_gpus": 1})
    agents = await manager.connect_vms(2)
    await until(lambda: any(agent.commands("launch") for agent in agents), "a launch")
    agent, other = sorted(agents, key=lambda agent: not agent.commands("launch"))
    launch = agent.commands("launch")[0]
    assert launch.environment == ENVIRONMENT
    await until(lambda: other.commands("prepare"), "its imports on the VM into which it may grow")
    assert [prepare.environment for prepare in other.commands("prepare")] == [{}]
    assert not other.commands("launch")

    huge = pb.CommandRefused(job_id=launch.job_id, generation=1, reason="x" * 3_000_000)
    agent.report(command_refused=huge)
    agent.exited(launch, pb.EXIT_CAUSE_SCRIPT_FAILED, "no\0such file" * 300_000)
    job = await manager.job_in("failed")
    assert "too large" in job["error"]
    await until(lambda: agent.acked == 2, "both to be acknowledged")
    assert not agent.is_over
    assert len(agent.commands("welcome")) == 1, "its stream is the first one"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": 2**32 - 1}, "GPUs is not taken"),
        ({"gpus": MOST_GPUS_OF_A_VM + 1}, "GPUs is not taken"),
        ({"rendezvous_port": 70_000}, "no port"),
        ({"device_memory_bytes": 2**64 - 1}, "bytes is not taken"),
        ({"host": "h\n"}, "its host"),
        ({"incarnation": "i" * 300}, "its incarnation"),
    ],
    ids=str,
)
def test_a_vm_that_cannot_be_is_not_taken(changes: dict[str, object], words: str) -> None:
    hello = pb.Hello(vm_id="vm-1", incarnation="i", host="10.0.0.1", gpus=8, rendezvous_port=4000)
    assert find_hello_flaw(hello) is None
    hello.MergeFrom(pb.Hello(**changes))
    assert words in (find_hello_flaw(hello) or "")


@pytest.mark.slow
async def test_an_archive_goes_to_those_vms_only_that_need_it(manager: ScriptedManager) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz"):
        pass
    sha256 = hashlib.sha256(packed.getvalue()).hexdigest()
    await manager.start("--vms", "1", *PATIENCE)
    (agent,) = await manager.connect_vms(1)
    upload = await manager.rest.put(f"archives/{sha256}", content=packed.getvalue())
    assert upload.status_code == 201, upload.text
    assert await fetch(agent, sha256) is grpc.StatusCode.PERMISSION_DENIED
    await manager.submit(archive=sha256)
    await until(lambda: agent.commands("prepare"), "a wish to prepare")
    assert await fetch(agent, sha256) == packed.getvalue()
    assert await fetch(agent, "f" * 64) is grpc.StatusCode.PERMISSION_DENIED


async def fetch(agent: ScriptedAgent, sha256: str) -> bytes | grpc.StatusCode:
    """The archive, or why it does not come."""
    request = pb.ArchiveRequest(vm_id=agent.vm_id, sha256=sha256)
    async with grpc.aio.insecure_channel(agent.address) as channel:
        try:
            stub: agent_pb2_grpc.AgentServiceAsyncStub = agent_pb2_grpc.AgentServiceStub(channel)
            return b"".join([chunk.data async for chunk in stub.FetchArchive(request)])
        except grpc.aio.AioRpcError as error:
            return error.code()
