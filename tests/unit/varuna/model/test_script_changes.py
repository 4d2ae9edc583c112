"""A script changes a wrapped model in a plain process: modes and `requires_grad`, through either handle."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from training_roles import training_role
from varuna import Varuna
from varuna.distributed.departure import Departure, PeerLost
from varuna.distributed.groups import RankGroup
from varuna.model.script_changes import ScriptChanges
from varuna.partition import PartitionError, trace
from varuna.pipeline.micro_batches import split_spans
from varuna.roles.progress import TrainingStep
from varuna.roles.reshaping import GenerationMember
from waiting import DEADLINE_S

H = 3


class Head(nn.Module):
    """Has a second head that it uses in training mode only, whose loss a model in evaluation mode leaves out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.norm = nn.Linear(H, H), nn.BatchNorm1d(H)
        self.head, self.second = nn.Linear(H, 1), nn.Linear(H, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.body(x)).tanh()
        loss = self.head(x).square().mean()
        return loss + self.second(x).abs().mean() if self.training else loss


class FrozenNorm(Head):
    """Freezes batch norm as users do: in its own `train`."""

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self


class MergedAdapter(nn.Linear):
    """Adds its adapter to the weight in evaluation mode, in its own `train`, as loralib's `Linear` does."""

    def __init__(self) -> None:
        super().__init__(H, H)
        self.weight.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(1, H)), nn.Parameter(torch.zeros(H, 1))
        self.is_merged = False

    def train(self, mode: bool = True) -> MergedAdapter:
        super().train(mode)
        if self.is_merged is mode:
            self.weight.data += (self.b @ self.a) * (-1 if mode else 1)
            self.is_merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.is_merged else y + x @ self.a.T @ self.b.T


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.dropout, self.head = MergedAdapter(), nn.Dropout(), nn.Linear(H, 1)

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().all():
            raise ValueError("no example is a number")
        return self.head(self.dropout(self.body(x).tanh())).square().mean()


def batch(step: int = 0) -> dict[str, Tensor]:
    return {"x": torch.randn(4, H, generator=torch.Generator().manual_seed(step))}


def wrap(model: nn.Module, **options: Any) -> Varuna:
    wrapped = Varuna(model, get_batch_fn=batch(), **options)
    wrapped.set_optimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    return wrapped


def test_a_model_that_is_wrapped_in_evaluation_mode_is_traced_as_it_will_train() -> None:
    assert "norm.running_mean" in trace(Head().eval(), batch()).graph.buffers_changed
    assert "norm.running_mean" not in trace(FrozenNorm().eval(), batch()).graph.buffers_changed
    frozen = Head()
    frozen.norm.eval()
    assert "norm.running_mean" not in trace(frozen, batch()).graph.buffers_changed


@pytest.mark.parametrize("through", ["users", "varuna"])
def test_modes_are_those_that_the_script_sets_last(through: str) -> None:
    plain, users = Head().eval(), Head().eval()
    model = wrap(users)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    assert not model.training
    for step, mode in enumerate([False, True, True, False, True]):
        plain.train(mode)
        (users if through == "users" else model).train(mode)
        optimizer.zero_grad()
        expected = plain(**batch(step))
        expected.backward()
        optimizer.step()
        assert model.step(batch(step))[0] == pytest.approx(expected.item(), rel=1e-6)
        assert users.training == mode
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(training_role(model).assembly.stage.buffers[name], buffer, msg=name)


@pytest.mark.parametrize("trains", [(True, True), (True, False), (False, True)], ids=["all", "all but it", "only it"])
def test_a_layer_that_changes_with_its_mode_is_as_before_after_an_evaluation(trains: tuple[bool, bool]) -> None:
    plain, users = Adapted(), Adapted()
    plain.dropout.p = users.dropout.p = 0.0
    for one in (plain, users):
        one.train(trains[0])
        one.body.train(trains[1])
    model = wrap(users)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        expected = plain(**batch(step))
        expected.backward()
        optimizer.step()
        assert model.step(batch(step))[0] == pytest.approx(expected.item(), rel=1e-6)
        if step == 1:
            plain.eval()
            assert model.evaluate(batch(9)) == pytest.approx(plain(**batch(9)).item(), rel=1e-6)
            plain.train(trains[0])
            plain.body.train(trains[1])
            assert model.get_submodule("body").is_merged is not trains[1]
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, msg=name)


