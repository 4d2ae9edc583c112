"""What a job's processes cannot reach, and what an agent knows after it was killed. The agent is a process."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from contextlib import suppress

import psutil
import pytest

from agent_world import FakeManager, ended, runs, start_agent
from isolated_agent import IsolatedAgent
from varuna_agent.workers.isolation import JobUser, make_worker_environ
from varuna_proto.v1 import agent_pb2 as pb
from waiting import until


def family_of(agent: psutil.Process) -> list[psutil.Process]:
    return agent.children(recursive=True)


@pytest.mark.needs("root")
@pytest.mark.parametrize(
    "command", ["python3 train.py", "cd . && python3 train.py"], ids=["from a warmed process", "from a shell"]
)
async def test_jobs_of_another_user_reach_what_is_theirs_and_nothing_of_the_agents(
    agent: IsolatedAgent, command: str
) -> None:
    process = await agent.start("--run-as", "nobody")
    agent.launch(command, 1, process)
    found = await agent.found(1)

    nobody = JobUser.find_user("nobody")
    assert found["user"] == [nobody.uid, nobody.gid, list(nobody.groups), "nobody", nobody.home]
    assert set(found["denied"].values()) == {"PermissionError"}, found["denied"]
    assert (found["socket"], found["copies"], found["log"]) == ("", "", "")
    assert [target[:5] for target in found["open"]] == ["pipe:"], "that for stacks"
    for one in family_of(process):
        with suppress(psutil.NoSuchProcess):  # one that has just ended has none
            assert not [name for name, value in one.environ().items() if value == "a-secret"], one.pid
    assert stat.S_IMODE(agent.vm_dir.stat().st_mode) == 0o711

    family = family_of(process)
    assert len(family) >= 2, "a guard and a worker at least"
    os.kill(process.pid, signal.SIGKILL)
    await until(lambda: not any(map(runs, family)))


async def test_secrets_of_the_agent_do_not_reach_jobs_of_its_own_user_and_its_folder_is_its_own(
    agent: IsolatedAgent,
) -> None:
    process = await agent.start()
    agent.launch("python3 train.py", 1, process)
    found = await agent.found(1)
    assert "a-secret" not in found["environ"].values()
    assert [target[:5] for target in found["open"]] == ["pipe:"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (agent.vm_dir, agent.vm_dir / "jobs")] == [0o700, 0o700]


async def test_an_agent_that_was_killed_takes_its_workers_along_and_still_refuses_what_is_over(
    agent: IsolatedAgent,
) -> None:
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


def refused(manager: FakeManager, _: psutil.Process) -> list[pb.CommandRefused]:
    return [r.command_refused for r in manager.reports if r.WhichOneof("fact") == "command_refused"]


async def test_users_that_cannot_be_used_are_named(
    agent: IsolatedAgent,
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
            JobUser.find_user("nobody")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(ValueError, match="that is root"):
        JobUser.find_user("root")


def test_a_job_gets_a_secret_that_it_names_itself() -> None:
    base = {"PGPASSWORD": "the store's", "VARUNA_API_TOKEN": "x", "AWS_REGION": "eu-west-1"}
    environ = make_worker_environ(base, {"PGPASSWORD": "the job's"}, on_cpu=False)
    assert environ.pop("PATH")
    assert environ == {"PYTHONUNBUFFERED": "1", "AWS_REGION": "eu-west-1", "PGPASSWORD": "the job's"}
