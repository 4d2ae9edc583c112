"""Copies over real connections: what is kept is the state of its step, and one step is always whole."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from tied_ranks import OPTIMIZERS, Rank, ranks_of, trained
from varuna.copies import memory as memory_module
from varuna.copies import owner as owner_module
from varuna.copies import sending as sending_module
from varuna.copies.keeper import CopyKeeper
from varuna.copies.memory import count_available_bytes
from varuna.copies.owner import CopyOwner
from varuna.copies.pacing import IdleProcessors
from varuna.distributed.handshake import MeetingKey, StrangerError, greet_server
from varuna.holdings import taking as taking_module
from varuna.holdings.inventory import HeldFiles, make_inventory
from varuna_proto.group_memory import GroupMemory
from waiting import DEADLINE_S, wait_until

HOST = "127.0.0.1"
KEY = MeetingKey.derive_key("secret", "job", 7, host=HOST, port=1)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    monkeypatch.setattr(owner_module, "_RETRY_S", 0.01)
    monkeypatch.setattr(taking_module, "SILENCE_S", DEADLINE_S)
    make = OPTIMIZERS["adamw"]
    return ranks_of(*trained(make), make, 2, 1)[1]


@pytest.fixture
def keeper() -> Iterator[CopyKeeper]:
    keeper = CopyKeeper([1], 7, KEY, HOST)
    yield keeper
    keeper.close()


@pytest.fixture
def owner(keeper: CopyKeeper) -> Iterator[CopyOwner]:
    owner = make_owner(keeper)
    yield owner
    owner.shut_down()


def make_owner(keeper: CopyKeeper, rank: int = 1, generation: int = 7) -> CopyOwner:
    return CopyOwner(
        keeper.address,
        KEY,
        generation=generation,
        rank=rank,
        device=torch.device("cpu"),
        series=0,
        is_pipeline_sending=lambda: False,
    )


def contents(held: HeldFiles) -> dict[str, bytes]:
    return {
        name: b"".join(bytes(part) for chunk in file.iterate_chunks(0, 1 << 20) for part in chunk)
        for name, file in held.files.items()
    }


def change(rank: Rank, step: int) -> dict[str, bytes]:
    """Changes the state, as an update does. Returns what an inventory of it has."""
    with torch.no_grad():
        for value in rank.parameters.values():
            value.fill_(float(step))
    return contents(make_inventory(rank.state, step, generation=7, rank=1))


def run_round(owner: CopyOwner, rank: Rank, step: int) -> None:
    owner.begin_round(step, rank.state)
    owner.finish_capture()
    change(rank, -step)  # the step under way goes on while the copy is sent
    wait_until(lambda: not owner.is_sending, "the copy")


def steps(held: list[HeldFiles]) -> list[int]:
    return sorted(one.inventory.step for one in held)


def test_a_copy_has_the_state_of_its_step_and_the_one_before_stays(
    rank: Rank, keeper: CopyKeeper, owner: CopyOwner
) -> None:
    for step in range(1, 6):
        expected = change(rank, step)
        run_round(owner, rank, step)
        for held in (keeper.list_copies(), list(owner.list_copies())):
            assert steps(held) == list(range(max(step - 1, 1), step + 1))
            newest = max(held, key=lambda one: one.inventory.step)
            assert contents(newest) == expected
            assert (newest.inventory.rank, newest.inventory.receipt.generation) == (1, 7)


def test_a_round_that_fails_costs_no_whole_one(
    rank: Rank, keeper: CopyKeeper, owner: CopyOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks in the middle of the third round, and once more; then it is sent again."""
    for step in (1, 2):
        change(rank, step)
        run_round(owner, rank, step)
    send, seen = sending_module.send_chunk, list[list[int]]()

    def send_or_break(connection: socket.socket, chunk: list[memoryview]) -> int:
        if len(seen) < 2:
            seen.append(steps(keeper.list_copies()))
            connection.shutdown(socket.SHUT_RDWR)
        return send(connection, chunk)

    monkeypatch.setattr(sending_module, "send_chunk", send_or_break)
    expected = change(rank, 3)
    with capture_logs() as log:
        run_round(owner, rank, 3)
    assert all(2 in kept for kept in seen)
    assert len(seen) == 2
    assert sum("is sent again" in entry["event"] for entry in log) == 2
    assert steps(keeper.list_copies()) == [2, 3]
    assert contents(max(keeper.list_copies(), key=lambda one: one.inventory.step)) == expected


def test_a_loaded_checkpoint_ends_all_copies(rank: Rank, keeper: CopyKeeper, owner: CopyOwner) -> None:
    run_round(owner, rank, 9)
    for part in (keeper, owner):
        part.forget_copies(1)
        assert not list(part.list_copies())
    run_round(owner, rank, 4)
    assert steps(keeper.list_copies()) == steps(list(owner.list_copies())) == [4]


@pytest.mark.parametrize(("number", "generation"), [(0, 7), (1, 6)])
def test_a_copy_of_anybody_else_is_refused(number: int, generation: int, rank: Rank, keeper: CopyKeeper) -> None:
    with capture_logs() as log:
        other = make_owner(keeper, number, generation)
        other.begin_round(3, rank.state)
        wait_until(lambda: any("was refused" in entry["event"] for entry in log), "the refusal")
        other.shut_down()
    reason = next(entry["reason"] for entry in log if "was refused" in entry["event"])
    assert reason == f"this process keeps nothing of rank {number} of generation {generation}"
    assert not keeper.list_copies()


def test_a_stranger_is_turned_away(keeper: CopyKeeper) -> None:
    host, _, port = keeper.address.rpartition(":")
    other = MeetingKey.derive_key("guessed", "job", 7, host=HOST, port=1)
    with socket.create_connection((host, int(port))) as connection, pytest.raises(StrangerError):
        greet_server(connection, other, DEADLINE_S)


def test_idle_processors_are_counted_between_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    now, counters = [0.0], tmp_path / "stat"
    counters.write_text("cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 1 2 3\n")
    idle = IdleProcessors(counters, lambda: now[0])
    assert idle.count() == 0.0
    counters.write_text("cpu  130 0 120 840 10 0 0 0 0 0\ncpu0 1 2 3\n")
    assert idle.count() == 0.0
    now[0] = 1.0
    assert idle.count() == pytest.approx(2.0)  # 50 of 100 ticks
    assert IdleProcessors(tmp_path / "none", lambda: now[0]).count() == 0.0


def test_available_memory_is_what_the_kernel_says_in_what_groups_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:      12 kB\n")
    monkeypatch.setattr(memory_module, "read_group_memory", lambda: None)
    assert count_available_bytes(tmp_path / "meminfo") == 12 * 1024
    assert count_available_bytes(tmp_path / "none") is None
    monkeypatch.setattr(memory_module, "read_group_memory", lambda: GroupMemory(limit=1 << 20, available=1024))
    assert count_available_bytes(tmp_path / "meminfo") == 1024
