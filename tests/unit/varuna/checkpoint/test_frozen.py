"""Frozen parameters (the base under a LoRA adapter) are not written at every save, and files of earlier saves stay."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from varuna.checkpoint import (
    CheckpointError,
    CheckpointWriter,
    ShapePosition,
    TrainingState,
    load_checkpoint,
    newest_complete,
    read_manifest,
    read_parameters,
    resume_checkpoint,
)
from varuna.checkpoint.export import export_model
from varuna.checkpoint.format.manifest import CheckpointRetention, set_aside_name
from varuna.checkpoint.saving.given_up import given_up_name
from varuna.checkpoint.saving.pruning import CheckpointPruner
from varuna.checkpoint.saving.references import require_present
from varuna.checkpoint.storage.store import CheckpointStore
from waiting import DEADLINE_S

BASE_BYTES = 4 * 64 * 64


class Adapted(nn.Module):
    """Section 0: a frozen base and its adapter; section 1: a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.base = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.adapter = nn.Linear(64, 2, bias=False)
        self.head = nn.Linear(2, 3)
        self.optimizer = AdamW([value for value in self.parameters() if value.requires_grad], lr=0.1)

    def train_step(self) -> None:
        self.optimizer.zero_grad()
        self.head(self.adapter(self.base(torch.ones(1, 64)))).square().sum().backward()
        self.optimizer.step()

    @property
    def state(self) -> TrainingState:
        parameters = dict(self.named_parameters())
        return TrainingState(
            sections=range(2),
            section_count=2,
            parameters=parameters,
            section_of={name: 1 if name.startswith("head") else 0 for name in parameters},
            optimizers=[self.optimizer],
            state_dict={name: name for name in parameters},
        )

    def values(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.named_parameters()}


def save(store: Path, step: int, model: Adapted, *, generation: int = 1, d: int = 1, **options: object) -> None:
    ranks = [
        CheckpointWriter(str(store), generation=generation, position=ShapePosition(rank=rank, p=1, d=d), **options)
        for rank in range(d)
    ]
    for rank in ranks:
        assert rank.start_save(step, model.state)
    outcomes = [rank.wait(DEADLINE_S) for rank in ranks]
    assert outcomes[0] is not None
    assert outcomes[0].result == "committed", outcomes[0].error


def bases(store: Path) -> list[str]:
    """The files of the store that hold the base."""
    return [str(path.relative_to(store).parent) for path in sorted(store.rglob("*.frozen.parameters.safetensors"))]


def assert_loads(store: Path, step: int, expected: dict[str, Tensor]) -> None:
    fresh = Adapted()
    with torch.no_grad():
        for value in fresh.parameters():
            value.fill_(9.0)
    load_checkpoint(str(store), step, fresh.state)
    for name, value in fresh.named_parameters():
        assert torch.equal(value, expected[name])


def test_the_base_is_written_twice_in_all_and_every_checkpoint_has_it(tmp_path: Path) -> None:
    model = Adapted()
    expected: dict[int, dict[str, Tensor]] = {}
    for step in range(1, 8):
        model.train_step()
        save(tmp_path, step, model, generation=1 + step // 4, d=1 + step % 2)
        expected[step] = model.values()
        for kept in range(max(1, step - 1), step + 1):
            assert_loads(tmp_path, kept, expected[kept])
    # The two newest checkpoints never share a file.
    assert bases(tmp_path) == ["varuna_ckpt_1", "varuna_ckpt_2"]
    homes = [{entry.in_step for entry in read_manifest(str(tmp_path), step).files} for step in (6, 7)]
    assert homes == [{None, 2}, {None, 1}]
    assert len(list((tmp_path / "varuna_ckpt_1").iterdir())) == 1
    newest = tmp_path / "varuna_ckpt_7"
    assert sum(file.stat().st_size for file in newest.glob("*.safetensors")) < BASE_BYTES
    assert newest_complete(str(tmp_path)) == 7
    assert read_parameters(str(tmp_path), 7).keys() == expected[7].keys()
    export_model(str(tmp_path), tmp_path / "model.safetensors")
    exported = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in expected[7].items())


def test_a_frozen_tensor_that_changed_is_written(tmp_path: Path) -> None:
    model = Adapted()
    for step in range(1, 7):
        if step == 4:
            with torch.no_grad():
                model.base.weight.data.add_(1.0)  # by a way that torch's version counter does not see
        save(tmp_path, step, model)
        assert_loads(tmp_path, step, model.values())
    assert bases(tmp_path) == ["varuna_ckpt_4", "varuna_ckpt_5"]


