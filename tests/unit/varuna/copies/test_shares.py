"""Copies of a share's sums over real connections: one mark that all ranks have is always there."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from varuna.copies import memory as memory_module
from varuna.copies import rank_copies as rank_copies_module
from varuna.copies import rank_shares as rank_shares_module
from varuna.copies.memory import MemorySharers
from varuna.copies.parting import Parting
from varuna.copies.rank_copies import RankCopies
from varuna.copies.rank_shares import EarlierSums, RankShares, _Share, has_keepers
from varuna.copies.replica_marks import ReplicaMarks
from varuna.copies.sending import PacedConnection
from varuna.copies.share_keeper import ShareKeeper
from varuna.copies.share_marks import MarkedSums, MarkKey, ShareMark, micro_batches_between_marks
from varuna.copies.share_owner import ShareOwner
from varuna.distributed.departure import Departure, PeerLost
from varuna.distributed.handshake import MeetingKey
from varuna.distributed.topology import Topology
from varuna.pipeline.pass_state import PassResult
from varuna.roles.kept_inputs import KeptInputs
from varuna.roles.training import TrainingRole
from varuna_planner.liveput.morph_cost import MARKS_S
from varuna_proto.environment import WorkerEnvironment
from waiting import DEADLINE_S, wait_until

HOST = "127.0.0.1"
KEY = MeetingKey.derive_key("secret", "job", 7, host=HOST, port=1)
STEP = 5


class World:
    """An owner and its keeper, in a replica of two stages."""

    def __init__(self) -> None:
        self.keeper = ShareKeeper(KEY, HOST)
        store = dist.HashStore()
        self.marks, self.others = (ReplicaMarks(store, Topology(2, 2, 2 + stage)) for stage in range(2))
        self.late: set[int] = set()
        """Marks that the other rank of the replica leaves out."""
        self.owner = self._make_owner()
        self.owners: dict[tuple[int, int], ShareOwner] = {}
        """By the sections of their stages."""
        self.series = 0

    def forget(self, series: int) -> None:
        self.series = series
        self.owner.forget_sums(series)

    def _make_owner(self) -> ShareOwner:
        return ShareOwner(PacedConnection(self.keeper.address, KEY, lambda: False), self.marks)

    def copy(self, done: int, step: int = STEP, sections: tuple[int, int] = (0, 2)) -> None:
        owner = self.owners.setdefault(sections, self.owner if not self.owners else self._make_owner())
        spans = ((0, done),)
        mark = ShareMark(
            generation=7,
            replica=1,
            step=step,
            sections=sections,
            micro_batch=2,
            spans=spans,
            loss_sum=float(done),
        )
        self.others.report(self.series, mark.key, None if done in self.late else 0.5)
        owner.copy_sums(mark, {"weight": torch.full((300, 1000), float(done)), "bias": torch.tensor(-1.0)})
        wait_until(lambda: not owner.is_busy, "the copy")

    def close(self) -> None:
        for owner in (self.owner, *self.owners.values()):
            owner.shut_down()
        self.keeper.close()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def count_done(held: list[MarkedSums]) -> list[int]:
    """Of each copy, whose sums are those of its mark."""
    for marked in held:
        assert torch.equal(marked.sums["weight"], torch.full((300, 1000), float(marked.mark.key.micro_batches)))
        assert marked.mark.loss_sum == marked.mark.key.micro_batches
    return sorted(marked.mark.key.micro_batches for marked in held)


def test_the_newest_mark_and_the_one_before_stay(world: World) -> None:
    for done in (2, 4, 6):
        world.copy(done)
    assert count_done(world.keeper.list_sums()) == [4, 6]
    assert count_done(list(world.owner.list_sums(STEP))) == [4, 6]


def test_a_keeper_has_the_newest_marks_of_each_rank_whose_sums_it_keeps(world: World) -> None:
    for done in (2, 4, 6):
        world.copy(done)
        world.copy(done, sections=(2, 3))
    assert count_done(world.keeper.list_sums()) == [4, 4, 6, 6]


def test_a_mark_that_another_rank_leaves_out_is_replaced(world: World) -> None:
    world.late = {4, 6}
    for done in (2, 4, 6, 8):
        world.copy(done)
    assert count_done(world.keeper.list_sums()) == [2, 8]
    assert count_done(list(world.owner.list_sums(STEP))) == [2, 8]


def test_copies_of_earlier_steps_are_dropped(world: World) -> None:
    world.copy(2)
    world.copy(4)
    world.copy(1, step=STEP + 1)
    assert count_done(world.keeper.list_sums()) == [1]
    assert count_done(list(world.owner.list_sums(STEP + 1))) == [1]
    assert not list(world.owner.list_sums(STEP))


def test_a_pass_that_does_not_count_leaves_no_copies(world: World) -> None:
    world.copy(2)
    world.forget(1)
    assert not list(world.owner.list_sums(STEP))
    world.copy(3)  # its keeper has not heard of it yet
    assert count_done(world.keeper.list_sums()) == [2]
    world.keeper.forget_sums(2)
    assert not world.keeper.list_sums()
    world.forget(2)
    world.copy(4)
    assert count_done(world.keeper.list_sums()) == [4]


def test_a_keeper_that_is_gone_costs_nothing_but_the_copy(world: World) -> None:
    world.copy(2)
    world.keeper.close()
    world.copy(4)
    assert count_done(list(world.owner.list_sums(STEP))) == [2, 4]
    assert count_done(world.keeper.list_sums()) == [2]
    first, second = (MarkKey(7, 1, STEP, done) for done in (2, 4))
    assert world.marks.have_all_kept(0, first)
    assert world.marks.read_reports(0, second) == [None, 0.5]


def test_a_mark_of_a_pass_that_does_not_count_is_not_that_of_the_next_pass(world: World) -> None:
    world.copy(2)
    assert world.marks.have_all_kept(0, MarkKey(7, 1, STEP, 2))
    world.forget(1)
    world.keeper.forget_sums(1)
    world.late = {2}
    world.copy(2)
    assert not world.marks.have_all_kept(1, MarkKey(7, 1, STEP, 2))


def test_what_ranks_have_said_of_a_mark_leaves_the_store_with_the_next_step(world: World) -> None:
    first, second = MarkKey(7, 1, STEP, 2), MarkKey(7, 1, STEP + 1, 2)
    world.others.announce(0, first)
    assert world.marks.is_announced(0, first)
    assert world.marks.read_reports(0, first) is None
    world.copy(2)
    assert world.others.read_reports(0, first) is not None
    world.others.announce(0, second)
    assert not world.marks.is_announced(0, first)
    assert world.marks.is_announced(0, second)
    world.copy(2, step=STEP + 1)
    assert world.marks.read_reports(0, first) is None
    assert world.marks.have_all_kept(0, second)


def test_marks_are_five_seconds_apart() -> None:
    assert micro_batches_between_marks(0.0) == 0
    assert micro_batches_between_marks(0.3) == 17
    assert micro_batches_between_marks(25.0) == 1


class GoneStore:
    """The rendezvous store of a generation whose rank 0 is gone."""

    def _fail(self, *_: object) -> NoReturn:
        raise dist.DistNetworkError("gone")

    set = get = multi_get = check = delete_key = _fail


def make_worker(p: int, d: int) -> Any:
    environment = WorkerEnvironment.alone("job", micro_batch=1, global_batch=8)
    return SimpleNamespace(
        environment=replace(environment, secret="secret", keepers=(1, 0), copies_shares=True),
        topology=Topology(p, d, 0),
        departure=Departure(),
        rendezvous=SimpleNamespace(
            store=GoneStore(), own_address=lambda: HOST, exchange_values=lambda _name, _ranks, own: [own]
        ),
    )


def test_a_loss_of_rank_0_is_no_fault_of_copies() -> None:
    """Ranks learn of it from their connections; what asks the store for copies says nothing."""
    worker, parameter = make_worker(2, 2), torch.nn.Parameter(torch.ones(3))
    shares = RankShares(worker, is_pipeline_sending=lambda: False)
    parameter.grad = torch.ones(3)
    kept = PassResult(loss_sum=1.0, weight=1.0, examples=1, expected_weight=8.0, forward_us=1, backward_us=1, wait_us=0)
    parameters = {"weight": parameter}
    begin = partial(shares.begin_pass, 1, range(4), parameters, sections=range(2), micro_batch=1, micro_batch_s=4.0)
    begin(kept=EarlierSums((9,), kept))
    assert shares.list_sums(1) == []
    copies = RankCopies(worker, torch.device("cpu"), count_state_bytes=lambda: 1, is_pipeline_sending=lambda: False)
    copies.record_agreement(is_any_busy=False)
    copies.begin_round(1, lambda: pytest.fail("nobody keeps it"))
    assert copies.is_busy, "no rank begins another round"
    for each in (shares, copies):
        each.shut_down()


def test_no_first_round_begins_where_a_rank_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks are on one machine; the other one has no room, which this one reports, too."""
    worker, needed = make_worker(2, 1), list[int]()
    worker.environment = replace(worker.environment, world_size=2)
    worker.rendezvous.store = dist.HashStore()
    worker.rendezvous.store.set("copies/obstacle", "rank 1: it has no room")
    said = {"copies/host": HOST, "copies/busy": "True"}
    worker.rendezvous.exchange_values = lambda name, _ranks, own: [own, said[name]]

    def find_room(size: int, _: float) -> str:
        needed.append(size)
        return ""

    monkeypatch.setattr(rank_copies_module, "describe_shortage", find_room)
    copies = RankCopies(worker, torch.device("cpu"), count_state_bytes=lambda: 100, is_pipeline_sending=lambda: False)
    copies.begin_round(3, lambda: pytest.fail("a rank has no room"))
    assert needed == [2 * 2 * 2 * 100], "of two ranks, each with its own copies and those that it keeps"
    copies.record_agreement(is_any_busy=True)
    assert copies.whole_step == 0
    assert copies.find_obstacle() == "rank 1: it has no room"
    copies.shut_down()


