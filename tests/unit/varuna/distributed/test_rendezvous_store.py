"""One process's store, used by several of its threads at the same time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from varuna.distributed.handshake import MeetingKey
from varuna.distributed.rendezvous_server import RendezvousServer
from varuna.distributed.rendezvous_store import RendezvousStore
from waiting import DEADLINE_S, wait_until

HOST = "127.0.0.1"
THREADS = 8


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    key = MeetingKey.derive_key("5ec3e7" * 8, os.urandom(8).hex(), 1, host=HOST, port=1)
    server = RendezvousServer(HOST, key)
    made = RendezvousStore(HOST, key, timedelta(seconds=DEADLINE_S))
    yield made
    made.close()
    server.stop()


def test_a_wait_keeps_no_request_of_another_thread_waiting(store: RendezvousStore) -> None:
    """Each waits for what the next one sets when its own wait is over."""

    def pass_on(number: int) -> bytes:
        value = store.get(str(number))
        store.set(str(number + 1), value)
        return value

    with ThreadPoolExecutor(THREADS) as pool:
        passing = [pool.submit(pass_on, number) for number in reversed(range(THREADS))]
        wait_until(lambda: len(store._connections) == THREADS, "a wait in each thread")
        store.set("0", "from the first to the last")
        assert {each.result(DEADLINE_S) for each in passing} == {b"from the first to the last"}
        assert store.get(str(THREADS)) == b"from the first to the last"
    assert store.add("count", 1) == 1
    assert len(store._connections) <= THREADS + 1, "they are used again"


def test_all_requests_fail_once_it_is_shut_down(store: RendezvousStore) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        waiting = [pool.submit(store.get, "never") for _ in range(THREADS)]
        wait_until(lambda: len(store._connections) == THREADS, "a wait in each thread")
        store.shut_down()
        for each in waiting:
            with pytest.raises(dist.DistNetworkError, match="is gone"):
                each.result(DEADLINE_S)
    with pytest.raises(dist.DistNetworkError, match="it is shut down"):
        store.set("a", "b")
