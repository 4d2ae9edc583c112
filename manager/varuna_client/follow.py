"""Following what changes: events, logs and jobs, by asking again from where the last answer ended.

Asking again survives what a stream does not: the manager may be restarted while one watches.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from varuna_client.api import Client
from varuna_client.documents import END_STATES, Event, Generation, Job, Metric
from varuna_client.errors import NotFoundError, UnreachableError

INTERVAL_S = 0.5
PATIENCE_S = 30.0
"""For how long a manager that is being restarted may stay silent before following it ends."""


class Patience:
    """Forgives an unreachable manager for a while, and then raises what it said."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._since: float | None = None

    def heard(self) -> None:
        self._since = None

    def silent(self, error: UnreachableError) -> None:
        now = time.monotonic()
        self._since = self._since if self._since is not None else now
        if now - self._since > self._patience_s:
            raise error


def follow_events(client: Client, job: str | None = None) -> Iterator[Event]:
    """All events so far and then each as it comes, for ever."""
    after, patience = 0, Patience()
    while True:
        try:
            events = client.events(job, after=after)
            patience.heard()
        except UnreachableError as error:
            patience.silent(error)
            events = []
        for event in events:
            after = max(after, event["id"])
            yield event
        time.sleep(INTERVAL_S)


def follow_job(client: Client, job_id: str) -> Iterator[tuple[Job, list[Metric], list[Event]]]:
    """The job with its new steps and events, again and again until it has ended."""
    step, after, patience = 0, 0, Patience()
    while True:
        try:
            # The job first: what is read after it ended is then complete.
            job = client.job(job_id)
            metrics = client.metrics(job_id, after_step=step)
            events = client.events(job_id, after=after)
            patience.heard()
        except UnreachableError as error:
            patience.silent(error)
            time.sleep(INTERVAL_S)
            continue
        step = max((metric["step"] for metric in metrics), default=step)
        after = max((event["id"] for event in events), default=after)
        yield job, metrics, events
        if job["state"] in END_STATES:
            return
        time.sleep(INTERVAL_S)


def telling_rank(generations: Sequence[Generation], number: int | None) -> int:
    """The rank whose log says most: the first whose script failed, else 0. `number` None: the newest generation.

    The other ranks are stopped when one fails, and may have written nothing by then.
    """
    for generation in reversed(generations):
        if number in (None, generation["number"]):
            failed = (worker["rank"] for worker in generation["workers"] if worker["cause"] == "script_failed")
            return min(failed, default=0)
    return 0


def follow_log(client: Client, job_id: str, rank: int | None, generation: int | None) -> Iterator[bytes]:
    """A worker's log as it grows, until its generation is over; without a generation, through every one of them.

    Without a rank: rank 0's, and at the end of a job that failed that of the rank whose script failed.
    """
    current, offset, follows = generation, 0, rank or 0
    while True:
        job = client.job(job_id)
        if generation is None and job["generation"] != current:
            current, offset = job["generation"], 0
        if rank is None and job["state"] == "failed":
            failed = telling_rank(client.generations(job_id), current)
            if failed != follows:
                follows, offset = failed, 0
        chunk = b""
        if current is not None:
            try:
                chunk = client.logs(job_id, generation=current, rank=follows, offset=offset)
            except NotFoundError:
                chunk = b""  # not started yet, or this generation has fewer ranks
        offset += len(chunk)
        if chunk:
            yield chunk
            continue
        over = job["state"] in END_STATES or (generation is not None and job["generation"] != generation)
        if over:
            return
        time.sleep(INTERVAL_S)