def test_a_rank_without_room_says_so_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, store = make_worker(2, 2), dist.HashStore()
    worker.rendezvous.store = store
    monkeypatch.setattr(memory_module, "count_available_bytes", lambda: 2**30)
    copies = RankCopies(worker, torch.device("cpu"), count_state_bytes=lambda: 2**30, is_pipeline_sending=lambda: False)
    assert copies.find_obstacle() == ""
    assert copies.is_busy
    assert copies.find_obstacle() == (
        "rank 0: there is not enough host memory on this VM: 4 GiB are needed, and 70% of the 1 GiB that are free may "
        "be used"
    )
    monkeypatch.setattr(memory_module, "count_available_bytes", lambda: 4)
    shares, parameter = RankShares(worker, is_pipeline_sending=lambda: False), torch.nn.Parameter(torch.ones(3))
    kept = PassResult(loss_sum=1.0, weight=1.0, examples=1, expected_weight=8.0, forward_us=1, backward_us=1, wait_us=0)
    parameter.grad = torch.ones(3)
    begin = partial(shares.begin_pass, 1, range(40), {"weight": parameter}, sections=range(2), micro_batch=1)
    begin(kept=None, micro_batch_s=0.01)
    assert shares.find_obstacle() == "", "steps are short: nobody needs marks"
    begin(kept=EarlierSums((99,), kept), micro_batch_s=4.0)
    assert shares.find_obstacle().startswith("rank 0: there is not enough host memory on this VM")
    store.set("shares/address/2", "")  # it has no port
    alone = RankShares(worker, is_pipeline_sending=lambda: False)
    assert alone._find_keeper() == ""
    assert alone._obstacle.read() == "rank 0: no other rank can keep its sums"
    alone.shut_down()
    for each in (shares, copies):
        each.shut_down()


