"""Which checkpoints stay: automatic ones for a while, those that a script asked for as it requested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import varuna
from varuna.checkpoint import (
    CheckpointError,
    CheckpointRequest,
    CheckpointWriter,
    SaveOutcome,
    ShapePosition,
    TrainingState,
    read_manifest,
)
from varuna.checkpoint.format.manifest import CheckpointRetention, Manifest
from waiting import DEADLINE_S

KEPT = CheckpointRequest()


def state() -> TrainingState:
    return TrainingState(
        sections=range(1),
        section_count=1,
        parameters={"weight": torch.ones(2, requires_grad=True)},
        section_of={"weight": 0},
    )


def save(store: Path, step: int, asked: CheckpointRequest | None = None, generation: int = 1) -> SaveOutcome:
    checkpointer = CheckpointWriter(str(store), generation=generation, position=ShapePosition(rank=0, p=1, d=1))
    assert checkpointer.start_save(step, state(), request=asked)
    outcome = checkpointer.wait(DEADLINE_S)
    assert outcome is not None
    return outcome


def steps(store: Path) -> list[int]:
    return sorted(int(folder.name.rpartition("_")[2]) for folder in store.iterdir())


def test_of_the_automatic_ones_the_newest_three_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        save(tmp_path, step)
    assert steps(tmp_path) == [2, 3, 10]


def test_those_that_a_script_asks_for_stay_and_take_no_automatic_ones_place(tmp_path: Path) -> None:
    for step in range(1, 11):
        save(tmp_path, step, KEPT if step in (2, 5, 9) else None)
    assert steps(tmp_path) == [2, 5, 7, 8, 9, 10]
    assert read_manifest(str(tmp_path), 5).retention is CheckpointRetention.KEPT
    assert read_manifest(str(tmp_path), 7).retention is CheckpointRetention.AUTOMATIC


def test_keep_prunes_only_what_was_saved_with_keep(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2, KEPT)
    for step in (3, 4, 5, 6, 7, 8):
        save(tmp_path, step, CheckpointRequest(keep=2, keep_every=5))
    assert steps(tmp_path) == [1, 2, 5, 7, 8]
    save(tmp_path, 9)
    assert steps(tmp_path) == [1, 2, 5, 7, 8, 9]


def test_an_automatic_one_that_is_asked_for_afterwards_stays(tmp_path: Path) -> None:
    save(tmp_path, 1)
    assert save(tmp_path, 1, KEPT, generation=2).result == "dropped"
    save(tmp_path, 2, KEPT)
    assert save(tmp_path, 2, CheckpointRequest(keep=1)).result == "dropped"  # which takes nothing back
    for step in (3, 4, 5, 6):
        save(tmp_path, step)
    assert steps(tmp_path) == [1, 2, 4, 5, 6]
    assert read_manifest(str(tmp_path), 2).retention is CheckpointRetention.KEPT
    assert read_manifest(str(tmp_path), 1).generation == 1


def test_what_an_earlier_version_wrote_or_nobody_can_read_stays(tmp_path: Path) -> None:
    save(tmp_path, 1)
    manifest = tmp_path / "varuna_ckpt_1" / "manifest.json"
    document = json.loads(manifest.read_bytes())
    del document["retention"], document["checksum"]
    manifest.write_bytes(Manifest.model_validate(document).to_bytes())
    save(tmp_path, 2)
    (tmp_path / "varuna_ckpt_2" / "manifest.json").write_text("torn")
    for step in (3, 4, 5, 6):
        save(tmp_path, step)
    assert steps(tmp_path) == [1, 2, 4, 5, 6]


@pytest.mark.parametrize(
    ("keep", "keep_every", "fault"),
    [(0, None, "keep=0"), (1.5, None, "keep=1.5"), (2, 0, "keep_every=0"), (None, 5, "keep_every=5 without keep")],
)
def test_numbers_that_mean_nothing_are_refused(keep: int | None, keep_every: int | None, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        CheckpointRequest(keep=keep, keep_every=keep_every)


def test_users_reach_the_error_by_its_name() -> None:
    assert varuna.checkpoint.CheckpointError is CheckpointError
