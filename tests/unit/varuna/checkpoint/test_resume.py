"""Resuming when the newest checkpoint does not fit the script, or the store cannot be read; and a fresh start."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch
from torch import nn
from torch.distributed import HashStore
from torch.optim import SGD, Adam, AdamW

from varuna.checkpoint import (
    CheckpointWriter,
    LoadedCheckpoint,
    MismatchError,
    SampleCursor,
    ShapePosition,
    StoreError,
    TrainingState,
    load_checkpoint,
    newest_complete,
    read_manifest,
    resume_checkpoint,
)
from varuna.checkpoint.loading.resuming import HeldStateProposal
from varuna.checkpoint.storage import answers
from varuna.checkpoint.storage.store import CheckpointStore
from varuna.diagnostics.loading_progress import LOADING_PROGRESS
from waiting import DEADLINE_S

Change = Callable[[TrainingState], TrainingState]


def make_state(rank: int = 0, p: int = 1) -> TrainingState:
    """Of one of two stages, each of one section with one linear layer; or of both."""
    layers = {f"layer{section}": nn.Linear(3, 2) for section in range(2)}
    sections = range(2) if p == 1 else range(rank, rank + 1)
    every = {f"{name}.{key}": value for name, layer in layers.items() for key, value in layer.named_parameters()}
    mine = {name: value for name, value in every.items() if int(name[5]) in sections}
    optimizer = Adam(mine.values(), lr=0.1)
    for value in mine.values():
        value.grad = torch.ones_like(value)
    optimizer.step()
    return TrainingState(
        sections=sections,
        section_count=2,
        parameters=mine,
        section_of={name: int(name[5]) for name in every},
        optimizers=[optimizer],
        state_dict={name: name for name in every},
    )


def save(url: Path, step: int, change: Change = lambda state: state, generation: int = 1) -> None:
    checkpointer = CheckpointWriter(str(url), generation=generation, position=ShapePosition(rank=0, p=1, d=1))
    assert checkpointer.start_save(step, change(make_state()))
    outcome = checkpointer.wait(DEADLINE_S)
    assert outcome is not None
    assert outcome.result == "committed", outcome.error


def rename(state: TrainingState, old: str, new: str) -> TrainingState:
    def renamed(names: dict[str, object]) -> dict[str, object]:
        return {name.replace(old, new): value for name, value in names.items()}

    return replace(
        state,
        parameters=renamed(dict(state.parameters)),
        section_of=renamed(dict(state.section_of)),
        state_dict={name: name for name in renamed(dict(state.state_dict))},
    )


def without(state: TrainingState, name: str) -> TrainingState:
    return replace(
        state,
        parameters={key: value for key, value in state.parameters.items() if key != name},
        section_of={key: value for key, value in state.section_of.items() if key != name},
        state_dict={key: value for key, value in state.state_dict.items() if key != name},
    )


def reshape(state: TrainingState) -> TrainingState:
    if "layer1.weight" not in state.parameters:
        return state
    return replace(state, parameters={**state.parameters, "layer1.weight": nn.Parameter(torch.zeros(2, 4))})


MISFITS: dict[str, tuple[Change, str]] = {
    "a renamed layer": (
        lambda state: rename(state, "layer1", "head"),
        r"the model has, and the checkpoint lacks, head\.weight \(and 1 more\); "
        r"the checkpoint has, and the model lacks, layer1\.weight",
    ),
    "a layer removed": (
        lambda state: without(state, "layer1.bias"),
        r"the checkpoint has, and the model lacks, layer1\.bias",
    ),
    "another shape": (
        reshape,
        r"layer1\.weight is torch\.float32 \[2, 3\] there and torch\.float32 \[2, 4\] in the model",
    ),
    "another optimizer": (
        lambda state: replace(state, optimizers=[AdamW(state.parameters.values())]),
        r"torch\.optim\.adam\.Adam for layer0\.weight, and the optimizer is torch\.optim\.adamw\.AdamW",
    ),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_a_checkpoint_that_does_not_fit_stops_every_rank_and_both_sides_are_named(tmp_path: Path, kind: str) -> None:
    change, words = MISFITS[kind]
    save(tmp_path, 2)
    save(tmp_path, 3)
    store = HashStore()

    def refusal(rank: int) -> str:
        state = change(make_state(rank, p=2))
        before = {name: value.detach().clone() for name, value in state.parameters.items()}
        with pytest.raises(MismatchError, match=words) as error:
            resume_checkpoint(str(tmp_path), state, store=store, rank=rank, world_size=2)
        assert all(torch.equal(value, before[name]) for name, value in state.parameters.items())
        return str(error.value)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(refusal, range(2))
    assert first == second
    assert "varuna_ckpt_3" in first
    assert "resume(allow_fresh_start=True)" in first
    assert newest_complete(str(tmp_path)) == 3


def test_a_fresh_start_sets_aside_what_does_not_fit_and_its_own_checkpoints_are_found_again(tmp_path: Path) -> None:
    def change(state: TrainingState) -> TrainingState:
        return rename(state, "layer1", "head")

    save(tmp_path, 2)
    save(tmp_path, 3)
    store = HashStore()

    def start(rank: int) -> LoadedCheckpoint | None:
        state = change(make_state(rank, p=2))
        return resume_checkpoint(str(tmp_path), state, store=store, rank=rank, world_size=2, allow_fresh_start=True)

    with structlog.testing.capture_logs() as log, ThreadPoolExecutor(2) as pool:
        assert list(pool.map(start, range(2))) == [None, None]
    assert [line["step"] for line in log if "set aside" in line["event"]] == [3, 2]
    # A job whose checkpoints were set aside has not lost them.
    assert resume_checkpoint(str(tmp_path), change(make_state()), committed_step=3) is None

    save(tmp_path, 1, change, generation=2)
    save(tmp_path, 3, change, generation=2)
    loaded = resume_checkpoint(str(tmp_path), change(make_state()))
    assert loaded is not None
    assert loaded.step == 3
    save(tmp_path, 4, change, generation=2)
    assert newest_complete(str(tmp_path), before=4) == 3
    # What was set aside is still there, and comes back by its manifest's name.
    folder = tmp_path / "varuna_ckpt_2"
    (folder / "manifest.set-aside-1.json").rename(folder / "manifest.json")
    load_checkpoint(str(tmp_path), 2, make_state())


def test_a_fresh_start_goes_on_from_a_checkpoint_that_fits(tmp_path: Path) -> None:
    save(tmp_path, 2)
    save(tmp_path, 3, lambda state: rename(state, "layer1", "head"))
    loaded = resume_checkpoint(str(tmp_path), make_state(), allow_fresh_start=True)
    assert loaded is not None
    assert loaded.step == 2


def test_a_checkpoint_of_an_earlier_version_that_does_not_fit_is_no_fresh_start_either(tmp_path: Path) -> None:
    save(tmp_path, 3)
    manifest = tmp_path / "varuna_ckpt_3" / "manifest.json"
    document = json.loads(manifest.read_bytes())
    del document["checksum"]
    manifest.write_text(json.dumps(document | {"schema": "varuna.checkpoint/2"}, indent=1))
    state = make_state()
    with pytest.raises(MismatchError, match=r"torch\.optim\.sgd\.SGD"):
        resume_checkpoint(str(tmp_path), replace(state, optimizers=[SGD(state.parameters.values())]))


def test_a_manifest_that_cannot_be_read_stops_every_rank_and_no_older_checkpoint_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2)
    save(tmp_path, 3)
    manifest = tmp_path / "varuna_ckpt_3" / "manifest.json"
    manifest.unlink()
    manifest.symlink_to(manifest)  # it is there, and reading it fails, as on a network that has gone
    monkeypatch.setattr("varuna.checkpoint.storage.store._PATIENCE_S", 0.0)
    store = HashStore()

    def refusal(rank: int) -> str:
        with pytest.raises(StoreError, match="varuna_ckpt_3") as error:
            resume_checkpoint(str(tmp_path), make_state(rank, p=2), store=store, rank=rank, world_size=2)
        return str(error.value)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(refusal, range(2))
    assert first == second


def test_the_samples_that_were_used_come_back(tmp_path: Path) -> None:
    save(tmp_path, 3, lambda state: replace(state, cursor=SampleCursor(samples=30, global_batch=8)))
    assert read_manifest(str(tmp_path), 3).cursor == SampleCursor(samples=30, global_batch=8)
    loaded = resume_checkpoint(str(tmp_path), make_state())
    assert loaded is not None
    assert loaded.cursor == SampleCursor(samples=30, global_batch=8)


def test_loading_is_a_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer of the store, too: one that takes a minute for each sends no piece of a file for minutes."""
    save(tmp_path, 1)
    signs: list[None] = []
    monkeypatch.setattr(LOADING_PROGRESS, "_report", lambda: signs.append(None))
    loaded = resume_checkpoint(str(tmp_path), make_state())
    files = len(list((tmp_path / "varuna_ckpt_1").glob("*.safetensors")))
    assert loaded is not None
    assert loaded.step == 1
    by_rank_0 = 4  # the steps, the files twice, and the manifest
    by_each_rank = 2 + 2 * files  # the files, and the manifest; each file to verify and to fill
    assert len(signs) == by_rank_0 + by_each_rank