def test_an_obstacle_is_asked_for_only_until_a_round_has_begun() -> None:
    worker = make_worker(2, 2)
    worker.rendezvous.store = dist.HashStore()
    copies = RankCopies(worker, torch.device("cpu"), count_state_bytes=lambda: 1, is_pipeline_sending=lambda: False)
    worker.rendezvous.store.set("copies/obstacle", "rank 1: it has no room")
    copies.whole_step = 3
    assert copies.find_obstacle() == ""
    copies.whole_step = 0
    assert copies.find_obstacle() == "rank 1: it has no room"
    copies.shut_down()


@pytest.mark.parametrize(
    ("done", "marked", "p", "d", "interval", "is_worth_it"),
    [
        (5, 4, 4, 3, 2, False),
        (19, 18, 4, 3, 2, True),
        (6, 0, 2, 2, 12, False),
        (7, 0, 2, 2, 12, True),
        (5, 4, 1, 3, 2, True),
        (5, 0, 4, 3, 0, True),
    ],
)
def test_a_share_is_left_when_others_would_wait_longer_than_it_has_lost(
    done: int, marked: int, p: int, d: int, interval: int, is_worth_it: bool
) -> None:
    """Of 20 micro-batches. Replicas always finish without marks, and where a lost replica leaves no device idle."""
    shares = RankShares.__new__(RankShares)
    shares._worker = make_worker(p, d)
    shares._share = _Share(STEP, {}, range(2), range(20), None, 1, interval, done, marked)
    assert shares.is_worth_finishing() is is_worth_it


