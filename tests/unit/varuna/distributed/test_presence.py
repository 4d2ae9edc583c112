"""Each rank notices when another one's process has ended without a goodbye."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import struct
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from torch._C._distributed_c10d import HashStore

from varuna.distributed import presence
from varuna.distributed.calls import CallKind
from varuna.distributed.departure import Departure, GenerationEnded, PeerLost
from varuna.distributed.presence import RankPresence
from varuna.distributed.presence_messages import (
    ARE_YOU_THERE,
    HERE,
    PresenceMessage,
    pack_hello,
    pack_message,
    receive_message,
)
from varuna_proto.environment import EXIT_GENERATION_ENDED
from waiting import DEADLINE_S, wait_until

_SO_ATTACH_FILTER = 26
needs_linux = pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="a limit that only Linux has")


class Rank:
    """A rank, whose end is that its connections close, as the kernel closes those of a process."""

    def __init__(self, rank: int, store: HashStore) -> None:
        self.ended = threading.Event()
        self.is_dead = False
        self.departure = Departure(lambda _: self.ended.set(), grace_s=0.0)
        self.presence = RankPresence.join_generation(rank, 3, store, address="127.0.0.1", departure=self.departure)

    def die(self) -> None:
        self.is_dead = True
        self.presence._over = True  # here its thread lives on, and must tell nobody of the connections that end
        for connection in self.presence._sockets:
            connection.shutdown(socket.SHUT_RDWR)

    def reason(self) -> str:
        assert self.ended.wait(DEADLINE_S)
        with pytest.raises(PeerLost) as lost:
            self.departure.raise_if_leaving()
        return lost.value.reason


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    store = HashStore()
    ranks = [Rank(number, store) for number in range(3)]
    wait_for_all(ranks)
    yield ranks
    for rank in ranks:
        if not rank.is_dead:
            rank.presence.announce_leaving()


def wait_for_all(ranks: list[Rank]) -> None:
    """Waits until rank 0 has admitted all: a rank that comes later does not get its earlier messages."""
    ends = threading.Event()
    while len(ranks[0].presence._sockets) < 3 and not ends.wait(0.001):
        pass


def test_all_others_hear_of_a_rank_that_has_ended(ranks: list[Rank]) -> None:
    ranks[2].die()
    assert ranks[0].reason() == ranks[1].reason() == "rank 2 is gone: its process has ended"


def test_all_hear_when_the_rank_that_tells_the_others_has_ended(ranks: list[Rank]) -> None:
    ranks[0].die()
    assert ranks[1].reason() == ranks[2].reason() == "rank 0 is gone: its process has ended"


def test_who_says_goodbye_is_not_lost(ranks: list[Rank]) -> None:
    ranks[1].presence.announce_leaving()
    ranks[1].die()
    ranks[2].die()  # comes after the goodbye, because rank 0 reads both in one thread
    assert ranks[0].reason() == "rank 2 is gone: its process has ended"


def test_rank_0_ends_while_another_rank_says_goodbye(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has listed whom it tells that its script is over, and forgets one of them before it tells the others."""
    serving = ranks[0].presence
    send, told = serving._send_message, list[int]()

    def send_and_forget(connection: socket.socket, message: PresenceMessage) -> None:
        if message.kind == CallKind.END.value:
            told.append(message.kind)
            serving._forget_rank(2)  # type: ignore[attr-defined]  # its goodbye, which another thread receives
        send(connection, message)

    monkeypatch.setattr(serving, "_send_message", send_and_forget)
    ranks[2].presence._over = True
    serving._calls.announce_end()
    assert told == [CallKind.END.value], "rank 1 is told, and rank 2 has ended"
    assert serving._end_known.wait(DEADLINE_S)


