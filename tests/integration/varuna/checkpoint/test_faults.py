"""Harmed checkpoints, full disks and races in real training: the log names them, and training goes on."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import checkpoint_dies
from small_gpt import Task, make_model, train_plainly
from training_world import Ranks, Zygote
from varuna.checkpoint import (
    CheckpointWriter,
    ShapePosition,
    TrainingState,
    load_checkpoint,
    newest_complete,
    on_one_disk,
    read_manifest,
    resume_checkpoint,
)
from varuna.checkpoint.export import export_model
from waiting import DEADLINE_S

TASK = Task(steps=4, tied=True)


@pytest.fixture(scope="module")
def trained(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with checkpoints of steps 2 (written by 2×1) and 4 (by 1×2) of one training."""
    folder = tmp_path_factory.mktemp("trained")
    url = str(folder / "store")
    for generation, (p, d, steps) in enumerate([(2, 1, 2), (1, 2, 4)], start=1):
        wanted = {"save": {"step": steps, "url": url}}
        task = replace(TASK, steps=steps)
        with Ranks(zygote, folder, task, p, d, generation=generation, checkpoint_url=url, wanted=wanted) as world:
            assert world.finish().ranks[0]["first"] == (1 if generation == 1 else 3)
    return folder / "store"


def newest_parameters(store: Path) -> Path:
    return min((store / "varuna_ckpt_4").glob("section-*.parameters.safetensors"))


def flip_a_bit(store: Path) -> Path:
    victim = newest_parameters(store)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 16
    victim.write_bytes(bytes(data))
    return victim


def cut_the_file(store: Path) -> Path:
    victim = newest_parameters(store)
    os.truncate(victim, victim.stat().st_size // 2)
    return victim


def delete_the_file(store: Path) -> Path:
    victim = newest_parameters(store)
    victim.unlink()
    return victim


def delete_the_manifest(store: Path) -> Path:
    victim = store / "varuna_ckpt_4" / "manifest.json"
    victim.unlink()
    return victim


@pytest.mark.parametrize(
    "harm",
    [
        flip_a_bit,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (cut_the_file, delete_the_file, delete_the_manifest)),
    ],
)
def test_training_goes_on_from_the_checkpoint_before_the_harmed_one(
    zygote: Zygote, tmp_path: Path, trained: Path, harm: Callable[[Path], Path]
) -> None:
    store = shutil.copytree(trained, tmp_path / "store")
    victim = harm(store)
    with Ranks(zygote, tmp_path, TASK, 2, 1, generation=3, checkpoint_url=str(store)) as world:
        outcome = world.finish()
        log = world.logs()
    [line] = [line for line in log.splitlines() if "checkpoint passed over" in line]
    assert victim.name in line
    assert "step=4" in line
    assert [rank["first"] for rank in outcome.ranks] == [3, 3]
    expected = train_plainly(TASK)
    assert outcome.losses == pytest.approx(expected.losses[2:], rel=1e-5)
    for name, value in outcome.parameters.items():
        torch.testing.assert_close(value, expected.parameters[name], rtol=1e-4, atol=2e-5)


def test_a_lost_receipt_does_not_unmake_a_checkpoint(trained: Path, tmp_path: Path) -> None:
    store = shutil.copytree(trained, tmp_path / "store")
    for receipt in (store / "varuna_ckpt_4").glob("receipt-*"):
        receipt.unlink()
    assert newest_complete(str(store)) == 4


def test_the_exported_model_is_the_trained_one(trained: Path, tmp_path: Path) -> None:
    export_model(str(trained), tmp_path / "model.safetensors")
    model = make_model(TASK)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    assert model.head.weight is model.embedding.weight
    expected = train_plainly(TASK)
    for name, value in model.named_parameters():
        torch.testing.assert_close(value, expected.parameters[name], rtol=1e-4, atol=2e-5)


