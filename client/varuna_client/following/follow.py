"""Follows a job to its end on the manager's event stream, which is cheaper for the manager than polling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, TypeGuard

from varuna_client.rest.client import Client
from varuna_client.rest.exchange import StreamItem
from varuna_proto.rest import END_STATES, EventDocument, GenerationDocument

END_KINDS = frozenset(f"job_{state}" for state in END_STATES)
"""The kinds of events that end a job."""


def follow_job(client: Client, job_id: str, *, after: int = 0) -> Iterator[StreamItem]:
    """Yield the job's items after event number `after`, until the job ends. The manager may restart meanwhile.

    A job that has already ended must have done so after `after`.
    """
    for item in client.stream(job_id, after=after):
        yield item
        if item[0] == "event" and item[1]["kind"] in END_KINDS and client.job(job_id)["state"] in END_STATES:
            return


def newest_event_id(client: Client, job_id: str | None = None) -> int:
    """The number of the newest event, or 0."""
    return max((event["id"] for event in client.newest_events(job_id, limit=1)), default=0)


def is_event(item: StreamItem) -> TypeGuard[tuple[Literal["event"], EventDocument]]:
    return item[0] == "event"


def find_failed_rank(generations: Sequence[GenerationDocument], number: int | None) -> int:
    """The first rank whose script failed, else 0. `number` None: the newest generation.

    The other ranks are stopped when one fails, and may have written nothing by then. A rank that ended with the same
    error and exit code before the stop serves as well, so the lowest such rank is taken. Then a follower of rank 0 does
    not read the same failure twice.
    """
    for generation in reversed(generations):
        if number in (None, generation["number"]):
            workers = sorted(generation["workers"], key=lambda worker: worker["rank"])
            causes = ("script_failed", "out_of_memory")
            failed = next((worker for worker in workers if worker["cause"] in causes), None)
            if failed is None:
                return 0
            end = (failed["exit_code"], failed["error"])
            return next(worker["rank"] for worker in workers if (worker["exit_code"], worker["error"]) == end)
    return 0
