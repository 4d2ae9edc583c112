"""Checkpoints of a small model with tied weights, written and read by ranks of every shape."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.optim import Adam, AdamW, Optimizer

from tied_ranks import OPTIMIZERS, Rank, ranks_of, train_step, trained
from varuna.checkpoint import (
    CheckpointError,
    CheckpointWriter,
    LoadedCheckpoint,
    SaveOutcome,
    ShapePosition,
    TrainingState,
    load_checkpoint,
    newest_complete,
    read_manifest,
    read_parameters,
    resume_checkpoint,
)
from varuna.checkpoint.format.manifest import FileEntry, FileKind, Receipt, merge_files
from waiting import DEADLINE_S


def save(url: str, step: int, ranks: list[Rank], p: int, d: int, generation: int = 1, **options: Any) -> SaveOutcome:
    """Save on all ranks, each in its own thread as in life; rank 0's outcome."""
    checkpointers = [
        CheckpointWriter(url, generation=generation, position=ShapePosition(rank=rank, p=p, d=d), **options)
        for rank in range(len(ranks))
    ]
    for checkpointer, rank in zip(checkpointers, ranks, strict=True):
        assert checkpointer.start_save(step, rank.state)
    outcomes = [checkpointer.wait(DEADLINE_S) for checkpointer in checkpointers]
    assert all(outcome is not None for outcome in outcomes)
    assert outcomes[0] is not None
    return outcomes[0]


def saved(url: str, step: int = 3, p: int = 1, d: int = 1, generation: int = 1, **options: Any) -> SaveOutcome:
    make = OPTIMIZERS["adam"]
    model, optimizer = trained(make, steps=step)
    return save(url, step, ranks_of(model, optimizer, make, p, d), p, d, generation, **options)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("p", "d", "p2", "d2"), [(1, 1, 2, 2), (2, 3, 4, 1), (4, 2, 1, 1), (2, 1, 3, 2)])
def test_any_shape_goes_on_exactly_where_any_other_stopped(
    tmp_path: Path, kind: str, p: int, d: int, p2: int, d2: int
) -> None:
    make = OPTIMIZERS[kind]
    model, optimizer = trained(make)
    outcome = save(str(tmp_path), 3, ranks_of(model, optimizer, make, p, d), p, d)
    assert outcome.result == "committed", outcome.error

    for rank in (Rank(p2, d2, rank, make) for rank in range(p2 * d2)):
        loaded = load_checkpoint(str(tmp_path), 3, rank.state)
        assert (loaded.step, loaded.generation, loaded.seed) == (3, 1, 5)
        for name, value in rank.parameters.items():
            expected = model.get_parameter(name)
            torch.testing.assert_close(value, expected, rtol=0, atol=0)
            assert_same_state(rank.optimizer.state.get(value, {}), optimizer.state.get(expected, {}))
        for name, buffer in rank.buffers.items():
            assert torch.equal(buffer, model.get_buffer(name))


def assert_same_state(loaded: dict[str, Any], expected: dict[str, Any]) -> None:
    assert loaded.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, Tensor):
            assert loaded[key].dtype == value.dtype
            torch.testing.assert_close(loaded[key], value, rtol=0, atol=0)
        else:
            assert loaded[key] == value


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_step_after_loading_is_the_step_that_would_have_been(tmp_path: Path, kind: str) -> None:
    make = OPTIMIZERS[kind]
    model, optimizer = trained(make)
    save(str(tmp_path), 3, ranks_of(model, optimizer, make, 2, 1), 2, 1)
    fresh = Rank(1, 1, 0, make)
    load_checkpoint(str(tmp_path), 3, fresh.state)
    train_step(model, optimizer)
    train_step(fresh.model, fresh.optimizer)
    for name, value in fresh.parameters.items():
        torch.testing.assert_close(value, model.get_parameter(name), rtol=0, atol=0)


