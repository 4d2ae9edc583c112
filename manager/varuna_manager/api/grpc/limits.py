"""How large a message of each kind may be, and what a Hello may say: an agent that sends other things is broken, or is
none of ours."""

from __future__ import annotations

from varuna_proto.bounds import MOST_EXACT, MOST_GPUS_OF_A_VM, NAME_CHARS, text_flaw
from varuna_proto.names import is_plain
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
_MOST_PORT = 65535


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


def without_excess(report: pb.Report) -> pb.Report:
    """What is kept of a report that is too large: its number, for it is acknowledged, and of an exit all but its text.

    Were its stream ended instead, the agent would send it again on the next one.
    """
    kept = pb.Report(number=report.number)
    if report.WhichOneof("fact") == "worker_exited":
        kept.worker_exited.CopyFrom(report.worker_exited)
        kept.worker_exited.error_text = "what it said last is too large to be kept"
    return kept


def flaw_of_hello(hello: pb.Hello) -> str | None:
    """What cannot be about a VM that says this; None: nothing."""
    if not is_plain(hello.vm_id):
        return f"{hello.vm_id[:80]!r} is no VM's id"
    if hello.gpus > MOST_GPUS_OF_A_VM:
        return f"a VM with {hello.gpus} GPUs is not taken, only with up to {MOST_GPUS_OF_A_VM}"
    if hello.device_memory_bytes > MOST_EXACT:
        return f"a device with {hello.device_memory_bytes} bytes is not taken"
    if port_of(hello.rendezvous_port) != hello.rendezvous_port:
        return f"{hello.rendezvous_port} is no port"
    for name, text in (("host", hello.host), ("incarnation", hello.incarnation)):
        if len(text) > NAME_CHARS or text_flaw(text) is not None or not text.isprintable():
            return f"its {name} {text[:80]!r} is longer than {NAME_CHARS} characters, or has others than are printed"
    return None


def port_of(number: int) -> int:
    """The port; 0, which is none, for what is none."""
    return number if number <= _MOST_PORT else 0
