"""Limits on the processes of one job on one VM."""

from __future__ import annotations

from dataclasses import dataclass

from varuna_proto.v1 import agent_pb2


@dataclass(frozen=True, kw_only=True)
class ProcessLimits:
    """For all processes of the job together; 0: the job file sets no limit."""

    memory_bytes: int = 0
    cpus: float = 0.0
    processes: int = 0
    """Processes and threads."""

    @classmethod
    def from_message(cls, message: agent_pb2.JobLimits) -> ProcessLimits:
        return cls(memory_bytes=message.memory_bytes, cpus=message.cpus, processes=message.processes)


NO_LIMITS = ProcessLimits()
