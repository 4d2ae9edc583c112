from __future__ import annotations

import math
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from varuna.data import Batches, replica_indices
from varuna.data.batches import find_recent_batch, follow_shape
from varuna.data.sample_cursor import ResumePoint, set_resume_point
from varuna_proto.environment import Mode, WorkerEnvironment
from varuna_proto.plan import Plan

sizes = st.integers(min_value=1, max_value=400)
batches = st.integers(min_value=1, max_value=60)
ORDER_OF_10 = [8, 5, 3, 1, 6, 7, 0, 4, 2, 9]
FIVE_OF_A_MILLION = [684984, 768845, 574732, 753260, 304135]

seeds = st.integers(min_value=-(2**70), max_value=2**70)


def whole(step: int, size: int, batch: int, seed: int = 0, shuffle: bool = True) -> list[int]:
    return replica_indices(
        step,
        dataset_size=size,
        global_batch=batch,
        micro_batch=batch,
        replica=0,
        replicas=1,
        seed=seed,
        shuffle=shuffle,
    )


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    """(global batch, micro-batch, replicas) with a micro-batch for every replica at least."""
    batch = draw(batches)
    micro_batch = draw(st.integers(min_value=1, max_value=batch))
    replicas = draw(st.integers(min_value=1, max_value=-(-batch // micro_batch)))
    return batch, micro_batch, replicas


@settings(deadline=None)  # a loaded machine is no failure
@given(shapes(), sizes, seeds, st.integers(min_value=1, max_value=50))
def test_the_replicas_joined_are_the_global_batch(shape: tuple[int, int, int], size: int, seed: int, step: int) -> None:
    batch, micro_batch, replicas = shape
    shares = [
        replica_indices(
            step,
            dataset_size=size,
            global_batch=batch,
            micro_batch=micro_batch,
            replica=replica,
            replicas=replicas,
            seed=seed,
        )
        for replica in range(replicas)
    ]
    assert [index for share in shares for index in share] == whole(step, size, batch, seed)
    # Only whole micro-batches move between replicas; the step's last one may be smaller.
    assert all(len(share) % micro_batch == 0 for share in shares[:-1])


@settings(deadline=None)  # a loaded machine is no failure
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 7), sizes, st.data())
def test_replicas_with_any_shares_joined_are_the_global_batch(
    shares: list[int], micro_batch: int, size: int, data: st.DataObject
) -> None:
    batch = micro_batch * sum(shares) - data.draw(st.integers(0, micro_batch - 1))
    parts = [
        replica_indices(
            3,
            dataset_size=size,
            global_batch=batch,
            micro_batch=micro_batch,
            replica=replica,
            replicas=len(shares),
            shares=shares,
        )
        for replica in range(len(shares))
    ]
    assert [index for part in parts for index in part] == whole(3, size, batch)
    assert [-(-len(part) // micro_batch) for part in parts] == shares


@pytest.mark.long
@settings(deadline=None)  # a loaded machine is no failure
@given(sizes, batches, seeds)
def test_each_epoch_has_each_example_once(size: int, batch: int, seed: int) -> None:
    steps = -(-3 * size // batch)
    stream = [index for step in range(1, steps + 1) for index in whole(step, size, batch, seed)]
    for epoch in range(3):
        assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))


@pytest.mark.long
@settings(deadline=None)  # a loaded machine is no failure
@given(st.data(), sizes, batches)
def test_a_run_that_morphs_sees_what_one_that_does_not_sees(data: st.DataObject, size: int, batch: int) -> None:
    seen: list[int] = []
    for step in range(1, 13):  # a morph before every step
        micro_batch = data.draw(st.integers(min_value=1, max_value=batch))
        replicas = data.draw(st.integers(min_value=1, max_value=-(-batch // micro_batch)))
        for replica in range(replicas):
            seen += replica_indices(
                step,
                dataset_size=size,
                global_batch=batch,
                micro_batch=micro_batch,
                replica=replica,
                replicas=replicas,
                seed=1,
            )
    assert seen == [index for step in range(1, 13) for index in whole(step, size, batch, seed=1)]


def test_the_order_is_the_same_on_every_machine_and_for_ever() -> None:
    # A running job must see the same order after Varuna is upgraded: never change these.
    assert whole(1, 10, 10) == ORDER_OF_10
    assert whole(7, 1_000_003, 5, seed=3) == FIVE_OF_A_MILLION


def test_seeds_and_epochs_differ() -> None:
    assert whole(1, 100, 100, seed=1) != whole(1, 100, 100, seed=2)
    assert whole(1, 100, 100, seed=1) != whole(2, 100, 100, seed=1)
    assert whole(2, 100, 100, seed=0) != whole(1, 100, 100, seed=1)


def test_an_order_looks_random() -> None:
    size = 4096
    order = torch.tensor(whole(1, size, size), dtype=torch.float64)
    where = torch.arange(size, dtype=torch.float64)
    # Correlations of independent orders have a standard deviation of 1/64.
    for left, right in ((order, where), (order[1:], order[:-1]), (order, torch.tensor(whole(2, size, size)).double())):
        assert abs(torch.corrcoef(torch.stack((left, right)))[0, 1].item()) < 5 / 64


def test_a_step_costs_no_time_per_example_of_the_dataset() -> None:
    assert len(set(whole(10**9, 10**15, 64))) == 64


def test_unshuffled_is_in_order() -> None:
    assert whole(2, 5, 4, shuffle=False) == [4, 0, 1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset_size": 0}, "dataset is empty"),
        ({"global_batch": 0}, "global_batch 0"),
        ({"step": 0}, "step 0"),
        ({"replica": 2}, "replica 2 of 2"),
        ({"global_batch": 3, "micro_batch": 3}, "d=2"),
        ({"shares": (1, 2)}, r"shares \[1, 2\] of 2 replicas"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "step": 1,
        "dataset_size": 9,
        "global_batch": 4,
        "micro_batch": 1,
        "replica": 0,
        "replicas": 2,
    }
    with pytest.raises(ValueError, match=message):
        replica_indices(**(arguments | change))


class Squares:
    def __init__(self, size: int = 10) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "square": torch.tensor(float(index**2))}


def worker(rank: int, p: int, d: int, mode: Mode = Mode.TRAIN) -> dict[str, str]:
    return WorkerEnvironment(
        job_id="j",
        generation=1,
        mode=mode,
        rank=rank,
        local_rank=0,
        world_size=p * d,
        rendezvous_host="127.0.0.1",
        rendezvous_port=1,
        plan=Plan(p=p, d=d, micro_batch=2, global_batch=7),
    ).to_environ()


def test_a_plain_process_gets_the_whole_batch() -> None:
    batches = list(Batches(Squares(), global_batch=4, first_step=2, last_step=4, environ={}))
    assert [step for step, _batch in batches] == [2, 3, 4]
    assert [batch["index"].tolist() for _step, batch in batches] == [whole(step, 10, 4) for step in (2, 3, 4)]
    assert torch.equal(batches[0][1]["square"], batches[0][1]["index"].float() ** 2)


def test_all_stages_of_a_replica_get_the_same_and_the_replicas_share_the_batch() -> None:
    def indices(rank: int) -> list[int]:
        [(_step, batch)] = Batches(Squares(), first_step=5, last_step=5, environ=worker(rank, p=2, d=3))
        found: list[int] = batch["index"].tolist()
        return found

    by_rank = [indices(rank) for rank in range(6)]
    assert by_rank[0] == by_rank[1]
    assert [len(share) for share in by_rank[::2]] == [4, 2, 1]
    assert [index for share in by_rank[::2] for index in share] == whole(5, 10, 7)


def test_a_calibration_with_more_ranks_than_micro_batches_starts() -> None:
    assert Batches(Squares(), environ=worker(8, p=1, d=9, mode=Mode.CALIBRATE)).global_batch == 7


def test_without_a_last_step_it_never_ends() -> None:
    endless = Batches(Squares(3), global_batch=2, environ={})
    assert [step for step, _batch in islice(endless, 50)] == list(range(1, 51))


def test_collate_makes_the_batch() -> None:
    def collate(items: Sequence[Any]) -> dict[str, int]:
        return {"examples": len(items)}

    [(_step, batch)] = Batches(Squares(), global_batch=3, last_step=1, collate=collate, environ={})
    assert batch == {"examples": 3}


def test_clear_words_for_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="dataset is empty"):
        Batches(Squares(0), global_batch=1, environ={})
    with pytest.raises(ValueError, match="pass global_batch="):
        Batches(Squares(), environ={})
    with pytest.raises(ValueError, match="submitted with a global batch of 7"):
        Batches(Squares(), global_batch=8, environ=worker(0, 1, 1))
    with pytest.raises(ValueError, match="first_step 0"):
        Batches(Squares(), global_batch=1, first_step=0, environ={})
    with pytest.raises(TypeError, match="pass collate="):
        next(iter(Batches([1, 2, 3], global_batch=2, environ={})))


def test_a_resumed_run_begins_with_the_first_unseen_sample() -> None:
    stream = [index for step in range(1, 40) for index in whole(step, 10, 1)]
    set_resume_point(ResumePoint(step=3, samples=12))
    resumed = Batches(Squares(), first_step=4, last_step=6, environ=worker(0, p=1, d=1))
    seen = [index for _step, batch in resumed for index in batch["index"].tolist()]
    assert seen == stream[12 : 12 + 3 * 7]
    # Another stream (another phase, a validation set) always begins at its own beginning.
    assert Batches(Squares(), environ=worker(0, p=1, d=1)).indices(4) == whole(4, 10, 7)
    set_resume_point(None)
    assert Batches(Squares(), first_step=4, environ=worker(0, p=1, d=1)).indices(4) == whole(4, 10, 7)


class Numbers:
    """Example i is {"number": i}."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"number": index}


def worker_of(replicas: int, replica: int, shares: tuple[int, ...] = ()) -> WorkerEnvironment:
    plan = Plan(p=2, d=replicas, micro_batch=2, global_batch=12, shares=shares)
    return WorkerEnvironment(
        job_id="j",
        generation=1,
        mode=Mode.TRAIN,
        rank=2 * replica,
        local_rank=0,
        world_size=2 * replicas,
        rendezvous_host="h",
        rendezvous_port=1,
        plan=plan,
        checkpoint_url="",
        agent_socket="",
    )


def renew_batch(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    recent = find_recent_batch(inputs)
    assert recent is not None
    return recent.renew()


class Slow:
    """A dataset whose items say which process has made them."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, int]:
        if index == 99:
            raise OSError("this example cannot be read")
        return {"index": index, "pid": os.getpid()}


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_make_the_same_batches_ahead_in_processes_of_their_own(workers: int) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    alone = list(Batches(Slow(), global_batch=4, first_step=3, last_step=9))
    ahead = list(Batches(Slow(), global_batch=4, first_step=3, last_step=9, workers=workers))
    assert [step for step, _ in ahead] == list(range(3, 10))
    assert [batch["index"].tolist() for _, batch in ahead] == [batch["index"].tolist() for _, batch in alone]
    pids = {pid for _, batch in ahead for pid in batch["pid"].tolist()}
    assert len(pids) == workers
    assert os.getpid() not in pids
    assert torch.equal(torch.get_rng_state(), before), "the script's own draws do not depend on it"


@pytest.mark.processes
def test_an_endless_loop_with_workers_can_be_left() -> None:
    found = list(islice(Batches(Slow(), global_batch=3, workers=1), 4))
    assert [step for step, _ in found] == [1, 2, 3, 4]


class Unreadable(Slow):
    def __getitem__(self, index: int) -> dict[str, int]:
        raise OSError("this example cannot be read")


@pytest.mark.processes
def test_what_a_worker_raises_comes_to_the_script() -> None:
    with pytest.raises(OSError, match="this example cannot be read"):
        list(Batches(Unreadable(), global_batch=2, last_step=2, workers=1))
    with pytest.raises(TypeError, match="a batch must be a dict of model inputs by name"):
        list(Batches([1.0, 2.0], global_batch=2, last_step=2, workers=1))
    with pytest.raises(ValueError, match="workers=-1: give the number of processes"):
        Batches(Slow(), global_batch=2, workers=-1)


@pytest.fixture
def find_makers() -> Callable[[], set[int | None]]:
    """Finds the processes that make batches for the test."""
    others = {process.pid for process in multiprocessing.active_children()}
    return lambda: {process.pid for process in multiprocessing.active_children()} - others


@pytest.mark.processes
def test_processes_that_make_batches_end_with_the_loop(find_makers: Callable[[], set[int | None]]) -> None:
    """Also while the error that has ended it is kept."""
    with pytest.raises(OSError, match="cannot be read") as kept:
        list(Batches(Unreadable(), global_batch=2, last_step=2, workers=1))
    assert not find_makers(), kept

    loop = iter(Batches(Slow(), global_batch=2, workers=1))
    next(loop)
    assert len(find_makers()) == 1
    loop.close()  # type: ignore[attr-defined]  # as when it is left
    assert not find_makers()


@pytest.mark.processes
def test_processes_that_made_batches_of_another_shape_end(
    monkeypatch: pytest.MonkeyPatch, find_makers: Callable[[], set[int | None]]
) -> None:
    monkeypatch.setattr("varuna.data.batches.read_process_environment", lambda: worker_of(2, 1))
    makers = {}
    for step, _ in Batches(Slow(), workers=2, last_step=4):
        makers[step] = find_makers()
        if step == 2:
            follow_shape(worker_of(3, 0))
    assert makers[1] == makers[2]
    assert len(makers[2]) == len(makers[3]) == 2
    assert not makers[2] & makers[3]


@pytest.mark.processes
def test_batches_made_ahead_follow_their_process_through_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("varuna.data.batches.read_process_environment", lambda: worker_of(2, 1))
    source = Batches(Slow(), workers=2, last_step=6)
    sizes = []
    for step, batch in source:
        assert batch["index"].tolist() == source.indices(step)
        sizes.append(len(batch["index"]))
        if step == 3:
            follow_shape(worker_of(3, 0))
            assert renew_batch(batch)["index"].tolist() == source.indices(3), "that of the place that it has now"
    assert sizes == [6, 6, 6, 4, 4, 4]


@pytest.mark.processes
def test_a_loader_of_the_scripts_own_can_have_the_batches_indices() -> None:
    source = Batches(Slow(), global_batch=4, first_step=3, last_step=9)
    steps = range(3, 10)
    loader: DataLoader[Any] = DataLoader(Slow(), batch_sampler=[source.indices(step) for step in steps], num_workers=2)
    found = [batch["index"].tolist() for batch in loader]
    assert found == [batch["index"].tolist() for _, batch in source]


def test_a_script_that_is_inspected_has_its_own_global_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    inspected = replace(worker_of(1, 0), mode=Mode.INSPECT, plan=Plan(p=1, d=1, micro_batch=1, global_batch=1))
    monkeypatch.setattr("varuna.data.batches.read_process_environment", lambda: inspected)
    assert Batches(Slow(), global_batch=64).global_batch == 64
    assert Batches(Slow()).global_batch == 1


def test_a_batch_follows_its_process_through_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the next batch, which the script has fetched already, however often the one before is made again. The script
    has the dict that it got first, and gives it again, to evaluate() say."""
    monkeypatch.setattr("varuna.data.batches.read_process_environment", lambda: worker_of(3, 0))
    source = Batches(Numbers(), first_step=4)
    given = source.batch(4)
    batch: Mapping[str, Any] = given
    following = source.batch(5)
    for replicas, replica in ((2, 1), (3, 2), (1, 0)):
        follow_shape(worker_of(replicas, replica))
        batch = renew_batch(batch)
        assert batch["number"].tolist() == source.indices(4)
        assert renew_batch(given) is batch
        assert find_recent_batch(batch) == find_recent_batch(given) is not None
    assert len(batch["number"]) == 12
    assert renew_batch(following)["number"].tolist() == source.indices(5)


class Moving(Numbers):
    """While it is read, its process goes on in another shape, as it may where a thread of the script makes batches."""

    def __getitem__(self, index: int) -> dict[str, int]:
        follow_shape(worker_of(3, 0))
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_was_begun_in_the_shape_before_is_made_again(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_here(
        dataset: Moving, indices: Iterable[list[int]], collate: Callable[[list[Any]], Any], **_: object
    ) -> Iterator[Any]:
        for those in indices:
            yield collate([dataset[index] for index in those])

    monkeypatch.setattr("varuna.data.batches.read_process_environment", lambda: worker_of(2, 1))
    monkeypatch.setattr("varuna.data.batches.prefetch_batches", read_here)  # for `workers`
    source = Batches(Moving(), workers=workers)
    expected = source.indices(1)
    _, batch = next(iter(source))
    assert batch["number"].tolist() == expected
    assert renew_batch(batch)["number"].tolist() == source.indices(1) != expected


def test_a_batch_follows_its_process_to_another_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("varuna.data.batches.read_process_environment", lambda: worker_of(2, 1, (5, 1)))
    source = Batches(Numbers(), first_step=4)
    batch: Mapping[str, Any] = source.batch(4)
    sizes = [len(batch["number"])]
    for shares in ((1, 5), (), (3, 3)):
        follow_shape(worker_of(2, 1, shares))
        batch = renew_batch(batch)
        assert batch["number"].tolist() == source.indices(4)
        sizes.append(len(batch["number"]))
    assert sizes == [2, 10, 6, 6]


def test_examples_of_the_global_batch_are_fetched_by_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("varuna.data.batches.read_process_environment", lambda: worker_of(3, 1))
    set_resume_point(ResumePoint(3, 40))
    source = Batches(Numbers(), first_step=4, seed=5)
    set_resume_point(None)
    whole_batch = [index for replica in range(3) for index in _indices_in(source, 3, replica)]
    batch = source.batch(4)
    assert whole_batch[4:8] == batch["number"].tolist()
    recent = find_recent_batch(batch)
    assert recent is not None
    fetched = recent.fetch_examples([range(10, 12), range(2), range(5, 6)])
    assert fetched["number"].tolist() == [*whole_batch[10:12], *whole_batch[:2], whole_batch[5]]


def test_a_batch_stays_known_whatever_others_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script has the next batch, perhaps, and evaluates with those of others before it gives that to `step`."""
    monkeypatch.setattr("varuna.data.batches.read_process_environment", lambda: worker_of(2, 1))
    source, others = Batches(Numbers()), Batches(Numbers(), seed=1)
    first, second = source.batch(1), source.batch(2)
    for step in range(1, 4):
        assert find_recent_batch(others.batch(step)) is not None
    assert find_recent_batch(first) is not None
    recent = find_recent_batch(second)
    assert recent is not None
    source.batch(3)
    assert find_recent_batch(first) is None, "only one may be made ahead"
    follow_shape(worker_of(3, 0))
    assert recent.renew()["number"].tolist() == source.indices(2)


def mask_labels(batch: dict[str, Any]) -> None:
    batch["number"][0] = -100


def mask_a_view(batch: dict[str, Any]) -> None:
    batch["number"].unsqueeze(0)[:, 1:] = -100


def add_labels(batch: dict[str, Any]) -> None:
    batch["labels"] = batch["number"]


def replace_labels(batch: dict[str, Any]) -> None:
    batch["number"] = batch["number"] + 1


def change_type(batch: dict[str, Any]) -> None:
    batch["number"] = batch["number"].float()


def mask_before_a_copy(batch: dict[str, Any]) -> None:
    batch["number"].neg_()
    batch["number"] = batch["number"].clone()


def change_nested(batch: dict[str, Any]) -> None:
    batch["nested"]["numbers"][0] = batch["number"]


def append_nested(batch: dict[str, Any]) -> None:
    batch["nested"]["numbers"].append(batch["number"])


def fill_gaps(batch: dict[str, Any]) -> None:
    batch["nested"]["gaps"] = batch["nested"]["gaps"].nan_to_num()


class Nested(Numbers):
    """Its batches have a list of tensors, too, and NaN where a value is missing."""

    @staticmethod
    def collate(items: list[dict[str, int]]) -> dict[str, Any]:
        numbers = torch.tensor([item["number"] for item in items])
        nested = {"numbers": [numbers + 1], "gaps": torch.full([len(items)], math.nan)}
        return {"number": numbers, "id": [str(item["number"]) for item in items], "nested": nested}


@pytest.mark.parametrize(
    "change",
    [
        mask_labels,
        mask_a_view,
        add_labels,
        replace_labels,
        change_type,
        mask_before_a_copy,
        change_nested,
        append_nested,
        fill_gaps,
    ],
)
def test_a_batch_that_the_script_has_changed_is_not_known(
    change: Callable[[dict[str, Any]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made again, for another share say, it would be without the change."""
    monkeypatch.setattr("varuna.data.batches.read_process_environment", lambda: worker_of(2, 1))
    source = Batches(Nested(), collate=Nested.collate)
    first, second = source.batch(1), source.batch(2)
    change(first)
    assert find_recent_batch(first) is None
    assert find_recent_batch(second) is not None
    follow_shape(worker_of(3, 0))
    renew_batch(second)
    change(second)
    assert find_recent_batch(second) is None, "whatever it has been made again for"


def copy_tensors(batch: dict[str, Any]) -> None:
    batch["number"] = batch["number"].to(torch.int64, copy=True)


def put_the_same(batch: dict[str, Any]) -> None:
    batch.update(dict(batch))
    batch["nested"] = {**batch["nested"], "numbers": list(batch["nested"]["numbers"])}


def copy_gaps(batch: dict[str, Any]) -> None:
    batch["nested"]["gaps"] = batch["nested"]["gaps"].clone()


@pytest.mark.parametrize("change", [copy_tensors, put_the_same, copy_gaps])
def test_a_batch_whose_tensors_the_script_has_moved_is_known(
    change: Callable[[dict[str, Any]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("varuna.data.batches.read_process_environment", lambda: worker_of(2, 1))
    source = Batches(Nested(), collate=Nested.collate)
    batch = source.batch(1)
    change(batch)
    assert renew_batch(batch) is batch
    follow_shape(worker_of(3, 0))
    assert renew_batch(batch)["number"].tolist() == source.indices(1)


def test_what_the_script_takes_out_of_a_batch_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model would not know it."""
    monkeypatch.setattr("varuna.data.batches.read_process_environment", lambda: worker_of(2, 1))
    source = Batches(Nested(), collate=Nested.collate)
    batch = source.batch(1)
    batch.pop("id")
    recent = find_recent_batch(batch)
    assert recent is not None
    assert recent.fetch_examples([range(3)]).keys() == batch.keys()
    follow_shape(worker_of(3, 0))
    assert recent.renew().keys() == {"number", "nested"}
    batch.pop("nested")
    assert renew_batch(batch).keys() == {"number"}


def test_tensors_that_have_no_version_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("varuna.data.batches.read_process_environment", lambda: worker_of(2, 1))
    source = Batches(Nested(), collate=Nested.collate)
    with torch.inference_mode():
        batch = source.batch(1)
    assert find_recent_batch(batch) is not None


def test_batches_of_which_the_script_keeps_nothing_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("varuna.data.batches.read_process_environment", lambda: worker_of(2, 1))
    source = Batches(Numbers())
    source.batch(1)
    reference = weakref.ref(source)
    del source
    assert reference() is None


def test_a_batch_is_found_while_another_thread_makes_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("varuna.data.batches.read_process_environment", lambda: worker_of(2, 1))
    source = Batches(Numbers())
    done = threading.Event()

    def make() -> None:
        while not done.is_set():
            source.batch(1)

    before = sys.getswitchinterval()
    thread = threading.Thread(target=make)
    thread.start()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20_000):
            assert find_recent_batch({}) is None
    finally:
        sys.setswitchinterval(before)
        done.set()
        thread.join()


def _indices_in(source: Batches, replicas: int, replica: int) -> list[int]:
    place = source._place
    source._place = place._replace(replicas=replicas, replica=replica)
    indices = source.indices(4)
    source._place = place
    return indices
