"""A stranger who reaches a generation's ports without its secret learns nothing and is not taken for a rank."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import structlog
import torch
import torch.distributed as dist

from varuna.distributed.departure import Departure, PeerLost
from varuna.distributed.gloo import connect_group
from varuna.distributed.handshake import (
    GREETING_BYTES,
    PROOF_BYTES,
    MeetingKey,
    ServerHandshake,
    StrangerError,
    greet_server,
)
from varuna.distributed.rendezvous import Rendezvous, warn_without_secret
from varuna.distributed.rendezvous_server import RendezvousServer
from varuna.distributed.rendezvous_store import RendezvousStore
from varuna_proto.environment import WorkerEnvironment
from varuna_proto.plan import Plan
from waiting import DEADLINE_S

LIMIT = timedelta(seconds=DEADLINE_S)
SECRET = "5ec3e7" * 8
HOST = "127.0.0.1"


def key_of(secret: str) -> MeetingKey:
    """Of a meeting that no other test has."""
    return MeetingKey.derive_key(
        secret, f"{os.getpid()}-{threading.get_ident()}-{os.urandom(8).hex()}", 1, host=HOST, port=1
    )


@pytest.fixture
def key() -> MeetingKey:
    return key_of(SECRET)


@pytest.fixture
def server(key: MeetingKey) -> RendezvousServer:
    return RendezvousServer(HOST, key)


def closed_by_the_other_end(connection: socket.socket) -> bool:
    connection.settimeout(DEADLINE_S)
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


# ---------------------------------------------------------------- the handshake


def handshake(client_key: MeetingKey, server_key: MeetingKey) -> None:
    """Both sides over a socket pair. Raises what the side that refuses raises first."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with theirs:
            greeting = ServerHandshake(server_key, theirs.recv(GREETING_BYTES, socket.MSG_WAITALL))
            theirs.sendall(greeting.answer)
            greeting.check_proof(theirs.recv(PROOF_BYTES, socket.MSG_WAITALL))

    with ours, ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve)
        try:
            greet_server(ours, client_key, DEADLINE_S)
        finally:
            ours.shutdown(socket.SHUT_WR)
        served.result()


def test_who_knows_the_secret_is_known(key: MeetingKey) -> None:
    handshake(key, key)


@pytest.mark.parametrize(
    "changes", [{"secret": "x"}, {"job_id": "b"}, {"generation": 2}, {"host": "h2"}, {"port": 8}], ids=str
)
def test_a_key_of_another_secret_job_generation_or_place_is_a_strangers(changes: dict[str, Any]) -> None:
    own: dict[str, Any] = {"secret": SECRET, "job_id": "a", "generation": 1, "host": "h", "port": 7}
    with pytest.raises(StrangerError, match="the process that listens there does not know"):
        handshake(MeetingKey.derive_key(**own), MeetingKey.derive_key(**own | changes))


def test_a_proof_that_was_overheard_is_of_no_use_later(key: MeetingKey) -> None:
    first = ServerHandshake(key, b"varuna1\n" + bytes(32))
    proof = key.compute_mac("client", bytes(32), first.answer[:32])
    first.check_proof(proof)
    with pytest.raises(StrangerError):
        ServerHandshake(key, b"varuna1\n" + bytes(32)).check_proof(proof)
    with pytest.raises(StrangerError):
        first.check_proof(first.answer[32:])


def test_the_secret_is_in_no_repr() -> None:
    environment = replace(WorkerEnvironment.alone("job", micro_batch=1, global_batch=1), secret=SECRET)
    key = key_of(SECRET)
    for shown in (environment, key, [environment], {"k": key}):
        assert SECRET not in repr(shown)
        assert repr(key._key)[2:-1] not in repr(shown)
    assert WorkerEnvironment.from_environ(environment.to_environ()) == environment


# ---------------------------------------------------------------- the store


def test_the_store_does_what_torch_asks_of_one(server: RendezvousServer, key: MeetingKey) -> None:
    one, other = (dist.PrefixStore("group", RendezvousStore(HOST, key, LIMIT)) for _ in range(2))
    one.set("a", "1")
    assert other.get("a") == b"1"
    assert [one.add("n", 2), other.add("n", 3)] == [2, 5]
    assert one.check(["a", "n"])
    assert not one.check(["a", "b"])
    assert one.compare_set("c", "", "first") == b"first"
    assert other.compare_set("c", "wrong", "second") == b"first"
    assert other.compare_set("c", "first", "second") == b"second"
    one.append("c", "+")  # type: ignore[attr-defined] # PyTorch's stub lacks it
    one.multi_set(["d", "e"], ["4", "\0" * 300_000])  # type: ignore[attr-defined]
    assert other.multi_get(["c", "d", "e"]) == [b"second+", b"4", bytes(300_000)]
    assert other.num_keys() == 5
    assert one.delete_key("a")
    assert not one.delete_key("a")
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(other.multi_get, ["d", "late", "later"])
        one.set("later", "1")
        one.set("late", "2")
        assert later.result(DEADLINE_S) == [b"4", b"2", b"1"]


