"""All metrics of a manager as one answer to a scrape, and as a page of the documentation."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from varuna_manager.db.engine import StoreAwayError
from varuna_manager.metrics.family import MetricFamily
from varuna_manager.metrics.from_store import JOBS_SHOWN, STORE_FAMILIES, StoreMetrics, StoreSamples
from varuna_manager.metrics.instruments import COUNTED_FAMILIES, Instruments

_HEAD = f"""\
# Metrics

Prometheus scrapes `/metrics` of every manager. A secure manager requires a token with the role viewer (`authorization:`
with `credentials_file:` in the scrape configuration). [operations.md](operations.md) shows how to set this up, and
explains the alerts.

`make docs` makes this page from the code. Times are in seconds, sizes in bytes. No label names a VM or a rank, and only
the {JOBS_SHOWN} oldest jobs that are not over have series with `job_name`, so that the number of series is bounded.

## Counted as things happen

Each manager counts these since its start. Most of them are the leader's, because agents connect to the leader.
"""
_BETWEEN = """
The standard `process_...` metrics (processor time, memory, open files) are included.

## Read from the store

The leader reads these from the store, so that a restart does not reset them. A standby, or a manager without its store,
has only the first two. Sums over all managers are therefore right, and there are no values while no manager leads.
"""


class MetricsService:
    """`connected`: number of connected agents; `first_certificate_end`: when the first of their certificates ends."""

    def __init__(
        self,
        instruments: Instruments,
        figures: StoreMetrics,
        connected: Callable[[], int],
        first_certificate_end: Callable[[], float | None] = lambda: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.instruments = instruments
        self._figures = figures
        self._connected = connected
        self._first_certificate_end = first_certificate_end
        self._now = now

    async def render_metrics(self, accept: str) -> tuple[bytes, str]:
        """All metrics in the format that the HTTP header Accept prefers, and its media type."""
        samples = StoreSamples()
        try:
            await (self._figures.collect_samples(samples) if self.instruments.leads else self._figures.check_store())
            samples.add_sample("varuna_store_up", 1)
        except StoreAwayError:
            samples = StoreSamples()
            samples.add_sample("varuna_store_up", 0)
        samples.add_sample("varuna_agents_connected", self._connected())
        ends_at = self._first_certificate_end()
        if ends_at is not None:
            samples.add_sample("varuna_agent_certificate_days_left", (ends_at - self._now()) / 86_400)
        encode, media_type = choose_encoder(accept)
        return encode(_CombinedCollector(self.instruments, samples)), media_type


class _CombinedCollector(Collector):
    def __init__(self, instruments: Instruments, samples: StoreSamples) -> None:
        self._instruments = instruments
        self._samples = samples

    def collect(self) -> Iterable[Metric]:
        for metric in self._instruments.registry.collect():
            # Creation times would double the number of series, and no dashboard uses them.
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
        yield from self._samples.collect()


def render_page() -> str:
    """The text of docs/metrics.md."""
    lines = [_HEAD, *_render_table(COUNTED_FAMILIES), _BETWEEN, *_render_table(STORE_FAMILIES)]
    return "\n".join(lines) + "\n"


def _render_table(families: Iterable[MetricFamily]) -> list[str]:
    rows = [f"| `{each.exposed_name}` | {each.kind} | {_render_labels(each)} | {each.help} |" for each in families]
    return ["| metric | kind | labels | |", "| --- | --- | --- | --- |", *rows]


def _render_labels(family: MetricFamily) -> str:
    return ", ".join(f"`{label}`" for label in family.labels)


if __name__ == "__main__":
    sys.stdout.write(render_page())
