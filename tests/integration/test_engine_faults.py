"""Whichever rank dies, at whichever op: every survivor leaves at once and nothing hangs."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from small_gpt import Task
from training_world import World, Zygote
from varuna_proto.environment import EXIT_PEER_LOST

SCRIPT = Path(__file__).with_name("engine_failing_script.py")

LONGEST_LEAVE_S = 5.0
"""A second is the aim, and what is measured on a quiet machine; the rest is for one that runs other tests too."""


def fault(rank: int, op: str, micro_batch: int, after: bool = False) -> dict[str, Any]:
    return {"rank": rank, "step": 2, "op": op, "micro_batch": micro_batch, "after": after}


def name(fail_at: dict[str, Any]) -> str:
    return f"rank{fail_at['rank']}-{fail_at['op']}{fail_at['micro_batch']}" + ("-after" if fail_at["after"] else "")


def assert_survivors_leave(zygote: Zygote, folder: Path, p: int, d: int, fail_at: dict[str, Any]) -> None:
    wanted = {"fail_at": fail_at, "forever": True}
    recompute = tuple(stage < p - 1 for stage in range(p))
    task = Task(global_batch=8 * d)
    with World(zygote, folder, task, p, d, recompute=recompute, script=SCRIPT, wanted=wanted, run_ahead=1) as world:
        ends = world.ends()

    died = ends.pop(fail_at["rank"])
    assert died["code"] == -signal.SIGKILL, world.logs()
    assert [end["code"] for end in ends.values()] == [EXIT_PEER_LOST] * (p * d - 1), world.logs()
    after_s = [round(end["at"] - died["at"], 3) for end in ends.values()]
    print("survivors left after", after_s, "s")
    assert max(after_s) < LONGEST_LEAVE_S


@pytest.mark.parametrize(
    "fail_at",
    [
        fault(0, "F", 0),
        fault(0, "R", 1, after=True),
        fault(0, "B", 3, after=True),
        fault(1, "F", 3, after=True),
        fault(1, "R", 0),
        fault(1, "B", 0, after=True),
        fault(2, "F", 2),
        fault(2, "B", 3),
    ],
    ids=name,
)
def test_survivors_of_a_pipeline_leave(zygote: Zygote, tmp_path: Path, fail_at: dict[str, Any]) -> None:
    assert_survivors_leave(zygote, tmp_path, 3, 1, fail_at)


@pytest.mark.parametrize("fail_at", [fault(0, "F", 1), fault(3, "B", 3), fault(2, "B", 3, after=True)], ids=name)
def test_survivors_of_several_replicas_leave(zygote: Zygote, tmp_path: Path, fail_at: dict[str, Any]) -> None:
    # At the last backward the all-reduce has begun.
    assert_survivors_leave(zygote, tmp_path, 2, 2, fail_at)
