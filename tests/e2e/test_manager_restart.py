"""Managers are killed, and stand still, while a real job trains under real agents: training goes on, and is adopted."""

from __future__ import annotations

import asyncio
import re
import socket
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import httpx
import psutil
import pytest
from playwright.async_api import expect

from chromium import SCREENSHOTS, clean_page, launched
from manager_world import all_ready, wait_until
from restartable_manager import RestartableManager
from varuna_client import Client
from varuna_client.demo.processes import DemoProcesses
from varuna_client.errors import VarunaError

pytestmark = [pytest.mark.xdist_group("e2e"), pytest.mark.timeout(240)]

LEASE_S = 8.0

T = TypeVar("T")

SCRIPT = """
    import time
    import torch
    from pathlib import Path
    from torch import nn
    from varuna import CutPoint, Varuna
    from varuna.data import Batches

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.cut, self.second = nn.Linear(8, 8), CutPoint(), nn.Linear(8, 1)

        def forward(self, x):
            return self.second(self.cut(self.first(x))).square().mean()

    torch.manual_seed(0)
    data = [{"x": torch.full((8,), float(i))} for i in range(16)]
    model = Varuna(Small(), get_batch_fn=lambda size, device=None: {"x": torch.ones(size, 8)})
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
    end = Path("end")
    for step, batch in Batches(data, first_step=model.resume() + 1, last_step=100_000):
        model.step(batch)
        print("step", step, flush=True)
        if end.exists() and step >= int(end.read_text()):
            break  # on every rank at the same step
        time.sleep(0.02)
"""


class Training:
    """A job that trains until it is told to end. `managers` is asked whoever of them leads."""

    def __init__(self, managers: Sequence[RestartableManager], vms: Path, workdir: Path) -> None:
        self._managers = managers
        self._vms = vms
        self._workdir = workdir
        workdir.mkdir()
        (workdir / "train.py").write_text(textwrap.dedent(SCRIPT))

    def ask(self, question: Callable[[Client], T]) -> T:
        """The leader's answer, whoever that is when it comes: on a busy machine a lease may lapse at any time."""

        def answers() -> list[T]:
            for manager in self._managers:
                if manager.is_up:
                    with suppress(VarunaError), manager.client() as client:
                        if client.ready():
                            return [question(client)]
            return []

        return wait_until(answers, "a leader's answer")[0]

    def begin(self) -> None:
        wait_until(lambda: self.ask(lambda client: all_ready(client, 2)), "two VMs")
        spec = {"name": "small", "workdir": str(self._workdir), "run": "python train.py", "global_batch": 4}
        spec |= {"plan": {"p": 2, "d": 1, "micro_batch": 1}}
        self.ask(lambda client: client.submit(spec, idempotency_key="small"))
        self.reach(3)
        self._generations = self.ask(lambda client: client.generations("small"))

    def reach(self, step: int) -> None:
        """Wait until a leader knows of this step."""
        wait_until(lambda: self.ask(lambda client: client.job("small")["step"]) >= step, f"step {step}")

    def step(self) -> int:
        """The newest that any rank has printed."""
        texts = [path.read_text() for path in self._vms.glob("*/jobs/*/g*/rank*.log")]
        return max((int(step) for text in texts for step in re.findall(r"^step (\d+)$", text, re.MULTILINE)), default=0)

    def go_on(self, steps: int = 20) -> int:
        """Wait for so many more steps, whoever listens; the newest."""
        at_least = self.step() + steps
        wait_until(lambda: self.step() >= at_least, f"{steps} steps")
        return at_least

    def end(self) -> None:
        """Tell it to end, and check that nothing was lost, nor done twice."""
        last = self.step() + 50
        (self._workdir / "end.part").write_text(str(last))
        (self._workdir / "end.part").rename(self._workdir / "end")
        over = ("succeeded", "failed", "cancelled")
        wait_until(lambda: self.ask(lambda client: client.job("small")["state"]) in over, "the job's end")
        job = self.ask(lambda client: client.job("small"))
        after = self.ask(lambda client: client.generations("small"))
        assert (job["state"], job["error"]) == ("succeeded", None)
        assert len(self._generations) == len(after) == 2, "calibration, and one training generation for all of it"
        assert after[-1]["placement"] == self._generations[-1]["placement"]
        metrics = self.ask(lambda client: client.metrics("small"))
        assert [metric["step"] for metric in metrics] == list(range(1, last + 1))
        assert all(metric["loss"] is not None for metric in metrics)
        pids = [worker["pid"] for generation in after for worker in generation["workers"]]
        wait_until(lambda: not any(map(runs, pids)), "the workers' end")


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_training_goes_on_while_the_manager_is_dead_and_is_adopted_by_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "managers"
    folder.mkdir()
    with DemoProcesses(tmp_path) as processes:
        manager = RestartableManager(processes, folder, "--vms", "2")
        training = Training([manager], folder / "vms", tmp_path / "work")
        manager.start()
        training.begin()
        manager.kill()
        meanwhile = training.go_on()
        manager.start()
        training.reach(meanwhile)
        asyncio.run(look_at_its_pipeline(manager.url))
        training.end()


