"""What processes print reaches the launcher's output, and an output that takes nothing keeps no process waiting."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from varuna.launching.lines import LineRelay, make_stream_writer
from waiting import DEADLINE_S

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
