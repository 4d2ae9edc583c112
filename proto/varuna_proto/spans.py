"""OpenTelemetry spans of a morph; manager, agents and workers each send their part.

The spans need no measurements of their own. OpenTelemetry's variables (OTEL_EXPORTER_OTLP_ENDPOINT and others) turn
them on and name the receiver; without them nothing is imported and nothing is sent.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import structlog

from varuna_proto.trace_context import child

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext
    from opentelemetry.util.types import AttributeValue

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP = "http/protobuf"
_CLOSE_S = 2.0
_FLUSH_S = 2.0


def are_wanted(environ: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's variables ask for traces."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = environ.get("OTEL_TRACES_EXPORTER", "")
    return exporter == "otlp" or (not exporter and any(environ.get(name) for name in _ENDPOINTS))


def exporter(environ: Mapping[str, str], service: str, **resource: str | int) -> SpanExporter | None:
    """The exporter of this process's spans, under the name `service`; None when traces are off or impossible. The
    latter is logged, because traces are not worth a failed start.

    `environ` must be the process's own: the exporter takes address, headers and certificates from there.
    """
    if not are_wanted(environ):
        return None
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), _HTTP)
    if protocol != _HTTP:
        _log.warning("no traces: only the OTLP protocol http/protobuf is spoken", OTEL_EXPORTER_OTLP_PROTOCOL=protocol)
        return None
    try:
        return SpanExporter(environ.get("OTEL_SERVICE_NAME") or service, resource)
    except ModuleNotFoundError as error:
        _log.warning("no traces: install what they need with pip install 'varuna-spot[otel]'", missing=error.name)
        return None


class SpanExporter:
    """Sends ended spans to the OTLP receiver, from a thread of its own. Spans are lost if the receiver is away.

    It sends all of them, whatever sampler is configured, because morphs are few.
    """

    def __init__(self, service: str, resource: Mapping[str, str | int]) -> None:
        """Raises ModuleNotFoundError without OpenTelemetry's packages."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._resource = Resource.create({"service.name": service, **resource})
        self._processor = BatchSpanProcessor(OTLPSpanExporter())

    def add(
        self,
        name: str,
        begin_s: float,
        end_s: float,
        *,
        context: str,
        parent: str = "",
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> None:
        """Add a span from `begin_s` to `end_s`, in seconds since the epoch.

        Args:
            context: the span's own context.
            parent: the context of its parent; empty: it is the root of its trace.
        """
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        span = ReadableSpan(
            name,
            context=_span_context(context, is_remote=False),
            parent=_span_context(parent, is_remote=True) if parent else None,
            resource=self._resource,
            attributes=attributes,
            instrumentation_scope=InstrumentationScope("varuna"),
            start_time=round(begin_s * 1e9),
            end_time=round(max(begin_s, end_s) * 1e9),
        )
        self._processor.on_end(span)

    def add_sequence(self, parent: str, begin_s: float, parts: Iterable[tuple[str, float]]) -> None:
        """Add spans under `parent`, one after the other; `parts`: name and seconds of each."""
        for name, seconds in parts:
            self.add(name, begin_s, begin_s + seconds, context=child(parent, name), parent=parent)
            begin_s += seconds

    def flush(self, within_s: float = _FLUSH_S) -> None:
        """Sends what has been added so far within `within_s`. Blocks."""
        self._processor.force_flush(round(within_s * 1e3))

    def close(self, within_s: float = _CLOSE_S) -> None:
        """Sends the rest within `within_s`, because a process's end must not wait for a receiver that is away."""
        sending = threading.Thread(target=self._processor.shutdown, name="last spans", daemon=True)
        sending.start()
        sending.join(within_s)


def _span_context(context: str, *, is_remote: bool) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    _, trace_id, span_id, flags = context.split("-")
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, TraceFlags(int(flags, 16)))