def test_a_layer_that_changes_with_its_mode_is_as_before_after_an_evaluation_that_fails() -> None:
    model = wrap(Adapted())
    model.step(batch())
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match="no example is a number"):
        model.evaluate({"x": torch.full((4, H), torch.nan)})
    assert not model.get_submodule("body").is_merged
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, before[name], msg=name)


@pytest.mark.parametrize("own_mode", [True, False])
def test_an_evaluation_leaves_a_part_in_its_own_mode_whatever_train_of_the_model_does(own_mode: bool) -> None:
    model = wrap(FrozenNorm())
    model.get_submodule("norm").train(own_mode)
    model.evaluate(batch())
    assert modes_in(model) == [True, own_mode]


def test_what_the_optimizer_is_given_of_the_wrapped_model_is_refused() -> None:
    users = Head()
    users.body.requires_grad_(False)
    model = Varuna(users, get_batch_fn=batch())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model.set_optimizer(optimizer)
    model.step(batch())
    users.body.requires_grad_(True)
    optimizer.add_param_group({"params": list(users.body.parameters())})
    with pytest.raises(ValueError, match=r"given body.weight of the model that was wrapped.*named_parameters\(\)"):
        model.step(batch())


def test_a_change_that_the_stages_cannot_follow_is_refused_by_name() -> None:
    class NoLoss(Head):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) if self.training else x

    model = wrap(NoLoss())
    model.step(batch())
    model.eval()
    with pytest.raises(PartitionError, match=r"cannot be trained after eval\(\) of the model.*call train\(\)"):
        model.step(batch())


