"""Training that goes on from an older checkpoint than the newest: what is later is given up, and saved again."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from training_roles import training_role
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
    read_manifest,
    resume_checkpoint,
)
from varuna.checkpoint.loading.resuming import HeldStateProposal
from varuna.checkpoint.saving.given_up import find_later_folders, give_up_checkpoints
from varuna.checkpoint.storage.store import CheckpointStore
from varuna.distributed import worker_environment
from waiting import DEADLINE_S


class Slope(nn.Module):
    """Each step of SGD with rate 1 takes the mean of its inputs from the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).mean()


class Job:
    """A training in one process, whose own store is in `store`."""

    def __init__(self, store: Path) -> None:
        self.store = str(store)
        self.model = Varuna(Slope(), get_batch_fn=lambda size, device="cpu": {"x": torch.ones(size, 1)})
        self.model.set_optimizer(torch.optim.SGD(self.model.parameters(), lr=1.0))

    def train(self, steps: int, *, each: float = 1.0, save_at: Sequence[int] = ()) -> None:
        role = training_role(self.model)
        for _ in range(steps):
            self.model.step({"x": torch.full((2, 1), each)})
            if role._progress.step in save_at:
                assert self.model.checkpoint()

    @property
    def weight(self) -> float:
        return next(iter(self.model.parameters())).item()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """It has trained six steps, and saved three checkpoints."""
    job = start_job(tmp_path / "store", monkeypatch)
    job.train(6, save_at=(2, 4, 6))
    return job


def start_job(store: Path, monkeypatch: pytest.MonkeyPatch, generation: int = 3) -> Job:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "VARUNA_CHECKPOINT_URL": str(store)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(worker_environment, "make_generation_number", lambda: generation)
    return Job(store)


def read_weight(store: str, step: int) -> float:
    values = {"weight": nn.Parameter(torch.full((1,), torch.nan))}
    load_checkpoint(store, step, make_state(values))
    return values["weight"].item()


def make_state(values: dict[str, nn.Parameter]) -> TrainingState:
    return TrainingState(sections=range(1), section_count=1, parameters=values, section_of={"weight": 0})


class HeldHere:
    """What this process holds of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def propose_state(self) -> HeldStateProposal:
        return HeldStateProposal(self.step, "document")

    def stage_state(self, *_: object) -> Any:
        return SimpleNamespace(fill_state=lambda: SimpleNamespace(step=self.step))

    def exclude_holders(self, ranks: Iterable[int]) -> None:
        raise AssertionError("no holder is at fault")

    def announce_end(self, *, is_loaded: bool) -> None:
        pass

    def close(self) -> None:
        pass


def resume_step(store: str, *, committed_step: int, held: int) -> int:
    """Where a restart goes on, if processes hold the state of step `held`."""
    state = make_state({"weight": nn.Parameter(torch.zeros(1))})
    loaded = resume_checkpoint(store, state, committed_step=committed_step, memory=HeldHere(held))
    assert loaded is not None
    return loaded.step


def test_steps_that_are_trained_again_are_saved_again(job: Job) -> None:
    job.model.load_checkpoint(job.store, 2)
    job.train(2, each=10.0, save_at=(4,))
    assert job.weight == -22.0
    assert newest_complete(job.store) == 4, "the one of step 6 is given up"
    assert read_weight(job.store, 4) == -22.0
    assert read_weight(job.store, 2) == -2.0
    job.train(2, each=10.0, save_at=(6,))
    assert read_weight(job.store, 6) == -42.0


def test_a_restart_goes_on_after_the_steps_that_were_trained_again(job: Job) -> None:
    job.model.load_checkpoint(job.store, 2)
    job.train(1, each=10.0)
    assert resume_step(job.store, committed_step=6, held=3) == 3


def test_a_checkpoint_that_is_gone_is_not_one_that_was_given_up(tmp_path: Path) -> None:
    """The disk may not be mounted, so training does not go on from an older state."""
    with pytest.raises(CheckpointError, match=r"step 6 was saved at .*, and none is there"):
        resume_step(str(tmp_path), committed_step=6, held=3)


def test_who_only_looks_at_an_older_checkpoint_loses_nothing(job: Job) -> None:
    job.model.load_checkpoint(job.store, 2)
    assert job.model.evaluate({"x": torch.ones(2, 1)}) == -2.0
    assert newest_complete(job.store) == 6
    job.model.load_checkpoint(job.store, 6)
    job.train(1)
    assert newest_complete(job.store) == 6
    assert job.weight == -7.0


def test_a_checkpoint_that_resume_passed_over_is_saved_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    harmed = next(Path(job.store, "varuna_ckpt_6").glob("*.parameters.safetensors"))
    harmed.write_bytes(harmed.read_bytes()[:-1] + b"\x7f")
    again = start_job(Path(job.store), monkeypatch, generation=4)
    assert again.model.resume() == 4
    again.train(1)
    assert resume_step(job.store, committed_step=6, held=5) == 5
    again.train(1, save_at=(6,))
    assert read_weight(job.store, 6) == -6.0


def test_a_checkpoint_from_elsewhere_gives_up_the_jobs_own_of_that_step(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = start_job(tmp_path / "other", monkeypatch)
    other.train(4, each=5.0, save_at=(4,))
    job.model.load_checkpoint(other.store, 4)
    job.train(1, each=5.0)
    assert newest_complete(job.store) == 2
    assert newest_complete(other.store) == 4, "nothing is given up in another store"


def test_a_save_of_the_newest_step_that_is_being_written_is_given_up_too(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load waits for it; without that, it would appear when the later ones have been given up."""
    create, has_loaded = CheckpointStore.create, threading.Event()

    def create_late(store: CheckpointStore, path: str, data: bytes) -> bool:
        has_loaded.wait(0.3)
        return create(store, path, data)

    monkeypatch.setattr(CheckpointStore, "create", create_late)
    job.train(1)
    assert job.model.checkpoint(tmpdir=str(tmp_path / "copies"))
    job.model.load_checkpoint(job.store, 2)
    job.train(1)
    has_loaded.set()
    job.model.checkpoint(str(tmp_path / "elsewhere"))  # waits for what is being written
    assert newest_complete(job.store) == 2


