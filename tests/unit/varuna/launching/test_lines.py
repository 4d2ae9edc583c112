"""What processes print reaches the launcher's output, and an output that takes nothing keeps no process waiting."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from varuna.launching import lines
from varuna.launching.lines import LineRelay, make_stream_writer
from waiting import DEADLINE_S, wait_until

FULL = Path("/dev/full")
"""Each write to it fails, as on a full disk."""
PIECE = b"line\n" * 50_000
"""More than a pipe holds."""


@pytest.mark.processes
@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_a_process_goes_on_when_its_output_cannot_be_written(capfd: pytest.CaptureFixture[str]) -> None:
    with FULL.open("w") as full:
        relay, write = LineRelay(), make_stream_writer(full)
        with subprocess.Popen(["seq", "200000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            relay.relay_process(process, write, write)
            assert process.wait(DEADLINE_S) == 0
            relay.wait_for_end(DEADLINE_S)
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "No space left on device" in said


def test_an_output_that_must_be_waited_for_gets_all() -> None:
    """Another process with the same terminal or pipe may have made it so."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with ThreadPoolExecutor(1) as pool, os.fdopen(read_end, "rb") as reader, os.fdopen(write_end, "w") as stream:
        reading = pool.submit(reader.read, len(PIECE))
        make_stream_writer(stream)(PIECE)
        assert reading.result(DEADLINE_S) == PIECE


def test_what_nobody_reads_is_dropped_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as stream:
        make_stream_writer(stream)(PIECE)
    assert capfd.readouterr().err == ""


def relay_seq(last: int, write: Callable[[bytes], None]) -> LineRelay:
    """Of a process that writes numbers, and has ended."""
    relay, process = LineRelay(), subprocess.Popen(["seq", str(last)], stdout=subprocess.PIPE)
    relay.relay_process(process, write, write)
    assert process.wait(DEADLINE_S) == 0
    return relay


@pytest.mark.processes
def test_the_last_lines_of_ended_processes_come_however_slow_this_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that passes them on gets no turn for longer than an output may stand still."""
    read, passed = os.read, bytearray()

    def read_late(descriptor: int, size: int) -> bytes:
        time.sleep(0.1)
        return read(descriptor, size)

    monkeypatch.setattr(lines.os, "read", read_late)
    relay_seq(100_000, passed.extend).wait_for_end(0.02)
    assert passed.endswith(b"\n100000\n")


@pytest.mark.processes
def test_an_output_that_takes_nothing_keeps_nobody_waiting() -> None:
    is_taken = threading.Event()
    relay = relay_seq(10, lambda _: wait_until(is_taken.is_set))
    relay.wait_for_end(0.05)
    is_taken.set()
    relay.wait_for_end(DEADLINE_S)


@pytest.mark.processes
def test_a_process_that_has_inherited_an_ended_ones_output_keeps_nobody_waiting() -> None:
    relay, passed = LineRelay(), bytearray()
    with subprocess.Popen(["sh", "-c", "echo begun; exec sleep 1000"], stdout=subprocess.PIPE) as orphan:
        relay.relay_process(orphan, passed.extend, passed.extend)
        wait_until(lambda: passed)
        relay.wait_for_end(0.05)
        orphan.kill()
        relay.wait_for_end(DEADLINE_S)
    assert passed == b"begun\n"
