"""Each kind of race is found, and its twin with the missing order is silent, which matters more."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Event, Stream, Tensor

import simulated


def current(device: torch.device) -> Stream:
    return torch.accelerator.current_stream(device)


def find_races(program: Callable[[], object]) -> list[str]:
    """What the device says about the program, raised or noted."""
    try:
        program()
        simulated.raise_found()
    except RuntimeError as error:
        found = [str(error)]
    else:
        found = []
    found += simulated.take_races()
    torch.accelerator.synchronize()
    return found


@pytest.mark.parametrize("ordered", [True, False])
def test_what_another_stream_writes(device: torch.device, ordered: bool) -> None:
    def program() -> None:
        side, x = Stream(device), torch.full((64,), 3.0, device=device)
        side.wait_stream(current(device))
        with side:
            y = x * 2
        if ordered:
            current(device).wait_stream(side)
        assert (y + 1).tolist() == [7.0] * 64
        x.record_stream(side)

    races = find_races(program)
    assert bool(races) != ordered
    assert ordered or "add reads on the default stream of device 0 what mul writes on stream" in races[0]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_stream_that_does_not_wait_for_its_input(device: torch.device, ordered: bool) -> None:
    def program() -> None:
        side, x = Stream(device), torch.full((64,), 3.0, device=device)
        if ordered:
            side.wait_stream(current(device))
        with side:
            x * 2
        x.record_stream(side)

    assert bool(find_races(program)) != ordered


@pytest.mark.parametrize("ordered", [True, False])
def test_a_write_after_a_read(device: torch.device, ordered: bool) -> None:
    def program() -> None:
        side, x = Stream(device), torch.zeros(64, device=device)
        side.wait_stream(current(device))
        with side:
            x + 1
        if ordered:
            current(device).wait_stream(side)
        x.add_(1)
        x.record_stream(side)

    assert bool(find_races(program)) != ordered


def test_halves_of_one_buffer_are_no_race(device: torch.device) -> None:
    def program() -> None:
        side, x = Stream(device), torch.zeros(64, device=device)
        side.wait_stream(current(device))
        with side:
            x[:32].fill_(1)
        x[32:].fill_(2)
        current(device).wait_stream(side)
        x.record_stream(side)
        assert x.sum().item() == 96

    assert find_races(program) == []


@pytest.mark.parametrize("waits_by", ["event", "query", "stream", None])
def test_pinned_memory_is_read_after_its_copy(device: torch.device, waits_by: str | None) -> None:
    def program() -> None:
        side, x, host = Stream(device), torch.full((64,), 3.0, device=device), torch.empty(64, pin_memory=True)
        side.wait_stream(current(device))
        with side:
            host.copy_(x, non_blocking=True)
            event = side.record_event()
        x.record_stream(side)
        if waits_by == "event":
            event.synchronize()
        elif waits_by == "query":
            assert event.query()
        elif waits_by == "stream":
            side.synchronize()
        host.numpy().sum()
        event.synchronize()

    races = find_races(program)
    assert bool(races) == (waits_by is None)
    assert waits_by or "the host touched pinned memory before it waited for copy to the host" in races[0]


@pytest.mark.parametrize("ordered", [True, False])
def test_pinned_memory_changes_after_its_copy(device: torch.device, ordered: bool) -> None:
    def program() -> None:
        host, x = torch.ones(64).pin_memory(), torch.empty(64, device=device)
        x.copy_(host, non_blocking=True)
        if ordered:
            current(device).synchronize()
        host.fill_(2)

    assert bool(find_races(program)) != ordered


@pytest.mark.parametrize("ordered", [True, False])
def test_a_system_call_on_pinned_memory(device: torch.device, tmp_path: Path, ordered: bool) -> None:
    host = torch.ones(64, dtype=torch.uint8).pin_memory()
    host.copy_(torch.full((64,), 7, dtype=torch.uint8, device=device), non_blocking=True)
    view = memoryview(host.numpy())
    if ordered:
        current(device).synchronize()
    with (tmp_path / "file").open("w+b", buffering=0) as file:
        if ordered:
            assert os.write(file.fileno(), view) == 64
        else:
            with pytest.raises(OSError, match="Bad address"):
                os.write(file.fileno(), view)
    torch.accelerator.synchronize()


@pytest.mark.parametrize("how", ["recorded", "waited for", "neither"])
def test_memory_is_freed_while_another_stream_reads_it(device: torch.device, how: str) -> None:
    def program() -> None:
        side, x, host = Stream(device), torch.ones(64, device=device), torch.empty(64, pin_memory=True)
        side.wait_stream(current(device))
        with side:
            host.copy_(x, non_blocking=True)
        if how == "recorded":
            x.record_stream(side)
        elif how == "waited for":
            side.synchronize()
        del x
        torch.zeros(640, device=device)  # of another size: which block it gets does not matter
        side.synchronize()

    races = find_races(program)
    assert bool(races) == (how == "neither")
    assert how != "neither" or "record_stream is missing" in races[0]


def test_the_backward_of_another_streams_forward_is_no_race(device: torch.device) -> None:
    def program() -> None:
        side, w = Stream(device), torch.ones(8, device=device, requires_grad=True)
        side.wait_stream(current(device))
        with side:
            loss = (w * 2).sum()
        current(device).wait_stream(side)
        loss.backward()
        assert w.grad is not None
        assert w.grad.tolist() == [2.0] * 8
        w.record_stream(side)
        torch.accelerator.synchronize()

    assert find_races(program) == []


def test_a_copy_between_devices_is_no_race() -> None:
    def program() -> None:
        a = torch.ones(8, device="sim:0")
        b = a.to("sim:1", non_blocking=True)
        a.add_(1)
        assert (b + 1).tolist() == [2.0] * 8

    assert find_races(program) == []


def test_the_host_cannot_touch_the_devices_memory(device: torch.device) -> None:
    x = torch.ones(8, device=device)
    races = find_races(lambda: ctypes.c_float.from_address(x.data_ptr()).value)
    assert races == ["the host touched memory of device 0"]


def test_devices_do_not_mix() -> None:
    ours = torch.ones(2, device="sim:0")
    others: list[Tensor] = [torch.ones(2, device="sim:1"), torch.ones(2)]
    for other in others:
        with pytest.raises(RuntimeError, match=r"(?i)expected all tensors"):
            ours + other
    assert (ours + torch.tensor(2.0)).tolist() == [3, 3]  # a number is welcome anywhere


def test_waits_of_the_host_are_counted_by_cause(device: torch.device) -> None:
    x, host = torch.ones(4, device=device), torch.empty(4, pin_memory=True)
    host.copy_(x, non_blocking=True)
    assert simulated.take_syncs() == {}
    x.sum().item()
    x.cpu()
    x.nonzero()
    torch.accelerator.synchronize()
    assert simulated.take_syncs() == {
        "_local_scalar_dense": 1,
        "copy to the host, pageable": 1,
        "nonzero": 1,
        "device": 1,
    }


def test_waits_of_the_host_can_be_forbidden(device: torch.device) -> None:
    x = torch.ones(4, device=device)
    simulated.forbid_syncs(True)
    try:
        with pytest.raises(RuntimeError, match="the host waits for the device: _local_scalar_dense"):
            x.sum().item()
    finally:
        simulated.forbid_syncs(False)


def test_overlap_is_known_without_a_clock(device: torch.device) -> None:
    def record(stream: Stream) -> Event:
        with stream:
            torch.ones(4, device=device)
            return stream.record_event()

    first, second = Stream(device), Stream(device)
    one, other = record(first), record(second)
    assert simulated.could_overlap(one, other)
    assert simulated.could_overlap(other, one)
    assert not simulated.could_overlap(one, record(first))
    second.wait_event(one)
    assert not simulated.could_overlap(one, record(second))


def test_memory_runs_out_at_its_limit(device: torch.device) -> None:
    torch.accelerator.empty_cache()
    free, total = torch.accelerator.get_memory_info(0)
    simulated.limit_memory(device, total - free + (1 << 20))
    try:
        held = torch.empty(1 << 19, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 1048576 bytes\. sim:0 has"):
            torch.empty(1 << 20, dtype=torch.uint8, device=device)
        del held
        torch.empty(1 << 20, dtype=torch.uint8, device=device)
    finally:
        simulated.limit_memory(device, total)


def test_a_child_process_does_not_write_into_its_parents_memory(device: torch.device) -> None:
    x = torch.ones(4, device=device)
    child = os.fork()
    if child == 0:
        x.fill_(7)
        os._exit(0)
    os.waitpid(child, 0)
    assert x.tolist() == [1.0] * 4
