"""What workers leave in their VMs' memory: a job whose script fails, is retried, or loses an agent goes on from it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest

from manager_world import find_training, start_manager
from varuna_client import Client
from varuna_proto.rest import GenerationDocument
from waiting import wait_until

SCRIPT = """
    import os, pathlib, time

    import torch
    from torch import nn
    import varuna.roles.training
    from varuna import CutPoint, Varuna
    from varuna.data import Batches
    from varuna.distributed.agreement import agree_on_totals

    torch.set_num_threads(1)
    here = pathlib.Path(__file__).parent

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.cut, self.second = nn.Linear(8, 8), CutPoint(), nn.Linear(8, 1)

        def forward(self, x):
            time.sleep(0.05)
            return self.second(self.cut(self.first(x))).square().mean()

    def agree_late(group, own):  # as on a busy machine, where a rank receives an agreement after the others
        totals = agree_on_totals(group, own)
        if (here / "late").exists():
            time.sleep(0.5)
            group._departure.raise_if_leaving()
        return totals

    if os.environ["RANK"] == "1":
        varuna.roles.training.agree_on_totals = agree_late

    torch.manual_seed(0)
    data = [{"x": torch.full((8,), float(i))} for i in range(16)]
    model = Varuna(Small(), get_batch_fn=lambda size, device=None: {"x": torch.ones(size, 8)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    model.set_optimizer(optimizer)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    model.register_state("schedule", schedule)
    for step, batch in Batches(data, first_step=model.resume() + 1, last_step=100_000):
        rates = [group["lr"] for group in optimizer.param_groups]
        assert abs(rates[0] - 1e-4 * 0.999 ** (step - 1)) < 1e-9, (step, rates)
        while (here / "pause").exists() and step == int((here / "pause").read_text()):
            (here / f"paused{os.environ['RANK']}").touch()
            time.sleep(0.02)
        model.step(batch)
        schedule.step()
        fails = here / f"fails{os.environ['RANK']}"
        if fails.exists():
            fails.unlink()
            raise ValueError(f"it fails after step {step}")
"""


class Managed(NamedTuple):
    client: Client
    folder: Path
    """Of the job's script."""


@pytest.fixture
def managed(tmp_path: Path) -> Iterator[Managed]:
    """A manager with two VMs."""
    (tmp_path / "train.py").write_text(dedent(SCRIPT))
    with start_manager(tmp_path, 2) as client:
        yield Managed(client, tmp_path)


def submit(managed: Managed, **more: object) -> str:
    """A job whose state is on two VMs, one stage on each, and in no checkpoint after its first step."""
    run = f"{sys.executable} train.py"
    spec = {"name": "one", "workdir": str(managed.folder), "run": run, "global_batch": 4, "plan": {"p": 2, "d": 1}}
    spec |= {"checkpoint": {"interval_s": 3600}, **more}
    return managed.client.submit(spec)["id"]  # type: ignore[arg-type]


def check_goes_on(managed: Managed, job: str, first: GenerationDocument) -> None:
    """The next generation begins where the first ended, and reads nothing from the store."""
    client = managed.client
    second = wait_until(lambda: find_training(client, job, first["number"], steps=2), "steps after it")
    earlier = [one for one in client.generations(job) if one["number"] < second["number"]]
    trained = [one for one in earlier if one["last_step"] is not None]  # one between may have made no step
    before = max(trained, key=lambda one: one["number"])
    assert second["state_from"] is not None, second
    assert second["state_from"]["store"] == 0, second
    assert second["state_from"]["peers"] > 0
    assert second["resumed_step"] == before["last_step"], "no committed step is lost"


@pytest.mark.slow
def test_a_script_that_fails_on_one_rank_goes_on_from_memory(managed: Managed) -> None:
    job = submit(managed, max_restarts_on_errors=1)
    first = wait_until(lambda: find_training(managed.client, job, 0, steps=5), "five steps")
    (managed.folder / "fails1").touch()
    check_goes_on(managed, job, first)
    wait_until(lambda: all(vm["held_bytes"] == 0 for vm in managed.client.vms()), "the memory to be free")


@pytest.mark.slow
def test_a_script_that_fails_before_another_rank_has_the_agreement_loses_no_step(managed: Managed) -> None:
    job = submit(managed, max_restarts_on_errors=1, copies="off")
    first = wait_until(lambda: find_training(managed.client, job, 0, steps=5), "five steps")
    (managed.folder / "late").touch()
    wait_until(
        lambda: find_training(managed.client, job, 0, steps=first["last_step"] + 3), "steps with late agreements"
    )
    (managed.folder / "fails0").touch()
    check_goes_on(managed, job, first)


@pytest.mark.slow
def test_a_job_that_failed_is_retried_from_memory(managed: Managed) -> None:
    job, client = submit(managed), managed.client
    first = wait_until(lambda: find_training(client, job, 0, steps=5), "five steps")
    (managed.folder / "fails0").touch()
    wait_until(lambda: client.job(job)["state"] == "failed", "the job's end")
    wait_until(lambda: any(vm["held_bytes"] > 0 for vm in client.vms()), "the memory of the rank that failed")
    client.retry(job)
    check_goes_on(managed, job, first)
    wait_until(lambda: all(vm["held_bytes"] == 0 for vm in client.vms()), "the memory to be free")


@pytest.mark.slow
def test_an_agent_that_starts_again_has_the_memory_of_its_workers(managed: Managed) -> None:
    job, client = submit(managed), managed.client
    first = wait_until(lambda: find_training(client, job, 0, steps=5), "five steps")
    vm_id = first["placement"][1]["vm_id"]
    pid = next(vm["ref"]["pid"] for vm in client.vms() if vm["id"] == vm_id)
    os.kill(pid, signal.SIGUSR2)
    check_goes_on(managed, job, first)
    assert next(vm["ref"]["pid"] for vm in client.vms() if vm["id"] == vm_id) == pid, "in the same process"


@pytest.mark.slow
def test_agents_that_are_replaced_one_after_the_other_lose_no_step(managed: Managed) -> None:
    """Each has the only state of a stage. The second one's process waits for the job's next generation by then, or
    gives its state to it already."""
    job, client = submit(managed), managed.client
    first = wait_until(lambda: find_training(client, job, 0, steps=5), "five steps")
    (managed.folder / "pause").write_text(str(first["last_step"] + 10))  # no rank is in an agreement then
    wait_until(lambda: all((managed.folder / f"paused{rank}").exists() for rank in range(2)), "both ranks' pauses")
    pids = {vm["id"]: vm["ref"]["pid"] for vm in client.vms()}
    vm_id = first["placement"][1]["vm_id"]
    os.kill(pids[vm_id], signal.SIGUSR2)
    agent_log = managed.folder / "manager" / "vms" / vm_id / "agent.log"
    wait_until(lambda: "the agent got SIGUSR2" in agent_log.read_text(), "the signal")
    (managed.folder / "pause").rename(managed.folder / "paused")
    wait_until(
        lambda: any(one["ended_at"] for one in client.generations(job) if one["number"] == first["number"]),
        "the end of the generation",
    )
    os.kill(pids[first["placement"][0]["vm_id"]], signal.SIGUSR2)
    check_goes_on(managed, job, first)
    assert {vm["id"]: vm["ref"]["pid"] for vm in client.vms()} == pids, "in the same processes"
