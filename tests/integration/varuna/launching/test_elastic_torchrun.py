"""An elastic torchrun: machines go and come, and the training goes on in the shape for those that are there.

Each machine is a launcher process on this one, with one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from launched_machines import FOREVER, Machines, assert_losses, find_free_port, list_losses, list_plans
from repository import ROOT
from waiting import DEADLINE_S, wait_until

NODE = ROOT / "examples" / "launchers" / "torchrun" / "node.sh"


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    started = Machines(tmp_path)
    yield started
    started.end()


@pytest.mark.slow
def test_machines_go_and_come_and_the_losses_stay_the_same(machines: Machines, tmp_path: Path) -> None:
    port = find_free_port()
    node = ["bash", str(NODE), f"127.0.0.1:{port}"]
    first = machines.start([*node, *FOREVER])
    wait_until(lambda: any(c.laddr.port == port for c in first.net_connections()), "torchrun's rendezvous")
    others = [machines.start([*node, *FOREVER]) for _ in range(3)]
    plans = machines.wait_for_steps(4, after=0)
    machines.kill(others.pop())
    plans = machines.wait_for_steps(3, after=plans)
    others.append(machines.start([*node, *FOREVER]))
    machines.wait_for_steps(4, after=plans)
    for machine in (*others, first):
        machines.kill(machine)

    newest = max(step for step, _ in list_losses(machines.read_logs()))
    last = machines.start([*node, "--steps", str(newest + 2)])
    assert last.wait(DEADLINE_S) == 0, machines.read_logs()[-1]
    logs = machines.read_logs()
    assert list_plans(logs[-1:])[-1][1] == 1
    assert_losses(list_losses(logs), tmp_path)