@pytest.mark.long
def test_waiting_in_vain_ends_and_the_connection_is_still_good(server: RendezvousServer, key: MeetingKey) -> None:
    store = RendezvousStore(HOST, key, LIMIT)
    store.set_timeout(timedelta(seconds=0.01))
    with pytest.raises(dist.DistStoreError, match="no rank set never in"):
        store.get("never")
    store.set("never", "now")
    assert store.get("never") == b"now"


def test_a_rank_0_that_ends_is_an_error_of_torchs_own_kind(key: MeetingKey) -> None:
    server = RendezvousServer(HOST, key)
    store = RendezvousStore(HOST, key, LIMIT)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(dist.PrefixStore("x", store).get, "never")
        [client] = server._clients.values()
        client.connection.shutdown(socket.SHUT_RDWR)
        with pytest.raises(dist.DistNetworkError, match="is gone"):
            waits.result(DEADLINE_S)


def test_an_answer_that_comes_too_late_is_not_taken_for_that_of_the_next_request(
    server: RendezvousServer, key: MeetingKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RendezvousStore(HOST, key, LIMIT)
    store.set("a", "1")
    answer, goes_on = server._answer_request, threading.Event()

    def answer_late(*request: Any) -> None:
        goes_on.wait(DEADLINE_S)
        answer(*request)

    with monkeypatch.context() as rank_0_stands_still:
        rank_0_stands_still.setattr(server, "_answer_request", answer_late)
        rank_0_stands_still.setattr("varuna.distributed.rendezvous_store._ANSWER_S", 0.01)
        with pytest.raises(dist.DistNetworkError, match="timed out"):
            store.check(["a"])
        goes_on.set()
    with pytest.raises(dist.DistNetworkError):
        store.add("n", 1)


def say_nothing(connection: socket.socket, key: MeetingKey) -> None:
    """Leaves at once: the store does not wait for a stranger."""


def speak_http(connection: socket.socket, key: MeetingKey) -> None:
    connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64))
    assert closed_by_the_other_end(connection)


def guess_the_secret(connection: socket.socket, key: MeetingKey) -> None:
    with pytest.raises(StrangerError):
        greet_server(connection, MeetingKey.derive_key("", "job", 1, host=HOST, port=1), DEADLINE_S)


def prove_nothing_and_ask(connection: socket.socket, key: MeetingKey) -> None:
    connection.sendall(b"varuna1\n" + bytes(32) + bytes(32) + b"\0\0\0\x0e\2" + bytes(13))
    assert closed_by_the_other_end(connection)


def speak_nonsense_as_a_friend(connection: socket.socket, key: MeetingKey) -> None:
    greet_server(connection, key, DEADLINE_S)
    connection.sendall(b"\xff" * 64)
    assert closed_by_the_other_end(connection)


@pytest.mark.parametrize(
    "attack", [say_nothing, speak_http, guess_the_secret, prove_nothing_and_ask, speak_nonsense_as_a_friend]
)
def test_strangers_are_turned_away_and_the_store_serves_on(
    server: RendezvousServer, key: MeetingKey, attack: Callable[[socket.socket, MeetingKey], None]
) -> None:
    store = RendezvousStore(HOST, key, LIMIT)
    for _ in range(3):
        with socket.create_connection((HOST, server.port), DEADLINE_S) as connection:
            attack(connection, key)
            store.set("k", attack.__name__)
            assert store.get("k") == attack.__name__.encode()


def test_many_silent_strangers_keep_nobody_out(server: RendezvousServer, key: MeetingKey) -> None:
    silent = [socket.create_connection((HOST, server.port), DEADLINE_S) for _ in range(300)]
    store = RendezvousStore(HOST, key, LIMIT)
    store.set("k", "v")
    assert store.get("k") == b"v"
    for connection in silent:
        connection.close()


@pytest.mark.long
def test_torchs_own_client_cannot_use_the_store(server: RendezvousServer, key: MeetingKey) -> None:
    RendezvousStore(HOST, key, LIMIT).set("address", "of rank 0")
    with pytest.raises(RuntimeError):
        dist.TCPStore(HOST, server.port, 2, False, timedelta(seconds=2)).get("address")


def listen_first() -> tuple[socket.socket, MeetingKey]:
    """A stranger at the first port of a key. A busy machine may use any port for a connection: then by another key."""
    while True:
        key = key_of(SECRET)
        with suppress(OSError):
            return socket.create_server((HOST, key.candidate_ports()[0])), key


