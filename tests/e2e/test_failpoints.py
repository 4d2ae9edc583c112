"""SIGKILL at every step of a morph, of the manager, of agents and of workers: the job's record is as if nothing was."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from failpoint_world import WORKER, failpoint_world
from scripted_manager import profile_json

pytestmark = [pytest.mark.timeout(400)]


MANAGER = [
    "manager.StopGeneration.committed",
    "manager.EndGeneration.decided",
    "manager.StartGeneration.committed",
    "manager.LaunchKey.told",
]
AGENT = [
    "agent.stop.received",
    "agent.worker_exited.sent",
    "agent.StartWorker.before",
    "agent.worker_started.sent",
]


def counting(folder: Path) -> str:
    """For the shell, so that no process is warmed for it: that would take longer than the worker itself."""
    return f"true && exec {sys.executable} {WORKER} {folder / 'profile.json'}"


@pytest.mark.xdist_group("failpoints-manager")
def test_the_manager_is_killed_at_every_step_of_a_morph(tmp_path: Path) -> None:
    with failpoint_world(tmp_path, profile_json()) as world:
        world.submit(counting(tmp_path))
        for name in MANAGER:
            world.provoke_morph(name)
        world.finish()


@pytest.mark.xdist_group("failpoints-agent")
def test_an_agent_is_killed_at_every_step_of_a_morph(tmp_path: Path) -> None:
    with failpoint_world(tmp_path, profile_json()) as world:
        world.submit(counting(tmp_path))
        for name in AGENT:
            world.provoke_morph(name)
        world.finish()
