"""All metrics of a manager as one answer, and as a page of the documentation."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from varuna_manager.db.engine import StoreAwayError
from varuna_manager.services.metrics.family import Family
from varuna_manager.services.metrics.from_store import FAMILIES, JOBS_SHOWN, Findings, StoreFigures
from varuna_manager.services.metrics.instruments import KNOWN, Instruments

_HEAD = f"""\
# Metrics

Prometheus reads them from a manager's `/metrics`: from every manager, where there are several. On a secure manager
that takes a token with the role viewer (`authorization:` with `credentials_file:` in the scrape configuration).
[operations.md](operations.md) tells how to set that up, and explains the alerts.

This page is made from the code by `make docs`. Times are in seconds, sizes in bytes. No label names a VM or a rank,
and `job_name` is given for the {JOBS_SHOWN} oldest jobs that are not over, so that there are never many series.

## Counted as it happens

By each manager since it started. Agents talk to the leader, so most of it is the leader's.
"""
_BETWEEN = """
The standard `process_...` metrics (processor time, memory, open files) are there too.

## Read from the store

By the leader, as true right after a restart as before it; of a manager that stands by, and while the store is away,
only the first two are there. So sums over all managers are right, and a fleet that waits for its leader has no figures.
"""


class MetricsService:
    """`connected`: how many agents are, now; `first_certificate_end`: of theirs, in seconds since the epoch."""

    def __init__(
        self,
        instruments: Instruments,
        figures: StoreFigures,
        connected: Callable[[], int],
        first_certificate_end: Callable[[], float | None] = lambda: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.instruments = instruments
        self._figures = figures
        self._connected = connected
        self._first_certificate_end = first_certificate_end
        self._now = now

    async def text(self, accept: str) -> tuple[bytes, str]:
        """All of them in the format that `accept` (a header of HTTP) prefers, and its media type."""
        findings = Findings()
        try:
            await (self._figures.find(findings) if self.instruments.leads else self._figures.ask())
            findings.add("varuna_store_up", 1)
        except StoreAwayError:
            findings = Findings()
            findings.add("varuna_store_up", 0)
        findings.add("varuna_agents_connected", self._connected())
        ends_at = self._first_certificate_end()
        if ends_at is not None:
            findings.add("varuna_agent_certificate_days_left", (ends_at - self._now()) / 86_400)
        encode, media_type = choose_encoder(accept)
        return encode(_Both(self.instruments, findings)), media_type


class _Both(Collector):
    def __init__(self, instruments: Instruments, findings: Findings) -> None:
        self._instruments = instruments
        self._findings = findings

    def collect(self) -> Iterable[Metric]:
        for metric in self._instruments.registry.collect():
            # When each series began: as many series again, and nobody asks for them.
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
        yield from self._findings.collect()


def page() -> str:
    """docs/metrics.md."""
    lines = [_HEAD, *_table(KNOWN), _BETWEEN, *_table(FAMILIES)]
    return "\n".join(lines) + "\n"


def _table(families: Iterable[Family]) -> list[str]:
    rows = [f"| `{each.shown}` | {each.kind} | {_labels(each)} | {each.help} |" for each in families]
    return ["| metric | kind | labels | |", "| --- | --- | --- | --- |", *rows]


def _labels(family: Family) -> str:
    return ", ".join(f"`{label}`" for label in family.labels)


if __name__ == "__main__":
    sys.stdout.write(page())
