"""What a job's processes are kept from, and what an agent knows after it was killed. The agent is a process."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from test_agent_with_manager import Manager, agents, ended, launch, start_agent
from varuna_agent.isolation import JobUser, worker_environ
from varuna_proto.v1 import agent_pb2 as pb
from waiting import until

__all__ = ["agents"]

SECRETS = ("VARUNA_JOIN_TOKEN_X", "VARUNA_API_TOKEN", "AZURE_CLIENT_SECRET", "PGPASSWORD", "DATABASE_URL")

LOOKS_AROUND = """
import json, os, socket, time

def error_of(look):
    try:
        look()
    except OSError as error:
        return type(error).__name__
    return ""

vm_dir, agent = os.environ["VM_DIR"], os.environ["AGENT"]
found = {
    "user": [os.getuid(), os.getgid(), os.getgroups(), os.environ.get("USER"), os.environ.get("HOME")],
    "environ": dict(os.environ),
    "open": [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3, 1024) if os.path.islink(f"/proc/self/fd/{fd}")],
    "denied": {
        path: error_of(lambda: open(path, "rb").read(1) if "." in path or "proc" in path else os.listdir(path))
        for path in (vm_dir, f"{vm_dir}/jobs", f"{vm_dir}/identity", f"{vm_dir}/seen.json", f"/proc/{agent}/environ",
                     f"/proc/{agent}/mem")
    },
    "socket": error_of(lambda: socket.socket(socket.AF_UNIX).connect(os.environ["VARUNA_AGENT_SOCKET"])),
    "copies": error_of(lambda: os.makedirs(os.environ["VARUNA_LOCAL_CHECKPOINT_DIR"] + "/varuna_ckpt_1")),
    "log": error_of(lambda: open("/proc/self/fd/2", "a")),
}
print(json.dumps(found), flush=True)
time.sleep(600)
"""


class Agent:
    """An agent process with its folder, which others may pass through as they may on a real VM, and its manager."""

    def __init__(self, manager: Manager, processes: list[asyncio.subprocess.Process], folder: Path) -> None:
        self.manager = manager
        self.folder = folder
        self.vm_dir = folder / "vm"
        self._processes = processes

    async def start(self, *more: str) -> psutil.Process:
        known = len(self.manager.hellos)
        environ = {**os.environ, **dict.fromkeys(SECRETS, "a-secret")}
        address = f"127.0.0.1:{self.manager.port}"
        agent = await start_agent(self._processes, address, self.vm_dir, *more, environ=environ)
        await self.manager.until(lambda: len(self.manager.hellos) > known)
        return psutil.Process(agent.pid)

    def launch(self, command: str, generation: int, agent: psutil.Process, *, local_rank: int = 0, **more: Any) -> None:
        (self.folder / "train.py").write_text(LOOKS_AROUND)
        (self.folder / "varuna").mkdir(exist_ok=True)  # nothing that takes long is imported ahead
        (self.folder / "varuna" / "__init__.py").touch()
        (self.folder / "varuna" / "preload.py").touch()
        environment = {"VM_DIR": str(self.vm_dir), "AGENT": str(agent.pid), **more.pop("environment", {})}
        workers = [pb.WorkerAssignment(rank=1, local_rank=local_rank)]
        fields = {"command": command, "environment": environment, "workers": workers, **more}
        told = launch(self.folder, "", generation=generation, **fields)
        self.manager.say(launch=told)

    async def found(self, generation: int) -> dict[str, Any]:
        log = self.vm_dir / "jobs" / "job" / f"g{generation}" / "rank1.log"
        await until(lambda: log.exists() and log.read_text().endswith("}\n"))
        found: dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
        return found


@pytest.fixture
def folder() -> Iterator[Path]:
    """pytest's own are closed to other users on the way."""
    folder = Path(tempfile.mkdtemp(prefix="varuna-test-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)  # a killed agent's worker may still write its last


@pytest_asyncio.fixture
async def agent(folder: Path, agents: list[asyncio.subprocess.Process]) -> AsyncIterator[Agent]:
    manager = Manager()
    await manager.start()
    yield Agent(manager, agents, folder)
    await manager.stop()


def family_of(agent: psutil.Process) -> list[psutil.Process]:
    return agent.children(recursive=True)


def runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.needs("root")
@pytest.mark.parametrize(
    "command", ["python3 train.py", "cd . && python3 train.py"], ids=["from a warmed process", "from a shell"]
)
async def test_jobs_of_another_user_reach_what_is_theirs_and_nothing_of_the_agents(agent: Agent, command: str) -> None:
    process = await agent.start("--run-as", "nobody")
    agent.launch(command, 1, process)
    found = await agent.found(1)

    nobody = JobUser.named("nobody")
    assert found["user"] == [nobody.uid, nobody.gid, list(nobody.groups), "nobody", nobody.home]
    assert set(found["denied"].values()) == {"PermissionError"}, found["denied"]
    assert (found["socket"], found["copies"], found["log"]) == ("", "", "")
    assert [target[:5] for target in found["open"]] == ["pipe:"], "that for stacks"
    for one in family_of(process):
        assert not [name for name, value in one.environ().items() if value == "a-secret"], one.cmdline()
    assert stat.S_IMODE(agent.vm_dir.stat().st_mode) == 0o711

    family = family_of(process)
    assert len(family) >= 2, "a guard and a worker at least"
    os.kill(process.pid, signal.SIGKILL)
    await until(lambda: not any(map(runs, family)))


async def test_secrets_of_the_agent_do_not_reach_jobs_of_its_own_user_and_its_folder_is_its_own(agent: Agent) -> None:
    process = await agent.start()
    agent.launch("python3 train.py", 1, process)
    found = await agent.found(1)
    assert "a-secret" not in found["environ"].values()
    assert [target[:5] for target in found["open"]] == ["pipe:"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (agent.vm_dir, agent.vm_dir / "jobs")] == [0o700, 0o700]


async def test_an_agent_that_was_killed_takes_its_workers_along_and_still_refuses_what_is_over(agent: Agent) -> None:
    process = await agent.start()
    agent.launch("python3 train.py", 3, process)
    await agent.found(3)
    family = family_of(process)
    os.kill(process.pid, signal.SIGKILL)
    await until(lambda: not any(map(runs, family)))

    process = await agent.start()
    (seen,) = agent.manager.hellos[-1].seen_generations
    assert (seen.job_id, seen.generation) == ("job", 3)
    assert not agent.manager.hellos[-1].workers
    for refusals, generation in enumerate((2, 3), start=1):
        agent.launch("python3 train.py", generation, process)
        await agent.manager.until(lambda count=refusals: len(refused(agent.manager, process)) >= count)
    assert "generation 3 is over: VM vm-1 has seen generation 3" in refused(agent.manager, process)[-1].reason
    agent.launch("python3 train.py", 4, process)
    await agent.found(4)


def refused(manager: Manager, _: psutil.Process) -> list[pb.CommandRefused]:
    return [r.command_refused for r in manager.reports if r.WhichOneof("fact") == "command_refused"]


async def test_users_that_cannot_be_used_are_named(
    agent: Agent,
    agents: list[asyncio.subprocess.Process],
) -> None:
    process = await start_agent(agents, "127.0.0.1:1", agent.vm_dir, "--run-as", "no-such-user")
    code, errors = await ended(process)
    assert code == 2
    assert (
        errors
        == "varuna agent: --run-as 'no-such-user': this VM has no user of that name (try: useradd no-such-user)\n"
    )


def test_only_root_starts_workers_as_another_and_not_as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(ValueError, match="only an agent that runs as root"):
            JobUser.named("nobody")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(ValueError, match="that is root"):
        JobUser.named("root")


def test_a_job_gets_a_secret_that_it_names_itself() -> None:
    base = {"PGPASSWORD": "the store's", "VARUNA_API_TOKEN": "x", "AWS_REGION": "eu-west-1"}
    environ = worker_environ(base, {"PGPASSWORD": "the job's"}, on_cpu=False)
    assert environ.pop("PATH")
    assert environ == {"PYTHONUNBUFFERED": "1", "AWS_REGION": "eu-west-1", "PGPASSWORD": "the job's"}
