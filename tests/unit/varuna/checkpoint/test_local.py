"""Copies of checkpoints on a VM: read instead of the store where they are whole, and never in the way."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from varuna import Varuna
from varuna.checkpoint import (
    CheckpointError,
    CheckpointRequest,
    CheckpointWriter,
    SaveOutcome,
    ShapePosition,
    TrainingState,
    load_checkpoint,
    newest_complete,
    read_parameters,
    resume_checkpoint,
    worker_checkpoints,
)
from varuna.checkpoint.loading.loader import LoadedCheckpoint
from varuna.checkpoint.storage import answers, local
from varuna.checkpoint.storage.local import on_one_disk
from varuna.checkpoint.storage.store import CheckpointStore
from varuna.checkpoint.worker_checkpoints import WorkerCheckpoints
from varuna.distributed.departure import Departure
from varuna.distributed.groups import RankGroup
from varuna_proto.environment import WorkerEnvironment
from waiting import DEADLINE_S

SECTIONS = 4


def weights(value: int = 0) -> dict[str, torch.Tensor]:
    return {f"weight{section}": torch.full((1000,), float(value + section)) for section in range(SECTIONS)}


def state_of(parameters: dict[str, torch.Tensor], user: dict[str, torch.Tensor] | None = None) -> TrainingState:
    sections = sorted(int(name.removeprefix("weight")) for name in parameters)
    return TrainingState(
        sections=range(sections[0], sections[-1] + 1),
        section_count=SECTIONS,
        parameters=parameters,
        section_of={f"weight{section}": section for section in range(SECTIONS)},
        user=user or {},
    )


class Squared(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


class VM:
    """A VM whose ranks are the stages of a pipeline, with one folder for their copies."""

    def __init__(self, store: Path, copies: Path, p: int = 2, generation: int = 1) -> None:
        self.store, self.copies = str(store), copies
        self._p = p
        self._ranks = [
            CheckpointWriter(
                self.store, generation=generation, position=ShapePosition(rank=rank, p=p, d=1), local=str(copies)
            )
            for rank in range(p)
        ]

    def save(self, step: int) -> list[SaveOutcome]:
        each = SECTIONS // self._p
        values = weights(step)
        for rank, checkpointer in enumerate(self._ranks):
            mine = {f"weight{section}": values[f"weight{section}"] for section in range(each * rank, each * (rank + 1))}
            assert checkpointer.start_save(step, state_of(mine, {"scale": torch.tensor(step)}))
        outcomes = [checkpointer.wait(DEADLINE_S) for checkpointer in self._ranks]
        assert all(outcome is not None for outcome in outcomes)
        return [outcome for outcome in outcomes if outcome is not None]

    def files(self, step: int) -> list[Path]:
        return sorted((self.copies / f"varuna_ckpt_{step}").glob("*.safetensors"))


@pytest.fixture
def vm(tmp_path: Path) -> VM:
    return VM(tmp_path / "store", tmp_path / "copies")


def load_into(vm: VM, step: int) -> tuple[LoadedCheckpoint, dict[str, torch.Tensor]]:
    values = weights()
    return load_checkpoint(vm.store, step, state_of(values)), values


def assert_is_of(step: int, values: dict[str, torch.Tensor]) -> None:
    for name, value in weights(step).items():
        assert torch.equal(values[name], value)


def test_on_the_vm_that_wrote_it_nothing_is_read_from_the_store(vm: VM) -> None:
    assert [outcome.result for outcome in vm.save(1)] == ["committed", "written"]
    with capture_logs() as log:
        loaded, values = load_into(vm, 1)
    assert loaded.store_bytes == 0
    assert loaded.bytes_read == sum(file.stat().st_size for file in vm.files(1)) > 0
    assert_is_of(1, values)
    assert not log


def test_a_copy_alone_is_as_good_as_the_file_in_the_store(vm: VM) -> None:
    vm.save(1)
    for file in Path(vm.store).rglob("*.safetensors"):
        file.write_bytes(bytes(file.stat().st_size))
    assert_is_of(1, load_into(vm, 1)[1])


def test_on_another_vm_everything_is_read_from_the_store(vm: VM) -> None:
    vm.save(1)
    shutil.rmtree(vm.copies)
    loaded, values = load_into(vm, 1)
    assert loaded.store_bytes == loaded.bytes_read > 0
    assert_is_of(1, values)


def harm(victim: Path, how: str) -> None:
    data = bytearray(victim.read_bytes())
    if how == "missing":
        victim.unlink()
    elif how == "short":
        victim.write_bytes(data[:-1])
    elif how == "long":
        victim.write_bytes(data + b"\0")
    elif how == "flipped":
        data[len(data) // 2] ^= 4
        victim.write_bytes(data)
    else:
        shutil.copy(victim.parents[1] / "varuna_ckpt_1" / victim.name, victim)


@pytest.mark.parametrize("how", ["missing", "short", "long", "flipped", "another step's"])
def test_a_harmed_copy_is_named_and_read_from_the_store_alone(vm: VM, how: str) -> None:
    vm.save(1)
    vm.save(2)
    victim = vm.files(2)[1]
    size = victim.stat().st_size
    harm(victim, how)
    with capture_logs() as log:
        loaded, values = load_into(vm, 2)
    assert_is_of(2, values)
    assert loaded.store_bytes == size
    [line] = log
    assert victim.name in line["first"]
    assert ("is missing" if how in ("missing", "short", "long") else "is corrupt") in line["first"]


def test_a_harmed_copy_and_a_harmed_file_make_a_harmed_checkpoint(vm: VM) -> None:
    vm.save(1)
    vm.save(2)
    victim = vm.files(2)[1]
    harm(victim, "flipped")
    harm(Path(vm.store) / "varuna_ckpt_2" / victim.name, "flipped")
    values = weights()
    reports: list[tuple[int, str]] = []
    loaded = resume_checkpoint(vm.store, state_of(values), report=lambda *what: reports.append(what))
    assert loaded is not None
    assert (loaded.step, loaded.store_bytes) == (1, 0)
    assert_is_of(1, values)
    [(step, why)] = reports
    assert step == 2
    assert victim.name in why


def test_copies_go_with_their_checkpoints(vm: VM) -> None:
    for step in range(1, 6):
        vm.save(step)
    kept = {f"varuna_ckpt_{step}" for step in (3, 4, 5)}
    assert {folder.name for folder in Path(vm.store).iterdir()} == kept
    assert {folder.name for folder in vm.copies.iterdir()} == kept
    VM(Path(vm.store), vm.copies, p=1, generation=2).save(6)
    assert {folder.name for folder in vm.copies.iterdir()} == {f"varuna_ckpt_{step}" for step in (4, 5, 6)}


def test_checkpoints_that_stay_for_good_leave_no_copies_behind(vm: VM) -> None:
    """The folder may be in RAM."""
    [checkpointer] = VM(Path(vm.store), vm.copies, p=1)._ranks
    for step in range(1, 6):
        assert checkpointer.start_save(step, state_of(weights(step)), request=CheckpointRequest())
        checkpointer.wait(DEADLINE_S)
    assert len(list(Path(vm.store).iterdir())) == 5
    assert {folder.name for folder in vm.copies.iterdir()} == {f"varuna_ckpt_{step}" for step in (3, 4, 5)}


def test_copies_make_no_checkpoint(vm: VM, tmp_path: Path) -> None:
    """As when the VM goes before the manifest is there."""
    vm.save(1)
    vm.save(2)
    (Path(vm.store) / "varuna_ckpt_2" / "manifest.json").unlink()
    assert vm.files(2)
    assert newest_complete(vm.store) == 1
    with pytest.raises(CheckpointError, match="interrupted"):
        load_into(vm, 2)
    # The next generation does that step again, in another shape, with other values.
    later = VM(Path(vm.store), vm.copies, p=1, generation=2)
    later.save(2)
    loaded, values = load_into(later, 2)
    assert (loaded.generation, loaded.store_bytes) == (2, 0)
    assert_is_of(2, values)


def test_a_save_that_fails_leaves_no_copies(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("in the way")
    vm = VM(tmp_path / "store", tmp_path / "copies", p=1)
    assert [outcome.result for outcome in vm.save(1)] == ["failed"]
    assert vm.files(1) == []


@pytest.mark.parametrize("copies", ["a file is in the way", "/proc/no/folder/can/be/made/here"])
def test_without_room_for_copies_the_store_gets_all_the_same(tmp_path: Path, copies: str) -> None:
    (tmp_path / "a file is in the way").touch()
    vm = VM(tmp_path / "store", tmp_path / copies)
    with capture_logs() as log:
        assert [outcome.result for outcome in vm.save(1)] == ["committed", "written"]
    assert [line["step"] for line in log if "no local copies" in line["event"]] == [1, 1]  # each rank logs it once
    loaded, values = load_into(vm, 1)
    assert loaded.store_bytes == loaded.bytes_read
    assert_is_of(1, values)


def test_one_save_may_have_its_copies_elsewhere(vm: VM, tmp_path: Path) -> None:
    [checkpointer] = VM(Path(vm.store), vm.copies, p=1)._ranks
    for step, folder in ((1, None), (2, str(tmp_path / "other")), (3, "")):
        assert checkpointer.start_save(step, state_of(weights(step)), local=folder)
        checkpointer.wait(DEADLINE_S)
    assert {path.name for path in vm.copies.iterdir()} == {"varuna_ckpt_1"}
    assert {path.name for path in (tmp_path / "other").iterdir()} == {"varuna_ckpt_2"}
    assert load_into(vm, 2)[0].store_bytes == 0
    assert load_into(vm, 3)[0].store_bytes > 0


def test_ranks_of_one_vm_share_the_folder(tmp_path: Path) -> None:
    """Four ranks that save and prune as fast as they can, each in its own time."""
    vm = VM(tmp_path / "store", tmp_path / "copies", p=4)

    def run(rank: int) -> set[str]:
        results: set[str] = set()
        for step in range(1, 13):
            assert vm._ranks[rank].start_save(step, state_of({f"weight{rank}": weights(step)[f"weight{rank}"]}))
            outcome = vm._ranks[rank].wait(DEADLINE_S)
            assert outcome is not None
            results.add(outcome.result)
        return results

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(run, range(4))) == [{"committed"}, {"written"}, {"written"}, {"written"}]
    loaded, values = load_into(vm, 12)
    assert loaded.store_bytes == 0
    assert_is_of(12, values)


@pytest.fixture
def ram(tmp_path: Path) -> Iterator[Path]:
    """A folder that is not on the disk of the tests' stores."""
    if tmp_path.stat().st_dev == Path("/dev/shm").stat().st_dev:
        pytest.skip("needs temporary files on another file system than /dev/shm: set TMPDIR")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))  # the test needs another file system
    yield folder
    shutil.rmtree(folder)


