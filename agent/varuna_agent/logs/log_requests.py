"""Answers to the manager's requests for a part of a worker's log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from varuna_agent.logs import log_files
from varuna_agent.state import WorkerKey
from varuna_proto.v1 import agent_pb2

_CHUNK_BYTES = 256 * 1024
_DEFAULT_BYTES = 64 * 1024
_MAX_BYTES = 4 * 1024 * 1024


async def read_log_chunks(vm_dir: Path, vm_id: str, request: agent_pb2.FetchLogs) -> list[agent_pb2.LogChunk]:
    """The requested part of a log in chunks, or one chunk with the error."""
    key = WorkerKey(request.job_id, request.generation, request.rank)
    path = log_files.log_path(vm_dir, key)
    max_bytes = min(request.max_bytes or _DEFAULT_BYTES, _MAX_BYTES)
    try:
        if not path.resolve().is_relative_to(vm_dir.resolve()):
            raise ValueError(f"job id {request.job_id!r} does not name a folder of this VM")
        log_slice = await log_files.read_when_written(path, request.offset, max_bytes, request.wait_s)
    except FileNotFoundError:
        text = f"no log of {key} on VM {vm_id}: its process has not started yet"
        return [agent_pb2.LogChunk(request_id=request.request_id, last=True, error=text)]
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: the VM has no thread left
        text = f"no log of {key} on VM {vm_id}: {error}"
        return [agent_pb2.LogChunk(request_id=request.request_id, last=True, error=text)]
    return list(_cut(log_slice, request.request_id))


def _cut(log_slice: log_files.LogSlice, request_id: str) -> Iterator[agent_pb2.LogChunk]:
    for start in range(0, max(len(log_slice.data), 1), _CHUNK_BYTES):
        end = start + _CHUNK_BYTES
        yield agent_pb2.LogChunk(
            request_id=request_id,
            data=log_slice.data[start:end],
            last=end >= len(log_slice.data),
            offset=log_slice.offset + start,
            size=log_slice.size,
        )