@pytest.mark.parametrize("harm", ["flip", "remove"])
def test_a_harmed_base_costs_one_of_the_two_newest_checkpoints(tmp_path: Path, harm: str) -> None:
    model = Adapted()
    for step in range(1, 6):
        save(tmp_path, step, model)
    [entry] = [entry for entry in read_manifest(str(tmp_path), 5).files if ".frozen." in entry.name]
    victim = tmp_path / f"varuna_ckpt_{entry.in_step}" / entry.name
    if harm == "flip":
        victim.write_bytes(victim.read_bytes()[:-1] + b"\x01")
    else:
        victim.unlink()
    with pytest.raises(CheckpointError, match=rf"varuna_ckpt_{entry.in_step}/{entry.name}"):
        load_checkpoint(str(tmp_path), 5, Adapted().state)
    loaded = resume_checkpoint(str(tmp_path), Adapted().state)
    assert loaded is not None
    assert loaded.step == 4
    # Later checkpoints do not refer to the harmed files.
    for step in (6, 7):
        save(tmp_path, step, model, generation=2)
        assert_loads(tmp_path, step, model.values())


def test_local_copies_of_the_base_stay_as_long_as_it_is_referred_to(tmp_path: Path) -> None:
    store, local = tmp_path / "store", tmp_path / "local"
    model = Adapted()
    for step in range(1, 6):
        save(store, step, model, local=str(local))
    assert bases(local) == ["varuna_ckpt_1", "varuna_ckpt_2"]
    assert [path.name for path in (local / "varuna_ckpt_1").iterdir()] == [
        "section-00000-g1.frozen.parameters.safetensors"
    ]
    loaded = load_checkpoint(str(store), 5, Adapted().state)
    assert loaded.store_bytes == 0


@pytest.mark.parametrize("name", [set_aside_name(1), given_up_name(1)])
def test_the_base_of_a_checkpoint_stays_that_was_set_aside_or_given_up(tmp_path: Path, name: str) -> None:
    """It comes back by its manifest's name."""
    model = Adapted()
    for step in range(1, 5):
        model.train_step()
        save(tmp_path, step, model)
    expected = model.values()
    folder = tmp_path / "varuna_ckpt_4"
    CheckpointPruner(CheckpointStore(str(tmp_path)), 1).extend_retention(4, CheckpointRetention.KEPT)
    (folder / "manifest.json").rename(folder / name)
    with torch.no_grad():
        model.base.weight += 1  # so no later checkpoint refers to the same base
    for step in range(5, 10):
        save(tmp_path, step, model)
    assert sorted(bases(tmp_path))[0] == "varuna_ckpt_2"
    (folder / name).rename(folder / "manifest.json")
    assert_loads(tmp_path, 4, expected)


def test_with_one_checkpoint_kept_the_base_is_written_once(tmp_path: Path) -> None:
    model = Adapted()
    for step in range(1, 5):
        save(tmp_path, step, model, keep=1)
    assert bases(tmp_path) == ["varuna_ckpt_1"]
    assert_loads(tmp_path, 4, model.values())


def test_a_save_whose_base_vanished_meanwhile_makes_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1, Adapted())
    [entry] = [entry for entry in read_manifest(str(tmp_path), 1).files if ".frozen." in entry.name]
    earlier = entry.model_copy(update={"in_step": 1})
    store = CheckpointStore(str(tmp_path))
    require_present(store, [earlier])
    (tmp_path / "varuna_ckpt_1" / entry.name).unlink()
    with pytest.raises(CheckpointError, match=f"{entry.name} vanished"):
        require_present(store, [earlier])


def test_all_files_are_on_disk_before_the_manifest_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, bool]] = []
    manifest = tmp_path / "varuna_ckpt_1" / "manifest.json"
    real: Callable[[int], None] = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, manifest.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    save(tmp_path, 1, Adapted())
    files = {entry["name"] for entry in json.loads(manifest.read_text())["files"]}
    before = {name for name, manifest_is_there in synced if not manifest_is_there}
    after = {name for name, manifest_is_there in synced if manifest_is_there}
    assert before >= files | {"varuna_ckpt_1", tmp_path.name}
    assert after == {"manifest.json", "varuna_ckpt_1", tmp_path.name}
