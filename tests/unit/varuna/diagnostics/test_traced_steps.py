"""What a rank reports of its third step and of each hundredth, without a request for a trace."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from varuna.diagnostics.timeline import ALL_REDUCE, OPS, Timeline
from varuna_proto.v1 import agent_pb2 as pb


def play(timeline: Timeline, step: int) -> None:
    timeline.begin_step(step)
    now_ns = time.perf_counter_ns()
    timeline.add_span(OPS, "F0", now_ns, now_ns + 2_000_000, micro_batch=0)
    timeline.add_span("activations to rank 1", "send 0", now_ns, now_ns + 1_000, micro_batch=0)
    timeline.add_span(OPS, "B0", now_ns + 3_000_000, now_ns + 7_000_000, micro_batch=0)
    timeline.add_span(ALL_REDUCE, "bucket 0", now_ns + 7_000_000, now_ns + 8_000_000, bytes=8)
    timeline.end_step()


def test_the_third_step_and_each_hundredth_are_sent_with_their_ops() -> None:
    sent: list[pb.StepTraced] = []
    timeline = Timeline.from_environ({}, rank=1, p=2, send_step=sent.append)
    for step in range(42, 301):
        play(timeline, step)
    assert [one.step for one in sent] == [44, 100, 200, 300]
    assert [(op.op, op.micro_batch, op.start_us, op.duration_us) for op in sent[0].ops] == [
        (pb.TRACE_OP_FORWARD, 0, 0.0, 2000.0),
        (pb.TRACE_OP_BACKWARD, 0, 3000.0, 4000.0),
    ]
    assert [(one.name, one.start_us, one.duration_us) for one in sent[0].all_reduce] == [("bucket 0", 7000.0, 1000.0)]
    assert abs(sent[-1].begin_us / 1e6 - time.time()) < 3600


def test_only_the_first_replica_tells_and_files_are_written_for_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    sent: list[pb.StepTraced] = []
    environ = {"VARUNA_TRACE_STEPS": "2,3", "VARUNA_TRACE_DIR": str(tmp_path)}
    for rank in (0, 2):
        timeline = Timeline.from_environ(environ, rank=rank, p=2, send_step=sent.append)
        for step in range(1, 101):
            play(timeline, step)
    assert [one.step for one in sent] == [3, 100]
    assert {path.name for path in tmp_path.iterdir()} == {f"step{s}-rank{r}.json" for s in (2, 3) for r in (0, 2)}


def test_a_folder_that_cannot_be_written_does_not_stop_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[pb.StepTraced] = []
    (tmp_path / "file").touch()
    timeline = Timeline(tmp_path / "file" / "traces", [3], p=1, send_step=sent.append)
    for step in (1, 2, 3):
        play(timeline, step)
    assert [one.step for one in sent] == [3]
    assert capsys.readouterr().out.count("the trace of a step cannot be written") == 1