async def look_at_its_pipeline(url: str) -> None:
    """The dashboard draws what the workers traced: each stage does every micro-batch, forward and then backward."""
    async with launched() as browser, clean_page(browser, f"{url}/#/jobs") as page:
        await page.get_by_role("link", name="small").click()
        pipeline = page.get_by_role("region", name="Pipeline", exact=True)
        await expect(pipeline.locator(".chart.plotted")).to_be_visible()
        await expect(pipeline.locator("header")).to_contain_text("of generation 2, 2×1, replica 0")
        drawn = await pipeline.locator(".chart").evaluate(
            "chart => Object.fromEntries(chart.data.map(ops => [ops.name, ops.y.map((stage, i) =>"
            " [stage, ops.text[i], ops.base[i], ops.base[i] + ops.x[i]])]))"
        )
        forward = {(stage, int(op[1:])): end for stage, op, _, end in drawn["forward"]}
        backward = {(stage, int(op[1:])): begin for stage, op, begin, _ in drawn["backward"]}
        assert set(forward) == {(f"stage {s}", batch) for s in range(2) for batch in range(4)} == set(backward)
        assert all(end <= backward[which] for which, end in forward.items())
        await pipeline.locator("summary").click()
        rows = pipeline.get_by_role("table").locator("tbody tr")
        await expect(rows).to_have_count(2)
        await expect(rows.first).to_contain_text("local-")
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        await page.screenshot(path=SCREENSHOTS / "job-real-workers.png", full_page=True)


@contextmanager
def two_managers(tmp_path: Path, database_url: str) -> Iterator[list[RestartableManager]]:
    """On one machine and one PostgreSQL. Whichever leads starts the VMs, whose agents know both."""
    ports = free_ports(2)
    shared = [
        *("--database-url", database_url, "--local-dir", str(tmp_path / "managers")),
        *("--managers", ",".join(f"127.0.0.1:{port}" for port in ports)),
        *("--default-checkpoint-url", str(tmp_path / "checkpoints"), "--leader-lease-s", str(LEASE_S)),
    ]
    with DemoProcesses(tmp_path) as processes:
        managers = []
        for name, port in zip(("first", "second"), ports, strict=True):
            folder = tmp_path / name
            folder.mkdir()
            managers.append(RestartableManager(processes, folder, *shared, "--vms", "2", "--grpc-port", str(port)))
        yield managers


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def test_another_manager_leads_when_the_leader_dies_or_stands_still_and_training_goes_on(
    tmp_path: Path, postgres_url: str
) -> None:
    with two_managers(tmp_path, postgres_url) as managers:
        training = Training(managers, tmp_path / "managers" / "vms", tmp_path / "work")
        managers[0].start()
        managers[1].start(leads=False)
        training.begin()

        leader, other = in_their_roles(managers)
        leader.kill()
        wait_until(other.leads, "the other to lead")
        meanwhile = training.go_on()
        leader.start(leads=False)
        training.reach(meanwhile)

        leader, other = in_their_roles(managers)
        leader.stand_still()
        wait_until(other.leads, "the other to lead again")
        with ask_while_it_stands_still(leader) as answer:
            leader.go_on()
            assert answer().startswith(b"HTTP/1.1 503"), "its lease is over"
        in_their_roles(managers)
        training.reach(training.go_on())
        assert training.ask(lambda client: client.fleet())["target"] == 2
        training.end()


def in_their_roles(managers: Sequence[RestartableManager]) -> tuple[RestartableManager, RestartableManager]:
    """(the leader, the other), once the other reads from the store and refuses a change with the leader's address."""
    first, second = managers

    def found() -> tuple[RestartableManager, RestartableManager] | None:
        for leader, other in ((first, second), (second, first)):
            with suppress(httpx.TransportError):
                change = httpx.put(f"{other.url}/api/v1/fleet", json={"target": 2}, trust_env=False, timeout=20)
                read = httpx.get(f"{other.url}/api/v1/jobs", trust_env=False, timeout=20)
                if change.status_code == 503 and change.json().get("leader") == leader.url and leader.leads():
                    assert change.headers["Retry-After"]
                    assert [job["name"] for job in read.json()] == ["small"]
                    return leader, other
        return None

    return wait_until(found, "one to lead and one to stand by")


@contextmanager
def ask_while_it_stands_still(manager: RestartableManager) -> Iterator[Callable[[], bytes]]:
    """Change something by a manager that does not run now: the first thing that it finds when it goes on."""
    url = httpx.URL(manager.url)
    with socket.create_connection((url.host, url.port), timeout=60) as connection:
        body = '{"target": 7}'
        head = f"PUT /api/v1/fleet HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        yield lambda: connection.recv(4096)