def test_options_of_groups_and_user_states_come_back(tmp_path: Path) -> None:
    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        every = list(parameters)
        groups = [
            {"params": [value for value in every if value.ndim > 1], "weight_decay": 0.1},
            {"params": [value for value in every if value.ndim <= 1], "weight_decay": 0.0},
        ]
        return AdamW(groups, lr=0.01)

    model, optimizer = trained(make)
    ranks = ranks_of(model, optimizer, make, 2, 1)
    for rank in ranks:
        for group in rank.optimizer.param_groups:
            group["lr"] = 0.25
    ranks[0].user = {"scheduler": {"last_epoch": 3, "betas": (0.5, 0.25)}, "scale": torch.tensor(512.0)}
    save(str(tmp_path), 3, ranks, 2, 1)

    fresh = Rank(1, 1, 0, make)
    loaded = load_checkpoint(str(tmp_path), 3, fresh.state)
    assert [group["lr"] for group in fresh.optimizer.param_groups] == [0.25, 0.25]
    assert [group["weight_decay"] for group in fresh.optimizer.param_groups] == [0.1, 0.0]
    assert loaded.user["scheduler"] == {"last_epoch": 3, "betas": (0.5, 0.25)}
    assert loaded.user["scale"] == 512.0


def test_training_may_change_the_state_as_soon_as_save_returns(tmp_path: Path) -> None:
    make = OPTIMIZERS["adam"]
    model, optimizer = trained(make)
    [rank] = ranks_of(model, optimizer, make, 1, 1)
    checkpointer = CheckpointWriter(str(tmp_path), generation=1, position=ShapePosition(rank=0, p=1, d=1))
    assert checkpointer.start_save(3, rank.state)
    with torch.no_grad():
        for value in rank.parameters.values():
            value.zero_()
    outcome = checkpointer.wait(DEADLINE_S)
    assert outcome is not None
    assert outcome.result == "committed"
    assert checkpointer.last_stall_s is not None
    for name, saved in read_parameters(str(tmp_path), 3).items():
        if name != "seen":
            assert torch.equal(saved, model.get_parameter(name))


def test_a_tied_weight_is_stored_once_and_read_alone(tmp_path: Path) -> None:
    saved(str(tmp_path), p=2, d=1)
    manifest = read_manifest(str(tmp_path), 3)
    holding = [entry for entry in manifest.files if "embedding.weight" in entry.holds]
    assert sorted(entry.kind.value for entry in holding) == ["optimizer", "parameters"]
    assert all(entry.section == 0 and entry.holds == ("embedding.weight",) for entry in holding)
    last = Rank(4, 1, 3, OPTIMIZERS["adam"])
    loaded = load_checkpoint(str(tmp_path), 3, last.state)
    needed = [entry for entry in manifest.files if entry.section == 3 or entry in holding]
    assert loaded.bytes_read == sum(entry.bytes for entry in needed)


def test_bytes_are_shared_out_over_the_replicas_not_sections(tmp_path: Path) -> None:
    """A stage of one large section and three small ones: each of three replicas writes about a third."""

    def state() -> TrainingState:
        torch.manual_seed(3)
        values = {f"large.{index}": nn.Parameter(torch.randn(3000)) for index in range(10)}
        values |= {f"small.{index}": nn.Parameter(torch.randn(100)) for index in range(3)}
        optimizer = Adam(values.values())
        for value in values.values():
            value.grad = torch.ones_like(value)
        optimizer.step()
        section_of = {name: 0 if name.startswith("large") else 1 + int(name[-1]) for name in values}
        return TrainingState(
            sections=range(4), section_count=4, parameters=values, section_of=section_of, optimizers=[optimizer]
        )

    checkpointers = [
        CheckpointWriter(str(tmp_path), generation=1, position=ShapePosition(rank=rank, p=1, d=3)) for rank in range(3)
    ]
    for checkpointer in checkpointers:
        assert checkpointer.start_save(1, state())
    outcomes = [checkpointer.wait(DEADLINE_S) for checkpointer in checkpointers]
    assert [outcome and outcome.result for outcome in outcomes] == ["committed", "written", "written"]
    entries = [
        json.loads((tmp_path / "varuna_ckpt_1" / f"receipt-g1-r{rank}.json").read_text())["files"] for rank in range(3)
    ]
    written = [sum(entry["bytes"] for entry in files) for files in entries]
    largest_tensor = 3 * 3000 * 4
    assert max(written) - min(written) < largest_tensor + 4096  # headers
    held = sorted(name for entry in read_manifest(str(tmp_path), 1).files for name in entry.holds)
    expected = state()
    assert held == sorted(2 * list(expected.parameters))  # their values, and the optimizer's state
    loaded = replace(state(), optimizers=[])
    with torch.no_grad():
        for value in loaded.parameters.values():
            value.zero_()
    load_checkpoint(str(tmp_path), 1, loaded)
    for name, value in expected.parameters.items():
        assert torch.equal(loaded.parameters[name], value)


