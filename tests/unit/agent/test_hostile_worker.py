"""Whatever a script sends to its agent's socket, the agent goes on, and its reports can be sent and stored."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as hs
from hypothesis.strategies import SearchStrategy

from agent_vm import Vm, exits, key, launch, sent
from varuna_agent.state import events as ev
from varuna_agent.state import instructions as ins
from varuna_manager.agents import report_bounds
from varuna_manager.api.grpc.limits import find_excess
from varuna_proto.bounds import ERROR_CHARS
from varuna_proto.v1 import agent_pb2 as pb
from varuna_proto.v1 import worker_pb2 as w

SMALL = hs.one_of(hs.integers(0, 9), hs.sampled_from([2**31, 2**32 - 1]))
LONG = hs.one_of(SMALL, hs.sampled_from([2**53, 2**63, 2**64 - 1]))
TEXT = hs.one_of(hs.text(hs.characters(codec="utf-8"), max_size=8), hs.sampled_from(["\0", "x" * 2_000_000]))
NARROW = hs.floats(width=32)


def messages(kind: type[Any], **fields: SearchStrategy[Any]) -> SearchStrategy[Any]:
    return hs.fixed_dictionaries({}, optional=fields).map(lambda values: kind(**values))


PHASES = hs.lists(messages(pb.Phase, name=TEXT, seconds=hs.floats()), max_size=3)
OPS = hs.lists(messages(pb.TracedOp, op=hs.integers(0, 9), micro_batch=SMALL, start_us=NARROW), max_size=3)
SUMS = hs.lists(messages(pb.TracedSum, name=TEXT, start_us=NARROW), max_size=3)
TRACED = messages(pb.StepTraced, job_id=TEXT, generation=LONG, rank=SMALL, step=LONG, begin_us=hs.floats(), ops=OPS)
KINDS = {
    "hello": messages(w.WorkerHello, job_id=TEXT, generation=LONG, rank=SMALL, pid=SMALL),
    "ready": messages(
        w.WorkerReady,
        resumed_step=LONG,
        phases=PHASES,
        kept_bytes=LONG,
        peer_bytes=LONG,
        late_bytes=LONG,
        store_bytes=LONG,
    ),
    "generation_left": messages(
        w.GenerationLeft,
        exit_code=hs.sampled_from([-1, 0, 75, 76]),
        step=LONG,
        held_bytes=LONG,
        gives_only=hs.booleans(),
        copies=hs.sampled_from([[], [pb.KeptCopy(rank=2**32 - 1, step=2**64 - 1)] * 80_000]),
    ),
    "unreached": messages(pb.Unreached, rank=SMALL, error=TEXT),
    "waiting": messages(w.Waiting, quiet_ranks=hs.sampled_from([[], [1], [2**32 - 1] * 80_000])),
    "log_values": messages(w.LogValues, step=LONG, values=hs.dictionaries(TEXT, hs.floats(), max_size=3)),
    "sent_ahead": messages(w.SentAhead, request=TEXT, step=LONG),
    "script_obstacle": messages(w.ScriptObstacle, reason=TEXT),
    "giving_state": messages(w.GivingState, host_bytes=LONG),
    "step_done": messages(w.StepDone, step=LONG, loss=hs.floats(), step_us=LONG, examples=SMALL, forward_us=LONG),
    "checkpoint_done": messages(w.CheckpointDone, step=LONG, url=TEXT, total_bytes=LONG),
    "profile_done": messages(w.ProfileDone, profile_json=TEXT, from_cache=hs.booleans()),
    "failure": messages(
        w.WorkerFailure,
        traceback=TEXT,
        shortage=messages(pb.MemoryShortage, asked_bytes=LONG, free_bytes=LONG, limit_bytes=LONG, peak_bytes=LONG),
    ),
    "evaluated": messages(w.Evaluated, micro_batches=LONG),
    "step_traced": TRACED,
}
ONE = hs.one_of(*[kind.map(lambda body, name=name: w.WorkerMessage(**{name: body})) for name, kind in KINDS.items()])
CODES = hs.integers(-64, 255)


@settings(max_examples=150)
@given(messages=hs.lists(hs.one_of(ONE, hs.just(w.WorkerMessage())), max_size=8), code=CODES, tail=TEXT)
def test_whatever_a_worker_says_its_exit_is_reported_and_fits(
    messages: list[w.WorkerMessage], code: int, tail: str
) -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.handle(ev.WorkerConnected(key(), 2**32 - 1))
    for message in messages:
        vm.handle(ev.WorkerMessageReceived(key(), message))
    vm.tick(vm.now + 1)
    vm.ended(key(), code, tail)
    assert len(exits(vm.instructions)) == 1
    for instruction in vm.instructions:
        if isinstance(instruction, ins.SendMessage):
            assert find_excess(instruction.message) is None
    for exited in sent(vm.instructions, "worker_exited"):
        assert "\0" not in exited.error_text
        assert len(exited.error_text) <= ERROR_CHARS


def test_a_worker_that_names_a_great_many_quiet_ranks_does_not_cost_its_vm_the_stream() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    vm.receive_worker_message(key(), waiting=w.Waiting(quiet_ranks=range(10**8, 10**8 + 80_000)))
    (beat,) = [i.message for i in vm.tick(vm.now + 1) if isinstance(i, ins.SendMessage)]
    assert find_excess(beat) is None
    assert list(beat.heartbeat.workers[0].quiet_ranks[:2]) == [10**8, 10**8 + 1], "one is enough"


def test_an_exit_keeps_what_the_worker_has_said_of_itself_however_much_it_says_of_others() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    vm.receive_worker_message(key(), unreached=pb.Unreached(rank=2, error="x\0" * 2_000_000))
    copies = [pb.KeptCopy(rank=2, step=3)] * 200_000
    vm.receive_worker_message(key(), generation_left=w.GenerationLeft(exit_code=76, step=4, copies=copies))
    (message,) = [
        i.message
        for i in vm.instructions
        if isinstance(i, ins.SendMessage) and i.message.report.HasField("worker_exited")
    ]
    assert find_excess(message) is None
    exited = message.report.worker_exited
    assert (exited.unreached.rank, exited.held.copies[0].rank) == (2, 2)
    assert "\0" not in exited.unreached.error


def test_a_trace_of_a_great_many_micro_batches_fits_a_message() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.ready(key())
    ops = [pb.TracedOp(op=pb.TRACE_OP_FORWARD, micro_batch=2**32 - 1, start_us=1e9, duration_us=1e9)] * 200_000
    sums = [pb.TracedSum(name="\N{GRINNING FACE}" * 300, start_us=1.0, duration_us=1.0)] * 5_000
    vm.receive_worker_message(key(), step_traced=pb.StepTraced(step=3, ops=ops, all_reduce=sums))
    (message,) = [
        i.message
        for i in vm.instructions
        if isinstance(i, ins.SendMessage) and i.message.report.HasField("step_traced")
    ]
    assert find_excess(message) is None
    assert len(message.report.step_traced.ops) > 10_000


def test_what_an_agent_reports_of_it_makes_sense_to_the_manager() -> None:
    vm = Vm()
    vm.receive_message(launch=launch())
    vm.handle(ev.WorkerConnected(key(), 1))
    phases = [pb.Phase(name="a\0b", seconds=math.nan), pb.Phase(name="c", seconds=-math.inf)]
    vm.receive_worker_message(key(), ready=w.WorkerReady(phases=phases))
    vm.receive_worker_message(key(), checkpoint_done=w.CheckpointDone(step=3, url="x" * 100_000))
    vm.receive_worker_message(key(), failure=w.WorkerFailure(traceback="what\0ever" * 500_000))
    vm.ended(key(), 1)
    reports = [
        i.message.report for i in vm.instructions if isinstance(i, ins.SendMessage) and i.message.HasField("report")
    ]
    assert [report.WhichOneof("fact") for report in reports] == [
        "worker_started",
        "checkpoint_committed",
        "worker_exited",
    ]
    for report in reports:
        report_bounds.tidy(report)
        assert report_bounds.flaw_of(report) is None
