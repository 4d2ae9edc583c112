"""Following a job to its end, by the manager's stream of events: it costs the manager what it tells, and no more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, TypeGuard

from varuna_client.api import Client
from varuna_client.documents import END_STATES, Event, Generation
from varuna_client.exchange import Told

END_KINDS = frozenset(f"job_{state}" for state in END_STATES)
"""Of events."""


def follow_job(client: Client, job_id: str, *, after: int = 0) -> Iterator[Told]:
    """What is told of the job after event number `after`, until it is over. A manager may be restarted meanwhile.

    A job that is over already must have ended after `after`.
    """
    for told in client.stream(job_id, after=after):
        yield told
        if told[0] == "event" and told[1]["kind"] in END_KINDS and client.job(job_id)["state"] in END_STATES:
            return


def newest_event_id(client: Client, job_id: str | None = None) -> int:
    """0: there is none."""
    return max((event["id"] for event in client.newest_events(job_id, limit=1)), default=0)


def is_event(told: Told) -> TypeGuard[tuple[Literal["event"], Event]]:
    return told[0] == "event"


def telling_rank(generations: Sequence[Generation], number: int | None) -> int:
    """The rank whose log says most: the first whose script failed, else 0. `number` None: the newest generation.

    The other ranks are stopped when one fails, and may have written nothing by then. One that ended with the same words
    and exit code before the stop reached it says as much, so the lowest such rank is taken: whoever has followed rank 0
    does not read the same failure twice.
    """
    for generation in reversed(generations):
        if number in (None, generation["number"]):
            workers = sorted(generation["workers"], key=lambda worker: worker["rank"])
            failed = next((worker for worker in workers if worker["cause"] == "script_failed"), None)
            if failed is None:
                return 0
            end = (failed["exit_code"], failed["error"])
            return next(worker["rank"] for worker in workers if (worker["exit_code"], worker["error"]) == end)
    return 0
