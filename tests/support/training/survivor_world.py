"""A generation whose ranks have an agent each, and the generations in place that follow it."""

from __future__ import annotations

import json
import secrets
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from agent_end import AgentEnd
from small_gpt import Task
from training_world import Ranks, Zygote


class SurvivorWorld:
    """A generation whose ranks have an agent each, and the generations in place that follow it."""

    def __init__(
        self, stack: ExitStack, zygote: Zygote, folder: Path, task: Task, p: int, d: int, **more: object
    ) -> None:
        self.ends = {rank: stack.enter_context(AgentEnd(keeps_survivor=True)) for rank in range(p * d)}
        """By the rank of the first generation."""
        self.world = stack.enter_context(
            Ranks(zygote, folder, task, p, d, agent_socket=lambda rank: self.ends[rank].path, **more)  # type: ignore[arg-type]
        )
        self._generation = 1
        self.ranks = list(range(p * d))
        """By rank in the present generation: the rank in the first one."""

    def go_on(self, lost: set[int], *, absent: frozenset[int] | set[int] = frozenset()) -> list[int]:
        """Waits until all but `lost` have left, and starts the next generation in place.

        `lost`, `absent`: by their ranks in the first generation; `absent` have a rank in the next one, but do not come.
        Returns the step that each of its ranks holds.
        """
        p = self.world.p
        survivors = [rank for rank in self.ranks if rank not in lost]
        left = {
            rank: self.ends[rank].wait_for_number("generation_left", self._generation).generation_left
            for rank in survivors
        }
        self.ranks = self._make_replicas(lost)
        d = len(self.ranks) // p
        self._generation += 1
        plan = replace(self.world.environment(0).plan, d=d)
        secret = secrets.token_hex()  # tests that run at the same time must not meet
        for rank, first in enumerate(self.ranks):
            environment = replace(
                self.world.environment(first),
                generation=self._generation,
                rank=rank,
                world_size=p * d,
                plan=plan,
                secret=secret,
            )
            if first in absent:
                continue
            self.ends[first].assign(environment, self.world.out / f"generation{self._generation}.rank{rank}.log")
        for rank in set(survivors) - set(self.ranks):
            self.ends[rank].hang_up()
        return [left[rank].step for rank in self.ranks]

    def _make_replicas(self, lost: set[int]) -> list[int]:
        """The survivors by their next rank, as the manager places them: complete replicas stay together."""
        p = self.world.p
        replicas = [self.ranks[at : at + p] for at in range(0, len(self.ranks), p)]
        left = sorted(([None if rank in lost else rank for rank in ranks] for ranks in replicas), key=_count_lost)
        d = min(sum(ranks[stage] is not None for ranks in left) for stage in range(p))
        spare = [[ranks[stage] for ranks in left[d:] if ranks[stage] is not None] for stage in range(p)]
        return [spare[stage].pop() if rank is None else rank for ranks in left[:d] for stage, rank in enumerate(ranks)]

    def finish(self) -> tuple[list[float], dict[str, torch.Tensor]]:
        """Waits for the end of all processes. Returns the losses by step and the parameters, equal on all ranks."""
        self.world.exit_codes()
        out, p = self.world.out, self.world.p
        texts = "\n".join(path.read_text() for path in sorted(out.glob("*.log")))
        assert all((out / f"rank{first}.json").exists() for first in self.ranks), texts
        results = [json.loads((out / f"rank{first}.json").read_text()) for first in self.ranks]
        losses = [[step["loss"] for step in result["steps"]] for result in results]
        assert all(one == losses[0] for one in losses)
        merged: dict[str, torch.Tensor] = {}
        for first in self.ranks:
            for name, tensor in torch.load(out / f"rank{first}.pt").items():
                assert torch.equal(merged.setdefault(name, tensor), tensor), f"ranks differ in {name}"
        assert len({first % p for first in self.ranks}) == p
        return losses[0], merged


def _count_lost(ranks: list[int | None]) -> int:
    return ranks.count(None)
