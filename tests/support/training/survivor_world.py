"""A generation whose ranks have an agent each, and the generations in place that follow it."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent_end import AgentEnd
from small_gpt import Task
from training_world import Outcome, Ranks, Zygote
from varuna_proto.environment import WorkerEnvironment
from varuna_proto.plan import Plan
from varuna_proto.plan_message import make_plan_spec
from varuna_proto.v1 import agent_pb2, worker_pb2
from waiting import wait_until

LEAVES_AFTER: dict[str, Any] = {"leaves_after": {"step": 3, "generations": 1}}
"""Of a script: its ranks wait after this step until the test has asked them to leave."""


class SurvivorWorld:
    """A generation whose ranks have an agent each, and the generations in place that follow it."""

    def __init__(
        self, stack: ExitStack, zygote: Zygote, folder: Path, task: Task, p: int, d: int, **more: object
    ) -> None:
        self.ends = {rank: stack.enter_context(AgentEnd(keeps_survivor=True)) for rank in range(p * d)}
        """By the rank of the first generation; new processes of later ones follow in the order of their start."""
        self.world = stack.enter_context(
            Ranks(zygote, folder, task, p, d, agent_socket=lambda rank: self.ends[rank].path, **more)  # type: ignore[arg-type]
        )
        self.generation = 1
        """The present one."""
        self._stack, self._zygote, self._more = stack, zygote, more
        self._results = {rank: self.world.out / f"rank{rank}" for rank in self.ends}
        """Where each process leaves its results, without the suffix."""
        self.others: list[Ranks] = []
        """The new processes of later generations."""
        self.plan = self.world.environment(0).plan
        self._firsts: dict[int, int] = {}
        """By rank in the next generation: the number in `ends` of a new process that was started for it last."""
        self._next: tuple[Plan, list[int | None]] = self.plan, []
        self._without_rank: list[int] = []
        """Processes that the present generation does not take, and that have not been ended."""
        self.ranks = list(range(p * d))
        """By rank in the present generation: the rank in the first one."""

    def go_on(
        self, lost: set[int], *, absent: frozenset[int] | set[int] = frozenset(), keeps_others: bool = False
    ) -> list[int]:
        """Waits until all but `lost` have left, and starts the next generation in place.

        `lost`, `absent`: by their ranks in the first generation; `absent` have a rank in the next one, but do not come.
        `keeps_others`: as for `go_on_as`. Returns the step that each of its ranks holds.
        """
        p = self.plan.p
        self.wait_until_left(lost)
        ranks = self._make_replicas(lost)
        return self.go_on_as(replace(self.plan, d=len(ranks) // p), ranks, absent=absent, keeps_others=keeps_others)

    def leave_at_boundary(self) -> None:
        """Makes all ranks leave with their state when three steps are done."""
        self.ends[0].wait_for(lambda message: message.step_done.step >= 3)
        for rank in self.ranks:
            self.ends[rank].send_leave(agent_pb2.STOP_MODE_HOLD_FIRST, keep_state=True)

    def leave_within_step(self, spare: Collection[int] = ()) -> None:
        """Asks all ranks to leave in the middle of their step, with what they have of it.

        `spare`: those that do not go on, by their ranks in the first generation.
        """
        for rank in self.ranks:
            self.ends[rank].send_leave(
                agent_pb2.STOP_MODE_HOLD_FIRST, keep_state=True, within_step=True, spare=rank in spare
            )

    def wait_until_left(self, lost: set[int]) -> dict[int, worker_pb2.GenerationLeft]:
        """By rank in the first generation."""
        return {
            rank: self.ends[rank].wait_for_number("generation_left", self.generation).generation_left
            for rank in self.ranks
            if rank not in lost
        }

    def wait_for_obstacle(self) -> str:
        """Why the ranks cannot go on, as the first one says that leaves; the others may only see it leave."""

        def find() -> str:
            said = (message for end in self.ends.values() for message in end.list_messages("script_obstacle"))
            return next((message.script_obstacle.reason for message in said), "")

        return str(wait_until(find, "an obstacle"))

    def go_on_as(
        self,
        plan: Plan,
        ranks: list[int],
        *,
        absent: frozenset[int] | set[int] = frozenset(),
        keepers: tuple[int, ...] = (),
        keeps_others: bool = False,
    ) -> list[int]:
        """Starts the next generation in place with this plan, when its ranks have left the one before.

        `ranks`: by their ranks in it, the ranks in the first generation; processes without one are ended, with
        `keeps_others` only by `end_others`. `keepers`: of the next generation.
        """
        p, d = plan.p, plan.d
        left = self.wait_until_left({rank for rank in self.ranks if rank not in ranks})
        others = set(self.ranks) - set(ranks)
        self.plan, self.ranks = plan, ranks
        self.generation += 1
        secret = secrets.token_hex()  # tests that run at the same time must not meet
        for rank, first in enumerate(self.ranks):
            environment = replace(
                self.world.environment(first),
                generation=self.generation,
                rank=rank,
                world_size=p * d,
                plan=plan,
                secret=secret,
                keepers=keepers,
            )
            if first in absent:
                continue
            self.ends[first].assign(environment, self.world.out / f"generation{self.generation}.rank{rank}.log")
        self._without_rank += others
        if not keeps_others:
            self.end_others()
        return [left[rank].step for rank in self.ranks]

    def end_others(self) -> None:
        """Ends the processes that the present generation does not take, as agents do when it has made a step."""
        for first in self._without_rank:
            self.ends[first].hang_up()
        self._without_rank = []

    def grow(self, plan: Plan, ranks: list[int | None], *, wanted: Mapping[str, object] | None = None) -> int:
        """Starts the next generation in place with this plan and with new processes, when the present ranks have left.

        `ranks`: by rank in it, the rank in the first generation; None: a new process, which no rank has that an earlier
        one had. `wanted`: more of it, for the new processes. Returns the step that the others hold.
        """
        left = self.wait_until_left(set())
        secret = secrets.token_hex()
        base = self._make_next(plan, ranks, secret)
        others = self._start_new(plan, ranks, base, wanted or {})
        port = others.holder_environment().rendezvous_port
        self._assign_next(ranks, replace(base, rendezvous_port=port, secret=secret))
        (step,) = {one.step for one in left.values()}
        return step

    def start_ahead(self, plan: Plan, ranks: list[int | None]) -> None:
        """Starts the new processes of the next generation, which `grow_ahead` takes; `ranks`: as for `grow`."""
        base = replace(self._make_next(plan, ranks, secrets.token_hex()), newcomer=1)
        if None in ranks:
            self._start_new(plan, ranks, base, {})
        self._next = plan, [self._firsts.get(rank) if first is None else first for rank, first in enumerate(ranks)]
        for first in self._firsts.values():
            self.ends[first].wait_for(lambda message: message.HasField("at_door"))

    def send_ahead(self, step: int) -> None:
        """Has the present ranks send their state to where the next generation needs it, until all have sent that of
        `step`."""
        self.ask_to_send_ahead()
        for first in self.ranks:
            self.ends[first].wait_for(lambda message: message.sent_ahead.step == step)

    def ask_to_send_ahead(self) -> None:
        plan, ranks = self._next
        present = self.world.holder_environment()
        command = agent_pb2.SendAhead(
            job_id=present.job_id,
            generation=self.generation,
            request="next",
            plan=make_plan_spec(plan),
            ranks_before=[self.ranks.index(first) + 1 if first in self.ranks else 0 for first in ranks],
            world_size=present.world_size,
            rendezvous_host=present.rendezvous_host,
            rendezvous_port=present.rendezvous_port,
            secret=present.secret,
        )
        for first in {*self.ranks, *ranks} - {None}:
            assert first is not None
            self.ends[first].wait_for(lambda message: message.HasField("hello"))
            rank = ranks.index(first) if first in ranks else None
            self.ends[first].send_ahead_part(worker_pb2.AheadPart(command=command, rank=rank, processes=len(self.ends)))

    def grow_ahead(self) -> None:
        """Starts the next generation in place when the present ranks have left, with the processes of `start_ahead`."""
        plan, firsts = self._next
        self.wait_until_left(set())
        ranks = [None if first in self._firsts.values() else first for first in firsts]
        base = self._make_next(plan, ranks, secrets.token_hex())
        self.generation += 1
        self._without_rank += [first for first in self.ranks if first not in firsts]
        self.plan, self.ranks = plan, [first for first in firsts if first is not None]
        for rank, first in enumerate(self.ranks):
            environment = replace(base, rank=rank, agent_socket=self.ends[first].path)
            self.ends[first].assign(environment, self.world.out / f"generation{self.generation}.rank{rank}.log")

    def _make_next(self, plan: Plan, ranks: list[int | None], secret: str) -> WorkerEnvironment:
        """Of the next generation, for any of its ranks."""
        return replace(
            self.world.environment(0),
            generation=self.generation + 1,
            world_size=plan.p * plan.d,
            plan=plan,
            survivors=tuple(rank for rank, first in enumerate(ranks) if first is not None) if None in ranks else (),
            secret=secret,
        )

    def _start_new(
        self, plan: Plan, ranks: list[int | None], base: WorkerEnvironment, wanted: Mapping[str, object]
    ) -> Ranks:
        """Starts the new processes of the next generation."""
        new = [rank for rank, first in enumerate(ranks) if first is None]
        self._firsts = firsts = {rank: len(self.ends) + number for number, rank in enumerate(new)}
        self.ends |= {first: self._stack.enter_context(AgentEnd(keeps_survivor=True)) for first in firsts.values()}

        def launch(number: int) -> dict[str, str]:
            rank = new[number]
            return replace(base, rank=rank, agent_socket=self.ends[firsts[rank]].path).to_environ()

        more = {**self._more, "wanted": {**self._more.get("wanted", {}), **wanted}}  # type: ignore[dict-item]
        others = Ranks(
            self._zygote,
            self.world.folder,
            self.world.task,
            1,
            len(new),
            generation=self.generation + 1,
            launched=launch,
            **more,  # type: ignore[arg-type]
        )
        self.others.append(self._stack.enter_context(others))
        self._results |= {first: others.out / f"rank{rank}" for rank, first in firsts.items()}
        return others

    def _assign_next(self, ranks: list[int | None], base: WorkerEnvironment) -> None:
        """Gives the ranks that go on their ranks in the next generation, whose new processes have started."""
        self.generation += 1
        for rank, first in enumerate(ranks):
            if first is None:
                continue
            environment = replace(base, rank=rank, agent_socket=self.ends[first].path)
            self.ends[first].assign(environment, self.world.out / f"generation{self.generation}.rank{rank}.log")
        self.plan = base.plan
        self.ranks = [self._firsts[rank] if first is None else first for rank, first in enumerate(ranks)]

    def _make_replicas(self, lost: set[int]) -> list[int]:
        """The survivors by their next rank, as the manager places them: complete replicas stay together."""
        p = self.plan.p
        replicas = [self.ranks[at : at + p] for at in range(0, len(self.ranks), p)]
        left = sorted(([None if rank in lost else rank for rank in ranks] for ranks in replicas), key=_count_lost)
        d = min(sum(ranks[stage] is not None for ranks in left) for stage in range(p))
        spare = [[ranks[stage] for ranks in left[d:] if ranks[stage] is not None] for stage in range(p)]
        return [spare[stage].pop() if rank is None else rank for ranks in left[:d] for stage, rank in enumerate(ranks)]

    def finish(self) -> Outcome:
        """Waits for the end of all processes. Returns what the present ranks wrote."""
        for world in (self.world, *self.others):
            world.exit_codes()
        paths = [self._results[first] for first in self.ranks]
        assert all(path.with_suffix(".json").exists() for path in paths), self.logs()
        return Outcome.read(paths)

    def logs(self) -> str:
        return "\n".join(
            path.read_text() for world in (self.world, *self.others) for path in sorted(world.out.glob("*.log"))
        )


def _count_lost(ranks: list[int | None]) -> int:
    return ranks.count(None)