def make_result(examples: int) -> PassResult:
    return PassResult(
        loss_sum=0.0, weight=1.0, examples=examples, expected_weight=0.0, forward_us=0, backward_us=0, wait_us=0
    )


class Stage:
    """One of three stages, each on the rank that keeps the sums of the one before."""

    def __init__(self, stage: int, store: dist.Store) -> None:
        worker = make_worker(3, 1)
        plan = replace(worker.environment.plan, p=3, d=1)
        worker.environment = replace(worker.environment, plan=plan, rank=stage, world_size=3, keepers=(1, 2, 0))
        worker.topology = Topology(3, 1, stage)
        worker.rendezvous.store = store
        self.parameter = torch.nn.Parameter(torch.zeros(3))
        self.shares = RankShares(worker, is_pipeline_sending=lambda: False)
        self.done = 0

    def begin_pass(
        self, count: int, micro_batch_s: float, *, untrained: int = 0, kept: EarlierSums | None = None
    ) -> None:
        sections = range(self.shares._worker.topology.stage, self.shares._worker.topology.stage + 1)
        self.parameter.grad = torch.zeros(3)
        self.shares.begin_pass(
            STEP,
            range(count),
            {"w": self.parameter},
            sections=sections,
            kept=kept,
            micro_batch=1,
            micro_batch_s=micro_batch_s,
            without_sums=[range(stage, stage + 1) for stage in range(untrained)],
        )

    def run_backward(self) -> None:
        self.done += 1
        assert self.parameter.grad is not None
        self.parameter.grad += 1
        passed = make_result(self.done)
        self.shares.follow_backward(self.done, SimpleNamespace(sum_up=lambda _: passed))  # type: ignore[arg-type]
        wait_until(lambda: self.shares._owner is None or not self.shares._owner.is_busy, "the copy")

    def list_marks(self) -> set[int]:
        held = [] if self.shares._owner is None else list(self.shares._owner.list_sums(STEP))
        for marked in held:
            assert torch.equal(marked.sums["w"], torch.full((3,), float(marked.mark.key.micro_batches)))
        return {marked.mark.key.micro_batches for marked in held}


