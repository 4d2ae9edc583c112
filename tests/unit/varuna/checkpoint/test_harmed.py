"""Harmed manifests, strangers in the store, a store that fails for a moment, checkpoints that are gone."""

from __future__ import annotations

import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch
from torch.distributed import HashStore

from varuna.checkpoint import (
    CheckpointError,
    CheckpointWriter,
    ShapePosition,
    TrainingState,
    newest_complete,
    resume_checkpoint,
)
from varuna.checkpoint.format.manifest import FileEntry, FileKind, Manifest, Receipt, parse_sealed_document

WAIT_S = 60.0
LEARNING_RATE = 0.00105


def make_state() -> TrainingState:
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(3, 2))
    optimizer = torch.optim.AdamW([weight], lr=LEARNING_RATE)
    weight.square().sum().backward()
    optimizer.step()
    return TrainingState(
        sections=range(1),
        section_count=1,
        parameters={"weight": weight},
        section_of={"weight": 0},
        optimizers=(optimizer,),
        user={"schedule": {"milestones": (3, 5), "scale": torch.tensor(2.0), 7: "seven"}},
        state_dict={"weight": "weight"},
    )


def save(url: Path, step: int) -> Path:
    """The manifest of a checkpoint that is written there."""
    checkpointer = CheckpointWriter(str(url), generation=1, position=ShapePosition(rank=0, p=1, d=1))
    assert checkpointer.start_save(step, make_state())
    outcome = checkpointer.wait(WAIT_S)
    assert outcome is not None
    assert outcome.result == "committed", outcome.error
    return url / f"varuna_ckpt_{step}" / "manifest.json"


def flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def rewrite_as_earlier_version(manifest: Path) -> dict[str, Any]:
    """Without a checksum, as earlier versions wrote it."""
    document: dict[str, Any] = json.loads(manifest.read_bytes())
    del document["checksum"]
    document["schema"] = "varuna.checkpoint/2"
    manifest.write_text(json.dumps(document, indent=1))
    return document


def test_no_flipped_bit_of_a_manifest_or_receipt_is_read(tmp_path: Path) -> None:
    manifest = save(tmp_path, 3)
    for path, kind in ((manifest, Manifest), (manifest.with_name("receipt-g1-r0.json"), Receipt)):
        data = path.read_bytes()
        assert parse_sealed_document(kind, data, path.name)
        for at in range(len(data)):
            for bit in range(8):
                with pytest.raises(CheckpointError, match=path.name):
                    parse_sealed_document(kind, flipped(data, at, bit), path.name)


def test_a_manifest_with_a_flipped_bit_is_named_and_the_checkpoint_before_it_is_loaded(tmp_path: Path) -> None:
    save(tmp_path, 2)
    manifest = save(tmp_path, 3)
    data = manifest.read_bytes()
    state = make_state()
    [optimizer] = state.optimizers
    for at in range(0, len(data), 31):
        manifest.write_bytes(flipped(data, at, at % 8))
        reports: list[tuple[int, str]] = []
        loaded = resume_checkpoint(
            str(tmp_path), state, report=lambda step, fault, to=reports: to.append((step, fault))
        )
        assert loaded is not None
        assert loaded.step == 2
        assert [step for step, _ in reports] == [3]
        assert "manifest.json" in reports[0][1]
        assert optimizer.param_groups[0]["lr"] == LEARNING_RATE


def test_a_cut_manifest_is_refused(tmp_path: Path) -> None:
    data = save(tmp_path, 3).read_bytes()
    for length in range(0, len(data), 17):
        with pytest.raises(CheckpointError, match="manifest"):
            parse_sealed_document(Manifest, data[:length], "manifest")


def test_a_manifest_whose_checksum_was_taken_out_is_refused(tmp_path: Path) -> None:
    document = json.loads(save(tmp_path, 3).read_bytes())
    del document["checksum"]
    with pytest.raises(CheckpointError, match="does not end with its checksum"):
        parse_sealed_document(Manifest, json.dumps(document, indent=1).encode(), "manifest")


def test_a_checkpoint_of_an_earlier_version_loads_and_the_log_says_what_it_lacks(tmp_path: Path) -> None:
    rewrite_as_earlier_version(save(tmp_path, 3))
    with structlog.testing.capture_logs() as log:
        loaded = resume_checkpoint(str(tmp_path), make_state())
    assert loaded is not None
    assert loaded.user["schedule"][7] == "seven"
    assert [line["step"] for line in log if "no checksum" in line["event"]] == [3]


