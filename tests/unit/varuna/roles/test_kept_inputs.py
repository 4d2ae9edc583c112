"""Whether survivors may end a step with inputs that no process can make again, and who gives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from varuna.distributed.handshake import MeetingKey
from varuna.distributed.topology import Topology
from varuna.holdings.step_inputs import InputsPlace, InputsServer, fetch_inputs
from varuna.roles.kept_inputs import KeptInputs
from varuna.roles.kept_shares import StepRest
from varuna.worker.worker import WorkerProcess
from varuna_proto.environment import Mode, WorkerEnvironment
from varuna_proto.plan import Plan

LONG_S = 100.0
STEP = 5


def make_worker(rank: int, vm: int, store: HashStore, *, p: int = 2, d: int = 2) -> WorkerProcess:
    """One of a global batch of 11 examples in micro-batches of 2."""
    environment = WorkerEnvironment(
        job_id="test",
        generation=3,
        mode=Mode.TRAIN,
        rank=rank,
        local_rank=0,
        world_size=p * d,
        rendezvous_host="127.0.0.1",
        rendezvous_port=0,
        plan=Plan(p=p, d=d, micro_batch=2, global_batch=11),
        agent_socket=f"/run/agent{vm}.sock",
    )
    rendezvous = SimpleNamespace(store=store, own_address=lambda: "127.0.0.1")
    worker = SimpleNamespace(environment=environment, topology=Topology(p, d, rank), rendezvous=rendezvous)
    return cast(WorkerProcess, worker)


def make_share(rank: int, *, p: int = 2) -> dict[str, Any]:
    first, end = ((0, 6), (6, 11))[rank // p]
    return {"x": torch.arange(first, end).reshape(-1, 1).double(), "nested": [torch.arange(first, end)]}


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[list[KeptInputs]]:
    """All ranks of 2 x 2, in their second step. The parameter: the VM of each."""
    store, vms = HashStore(), request.param
    kept = [KeptInputs() for _ in vms]
    with ExitStack() as stack:
        for step in (STEP - 1, STEP):
            for rank, one in enumerate(kept):
                one.hold_share(make_worker(rank, vms[rank], store), step, make_share(rank), LONG_S)
        for one in kept:
            stack.callback(one._servers[-1].close)
        yield kept


@pytest.mark.parametrize(
    ("ranks", "can_end"),
    [((0, 1, 2, 3), True), ((0, 1, 1, 0), True), ((0, 0, 1, 2), False), ((0, 0, 1, 1), False)],
    indirect=["ranks"],
)
def test_a_step_can_be_ended_if_no_vm_has_a_whole_replica(ranks: list[KeptInputs], can_end: bool) -> None:
    assert [one.can_end_step for one in ranks] == [can_end] * 4
    for one in ranks:
        one.give_up()
        assert not one.can_end_step


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3)], indirect=True)
def test_each_rank_gives_the_inputs_of_its_replica(ranks: list[KeptInputs]) -> None:
    found = fetch_inputs(ranks[0]._places, STEP, range(6))
    for number, (x, y) in found.items():
        expected = torch.arange(2 * number, min(2 * number + 2, 11))
        assert torch.equal(x, expected.reshape(-1, 1).double())
        assert torch.equal(y, expected)
    ranks[1]._held |= found
    joined = ranks[1].join_inputs([1, 5], make_share(1))
    assert torch.equal(joined["nested"][0], torch.tensor([2, 3, 10]))
    ranks[0]._servers[-1].close()
    assert fetch_inputs(ranks[3]._places, STEP, [0]), "its other rank has them, too"
    ranks[1]._servers[-1].close()
    with pytest.raises(ValueError, match="no process gives the inputs of micro-batch 2"):
        fetch_inputs(ranks[3]._places, STEP, [2, 4])
    with pytest.raises(ValueError, match=f"no inputs of micro-batch 4 of step {STEP - 1}"):
        fetch_inputs(ranks[3]._places, STEP - 1, [4])


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3)], indirect=True)
def test_inputs_of_a_step_that_a_load_has_undone_are_nobodys(ranks: list[KeptInputs]) -> None:
    for one in ranks:
        one.forget_inputs()
    assert not any(one.can_end_step for one in ranks)
    with pytest.raises(ValueError, match=f"no inputs of micro-batch 0 of step {STEP}"):
        fetch_inputs(ranks[0]._places, STEP, [0])


def test_strangers_get_no_inputs() -> None:
    server = InputsServer(make_key("secret"), "127.0.0.1")
    server.hold_inputs(STEP, {0: [torch.ones(2)]})
    try:
        place = InputsPlace(server.address, make_key("another"), frozenset({0}))
        with pytest.raises(ValueError, match="no process gives"):
            fetch_inputs([place], STEP, [0])
        assert fetch_inputs([place._replace(key=make_key("secret"))], STEP, [0])
    finally:
        server.close()


def make_key(secret: str) -> MeetingKey:
    return MeetingKey.derive_key(secret, "test", 1, host="127.0.0.1", port=1)


SHORT = {name: value[:4] if isinstance(value, Tensor) else [value[0][:4]] for name, value in make_share(0).items()}


@pytest.mark.parametrize(
    ("p", "d", "inputs"),
    [
        (1, 2, make_share(0)),
        (2, 1, make_share(0)),
        (2, 2, SHORT),
        (2, 2, {**make_share(0), "longest": 7}),
        (2, 2, {**make_share(0), "scale": torch.ones(())}),
    ],
    ids=["one stage", "one replica", "a short batch", "a number", "a tensor without examples"],
)
def test_other_inputs_are_not_kept(p: int, d: int, inputs: Mapping[str, Any]) -> None:
    kept = KeptInputs()
    kept.hold_share(make_worker(0, 0, HashStore(), p=p, d=d), STEP, inputs, LONG_S)
    assert not kept.can_end_step
    assert kept._servers == []


def test_a_short_step_is_not_worth_it() -> None:
    store, kept = HashStore(), [KeptInputs() for _ in range(4)]
    for step in (1, 2):
        for rank, one in enumerate(kept):
            one.hold_share(make_worker(rank, rank, store), step, make_share(rank), 1.0)
    assert not any(one.can_end_step for one in kept)
    for one in kept:
        one._servers[-1].close()


@pytest.mark.parametrize(("micro_batch", "reason"), [(2, ""), (1, "the micro-batches are others")])
def test_the_rest_has_the_micro_batches_by_which_inputs_are_given(micro_batch: int, reason: str) -> None:
    """Rank 3 of 2 x 2 is lost, and the others end the step."""
    store, kept = HashStore(), [KeptInputs() for _ in range(4)]
    for step in (STEP - 1, STEP):
        for rank, one in enumerate(kept):
            one.hold_share(make_worker(rank, rank, store), step, make_share(rank), LONG_S)
    worker = make_worker(0, 0, store, d=1)
    cast(Any, worker.rendezvous).exchange_values = lambda _name, _ranks, own: [own]
    numbers = tuple(range(6 // micro_batch, -(-11 // micro_batch)))
    rest = StepRest(numbers, micro_batch, 5, 11.0)
    assert kept[0].gather_inputs(worker, STEP, rest, make_share(0)) == reason
    kept[3].hold_share(make_worker(3, 3, store), STEP - 1, make_share(3), LONG_S)
    assert kept[3].gather_inputs(worker, STEP, rest, make_share(3)) == reason, "its call has only just begun"
    for one in kept:
        for server in one._servers:
            server.close()
