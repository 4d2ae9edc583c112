"""What an agent shows of itself while it works: metrics and spans, where someone reads them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from varuna_agent.observability.rank_spans import RankSpans
from varuna_agent.state import AgentState, HostedWorker, WorkerKey
from varuna_proto.v1 import agent_pb2, worker_pb2

if TYPE_CHECKING:  # an agent without metrics starts sooner
    from varuna_agent.observability.metrics import AgentMetrics


class Observers:
    """Passes what happens to the agent's metrics and spans.

    Args:
        metrics: None: this agent serves no metrics.
        spans: None: this agent exports no traces.
    """

    def __init__(self, metrics: AgentMetrics | None = None, spans: RankSpans | None = None) -> None:
        self._metrics = metrics
        self._spans = spans

    def count_stream(self) -> None:
        if self._metrics is not None:
            self._metrics.count_stream()

    def count_notice(self) -> None:
        if self._metrics is not None:
            self._metrics.count_notice()

    def measure_state(self, state: AgentState) -> None:
        if self._metrics is not None:
            self._metrics.set_gauges(
                state.workers,
                survivors=state.survivors,
                warm_jobs=len(state.warm_jobs),
                unacknowledged=len(state.unacknowledged),
                connected=state.is_welcome,
            )

    def record_command(self, message: agent_pb2.ManagerMessage) -> None:
        if self._spans is not None:
            self._spans.record_command(message)

    def trace_start(self, workers: Iterable[HostedWorker], key: WorkerKey, message: worker_pb2.WorkerMessage) -> None:
        """Trace the start of a worker that is ready with this message."""
        if self._spans is not None and message.HasField("ready"):
            for worker in workers:
                if worker.key == key:
                    self._spans.add_start(worker, message.ready)

    def trace_end(self, key: WorkerKey) -> None:
        if self._spans is not None:
            self._spans.add_end(key)

    def flush(self) -> None:
        """Send the spans so far. Blocks: call it in a thread."""
        if self._spans is not None:
            self._spans.flush()

    def close(self) -> None:
        """Send the last spans. Blocks: call it in a thread."""
        if self._spans is not None:
            self._spans.close()
