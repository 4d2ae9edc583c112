"""Processes of a generation give their state to those of the next one, over real connections, in any shape."""

from __future__ import annotations

import json
import secrets
import socket
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

import patient_holders
from example_modules import BERT, example_modules
from tied_ranks import OPTIMIZERS, MakeOptimizer, Rank, ranks_of, trained
from varuna.checkpoint import (
    CheckpointError,
    CheckpointWriter,
    LoadedCheckpoint,
    SampleCursor,
    StateScope,
    TrainingState,
    resume_checkpoint,
)
from varuna.checkpoint.storage.store import CheckpointStore
from varuna.distributed.handshake import MeetingKey, StrangerError, greet_server
from varuna.distributed.rendezvous import store_prefix
from varuna.distributed.rendezvous_protocol import receive_into
from varuna.distributed.rendezvous_server import RendezvousServer
from varuna.distributed.rendezvous_store import RendezvousStore
from varuna.holdings import giving, held_state, taking
from varuna.holdings.giving import GivenState, HolderServer, HolderSession
from varuna.holdings.held_state import HeldState
from varuna.holdings.inventory import HeldFile, HeldFiles, encode_inventories, make_inventory
from varuna_proto.environment import Mode, WorkerEnvironment
from varuna_proto.plan import Plan
from waiting import DEADLINE_S, wait_until

HOST = "127.0.0.1"
MAKE = OPTIMIZERS["adamw"]
IMPATIENCE_S = 0.5


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in patient_holders.WAITS:
        monkeypatch.setattr(module, name, DEADLINE_S)


