"""What is shown while a job is watched, and how logs of many ranks are written."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from job_documents import JOB
from varuna_client.commands.reading import LogWriter, _parse_ranks, _parse_time, is_wanted
from varuna_client.commands.watch_views import LineWatch, WatchedJob, render_summary
from varuna_client.errors import UserError
from varuna_client.following.follow import find_failed_rank
from varuna_client.rest.calls import LogChunk
from varuna_client.text.render import WholeRate
from varuna_proto.rest import EventDocument, GenerationDocument, JobDocument, ProgressDocument


def job(**changes: object) -> JobDocument:
    spec = {**JOB["spec"], "run": "python train.py --steps 100"}
    return JobDocument(**{**JOB, "state": "running", "step": 0, "gpus": 4, "spec": spec, **changes})  # type: ignore[typeddict-item]


def progress(step: int, step_s: float = 0.5, generation: int = 2) -> ProgressDocument:
    return ProgressDocument(
        job_id="j-1",
        generation=generation,
        step=step,
        loss=2.5,
        step_s=step_s,
        between_s=0.0,
        examples_per_s=20.0,
        rate_steps=20,
        at="2026-01-01T00:00:01+00:00",
    )


def footer(watched: WatchedJob, now: float, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(watched.render_footer(now))
    return out.getvalue()


def test_the_time_left_is_that_of_the_steps_to_go_at_the_generations_rate() -> None:
    watched = WatchedJob(job())
    assert watched.left_s() is None
    watched.add_progress(progress(9, step_s=9.0, generation=1), 0.0)
    watched.add_progress(progress(20), 20.0)
    assert watched.left_s() == 80 * 0.5
    assert watched.render_figures() == "step 20/100  loss 2.5000  20 ex/s  40 s left"
    unknown = WatchedJob(job(spec=JOB["spec"]))
    unknown.add_progress(progress(20), 0.0)
    assert unknown.render_figures() == "step 20  loss 2.5000  20 ex/s  0.500 s/step"


def test_the_foot_of_the_terminal_fits_and_tells_what_happens_when_no_step_comes() -> None:
    watched = WatchedJob(job())
    watched.last_event = EventDocument(
        id=1,
        at="",
        job_id=None,
        job_name=None,
        generation=2,
        vm_id=None,
        kind="decision",
        message="waiting for " * 20,
        data={},
    )
    assert "waiting for" in footer(watched, 0.0)
    watched.add_progress(progress(20), 1.0)
    shown = footer(watched, 2.0)
    assert "waiting for" not in shown
    assert "▶ running  2×2  micro-batch 1  generation 2  4 GPUs" in shown
    assert "waiting for" in footer(watched, 60.0)
    for width in (60, 80, 200):
        lines = footer(watched, 60.0, width).splitlines()
        assert max(len(line) for line in lines) <= width
        assert len(lines) == 4


def test_in_a_pipe_progress_is_a_line_now_and_then_and_as_json_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    watched = WatchedJob(job())
    view = LineWatch(watched, as_json=False, clock=lambda: now)
    as_json = LineWatch(watched, as_json=True, clock=lambda: now)
    for step in range(1, 25):
        now = float(step)
        watched.add_progress(progress(step, generation=1 + step // 24), now)
        view.show_progress(progress(step, generation=1 + step // 24))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("/")[0].split()[-1] for line in lines] == ["1", "11", "21", "24"]
    as_json.show_progress(progress(1))
    as_json.show_progress(progress(2))
    assert [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()] == [1, 2]


def test_the_end_in_one_line() -> None:
    over = job(state="succeeded", step=100, finished_at="2026-01-01T00:01:01+00:00")
    summary = render_summary(over, 0.5, ["calibration", "training", "training"]).plain
    assert summary == "✔ succeeded gpt: step 100, loss 2.5000, in 1 m 00 s, 1 morph, goodput 50%"
    whole = WholeRate(steps=90, step_s=0.5, examples_per_s=19.31)
    summary = render_summary(over, 0.5, ["training"], whole).plain
    assert summary.startswith("✔ succeeded gpt: step 100, loss 2.5000, 19.3 ex/s over all 90 steps, in 1 m 00 s,")


def test_the_end_of_a_job_whose_loss_was_not_finite_says_so() -> None:
    reason = "succeeded, but the loss or gradient of its last 7 steps was not finite (7 skipped in all)"
    odd = {"loss": None, "not_finite_from": 94, "steps_skipped": 7, "reason": reason}
    over = job(state="succeeded", step=100, finished_at="2026-01-01T00:01:01+00:00", **odd)
    summary = render_summary(over, None, ["training"]).plain
    assert summary == f"! succeeded gpt: step 100, loss not finite, in 1 m 00 s, 0 morphs\n  {reason}"
    watched = WatchedJob(job())
    watched.add_progress(ProgressDocument(**{**progress(20), "loss": None}), 20.0)  # type: ignore[typeddict-item]
    assert "loss not finite" in watched.render_figures()


def chunk(data: bytes, rank: int = 0, offset: int = 0) -> LogChunk:
    return LogChunk(data=data, generation=1, rank=rank, offset=offset, next_offset=offset + len(data), size=100)


def test_lines_of_many_ranks_are_kept_whole(capsys: pytest.CaptureFixture[str]) -> None:
    writer = LogWriter(has_prefix=True, as_json=False)
    for part in (chunk(b"one \xc3"), chunk(b"two\nthr", rank=1), chunk(b"\xa9\nlast"), chunk(b"ee\n", rank=1)):
        writer.write(part)
    writer.close()
    assert capsys.readouterr().out == "g1 r1 | two\ng1 r0 | one é\ng1 r1 | three\ng1 r0 | last\n"


def test_one_log_is_written_as_it_is_or_as_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    LogWriter(has_prefix=False, as_json=False).write(chunk(b"no end of line \xff"))
    assert capsys.readouterr().out == "no end of line \ufffd"
    LogWriter(has_prefix=False, as_json=True).write(chunk(b"text\n", offset=3))
    assert json.loads(capsys.readouterr().out) == {"generation": 1, "rank": 0, "offset": 3, "log": "text\n"}


def test_ranks_and_times_that_are_none_are_refused_in_one_line() -> None:
    assert [_parse_ranks(text) for text in (None, "all", "0", "17")] == [None, "all", 0, 17]
    with pytest.raises(UserError, match="--rank 'one': expected a number from 0, or all"):
        _parse_ranks("one")
    assert _parse_time("2026-01-31T12:00+01:00") == "2026-01-31T11:00:00+00:00"
    assert _parse_time("10m") is not None
    for text in ("yesterday", "10", "1w", "999999999d"):
        with pytest.raises(UserError, match="expected 90s, 30m, 2h, 7d"):
            _parse_time(text)


def test_events_are_filtered_as_they_come() -> None:
    lost = EventDocument(
        id=1, at="", job_id=None, job_name=None, generation=None, vm_id="vm-1", kind="vm_lost", message="", data={}
    )
    assert is_wanted(lost, None, None)
    assert is_wanted(lost, ["vm_ready", "vm_lost"], "vm-1")
    assert not is_wanted(lost, ["vm_ready"], None)
    assert not is_wanted(lost, None, "vm-2")


def test_a_log_of_another_rank_is_announced_beside_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    writer = LogWriter(has_prefix=False, as_json=False)
    for rank, data in ((0, b"zero\n"), (0, b"more\n"), (3, b"three\n")):
        writer.write(LogChunk(generation=2, rank=rank, data=data, offset=0, next_offset=0, size=0))
    written = capsys.readouterr()
    assert written.out == "zero\nmore\nthree\n"
    assert written.err.splitlines() == ["== rank 3 in generation 2"]


def ended(number: int, *ends: tuple[str, int, str]) -> GenerationDocument:
    """A generation whose ranks ended with these (cause, exit code, error)."""
    workers = [
        {"rank": rank, "cause": cause, "exit_code": code, "error": error}
        for rank, (cause, code, error) in enumerate(ends)
    ]
    return GenerationDocument(number=number, workers=workers)  # type: ignore[typeddict-item]


def test_the_log_that_tells_a_failure_is_of_the_first_rank_that_ended_in_those_words() -> None:
    peer_lost, ended_by_manager = ("peer_lost", 76, ""), ("generation_ended", 75, "")
    failed = ("script_failed", 7, "last words")
    assert find_failed_rank([ended(1, peer_lost, failed, ended_by_manager)], None) == 1
    # Rank 0 failed, too, when the stop had already been sent: its log has the same.
    assert find_failed_rank([ended(1, ("generation_ended", 7, "last words"), failed)], None) == 0
    assert find_failed_rank([ended(1, ("generation_ended", 7, "other words"), failed)], None) == 1
    assert find_failed_rank([ended(1, peer_lost, peer_lost)], None) == 0
    assert find_failed_rank([ended(1, peer_lost, failed), ended(2, failed)], 1) == 1
    assert find_failed_rank([], None) == 0
