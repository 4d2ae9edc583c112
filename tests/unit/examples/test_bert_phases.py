"""The BERT example's script by hand, in one process: phases, restarts, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bert_shards import write_config, write_shard
from example_modules import BERT, example_modules
from varuna.checkpoint import read_parameters

pytestmark = pytest.mark.slow


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script. When the test ends, it and its modules are unloaded."""
    torch.set_num_threads(1)
    with example_modules(monkeypatch, BERT, "train") as modules:
        yield modules["train"]


class Runs:
    """Runs the script on small data, checkpoints in `store`."""

    def __init__(self, train: ModuleType, folder: Path) -> None:
        self.train, self.folder, self.store = train, folder, folder / "store"
        write_config(folder / "config.json")
        write_shard(folder / "data", examples=32, tokens=16, predictions=3)

    def __call__(self, *flags: str, store: Path | None = None) -> list[tuple[int, float, float]]:
        """(step, loss, learning rate) of each step that it did."""
        summary = self.folder / "summary"
        summary.unlink(missing_ok=True)
        given = {
            "--input_dir": self.folder / "data",
            "--config_file": self.folder / "config.json",
            "--max_seq_length": 16,
            "--max_predictions_per_seq": 3,
            "--train_batch_size": 6,
            "--warmup_proportion": 0.2,
            "--output_dir": store or self.store,
            "--json-summary": summary,
        }
        self.train.main([*(str(word) for pair in given.items() for word in pair), *flags])
        entries = [json.loads(line.removeprefix("DLLL ")) for line in summary.read_text().splitlines()]
        done = [(entry["step"][1], entry["data"]) for entry in entries if "step_loss" in entry["data"]]
        return [(step, data["step_loss"], data["learning_rate"]) for step, data in done]

    def saved(self, store: Path | None = None) -> list[str]:
        return sorted(path.name for path in (store or self.store).glob("varuna_ckpt_*"))


@pytest.fixture
def runs(train: ModuleType, tmp_path: Path) -> Runs:
    return Runs(train, tmp_path)


def test_a_run_that_was_stopped_goes_on_where_it_was(runs: Runs, tmp_path: Path) -> None:
    whole = runs("--max_steps", "6", store=tmp_path / "other")
    first = runs("--max_steps", "6", "--steps_this_run", "4")
    rest = runs("--max_steps", "6", "--resume_from_checkpoint")
    assert [step for step, _, _ in rest] == [5, 6]
    assert [*first, *rest] == whole
    assert runs("--max_steps", "6", "--resume_from_checkpoint") == [], "nothing is left to do"


def test_phase_2_begins_with_the_last_checkpoint_of_phase_1_and_a_schedule_of_its_own(
    runs: Runs, tmp_path: Path
) -> None:
    runs("--max_steps", "4")
    elsewhere = tmp_path / "elsewhere"
    from_there = runs("--init_checkpoint", str(runs.store / "varuna_ckpt_4"), "--max_steps", "3", store=elsewhere)
    assert runs.saved(elsewhere) == ["varuna_ckpt_7"]

    second = ("--phase2", "--phase1_end_step", "4", "--max_steps", "3")
    begun = runs(*second, "--steps_this_run", "2")
    assert [step for step, _, _ in begun] == [1, 2]
    assert runs.saved() == ["varuna_ckpt_4", "varuna_ckpt_6"]
    assert [*begun, *runs(*second)] == from_there
    mine, theirs = read_parameters(str(runs.store), 7), read_parameters(str(elsewhere), 7)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_phase_2_without_phase_1_says_what_is_missing(runs: Runs) -> None:
    runs("--max_steps", "2")
    with pytest.raises(ValueError, match=r"goes on from step 4 of phase 1, but the newest .* is of step 2: finish"):
        runs("--phase2", "--phase1_end_step", "4", "--max_steps", "3")


def test_data_of_the_other_phase_is_refused(runs: Runs) -> None:
    with pytest.raises(ValueError, match=r"--max_seq_length 128, but the examples in .* have 16 tokens"):
        runs("--max_seq_length", "128")


@pytest.mark.parametrize("precision", [("--bf16",), ("--fp16",), ("--fp16", "--loss_scale", "1024")])
def test_mixed_precision_trains_nearly_as_fp32_does(runs: Runs, precision: tuple[str, ...]) -> None:
    flags = ("--max_steps", "3", "--init_loss_scale", "1024", "--skip_checkpoint")
    plain = [loss for _, loss, _ in runs(*flags)]
    mixed = [loss for _, loss, _ in runs(*flags, *precision)]
    assert mixed == pytest.approx(plain, rel=5e-3)
    assert mixed != plain
    assert runs.saved() == []