@dataclass
class NextGeneration:
    """The new generation: the store that its rank 0 serves, the holders' sessions, and its ranks in threads."""

    p: int
    d: int
    holders: tuple[int, ...]
    secret: str = field(default_factory=secrets.token_hex)
    sessions: list[HolderSession] = field(default_factory=list)
    given: list[Future[GivenState]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = ThreadPoolExecutor(32)
        self.key = MeetingKey.from_environment(self.environment(0))
        self.server = RendezvousServer(HOST, self.key) if self.p * self.d > 1 else None

    def environment(self, rank: int) -> WorkerEnvironment:
        return WorkerEnvironment(
            job_id="job",
            generation=8,
            mode=Mode.TRAIN,
            rank=rank,
            local_rank=0,
            world_size=self.p * self.d,
            rendezvous_host=HOST,
            rendezvous_port=9,
            plan=Plan(p=self.p, d=self.d, micro_batch=1, global_batch=4),
            secret=self.secret,
            holders=self.holders,
        )

    def connect(self) -> PrefixStore:
        served = RendezvousStore(HOST, self.key, timedelta(seconds=DEADLINE_S))
        return PrefixStore(store_prefix(self.environment(0)), served)

    def give(self, *held: HeldFiles) -> None:
        for files in held:
            session = HolderSession(files, self.environment(files.inventory.rank))
            self.sessions.append(session)
            self.given.append(self.pool.submit(session.give_state))

    def resume(
        self, states: Sequence[TrainingState], url: str = "", **options: Any
    ) -> list[LoadedCheckpoint | CheckpointError | None]:
        """What `resume_checkpoint` returns or raises on each rank."""

        def run(rank: int) -> LoadedCheckpoint | CheckpointError | None:
            environment = self.environment(rank)
            store = self.connect() if environment.world_size > 1 else None
            memory = HeldState.from_environment(environment, store)  # type: ignore[arg-type]
            try:
                return resume_checkpoint(
                    url,
                    states[rank],
                    store=store,
                    rank=rank,
                    world_size=environment.world_size,
                    memory=memory,
                    **options,
                )
            except CheckpointError as error:
                return error

        return list(self.pool.map(run, range(self.p * self.d)))

    def end(self) -> list[GivenState]:
        """How the holders' sessions ended. They must end by themselves."""
        return [each.result(DEADLINE_S) for each in self.given]


@contextmanager
def next_generation(p: int, d: int, holders: Sequence[int]) -> Iterator[NextGeneration]:
    world = NextGeneration(p, d, tuple(holders))
    try:
        yield world
    finally:
        for session in world.sessions:
            session.stop()
        if world.server is not None:
            world.server.stop()
        world.pool.shutdown()


def hold(rank: Rank, step: int = 3) -> HeldFiles:
    return make_inventory(rank.state, step, generation=7, rank=rank.position.rank)


def make_holders(p: int, d: int, make: MakeOptimizer = MAKE) -> list[Rank]:
    return ranks_of(*trained(make), make, p, d)


def assert_taken(new: Sequence[Rank], old: Sequence[Rank]) -> None:
    """The new ranks have what the old ones had, bit for bit."""
    held = {name: (value, rank) for rank in old for name, value in rank.state.tensors.items()}
    for rank in new:
        for name, value in rank.state.tensors.items():
            expected, holder = held[name]
            assert torch.equal(value, expected), name
            mine, theirs = rank.optimizer.state.get(value, {}), holder.optimizer.state.get(expected, {})
            if name not in rank.parameters:
                continue
            assert mine.keys() == theirs.keys()
            for key, kept in theirs.items():
                assert torch.equal(mine[key], kept) if isinstance(kept, Tensor) else mine[key] == kept, (name, key)
        for name, average in rank.averages.items():
            assert torch.equal(average, next(one.averages[name] for one in old if name in one.averages))


def loaded_by(outcomes: Sequence[LoadedCheckpoint | CheckpointError | None]) -> list[LoadedCheckpoint]:
    for outcome in outcomes:
        assert isinstance(outcome, LoadedCheckpoint), outcome
    return [outcome for outcome in outcomes if isinstance(outcome, LoadedCheckpoint)]


@pytest.fixture(params=[*OPTIMIZERS, "lamb"])
def make(request: pytest.FixtureRequest) -> Iterator[MakeOptimizer]:
    with pytest.MonkeyPatch.context() as patch, example_modules(patch, BERT, "lamb") as modules:
        yield OPTIMIZERS.get(request.param, lambda parameters: modules["lamb"].Lamb(parameters, lr=0.01))


@pytest.mark.parametrize(
    ("p", "d", "p2", "d2"), [(1, 1, 2, 2), (2, 2, 1, 1), (2, 3, 4, 1), (4, 1, 2, 2), (1, 2, 1, 3), (2, 1, 2, 1)]
)
def test_any_shape_takes_what_any_other_holds(make: MakeOptimizer, p: int, d: int, p2: int, d2: int) -> None:
    old = make_holders(p, d, make)
    for rank in old:
        rank.averages = {name: value.detach() / 2 for name, value in rank.parameters.items()}
        for name, value in rank.parameters.items():
            value.requires_grad_(name != "first.weight")
    with next_generation(p2, d2, range(p * d)) as world, capture_logs() as log:
        world.give(*map(hold, old))
        new = [Rank(p2, d2, rank, make) for rank in range(p2 * d2)]
        for rank in new:
            rank.averages = {name: torch.zeros_like(value) for name, value in rank.parameters.items()}
        loaded = loaded_by(world.resume([rank.state for rank in new]))
        given = world.end()
    assert_taken(new, old)
    assert [(one.step, one.generation, one.seed, one.p, one.d) for one in loaded] == [(3, 7, 5, p, d)] * len(new)
    assert all(one.averaged for one in loaded)
    assert all(each.is_taken for each in given)
    assert sum(each.bytes for each in given) == sum(one.peer_bytes for one in loaded)
    assert [one.store_bytes for one in loaded] == [0] * len(new)
    [line] = [line for line in log if "came from the memory of" in line["event"]]
    assert line["bytes"] == sum(each.bytes for each in given)


def test_a_holder_counts_all_it_gave_though_its_threads_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    send_parts = giving._send_parts

    def send_and_lag(connection: socket.socket, parts: list[memoryview]) -> None:
        send_parts(connection, parts)
        threading.Event().wait(0.2)  # the new ranks may be done before this chunk is counted

    monkeypatch.setattr(giving, "_send_parts", send_and_lag)
    with next_generation(2, 1, [0]) as world:
        world.give(hold(make_holders(1, 1)[0]))
        loaded = loaded_by(world.resume([Rank(2, 1, rank, MAKE).state for rank in range(2)]))
        [given] = world.end()
    assert given.bytes == sum(one.peer_bytes for one in loaded)


@dataclass(frozen=True)
class DyingFile(HeldFile):
    """A file in whose middle its holder dies."""

    die: Callable[[], None]

    def iterate_chunks(self, offset: int, chunk_bytes: int) -> Iterator[list[memoryview]]:
        yield next(super().iterate_chunks(offset, 16))
        self.die()
        raise ConnectionError


def hold_dying(world: NextGeneration, rank: Rank, kind: str) -> HeldFiles:
    """What the rank holds; its process dies when it gives a file of this kind."""
    held = hold(rank)
    files = dict(held.files)
    for entry in held.inventory.receipt.files:
        if entry.kind == kind:
            files[entry.name] = DyingFile(
                files[entry.name].bytes, files[entry.name].pieces, lambda: world.sessions[rank.position.rank].stop()
            )
    return HeldFiles(held.inventory, files)


def save(url: str, ranks: Sequence[Rank], step: int) -> None:
    """A checkpoint of the generation before."""
    position = ranks[0].position
    writers = [CheckpointWriter(url, generation=7, position=rank.position) for rank in ranks]
    assert len(writers) == position.p * position.d
    for writer, rank in zip(writers, ranks, strict=True):
        assert writer.start_save(step, rank.state)
    for writer in writers:
        outcome = writer.wait(DEADLINE_S)
        assert outcome is not None
        assert outcome.result in ("committed", "written"), outcome.error


def publish(world: NextGeneration, held: HeldFiles, address: str) -> None:
    inventory = held.inventory.model_copy(update={"address": address})
    world.connect().set(giving.inventory_key(inventory.rank), encode_inventories([inventory]))


@pytest.mark.parametrize("kind", ["parameters", "optimizer"])
def test_where_a_holder_dies_while_it_gives_its_replica_goes_on(kind: str) -> None:
    old = make_holders(2, 2)
    with next_generation(4, 1, range(4)) as world:
        world.give(*(hold_dying(world, rank, kind) if rank.position.rank < 2 else hold(rank) for rank in old))
        new = [Rank(4, 1, rank, MAKE) for rank in range(4)]
        loaded_by(world.resume([rank.state for rank in new]))
        assert [each.is_taken for each in world.end()[2:]] == [True, True]
    assert_taken(new, old)


@pytest.mark.parametrize("kind", ["parameters", "optimizer"])
def test_where_the_only_holder_dies_all_ranks_take_the_checkpoint(tmp_path: Path, kind: str) -> None:
    saved = make_holders(2, 1)
    save(str(tmp_path), saved, step=2)
    old = ranks_of(*trained(MAKE, steps=4), MAKE, 2, 1)
    with next_generation(1, 3, range(2)) as world, capture_logs() as log:
        world.give(hold(old[0]), hold_dying(world, old[1], kind))
        new = [Rank(1, 3, rank, MAKE) for rank in range(3)]
        loaded = loaded_by(world.resume([rank.state for rank in new], str(tmp_path)))
    assert [(one.step, one.peer_bytes) for one in loaded] == [(2, 0)] * 3
    assert_taken(new, saved)
    assert not any("came from the memories" in line["event"] for line in log)
    assert any("rank 1, at 127.0.0.1:" in line.get("reason", "") for line in log)


@pytest.mark.parametrize("url", ["", "an empty store"])
def test_a_state_that_is_filled_in_part_never_begins_at_step_0(tmp_path: Path, url: str) -> None:
    old = make_holders(2, 1)
    with next_generation(1, 2, range(2)) as world:
        world.give(hold(old[0]), hold_dying(world, old[1], "optimizer"))
        new = [Rank(1, 2, rank, MAKE) for rank in range(2)]
        errors = world.resume([rank.state for rank in new], url and str(tmp_path))
    for error in errors:
        assert isinstance(error, CheckpointError)
        assert "was lost while it was taken over, and there is no checkpoint: the process that was rank 1" in str(error)


def test_a_chunk_that_comes_damaged_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    send, damaged = giving._send_parts, threading.Event()

    def send_damaged(connection: socket.socket, parts: list[memoryview]) -> None:
        if not damaged.is_set():
            damaged.set()
            parts[-1] = memoryview(bytes(parts[-1][:-1]) + bytes([parts[-1][-1] ^ 1]))
        send(connection, parts)

    monkeypatch.setattr(giving, "_send_parts", send_damaged)
    old = make_holders(1, 2)
    with next_generation(2, 1, range(2)) as world, capture_logs() as log:
        world.give(*map(hold, old))
        new = [Rank(2, 1, rank, MAKE) for rank in range(2)]
        loaded_by(world.resume([rank.state for rank in new]))
    assert_taken(new, old)
    assert any("a chunk of it came damaged" in line.get("reason", "") for line in log)


@pytest.mark.parametrize("behaviour", ["silent", "hangs up", "a stranger", "slow"])
def test_a_process_in_the_place_of_a_holder_is_passed_over(
    behaviour: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = make_holders(1, 2)
    with next_generation(1, 2, range(2)) as world, socket.create_server((HOST, 0)) as listener, capture_logs() as log:
        stranger: HolderServer | None = None
        address = f"{HOST}:{listener.getsockname()[1]}"
        if behaviour == "hangs up":
            listener.close()
        elif behaviour == "a stranger":
            other_key = MeetingKey.derive_key("another", "job", 8, host=HOST, port=9)
            stranger = HolderServer(hold(old[0]), other_key, HOST)
            address = stranger.address
        elif behaviour == "slow":
            stranger = HolderServer(hold(old[0]), world.key, HOST)
            address = stranger.address
            monkeypatch.setattr(
                giving, "_send_parts", partial(send_slowly_from, int(address.split(":")[1]), giving._send_parts)
            )
        lose_patience_with(address, monkeypatch)
        publish(world, hold(old[0]), address)
        world.give(hold(old[1]))
        new = [Rank(1, 2, rank, MAKE) for rank in range(2)]
        loaded_by(world.resume([rank.state for rank in new]))
        if stranger is not None:
            stranger.close()
    assert_taken(new, old)
    assert any(f"rank 0, at {address}" in line.get("reason", "") for line in log)


def lose_patience_with(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes those that take state give up soon on the process at `address`, and on no other."""

    def limit(connection: socket.socket, limit_s: float, limit_there_s: float) -> float:
        host, port = connection.getpeername()
        return limit_there_s if f"{host}:{port}" == address else limit_s

    def greet(connection: socket.socket, key: MeetingKey, within_s: float) -> None:
        greet_server(connection, key, limit(connection, within_s, IMPATIENCE_S))

    def receive(connection: socket.socket, buffer: memoryview, deadline_s: float) -> None:
        receive_into(connection, buffer, limit(connection, deadline_s, deadline_s - DEADLINE_S + IMPATIENCE_S))

    monkeypatch.setattr(taking, "greet_server", greet)
    monkeypatch.setattr(taking, "receive_into", receive)


def send_slowly_from(port: int, send: Callable[..., None], connection: socket.socket, parts: list[memoryview]) -> None:
    """Sends a byte now and then from the server at `port`, so that no single wait is long."""
    if connection.getsockname()[1] == port:
        for byte in b"".join(parts):
            connection.sendall(bytes([byte]))
            threading.Event().wait(0.05)
    else:
        send(connection, parts)


def test_a_process_without_the_secret_gets_nothing() -> None:
    key = MeetingKey.derive_key("secret", "job", 8, host=HOST, port=9)
    wrong = MeetingKey.derive_key("wrong", "job", 8, host=HOST, port=9)
    server = HolderServer(hold(make_holders(1, 1)[0]), key, HOST)
    host, port = server.address.split(":")
    try:
        with socket.create_connection((host, int(port))) as connection, pytest.raises(StrangerError):
            greet_server(connection, wrong, DEADLINE_S)
        for words in (b"GET / HTTP/1.1\r\n" + bytes(100), b"varuna1\n" + bytes(64)):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(words)
                connection.settimeout(DEADLINE_S)
                received = b""
                with suppress(ConnectionResetError):
                    while part := connection.recv(1 << 16):
                        received += part
                assert len(received) in (0, 64)  # the server's proof at most
        with socket.create_connection((host, int(port))) as connection:  # a member that breaks the protocol
            greet_server(connection, key, DEADLINE_S)
            connection.settimeout(DEADLINE_S)
            connection.sendall(bytes([255] * 64))
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        assert server.bytes_given == 0
    finally:
        server.close()


def test_silent_strangers_keep_no_member_out() -> None:
    key = MeetingKey.derive_key("secret", "job", 8, host=HOST, port=9)
    server = HolderServer(hold(make_holders(1, 1)[0]), key, HOST)
    host, port = server.address.split(":")
    with ExitStack() as stack:
        stack.callback(server.close)
        for _ in range(2 * giving._MOST_STRANGERS):
            stack.enter_context(socket.create_connection((host, int(port))))
        connection = stack.enter_context(socket.create_connection((host, int(port))))
        greet_server(connection, key, DEADLINE_S)


def test_a_holder_gives_to_a_newer_generation_after_an_older_one() -> None:
    old = make_holders(1, 1)
    held = hold(old[0])
    with next_generation(2, 1, [0]) as first:
        first.give(held)
        store = first.connect()
        wait_until(lambda: store.check([giving.inventory_key(0)]), "the inventory")
        first.sessions[0].stop()
        [given] = first.end()
    assert (given.is_taken, given.reason) == (False, "stopped")
    with next_generation(2, 1, [0]) as second:
        second.give(held)
        new = [Rank(2, 1, rank, MAKE) for rank in range(2)]
        loaded_by(second.resume([rank.state for rank in new]))
        [given] = second.end()
    assert given.is_taken
    assert_taken(new, old)


def test_a_holder_stops_while_it_looks_for_the_new_generation() -> None:
    world = NextGeneration(1, 1, (0,))  # nobody serves its store
    world.give(hold(make_holders(1, 1)[0]))
    wait_until(lambda: world.given[0].running())
    world.sessions[0].stop()
    assert world.end() == [GivenState(0, False, "stopped")]
    world.pool.shutdown()


def test_a_holder_ends_when_the_new_generation_does_and_its_state_was_not_taken() -> None:
    with next_generation(2, 1, [0]) as world:
        world.give(hold(make_holders(1, 1)[0]))
        store = world.connect()
        wait_until(lambda: store.check([giving.inventory_key(0)]), "the inventory")
        assert world.server is not None
        world.server.stop()
        [given] = world.end()
    assert not given.is_taken


def test_a_checkpoint_that_is_newer_than_what_is_held_is_taken(tmp_path: Path) -> None:
    saved = make_holders(1, 1)
    save(str(tmp_path), saved, step=5)
    with next_generation(2, 1, [0]) as world:
        world.give(hold(ranks_of(*trained(MAKE, steps=1), MAKE, 1, 1)[0], step=4))
        new = [Rank(2, 1, rank, MAKE) for rank in range(2)]
        loaded = loaded_by(world.resume([rank.state for rank in new], str(tmp_path)))
        assert [given.bytes for given in world.end()] == [0]
    assert [one.step for one in loaded] == [5, 5]
    assert_taken(new, saved)


def test_nothing_is_read_from_a_store_whose_checkpoints_are_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make_holders(2, 1)
    save(str(tmp_path), old, step=2)
    monkeypatch.setattr(CheckpointStore, "get", lambda *_: pytest.fail("the store is read"))
    with next_generation(1, 1, range(2)) as world:
        world.give(*map(hold, old))
        new = Rank(1, 1, 0, MAKE)
        [loaded] = loaded_by(world.resume([new.state], str(tmp_path), committed_step=2))
    assert loaded.step == 3
    assert_taken([new], old)


def test_a_section_that_no_process_holds_comes_from_the_store_with_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_state, "_INVENTORY_WAIT_S", 0.3)
    saved = make_holders(2, 1)
    save(str(tmp_path), saved, step=2)
    with next_generation(2, 1, range(2)) as world:
        world.give(hold(saved[1], step=3))
        new = [Rank(2, 1, rank, MAKE) for rank in range(2)]
        loaded = loaded_by(world.resume([rank.state for rank in new], str(tmp_path)))
        assert world.end()[0].bytes == 0
    assert [one.step for one in loaded] == [2, 2]


def test_an_inventory_that_cannot_be_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    old = make_holders(1, 3)
    with next_generation(2, 1, range(3)) as world:
        world.connect().set(giving.inventory_key(0), "%%%")
        world.connect().set(giving.inventory_key(1), json.dumps([b64encode(b"no inventory").decode()]))
        world.give(hold(old[2]))
        new = [Rank(2, 1, rank, MAKE) for rank in range(2)]
        loaded_by(world.resume([rank.state for rank in new]))
    assert_taken(new, old)


def test_registered_states_options_and_the_cursor_come_with_the_tensors() -> None:
    old = make_holders(2, 2)
    cursor = SampleCursor(samples=30, global_batch=4)
    for rank in old:
        rank.optimizer.param_groups[0]["lr"] = 0.125
        rank.user = {
            "job": {"x": 1.5, "y": torch.arange(3)},
            "same": {"z": (1, 2)},
            "by name": {name: {"seen": torch.full((2,), float(len(name)))} for name in rank.parameters},
        }
        rank.scopes = {"job": StateScope.JOB}
    with next_generation(4, 1, [1, 2, 3]) as world:  # rank 0 is gone
        world.give(
            *(
                make_inventory(replace(rank.state, cursor=cursor), 3, generation=7, rank=rank.position.rank)
                for rank in old[1:]
            )
        )
        new = [Rank(4, 1, rank, MAKE) for rank in range(4)]
        loaded = loaded_by(world.resume([rank.state for rank in new]))
    for rank, one in zip(new, loaded, strict=True):
        assert one.cursor == cursor
        assert rank.optimizer.param_groups[0]["lr"] == 0.125
        assert one.user["job"]["x"] == 1.5
        assert torch.equal(one.user["job"]["y"], torch.arange(3))
        assert one.user["same"] == {"z": (1, 2)}
        for name in rank.parameters:
            assert torch.equal(one.user["by name"][name]["seen"], torch.full((2,), float(len(name))))


def test_each_rank_gets_its_own_states_back_in_the_same_shape() -> None:
    old = make_holders(1, 2)
    for rank in old:
        rank.user = {"own": {"rank": rank.position.rank}}
        rank.scopes = {"own": StateScope.RANK}
    with next_generation(1, 2, range(2)) as world:
        world.give(*map(hold, old))
        loaded = loaded_by(world.resume([Rank(1, 2, rank, MAKE).state for rank in range(2)]))
    assert [one.user["own"] for one in loaded] == [{"rank": 0}, {"rank": 1}]


def test_what_another_model_holds_is_not_loaded(tmp_path: Path) -> None:
    saved = make_holders(1, 1)
    save(str(tmp_path), saved, step=1)
    other = replace(
        saved[0].state, parameters={"other": torch.zeros(1)}, section_of={"other": 0}, buffers={}, optimizers=()
    )
    held = make_inventory(replace(other, section_count=1, sections=range(1)), 3, generation=7, rank=0)
    with next_generation(2, 1, [0]) as world:
        world.give(held)
        new = [Rank(2, 1, rank, MAKE) for rank in range(2)]
        loaded = loaded_by(world.resume([rank.state for rank in new], str(tmp_path)))
    assert [one.step for one in loaded] == [1, 1]
    assert_taken(new, saved)
