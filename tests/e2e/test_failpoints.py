"""SIGKILL of the manager or an agent in the middle of a morph: the job's record is as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from failpoint_world import failpoint_world
from scripted_manager import profile_json

# `make soak-failpoints` goes through all of them.
pytestmark = pytest.mark.slow


MANAGER = ["manager.StopGeneration.committed", "manager.LaunchKey.sent"]
AGENT = ["agent.stop.received", "agent.StartWorker.before"]


@pytest.mark.xdist_group("failpoints-manager")
def test_the_manager_is_killed_within_a_morph(tmp_path: Path) -> None:
    with failpoint_world(tmp_path, profile_json()) as world:
        world.submit()
        for name in MANAGER:
            world.provoke_morph(name)
        world.finish()


@pytest.mark.xdist_group("failpoints-agent")
def test_an_agent_is_killed_within_a_morph(tmp_path: Path) -> None:
    with failpoint_world(tmp_path, profile_json()) as world:
        world.submit()
        for name in AGENT:
            world.provoke_morph(name)
        world.finish()