def test_training_goes_on_while_the_store_is_slow(tmp_path: Path, ram: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`checkpoint(tmpdir=...)` waits for the copy in memory alone."""
    store, asked, answers, put = str(tmp_path / "store"), threading.Event(), threading.Event(), CheckpointStore.put

    def slow(self: CheckpointStore, path: str, data: bytes | Iterator[memoryview]) -> None:
        if self.url.endswith("/store"):
            asked.set()
            assert answers.wait(DEADLINE_S)
        put(self, path, data)

    monkeypatch.setattr(CheckpointStore, "put", slow)
    model = Varuna(Squared(nn.Linear(2, 1)), get_batch_fn=lambda size, device: {"x": torch.ones(size, 2)})
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        model.step({"x": torch.ones(4, 2)})
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        assert model.checkpoint(store, tmpdir=str(ram))
        for _ in range(3):
            model.step({"x": torch.ones(4, 2)})
        assert asked.wait(DEADLINE_S)
        assert list((ram / "varuna_ckpt_1").glob("*.safetensors")), "the copies come first"
        assert newest_complete(store) is None
    finally:
        answers.set()
    assert model.checkpoint(store, tempdir=str(ram), on_demand=True)
    assert newest_complete(store) == 4
    saved = read_parameters(store, 1)
    for name, value in model.named_parameters():
        assert torch.equal(saved[name], before[name])
        assert not torch.equal(saved[name], value)


def test_a_folder_on_the_stores_own_disk_is_worth_no_copies(tmp_path: Path) -> None:
    assert on_one_disk(str(tmp_path / "store"), str(tmp_path / "copies"))
    assert on_one_disk((tmp_path / "store").as_uri(), str(tmp_path / "not" / "yet" / "there"))
    assert not on_one_disk(str(tmp_path), "/proc/self")
    assert not on_one_disk("s3://bucket/job", str(tmp_path))
    with pytest.raises(ValueError, match="local folder"):
        on_one_disk(str(tmp_path), "s3://bucket/copies")


@pytest.fixture
def server_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder `store` is of a file server that is away: what asks for it waits until the test is over."""
    is_back, find_device = threading.Event(), local._device

    def await_server(path: Path) -> int:
        if path == tmp_path / "store":
            is_back.wait(DEADLINE_S)
        return find_device(path)

    monkeypatch.setattr(local, "_device", await_server)
    monkeypatch.setattr(answers, "_ANSWER_LIMIT_S", 0.01)
    yield
    is_back.set()


@pytest.mark.usefixtures("server_is_away")
def test_a_store_that_does_not_answer_is_on_another_disk(tmp_path: Path) -> None:
    assert not on_one_disk(str(tmp_path / "store"), str(tmp_path / "copies"))


def test_a_process_that_goes_on_does_not_ask_again_where_the_store_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    departure = Departure()
    environment = replace(
        WorkerEnvironment.alone("job", micro_batch=1, global_batch=1),
        checkpoint_url=str(tmp_path / "store"),
        local_checkpoint_dir=str(tmp_path / "copies"),
    )
    worker: Any = SimpleNamespace(
        environment=environment, departure=departure, link=SimpleNamespace(report_checkpoint=None)
    )
    questions: list[str] = []
    monkeypatch.setattr(worker_checkpoints, "on_one_disk", lambda url, _: questions.append(url))
    found: WorkerCheckpoints | None = None
    for _ in range(2):
        found = WorkerCheckpoints(worker, RankGroup(None, (0,), departure), before=found)
        found.abandon_saves()
        [writer] = found._writers.values()
        assert writer._local == environment.local_checkpoint_dir
    assert questions == [environment.checkpoint_url]
