"""The Slurm provider on a real Slurm: what it says when Slurm does not start, or takes, its jobs."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from slurm_bench import make_settings, make_slurm_provider
from slurm_cluster import GRACE_S, SlurmCluster, slurm_cluster
from varuna_agent.notices.notices import Notice
from varuna_agent.notices.slurm import SLURM_JOB, SlurmNotices
from varuna_manager.domain.fleet_decision import RefusalKind
from varuna_manager.providers.base import ProviderVm
from varuna_manager.providers.slurm.commands import ToolAnswer
from varuna_manager.providers.slurm.provider import SlurmProvider
from waiting import DEADLINE_S, until

pytestmark = [pytest.mark.needs("slurm"), pytest.mark.xdist_group("slurm")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster(nodes=2) as running:
        yield running


Make = Callable[..., SlurmProvider]


@pytest.fixture
def make(cluster: SlurmCluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes a provider of a fleet of the test's own, whose jobs end with it. A VM has a node for itself."""
    fleet = f"f{abs(hash(request.node.name)) % 10**8}"

    def make_provider(**changes: object) -> SlurmProvider:
        settings = make_settings(tmp_path, **{"fleet": fleet, "cpus": 8, "list_every_s": 0.05, **changes})
        return make_slurm_provider(cluster.environment, settings)

    yield make_provider
    cluster.run("scancel", "--me")
    cluster.wait_until_idle()


async def make_vm(provider: SlurmProvider, request: str = "request-1") -> ProviderVm:
    (vm,) = (await provider.create(1, request)).vms
    return vm


async def wait_ended(provider: SlurmProvider, vm: ProviderVm) -> str:
    """Why it has ended."""

    async def reason() -> str | None:
        return next((each.ended for each in await provider.list() if each.id == vm.id), "it is not listed")

    return str(await until(reason, f"the end of {vm.id}"))


async def test_jobs_that_wait_for_too_long_are_refused_with_slurms_reason(make: Make, cluster: SlurmCluster) -> None:
    fillers = [cluster.submit("--cpus-per-task=8") for _ in cluster.nodes]
    await until(lambda: all(cluster.state(job) == "RUNNING" for job in fillers), "all nodes are in use")
    created = await make(pending_s=1.0).create(2, "request-1")
    assert created.vms == ()
    assert created.refusal is not None
    assert created.refusal.kind is RefusalKind.CAPACITY
    # The first may have waited for that long when the second is submitted.
    assert re.fullmatch(r"Slurm has not started (a job|2 jobs) within 1 s \(.+\)", created.refusal.reason)
    assert cluster.run("squeue", "-h", "-tPD", "-o%i") == ""


async def test_a_list_that_was_begun_before_a_submission_does_not_hide_its_job(
    make: Make, cluster: SlurmCluster
) -> None:
    fillers = [cluster.submit("--cpus-per-task=8") for _ in cluster.nodes]
    await until(lambda: all(cluster.state(job) == "RUNNING" for job in fillers), "all nodes are in use")
    provider = make(list_every_s=5.0)
    commands, make_script, ask, run = (
        provider._commands,
        provider._make_script,
        provider._commands.ask_tool,
        provider._commands.run_tool,
    )
    is_listed, is_submitted, lists = asyncio.Event(), asyncio.Event(), []

    async def ask_late(command: Sequence[str]) -> str:
        answer = await ask(command)
        is_listed.set()
        await is_submitted.wait()
        return answer

    async def list_before(vm_id: str) -> str:
        with patch.object(commands, "ask_tool", ask_late):
            lists.append(asyncio.create_task(provider.delete(["another-vm"])))  # lists at once
            await is_listed.wait()
        return await make_script(vm_id)

    async def note_submission(command: Sequence[str], *, text: str = "") -> ToolAnswer:
        answer = await run(command, text=text)
        if command[0] == "sbatch":
            is_submitted.set()
        return answer

    with patch.object(provider, "_make_script", list_before), patch.object(commands, "run_tool", note_submission):
        creation = asyncio.create_task(provider.create(1, "request-1"))
        await is_submitted.wait()
        await lists[0]
        await until(lambda: cluster.run("squeue", "-h", "-tPD", "-o%i"), "the job waits")
        cluster.run("scancel", *map(str, fillers))
        created = await creation
    assert (created.refusal, len(created.vms)) == (None, 1)


async def test_what_slurm_never_starts_is_refused_at_once(make: Make) -> None:
    for changes in ({"gres": "gpu:9"}, {"constraint": "slow"}, {"partition": "nowhere"}):
        created = await make(**changes).create(1, "request-1")
        assert created.refusal is not None
        assert created.refusal.kind is RefusalKind.FAILED
        assert "sbatch: error: " in created.refusal.reason


async def test_a_preemption_with_grace_is_a_notice(make: Make, cluster: SlurmCluster) -> None:
    provider = make(partition="graceful")
    vm = await make_vm(provider)
    assert await provider.list_notices() == []
    cluster.submit("-purgent", "--exclusive", f"-w{vm.ref['node']}")
    (notice,) = await until(provider.list_notices, "the notice")
    assert notice.vm_id == vm.id
    assert time.time() < notice.deadline_unix_s <= time.time() + GRACE_S + 1
    assert [(each.id, each.going, each.ended) for each in await provider.list()] == [(vm.id, False, None)]