@pytest.mark.parametrize(("ending", "dying"), [(1, 0), (0, 2), (1, 2)])
def test_a_rank_whose_script_is_over_loses_nothing_with_another(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch, ending: int, dying: int
) -> None:
    """It ends with the code of its script, however late it notices that all know of that."""
    announced = threading.Event()
    monkeypatch.setattr(ranks[0].presence, "_pass_on", lambda *call: announced.set())
    is_noticed = threading.Event()
    monkeypatch.setattr(ranks[ending].presence._end_known, "wait", is_noticed.wait)
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(ranks[ending].presence.announce_leaving)
        assert announced.wait(DEADLINE_S)
        ranks[dying].die()
        staying = ({0, 1, 2} - {ending, dying}).pop()
        assert ranks[staying].reason() == f"rank {dying} is gone: its process has ended"
        is_noticed.set()
        leaving.result(DEADLINE_S)
    assert ranks[ending].departure.exit_code is None


def test_leaving_a_generation_that_is_over_is_a_goodbye_and_leaving_for_a_lost_peer_is_none(ranks: list[Rank]) -> None:
    ranks[1].departure.leave_generation(GenerationEnded("asked to leave"))
    ranks[1].presence.announce_leaving()
    ranks[1].die()
    ranks[2].departure.leave_generation(PeerLost("rank 7 is gone"))
    ranks[2].presence.announce_leaving()
    ranks[2].die()
    assert ranks[0].reason() == "rank 2 is gone: its process has ended"


@pytest.mark.parametrize("code", [0, EXIT_GENERATION_ENDED])
def test_a_rank_without_a_place_ends_as_rank_0_does(ranks: list[Rank], code: int) -> None:
    if code == EXIT_GENERATION_ENDED:
        ranks[0].departure.leave_generation(GenerationEnded("asked to leave"))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ranks[2].presence.wait_for_training)
        ranks[0].presence.announce_leaving()
        assert waiting.result(DEADLINE_S) == code


def test_a_rank_without_a_place_leaves_unnoticed_when_it_is_asked_to(ranks: list[Rank]) -> None:
    ranks[2].departure.request_save_first()
    assert ranks[2].presence.wait_for_training() == EXIT_GENERATION_ENDED
    ranks[2].die()
    ranks[1].die()  # comes after the goodbye
    assert ranks[0].reason() == "rank 1 is gone: its process has ended"


def test_a_rank_without_a_place_leaves_with_the_others_after_a_loss(ranks: list[Rank]) -> None:
    ranks[1].die()
    with pytest.raises(PeerLost):
        ranks[2].presence.wait_for_training()


@pytest.mark.parametrize("leaving", [0, 2])
def test_a_rank_that_stays_for_the_next_generation_is_not_suspected(ranks: list[Rank], leaving: int) -> None:
    """The others of its replica keep working, because it has left nothing undone."""
    departure = ranks[leaving].departure
    departure.offer_to_stay(lambda exit_: True, str)

    def work() -> None:
        with ranks[1].departure.finish_first({leaving}, 60):
            departure.leave_generation(PeerLost("rank 7 is gone"))
            wait_until(lambda: ranks[1].departure.is_deferred, "the news")
            ranks[1].departure.raise_if_leaving()

    with pytest.raises(PeerLost):
        work()
    assert ranks[1].reason() == f"rank {leaving} has left"