@dataclass
class Disk:
    """A store on a disk of 1 MiB: room for ten checkpoints of `TASK`."""

    folder: Path

    def fill(self, leave_bytes: int) -> Path:
        """Writes a file that leaves only this many bytes free."""
        usage = shutil.disk_usage(self.folder)
        ballast = self.folder / "ballast"
        ballast.write_bytes(bytes(max(0, usage.free - leave_bytes)))
        return ballast


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounting = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounting.returncode != 0:
        pytest.skip("needs the right to mount a small tmpfs")
    yield Disk(folder)
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_fails_the_save_and_neither_training_nor_the_checkpoint_before(
    zygote: Zygote, tmp_path: Path, disk: Disk
) -> None:
    url = str(disk.folder / "store")
    first = replace(TASK, steps=2)
    saving = {"save": {"step": 2, "url": url}}
    with Ranks(zygote, tmp_path, first, 2, 1, checkpoint_url=url, wanted=saving) as world:
        world.finish()
    ballast = disk.fill(leave_bytes=8 * 1024)
    before = shutil.disk_usage(disk.folder).free
    failing = {"save": {"step": 3, "url": url, "fails": True}}
    with Ranks(zygote, tmp_path, TASK, 2, 1, generation=2, checkpoint_url=url, wanted=failing) as world:
        outcome = world.finish()
        log = world.logs()
    assert "checkpoint save failed, training goes on" in log
    assert "No space left on device" in log
    assert outcome.losses == pytest.approx(train_plainly(TASK).losses[2:], rel=1e-5)
    assert shutil.disk_usage(disk.folder).free >= before - 4096, "the failed save keeps what it took of the disk"
    ballast.unlink()
    assert newest_complete(url) == 2
    with Ranks(zygote, tmp_path, TASK, 1, 1, generation=3, checkpoint_url=url) as world:
        assert world.finish().ranks[0]["first"] == 3


@pytest.mark.slow
def test_a_full_disk_of_the_vm_costs_the_copies_alone(zygote: Zygote, tmp_path: Path, disk: Disk) -> None:
    disk.fill(leave_bytes=8 * 1024)
    before = shutil.disk_usage(disk.folder).free
    url = str(tmp_path / "store")
    first = replace(TASK, steps=2)
    saving = {"save": {"step": 2, "url": url}}
    copies = {"VARUNA_LOCAL_CHECKPOINT_DIR": str(disk.folder)}
    with Ranks(zygote, tmp_path, first, 2, 1, checkpoint_url=url, wanted=saving, environ=copies) as world:
        world.finish()
        log = world.logs()
    assert "no local copies of this checkpoint" in log
    assert "No space left on device" in log
    assert newest_complete(url) == 2
    assert shutil.disk_usage(disk.folder).free >= before - 4096, "what could not be copied is half there"


@pytest.fixture
def ram(tmp_path: Path) -> Iterator[Path]:
    """A folder that is not on the disk of the tests' stores."""
    if tmp_path.stat().st_dev == Path("/dev/shm").stat().st_dev:
        pytest.skip("needs temporary files on another file system than /dev/shm: set TMPDIR")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))  # the test needs another file system
    yield folder
    shutil.rmtree(folder)


def keep_only(store: Path, step: int) -> None:
    """Deletes the checkpoints that training has made by itself in between."""
    for folder in store.iterdir():
        if folder.name != f"varuna_ckpt_{step}":
            shutil.rmtree(folder)


def test_workers_that_start_on_their_vm_again_read_their_own_copies(zygote: Zygote, tmp_path: Path, ram: Path) -> None:
    store, url = tmp_path / "store", str(tmp_path / "store")
    assert not on_one_disk(url, str(ram))
    copies = {"VARUNA_LOCAL_CHECKPOINT_DIR": str(ram)}
    with Ranks(
        zygote, tmp_path, TASK, 2, 1, checkpoint_url=url, wanted={"save": {"step": 2, "url": url}}, environ=copies
    ) as world:
        world.finish()
    keep_only(store, 2)
    expected = train_plainly(TASK)

    # No file of the store can be read but the manifest. Another shape, on the same VM:
    for file in (store / "varuna_ckpt_2").glob("*.safetensors"):
        file.rename(file.with_suffix(".away"))
        file.write_bytes(bytes(file.with_suffix(".away").stat().st_size))
    with Ranks(zygote, tmp_path, TASK, 1, 2, generation=2, checkpoint_url=url, environ=copies) as world:
        outcome = world.finish()
        assert "read from the store" not in world.logs()
    assert [rank["first"] for rank in outcome.ranks] == [3, 3]
    assert outcome.losses == pytest.approx(expected.losses[2:], rel=1e-5)
    keep_only(store, 2)

    # One copy has a flipped bit, another is gone, and the store can be read again.
    for file in (store / "varuna_ckpt_2").glob("*.away"):
        file.rename(file.with_suffix(".safetensors"))
    gone, flipped, *_ = sorted((ram / "varuna_ckpt_2").glob("section-*.safetensors"))
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    gone.unlink()
    with Ranks(zygote, tmp_path, TASK, 2, 1, generation=3, checkpoint_url=url, environ=copies) as world:
        outcome = world.finish()
        log = world.logs()
    assert outcome.losses == pytest.approx(expected.losses[2:], rel=1e-5)
    [line] = [line for line in log.splitlines() if "read from the store, not the local copies" in line]
    assert "files=2" in line
    assert flipped.name in line
    assert "is corrupt" in line


