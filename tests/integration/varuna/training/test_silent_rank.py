"""A rank's machine stands still: the others wait, and report which rank does not answer them."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from agent_end import AgentEnd
from small_gpt import Task
from training_world import Ranks, Zygote
from varuna_proto.v1 import agent_pb2, worker_pb2
from waiting import wait_until


def is_waiting_without(*quiet: int) -> worker_pb2.WorkerMessage:
    waiting = worker_pb2.Waiting(waiting_for=agent_pb2.WAIT_KIND_STEP, quiet_ranks=quiet)
    return worker_pb2.WorkerMessage(waiting=waiting)


@pytest.mark.parametrize("silent", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_the_ranks_that_wait_report_the_one_that_does_not_answer(silent: int, zygote: Zygote, tmp_path: Path) -> None:
    with ExitStack() as stack:
        ends = [stack.enter_context(AgentEnd()) for _ in range(4)]
        task = Task(steps=100_000)
        world = stack.enter_context(Ranks(zygote, tmp_path, task, 2, 2, agent_socket=lambda rank: ends[rank].path))
        for end in ends:
            end.wait_for_number("step_done", 2)
        pid = world._pids()[silent]
        os.kill(pid, signal.SIGSTOP)
        others = [end for rank, end in enumerate(ends) if rank != silent]
        witnesses = others if silent == 0 else ends[:1]
        for end in others:
            end.wait_for(lambda message: message.waiting.waiting_for == agent_pb2.WAIT_KIND_STEP)
        for end in witnesses:
            end.wait_for(lambda message: message == is_waiting_without(silent))
        steps = [len(end.steps()) for end in ends]
        os.kill(pid, signal.SIGCONT)
        for end, done in zip(ends, steps, strict=True):
            end.wait_for_number("step_done", done + 1)
        for end in witnesses:
            # On a busy machine a sound rank is quiet for a moment, too.
            wait_until(partial(is_back, end, silent), "the report of its answer, or of the end of the wait")


def is_back(end: AgentEnd, silent: int) -> bool:
    """Whether a message without `silent` has followed the one that named no other rank."""
    waits = end.list_messages("waiting")
    return any(
        silent not in message.waiting.quiet_ranks for message in waits[waits.index(is_waiting_without(silent)) :]
    )
