"""A job on hosts with GPUs of two types, under a real manager: each does as much as its speed allows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import pytest

from manager_world import all_ready, find_training
from varuna_client import Client
from varuna_client.demo.processes import DemoProcesses
from varuna_proto.rest import GenerationDocument
from waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.slow

SCRIPT = """
    import os

    import torch
    from torch import nn
    from varuna import CutPoint, Varuna
    from varuna.data import Batches

    torch.set_num_threads(1)
    PRODUCTS = {"Fast": 6, "Slow": 36}[os.environ["VARUNA_GPU_TYPE"]]
    weights = torch.ones(256, 256)

    class Work(torch.autograd.Function):
        \"\"\"As much work as a GPU of this type would have with a block.\"\"\"

        @staticmethod
        def forward(ctx, x):
            for _ in range(PRODUCTS):
                weights @ weights
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            for _ in range(PRODUCTS):
                weights @ weights
            return grad.clone()

    class Block(nn.Linear):
        def forward(self, x):
            return Work.apply(super().forward(x))

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(8, 8) for _ in range(4)])
            self.cuts = nn.ModuleList([CutPoint() for _ in range(3)])

        def forward(self, x):
            for block, cut in zip(self.blocks, [*self.cuts, nn.Identity()]):
                x = cut(block(x))
            return x.square().mean()

    torch.manual_seed(0)
    data = [{"x": torch.full((8,), float(i))} for i in range(64)]
    model = Varuna(Small(), get_batch_fn=lambda size, device=None: {"x": torch.ones(size, 8)})
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
    for step, batch in Batches(data, first_step=model.resume() + 1, last_step=100_000):
        model.step(batch)
"""


class Hosts:
    """A manager of hosts of one's own, whose agents come when they are started."""

    def __init__(self, folder: Path, processes: DemoProcesses, grpc: str, client: Client) -> None:
        self.folder, self.processes, self.grpc, self.client = folder, processes, grpc, client
        self.ready = 0

    def start_agent(self, name: str, gpu_type: str) -> None:
        vm_dir = self.folder / name
        vm_dir.mkdir()
        arguments = ["--manager", self.grpc, "--vm-id", name, "--vm-dir", str(vm_dir), "--gpu-type", gpu_type]
        self.processes.start(["-m", "varuna_agent.main", *arguments], vm_dir / "agent.log")
        self.ready += 1
        wait_until(lambda: all_ready(self.client, self.ready), f"agent {name}")

    def submit(self, folder: Path, **plan: int) -> str:
        spec = {"name": "mixed", "workdir": str(folder), "run": f"{sys.executable} train.py", "global_batch": 24}
        return self.client.submit({**spec, "plan": {"micro_batch": 1, **plan}})["id"]  # type: ignore[typeddict-item]

    def wait_for_training(
        self, job: str, what: str, is_wanted: Callable[[GenerationDocument], bool]
    ) -> GenerationDocument:
        def find() -> GenerationDocument | None:
            found = find_training(self.client, job, 0, steps=2)
            while found is not None and not is_wanted(found):
                found = find_training(self.client, job, found["number"], steps=2)
            return found

        return wait_until(find, what)


@contextmanager
def start_hosts(folder: Path, *names: str) -> Iterator[Hosts]:
    hosts = folder / "hosts.yaml"
    hosts.write_text(json.dumps({"hosts": [{"name": name} for name in names]}))
    data = folder / "manager"
    with DemoProcesses(data) as processes:
        flags = ["--http-port", "0", "--grpc-port", "0", "--default-checkpoint-url", str(data / "checkpoints")]
        arguments = ["manager", "--data-dir", str(data), "--provider", f"static:{hosts}", *flags]
        processes.start(["-m", "varuna_client.cli", *arguments], folder / "manager.log")
        address = data / "manager.json"
        document = wait_until(lambda: json.loads(address.read_text()) if address.exists() else None, "the manager")
        with Client(f"http://{document['http']}", timeout_s=DEADLINE_S) as client:
            wait_until(client.is_ready, "the manager")
            yield Hosts(folder, processes, document["grpc"], client)


@contextmanager
def train_on_both(folder: Path, *, p: int) -> Iterator[tuple[Hosts, str]]:
    """A job in that many stages on a fast and a slow host, which are there when it is profiled."""
    (folder / "train.py").write_text(dedent(SCRIPT))
    with start_hosts(folder, "fast-1", "slow-1") as hosts:
        hosts.start_agent("fast-1", "Fast")
        hosts.start_agent("slow-1", "Slow")
        yield hosts, hosts.submit(folder, p=p)


def test_replicas_on_slower_gpus_run_fewer_micro_batches(tmp_path: Path) -> None:
    """All are there when the job is profiled, so its first plan is right."""
    with train_on_both(tmp_path, p=1) as (hosts, job):
        first = hosts.wait_for_training(job, "training on both", lambda one: one["d"] == 2)
        plan = hosts.client.job(job)["plan"]
        assert plan is not None
        assert plan["gpu_types"] == ["Fast", "Slow"]
        fast, slow = plan["shares"]
        assert fast + slow == 24
        # How much more depends on what else ran on their cores during the calibration, so that the profile is right.
        assert fast > slow, "a slow block takes six times as long"
        on = {place["rank"]: place["vm_id"] for place in first["placement"]}
        assert on == {0: "fast-1", 1: "slow-1"}
        events = hosts.client.events(job=job, kind=["generation_started"])
        assert f"over 1 replica of Fast ({fast} micro-batches) and 1 replica of Slow" in events[-1]["message"]


def test_a_stage_on_slower_gpus_has_fewer_sections(tmp_path: Path) -> None:
    with train_on_both(tmp_path, p=2) as (hosts, job):
        hosts.wait_for_training(job, "training on both", lambda one: one["p"] == 2)
        plan = hosts.client.job(job)["plan"]
        assert plan is not None
        lengths = [plan["stage_starts"][1], 4 - plan["stage_starts"][1]]
        assert lengths[plan["gpu_types"].index("Fast")] == 3
        assert plan["shares"] == []


def test_the_speed_of_a_type_that_comes_later_is_learned_from_its_workers(tmp_path: Path) -> None:
    """The plan with it assumes the speed of the first type, until its workers have shown theirs."""
    (tmp_path / "train.py").write_text(dedent(SCRIPT))
    with start_hosts(tmp_path, "fast-1", "slow-1") as hosts:
        hosts.start_agent("fast-1", "Fast")
        job = hosts.submit(tmp_path, p=1)
        hosts.wait_for_training(job, "training on the fast one", lambda one: one["d"] == 1)
        hosts.start_agent("slow-1", "Slow")
        hosts.wait_for_training(job, "training on both", lambda one: one["d"] == 2)
        grown = hosts.client.job(job)["plan"]
        assert grown is not None
        assert grown["shares"] == [12, 12], "nothing is known of the new type yet"

        def find_learned() -> list[int] | None:
            plan = hosts.client.job(job)["plan"]
            shares = [] if plan is None else plan["shares"]
            return shares if len(shares) == 2 and min(shares) <= 8 else None

        shares = wait_until(find_learned, "shares by the speeds that workers have shown")
        assert sum(shares) == 24
        messages = [event["message"] for event in hosts.client.events(job=job, kind=["profile_drift"])]
        assert any("Slow" in message for message in messages), messages
        number = hosts.client.generations(job)[-1]["number"]
        newest = wait_until(lambda: find_training(hosts.client, job, number - 1, steps=1), "a step with these shares")
        assert newest["kind_of_morph"] == "reshape", newest["reason"]
        assert newest["steps_redone"] == 0
