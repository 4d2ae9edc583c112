"""The agent's metrics for Prometheus (`--metrics-port`)."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, start_http_server

from varuna_agent.state import HostedWorker
from varuna_agent.state.hosted_worker import WorkerPhase
from varuna_agent.state.survivors import Survivor


class AgentMetrics:
    """Set in the agent's loop, read by the server's thread."""

    def __init__(self, version: str) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        Gauge("varuna_agent_info", "1; its label is the version.", ["version"], registry=registry).labels(version).set(
            1
        )
        self._workers = Gauge(
            "varuna_agent_workers",
            "Workers on this VM, by their phase: `waiting` (for a device), `starting`, `connected` (loading), `ready` "
            "(training), `leaving`, `killed`.",
            ["phase"],
            registry=registry,
        )
        self._survivors = Gauge(
            "varuna_agent_survivors",
            "Processes that have left their generation and keep its state for the next one, or give it to that one.",
            registry=registry,
        )
        self._held_bytes = Gauge(
            "varuna_agent_held_bytes", "Bytes of state that these processes hold, as they report it.", registry=registry
        )
        self._warm = Gauge(
            "varuna_agent_warm_jobs",
            "Jobs whose workers would start at once, from a warmed process.",
            registry=registry,
        )
        self._reports = Gauge(
            "varuna_agent_unacknowledged_reports", "Reports that the manager has not stored yet.", registry=registry
        )
        self._connected = Gauge(
            "varuna_agent_connected", "Whether the manager has taken this agent on its stream (1).", registry=registry
        )
        self._streams = Counter(
            "varuna_agent_streams",
            "Attempts at a stream to the manager: one, and one for each loss.",
            registry=registry,
        )
        self._notices = Counter("varuna_agent_notices", "Notices of a preemption of this VM.", registry=registry)

    def count_stream(self) -> None:
        self._streams.inc()

    def count_notice(self) -> None:
        self._notices.inc()

    def set_gauges(
        self,
        workers: Iterable[HostedWorker],
        *,
        survivors: Collection[Survivor],
        warm_jobs: int,
        unacknowledged: int,
        connected: bool,
    ) -> None:
        counts = Count(worker.phase for worker in workers)
        for phase in WorkerPhase:
            if phase is not WorkerPhase.GONE:
                self._workers.labels(phase.value).set(counts[phase])
        self._survivors.set(len(survivors))
        self._held_bytes.set(sum(survivor.held.bytes for survivor in survivors))
        self._warm.set(warm_jobs)
        self._reports.set(unacknowledged)
        self._connected.set(connected)

    @contextmanager
    def serve_metrics(self, host: str, port: int) -> Iterator[None]:
        """Serve `/metrics` at this address. Raises OSError when the address is in use or not this VM's."""
        try:
            server, thread = start_http_server(port, host, self.registry)
        except OSError as error:
            raise OSError(
                f"--metrics-port {port}: cannot listen at {host} ({error.strerror}): give another port"
            ) from error
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
