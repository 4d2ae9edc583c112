"""A rank that cannot reach another reports its number before it leaves."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import NoReturn

import pytest
from torch._C._distributed_c10d import HashStore

from varuna.distributed import reach, rendezvous
from varuna.distributed.departure import Departure, PeerLost
from varuna.distributed.presence import RankPresence
from varuna.distributed.reach import ReachablePort, UnreachedError
from varuna.distributed.rendezvous import Rendezvous
from varuna.distributed.worker_environment import read_worker_environment
from varuna_proto.environment import WorkerEnvironment

HOST = "127.0.0.1"


@pytest.fixture
def silent_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port from which nothing comes back, as over a broken link: its queue is full, and packets are dropped."""
    for module, name in ((reach, "_ATTEMPT_S"), (rendezvous, "STORE_REACH_S")):
        monkeypatch.setattr(module, name, 0.3)
    monkeypatch.setattr("varuna.distributed.presence._CONNECT_S", 0.3)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((HOST, 0), backlog=0))
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port at which nobody listens, held so that no other process can."""
    with socket.socket() as held:
        held.bind((HOST, 0))
        yield held.getsockname()[1]


def environment_of_two(rank: int, rendezvous_port: int) -> WorkerEnvironment:
    alone = read_worker_environment({})
    return replace(
        alone,
        rank=rank,
        world_size=2,
        plan=replace(alone.plan, d=2),
        rendezvous_host=HOST,
        rendezvous_port=rendezvous_port,
    )


class Leaving:
    """A rank's departure, and the ranks that it has reported as unreached."""

    def __init__(self) -> None:
        self.unreached: list[int] = []
        self.departure = Departure(lambda code: None, grace_s=0.0)
        self.departure.set_unreached_callback(lambda rank, reason: self.unreached.append(rank))


def test_ranks_that_are_up_reach_each_other() -> None:
    store = HashStore()
    ports = [ReachablePort(store, rank, 3, HOST) for rank in range(3)]
    for rank, port in enumerate(ports):
        port.check_reachable(peer for peer in range(3) if peer != rank)


def test_a_rank_that_is_up_and_out_of_reach_is_named(silent_port: int) -> None:
    store = HashStore()
    own = ReachablePort(store, 0, 3, HOST)
    store.set("reach/2", f"{HOST} {silent_port}")
    with pytest.raises(UnreachedError, match=r"rank 2 cannot be reached from here: 127.0.0.1: timed out"):
        own.check_reachable([2])


def test_a_rank_that_has_ended_is_not_out_of_reach(closed_port: int) -> None:
    store = HashStore()
    own = ReachablePort(store, 0, 2, HOST)
    store.set("reach/1", f"{HOST} {closed_port}")
    own.check_reachable([1])


@pytest.mark.long
def test_a_worker_that_does_not_reach_rank_0_reports_that_and_leaves(silent_port: int) -> None:
    leaving = Leaving()
    with pytest.raises(PeerLost, match="76") as left:
        Rendezvous(environment_of_two(1, silent_port), leaving.departure)
    assert left.value.reason == "rank 0 cannot be reached from here: 127.0.0.1: timed out"
    assert leaving.unreached == [0]


def test_a_ranks_address_stays_when_rank_0s_name_no_longer_resolves(
    closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    joined = Rendezvous(environment_of_two(0, closed_port), Leaving().departure)
    monkeypatch.setattr(rendezvous, "address_towards", fail)
    assert joined.own_address() == HOST
    joined.end(links_ended=True)


def test_a_worker_that_gets_no_port_leaves_and_its_script_has_not_failed(
    closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "ReachablePort", fail_for_descriptors)
    with pytest.raises(PeerLost) as left:
        Rendezvous(environment_of_two(0, closed_port), Leaving().departure)
    assert str(left.value.reason).endswith("[Errno 24] Too many open files")
    monkeypatch.setattr(socket, "create_server", fail_for_descriptors)
    with pytest.raises(PeerLost) as left:
        RankPresence.join_generation(0, 2, HashStore(), address=HOST, departure=Leaving().departure)
    assert left.value.reason == "rank 0 gets no port for the others: [Errno 24] Too many open files"


def fail_for_descriptors(*_: object, **__: object) -> NoReturn:
    raise OSError(24, "Too many open files")


@pytest.mark.parametrize("answers", [True, False])
def test_rank_0_that_has_ended_is_gone_and_not_out_of_reach(answers: bool, silent_port: int, closed_port: int) -> None:
    leaving, store = Leaving(), HashStore()
    store.set("presence", f"token {closed_port if answers else silent_port} {HOST}")
    with pytest.raises(PeerLost):
        RankPresence.join_generation(1, 2, store, address=HOST, departure=leaving.departure)
    assert leaving.unreached == ([] if answers else [0])
