"""What datasets and collates draw follows from the places of the examples, not from what a process has drawn before."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from varuna.data import Batches
from varuna.data.batches import find_recent_batch
from varuna_proto.environment import Mode, WorkerEnvironment
from varuna_proto.plan import Plan

B = 8
SIZE = 11


class Augmented:
    """Each example has a number of each of the global generators."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)
        return {"index": index, "drawn": drawn}


def mask_words(items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """As collates of masked language models do: draws once for all examples."""
    masks = torch.cat([torch.rand(len(items)), torch.tensor([random.random(), np.random.rand()])])
    return {**torch.utils.data.default_collate(list(items)), "mask": masks.repeat(len(items), 1)}


def describe_rank(rank: int, d: int) -> WorkerEnvironment:
    return WorkerEnvironment(
        job_id="j",
        generation=1,
        mode=Mode.TRAIN,
        rank=rank,
        local_rank=0,
        world_size=2 * d,
        rendezvous_host="127.0.0.1",
        rendezvous_port=1,
        plan=Plan(p=2, d=d, micro_batch=2, global_batch=B),
    )


def make_batches(rank: int, d: int, **options: Any) -> Batches:
    return Batches(Augmented(), collate=mask_words, environ=describe_rank(rank, d).to_environ(), **options)


def draw_some() -> None:
    torch.rand(5)
    random.random()
    np.random.rand(3)


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_all_stages_of_a_replica_draw_the_same_whatever_each_has_drawn_before() -> None:
    first = make_batches(0, d=2).batch(3)
    draw_some()
    later = make_batches(1, d=2, first_step=2)
    later.batch(2)
    assert_equal(later.batch(3), first)


def test_an_example_draws_the_same_in_every_shape_and_something_else_in_the_next_epoch() -> None:
    whole = make_batches(0, d=1).batch(2)
    shares = [make_batches(rank, d=2).batch(2) for rank in (0, 2)]
    assert torch.equal(torch.cat([share["drawn"] for share in shares]), whole["drawn"])
    assert len({*whole["drawn"].flatten().tolist()}) == 3 * B, "no two draws are the same"
    other = Batches(Augmented(), seed=1, global_batch=B, environ={}).batch(2)
    assert not {*other["drawn"].flatten().tolist()} & {*whole["drawn"].flatten().tolist()}
    epochs = [Batches(Augmented(), global_batch=SIZE, shuffle=False, environ={}).batch(step) for step in (1, 2)]
    assert torch.equal(epochs[0]["index"], epochs[1]["index"])
    assert not torch.equal(epochs[0]["drawn"], epochs[1]["drawn"])


def test_a_batch_that_is_made_again_and_the_rest_of_a_step_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("varuna.data.batches.read_process_environment", lambda: describe_rank(0, 1))
    whole = Batches(Augmented(), collate=mask_words).batch(2)
    rests = []
    for _ in range(2):
        source = Batches(Augmented(), collate=mask_words)
        recent = find_recent_batch(source.batch(2))
        assert recent is not None
        rests.append(recent.fetch_examples([range(2, 4), range(6, 8)]))
        draw_some()
    assert_equal(dict(rests[0]), dict(rests[1]))
    assert torch.equal(rests[0]["drawn"], whole["drawn"][[2, 3, 6, 7]])


def test_the_generators_of_the_script_stay_as_they_are() -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    make_batches(0, d=1).batch(1)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(np.array_equal(now, before) for now, before in zip(np.random.get_state(), states[2], strict=True))


def test_a_thread_of_the_script_does_not_seed_what_a_pass_draws_from() -> None:
    seen: list[Tensor] = []

    class Watching(Augmented):
        def __getitem__(self, index: int) -> dict[str, Any]:
            seen.append(torch.get_rng_state())
            return {"index": index}

    before = torch.get_rng_state()
    thread = threading.Thread(target=lambda: Batches(Watching(), global_batch=B, environ={}).batch(1))
    thread.start()
    thread.join()
    assert len(seen) == B
    assert all(torch.equal(state, before) for state in seen)


@pytest.mark.processes
def test_workers_draw_what_the_process_itself_draws() -> None:
    alone = make_batches(0, d=2, first_step=2, last_step=4)
    ahead = make_batches(0, d=2, first_step=2, last_step=4, workers=2)
    for (_, one), (_, other) in zip(alone, ahead, strict=True):
        assert_equal(other, one)
