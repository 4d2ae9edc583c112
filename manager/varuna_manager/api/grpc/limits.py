"""How large a message of each kind may be: an agent that sends more is broken, or is none of ours."""

from __future__ import annotations

from varuna_proto.v1 import agent_pb2 as pb

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Of any kind: gRPC itself ends a stream that brings more."""
HELLO_WITHIN_S = 15.0
"""A stream on which nobody says Hello for so long is closed."""
STREAMS_PER_CONNECTION = 100
_KIB = 1024
_MOST_BYTES = {
    "hello": 1024 * _KIB,
    "heartbeat": 256 * _KIB,
    "report": 1024 * _KIB,
    "log_chunk": 1024 * _KIB,
    "stack_dump": 256 * _KIB,
}
_OTHER_KINDS_BYTES = 64 * _KIB


def excess(message: pb.AgentMessage) -> str | None:
    """What is too large about the message; None: nothing. A profile is as large as its model has sections."""
    size = message.ByteSize()
    if size <= _OTHER_KINDS_BYTES:
        return None
    kind = message.WhichOneof("body") or "empty"
    most = _MOST_BYTES.get(kind, _OTHER_KINDS_BYTES)
    if kind == "report" and message.report.WhichOneof("fact") == "profile_measured":
        most = MAX_MESSAGE_BYTES
    return None if size <= most else f"a message of kind {kind} has {size} bytes, and {most} are taken"
