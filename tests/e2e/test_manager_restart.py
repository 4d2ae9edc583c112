"""Managers are killed, and stand still, while a real job trains under real agents: training goes on, and is adopted."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from own_ports import own_ports
from restartable_manager import RestartableManager
from small_training import SmallTraining
from varuna_client.demo.processes import DemoProcesses
from waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.xdist_group("e2e")

LEASE_S = 8.0

T = TypeVar("T")


@pytest.mark.slow
def test_training_goes_on_while_the_manager_is_dead_and_is_adopted_by_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "managers"
    folder.mkdir()
    with DemoProcesses(tmp_path) as processes:
        manager = RestartableManager(processes, folder, "--vms", "2")
        training = SmallTraining([manager], folder / "vms", tmp_path / "work")
        manager.start()
        training.begin()
        manager.kill()
        meanwhile = training.go_on()
        manager.start()
        training.reach(meanwhile)
        training.end()


@contextmanager
def two_managers(tmp_path: Path, database_url: str) -> Iterator[list[RestartableManager]]:
    """On one machine and one PostgreSQL. Whichever leads starts the VMs, whose agents know both."""
    ports = own_ports(2)
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


@pytest.mark.slow
def test_another_manager_leads_when_the_leader_dies_or_stands_still_and_training_goes_on(
    tmp_path: Path, postgres_url: str
) -> None:
    with two_managers(tmp_path, postgres_url) as managers:
        training = SmallTraining(managers, tmp_path / "managers" / "vms", tmp_path / "work")
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
                change = httpx.put(f"{other.url}/api/v1/fleet", json={"target": 2}, trust_env=False, timeout=DEADLINE_S)
                read = httpx.get(f"{other.url}/api/v1/jobs", trust_env=False, timeout=DEADLINE_S)
                if change.status_code == 503 and change.json().get("leader") == leader.url and leader.leads():
                    assert change.headers["Retry-After"]
                    assert [job["name"] for job in read.json()] == ["small"]
                    return leader, other
        return None

    return wait_until(found, "one to lead and one to stand by")


@contextmanager
def ask_while_it_stands_still(manager: RestartableManager) -> Iterator[Callable[[], bytes]]:
    """Send a change to a stopped manager, which finds it first when it goes on."""
    url = httpx.URL(manager.url)
    with socket.create_connection((url.host, url.port), timeout=DEADLINE_S) as connection:
        body = '{"target": 7}'
        head = f"PUT /api/v1/fleet HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        yield lambda: connection.recv(4096)
