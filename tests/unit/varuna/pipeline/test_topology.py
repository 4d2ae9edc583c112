"""Which rank does what, by the arguments of the launcher and of the script."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import varuna
from varuna.devices.worker_device import choose_device
from varuna.distributed.topology import Topology, place_in_batch, share_of_batch, stage_sections, tied_over_stages
from varuna.distributed.worker_environment import (
    get_this_rank_config_varuna,
    get_varuna_config,
    read_worker_environment,
)
from varuna_proto.environment import Mode, WorkerEnvironment
from varuna_proto.plan import Plan


def environment(
    *, p: int = 2, d: int = 2, batch: int = 8, m: int = 2, device: str = "cpu", shares: tuple[int, ...] = ()
) -> WorkerEnvironment:
    return WorkerEnvironment(
        job_id="j",
        generation=3,
        mode=Mode.TRAIN,
        rank=1,
        local_rank=1,
        world_size=p * d,
        rendezvous_host="127.0.0.1",
        rendezvous_port=1,
        plan=Plan(p=p, d=d, micro_batch=m, global_batch=batch, shares=shares),
        device=device,
    )


def test_the_public_surface() -> None:
    assert varuna.__all__ == [
        "CutPoint",
        "GenerationEnded",
        "PeerLost",
        "Profiler",
        "Varuna",
        "data",
        "describe_sections",
        "get_this_rank_config_varuna",
        "get_varuna_config",
        "log",
        "opaque",
    ]


@settings(deadline=None)
@given(p=st.integers(1, 5), d=st.integers(1, 5))
def test_the_map_and_the_topology_agree(p: int, d: int) -> None:
    text = environment(p=p, d=d, batch=64).stage_to_rank_map
    assert get_varuna_config(text) == (p, d)
    for rank in range(p * d):
        topology = Topology(p, d, rank)
        assert get_this_rank_config_varuna(text, rank) == (topology.stage, topology.replica)
        assert rank in topology.ranks_of([topology.stage])
    assert Topology(p, d, 0).ranks_of(range(p)) == Topology(p, d, 0).everyone


def test_a_rank_that_is_not_in_the_map() -> None:
    with pytest.raises(ValueError, match="rank 4 is not in"):
        get_this_rank_config_varuna("0,2;1,3", 4)


@settings(deadline=None)
@given(data=st.data(), p=st.integers(1, 6))
def test_sections_are_spread_over_all_stages(data: st.DataObject, p: int) -> None:
    count = data.draw(st.integers(p, 20))
    stages = stage_sections((), p, count)
    assert [section for stage in stages for section in stage] == list(range(count))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1
    assert stage_sections([stage.start for stage in stages], p, count) == stages


@pytest.mark.parametrize(("starts", "p"), [((0, 0), 2), ((1, 2), 2), ((0, 4), 2), ((0,), 2), ((), 5)])
def test_stages_that_do_not_fit_the_model(starts: tuple[int, ...], p: int) -> None:
    with pytest.raises(ValueError, match="section"):
        stage_sections(starts, p, 4)


@settings(deadline=None)
@given(batch=st.integers(1, 40), m=st.integers(1, 8), d=st.integers(1, 6))
def test_the_replicas_shares_make_up_the_batch(batch: int, m: int, d: int) -> None:
    launched = environment(d=d, batch=batch, m=m)
    if d > -(-batch // m):
        with pytest.raises(ValueError, match="micro-batch"):
            share_of_batch(m, launched, 0)
        return
    numbers: list[int] = []
    examples = 0
    for replica in range(d):
        # What `varuna.data` gives this replica: whole micro-batches, the very last one may be smaller.
        count = -(-batch // m)
        share, more = divmod(count, d)
        local = range(replica * share + min(replica, more), (replica + 1) * share + min(replica + 1, more))
        sizes, first = share_of_batch(min(local.stop * m, batch) - local.start * m, launched, replica)
        numbers.extend(range(first, first + len(sizes)))
        examples += sum(sizes)
    assert numbers == list(range(-(-batch // m)))
    assert examples == batch


@settings(deadline=None)
@given(shares=st.lists(st.integers(1, 5), min_size=1, max_size=6), m=st.integers(2, 8), data=st.data())
def test_a_plans_shares_make_up_the_batch(shares: list[int], m: int, data: st.DataObject) -> None:
    batch = m * sum(shares) - data.draw(st.integers(0, m - 1))
    launched = environment(p=1, d=len(shares), batch=batch, m=m, shares=tuple(shares))
    numbers: list[int] = []
    for replica, share in enumerate(shares):
        examples = min((len(numbers) + share) * m, batch) - len(numbers) * m
        sizes, first = share_of_batch(examples, launched, replica)
        assert (len(sizes), sum(sizes), first) == (share, examples, len(numbers))
        numbers.extend(range(first, first + len(sizes)))
    assert numbers == list(range(sum(shares)))


def test_shares_that_are_not_those_of_the_replicas() -> None:
    with pytest.raises(ValueError, match=r"shares \[3, 2\] of 2 replicas: give 2 whole numbers"):
        share_of_batch(0, environment(shares=(3, 2)), 0)


def test_a_script_may_give_all_replicas_equally_many_examples_whatever_their_shares() -> None:
    """No two of their micro-batches have the same number, which random numbers belong to."""
    launched = environment(shares=(1, 3))
    assert [share_of_batch(4, launched, replica) for replica in range(2)] == [((2, 2), 0), ((2, 2), 2)]
    assert [share_of_batch(5, launched, replica) for replica in range(2)] == [((2, 2, 1), 0), ((2, 2, 1), 2)]


def test_another_number_of_examples_is_cut_as_well() -> None:
    assert share_of_batch(5, environment(), 1) == ((2, 2, 1), 2)
    assert share_of_batch(0, environment(), 1) == ((), 2)
    assert share_of_batch(5, read_worker_environment({}), 0) == ((5,), 0)


def test_weights_tied_within_a_stage_need_no_collective() -> None:
    stages = (range(2), range(2, 4), range(4, 5))
    assert tied_over_stages({"embedding": [0, 4], "norm": [2, 3], "all": [0, 2, 4]}, stages) == {
        "embedding": (0, 2),
        "all": (0, 1, 2),
    }


def test_without_a_launcher_it_is_one_process() -> None:
    alone = read_worker_environment({}, stage_to_rank_map="0", batch_size=8)
    assert (alone.plan.p, alone.plan.d, alone.plan.global_batch, alone.plan.micro_batch) == (1, 1, 8, 8)
    with pytest.raises(ValueError, match="not started by the varuna launcher"):
        read_worker_environment({}, stage_to_rank_map="0;1")


@pytest.mark.parametrize(
    "argument", [{"stage_to_rank_map": "0,1;2,3"}, {"batch_size": 9}, {"chunk_size": 3}], ids=lambda a: next(iter(a))
)
def test_arguments_that_contradict_the_launcher(argument: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(argument))}=.* contradicts the launcher"):
        read_worker_environment(environment().to_environ(), **argument)  # type: ignore[arg-type]


def test_arguments_that_say_what_the_launcher_says() -> None:
    launched = environment()
    given = read_worker_environment(launched.to_environ(), stage_to_rank_map="0,2;1,3", batch_size=8, chunk_size=2)
    assert given == launched


@pytest.mark.parametrize(
    ("kind", "asked", "local_rank", "chosen"),
    [
        ("cpu", -1, -1, "cpu"),
        ("cpu", 3, 3, "cpu"),
        ("cuda", -1, -1, "cuda:1"),
        ("cuda", None, 2, "cuda:2"),
        ("cuda", 3, 2, "cuda:3"),
        ("cuda", torch.device("cuda", 3), -1, "cuda:3"),
        ("cuda:2", -1, -1, "cuda:2"),
    ],
)
def test_the_device(kind: str, asked: int | torch.device | None, local_rank: int, chosen: str) -> None:
    assert choose_device(environment(device=kind), asked, local_rank) == torch.device(chosen)


def test_a_device_of_another_kind() -> None:
    with pytest.raises(ValueError, match="launcher gave this worker a 'cpu' device"):
        choose_device(environment(), "cuda:0", -1)


@settings(deadline=None)
@given(shares=st.lists(st.integers(1, 5), min_size=1, max_size=6), m=st.integers(1, 8), data=st.data())
def test_the_examples_of_a_planned_batch_have_their_places_in_it(
    shares: list[int], m: int, data: st.DataObject
) -> None:
    batch = m * sum(shares) - data.draw(st.integers(0, m - 1))
    launched = environment(p=1, d=len(shares), batch=batch, m=m, shares=tuple(shares))
    start = 0
    for replica, share in enumerate(shares):
        examples = min(share * m, batch - start)
        assert place_in_batch(examples, launched, replica) == start
        start += examples


@settings(deadline=None)
@given(examples=st.integers(0, 40), d=st.integers(1, 5), m=st.integers(1, 3), n=st.integers(1, 5))
def test_replicas_with_equally_many_examples_have_distinct_places(examples: int, d: int, m: int, n: int) -> None:
    launched = environment(p=1, d=d, batch=d * n * m, m=m)
    starts = [place_in_batch(examples, launched, replica) for replica in range(d)]
    assert starts[0] == 0
    assert all(b - a >= examples for a, b in itertools.pairwise(starts))
    assert place_in_batch(examples, read_worker_environment({}), 0) == 0
