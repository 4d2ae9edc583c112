"""A job trains on a real Slurm while its VMs are preempted, cancelled and lost with their nodes."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

from secure_world import SecureManager, secure_manager
from slurm_cluster import SlurmCluster, slurm_cluster
from varuna_client import Client
from waiting import DEADLINE_S, wait_until

SCRIPT = """
    import sys
    import time
    from pathlib import Path

    import torch
    from torch import nn
    from varuna import CutPoint, Varuna
    from varuna.data import Batches

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.cut, self.second = nn.Linear(8, 16), CutPoint(), nn.Linear(16, 1)

        def forward(self, x):
            return self.second(self.cut(self.first(x).tanh())).square().mean()

    torch.manual_seed(0)
    data = [{"x": x} for x in torch.randn(64, 8)]
    model = Varuna(Small(), get_batch_fn=lambda size, device=None: {"x": torch.ones(size, 8)})
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    end = Path(sys.argv[1])
    for step, batch in Batches(data, first_step=model.resume() + 1, last_step=100_000):
        model.step(batch)
        if not end.exists():
            time.sleep(0.05)
        elif step >= int(end.read_text()):
            break  # on every rank at the same step
"""


class World:
    """A manager whose VMs are jobs of a cluster, one on each node, and a job that trains there."""

    def __init__(self, cluster: SlurmCluster, manager: SecureManager, client: Client, folder: Path) -> None:
        self.cluster = cluster
        self._manager = manager
        self._client = client
        self._folder = folder
        (folder / "train.py").write_text(dedent(SCRIPT))

    def submit(self, name: str, end: str, **plan: int) -> None:
        spec: dict[str, Any] = {"name": name, "workdir": str(self._folder), "global_batch": 12}
        spec |= {"run": f"python train.py {self._folder / end}", **({"plan": plan} if plan else {})}
        self._client.submit(spec)

    def set_target(self, vms: int) -> None:
        assert self._manager.admin().put("/fleet", json={"target": vms}).status_code == 200

    def events(self, kind: str) -> list[str]:
        return [event["message"] for event in self._client.events() if event["kind"] == kind]

    def vms(self) -> dict[str, Any]:
        return {vm["id"]: vm for vm in self._client.vms(gone=True)}

    def ready(self) -> list[str]:
        return sorted(vm_id for vm_id, vm in self.vms().items() if vm["state"] == "ready")

    def wait_ready(self, count: int) -> list[str]:
        wait_until(lambda: len(self.ready()) == count, f"{count} VMs")
        return self.ready()

    def wait_gone(self, vm_id: str) -> str:
        """Returns why."""
        wait_until(lambda: self.vms()[vm_id]["state"] == "gone", f"the end of {vm_id}")
        return str(self.vms()[vm_id]["reason"])

    def go_on(self, name: str = "train", steps: int = 5) -> None:
        """Wait for this many more steps."""
        at_least = (self._client.job(name)["step"] or 0) + steps
        wait_until(lambda: (self._client.job(name)["step"] or 0) >= at_least, f"step {at_least}")

    def end(self, name: str, end: str, steps: int) -> dict[int, float]:
        """Have the job end at a step to come; returns all its losses."""
        part = self._folder / f"{end}.part"
        part.write_text(str((self._client.job(name)["step"] or 0) + steps))
        part.rename(self._folder / end)
        return self.losses(name)

    def losses(self, name: str) -> dict[int, float]:
        wait_until(lambda: self._client.job(name)["state"] in ("succeeded", "failed"), f"the end of {name}")
        job = self._client.job(name)
        assert job["state"] == "succeeded", (job["error"], self._client.logs(name))
        return {metric["step"]: metric["loss"] for metric in self._client.metrics(name)}

    def node(self, vm_id: str) -> str:
        return str(self.vms()[vm_id]["ref"]["node"])

    def job(self, vm_id: str) -> int:
        return int(self.vms()[vm_id]["ref"]["job"])


@pytest.mark.slow
@pytest.mark.needs("slurm")
def test_a_job_trains_while_slurm_takes_its_vms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"partition": "graceful", "device": "cpu", "cpus": 8, "gres": "gpu:1", "time_limit": "1-00:00:00"}
    settings |= {"scratch_dir": str(tmp_path), "log_dir": str(tmp_path / "logs"), "list_every_s": 0.5}
    (tmp_path / "slurm.yaml").write_text(yaml.safe_dump({**settings, "notice_s": 60}))
    flags = ["--provider", f"slurm:{tmp_path / 'slurm.yaml'}", "--vms", "2", "--growth-settle-s", "0"]
    flags += ["--default-checkpoint-url", str(tmp_path / "checkpoints")]
    # A silent VM is given back after its lease, and here Slurm has to see before that that a node failed.
    flags += ["--lease-s", "600"]
    with slurm_cluster(nodes=4) as cluster:
        monkeypatch.setenv("SLURM_CONF", str(cluster.configuration))
        with (
            secure_manager(tmp_path / "data", *flags) as manager,
            Client(manager.url, token=manager.admin_token, ca=str(manager.ca_file), timeout_s=DEADLINE_S) as client,
        ):
            world = World(cluster, manager, client, tmp_path)
            _play(world)
            world.set_target(0)
            wait_until(lambda: not cluster.run("squeue", "-h", "-o%i", "-tR,PD,CG").split(), "no job is left")


def _play(world: World) -> None:
    cluster = world.cluster
    world.wait_ready(2)
    world.submit("train", "end")
    world.go_on()
    world.set_target(3)
    first, second, third = world.wait_ready(3)
    world.go_on()

    # Preemption by a partition of higher priority: Slurm moves the job's end by the grace time, and the VM leaves.
    urgent = cluster.submit("-purgent", "--exclusive", f"-w{world.node(first)}")
    assert world.wait_gone(first).startswith("it left: it has notice")
    assert any(first in message for message in world.events("preemption_notice"))
    wait_until(lambda: cluster.state(urgent) == "RUNNING", "the urgent job")
    world.go_on()
    world.wait_ready(3)

    cluster.run("scancel", str(world.job(second)))
    assert "its job was cancelled" in world.wait_gone(second)
    world.go_on()

    # The time limit: the VM leaves as long ahead of it as notice_s says.
    cluster.run("scancel", str(urgent))
    timed = next(vm_id for vm_id in world.wait_ready(3) if vm_id != third)
    age = datetime.now(UTC) - datetime.fromisoformat(world.vms()[timed]["created_at"])
    minutes = int(age.total_seconds()) // 60 + 1
    cluster.run("scontrol", "update", f"JobId={world.job(timed)}", f"TimeLimit={minutes}")
    assert world.wait_gone(timed).startswith("it left: it has notice")
    world.go_on()

    world.wait_ready(3)
    node = world.node(third)
    cluster.kill_node(node)
    assert f"its node failed (Slurm job {world.job(third)} on {node})" in world.wait_gone(third)
    cluster.start_node(node)
    world.wait_ready(3)
    world.go_on()

    cluster.stop_controller()
    wait_until(lambda: world.events("provider_away"), "the controller is away")
    world.go_on(steps=20)
    cluster.start_controller()
    wait_until(lambda: world.events("provider_back"), "the controller is back")
    assert len(world.ready()) == 3, "no VM was lost for it"

    losses = world.end("train", "end", steps=20)
    world.submit("reference", "end", p=1, d=1, micro_batch=12)
    expected = world.losses("reference")
    assert sorted(losses) == list(range(1, max(losses) + 1))
    assert max(losses) >= max(expected)
    assert {step: losses[step] for step in expected} == pytest.approx(expected, rel=1e-4)
