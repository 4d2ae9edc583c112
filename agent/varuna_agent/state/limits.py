"""What the processes of a job may take on one VM."""

from __future__ import annotations

from dataclasses import dataclass

from varuna_proto.v1 import agent_pb2


@dataclass(frozen=True, kw_only=True)
class JobLimits:
    """Of all its processes together; 0: the job file sets none."""

    memory_bytes: int = 0
    cpus: float = 0.0
    processes: int = 0
    """Threads count as well."""

    @classmethod
    def from_message(cls, message: agent_pb2.JobLimits) -> JobLimits:
        return cls(memory_bytes=message.memory_bytes, cpus=message.cpus, processes=message.processes)


NO_LIMITS = JobLimits()