def test_a_process_that_listens_in_silence_at_a_port_of_the_store_does_not_hide_rank_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every rank has such ports: gloo's, and those that show that it can be reached."""
    monkeypatch.setattr("varuna.distributed.rendezvous_store.HANDSHAKE_S", DEADLINE_S)
    silent, key = listen_first()
    with silent, ThreadPoolExecutor(1) as pool:
        greeted = threading.Event()
        connecting = pool.submit(RendezvousStore, HOST, key, LIMIT, greeted.set)
        assert greeted.wait(DEADLINE_S)
        server = RendezvousServer(HOST, key)  # rank 0 comes up while the other one tries its ports
        store = connecting.result(DEADLINE_S / 2)
        store.set("here", "yes")
        assert server.port in key.candidate_ports()[1:]


def test_a_stranger_who_listens_first_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine the stranger's answer may come late. A store that has not waited for it proves nothing here.
    monkeypatch.setattr("varuna.distributed.rendezvous_store._FIRST_PATIENCE_S", DEADLINE_S)
    squatter, key = listen_first()
    with squatter:
        squatter.settimeout(DEADLINE_S)
        received: list[bytes] = []

        def serve() -> None:
            connection, _ = squatter.accept()
            with connection:
                received.append(connection.recv(GREETING_BYTES, socket.MSG_WAITALL))
                connection.sendall(bytes(64))
                received.append(connection.recv(4096))

        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(serve)
            server = RendezvousServer(HOST, key)
            assert server.port in key.candidate_ports()[1:], "the next that is free"
            store = RendezvousStore(HOST, key, LIMIT)
            served.result(DEADLINE_S)
        store.set("k", "v")
        assert store.get("k") == b"v"
        assert received[1] == b"", "a proof was shown to a stranger"


# ---------------------------------------------------------------- groups


class RendezvousAt(Rendezvous):
    """Of a rank whose groups listen at an address of the test's choice."""

    address = HOST

    def own_address(self) -> str:
        return self.address


@pytest.fixture
def pair() -> Iterator[list[RendezvousAt]]:
    """Ranks 0 and 1 of a generation. gloo lets rank 1, which has the higher address, dial."""
    with socket.socket() as held:
        held.bind((HOST, 0))
        environment = replace(
            WorkerEnvironment.alone("job", micro_batch=1, global_batch=2),
            world_size=2,
            plan=Plan(p=1, d=2, micro_batch=1, global_batch=2),
            rendezvous_host=HOST,
            rendezvous_port=held.getsockname()[1],
            secret=SECRET,
        )
        with ThreadPoolExecutor(2) as pool:
            joined = pool.map(
                lambda rank: RendezvousAt(replace(environment, rank=rank), Departure(lambda _: None)), range(2)
            )
            ranks = list(joined)
        ranks[1].address = "127.0.0.2"
        yield ranks


def test_ranks_of_one_generation_meet(pair: list[RendezvousAt]) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: rank.connect_gloo("link", (0, 1)), pair)
    got = torch.zeros(1)
    sent = second.send([torch.tensor([7.0])], 0, 5)
    first.recv([got], 1, 5).wait(LIMIT)
    sent.wait(LIMIT)
    assert got.item() == 7.0


def test_a_stranger_who_takes_a_ranks_place_in_a_group_is_found_out(pair: list[RendezvousAt]) -> None:
    """It guesses the port that rank 0 has written to the store, and connects before rank 1."""
    others_store = dist.PrefixStore("link", pair[1].store)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(pair[0].connect_gloo, "link", (0, 1))
        guessed = dist.HashStore()
        guessed.set("0/0", others_store.get("0/0"))
        stranger = connect_group(guessed, 1, 2, address="127.0.0.3", timeout=LIMIT)
        proof = torch.zeros(PROOF_BYTES, dtype=torch.uint8)
        sent = stranger.send([proof], 0, 1 << 30)  # gloo forgets a message whose work nobody holds
        connect_group(others_store, 1, 2, address="127.0.0.2", timeout=LIMIT)
        with pytest.raises(PeerLost) as lost:
            first.result(DEADLINE_S)
    assert "a stranger has taken the place of rank 1 in group link" in lost.value.reason
    del sent


def test_a_run_without_a_secret_says_so_where_strangers_could_come() -> None:
    environment = replace(WorkerEnvironment.alone("job", micro_batch=1, global_batch=2), world_size=2)
    with structlog.testing.capture_logs() as log:
        for host in ("10.0.0.1", HOST, "localhost"):
            warn_without_secret(replace(environment, rendezvous_host=host))
        warn_without_secret(replace(environment, rendezvous_host="10.0.0.1", secret=SECRET))
    assert len([line for line in log if "no secret" in line["event"]]) == 1
