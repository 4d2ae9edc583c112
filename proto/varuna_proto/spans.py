"""OpenTelemetry spans of a morph, of which manager, agents and workers each tell their part.

All ids follow from the job and the number of the generation that a morph begins: a manager that was restarted half-way
goes on with the same trace, and nothing has to be stored. Times are those that are measured anyway.

Whether and where spans go is said by OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT and the others); without
them nothing is imported and nothing is sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import structlog

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import IdGenerator
    from opentelemetry.util.types import AttributeValue

_log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP = "http/protobuf"
_CLOSE_MS = 3000


def traceparent(job_id: str, generation: int) -> str:
    """The W3C trace context of the morph that begins the generation; its span is the trace's first."""
    digest = hashlib.sha256(f"varuna/{job_id}/{generation}".encode()).hexdigest()
    return f"00-{digest[:32]}-{digest[32:48]}-01"


def child(parent: str, name: str) -> str:
    """The context of the span of this name under the one of `parent`; empty when that is."""
    if not parent:
        return ""
    version, trace_id, _, flags = parent.split("-")
    span_id = hashlib.sha256(f"{parent}/{name}".encode()).hexdigest()[:16]
    return "-".join((version, trace_id, span_id, flags))


def are_wanted(environ: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's variables ask for traces."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = environ.get("OTEL_TRACES_EXPORTER", "")
    return exporter == "otlp" or (not exporter and any(environ.get(name) for name in _ENDPOINTS))


def exporter(environ: Mapping[str, str], service: str, **resource: str | int) -> SpanExporter | None:
    """What sends the spans of this process, a `service`; None when none are wanted, or when that is impossible, which
    is logged: traces are not worth a failed start.

    `environ` is the process's own, from which the exporter takes address, headers and certificates.
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
    """Sends spans that are over to the OTLP receiver, from a thread of its own. A receiver that is away loses them."""

    def __init__(self, service: str, resource: Mapping[str, str | int]) -> None:
        """Raises ModuleNotFoundError without OpenTelemetry's packages."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._ids = _next_ids()
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service, **resource}),
            id_generator=self._ids.generator,
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("varuna")

    def add(
        self,
        name: str,
        begin_s: float,
        end_s: float,
        *,
        context: str = "",
        parent: str = "",
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> None:
        """A span from `begin_s` to `end_s`, in seconds since the epoch.

        Args:
            context: its own, where others are told of it; empty: one that nobody knows.
            parent: the context of the span above; empty: it is its trace's first.
        """
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        above = Context()
        if parent:
            above = TraceContextTextMapPropagator().extract({"traceparent": parent}, context=above)
        if context:
            _, trace_id, span_id, _ = context.split("-")
            self._ids.next(int(trace_id, 16), int(span_id, 16))
        span = self._tracer.start_span(name, above, attributes=attributes, start_time=round(begin_s * 1e9))
        span.end(end_time=round(max(begin_s, end_s) * 1e9))

    def close(self) -> None:
        """Sends what is left; takes some seconds when the receiver does not answer."""
        self._provider.force_flush(_CLOSE_MS)
        self._provider.shutdown()


class _Ids(NamedTuple):
    generator: IdGenerator
    next: _SetNext


def _next_ids() -> _Ids:
    """Random ids, except that the next span's can be set."""
    raise NotImplementedError