@pytest.mark.long
@pytest.mark.parametrize(("interval", "lag"), [(1, 0), (1, 3), (2, 1), (2, 4), (5, 2), (5, 9)])
def test_one_mark_stays_that_all_stages_have_however_far_the_first_is_behind(
    interval: int, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage is `lag` micro-batches behind the next one."""
    monkeypatch.setattr(rank_shares_module, "MARKS_SHARE", 1e9)
    count, store = 60, dist.HashStore()
    stages = [Stage(number, store) for number in range(3)]
    for stage in stages:
        stage.begin_pass(count, MARKS_S / interval)
    newest = 0
    for now in range(1, count + 2 * lag):
        for number, stage in reversed([*enumerate(stages)]):
            if 0 < now - lag * (2 - number) < count:
                stage.run_backward()
                common = set.intersection(*(each.list_marks() for each in stages))
                assert max(common, default=0) >= newest
                newest = max(common, default=0)
                assert stages[0].done - newest <= interval + 2 * lag + 1
    for stage in stages:
        stage.shares.shut_down()


def test_there_are_no_marks_before_all_ranks_have_what_they_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then a replica ends its share where another one is hit: no mark has what it keeps."""
    monkeypatch.setattr(rank_shares_module, "MARKS_SHARE", 1e9)
    store, has_come = dist.HashStore(), False
    stages = [Stage(number, store) for number in range(3)]
    passed = make_result(9)
    for stage in stages:
        stage.begin_pass(20, MARKS_S, kept=EarlierSums(range(30, 39), passed, have_all=lambda: has_come))
    for done in range(1, 8):
        has_come = done > 3
        for stage in reversed(stages):
            stage.run_backward()
        shares = [stage.shares._share for stage in stages]
        assert all(share is not None and (share.marked > 0) is (done > 4) for share in shares)
        owners = [stage.shares._owner for stage in stages]
        assert all(owner is None or owner.list_sums(STEP) for owner in owners)
    for stage in stages:
        marks = {marked.mark.numbers for marked in stage.shares.list_sums(STEP)}
        assert {*range(30, 39), *range(5)} in marks
        stage.shares.shut_down()


def test_a_load_of_another_state_forgets_the_marks_of_the_step_that_was_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The script goes back by one step and gives other samples for the same step."""
    monkeypatch.setattr(rank_shares_module, "MARKS_SHARE", 1e9)
    store = dist.HashStore()
    stages = [Stage(number, store) for number in range(3)]

    def list_owners() -> list[set[tuple[int, ...]]]:
        return [{marked.mark.sections for marked in stage.shares.list_sums(STEP)} for stage in stages]

    def run_pass() -> None:
        for stage in stages:
            stage.done = 0
            stage.begin_pass(9, MARKS_S / 2)
        for _ in range(5):
            for stage in reversed(stages):
                stage.run_backward()
        for stage in stages:
            stage.shares.end_pass()

    run_pass()
    own_and_kept = list_owners()
    assert all(len(owners) == 2 for owners in own_and_kept)
    parts = [
        SimpleNamespace(copies=None, ahead=None, shares=stage.shares, parting=object(), inputs=KeptInputs())
        for stage in stages
    ]
    for part in parts:
        TrainingRole._forget_kept(SimpleNamespace(_parts=part))  # type: ignore[arg-type]
    assert list_owners() == [set(), set(), set()]
    assert all(part.parting is None for part in parts)
    run_pass()
    assert list_owners() == own_and_kept
    for stage in stages:
        stage.shares.shut_down()


def test_stages_that_train_nothing_need_no_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of three is through before the last one decides on a mark."""
    monkeypatch.setattr(rank_shares_module, "MARKS_SHARE", 1e9)
    store = dist.HashStore()
    stages = [Stage(number, store) for number in range(3)]
    for stage in stages:
        stage.begin_pass(9, 2 * MARKS_S / 4, untrained=1)
    for _ in range(9):
        stages[0].run_backward()
    for _ in range(7):
        for stage in (stages[2], stages[1]):
            stage.run_backward()
    assert [stage.list_marks() for stage in stages] == [set(), {4, 6}, {4, 6}]
    for marked in stages[2].shares.list_sums(STEP):  # its own, and those that it keeps for the one before
        (empty,) = marked.mark.list_empty()
        assert (empty.sections, empty.key, empty.is_empty) == ((0, 1), marked.mark.key, True)
        assert ShareMark.from_json(marked.mark.to_json()) == marked.mark
        assert empty.micro_batch == marked.mark.micro_batch == 1
    for stage in stages:
        stage.shares.shut_down()


def test_marks_take_a_hundredth_of_the_time_of_the_stage_that_copies_longest() -> None:
    store = dist.HashStore()
    stages = [Stage(number, store) for number in range(3)]
    for stage in stages:
        stage.begin_pass(20, MARKS_S)
    leader = stages[2].shares
    assert leader._share is not None
    key = leader._key_of(leader._share, 1)
    for stage, copy_s in zip(stages, (0.0, 2.0, 0.5), strict=True):
        stage.shares._marks.report(0, key, copy_s)
    assert leader._is_settled(leader._share)
    assert 150 < leader._rests_until_s - time.monotonic() <= 200
    for stage in stages:
        stage.shares.shut_down()


def test_sums_change_after_their_copy_whether_a_pass_goes_on_or_is_left() -> None:
    stage, orders = Stage(2, dist.HashStore()), list[int]()
    stage.shares.order_changes()  # there is no copy yet
    stage.shares._owner = SimpleNamespace(order_changes=lambda: orders.append(stage.done))  # type: ignore[assignment]
    stage.begin_pass(9, 0.0)
    for _ in range(2):
        stage.shares.order_changes()
        stage.done += 1
    stage.shares.end_pass()
    assert orders == [0, 1, 2]
    stage.shares._owner = None
    stage.shares.shut_down()


def test_sparse_sums_are_not_copied() -> None:
    assert "sparse" in rank_shares_module._describe_obstacle({"weight": torch.eye(2).to_sparse()}, 1)
    assert not rank_shares_module._describe_obstacle({"weight": torch.eye(2)}, 1)


def make_ranks(store: dist.Store, hosts: Sequence[str]) -> list[Any]:
    """The workers of a generation of as many replicas of one stage, each at its host."""
    workers = [make_worker(1, len(hosts)) for _ in hosts]
    for rank, (worker, host) in enumerate(zip(workers, hosts, strict=True)):

        def exchange_values(name: str, ranks: Iterable[int], own: str, rank: int = rank) -> list[str]:
            store.set(f"{name}/{rank}", own)
            return [store.get(f"{name}/{one}").decode() for one in ranks]

        worker.environment = replace(worker.environment, rank=rank, world_size=len(hosts), keepers=())
        worker.topology = Topology(1, len(hosts), rank)
        worker.rendezvous = SimpleNamespace(
            store=store, own_address=lambda host=host: host, exchange_values=exchange_values
        )
    return workers


def test_ranks_share_the_memory_of_the_machine_that_they_are_on() -> None:
    workers = make_ranks(dist.HashStore(), ["10.0.0.1", "10.0.0.2", "10.0.0.1"])
    with ThreadPoolExecutor(3) as pool:
        sharers = pool.map(lambda worker: MemorySharers(worker, "copies"), workers)
        assert [each.count for each in sharers] == [2, 1, 2]


def test_a_rank_that_is_ahead_copies_what_was_kept_before_its_first_micro_batch() -> None:
    """In a new generation, whose ranks come one after the other. Else a second loss would cost all of it."""
    store = dist.HashStore()
    passed = make_result(9)
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    ahead, late = make_ranks(store, [HOST, HOST])

    def begin_pass() -> RankShares:
        shares = RankShares(ahead, is_pipeline_sending=lambda: False)
        shares.begin_pass(
            STEP,
            range(20),
            {"w": parameter},
            sections=range(1),
            kept=EarlierSums(range(30, 39), passed),
            micro_batch=1,
            micro_batch_s=MARKS_S,
        )
        return shares

    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(begin_pass)
        wait_until(lambda: begun.done() or store.check(["shares/host/0"]), "the rank that is ahead")
        other = RankShares(late, is_pipeline_sending=lambda: False)
        shares = begun.result(DEADLINE_S)
    assert [marked.mark.numbers for marked in shares.list_sums(STEP)] == [frozenset(range(30, 39))]
    for each in (shares, other):
        each.shut_down()


def test_copies_are_kept_where_all_of_them_fit_into_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "count_available_bytes", lambda: 4 * 3 * 4 * 4)
    gradients = {"weight": torch.ones(4)}
    assert not rank_shares_module._describe_obstacle(gradients, 4)
    assert rank_shares_module._describe_obstacle(gradients, 8), "the other rank needs as much"