def test_checkpoints_of_a_newer_generation_are_not_given_up(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may be of a generation that was lost, while another one trains."""
    old = start_job(Path(job.store), monkeypatch, generation=2)
    old.model.load_checkpoint(job.store, 2)
    with pytest.raises(CheckpointError, match="was written by generation 3, while this is generation 2"):
        old.train(1)
    assert newest_complete(job.store) == 6


def test_the_newest_stays_a_checkpoint_until_all_others_are_given_up(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who dies half-way restarts from where it was, and from nowhere in between."""
    store = CheckpointStore(job.store)
    delete, deleted = CheckpointStore.delete_file, list[str]()

    def delete_one(store: CheckpointStore, path: str) -> None:
        if deleted:
            raise CheckpointError("killed")
        deleted.append(path)
        delete(store, path)

    monkeypatch.setattr(CheckpointStore, "delete_file", delete_one)
    with pytest.raises(CheckpointError, match="killed"):
        give_up_checkpoints(store, find_later_folders(store, 3, generation=4), generation=4)
    assert deleted == ["varuna_ckpt_4/manifest.json"]
    assert newest_complete(job.store) == 6
    monkeypatch.undo()
    assert give_up_checkpoints(store, find_later_folders(store, 3, generation=4), generation=4) == [6]
    assert newest_complete(job.store) == 2


def test_a_save_in_the_same_generation_waits_for_new_receipts(job: Job) -> None:
    folder = Path(job.store, "varuna_ckpt_6")
    assert list(folder.glob("receipt-g3-*"))
    job.model.load_checkpoint(job.store, 2)
    job.train(1)
    assert not list(folder.glob("receipt-*"))


def save(store: Path, step: int, value: float, request: CheckpointRequest | None = None) -> SaveOutcome:
    writer = CheckpointWriter(str(store), generation=1, position=ShapePosition(rank=0, p=1, d=1))
    assert writer.start_save(step, make_state({"weight": nn.Parameter(torch.full((1,), value))}), request=request)
    outcome = writer.wait(DEADLINE_S)
    assert outcome is not None
    return outcome


def test_a_request_is_not_met_by_a_checkpoint_with_other_contents(tmp_path: Path) -> None:
    assert save(tmp_path, 1, 1.0).result == "committed"
    assert save(tmp_path, 1, 1.0, CheckpointRequest()).result == "dropped"
    other = save(tmp_path, 1, 2.0, CheckpointRequest())
    assert other.result == "failed"
    assert "is there with other parameters" in other.error
    assert read_manifest(str(tmp_path), 1).step == 1
    next((tmp_path / "varuna_ckpt_1").glob("*.safetensors")).unlink()
    harmed = save(tmp_path, 1, 1.0, CheckpointRequest())
    assert harmed.result == "failed"
    assert "is missing" in harmed.error


def test_of_checkpoints_that_were_given_up_those_stay_that_a_script_had_asked_for(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, 1.0, CheckpointRequest() if step == 3 else None)
    assert give_up_checkpoints(CheckpointStore(str(tmp_path)), [2, 3, 4], generation=1) == [2, 3, 4]
    save(tmp_path, 5, 1.0)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == [f"varuna_ckpt_{step}" for step in (1, 3, 5)]
    kept = tmp_path / "varuna_ckpt_3"
    (kept / "manifest.given-up-1.json").rename(kept / "manifest.json")
    assert read_weight(str(tmp_path), 3) == 1.0