def test_a_tensor_that_no_replica_wrote_or_two_did_makes_no_checkpoint() -> None:
    def receipt(rank: int, *names: str) -> Receipt:
        entry = FileEntry(
            name=f"f{rank}", kind=FileKind.PARAMETERS, section=0, holds=names, bytes=1, checksum="xxh3-128:0"
        )
        return Receipt(generation=1, step=1, rank=rank, world_size=2, tensors_of={0: 2}, files=(entry,))

    assert [entry.name for entry in merge_files([receipt(0, "a"), receipt(1, "b")], 1)] == ["f0", "f1"]
    with pytest.raises(CheckpointError, match="a was written by rank 0 and by rank 1"):
        merge_files([receipt(0, "a", "b"), receipt(1, "a")], 1)
    with pytest.raises(CheckpointError, match="of section 0, 1 of 2 tensors were written"):
        merge_files([receipt(0, "a"), receipt(1)], 1)
    with pytest.raises(CheckpointError, match="no rank wrote section 1 of 2"):
        merge_files([receipt(0, "a"), receipt(1, "b")], 2)


def test_a_checkpoint_without_every_receipt_does_not_exist(tmp_path: Path) -> None:
    make = OPTIMIZERS["adam"]
    model, optimizer = trained(make)
    ranks = ranks_of(model, optimizer, make, 2, 1)
    failures: list[tuple[int, str]] = []
    checkpointer = CheckpointWriter(
        str(tmp_path),
        generation=1,
        position=ShapePosition(rank=0, p=2, d=1),
        receipt_deadline_s=0.05,
        on_failed=lambda step, error: failures.append((step, error)),
    )
    assert checkpointer.start_save(3, ranks[0].state)
    outcome = checkpointer.wait(DEADLINE_S)
    assert outcome is not None
    assert outcome.result == "failed"
    assert "receipt-g1-r1.json" in failures[0][1]
    assert newest_complete(str(tmp_path)) is None
    assert not any(path.is_file() for path in tmp_path.rglob("*")), "what the failed save wrote is in the way"


def test_a_closed_checkpointer_gives_up_waiting_for_the_others(tmp_path: Path) -> None:
    make = OPTIMIZERS["sgd"]
    model, optimizer = trained(make)
    checkpointer = CheckpointWriter(str(tmp_path), generation=1, position=ShapePosition(rank=0, p=2, d=1))
    assert checkpointer.start_save(3, ranks_of(model, optimizer, make, 2, 1)[0].state)
    assert checkpointer.in_flight
    assert not checkpointer.start_save(4, ranks_of(model, optimizer, make, 2, 1)[0].state)
    checkpointer.close()
    assert not checkpointer.in_flight
    outcome = checkpointer.wait()
    assert outcome is not None
    assert outcome.result == "failed"


def test_of_two_generations_that_save_the_same_step_one_stands(tmp_path: Path) -> None:
    assert saved(str(tmp_path), generation=1).result == "committed"
    assert saved(str(tmp_path), generation=2).result == "dropped"
    assert read_manifest(str(tmp_path), 3).generation == 1
    load_checkpoint(str(tmp_path), 3, Rank(2, 1, 1, OPTIMIZERS["adam"]).state)


