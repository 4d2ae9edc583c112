"""Why no sender needs credits: a schedule sends only what there is room for, and gloo keeps what nobody receives yet.

A stage posts receives for its stash cap and one more activation; each backward makes room for one more.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from varuna.distributed.gloo import NEVER, connect_group
from varuna_planner.schedule.policies import Op, Policy, stash_cap
from varuna_planner.simulator.simulation import Jitter, Simulation, simulate, uniform
from waiting import DEADLINE_S

EXECUTABLE = [policy for policy in Policy if policy.executable]


def ends_us(run: Simulation, stage: int, op: Op) -> np.ndarray:
    """[N]: when the stage ended each op of a kind."""
    count = run.counts[stage]
    return run.spans_us[1, stage, :count][run.ops[stage, :count] == op]


@settings(max_examples=150, deadline=None)
@given(
    policy=st.sampled_from(EXECUTABLE),
    p=st.integers(2, 6),
    n=st.integers(1, 12),
    run_ahead=st.integers(0, 8),
    latency=st.floats(0, 5),
    jitter=st.floats(0, 20),
    noise=st.floats(0, 2),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_policy_ever_sends_what_there_is_no_room_for(
    policy: Policy, p: int, n: int, run_ahead: int, latency: float, jitter: float, noise: float, seed: int
) -> None:
    pipeline = uniform(p, n, latency_us=latency)
    disturbed = Jitter(latency_us=jitter, compute=noise, seed=seed)
    run = simulate(pipeline, policy, run_ahead=run_ahead, jitter=disturbed, record=True)
    forward_ends = [ends_us(run, stage, Op.F) for stage in range(p)]
    backward_ends = [ends_us(run, stage, Op.B) for stage in range(p)]
    for sender in range(p - 1):
        cap, next_cap = (stash_cap(policy.code, stage, p, n, run_ahead) for stage in (sender, sender + 1))
        for number in range(n):
            sent_us = forward_ends[sender][number]
            assert number < next_cap + 1 + (backward_ends[sender + 1] <= sent_us).sum()
            sent_us = backward_ends[sender + 1][number]
            assert number < cap + (backward_ends[sender] <= sent_us).sum()


@pytest.mark.parametrize("elements", [1, 1 << 20])
def test_what_is_sent_before_there_is_room_stays_with_its_sender(elements: int) -> None:
    store, limit = HashStore(), timedelta(seconds=DEADLINE_S)
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(connect_group, store, rank, 2, address="127.0.0.1", timeout=limit) for rank in range(2)]
        sender, receiver = (future.result() for future in made)
    message, room = torch.ones(elements), torch.zeros(elements)
    sent = sender.send([message], 1, 7)
    message.fill_(2.0)  # this would be too late if any of it had left
    receiver.recv([room], 0, 7).wait(NEVER)
    sent.wait(NEVER)
    assert (room == 2.0).all()