@pytest.mark.parametrize("leaving", [0, 2])
def test_nothing_is_kept_of_a_rank_that_has_left_for_the_next_generation(
    ranks: list[Rank], leaving: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process may leave many generations, and what knows the rank's departure knows its copies of states."""
    monkeypatch.setattr(presence, "_LEFT_WAIT_S", DEADLINE_S)
    rank, ranks[leaving].is_dead = ranks[leaving], True
    rank.departure.offer_to_stay(lambda exit_: True, str)
    rank.departure.leave_generation(GenerationEnded("asked to leave"))
    rank.presence.close()
    kept = [weakref.ref(rank.presence), weakref.ref(rank.departure)]
    del rank.presence, rank.departure
    gc.collect()
    assert [one() for one in kept] == [None, None]


def test_a_rank_is_lost_while_others_finish_their_work(ranks: list[Rank]) -> None:
    """They notice a second loss, too."""

    def work() -> None:
        with ranks[1].departure.finish_first({0}, 60), ranks[0].departure.finish_first({1}, 60):
            ranks[2].die()
            wait_until(lambda: ranks[1].departure.is_deferred and ranks[0].departure.is_deferred, "the first loss")
            for connection in ranks[0].presence._sockets[1:]:
                with suppress(OSError):  # one is closed
                    connection.shutdown(socket.SHUT_RDWR)
            wait_until(lambda: ranks[1].departure.exit_code is not None, "the second loss")
            ranks[1].departure.raise_if_leaving()

    with pytest.raises(PeerLost):
        work()


def test_strangers_are_turned_away(ranks: list[Rank]) -> None:
    listener = ranks[0].presence._sockets[0]
    with socket.create_connection(listener.getsockname(), DEADLINE_S) as stranger:
        stranger.sendall(b"x" * 37)
        assert stranger.recv(1) == b""
    ranks[2].die()
    assert ranks[0].reason() == "rank 2 is gone: its process has ended"


@pytest.mark.slow
def test_strangers_who_say_little_keep_no_news_back(ranks: list[Rank]) -> None:
    listener = ranks[0].presence._sockets[0]
    strangers = [socket.create_connection(listener.getsockname(), DEADLINE_S) for _ in range(40)]
    for stranger in strangers:
        stranger.sendall(b"x")  # and no more: a wait of a second for each would keep rank 0 from reading anything else
    ranks[2].die()
    assert ranks[0].reason() == ranks[1].reason() == "rank 2 is gone: its process has ended"
    for stranger in strangers:
        stranger.close()


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # of Python 3.12, about threads
def test_a_forked_child_keeps_no_connection(ranks: list[Rank]) -> None:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, bytes([connection.fileno() == -1 for connection in ranks[1].presence._sockets]))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read_end, 8) == b"\x01"
    assert all(connection.fileno() != -1 for connection in ranks[1].presence._sockets)


def test_a_rank_0_that_is_not_there_is_a_lost_peer() -> None:
    store, departure = HashStore(), Departure(lambda _: None)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen: no other process can, either
        store.set("presence", f"{'0' * 32} {held.getsockname()[1]} 127.0.0.1")
        with pytest.raises(PeerLost):
            RankPresence.join_generation(1, 2, store, address="127.0.0.1", departure=departure)


# ---------------------------------------------------------------- who answers a rank that waits


class SilentRank:
    """Stands in the place of a rank on a machine that stands still: its connection is open, and nothing is read."""

    def __init__(self, store: HashStore, rank: int) -> None:
        token, port, host = store.get("presence").decode().split()
        self.connection = socket.create_connection((host, int(port)), DEADLINE_S)
        self.connection.sendall(token.encode() + pack_hello(rank))

    def answer(self) -> None:
        """It goes on, and reads what it was asked."""
        message = receive_message(self.connection)
        assert message is not None
        assert message.kind == ARE_YOU_THERE
        self.connection.sendall(pack_message(PresenceMessage(HERE, 2)))


def test_a_rank_that_waits_hears_who_does_not_answer() -> None:
    store, reports = HashStore(), list[tuple[int, ...]]()
    waiting, other = (Rank(number, store) for number in (0, 1))
    silent = SilentRank(store, 2)
    wait_for_all([waiting])
    roll_call = waiting.presence.make_roll_call(reports.append)
    roll_call.begin()
    # On a busy machine a sound rank is quiet for a moment, too.
    wait_until(lambda: reports[-1:] == [(2,)], "the report of the silent rank, and of no other")
    assert all(2 in quiet for quiet in reports)
    silent.answer()
    wait_until(lambda: any(2 not in quiet for quiet in reports), "the report that it has answered")
    roll_call.end()
    with silent.connection:
        waiting.presence._over = other.presence._over = True


