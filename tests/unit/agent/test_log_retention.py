"""Logs on a VM stay within their limit, and a follower goes on where it was."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from varuna_agent.logs import log_files
from varuna_agent.logs import retention as log_retention
from varuna_agent.logs.retention import LogSizes, discard_old_logs, keep_logs_small, trim_log
from varuna_manager.jobs.line_search import LineSearch
from varuna_manager.jobs.logs import _read_file

KIB = 1024


def disk_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


def lines(count: int) -> bytes:
    return b"".join(b"line %011d\n" % number for number in range(count))


@pytest.fixture
def with_holes(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system that has holes in files."""
    for place in (tmp_path, Path("/dev/shm")):
        with tempfile.TemporaryDirectory(dir=place) as name:
            probe = Path(name) / "probe"
            probe.write_bytes(b"x" * 64 * KIB)
            trim_log(probe, 16 * KIB)
            if disk_bytes(probe) < probe.stat().st_size:
                yield Path(name)
                return
    pytest.skip("needs a file system with holes in files (ext4, xfs, tmpfs, ...) for temporary files or at /dev/shm")


def test_a_long_log_keeps_its_newest_part_and_its_offsets_while_it_is_written(with_holes: Path) -> None:
    log = with_holes / "rank0.log"
    descriptor = log_files.open_log(log)
    os.write(descriptor, text := lines(64 * KIB))  # 1 MiB
    trim_log(log, 256 * KIB)
    os.write(descriptor, b"and more\n")
    os.close(descriptor)
    assert disk_bytes(log) <= 256 * KIB
    follower = log_files.read_part(log, len(text), 100)
    assert (follower.data, follower.offset) == (b"and more\n", len(text))
    first = log_files.read_part(log, 0, 32)
    assert first.offset >= len(text) - 256 * KIB
    assert first.data == text[first.offset : first.offset + 32]
    assert log_files.read_tail(log, lines=1) == "and more"


def test_a_log_within_its_size_stays_as_it_is(with_holes: Path) -> None:
    log = with_holes / "rank0.log"
    log.write_bytes(text := lines(4 * KIB))
    trim_log(log, 256 * KIB)
    assert log_files.read_part(log, 0, len(text)) == log_files.LogSlice(text, 0, len(text))


def test_without_holes_a_log_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_retention, "_punch_hole", lambda *_: False)
    log = tmp_path / "rank0.log"
    descriptor = log_files.open_log(log)
    os.write(descriptor, lines(64 * KIB))
    trim_log(log, 256 * KIB)
    os.write(descriptor, b"new\n")
    os.close(descriptor)
    assert log.read_bytes() == b"new\n"


def test_the_oldest_generations_logs_go_first_and_running_ones_stay(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    for number, name in enumerate(("old/g1", "old/g2", "new/g1", "new/g2", "new/g10")):
        (jobs / name).mkdir(parents=True)
        log = jobs / name / "rank0.log"
        log.write_bytes(b"x" * 60 * KIB)
        os.utime(log, (number, number))
    (jobs / "old" / "warm.log").touch()
    discard_old_logs(jobs, [jobs / "new" / "g1"], 140 * KIB)
    assert sorted(str(path.relative_to(jobs)) for path in jobs.glob("*/g*")) == ["new/g1", "new/g10", "new/g2"]
    assert not (jobs / "old").exists()


def test_logs_of_workers_warmed_processes_and_setups_are_all_looked_at(
    with_holes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_output: list[int] = []
    monkeypatch.setattr(log_retention, "trim_log", lambda path, _: found.append(path.relative_to(with_holes)))
    monkeypatch.setattr(log_retention, "trim_descriptor", lambda descriptor, _: own_output.append(descriptor))
    found: list[Path] = []
    for name in ("jobs/j/g2/rank0.log", "jobs/j/g1/rank0.log", "jobs/j/warm.log", "workdirs/k/setup.log"):
        (with_holes / name).parent.mkdir(parents=True, exist_ok=True)
        (with_holes / name).touch()
    keep_logs_small(with_holes, {("j", 2)}, LogSizes(each_bytes=KIB, old_bytes=10**9))
    assert sorted(map(str, found)) == ["jobs/j/g2/rank0.log", "jobs/j/warm.log", "workdirs/k/setup.log"]
    assert own_output == [2]
    assert (with_holes / "jobs" / "j" / "g1").exists()


def test_a_link_that_a_job_has_put_in_a_logs_place_is_not_followed(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"x" * 64 * KIB)
    (tmp_path / "rank0.log").symlink_to(theirs)
    with pytest.raises(OSError, match="Too many levels"):
        trim_log(tmp_path / "rank0.log", KIB)
    assert theirs.read_bytes() == b"x" * 64 * KIB


def test_the_manager_reads_and_searches_what_is_left_of_a_log_of_a_vm_that_is_gone(with_holes: Path) -> None:
    log = with_holes / "rank0.log"
    log.write_bytes(text := lines(64 * KIB))
    trim_log(log, 256 * KIB)
    at, data, size = _read_file(log, 0, 64)
    assert (at > 0, data, size) == (True, text[at : at + 64], len(text))
    search = LineSearch("line", 1, ignore_case=False)
    search.skip_to(at)
    search.add_part(data)
    assert search.matches[0]["offset"] == at + data.index(b"line")