@pytest.mark.long
def test_nothing_but_a_checkpoint_error_comes_of_a_harmed_manifest_without_checksum(tmp_path: Path) -> None:
    save(tmp_path, 2)
    manifest = save(tmp_path, 3)
    rewrite_as_earlier_version(manifest)
    data = manifest.read_bytes()
    for at in range(0, len(data), 5):
        manifest.write_bytes(flipped(data, at, at % 7))
        loaded = resume_checkpoint(str(tmp_path), make_state())
        assert loaded is not None
        assert loaded.step in (2, 3)


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        ({"state": {}}, "state.user"),
        ({"state": {"user": {}, "optimizer_groups": [3]}}, "state.optimizer_groups"),
        ({"state": {"user": {"$tensor": "gone"}, "optimizer_groups": []}}, "gone"),
        ({"state": {"user": {"$dict": [[1, 2, 3]]}, "optimizer_groups": []}}, "malformed"),
        ({"state": {"user": {"$dict": [[[], 2]]}, "optimizer_groups": []}}, "malformed"),
        ({"files": []}, "weight"),
    ],
)
def test_an_inconsistent_manifest_is_named(tmp_path: Path, harm: dict[str, Any], named: str) -> None:
    save(tmp_path, 2)
    manifest = save(tmp_path, 3)
    manifest.write_text(json.dumps(rewrite_as_earlier_version(manifest) | harm, indent=1))
    reports: list[str] = []
    loaded = resume_checkpoint(str(tmp_path), make_state(), report=lambda step, fault: reports.append(fault))
    assert loaded is not None
    assert loaded.step == 2
    assert "varuna_ckpt_3" in reports[0]
    assert named in reports[0]


@pytest.mark.parametrize("depth", [500, 100_000])
def test_a_manifest_that_is_nested_without_end_is_named(tmp_path: Path, depth: int) -> None:
    save(tmp_path, 2)
    manifest = save(tmp_path, 3)
    document = json.dumps(rewrite_as_earlier_version(manifest))
    manifest.write_text(document.replace('"schedule":', '"deep": ' + "[" * depth + "]" * depth + ', "schedule":'))
    reports: list[str] = []
    loaded = resume_checkpoint(str(tmp_path), make_state(), report=lambda step, fault: reports.append(fault))
    assert loaded is not None
    assert loaded.step in (2, 3)
    assert len(reports) == (loaded.step == 2)


def test_a_state_that_holds_itself_fails_the_save_and_nothing_else(tmp_path: Path) -> None:
    state = make_state()
    itself: list[Any] = []
    itself.append(itself)
    assert isinstance(state.user, dict)
    state.user["itself"] = itself
    checkpointer = CheckpointWriter(str(tmp_path), generation=1, position=ShapePosition(rank=0, p=1, d=1))
    assert checkpointer.start_save(3, state)
    outcome = checkpointer.wait(WAIT_S)
    assert outcome is not None
    assert outcome.result == "failed"
    assert "user/itself" in outcome.error


@pytest.mark.parametrize("name", ["../other/file.safetensors", "/etc/passwd", ".hidden", ""])
def test_a_manifest_names_files_of_its_own_folder_alone(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        FileEntry(name=name, kind=FileKind.STATE, section=-1, holds=(), bytes=0, checksum="")


def test_a_stranger_whose_name_is_not_text_is_in_nobodys_way(tmp_path: Path) -> None:
    manifest = save(tmp_path, 2)
    for folder in (tmp_path, manifest.parent):
        Path(os.fsdecode(os.fsencode(folder) + b"/stray-\xff\xfe")).write_text("?")
    assert newest_complete(str(tmp_path)) == 2
    for step in (3, 4, 5):  # which deletes step 2, and the stranger in it
        save(tmp_path, step)
    loaded = resume_checkpoint(str(tmp_path), make_state())
    assert loaded is not None
    assert loaded.step == 5
    assert not manifest.parent.exists()


def test_a_store_that_fails_for_a_moment_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "real", 2)
    store = tmp_path / "store"
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            store.unlink()
            store.symlink_to(tmp_path / "real")

    # In this module alone: threads of the whole process sleep.
    clock = SimpleNamespace(sleep=pause, monotonic=time.monotonic)
    monkeypatch.setattr("varuna.checkpoint.storage.store.time", clock)
    store.symlink_to(store)  # ELOOP: no folder that is merely not there
    assert newest_complete(str(store)) == 2
    assert len(pauses) == 2


def test_one_folder_that_cannot_be_read_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 2)
    manifest = save(tmp_path, 3)
    manifest.unlink()
    manifest.symlink_to(manifest)
    monkeypatch.setattr("varuna.checkpoint.storage.store._PATIENCE_S", 0.0)
    reports: list[tuple[int, str]] = []
    assert newest_complete(str(tmp_path), report=lambda step, fault: reports.append((step, fault))) == 2
    assert reports[0][0] == 3
    assert "varuna_ckpt_3" in reports[0][1]


def test_checkpoints_that_were_there_and_are_gone_stop_every_rank(tmp_path: Path) -> None:
    save(tmp_path, 3)
    shutil.rmtree(tmp_path / "varuna_ckpt_3")
    store = HashStore()

    def refusal(rank: int) -> str:
        with pytest.raises(CheckpointError) as error:
            resume_checkpoint(str(tmp_path), make_state(), store=store, rank=rank, world_size=2, committed_step=3)
        return str(error.value)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(refusal, range(2))
    assert first == second
    assert f"step 3 was saved at {tmp_path.as_uri()}, and none is there" in first
    assert "may_start_over" in first


def test_checkpoints_of_which_none_can_be_read_stop_the_job_and_the_newest_fault_is_named(tmp_path: Path) -> None:
    manifest = save(tmp_path, 3)
    manifest.write_bytes(flipped(manifest.read_bytes(), 99, 3))
    with pytest.raises(CheckpointError, match=r"manifest\.json is corrupt: its checksum"):
        resume_checkpoint(str(tmp_path), make_state(), committed_step=3)
    assert resume_checkpoint(str(tmp_path), make_state()) is None
