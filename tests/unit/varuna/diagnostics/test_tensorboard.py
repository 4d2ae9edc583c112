"""TensorBoard's curves: who writes them, what is refused, what a reader finds after steps were done again."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from varuna.diagnostics.tensorboard import TensorBoardWriter
from varuna.distributed.worker_environment import read_worker_environment
from varuna_proto.environment import Mode

ALONE = read_worker_environment({})


def optimizer(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates])


def write(scalars: TensorBoardWriter, first: int, last: int, loss: float) -> None:
    for step in range(first, last + 1):
        scalars.write_step(step, loss, 0.5, examples=32, optimizers=[optimizer(0.125)])


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()


def test_a_step_that_is_done_again_is_there_once(tmp_path: Path) -> None:
    environ = {"VARUNA_TENSORBOARD": str(tmp_path)}
    write(TensorBoardWriter(ALONE, environ), 1, 10, loss=3.0)
    for file in tmp_path.iterdir():  # as if written in an earlier second; a process numbers its own files
        file.rename(file.with_name(file.name.replace("tfevents.", "tfevents.0")))
    write(TensorBoardWriter(replace(ALONE, generation=2), environ), 7, 12, loss=2.0)

    events = read(tmp_path)
    losses = [(point.step, point.value) for point in events.Scalars("train/loss")]
    assert losses == [(step, 3.0 if step < 7 else 2.0) for step in range(1, 13)]
    assert {point.value for point in events.Scalars("train/examples_per_s")} == {64.0}
    assert {point.value for point in events.Scalars("train/step_s")} == {0.5}
    assert {point.value for point in events.Scalars("train/learning_rate")} == {0.125}


def test_what_the_script_logs_is_there_once_and_takes_nothing_of_older_steps(tmp_path: Path) -> None:
    environ = {"VARUNA_TENSORBOARD": str(tmp_path)}
    first = TensorBoardWriter(ALONE, environ)
    for step in range(1, 9):
        write(first, step, step, loss=3.0)
        first.write_values(step, {"accuracy": 0.25})
    for file in tmp_path.iterdir():
        file.rename(file.with_name(file.name.replace("tfevents.", "tfevents.0")))
    second = TensorBoardWriter(replace(ALONE, generation=2), environ)
    second.write_values(6, {"accuracy": 0.5})  # before its first step, which is 7
    write(second, 7, 7, loss=2.0)
    second.write_values(7, {"accuracy": 0.5})
    events = read(tmp_path)
    assert [point.step for point in events.Scalars("train/loss")] == list(range(1, 8))
    accuracies = [(point.step, point.value) for point in events.Scalars("script/accuracy")]
    assert sorted(accuracies) == [*((step, 0.25) for step in range(1, 7)), (6, 0.5), (7, 0.5)]


def read_by_file(folder: Path) -> list[dict[str, list[int]]]:
    """The steps of each curve in each file, in the order in which they were begun."""
    files = sorted(folder.iterdir(), key=lambda file: int(file.name.rsplit(".", 1)[1]))
    found = [EventAccumulator(str(file)).Reload() for file in files]
    return [{tag: [point.step for point in one.Scalars(tag)] for tag in one.Tags()["scalars"]} for one in found]


def list_writers() -> set[threading.Thread]:
    """The threads that write files."""
    return {thread for thread in threading.enumerate() if type(thread).__name__ == "_AsyncWriterThread"}


def test_a_process_that_goes_on_writes_a_file_for_each_generation_in_which_it_is_rank_0(tmp_path: Path) -> None:
    other = replace(ALONE, rank=1, world_size=2, plan=replace(ALONE.plan, d=2))
    scalars, before = TensorBoardWriter(other, {"VARUNA_TENSORBOARD": str(tmp_path)}), list_writers()
    for step, environment in enumerate((other, ALONE, ALONE, other, ALONE), start=1):
        scalars.follow_generation(environment)
        scalars.write_values(step - 1, {"early": 0.5})
        write(scalars, step, step, loss=1.0)
        scalars.write_values(step, {"accuracy": 0.25})
    assert [(one["train/loss"], one["script/accuracy"], one["script/early"]) for one in read_by_file(tmp_path)] == [
        ([step], [step], [step - 1]) for step in (2, 3, 5)
    ]
    assert len(list_writers() - before) == 1, "that of the file that is open"


def test_a_new_process_keeps_what_it_has_logged_until_it_has_joined_the_others(tmp_path: Path) -> None:
    scalars = TensorBoardWriter(ALONE, {"VARUNA_TENSORBOARD": str(tmp_path)})
    scalars.write_values(3, {"accuracy": 0.25})
    scalars.follow_generation(ALONE)
    write(scalars, 4, 4, loss=1.0)
    assert read_by_file(tmp_path)[0]["script/accuracy"] == [3]


def test_learning_rates_that_differ_have_a_curve_each(tmp_path: Path) -> None:
    scalars = TensorBoardWriter(ALONE, {"VARUNA_TENSORBOARD": str(tmp_path)})
    scalars.write_step(1, 1.0, 0.5, examples=32, optimizers=[optimizer(0.5, 0.25)])
    events = read(tmp_path)
    assert [events.Scalars(f"train/learning_rate/{index}")[0].value for index in (0, 1)] == [0.5, 0.25]


@pytest.mark.parametrize(
    "who",
    [{"rank": 1, "world_size": 2, "plan": replace(ALONE.plan, d=2)}, {"mode": Mode.CALIBRATE}],
    ids=["rank", "mode"],
)
def test_only_rank_0_of_a_training_writes(tmp_path: Path, who: dict[str, object]) -> None:
    scalars = TensorBoardWriter(replace(ALONE, **who), {"VARUNA_TENSORBOARD": str(tmp_path / "curves")})  # type: ignore[arg-type]
    write(scalars, 1, 2, loss=1.0)
    assert not (tmp_path / "curves").exists()


def test_without_the_variable_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(TensorBoardWriter(ALONE, {}), 1, 2, loss=1.0)
    assert not list(tmp_path.iterdir())


def test_a_url_is_refused() -> None:
    with pytest.raises(ValueError, match="s3://bucket/curves: expected a folder"):
        TensorBoardWriter(ALONE, {"VARUNA_TENSORBOARD": "s3://bucket/curves"})


def test_a_missing_package_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'varuna-spot\[tensorboard\]'"):
        TensorBoardWriter(replace(ALONE, mode=Mode.CALIBRATE), {"VARUNA_TENSORBOARD": "/curves"})


def test_a_folder_that_cannot_be_written_does_not_stop_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    write(TensorBoardWriter(ALONE, {"VARUNA_TENSORBOARD": str(tmp_path / "file" / "curves")}), 1, 3, loss=1.0)
    assert capsys.readouterr().out.count("no more curves for TensorBoard") == 1
