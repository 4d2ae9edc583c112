"""What an agent sends of logs, and of traced steps."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent_vm import Vm, launch
from varuna_agent.logs import log_files
from varuna_agent.state import WorkerKey
from varuna_agent.state import events as ev
from varuna_agent.state import instructions as ins
from varuna_proto.v1 import agent_pb2 as pb


def test_a_part_of_a_log_tells_where_it_begins_and_how_long_the_log_is(tmp_path: Path) -> None:
    path = tmp_path / "rank0.log"
    path.write_bytes(b"0123456789")
    assert log_files.read_part(path, 3, 4) == log_files.LogSlice(b"3456", 3, 10)
    assert log_files.read_part(path, -4, 100) == log_files.LogSlice(b"6789", 6, 10)
    assert log_files.read_part(path, -99, 2) == log_files.LogSlice(b"01", 0, 10)
    assert log_files.read_part(path, 99, 5) == log_files.LogSlice(b"", 10, 10)
    with pytest.raises(FileNotFoundError):
        log_files.read_part(tmp_path / "none", 0, 1)


async def test_whoever_waits_at_the_end_of_a_log_gets_what_is_written_next(tmp_path: Path) -> None:
    path = tmp_path / "rank0.log"
    path.write_bytes(b"old\n")
    waiting = asyncio.create_task(log_files.read_when_written(path, 4, 100, 60.0))
    await asyncio.sleep(0)
    with path.open("ab") as file:
        file.write(b"new\n")
    assert (await waiting).data == b"new\n"
    assert (await log_files.read_when_written(path, 8, 100, 0.0)).data == b""


def test_a_traced_step_is_reported_under_the_workers_own_name_and_not_kept_while_the_manager_is_away() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    key = WorkerKey("job", 1, 1)
    vm.ready(key)
    traced = pb.StepTraced(job_id="other", generation=9, rank=7, step=3, ops=[pb.TracedOp(start_us=1.0)])
    sent = [
        one.message for one in vm.receive_worker_message(key, step_traced=traced) if isinstance(one, ins.SendMessage)
    ]
    assert len(sent) == 1
    fact = sent[0].report.step_traced
    assert (fact.job_id, fact.generation, fact.rank, fact.step, len(fact.ops)) == ("job", 1, 1, 3, 1)
    vm.handle(ev.StreamClosed("test"))
    assert vm.receive_worker_message(key, step_traced=traced) == []
    again = [one.message for one in vm.connect() if isinstance(one, ins.SendMessage)]
    assert sum(message.report.WhichOneof("fact") == "step_traced" for message in again) == 1  # the unacknowledged one