def test_with_one_replica_those_that_keep_states_keep_sums() -> None:
    worker = make_worker(3, 1)
    plan = replace(worker.environment.plan, p=3, d=1)
    alone = replace(worker.environment, plan=plan, rank=1, keepers=(1, 2, 1))
    worker.environment = alone
    shares = RankShares.__new__(RankShares)
    shares._worker = worker
    assert shares._count_kept() == 2
    assert has_keepers(alone)
    assert not has_keepers(replace(alone, keepers=()))
    assert has_keepers(replace(alone, keepers=(), plan=replace(plan, d=2)))
    assert not has_keepers(replace(alone, copies_shares=False))


def test_a_mark_says_its_micro_batches_to_others() -> None:
    mark = ShareMark(generation=7, replica=1, step=STEP, sections=(0, 2), micro_batch=4, spans=((0, 2), (7, 8)))
    assert ShareMark.from_json(mark.to_json()) == mark
    with pytest.raises(ValueError, match="no mark of a share"):
        ShareMark.from_document({name: value for name, value in asdict(mark).items() if name != "micro_batch"})
    finer = mark.renumber_micro_batches(2, 30)
    assert (finer.micro_batch, finer.spans) == (2, ((0, 4), (14, 15))), "the last one of 30 examples has only two"
    assert finer.key == mark.key._replace(micro_batches=5)
    assert mark.renumber_micro_batches(4, 30) == mark


