"""Limits on the size of each kind of message and on the contents of Hello, which no working agent exceeds."""

from __future__ import annotations

from varuna_proto.bounds import MOST_EXACT, MOST_GPUS_OF_A_VM, MOST_REPORT_BYTES, NAME_CHARS, text_flaw
from varuna_proto.names import is_plain
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.wording import count_of

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Largest message of any kind: gRPC itself ends a stream with a larger one."""
HELLO_WITHIN_S = 15.0
"""A stream without a Hello for this long is closed."""
STREAMS_PER_CONNECTION = 100
_WAITING_STREAMS = 50_000
"""Streams that wait until the event loop takes them, one after the other. gRPC's own bound is 1,000: beyond it cancels
ever more of them, and a fleet that dials again spends its time on further TLS handshakes."""
_WAITING_S = 120
"""How long they wait at most; gRPC's own bound is 30 s. A stream whose agent has gone away meanwhile is dropped."""
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # otherwise a second manager silently shares the port
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.server.max_pending_requests", _WAITING_STREAMS),
    ("grpc.server.max_pending_requests_hard_limit", _WAITING_STREAMS),
    ("grpc.server_max_unrequested_time_in_server", _WAITING_S),
)
"""Of the gRPC server that agents dial."""
_KIB = 1024
_MOST_BYTES = {
    "hello": 1024 * _KIB,
    "heartbeat": 256 * _KIB,
    "report": MOST_REPORT_BYTES,
    "log_chunk": 1024 * _KIB,
    "stack_dump": 256 * _KIB,
}
_OTHER_KINDS_BYTES = 64 * _KIB
_MOST_PORT = 65535


def find_excess(message: pb.AgentMessage) -> str | None:
    """Why the message is too large; None: it is not. A profile grows with the number of sections of its model."""
    size = message.ByteSize()
    if size <= _OTHER_KINDS_BYTES:
        return None
    kind = message.WhichOneof("body") or "empty"
    most = _MOST_BYTES.get(kind, _OTHER_KINDS_BYTES)
    if kind == "report" and message.report.WhichOneof("fact") == "profile_measured":
        most = MAX_MESSAGE_BYTES
    return None if size <= most else f"a message of kind {kind} has {size} bytes, and {most} are taken"


def drop_excess(report: pb.Report) -> pb.Report:
    """A report that is too large, reduced to its number, which is acknowledged; an exit keeps all but its text.

    If the stream were ended instead, the agent would send the report again on the next one.
    """
    kept = pb.Report(number=report.number)
    if report.WhichOneof("fact") == "worker_exited":
        kept.worker_exited.CopyFrom(report.worker_exited)
        kept.worker_exited.error_text = "its last output is too large to be kept"
    return kept


def find_hello_flaw(hello: pb.Hello) -> str | None:
    """What is impossible in this Hello; None: nothing."""
    if not is_plain(hello.vm_id):
        return f"{hello.vm_id[:80]!r} is no VM's id"
    if hello.gpus > MOST_GPUS_OF_A_VM:
        return f"a VM with {count_of(hello.gpus, 'GPU')} is not taken, only with up to {MOST_GPUS_OF_A_VM}"
    if hello.device_memory_bytes > MOST_EXACT:
        return f"a device with {hello.device_memory_bytes} bytes is not taken"
    if valid_port(hello.rendezvous_port) != hello.rendezvous_port:
        return f"{hello.rendezvous_port} is no port"
    for name, text in (("host", hello.host), ("incarnation", hello.incarnation)):
        if len(text) > NAME_CHARS or text_flaw(text) is not None or not text.isprintable():
            return f"its {name} {text[:80]!r} is longer than {NAME_CHARS} characters, or has others than are printed"
    return None


def valid_port(number: int) -> int:
    """The number if it is a port, else 0."""
    return number if number <= _MOST_PORT else 0