def test_saving_is_no_sign_of_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves read the store while training may hang."""
    signs: list[None] = []
    monkeypatch.setattr(LOADING_PROGRESS, "_report", lambda: signs.append(None))
    save(tmp_path, 1)
    save(tmp_path, 2)
    assert not signs


class HeldHere:
    """What processes hold of a step, of which this one is the only rank."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.is_loaded: bool | None = None

    def propose_state(self) -> HeldStateProposal:
        return HeldStateProposal(self.step, "document")

    def stage_state(self, document: str, state: TrainingState, exchange: Callable[[str], list[str]]) -> Any:
        return SimpleNamespace(fill_state=lambda: SimpleNamespace(step=self.step))

    def exclude_holders(self, ranks: Iterable[int]) -> None:
        raise AssertionError("no holder is at fault")

    def announce_end(self, *, is_loaded: bool) -> None:
        self.is_loaded = is_loaded

    def close(self) -> None:
        pass


def test_a_store_that_does_not_answer_keeps_no_rank_from_what_processes_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server that is away blocks a call for as long as it is."""
    is_back = threading.Event()
    monkeypatch.setattr(CheckpointStore, "list_steps", lambda _: is_back.wait(DEADLINE_S) and [])
    monkeypatch.setattr(answers, "_ANSWER_LIMIT_S", 0.01)
    memory = HeldHere(step=5)
    with ThreadPoolExecutor(1) as pool, structlog.testing.capture_logs() as log:
        resuming = pool.submit(resume_checkpoint, str(tmp_path), make_state(), committed_step=5, memory=memory)
        try:
            loaded = resuming.result(DEADLINE_S / 2)
        finally:
            is_back.set()
    assert loaded is not None
    assert loaded.step == 5
    assert memory.is_loaded
    assert [line["event"] for line in log] == ["the checkpoint store does not answer"]