class LeavingStore:
    """A store that is asked for something just when this worker leaves, as another thread finds."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._store, self._leave = dist.HashStore(), leave

    def __getattr__(self, name: str) -> Any:
        self._leave()
        return getattr(self._store, name)


def leaving(worker: Any) -> Callable[[], None]:
    worker.departure.offer_to_stay(lambda _: True, str)
    return lambda: worker.departure.leave_generation(PeerLost("rank 1 is gone"))


def test_copies_that_begin_while_the_worker_leaves_are_not_sent() -> None:
    """Else they are sent again and again, to one that is gone, for as long as the process lives."""
    worker = make_worker(2, 1)
    copies = RankCopies(worker, torch.device("cpu"), count_state_bytes=lambda: 1, is_pipeline_sending=lambda: False)
    store = worker.rendezvous.store = LeavingStore(leaving(worker))
    store._store.set("copies/1", f"{HOST}:1")
    copies._has_met = copies._can_keep = True
    copies.record_agreement(is_any_busy=False)
    copies.begin_round(1, lambda: None)  # type: ignore[arg-type, return-value]
    assert copies._owner is not None
    assert copies._owner._keeper.is_stopped
    copies._owner._thread.join()


def test_sums_that_are_copied_while_the_worker_leaves_are_not_sent() -> None:
    worker = make_worker(2, 2)
    shares = RankShares(worker, is_pipeline_sending=lambda: False)
    store = worker.rendezvous.store = LeavingStore(leaving(worker))
    store._store.set("shares/address/2", f"{HOST}:1")
    shares._has_room = True
    owner = shares._find_owner({})
    assert owner is not None
    assert owner._keeper.is_stopped


def test_doors_that_open_while_the_worker_leaves_close() -> None:
    worker = make_worker(2, 1)
    worker.rendezvous.store = dist.HashStore()
    parting, leave = Parting(worker, step=1, leaving=[1], sharers=1), leaving(worker)

    def find_address() -> str:
        leave()
        return HOST

    worker.rendezvous.own_address = find_address
    parting.exchange()
    host, _, port = worker.rendezvous.store.get("parting/1/sums/0").decode().rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5).close()
