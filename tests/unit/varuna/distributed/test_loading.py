"""Ranks that have met wait for each other's loading as long as it takes; a rank that never comes is not waited for."""

from __future__ import annotations

import gc
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from varuna.checkpoint import TrainingState
from varuna.checkpoint.worker_checkpoints import WorkerCheckpoints
from varuna.distributed.departure import Departure, PeerLost
from varuna.distributed.groups import RankGroup
from varuna.distributed.rendezvous import LOADING_PATIENCE, Rendezvous
from varuna_proto.environment import WorkerEnvironment
from varuna_proto.plan import Plan
from waiting import DEADLINE_S, wait_until

HOST = "127.0.0.1"
SHORT = timedelta(seconds=0.05)

Joining = Callable[[int], Rendezvous]


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Iterator[Joining]:
    """Makes a rank of two, which is up and has a short time limit for its waits in the store."""
    monkeypatch.setattr("varuna.distributed.rendezvous_server._EXPIRY_CHECK_S", 0.01)
    made: list[Rendezvous] = []
    with socket.socket() as held:
        held.bind((HOST, 0))
        environment = replace(
            WorkerEnvironment.alone("job", micro_batch=1, global_batch=2),
            world_size=2,
            plan=Plan(p=1, d=2, micro_batch=1, global_batch=2),
            rendezvous_host=HOST,
            rendezvous_port=held.getsockname()[1],
            secret="5ec3e7" * 8,
        )

        def make(rank: int) -> Rendezvous:
            departure = Departure(lambda _: None, grace_s=0.0)
            departure.offer_to_stay(lambda _: True, str)
            made.append(Rendezvous(replace(environment, rank=rank), departure))
            store: Any = made[-1]._served
            store.set_timeout(SHORT)
            return made[-1]

        yield make
        for rank in made:
            rank.end(links_ended=True)


def is_waited_in(rank_0: Rendezvous) -> bool:
    """Whether a rank waits for a key in the store that `rank_0` serves."""
    server: Any = rank_0._server
    with suppress(RuntimeError):  # its thread changes the connections meanwhile
        return any(client.awaited_keys for client in server._clients.values())
    return False


def test_a_rank_that_loads_for_long_is_waited_for(join: Joining) -> None:
    ranks = [join(0), join(1)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ranks[0].wait_for_loading, (0, 1))
        wait_until(lambda: is_waited_in(ranks[0]) or waiting.done())
        long_s = time.monotonic() + 5 * SHORT.total_seconds()
        wait_until(lambda: time.monotonic() > long_s)
        assert not waiting.done()
        ranks[1].wait_for_loading((0, 1))
        waiting.result(DEADLINE_S)
    ranks[0].store.set("later", "value")
    assert ranks[1].store.get("later") == b"value"


def test_a_rank_that_reads_its_part_of_a_checkpoint_for_long_is_waited_for(join: Joining, tmp_path: Path) -> None:
    """The others, whose parts may lie on their own VMs, keep the patience that they have."""
    ranks = [join(0), join(1)]

    def resume(rank: Rendezvous) -> object:
        rank.wait_for_loading((0, 1))
        environment = replace(rank._environment, checkpoint_url=str(tmp_path))
        worker: Any = SimpleNamespace(
            environment=environment,
            rendezvous=rank,
            departure=rank._departure,
            link=SimpleNamespace(report_checkpoint=None),
        )
        checkpoints = WorkerCheckpoints(worker, RankGroup(None, (0, 1), rank._departure))
        state = TrainingState(sections=range(1), section_count=1, parameters={}, section_of={})
        try:
            return checkpoints.resume_newest(state, memory=None)
        finally:
            checkpoints.abandon_saves()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(resume, ranks, timeout=DEADLINE_S)) == [None, None]
    for rank in ranks:
        served: Any = rank._served
        assert served._limit == LOADING_PATIENCE


def test_a_rank_without_a_place_is_not_waited_for(join: Joining) -> None:
    """It is up, but the plan has no part of the model for it."""
    ranks = [join(0), join(1)]
    ranks[0].wait_for_loading((0,))


def test_a_rank_that_does_not_come_up_is_given_up(join: Joining) -> None:
    with pytest.raises(PeerLost) as lost:
        join(0).wait_for_loading((0, 1))
    assert "the ranks did not find each other" in lost.value.reason
    assert "no rank set" in lost.value.reason


def test_a_rank_that_leaves_waits_no_longer(join: Joining) -> None:
    ranks = [join(0), join(1)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ranks[0].wait_for_loading, (0, 1))
        wait_until(lambda: is_waited_in(ranks[0]))
        ranks[0]._departure.leave_generation(PeerLost("rank 1 has died while it loaded"))
        with pytest.raises(PeerLost) as lost:
            waiting.result(DEADLINE_S)
    assert lost.value.reason == "rank 1 has died while it loaded"


def test_a_thread_that_asks_the_store_of_an_ended_generation_learns_that_it_is_gone(join: Joining) -> None:
    """C++ has the store of a generation, but not the connection that Python has made for it."""
    rank = join(0)
    store = rank.store
    rank.end(links_ended=True)
    gc.collect()
    with pytest.raises(dist.DistError):
        store.set("key", "value")
