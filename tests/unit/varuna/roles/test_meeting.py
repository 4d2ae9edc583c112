"""What the members of a generation in place agree on when they meet."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from training_roles import training_role
from varuna import Varuna
from varuna.copies.share_marks import MarkedSums, ShareMark
from varuna.distributed.departure import Departure, GenerationEnded
from varuna.roles import membership
from varuna.roles.kept_shares import StepRest
from varuna.roles.meeting import _find_sums
from varuna.roles.progress import TrainingStep
from varuna.roles.reshaping import GenerationMember
from varuna.roles.training import TrainingRole
from varuna_proto.environment import EXIT_PEER_LOST


class Weighted(nn.Module):
    """Its loss has a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * self.scale).mean(), torch.tensor(4.0 * len(x))


def make_role() -> TrainingRole:
    model = Varuna(Weighted(), get_batch_fn={"x": torch.ones(4, 2)}, batch_size=4, chunk_size=2)
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    return training_role(model)


def meet(role: TrainingRole, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Lets it meet one that is as it is but for these fields."""

    def exchange(name: str, ranks: object, own: str) -> list[str]:
        return [replace(GenerationMember.from_json(own), **fields).to_json()]

    worker = role._worker
    monkeypatch.setattr(worker.rendezvous, "exchange_values", exchange)
    role._membership._meeting.meet(None, worker.environment)


@pytest.mark.parametrize(("own", "other", "then"), [(None, 4.0, 4.0), (2.0, 4.0, 2.0), (2.0, None, 2.0)])
def test_all_ranks_know_the_weight_of_an_example_or_none_does(
    own: float | None, other: float | None, then: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not know it exchanges weights with all that hold its stage, and the others would not."""
    role = make_role()
    expected = role._parts.expected_weight
    if own is not None:
        expected.follow_others(own)
    meet(role, monkeypatch, weight_per_example=other)
    assert expected.is_known
    assert expected.per_example == then


def test_the_sums_of_a_mark_are_found_though_its_loss_is_not_a_number() -> None:
    """What ranks tell each other of a mark is not the mark, and no two NaNs are equal."""
    marks = [
        ShareMark(
            generation=1,
            replica=0,
            step=3,
            sections=sections,
            micro_batch=2,
            spans=((0, count),),
            loss_sum=math.inf - math.inf,
        )
        for sections in ((0, 2), (2, 4))
        for count in (1, 2)
    ]
    marked = [MarkedSums(mark, {"w": torch.full((1,), float(number))}) for number, mark in enumerate(marks)]
    found = [_find_sums(ShareMark.from_json(mark.to_json()), marked)["w"].item() for mark in marks]
    assert found == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("error", [KeyError("a flaw"), ConnectionError("a peer")])
def test_what_fails_between_two_generations_is_not_the_scripts_fault(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process ends as one that has lost a peer, and the next generation has another one."""
    codes: list[int] = []

    def fail(*_: Any) -> None:
        raise error

    def end(code: int) -> None:
        codes.append(code)
        raise SystemExit(code)

    role = make_role()
    monkeypatch.setattr(membership, "end_process", end)
    monkeypatch.setattr(role._membership, "_rejoin", fail)
    with pytest.raises(SystemExit):
        role._membership.join_next(None)
    assert codes == [EXIT_PEER_LOST]


def test_a_new_process_whose_script_has_changed_its_batch_leaves_the_rest_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is no error of the script, of which the job would fail."""
    role = make_role()

    def leave(_: Departure, exit_: GenerationEnded) -> None:
        raise exit_

    monkeypatch.setattr(Departure, "leave_generation", leave)
    rest = StepRest(numbers=(1,), micro_batch=2, examples=2, expected_weight=4.0)
    step = TrainingStep(inputs={"x": torch.ones(4, 2)}, batch=None, clip_grad_max_norm=None, rest=rest)
    with pytest.raises(GenerationEnded) as left:
        role._share._cut_share(step)
    assert "a new process does not pass the batches of varuna.data.Batches as they are" in left.value.reason
