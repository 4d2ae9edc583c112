"""What goes ahead to the next shape is the state of the step under way, over real connections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch._C._distributed_c10d import HashStore

from small_regression import BATCH, Regression
from tied_ranks import OPTIMIZERS, Rank, ranks_of, trained
from varuna import Varuna
from varuna import training as training_module
from varuna.copies import memory as memory_module
from varuna.copies import pacing as pacing_module
from varuna.copies import rank_ahead as rank_ahead_module
from varuna.copies.ahead_taker import AheadTaker, _open_newcomers_door
from varuna.copies.pacing import LEAST_SHARE, CopyPace
from varuna.copies.rank_ahead import RankAhead
from varuna.distributed.departure import Departure
from varuna.holdings import taking as taking_module
from varuna.holdings.inventory import HeldFiles, make_inventory
from varuna.worker.agent_link import AheadCommand
from varuna_proto.environment import Mode, WorkerEnvironment
from varuna_proto.plan import Plan
from waiting import DEADLINE_S, wait_until

HOST = "127.0.0.1"
PRESENT = Plan(p=2, d=1, micro_batch=1, global_batch=2)
NEXT = Plan(p=2, d=2, micro_batch=1, global_batch=2)
ENVIRONMENT = WorkerEnvironment(
    job_id="job",
    generation=7,
    mode=Mode.TRAIN,
    rank=1,
    local_rank=0,
    world_size=2,
    rendezvous_host=HOST,
    rendezvous_port=1,
    plan=PRESENT,
    secret="secret",
)
"""Of the last stage."""
COMMAND = AheadCommand(
    generation=7,
    world_size=2,
    rendezvous_host=HOST,
    rendezvous_port=1,
    secret="secret",
    request="next",
    plan=NEXT,
    ranks_before=(0, 1, None, None),
    rank=1,
    processes=1,
)


@dataclass
class Link:
    """The worker's end of the connection to its agent."""

    sent: list[tuple[str, int]] = field(default_factory=list)
    command: Callable[[AheadCommand], None] = lambda _: None

    def follow_ahead(self, follow: Callable[[AheadCommand], None]) -> None:
        self.command = follow

    def report_sent_ahead(self, request: str, step: int) -> None:
        self.sent.append((request, step))


