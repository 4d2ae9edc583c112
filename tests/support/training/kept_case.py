"""What `kept_script` trains, and how a loss in one of its steps is compared with an undisturbed training."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import kept_script
from small_gpt import Task
from survivor_world import SurvivorWorld
from training_world import Outcome, Ranks, Zygote, assert_exact
from varuna_planner.schedule.batching import count_micro_batches, micro_batches

SCRIPT = Path(kept_script.__file__)
STEP, STEPS, M = 3, 5, 2
"""The step in which ranks are lost; all steps; examples in a micro-batch, if the case says nothing else."""
TASK = {"steps": STEPS, "global_batch": 23, "optimizer": "momentum", "clip": 0.5, "tied": True}
OP_S = 0.02


class Case:
    """What is trained, in what shape, and what the ranks are asked to do."""

    def __init__(
        self,
        p: int,
        d: int,
        *,
        task: dict[str, Any] | None = None,
        shares: tuple[int, ...] = (),
        micro_batch: int = M,
        **wanted: Any,
    ) -> None:
        self.shares, self.micro_batch = shares, micro_batch
        self.p, self.d, self.task = p, d, Task(**{**TASK, **(task or {})})
        self.wanted = {"op_s": OP_S, "p": p, **wanted}
        self.recompute = (True,) * (p - 1) + (False,)

    @property
    def count(self) -> int:
        return count_micro_batches(self.task.global_batch, self.micro_batch)

    def share(self, replica: int) -> set[int]:
        return set(micro_batches(self.task.global_batch, self.micro_batch, self.d, self.shares)[replica])


def start(stack: ExitStack, zygote: Zygote, folder: Path, case: Case, **named: Any) -> SurvivorWorld:
    more = {"script": SCRIPT, "recompute": case.recompute, "run_ahead": 1, "shares": case.shares, **named}
    more = {"micro_batch": case.micro_batch, **more}
    return SurvivorWorld(stack, zygote, folder, case.task, case.p, case.d, wanted=case.wanted, **more)


_undisturbed: dict[str, Outcome] = {}


def train_undisturbed(zygote: Zygote, folder: Path, case: Case) -> Outcome:
    """The same training without a loss, with shares as equal as can be."""
    wanted = {key: case.wanted[key] for key in ("variant",) if key in case.wanted}
    key = repr((case.p, case.d, case.task, wanted))
    if key not in _undisturbed:
        more: dict[str, Any] = {"script": SCRIPT, "recompute": case.recompute, "run_ahead": 1, "wanted": wanted}
        with Ranks(zygote, folder / "undisturbed", case.task, case.p, case.d, **more) as world:
            _undisturbed[key] = world.finish()
    return _undisturbed[key]


def assert_as_if_undisturbed(zygote: Zygote, folder: Path, world: SurvivorWorld, case: Case) -> None:
    assert_exact(world.finish(), train_undisturbed(zygote, folder, case), case.task)


def read_forwards(world: SurvivorWorld | Ranks, generation: int, step: int = STEP) -> dict[int, list[int]]:
    """By rank of the first generation: the micro-batches whose forward it ran in a step, in order."""
    forwards = {}
    for rank, lines in _read_traces(world).items():
        forwards[rank] = [number for at, of, number, _ in lines if (at, of) == (generation, step)]
        for _, _, number, (place, _) in lines:
            assert place == M * number
    return forwards


def read_examples(world: SurvivorWorld, generation: int, micro_batch: int, step: int = STEP) -> dict[int, list[int]]:
    """By rank of the first generation: the examples whose forward it ran in a step, in order, in micro-batches of this
    size, but for the last one of the global batch."""
    global_batch = world.world.task.global_batch
    examples = {}
    for rank, lines in _read_traces(world).items():
        ran = [(number, places) for at, of, number, places in lines if (at, of) == (generation, step)]
        for number, (first, end) in ran:
            assert (first, end) == (micro_batch * number, min(micro_batch * (number + 1), global_batch))
        examples[rank] = [example for _, places in ran for example in range(*places)]
    return examples


def _read_traces(world: SurvivorWorld | Ranks) -> dict[int, list[Any]]:
    """By rank of the first generation."""
    first = world.world if isinstance(world, SurvivorWorld) else world
    paths = {rank: first.out / f"trace.rank{rank}.jsonl" for rank in range(first.p * first.d)}
    return {
        rank: [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        for rank, path in paths.items()
    }


def op_kill(rank: int, op: str, micro_batch: int) -> dict[str, Any]:
    return {"rank": rank, "at": "op", "op": op, "micro_batch": micro_batch, "step": STEP}


VARIANTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"dropout": 0.3}, {}),
    ({"padded": True}, {}),
    ({"optimizer": "adamw", "clip": None, "tied": False, "tied_blocks": (0, 3)}, {}),
    ({"dropout": 0.3, "tied": False}, {"variant": "checkpointed"}),
    ({"tied": False}, {"variant": "frozen"}),
    ({"offload": True}, {}),
    ({"padded": True}, {"data_workers": 2}),
]


CHANGES: list[tuple[tuple[int, int], tuple[int, int], dict[str, Any], dict[str, Any]]] = [
    ((2, 3), (1, 4), {}, {}),
    ((1, 3), (2, 1), {"optimizer": "adamw", "dropout": 0.3, "tied": False}, {}),
    ((2, 3), (4, 1), {"padded": True}, {}),
    ((2, 3), (2, 2), {"optimizer": "lamb", "offload": True}, {"stage_starts": (0, 1)}),
    ((3, 2), (2, 2), {"tied": False}, {"variant": "frozen"}),
]
"""Shapes before and after a loss, and what is trained."""


LEDGER = {"optimizer": "momentum", "global_batch": 15, "clip": None, "tied": False}


def assert_counted_once(outcome: Outcome, case: Case) -> None:
    """That each step's loss and the gradient of each block have every example once."""
    count, base = case.task.global_batch, kept_script.LEDGER_BASE
    once = sum(base**example for example in range(count))
    for step in outcome.ranks[0]["steps"]:
        assert_loss_counts_once(step["loss"], case)
    assert outcome.norms == pytest.approx([once / count * case.task.blocks**0.5] * len(outcome.norms), rel=1e-12)


def assert_loss_counts_once(loss: float, case: Case) -> None:
    """That a step's loss has every example once."""
    count, base = case.task.global_batch, kept_script.LEDGER_BASE
    once = sum(base**example for example in range(count))
    total = round(loss * count)
    counted = [total // base**example % base for example in range(count)]
    assert (counted, total) == ([1] * count, once)
