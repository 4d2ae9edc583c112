"""A generation whose ranks have an agent each, and leave it with their state for new processes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent_end import AgentEnd
from small_gpt import Task, train_plainly
from survivor_world import SurvivorWorld
from training_world import Outcome, Ranks, Zygote, assert_exact
from varuna_proto.environment import EXIT_GENERATION_ENDED
from varuna_proto.v1 import agent_pb2, worker_pb2


class LeavingGeneration:
    """A generation whose ranks have an agent each."""

    def __init__(
        self, stack: ExitStack, zygote: Zygote, folder: Path, task: Task, p: int, d: int, **more: object
    ) -> None:
        self.ends = [stack.enter_context(AgentEnd(keeps_survivor=True)) for _ in range(p * d)]
        self.world = stack.enter_context(
            Ranks(zygote, folder, task, p, d, agent_socket=lambda rank: self.ends[rank].path, **more)  # type: ignore[arg-type]
        )

    def hold_first(self) -> int:
        """Makes the ranks leave with their state when three steps are done. Returns the step that they hold."""
        self.ends[0].wait_for(lambda message: message.step_done.step >= 3)
        for end in self.ends:
            end.send_leave(agent_pb2.STOP_MODE_HOLD_FIRST, keep_state=True)
        return self.wait_until_left(set(range(len(self.ends))), EXIT_GENERATION_ENDED)

    def wait_until_left(self, ranks: set[int], exit_code: int) -> int:
        left = [self.ends[rank].wait_for_number("generation_left", 1).generation_left for rank in sorted(ranks)]
        assert {one.exit_code for one in left} == {exit_code}
        assert len({one.step for one in left}) == 1
        return left[0].step

    def give_to(self, other: LeavingGeneration, ranks: set[int]) -> None:
        for rank in sorted(ranks):
            self.ends[rank].give_state(other.world.holder_environment())

    def finish(self) -> Outcome:
        """Waits for all ranks, which must end well, and for the last report of the first one."""
        outcome = self.world.finish()
        self.ends[0].wait_for(lambda message: message.step_done.step == self.world.task.steps)
        return outcome

    def losses(self) -> dict[int, float]:
        return {done.step: done.loss for done in self.ends[0].steps()}


def assert_as_if_undisturbed(task: Task, generations: list[LeavingGeneration], outcome: Outcome) -> None:
    """`outcome`: of the last of the generations."""
    expected = train_plainly(task)
    losses = {step: loss for generation in generations for step, loss in generation.losses().items()}
    within = 1e-12 if task.doubled else 1e-6
    assert [losses[step] for step in sorted(losses)] == pytest.approx(expected.losses, rel=within, abs=0.0)
    assert_exact(outcome, expected, task, after=task.steps - len(outcome.losses))


def assert_taken_from_memory(generation: LeavingGeneration, step: int) -> None:
    ready = [end.wait_for_number("ready", 1).ready for end in generation.ends]
    assert [one.resumed_step for one in ready] == [step] * len(ready)
    assert all(one.peer_bytes > 0 for one in ready)
    assert all(one.store_bytes == one.kept_bytes == 0 for one in ready)


def replace_steps(generation: LeavingGeneration, through: int) -> LeavingGeneration:
    """The generation without the steps that were run again."""
    kept = {step: loss for step, loss in generation.losses().items() if step <= through}
    generation.losses = lambda: kept  # type: ignore[method-assign]
    return generation


def finish_in_new_processes(
    stack: ExitStack, zygote: Zygote, folder: Path, world: SurvivorWorld, holders: Mapping[int, int]
) -> list[worker_pb2.GenerationLeft]:
    """New processes of 2×1 train on after the second generation of `world`, with what `holders` have, which is
    everything. Returns what these said when they left it.

    `holders`: by their ranks in it, their ranks in the first generation.
    """
    task = world.world.task
    left = [world.ends[first].wait_for_number("generation_left", 2).generation_left for first in holders.values()]
    (step,) = {one.step for one in left}
    after = LeavingGeneration(stack, zygote, folder, task, 2, 1, generation=3, holders=tuple(holders))
    for first in holders.values():
        world.ends[first].give_state(after.world.holder_environment())
    outcome = after.finish()
    assert_taken_from_memory(after, step)
    assert_exact(outcome, train_plainly(task), task, after=step)
    return left