def test_killed_at_any_point_of_a_save_it_leaves_nothing_that_is_chosen_wrongly(zygote: Zygote, tmp_path: Path) -> None:
    folders = [tmp_path / f"rank{point}" for point in range(checkpoint_dies.POINTS)]
    for folder in folders:
        assert checkpoint_dies.save(checkpoint_dies.checkpointer(folder, generation=1), 1) == "committed"
    script = Path(checkpoint_dies.__file__)
    wanted = {"folder": str(tmp_path)}
    with Ranks(zygote, tmp_path, TASK, len(folders), 1, generation=2, wanted=wanted, script=script) as world:
        assert world.exit_codes() == [-signal.SIGKILL] * len(folders)
    for point, folder in enumerate(folders):
        loaded_values = checkpoint_dies.values(0)
        loaded = resume_checkpoint(str(folder / "store"), checkpoint_dies.state(loaded_values))
        assert loaded is not None
        assert loaded.step == (2 if folder is folders[-1] else 1), f"killed at point {point}"
        assert loaded.store_bytes == 0
        for name, value in checkpoint_dies.values(loaded.step).items():
            assert torch.equal(loaded_values[name], value)
        again = checkpoint_dies.checkpointer(folder, generation=3)
        results = [checkpoint_dies.save(again, step) for step in (2, 3, 4, 5)]
        assert results == ["dropped" if folder is folders[-1] else "committed", *["committed"] * 3]
        assert not [path for path in folder.rglob("*") if "-g2" in path.name], "what the dead one wrote is in the way"


def one_rank_state(p: int, rank: int, parameter_bytes: int) -> TrainingState:
    weight = torch.nn.Parameter(torch.full((parameter_bytes // 4,), float(rank)))
    return TrainingState(
        sections=range(rank, rank + 1),
        section_count=p,
        parameters={f"weight{rank}": weight},
        section_of={f"weight{i}": i for i in range(p)},
    )


def test_rank_0_hears_at_once_of_another_ranks_failed_write(tmp_path: Path) -> None:
    ranks = [
        CheckpointWriter(str(tmp_path), generation=1, position=ShapePosition(rank=rank, p=2, d=1)) for rank in range(2)
    ]
    assert ranks[0].start_save(1, one_rank_state(2, 0, 64))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # a write beyond it fails, as on a full disk
    try:
        assert ranks[1].start_save(1, one_rank_state(2, 1, 1 << 20))
        outcomes = [checkpointer.wait(DEADLINE_S) for checkpointer in ranks]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [outcome and outcome.result for outcome in outcomes] == ["failed", "failed"]
    assert outcomes[0] is not None
    assert "rank 1 could not write its part" in outcomes[0].error
    assert "File too large" in outcomes[0].error
    assert newest_complete(str(tmp_path)) is None


def test_of_racing_generations_exactly_one_commits_and_no_file_is_shared(tmp_path: Path) -> None:
    racers = [
        CheckpointWriter(str(tmp_path), generation=generation, position=ShapePosition(rank=0, p=1, d=1))
        for generation in range(1, 5)
    ]
    states = [one_rank_state(1, 0, 1 << 16) for _ in racers]
    for generation, state in enumerate(states, start=1):
        with torch.no_grad():
            state.parameters["weight0"].fill_(generation)
    for step in range(1, 9):
        with ThreadPoolExecutor(len(racers)) as pool:
            assert all(pool.map(lambda pair, s=step: pair[0].start_save(s, pair[1]), zip(racers, states, strict=True)))
        outcomes = [racer.wait(DEADLINE_S) for racer in racers]
        results = [outcome.result for outcome in outcomes if outcome is not None]
        assert results.count("committed") == 1
        assert results.count("dropped") == len(racers) - 1
        winner = results.index("committed") + 1
        manifest = read_manifest(str(tmp_path), step)
        assert manifest.generation == winner
        assert all(f"-g{winner}." in entry.name for entry in manifest.files)
        into = one_rank_state(1, 0, 1 << 16)
        load_checkpoint(str(tmp_path), step, into)
        assert torch.equal(into.parameters["weight0"], states[winner - 1].parameters["weight0"])