def test_files_that_a_lost_generation_left_do_no_harm(tmp_path: Path) -> None:
    saved(str(tmp_path), generation=1)
    (tmp_path / "varuna_ckpt_3" / "manifest.json").unlink()
    assert newest_complete(str(tmp_path)) is None
    assert saved(str(tmp_path), generation=2, p=2).result == "committed"
    assert {entry.name.split("-g")[1][0] for entry in read_manifest(str(tmp_path), 3).files} == {"2"}


def test_only_the_newest_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3, 9, 10):
        saved(str(tmp_path), step=step)
        (tmp_path / f"varuna_ckpt_{step}" / "section-00000-g1.parameters.safetensors#1").write_text("killed")
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["varuna_ckpt_10", "varuna_ckpt_3", "varuna_ckpt_9"]


def test_pruning_leaves_what_a_newer_generation_writes(tmp_path: Path) -> None:
    saved(str(tmp_path), step=1, generation=2)
    (tmp_path / "varuna_ckpt_1" / "manifest.json").unlink()
    for step in (2, 3, 4, 5):
        saved(str(tmp_path), step=step, generation=1)
    assert sorted(int(folder.name.rpartition("_")[2]) for folder in tmp_path.iterdir()) == [1, 3, 4, 5]


def test_steps_ahead_of_a_commit_are_left_alone(tmp_path: Path) -> None:
    for step in (8, 9, 2):
        saved(str(tmp_path), step=step)
    assert newest_complete(str(tmp_path)) == 9
    assert newest_complete(str(tmp_path), before=8) == 2


def damage(folder: Path, how: str) -> str:
    """Harm the checkpoint; the name of the file that an error must give."""
    victim = next(file for file in sorted(folder.iterdir()) if file.name.startswith("section-00001"))
    if how == "missing":
        victim.unlink()
    elif how == "truncated":
        victim.write_bytes(victim.read_bytes()[:-1])
    elif how == "flipped":
        data = bytearray(victim.read_bytes())
        data[-1] ^= 1
        victim.write_bytes(bytes(data))
    else:
        (folder / "manifest.json").write_text('{"schema": "varuna.checkpoint/1", "gen')
        return "manifest.json"
    return victim.name


@pytest.mark.parametrize("how", ["missing", "truncated", "flipped", "torn manifest"])
def test_a_harmed_checkpoint_is_named_and_the_one_before_is_taken(tmp_path: Path, how: str) -> None:
    saved(str(tmp_path), step=2)
    saved(str(tmp_path), step=3)
    name = damage(tmp_path / "varuna_ckpt_3", how)
    rank = Rank(1, 1, 0, OPTIMIZERS["adam"])
    before = copy.deepcopy(rank.model.state_dict())
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(str(tmp_path), 3, rank.state)
    assert all(torch.equal(value, before[key]) for key, value in rank.model.state_dict().items())
    assert not rank.optimizer.state

    reports: list[tuple[int, str]] = []
    loaded = resume_checkpoint(str(tmp_path), rank.state, report=lambda step, why: reports.append((step, why)))
    assert loaded is not None
    assert loaded.step == 2
    assert reports[0][0] == 3
    assert name in reports[0][1]


def test_a_checkpoint_of_another_format_is_named_and_passed_over(tmp_path: Path) -> None:
    saved(str(tmp_path), step=2)
    saved(str(tmp_path), step=3)
    (tmp_path / "varuna_ckpt_3" / "manifest.json").write_text('{"schema": "varuna.checkpoint/1"}')
    reports: list[str] = []
    loaded = resume_checkpoint(
        str(tmp_path), Rank(1, 1, 0, OPTIMIZERS["adam"]).state, report=lambda step, why: reports.append(why)
    )
    assert loaded is not None
    assert loaded.step == 2
    assert reports[0].endswith("is of the format varuna.checkpoint/1; this version reads varuna.checkpoint/4")


