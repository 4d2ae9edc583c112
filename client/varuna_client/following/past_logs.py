"""Reads what a job's workers have written so far, over all its generations or in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from varuna_client.errors import NotFoundError, RefusedError
from varuna_client.following.follow import find_failed_rank
from varuna_client.following.log_follow import ALL, Ranks
from varuna_client.rest.calls import LogChunk
from varuna_client.rest.client import Client
from varuna_client.text import render

_PRINTS_ALL = "(--all prints them)"


class PastLogs:
    """The logs of a job's `ranks` in `generation`, or in all generations, oldest first.

    `ranks` None: in each generation the rank whose script failed, or else 0.

    Both methods yield parts of the logs and, as text, notes on what is missing. They raise the client's errors, and
    RefusedError if no log at all can be read.
    """

    def __init__(self, client: Client, job_id: str, ranks: Ranks, generation: int | None) -> None:
        self._client = client
        self._job_id = job_id
        self._ranks = ranks
        self._only = generation
        self._refusals: dict[int, RefusedError] = {}
        """By generation."""
        self._has_read = False

    def read_all(self) -> Iterator[LogChunk | str]:
        """From the beginning."""
        for number in self._list_generations():
            for rank in self._ranks_of(number):
                offset, size = 0, 1
                while offset < size:
                    part = self._read(number, rank, offset)
                    if part is not None:
                        yield part
                    if not isinstance(part, LogChunk) or not part.data:
                        break
                    offset, size = part.next_offset, part.size
        self._check()

    def read_tail(self, most_bytes: int) -> Iterator[LogChunk | str]:
        """The last `most_bytes` of each rank, from as many generations as have them."""
        left: dict[int | None, int] = {}
        found: list[LogChunk | str] = []
        for number in reversed(self._list_generations()):
            # One rank of each generation is one log that goes on, whichever rank it is.
            ranks = {rank if self._ranks == ALL else None: rank for rank in self._ranks_of(number)}
            wanted = {key: rank for key, rank in ranks.items() if left.get(key, most_bytes) > 0}
            if not wanted:
                found.append(f"generation{'s 1 to' if number > 1 else ''} {number}: left out {_PRINTS_ALL}")
                break
            parts: list[LogChunk | str] = []
            for key, rank in wanted.items():
                part = self._read(number, rank, -left.get(key, most_bytes))
                if part is None:
                    continue
                if isinstance(part, LogChunk):
                    left[key] = left.get(key, most_bytes) - len(part.data)
                    if part.offset > 0:
                        left[key] = 0
                        where = f"rank {rank} in generation {number}"
                        parts.append(f"{where}: the first {render.size(part.offset)} are left out {_PRINTS_ALL}")
                parts.append(part)
            found += reversed(parts)
        yield from reversed(found)
        self._check()

    def _list_generations(self) -> Sequence[int]:
        if self._only is not None:
            return [self._only]
        numbers = [generation["number"] for generation in self._client.generations(self._job_id, brief=True)]
        if not numbers:
            self._client.log_chunk(self._job_id)  # the manager's error says why there are none
        return numbers

    def _ranks_of(self, number: int) -> Sequence[int]:
        if isinstance(self._ranks, int):
            return [self._ranks]
        generation = self._client.generation(self._job_id, number)
        if self._ranks == ALL:
            return [place["rank"] for place in generation["placement"]]
        return [find_failed_rank([generation], number)]

    def _read(self, number: int, rank: int, offset: int) -> LogChunk | str | None:
        """A part of a log, or why it cannot be read; None: the generation has no such rank."""
        try:
            part = self._client.log_chunk(self._job_id, generation=number, rank=rank, offset=offset)
        except RefusedError as error:
            self._refusals[number] = error
            return None if isinstance(error, NotFoundError) else f"generation {number}: {error}"
        self._has_read = True
        return part

    def _check(self) -> None:
        """Raise the newest generation's refusal if no log could be read."""
        if self._refusals and not self._has_read:
            raise self._refusals[max(self._refusals)]
