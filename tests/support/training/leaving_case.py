"""A `Case` whose ranks are asked to leave in the middle of a step, and what both generations have run of it."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from kept_case import STEP, Case
from survivor_world import SurvivorWorld
from waiting import wait_until

GENERATION_ENDED = 75


def leaving(op: str = "F", generations: int = 1) -> dict[str, Any]:
    """Passes that wait until their ranks are asked to leave, before the second forward or the first backward."""
    return {"leaves_at": {"step": STEP, "op": op, "generations": generations}}


def read_passes(world: SurvivorWorld, generation: int, step: int = STEP) -> dict[Path, list[int]]:
    """By the trace of a rank: the micro-batches whose forward it ran in a step."""
    passes = {}
    for path in sorted(world.world.folder.rglob("trace.rank*.jsonl")):
        if "undisturbed" not in path.parts:
            lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
            passes[path] = [number for at, of, number, _ in lines if (at, of) == (generation, step)]
    return passes


def leave_within_step(world: SurvivorWorld, *, begun: int = 1, spare: Collection[int] = ()) -> None:
    """Asks all ranks to leave when the first stage of each replica has begun so many micro-batches of the step, and all
    have what was late of a move.

    `spare`: those that do not go on.
    """
    p = world.plan.p

    def have_begun() -> bool:
        passes = read_passes(world, world.generation)
        firsts = [numbers for path, numbers in passes.items() if _rank_of(path) % p == 0]
        return len(firsts) == world.plan.d and all(len(numbers) >= begun for numbers in firsts)

    wait_until(have_begun, "the passes of the step")
    late = f"late.generation{world.generation}.process*"
    wait_until(lambda: not list(world.world.folder.glob(late)), "what is late")
    world.leave_within_step(spare)


def _rank_of(path: Path) -> int:
    return int(path.stem.removeprefix("trace.rank"))


def assert_rest_is_run(world: SurvivorWorld, case: Case) -> None:
    """That both generations have run each micro-batch of the step once at each stage, and each has run some."""
    stages = case.p
    first, second = read_passes(world, 1), read_passes(world, 2)
    for stage in range(stages):
        before = [n for path, numbers in first.items() if _rank_of(path) % stages == stage for n in numbers]
        assert 0 < len(before) < case.count
        assert len(before) == len(set(before))
    rest = set(range(case.count)) - set(before)
    assert {n for numbers in second.values() for n in numbers} == rest
    ready = [message.ready for end in world.ends.values() for message in end.list_messages("ready")]
    assert [one.micro_batches_redone for one in ready] == [0] * len(ready)
