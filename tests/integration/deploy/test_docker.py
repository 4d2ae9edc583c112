"""The containers' commands, as the Dockerfiles and the compose file have them, run outside of Docker.

Folders, addresses and the store are the test's; the arguments are those of the files.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from repository import ROOT
from waiting import DEADLINE_S, wait_until

DOCKER = ROOT / "docker"
PROGRAMS = Path(sys.executable).parent
SERVICES: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]


def instruction(dockerfile: str, name: str) -> list[str]:
    """The last instruction of this name, in its JSON form."""
    text = (DOCKER / dockerfile).read_text()
    found: list[str] = json.loads(re.findall(rf"^(?:\s+)?{name} (\[.*\])$", text, re.MULTILINE)[-1])
    return found


class ContainerHost:
    """Stands for the containers, with a folder for each of their volumes."""

    def __init__(self, folder: Path, store_url: str, ends: ExitStack) -> None:
        self._folder = folder
        self._ends = ends
        self._processes: dict[Path, subprocess.Popen[bytes]] = {}
        self._environment = {
            "PATH": f"{PROGRAMS}:{os.environ['PATH']}",
            "HOME": str(folder),
            "VARUNA_MANAGER_DATABASE_URL": store_url,
            "VARUNA_MANAGER_HTTP_PORT": "0",
            "VARUNA_MANAGER_GRPC_PORT": "0",
            # However long this machine stands still, no VM falls silent, and the manager goes on to lead.
            "VARUNA_MANAGER_SUSPECT_AFTER_S": "3600",
            "VARUNA_MANAGER_LOST_AFTER_S": "3600",
            "VARUNA_MANAGER_LEADER_LEASE_S": "600",
        }
        self.data = self.volume("manager")
        hosts = yaml.safe_load((DOCKER / "compose.yaml").read_text())["configs"]["hosts"]["content"]
        (folder / "hosts.yaml").write_text(hosts)

    def volume(self, name: str) -> Path:
        path = self._folder / name
        path.mkdir(exist_ok=True)
        return path

    def here(self, text: str, data: Path) -> str:
        """An argument, with the places of the container that it names."""
        places = {"/data": data, "/run/varuna": self.volume("tokens"), "/checkpoints": self.volume("checkpoints")}
        places["/etc/varuna/hosts.yaml"] = self._folder / "hosts.yaml"
        for place, path in places.items():
            text = text.replace(place, str(path))
        return (
            text.replace("manager:8751", self.address("grpc"))
            .replace("https://127.0.0.1:8750", self.address("url"))
            .replace("https://localhost:8750", self.address("url"))
        )

    def address(self, name: str) -> str:
        """Of the manager: `url` or `grpc`; empty until it has one."""
        file = self.data / "manager.json"
        return str(json.loads(file.read_text())[name]).replace("0.0.0.0", "localhost") if file.exists() else ""

    def environment_of(self, service: str) -> dict[str, str]:
        """The service's own, without the store's address, which is the test's."""
        found: dict[str, str] = SERVICES[service].get("environment", {})
        return {
            name: self.here(text, self.data) for name, text in found.items() if name != "VARUNA_MANAGER_DATABASE_URL"
        }

    def start(self, service: str, entrypoint: list[str], *more: str, data: Path) -> Path:
        """Its log."""
        command = [self.here(part, data) for part in [*entrypoint, *SERVICES[service]["command"], *more]]
        log = self._folder / f"{service}.log"
        environment = self._environment | self.environment_of(service)
        with log.open("w") as file:
            process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=file, cwd=data, start_new_session=True
            )
        self._ends.callback(_end, process)
        self._processes[log] = process
        return log

    def wait_for_line(self, log: Path, text: str, times: int = 1) -> None:
        """Wait until the log of a process that `start` started has `text` so many times."""

        def is_logged() -> bool:
            output = log.read_text()
            assert self._processes[log].poll() is None, output
            return output.count(text) >= times

        wait_until(is_logged, f"{text!r} in {log}")

    def check(self, dockerfile: str, data: Path) -> bool:
        """Whether the image's health check finds the container well."""
        program, *arguments = instruction(dockerfile, "CMD") if dockerfile.startswith("agent") else _manager_check()
        command = [str(PROGRAMS / program), *(self.here(part, data) for part in arguments)]
        return subprocess.run(command, env=self._environment, capture_output=True, timeout=DEADLINE_S).returncode == 0

    def run(self, command: list[str], **environment: str) -> str:
        done = subprocess.run(
            [self.here(part, self.data) for part in command],
            env=self._environment | {name: self.here(text, self.data) for name, text in environment.items()},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def _manager_check() -> list[str]:
    text = (DOCKER / "manager.Dockerfile").read_text()
    found: list[str] = json.loads(re.findall(r"^ +CMD (\[.*\])$", text, re.MULTILINE)[-1])
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def world(tmp_path: Path, postgres_url: str) -> Iterator[ContainerHost]:
    with ExitStack() as ends:
        yield ContainerHost(tmp_path, postgres_url, ends)


@pytest.mark.slow
def test_the_composed_containers_find_each_other(world: ContainerHost) -> None:
    assert not world.check("manager.Dockerfile", world.data)
    log = world.start("manager", instruction("manager.Dockerfile", "ENTRYPOINT"), data=world.data)

    # The check is a process: not to be started over and over beside a manager that starts.
    world.wait_for_line(log, "the manager serves")
    wait_until(lambda: world.check("manager.Dockerfile", world.data), "a healthy manager")
    token = SERVICES["token"]
    as_admin = {
        name: text.replace("https://manager:8750", world.address("url")) for name, text in token["environment"].items()
    }
    world.run(token["entrypoint"], **as_admin)
    agents = ("agent-1", "agent-2")
    for name in agents:
        data = world.volume(name)
        assert not world.check("agent.Dockerfile", data)
        # The one thing that differs: containers have the port 8750 to themselves, and names of their own.
        entrypoint = instruction("agent.Dockerfile", "ENTRYPOINT")
        world.start(name, entrypoint, "--join-url", world.address("url"), "--host", "127.0.0.1", data=data)

    world.wait_for_line(log, '"kind": "vm_ready"', times=2)
    # As with `docker compose exec manager`.
    vms = json.loads(world.run(["varuna", "vms", "--json"], **world.environment_of("manager")))
    assert {vm["id"]: vm["state"] for vm in vms} == dict.fromkeys(agents, "ready")
    for name in agents:
        assert world.check("agent.Dockerfile", world.volume(name)), "its health check says no"
    assert "does not follow the protocol" not in (world.volume("agent-1").parent / "agent-1.log").read_text()


def test_each_command_of_the_compose_files_first_lines_names_the_file() -> None:
    head = (DOCKER / "compose.yaml").read_text().partition("\nname:")[0]
    commands = re.findall(r"docker compose [^\n)]*", head)
    assert len(commands) >= 4
    assert all(command.startswith("docker compose -f docker/compose.yaml ") for command in commands)
    assert "POSTGRES_PASSWORD=$(openssl" in head
    for ignoring in (".gitignore", ".dockerignore"):
        assert "docker/.env" in (ROOT / ignoring).read_text().splitlines()


def test_the_images_command_is_one_of_the_manager() -> None:
    command = instruction("manager.Dockerfile", "CMD")
    assert command[0] == "manager"
    usage = subprocess.run(
        [str(PROGRAMS / "varuna"), "manager", "--help"], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert all(flag in usage.stdout for flag in command if flag.startswith("--"))


@pytest.mark.parametrize("name", ["manager", "agent"])
def test_the_images_run_as_nobody_special(name: str) -> None:
    text = (DOCKER / f"{name}.Dockerfile").read_text()
    last = text.rpartition("\nFROM ")[2]
    assert re.search(r"^USER 10001$", last, re.MULTILINE)
    assert "pip install" not in last, "compilers and caches stay in the first stage"
    assert "HEALTHCHECK" in last
