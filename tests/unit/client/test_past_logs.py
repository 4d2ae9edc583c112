"""What `varuna logs` prints of a job's generations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import pytest

from varuna_client.errors import NotFoundError, RefusedError
from varuna_client.following.log_follow import ALL
from varuna_client.following.past_logs import PastLogs
from varuna_client.rest.calls import LogChunk
from varuna_client.rest.client import Client

AWAY = RefusedError(503, "VM a of rank 0 is out of reach")
PIECE = 8
"""Bytes that the manager sends at once."""


class Generations:
    """The manager's answers about a job, by what each rank wrote in each generation."""

    def __init__(self, logs: dict[int, list[bytes | RefusedError]], failed: dict[int, int] | None = None) -> None:
        self._logs = logs
        self._failed = failed or {}
        """The rank whose script failed, by generation."""

    def generations(self, job_id: str, *, brief: bool) -> list[dict[str, Any]]:
        return [{"number": number} for number in self._logs]

    def generation(self, job_id: str, number: int) -> dict[str, Any]:
        def worker(rank: int) -> dict[str, Any]:
            cause = "script_failed" if self._failed.get(number) == rank else "generation_ended"
            return {"rank": rank, "cause": cause, "exit_code": rank, "error": ""}

        ranks = range(len(self._logs[number]))
        return {
            "number": number,
            "placement": [{"rank": rank} for rank in ranks],
            "workers": [worker(rank) for rank in ranks],
        }

    def log_chunk(self, job_id: str, *, generation: int | None = None, rank: int = 0, offset: int = 0) -> LogChunk:
        if generation is None or rank >= len(self._logs[generation]):
            raise NotFoundError("there is none")
        log = self._logs[generation][rank]
        if isinstance(log, RefusedError):
            raise log
        at = max(len(log) + offset, 0) if offset < 0 else offset
        data = log[at : at + PIECE]
        return LogChunk(
            data=data, generation=generation, rank=rank, offset=at, next_offset=at + len(data), size=len(log)
        )


def past(job: Generations, ranks: int | str | None = None, generation: int | None = None) -> PastLogs:
    return PastLogs(cast("Client", job), "j", ranks, generation)


def written(parts: Iterable[LogChunk | str]) -> list[tuple[int, int, bytes] | str]:
    """Notes, and what was read as (generation, rank, data), with the pieces of a log joined."""
    found: list[tuple[int, int, bytes] | str] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, str):
            found.append(part)
        elif isinstance(last, tuple) and last[:2] == (part.generation, part.rank):
            found[-1] = (*last[:2], last[2] + part.data)
        else:
            found.append((part.generation, part.rank, part.data))
    return found


def test_all_generations_are_read_oldest_first() -> None:
    job = Generations({1: [b"one, a long line\n"], 2: [b"two\n"], 3: [b"three\n"]})
    assert written(past(job).read_all()) == [(1, 0, b"one, a long line\n"), (2, 0, b"two\n"), (3, 0, b"three\n")]
    assert written(past(job, generation=2).read_all()) == [(2, 0, b"two\n")]


def test_each_generation_shows_the_rank_whose_script_failed() -> None:
    job = Generations({1: [b"a0", b"a1"], 2: [b"b0", b"b1"]}, failed={1: 1})
    assert written(past(job).read_all()) == [(1, 1, b"a1"), (2, 0, b"b0")]
    assert written(past(job).read_tail(PIECE)) == [(1, 1, b"a1"), (2, 0, b"b0")]


def test_the_end_is_that_of_the_whole_job() -> None:
    job = Generations({1: [b"1111"], 2: [b"2222"], 3: [b"3333"], 4: [b"44"]})
    assert written(past(job).read_tail(6)) == [
        "generations 1 to 2: left out (--all prints them)",
        (3, 0, b"3333"),
        (4, 0, b"44"),
    ]
    assert written(past(job).read_tail(5)) == [
        "generations 1 to 2: left out (--all prints them)",
        "rank 0 in generation 3: the first 1 B are left out (--all prints them)",
        (3, 0, b"333"),
        (4, 0, b"44"),
    ]
    assert written(past(job, generation=1).read_tail(2)) == [
        "rank 0 in generation 1: the first 2 B are left out (--all prints them)",
        (1, 0, b"11"),
    ]


def test_every_rank_has_an_end_of_its_own() -> None:
    job = Generations({1: [b"1111", b"1"], 2: [b"2222", b"2"]})
    assert written(past(job, ALL).read_tail(4)) == [
        (1, 1, b"1"),
        (2, 0, b"2222"),
        (2, 1, b"2"),
    ]


def test_a_log_out_of_reach_is_noted_and_the_others_are_read() -> None:
    job = Generations({1: [AWAY], 2: [b"two\n"]})
    expected = ["generation 1: VM a of rank 0 is out of reach", (2, 0, b"two\n")]
    assert written(past(job).read_all()) == expected
    assert written(past(job).read_tail(PIECE)) == expected


def test_a_rank_is_read_from_the_generations_that_have_it() -> None:
    job = Generations({1: [b"a0", b"a1"], 2: [b"b0"]})
    assert written(past(job, 1).read_all()) == [(1, 1, b"a1")]
    assert written(past(job, 1).read_tail(PIECE)) == [(1, 1, b"a1")]


@pytest.mark.parametrize(
    ("logs", "ranks", "generation"),
    [
        ({}, None, None),  # the job has no generation
        ({1: [b"a0"], 2: [b"b0"]}, 7, None),  # no generation has such a rank
        ({1: [AWAY], 2: [AWAY]}, 0, None),
        ({1: [AWAY]}, None, 1),
    ],
)
def test_the_managers_error_is_raised_if_there_is_nothing_to_read(
    logs: dict[int, list[bytes | RefusedError]], ranks: int | None, generation: int | None
) -> None:
    job = Generations(logs)
    with pytest.raises(RefusedError):
        list(past(job, ranks, generation).read_all())
    with pytest.raises(RefusedError):
        list(past(job, ranks, generation).read_tail(PIECE))
