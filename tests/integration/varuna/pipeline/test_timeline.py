"""The trace of chosen steps: complete, in order, and readable by Perfetto."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from small_gpt import Task
from training_world import Ranks, Zygote
from varuna.diagnostics.timeline import merge_ranks

P, D, N = 2, 2, 3
STEP = 2


def spans(trace: dict[str, Any], rank: int, track: str) -> list[dict[str, Any]]:
    events = [event for event in trace["traceEvents"] if event["pid"] == rank]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    return [event for event in events if event["ph"] == "X" and threads[event["tid"]] == track]


def assert_in_turn(events: list[dict[str, Any]]) -> None:
    for earlier, later in pairwise(events):
        assert earlier["ts"] + earlier["dur"] <= later["ts"] + 1.0  # microseconds: rounding of wall-clock times


def test_a_trace_has_every_op_and_message_of_its_step(zygote: Zygote, tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    environ = {"VARUNA_TRACE_STEPS": f"{STEP}", "VARUNA_TRACE_DIR": str(traces)}
    task = Task(global_batch=P * D * N)
    with Ranks(zygote, tmp_path, task, P, D, recompute=(True, False), environ=environ) as world:
        world.finish()

    assert sorted(path.name for path in traces.iterdir()) == [f"step{STEP}-rank{rank}.json" for rank in range(P * D)]
    trace = json.loads(json.dumps(merge_ranks(traces, STEP)))
    for rank in range(P * D):
        stage = rank % P
        ops = spans(trace, rank, "ops")
        assert_in_turn(ops)
        assert all(event["args"]["step"] == STEP and event["dur"] > 0 for event in ops)
        for op in "FRB":
            wanted = [] if op == "R" and stage == P - 1 else [f"{op}{number}" for number in range(N)]
            assert [event["name"] for event in ops if event["name"][0] == op] == wanted
        reduced = spans(trace, rank, "all-reduce")
        assert [event["name"] for event in reduced] == ["bucket 0"]
        assert reduced[0]["args"]["bytes"] > 0
    for replica in range(D):
        first, second = replica * P, replica * P + 1
        assert_messages(trace, first, second, "activations", ("F", "F"))
        assert_messages(trace, second, first, "gradients", ("B", "B"))


def assert_messages(trace: dict[str, Any], sender: int, receiver: int, kind: str, ops: tuple[str, str]) -> None:
    sends = spans(trace, sender, f"{kind} to rank {receiver}")
    receives = spans(trace, receiver, f"{kind} from rank {sender}")
    assert [event["name"] for event in sends] == [f"send {number}" for number in range(N)]
    assert [event["name"] for event in receives] == [f"receive {number}" for number in range(N)]
    assert_in_turn(receives)
    uses = [event for event in spans(trace, receiver, "ops") if event["name"][0] == ops[1]]
    for sent, received, used in zip(sends, receives, uses, strict=True):
        arrived = received["ts"] + received["dur"]
        # Clocks of the processes of one machine agree; what is added to make them wall-clock differs by microseconds.
        assert sent["ts"] < arrived + 1000.0
        assert arrived < used["ts"] + 1000.0