def test_the_optimizers_state_is_in_memory_of_its_own(tmp_path: Path) -> None:
    saved(str(tmp_path))
    one, other = (Rank(1, 1, 0, OPTIMIZERS["adam"]) for _ in range(2))
    for rank in (one, other):
        load_checkpoint(str(tmp_path), 3, rank.state)
    before = copy.deepcopy(other.optimizer.state_dict()["state"])
    places: set[int] = set()
    for state in one.optimizer.state.values():
        for value in state.values():
            assert value.data_ptr() not in places
            places.add(value.data_ptr())
            value.fill_(7.0)
    assert len(places) == 4 * len(one.parameters)
    for index, state in other.optimizer.state_dict()["state"].items():
        assert_same_state(state, before[index])


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    missing = tmp_path / "never" / "made"
    assert newest_complete(str(missing)) is None
    assert resume_checkpoint(missing.as_uri(), Rank(1, 1, 0, OPTIMIZERS["sgd"]).state) is None
    assert not missing.exists()


@pytest.mark.parametrize("how", ["missing", "flipped", "nothing there"])
def test_ranks_fall_back_together(tmp_path: Path, how: str) -> None:
    saved(str(tmp_path), step=2, p=2)
    saved(str(tmp_path), step=3, p=2)
    if how == "nothing there":
        shutil.rmtree(tmp_path)
    else:
        damage(tmp_path / "varuna_ckpt_3", how)  # section 1, which one of four stages needs
    store = HashStore()
    reports: list[tuple[int, str]] = []

    def run(number: int) -> LoadedCheckpoint | None:
        rank = Rank(4, 1, number, OPTIMIZERS["adam"])
        return resume_checkpoint(
            str(tmp_path),
            rank.state,
            store=store,
            rank=number,
            world_size=4,
            report=lambda step, why: reports.append((step, why)),
        )

    with ThreadPoolExecutor(4) as threads:
        loaded = list(threads.map(run, range(4)))
    if how == "nothing there":
        assert loaded == [None] * 4
    else:
        assert [each and each.step for each in loaded] == [2] * 4
        [(step, why)] = reports  # rank 0's
        assert step == 3
        assert "section-00001" in why
        saved(str(tmp_path), step=4)
        with ThreadPoolExecutor(4) as threads:
            assert [each and each.step for each in threads.map(run, range(4))] == [4] * 4


@pytest.mark.parametrize("url", ["", "foo://bar", "file://relative/folder"])
def test_a_url_that_names_no_store_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="checkpoint URL"):
        CheckpointWriter(url, generation=1, position=ShapePosition(rank=0, p=1, d=1))


def test_another_models_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    saved(str(tmp_path))
    rank = Rank(1, 1, 0, OPTIMIZERS["adam"])
    rank.parameters["norm.weight"] = nn.Parameter(torch.ones(6))
    with pytest.raises(CheckpointError, match=r"norm.weight is torch.float32 \[5\]"):
        load_checkpoint(str(tmp_path), 3, rank.state)


def test_another_optimizers_checkpoint_is_refused(tmp_path: Path) -> None:
    saved(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"the optimizer is torch\.optim\.sgd\.SGD"):
        load_checkpoint(str(tmp_path), 3, Rank(1, 1, 0, OPTIMIZERS["sgd"]).state)


def test_state_that_cannot_be_kept_fails_the_save_and_not_the_training(tmp_path: Path) -> None:
    make = OPTIMIZERS["sgd"]
    model, optimizer = trained(make)
    [rank] = ranks_of(model, optimizer, make, 1, 1)
    rank.user = {"callback": print}
    outcome = save(str(tmp_path), 3, [rank], 1, 1)
    assert outcome.result == "failed"
    assert "user/callback" in outcome.error


def test_a_store_that_cannot_be_written_fails_the_save_and_not_the_training(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    assert saved(str(blocked)).result == "failed"


def test_committed_checkpoints_are_told_with_their_size(tmp_path: Path) -> None:
    committed: list[tuple[int, str, int]] = []
    saved((tmp_path / "a b").as_uri(), on_committed=lambda *checkpoint: committed.append(checkpoint))
    [(step, url, size)] = committed
    folder = tmp_path / "a b" / "varuna_ckpt_3"
    assert (step, url) == (3, folder.as_uri())
    assert size == sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    shutil.rmtree(folder)
    assert newest_complete(str(tmp_path / "a b")) is None