async def test_a_preemption_without_grace_and_a_cancellation_are_told_apart(make: Make, cluster: SlurmCluster) -> None:
    provider = make()
    first, second = (await provider.create(2, "request-1")).vms
    cluster.submit("-purgent", "--exclusive", f"-w{first.ref['node']}")
    cluster.run("scancel", str(second.ref["job"]))
    assert (await wait_ended(provider, first)).startswith("its job was preempted for another one")
    assert (await wait_ended(provider, second)).startswith("its job was cancelled")


async def test_an_agent_that_fails_ends_its_vm_and_says_where_to_look(make: Make) -> None:
    provider = make(agent_command=("/bin/false",))
    await provider.create(1, "request-1")

    async def ended() -> list[str]:
        return [vm.ended for vm in await provider.list() if vm.ended is not None]

    (reason,) = await until(ended, "its end")
    assert "its agent failed" in reason
    assert ".log in log_dir" in reason


async def test_a_job_is_not_queued_again(make: Make, cluster: SlurmCluster) -> None:
    provider = make()
    vm = await make_vm(provider)
    cluster.run("scontrol", "requeue", str(vm.ref["job"]), check=False)
    assert cluster.state(vm.ref["job"]) == "RUNNING"
    cluster.run("scontrol", "update", f"NodeName={vm.ref['node']}", "State=DOWN", "Reason=test")
    try:
        assert (await wait_ended(provider, vm)).startswith("its node failed")
    finally:
        # Slurm refuses this if the node has come back by itself.
        cluster.run("scontrol", "update", f"NodeName={vm.ref['node']}", "State=RESUME", check=False)


async def test_of_a_job_that_was_submitted_twice_the_later_is_cancelled(make: Make, cluster: SlurmCluster) -> None:
    """As when a manager is killed and its sbatch ends after the next manager has looked."""
    provider = make()
    vm = await make_vm(provider)
    comment = cluster.run("squeue", "-h", "-o%k", f"-j{vm.ref['job']}").strip()
    twin = cluster.submit(f"--comment={comment}-twin", "--cpus-per-task=8")
    await until(lambda: cluster.state(twin) == "RUNNING", "the twin")

    async def is_cancelled() -> bool:
        await provider.list()
        return cluster.state(twin) == "CANCELLED"

    await until(is_cancelled, "the end of the twin")
    assert [each.id for each in await provider.list() if not each.going and each.ended is None] == [vm.id]


async def test_a_job_that_slurm_has_forgotten_is_gone_with_what_accounting_knows(
    make: Make, cluster: SlurmCluster
) -> None:
    """This Slurm has no accounting, as many have none."""
    provider = make()
    vm = await make_vm(provider)
    cluster.forget_jobs()
    assert "Slurm no longer lists its job, and its accounting does not say why" in await wait_ended(provider, vm)


async def test_the_token_is_in_no_process_and_in_nothing_that_slurm_shows(make: Make, cluster: SlurmCluster) -> None:
    vm = await make_vm(make(gres="gpu:2", agent_command=("/bin/sh", "-c", "sleep 3600; :", "agent")))
    token = f"vj1.{vm.id}.secret"

    def agents() -> list[psutil.Process]:
        return [each for each in psutil.process_iter(["cmdline"]) if f"--vm-id={vm.id}" in (each.info["cmdline"] or ())]

    (agent, *_) = await until(agents, "the agent")
    for process in [agent, *agent.parents()]:
        assert token not in " ".join(process.cmdline())
    environment = agent.environ()
    assert not any(token in value for value in environment.values())
    assert {name for name in environment if name.startswith("SLURM_")} == {"SLURM_CONF"}
    shown = cluster.run("scontrol", "show", "job", str(vm.ref["job"]))
    assert token not in shown
    assert "TresPerNode=gres:gpu:2" in shown
    assert token in cluster.run("scontrol", "write", "batch_script", str(vm.ref["job"]), "-"), "its owner may read it"


async def test_an_agent_learns_from_slurm_when_its_job_ends(
    make: Make, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm = await make_vm(make())
    monkeypatch.setenv("SLURM_CONF", str(cluster.configuration))
    notices = SlurmNotices({SLURM_JOB: str(vm.ref["job"])})
    notices.announce_end()
    async with asyncio.timeout(DEADLINE_S):
        notice = await anext(notices.watch_notices())
    assert isinstance(notice, Notice)
    assert notice.notice_id == f"slurm-{vm.ref['job']}"
    assert notice.deadline_unix_s == pytest.approx(vm.created_at + 2 * 86_400, abs=2)


def test_notices_of_slurm_need_its_job() -> None:
    with pytest.raises(ValueError, match="VARUNA_SLURM_JOB is not set to the job's number"):
        SlurmNotices({})