@pytest.mark.parametrize("trains", ["nothing", "what the loss leaves out"])
def test_a_warning_says_when_a_change_leaves_nothing_to_train(trains: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = wrap(Head())
    model.step(batch())
    assert "depends on no parameter that trains" not in capsys.readouterr().out
    model.eval()
    model.requires_grad_(False)
    model.get_submodule("second").requires_grad_(trains != "nothing")
    assert model.step(batch())[2] == 0.0
    assert re.search(r"the loss depends on no parameter that trains.*requires_grad of", capsys.readouterr().out)


def count_traces(model: Varuna, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Gets an entry for each trace after a change."""
    traces: list[object] = []
    changes = training_role(model)._parts.changes
    trace_model = changes.trace_model

    def trace_counted(*args: Any) -> Any:
        traces.append(args)
        return trace_model(*args)

    monkeypatch.setattr(changes, "trace_model", trace_counted)
    return traces


def body_of(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if name.startswith("body.")]


def set_trains(model: nn.Module, trains: bool) -> None:
    for parameter in body_of(model):
        parameter.requires_grad_(trains)


@pytest.mark.parametrize("through", ["users", "varuna"])
def test_what_was_unfrozen_since_it_was_frozen_after_wrapping_trains_when_it_goes_on(
    through: str, tmp_path: Path
) -> None:
    """The script freezes it each time that it starts, and unfreezes it once."""
    losses = []
    for first in (True, False):
        users = Head()
        model = wrap(users)
        handle = model if through == "varuna" else users
        for name, parameter in handle.named_parameters():
            parameter.requires_grad_(not name.startswith("body."))
        users.norm.eval()
        if first:
            model.step(batch())
            for parameter in handle.parameters():
                parameter.requires_grad_(True)
            users.norm.train()
            model.step(batch(1))
            assert model.checkpoint(str(tmp_path))
        else:
            model.load_checkpoint(str(tmp_path), 2)
            assert [p.requires_grad for p in (*body_of(model), *users.body.parameters())] == [True] * 4
            assert users.norm.training
        losses.append([model.step(batch(step))[0] for step in (2, 3)])
    assert losses[0] == losses[1]


def test_a_process_that_gives_its_state_before_a_step_gives_what_its_script_has_set() -> None:
    """A new one whose script has set the same must not undo it."""
    given, new = wrap(Head()), wrap(Head())
    for model in (given, new):
        model.eval()
        set_trains(model, trains=False)
    state = training_role(given)._parts.changes.state_dict()
    training_role(new)._parts.changes.load_state_dict(state)
    assert modes_in(new) == [False, False]
    assert not any(parameter.requires_grad for parameter in body_of(new))


def test_a_choice_that_the_script_makes_after_loading_counts(tmp_path: Path) -> None:
    model = wrap(Head())
    model.step(batch())
    assert model.checkpoint(str(tmp_path))
    again = wrap(Head())
    again.load_checkpoint(str(tmp_path), 1)
    set_trains(again, trains=False)
    before = [parameter.detach().clone() for parameter in body_of(again)]
    again.step(batch(1))
    torch.testing.assert_close(before, [parameter.detach() for parameter in body_of(again)], rtol=0, atol=0)


@pytest.mark.parametrize("through", ["users", "varuna"])
def test_a_load_leaves_alone_what_never_changed_in_the_training_before(through: str, tmp_path: Path) -> None:
    """It is another script's, as of a pretraining: this script freezes what that one has trained."""
    model = wrap(Head())
    model.step(batch())
    assert model.checkpoint(str(tmp_path))
    users = Head()
    again = wrap(users)
    set_trains(again if through == "varuna" else users, trains=False)
    users.norm.eval()
    again.load_checkpoint(str(tmp_path), 1)
    before = [parameter.detach().clone() for parameter in body_of(again)]
    again.step(batch(1))
    torch.testing.assert_close(before, [parameter.detach() for parameter in body_of(again)], rtol=0, atol=0)
    assert (users.training, users.norm.training) == (True, False)
    assert not any(parameter.requires_grad for parameter in body_of(again))


def test_a_change_that_was_undone_is_still_one_after_two_restarts(tmp_path: Path) -> None:
    """The second one loads what a process has saved that has only loaded it."""
    for step in range(3):
        model = wrap(Head())
        set_trains(model, trains=False)
        if step:
            model.load_checkpoint(str(tmp_path), step)
        before = [parameter.detach().clone() for parameter in body_of(model)]
        model.step(batch(step))
        assert all(map(torch.equal, before, body_of(model))) is (step == 0)
        if not step:
            set_trains(model, trains=True)
        assert model.checkpoint(str(tmp_path), step + 1)


def modes_in(model: Varuna) -> list[bool]:
    stage = training_role(model).assembly.stage.module
    return [stage.training, stage.get_submodule("norm").training]


@pytest.mark.parametrize("through", ["users", "varuna"])
def test_a_checkpoint_between_evaluations_goes_on_in_the_mode_of_training(
    through: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a script asks for it that keeps the best."""
    users = Head().eval()
    model = wrap(users)
    handle = model if through == "varuna" else users
    handle.train()
    model.step(batch())
    traces = count_traces(model, monkeypatch)
    handle.eval()
    set_trains(model, trains=False)
    assert model.checkpoint(str(tmp_path))
    assert (users.training, users.norm.training) == (False, False), "the script is not done with its evaluation"
    handle.train()
    expected = model.step(batch(1))[0]
    assert len(traces) == 1, "for what is frozen now"
    users = Head().eval()
    again = wrap(users)
    again.load_checkpoint(str(tmp_path), 1)
    assert [users.training, users.norm.training, *modes_in(again)] == [True] * 4
    assert not any(parameter.requires_grad for parameter in body_of(again))
    assert again.step(batch(1))[0] == expected


def test_a_checkpoint_before_the_first_step_after_a_load_keeps_the_modes_of_training(tmp_path: Path) -> None:
    users = Head()
    model = wrap(users)
    users.norm.eval()
    model.step(batch())
    assert model.checkpoint(str(tmp_path))
    again = wrap(Head())
    again.load_checkpoint(str(tmp_path), 1)
    again.eval()
    assert again.checkpoint(str(tmp_path), 2)
    users = Head()
    wrap(users).load_checkpoint(str(tmp_path), 2)
    assert (users.training, users.norm.training) == (True, False)


@pytest.mark.parametrize("trains_in", [True, False])
def test_a_checkpoint_keeps_modes_that_are_no_evaluation(trains_in: bool, tmp_path: Path) -> None:
    """Those of a part, set since the step before, and those of a model that trains in evaluation mode."""
    users = Head()
    model = wrap(users)
    model.train(trains_in)
    model.step(batch())
    users.norm.train(not trains_in)
    assert model.checkpoint(str(tmp_path))
    users = Head()
    wrap(users).load_checkpoint(str(tmp_path), 1)
    assert (users.training, users.norm.training) == (trains_in, not trains_in)


# ---------------------------------------------------------------- ranks that a loss sends into another generation


class Exchange(RankGroup):
    """One sum of ranks, which are threads here. A rank that `is_parted` leaves before it knows the sum."""

    def __init__(self, given: list[Tensor], both: threading.Barrier, *, is_parted: bool) -> None:
        super().__init__(None, range(both.parties), Departure(lambda code: None))
        self._given, self._both, self._is_parted = given, both, is_parted

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        self._given.append(tensors[0].clone())
        self._both.wait(DEADLINE_S)
        if self._is_parted:
            raise PeerLost("rank 2 is gone")
        tensors[0].copy_(sum(self._given))


class Ranks:
    """Each has the whole model, and nothing but their changes goes between them."""

    def __init__(self, count: int = 2) -> None:
        self.users = [Head() for _ in range(count)]
        self.models = [wrap(model) for model in self.users]
        self.changes: list[ScriptChanges] = [training_role(model)._parts.changes for model in self.models]
        self.connect()

    def connect(self, *, parted: int | None = None, exchanges: bool = True) -> None:
        given, all_there = list[Tensor](), threading.Barrier(len(self.changes))
        for rank, one in enumerate(self.changes):
            one.follow_ranks(Exchange(given, all_there, is_parted=rank == parted), exchanges=exchanges)

    def on_all(self, call: Callable[[ScriptChanges], None]) -> None:
        def call_one(one: ScriptChanges) -> None:
            with suppress(PeerLost):
                call(one)

        with ThreadPoolExecutor(len(self.changes)) as pool:
            list(pool.map(call_one, self.changes))


def test_a_rank_that_has_not_begun_a_step_exchanges_its_changes_with_those_that_have() -> None:
    ranks = Ranks()
    ranks.connect(parted=0)
    ranks.on_all(ScriptChanges.begin_step)
    assert [one.has_exchanged for one in ranks.changes] == [False, True]
    ranks.users[0].eval()
    ranks.connect()
    ranks.on_all(ScriptChanges.begin_step)
    assert [model.training for model in ranks.users] == [False, False]
    ranks.connect(exchanges=False)
    ranks.changes[0].begin_step()  # waits for nobody


@pytest.mark.parametrize("changed", [[0], [1], [0, 1]], ids=str)
def test_ranks_of_which_one_has_missed_an_exchange_are_seen_to_differ(changed: list[int]) -> None:
    ranks = Ranks()
    for rank in changed:
        ranks.users[rank].eval()
    ranks.connect(parted=0)
    ranks.on_all(ScriptChanges.begin_step)
    assert ranks.changes[0].agreed != ranks.changes[1].agreed


@pytest.mark.parametrize("exchanges", [False, True])
def test_a_change_that_a_pass_ran_without_is_not_lost_with_it(exchanges: bool) -> None:
    """In the rest of a step, whose other part ran without it, it is not made before the end."""
    ranks = Ranks()
    ranks.on_all(ScriptChanges.begin_step)
    parameter = ranks.models[0].get_parameter("body.weight")
    parameter.requires_grad_(False)
    ranks.on_all(ScriptChanges.begin_step)
    ranks.connect(exchanges=exchanges)
    ranks.on_all(partial(ScriptChanges.begin_step, is_rest=True))
    assert [one.are_pending for one in ranks.changes] == [True, False]
    assert parameter.requires_grad
    ranks.on_all(ScriptChanges.exchange_changes)
    assert [one.trains["body.weight"] for one in ranks.changes] == [False, False]


def test_a_new_rank_follows_the_others_whatever_its_script_did_before_it_joined_them() -> None:
    ranks = Ranks(3)
    for users in ranks.users:
        users.eval()
    first, second, new = ranks.changes
    ranks.on_all(lambda one: None if one is new else one.follow_agreement(first.agreed))
    ranks.users[0].train()
    new.follow_agreement(second.agreed)
    assert (ranks.users[2].training, new.has_exchanged, new.are_pending) == (True, True, False)
    ranks.connect()
    ranks.on_all(ScriptChanges.begin_step)
    assert first.agreed == second.agreed == new.agreed


def test_a_state_from_before_an_exchange_undoes_nothing_that_its_rank_could_not_see() -> None:
    """A rank sees what was frozen through the Varuna object in its own stage only."""
    ranks = Ranks(3)
    first, _, new = ranks.changes
    for model in ranks.models[1:]:
        model.get_parameter("body.weight").requires_grad_(False)
    new.load_state_dict(first.state_dict())
    assert not ranks.models[2].get_parameter("body.weight").requires_grad
    ranks.on_all(ScriptChanges.begin_step)
    assert [one.trains["body.weight"] for one in ranks.changes] == [False] * 3
    assert [one.state_dict()["parameter"] for one in ranks.changes] == [{"body.weight": False}] * 3


def test_a_meeting_in_a_first_step_keeps_what_the_ranks_have_agreed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    users = Head()
    model = wrap(users, batch_size=4, chunk_size=2)
    role = training_role(model)
    users.eval()
    met: list[GenerationMember] = []

    def meet(step: TrainingStep, *_: object) -> None:
        met.extend(role._membership._meeting.meet(step, role._worker.environment).survivors)
        raise PeerLost("rank 2 is gone")

    monkeypatch.setattr(role._worker.rendezvous, "exchange_values", lambda name, ranks, own: [own])
    monkeypatch.setattr(role._membership._meeting, "_prepare_last_step", lambda *_: None)
    monkeypatch.setattr(role._share, "run", meet)
    with pytest.raises(PeerLost):
        model.step(batch())
    (own,) = met
    assert own.has_exchanged
    assert split_spans(own.agreed_changes) == role._changes.agreed
    assert not role._changes.are_pending
    assert not users.training


def test_ranks_keep_the_modes_of_training_while_some_evaluate() -> None:
    ranks = Ranks()
    ranks.on_all(ScriptChanges.begin_step)
    ranks.connect(exchanges=False)
    ranks.users[0].eval()
    ranks.models[1].get_parameter("body.weight").requires_grad_(False)
    ranks.on_all(partial(ScriptChanges.exchange_changes, may_evaluate=True))
    assert [one.trains["body.weight"] for one in ranks.changes] == [False, False]
    assert [users.training for users in ranks.users] == [False, True]
    ranks.users[0].train()
    ranks.on_all(ScriptChanges.begin_step)
    assert [one.are_pending for one in ranks.changes] == [False, False]
    assert ranks.changes[0].agreed == ranks.changes[1].agreed
