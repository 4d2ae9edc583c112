"""Tensors over one connection and over several, between threads as ranks, over real gloo groups."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore, PrefixStore

from varuna.distributed import link_connections
from varuna.distributed.departure import Departure
from varuna.distributed.gloo import GlooGroup, connect_group
from varuna.distributed.group_sockets import list_sockets, shut_down_sockets
from varuna.distributed.link_connections import WHOLE_BYTES, Connection, cut_tensor, make_connection
from varuna.pipeline.transport import LinkReceiver, LinkSender, MessageTensor
from waiting import DEADLINE_S, wait_until

LIMIT = timedelta(seconds=DEADLINE_S)
LARGE = WHOLE_BYTES // 4 + 7
"""Values of float32 that are cut."""


def connect_groups(rank: int, store: HashStore, count: int) -> list[GlooGroup]:
    return [
        connect_group(PrefixStore(str(number), store), rank, 2, address="127.0.0.1", timeout=LIMIT)
        for number in range(count)
    ]


def connect(count: int) -> list[Connection]:
    """Both ends of a connection over so many groups, by rank."""
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda rank: connect_groups(rank, store, count), range(2)))
    return [make_connection(groups, 1 - rank) for rank, groups in enumerate(made)]


def make_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 2, tuple(shape)).to(dtype)


def carry(ends: Sequence[Connection], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What arrives of tensors that are all sent before one is waited for, the last one first."""
    received = [torch.empty_like(tensor) for tensor in tensors]
    receives = [ends[1].start_receiving(tensor, tag) for tag, tensor in reversed(list(enumerate(received)))]
    sends = [ends[0].start_sending(tensor, tag) for tag, tensor in enumerate(tensors)]
    for transfer in (*sends, *receives):
        transfer.wait(LIMIT)
    return received


@given(
    shape=st.lists(st.integers(0, 7), max_size=3),
    dtype=st.sampled_from([torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex64]),
    count=st.integers(1, 9),
)
def test_pieces_are_views_of_all_bytes(shape: list[int], dtype: torch.dtype, count: int) -> None:
    tensor = make_tensor(shape, dtype)
    pieces = cut_tensor(tensor, count)
    sizes = [piece.nbytes for piece in pieces]
    assert len(pieces) == count
    assert sum(sizes) == tensor.nbytes
    assert max(sizes) - min(sizes) <= 1
    assert [piece.data_ptr() for piece in pieces if piece.nbytes] == [
        tensor.data_ptr() + sum(sizes[:number]) for number, size in enumerate(sizes) if size
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_tensors_of_any_size_arrive_as_they_were(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = connect(count)
    shapes: list[tuple[int, ...]] = [(LARGE,), (3,), (0, 5), (), (LARGE // 3, 3), (1,), (2, LARGE)]
    tensors = [make_tensor(shape, dtype) for shape in shapes for dtype in (torch.float32, torch.bool)]
    for whole_bytes in (WHOLE_BYTES, 0):
        monkeypatch.setattr(link_connections, "WHOLE_BYTES", whole_bytes)
        for sent, received in zip(tensors, carry(ends, tensors), strict=True):
            assert torch.equal(sent, received)


def test_messages_of_several_tensors_arrive_in_their_order() -> None:
    ends, departure = connect(3), Departure(lambda code: None)
    sender = LinkSender(ends[0], peer=1, departure=departure)
    receiver = LinkReceiver(ends[1], peer=0, pinned=False, departure=departure)
    messages = [[torch.full((LARGE,), float(n)), torch.full((n % 2 * 3,), float(n))] for n in range(8)]
    for message in messages:
        receiver.post_receive([MessageTensor(tuple(tensor.shape), tensor.dtype) for tensor in message])
        sender.send_message(message)
    departure.wait_until(lambda: receiver.arrived == len(messages))
    sender.wait_until_sent()
    assert not sender.is_sending
    for number, message in enumerate(messages):
        received = receiver.take_message(number, torch.device("cpu"))
        assert all(map(torch.equal, message, received))


def test_what_is_under_way_fails_when_the_peer_is_gone() -> None:
    before = list_sockets()
    ends = connect(3)
    sockets = list_sockets() - before
    sending = ends[0].start_sending(torch.zeros(LARGE), 0)
    receiving = ends[0].start_receiving(torch.zeros(LARGE), 0)
    assert isinstance(sending, link_connections._PiecewiseTransfer)
    for piece in sending._pieces[1:]:
        assert isinstance(piece, link_connections._HandedTransfer)
        piece._started.result(DEADLINE_S)  # what gloo gets while a connection breaks may never end
    shut_down_sockets(sockets)
    for transfer in (sending, receiving):
        with pytest.raises(RuntimeError, match=r"Connection (closed|reset)"):
            transfer.wait(LIMIT)


def test_a_connection_ends_its_threads() -> None:
    ends = connect(3)
    carry(ends, [torch.zeros(LARGE)])
    for end in ends:
        assert isinstance(end, link_connections.ParallelConnections)
        end.end()
    threads = [caller._thread for end in ends for caller in end._callers if caller._thread is not None]  # type: ignore[attr-defined]
    assert threads
    assert all(thread.daemon for thread in threads), "the interpreter does not wait for one that gloo keeps"
    wait_until(lambda: not any(thread.is_alive() for thread in threads), "its threads' end")
