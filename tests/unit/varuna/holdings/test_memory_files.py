"""What a process holds, in a file that outlives it."""

from __future__ import annotations

import os

import pytest

from tied_ranks import OPTIMIZERS, ranks_of, trained
from varuna.checkpoint import CheckpointError
from varuna.holdings.inventory import HeldFile, HeldFiles, make_inventory
from varuna.holdings.memory_files import fill_memory_file, list_pieces, map_memory_file


def make_file(pieces: list[memoryview]) -> int:
    """Of their size, as the agent makes it."""
    file = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, sum(map(len, pieces)))
    return file


def contents(file: HeldFile) -> bytes:
    return b"".join(map(bytes, file.pieces))


@pytest.fixture
def held() -> HeldFiles:
    make = OPTIMIZERS["adamw"]
    rank = ranks_of(*trained(make), make, 2, 2)[3]
    return make_inventory(rank.state, 3, generation=7, rank=rank.position.rank)


def test_a_memory_file_has_what_the_process_held(held: HeldFiles) -> None:
    file = make_file(list_pieces(held))
    fill_memory_file(file, list_pieces(held))
    with pytest.raises(PermissionError):
        os.pwrite(file, b"x", 0)
    mapped = map_memory_file(file)
    os.close(file)
    assert mapped.inventory == held.inventory
    assert {name: contents(one) for name, one in mapped.files.items()} == {
        name: contents(one) for name, one in held.files.items()
    }


def test_pieces_beyond_one_system_call_are_written() -> None:
    pieces = [memoryview(bytes([number % 256, 7])) for number in range(1500)]
    file = make_file(pieces)
    fill_memory_file(file, pieces)
    assert os.pread(file, 4000, 0) == b"".join(pieces)
    os.close(file)


@pytest.mark.parametrize("kept_bytes", [4, 100, -1])
def test_a_file_that_is_no_whole_state_is_refused(held: HeldFiles, kept_bytes: int) -> None:
    data = b"".join(list_pieces(held))[:kept_bytes]
    file = make_file([memoryview(data)])
    fill_memory_file(file, [memoryview(data)])
    with pytest.raises(CheckpointError):
        map_memory_file(file)
    os.close(file)