def test_rank_0_is_asked_by_the_others_and_after_the_wait_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    store, reports = HashStore(), list[tuple[int, ...]]()
    serving = Rank(0, store)
    waiting = Rank(1, store)
    SilentRank(store, 2)
    wait_for_all([serving])
    answers = threading.Event()
    # Its machine stands still.
    monkeypatch.setattr(serving.presence, "_take_part_in_roll_call", lambda *_: answers.wait(DEADLINE_S))
    roll_call = waiting.presence.make_roll_call(reports.append)
    roll_call.begin()
    wait_until(lambda: reports == [(0,)], "the report of rank 0")
    roll_call.end()
    answers.set()
    assert reports == [(0,)]
    waiting.presence._over = serving.presence._over = True


# ---------------------------------------------------------------- networks that are cut


def drop_arriving(connection: socket.socket) -> None:
    """From now on nothing arrives at this end, not even for the kernel to acknowledge: a filter drops all packets."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    program = struct.pack("HP", 1, ctypes.addressof(drop_all))
    connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def record_unreached(rank: Rank) -> list[tuple[int, str]]:
    unreached = list[tuple[int, str]]()
    rank.departure.set_unreached_callback(lambda number, reason: unreached.append((number, reason)))
    return unreached


@pytest.fixture
def brief_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presence._SILENCE_LIMITS, "TCP_USER_TIMEOUT", 400)


@needs_linux
@pytest.mark.usefixtures("brief_patience")
def test_a_rank_whose_machine_acknowledges_nothing_is_out_of_reach_and_a_stopped_one_is_not() -> None:
    """Both are asked at the same moment, and neither answers. The kernel takes in what a stopped process is sent."""
    store = HashStore()
    waiting = Rank(0, store)
    unreached = record_unreached(waiting)
    stopped, cut_off = SilentRank(store, 1), SilentRank(store, 2)
    wait_for_all([waiting])
    drop_arriving(cut_off.connection)
    roll_call = waiting.presence.make_roll_call(lambda _: None)
    roll_call.begin()
    reason = waiting.reason()
    roll_call.end()
    assert reason.startswith("rank 2 cannot be reached from here: ")
    assert unreached == [(2, reason)]
    assert set(waiting.presence._list_askable()) == {1}
    with stopped.connection, cut_off.connection:
        waiting.presence._over = True


@needs_linux
@pytest.mark.usefixtures("brief_patience")
def test_rank_0_is_out_of_reach_when_its_machine_acknowledges_nothing() -> None:
    store = HashStore()
    serving, waiting = Rank(0, store), Rank(1, store)
    unreached = record_unreached(waiting)
    connections: dict[int, socket.socket] = serving.presence._connections  # type: ignore[attr-defined]
    wait_until(lambda: 1 in connections, "the connection of rank 1")
    drop_arriving(connections[1])
    roll_call = waiting.presence.make_roll_call(lambda _: None)
    roll_call.begin()
    reason = waiting.reason()
    roll_call.end()
    assert reason.startswith("rank 0 cannot be reached from here: ")
    assert unreached == [(0, reason)]
    serving.presence._over = True


@needs_linux
def test_a_machine_that_stands_still_for_20_s_is_not_given_up(ranks: list[Rank]) -> None:
    """What it has missed is sent again at times that double, the last of which before the limit must come after that:
    so the limit is above twice as long, whenever the first is. Both ends have it."""
    wait_until(lambda: len(ranks[0].presence._sockets) == 3, "the connections")
    connections = [ranks[0].presence._sockets[1], *(rank.presence._sockets[0] for rank in ranks[1:])]
    limits_ms = {each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for each in connections}
    [limit_ms] = limits_ms
    assert 2 * 20_000 < limit_ms <= 60_000