class World:
    """The last stage, which sends its state to a new process that is to be rank 3."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.link, self.store, self.taker = rank, Link(), HashStore(), AheadTaker()
        rendezvous = SimpleNamespace(store=self.store, own_address=lambda: HOST)
        worker: Any = SimpleNamespace(
            environment=ENVIRONMENT, departure=Departure(), link=self.link, rendezvous=rendezvous
        )
        state = rank.state
        self.ahead = RankAhead(
            worker,
            torch.device("cpu"),
            section_count=state.section_count,
            shared={},
            is_pipeline_sending=lambda: False,
        )

    def open_door(self, rank: int = 3) -> None:
        self.taker.open_door(self.store, ENVIRONMENT, host=HOST, request="next", rank=rank, processes=1)

    def begin_pass(self, step: int) -> None:
        self.ahead.begin_pass(step, lambda: self.rank.state)

    def update(self) -> None:
        """What follows a pass."""
        self.ahead.end_pass()
        with torch.no_grad():
            for value in self.rank.parameters.values():
                value.add_(1.0)

    def taken(self, step: int, series: int = 0) -> dict[str, bytes]:
        return {name: data for held in self.taker.list_states(7, step, series) for name, data in contents(held).items()}


def contents(held: HeldFiles) -> dict[str, bytes]:
    return {
        name: b"".join(bytes(part) for chunk in file.iterate_chunks(0, 1 << 20) for part in chunk)
        for name, file in held.files.items()
    }


def expected(rank: Rank, step: int) -> dict[str, bytes]:
    """Its state in files of sections."""
    held = make_inventory(rank.state, step, generation=7, rank=1)
    return {name: data for name, data in contents(held).items() if name.startswith("section-")}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(rank_ahead_module, "_RETRY_S", 0.01)
    monkeypatch.setattr(taking_module, "SILENCE_S", DEADLINE_S)
    make = OPTIMIZERS["adamw"]
    world = World(ranks_of(*trained(make), make, 2, 1)[1])
    yield world
    world.ahead.shut_down()
    world.taker.close()


def test_the_state_of_the_step_under_way_is_sent_also_if_that_was_asked_for_in_its_middle(world: World) -> None:
    world.open_door()
    world.begin_pass(4)
    world.link.command(COMMAND)
    world.ahead.begin_round_if_asked()
    wait_until(lambda: world.link.sent == [("next", 4)], "the state")
    assert world.taken(4) == expected(world.rank, 4)
    world.ahead.begin_round_if_asked()
    world.update()
    world.begin_pass(5)
    wait_until(lambda: world.link.sent == [("next", 4), ("next", 5)], "the state of the next step")
    assert world.taken(5) == expected(world.rank, 5)
    assert world.taken(4) == {}, "it is of no use now"


def test_a_pass_that_is_run_again_sends_what_its_state_is_then(world: World) -> None:
    """The script may have changed the model in between."""
    world.open_door()
    world.link.command(COMMAND)
    for times in (1, 2):
        world.begin_pass(4)
        wait_until(lambda times=times: world.link.sent == [("next", 4)] * times, "the state")  # type: ignore[misc]
        assert world.taken(4) == expected(world.rank, 4)
        world.update()


def test_what_was_sent_before_a_checkpoint_was_loaded_does_not_count(world: World) -> None:
    """Also where the checkpoint is of the same step."""
    world.open_door()
    world.link.command(COMMAND)
    world.begin_pass(4)
    wait_until(lambda: len(world.link.sent) == 1, "the state")
    world.update()
    world.ahead.forget_states()
    assert world.ahead.series == 1
    assert world.taken(4, series=1) == {}
    world.begin_pass(4)
    wait_until(lambda: len(world.link.sent) == 2, "the loaded state")
    assert world.taken(4, series=1) == expected(world.rank, 4)
    assert world.taken(4, series=0) == {}


def test_an_update_does_not_wait_for_a_process_that_takes_nothing(world: World) -> None:
    """Neither for one that has not said where it is, nor for one that is gone."""
    world.link.command(COMMAND)
    for step in (4, 5):
        world.begin_pass(step)
        world.update()
    world.open_door()
    world.taker.close()
    for step in (6, 7):
        world.begin_pass(step)
        world.update()
    assert world.link.sent == []


def test_an_update_waits_until_the_state_is_copied(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    make, copied = rank_ahead_module.make_inventory, []

    def make_slowly(*args: Any, **named: Any) -> HeldFiles:
        wait_until(lambda: world.ahead._pass is None, "the end of the pass")
        copied.append(expected(world.rank, 4))
        return make(*args, **named)

    monkeypatch.setattr(rank_ahead_module, "make_inventory", make_slowly)
    before = expected(world.rank, 4)
    world.link.command(COMMAND)
    world.begin_pass(4)
    wait_until(lambda: world.ahead._is_capturing, "the copy")
    world.update()
    assert copied == [before]


def test_a_rank_that_has_nothing_to_send_says_so(world: World) -> None:
    world.link.command(COMMAND._replace(ranks_before=(0, 1), plan=PRESENT))
    world.begin_pass(4)
    wait_until(lambda: world.link.sent == [("next", 4)], "the report")


def test_nothing_is_sent_where_memory_is_short_and_training_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_module, "count_available_bytes", lambda: 100)
    world.open_door()
    world.link.command(COMMAND)
    with capture_logs() as log:
        world.begin_pass(4)
        wait_until(lambda: any("does not go ahead" in entry["event"] for entry in log), "the log")
    world.update()
    assert world.link.sent == []
    assert world.taken(4) == {}


def test_what_is_no_longer_wanted_is_freed_on_both_sides(world: World) -> None:
    """In a worker that sends and takes, and in a newcomer."""
    world.open_door()
    world.link.command(COMMAND)
    world.begin_pass(4)
    wait_until(lambda: world.link.sent == [("next", 4)], "the state")
    buffers = world.ahead._buffers
    assert buffers._buffers
    over = COMMAND._replace(is_over=True)
    world.link.command(over._replace(request="another"))
    assert world.ahead._command is not None, "it is about another shape"
    world.link.command(over)
    _open_newcomers_door(world.taker, over, ENVIRONMENT)
    wait_until(lambda: not buffers._buffers, "the memory")
    assert world.taken(4) == {}
    assert world.taker._keeper is None
    assert world.link.sent == [("next", 4), ("", 0)], "it has sent nothing that counts"
    world.update()
    world.begin_pass(5)
    assert world.ahead._round is None
    world.open_door()
    world.link.command(COMMAND)
    world.ahead.begin_round_if_asked()
    wait_until(lambda: world.link.sent[-1] == ("next", 5), "the state, which is wanted again")
    assert world.taken(5) == expected(world.rank, 5)


def test_what_a_worker_has_taken_is_freed_when_the_next_step_begins(world: World) -> None:
    world.taker = world.ahead.taker
    world.open_door()
    world.link.command(COMMAND)
    for _ in range(2):
        world.begin_pass(4)
        wait_until(lambda: world.link.sent and world.taken(4) == expected(world.rank, 4), "the state")
        world.ahead.end_pass()
        assert world.taken(4), "until the step is committed, the pass may be run again"
    world.link.command(COMMAND._replace(request="later"))
    world.begin_pass(5)
    assert world.taken(4) == {}
    keeper = world.taker._keeper
    assert keeper is not None
    assert not any(held.inventory.step == 4 for held in keeper.list_copies())


def test_a_command_of_another_generation_is_none_of_its(world: World) -> None:
    world.link.command(COMMAND._replace(generation=6))
    world.begin_pass(4)
    assert world.ahead._round is None


def test_another_generation_finds_a_new_door(world: World) -> None:
    world.open_door()
    world.link.command(COMMAND)
    world.begin_pass(4)
    wait_until(lambda: world.link.sent, "the state")
    assert world.taker.list_states(8, 4, 0) == []
    world.taker.open_door(world.store, replace(ENVIRONMENT, generation=8), host=HOST, request="r", rank=3, processes=1)
    assert world.taken(4) == {}


def test_a_process_that_joins_no_survivors_keeps_nothing_that_was_sent_ahead(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks of its generation are new, and take the whole state from elsewhere."""
    world.open_door()
    world.link.command(COMMAND)
    world.begin_pass(4)
    wait_until(lambda: world.link.sent == [("next", 4)], "the state")
    monkeypatch.setattr(training_module, "AheadTaker", lambda: world.taker)
    Varuna(Regression(), get_batch_fn=BATCH)
    assert world.taken(4) == {}


@pytest.mark.parametrize(("least_share", "rest_s"), [(LEAST_SHARE, 0.396), (0.25, 0.012)])
def test_a_share_of_the_processors_is_taken_also_where_none_is_idle(
    least_share: float, rest_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it, on two processors, after a chunk that took 4 ms: the other half is for what comes in."""
    monkeypatch.setattr(pacing_module.os, "cpu_count", lambda: 2)
    spent_s = iter([0.0, 0.004])
    monkeypatch.setattr(pacing_module, "time", SimpleNamespace(thread_time=partial(next, spent_s)))
    waits: list[float] = []
    stopped: Any = SimpleNamespace(wait=waits.append)
    pace = CopyPace(lambda: False, stopped, least_share=least_share)
    monkeypatch.setattr(pace._processors, "count", lambda: 0.0)
    pace.end_chunk()
    assert waits == [pytest.approx(rest_s)]
