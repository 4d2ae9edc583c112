"""The example: a GPT-2 that can be cut after every block, text that every machine has, a reference that learns; the
large configurations are those that the planner plans for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import yaml

from example_modules import GPT, example_modules
from varuna import CutPoint
from varuna.data import replica_indices
from varuna.partition import build_stage, trace
from varuna_planner.profile.models import NAMED_MODELS
from varuna_planner.profile.shapes import ModelFamily
from waiting import DEADLINE_S

MODULES = ("model", "corpus", "recipe", "reference")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    torch.set_num_threads(1)
    with example_modules(monkeypatch, GPT, *MODULES) as modules:
        yield modules


def test_the_model_has_cut_points_after_its_embedding_and_each_block(example: dict[str, ModuleType]) -> None:
    model = example["recipe"].build_model()
    order: list[str] = []
    for module in model.modules():
        if isinstance(module, CutPoint | example["model"].Block):
            module.register_forward_hook(lambda ran, *_: order.append(type(ran).__name__))
    batch = example["recipe"].load_dataset().batch([0, 1])
    loss, weight = model(**batch)
    assert loss.shape == ()
    assert int(weight) == batch["targets"].numel()
    assert len(model.blocks) == 6  # for which the demo's planner prefers 2×2 to 4×1 (`demo/director.py`)
    assert order == ["CutPoint", *["Block", "CutPoint"] * len(model.blocks)]


@pytest.mark.parametrize("name", [name for name, shape in NAMED_MODELS.items() if shape.family is ModelFamily.GPT2])
def test_a_configuration_is_the_model_that_the_planner_knows(example: dict[str, ModuleType], name: str) -> None:
    recipe, shape = example["recipe"], NAMED_MODELS[name]
    model = recipe.build_model(recipe.CONFIGS[name])
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    assert len(model.cut_points) + 2 == len(shape.list_sections())


@pytest.mark.long
def test_its_sections_have_the_parameters_that_the_planner_reckons_with(example: dict[str, ModuleType]) -> None:
    recipe, shape = example["recipe"], NAMED_MODELS["gpt2-355m"]
    config = recipe.CONFIGS["gpt2-355m"]
    model = recipe.build_model(config)
    found = trace(model, recipe.load_dataset(config).batch([0, 1]))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    expected = [section.parameters for section in shape.list_sections()]
    assert [sum(sizes[name] for name in section.parameters) for section in found.sections] == expected
    assert found.shared == {"token_embedding.weight": (0, len(expected) - 1)}


def test_a_model_from_meta_begins_as_gpt_2_does_however_it_is_cut(example: dict[str, ModuleType]) -> None:
    config = example["model"].GPTConfig(blocks=2, width=64, window=16, vocabulary=300)
    model = example["recipe"].build_model(config)
    found = trace(model, example["recipe"].load_dataset(config).batch([0, 1]))
    whole = build_stage(model, found, 0, 4, device="cpu").parameters
    assert whole["token_embedding.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert not whole["blocks.1.mlp_in.bias"].any()
    parts = [build_stage(model, found, first, first + 2, device="cpu").parameters for first in (0, 2)]
    assert parts[0].keys() & parts[1].keys() == {"token_embedding.weight"}
    for part in parts:
        assert all(torch.equal(parameter, whole[name]) for name, parameter in part.items())


def test_tokens_of_ones_own_are_read_from_disk(example: dict[str, ModuleType], tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(300, 333, dtype="<u2").tofile(path)
    config = example["model"].GPTConfig(window=16, vocabulary=1000)
    samples = example["recipe"].load_dataset(config, path)
    assert len(samples) == 2
    assert samples[1]["targets"].tolist() == list(range(317, 333))
    with pytest.raises(ValueError, match="token 332 is not one of the model's 256"):
        example["recipe"].load_dataset(tokens=path)


def test_the_model_knows_nothing_at_first_and_cannot_see_the_future(example: dict[str, ModuleType]) -> None:
    model = example["recipe"].build_model()
    batch = example["recipe"].load_dataset().batch([3])
    assert float(model(**batch)[0].detach()) == pytest.approx(np.log(256), rel=0.1)
    # A later token changes no earlier prediction: with the loss on the first half only, the second half has no say.
    tokens, targets = batch["tokens"], batch["targets"].clone()
    half = tokens.shape[1] // 2
    targets[:, half:] = example["model"].NOT_PREDICTED
    changed = tokens.clone()
    changed[:, half:] = 7
    (one, weight), (other, _) = model(tokens, targets), model(changed, targets)
    assert float(one.detach()) == float(other.detach())
    assert int(weight) == half


def test_the_same_seed_gives_the_same_model(example: dict[str, ModuleType]) -> None:
    first, second = example["recipe"].build_model(), example["recipe"].build_model()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_the_corpus_is_the_text_of_a_folder_in_the_order_of_names(
    example: dict[str, ModuleType], tmp_path: Path
) -> None:
    (tmp_path / "b.py").write_text("second")
    (tmp_path / "a.py").write_text("first")
    assert example["corpus"].read_corpus(tmp_path).tobytes() == b"first\nsecond"
    assert example["corpus"].read_corpus(tmp_path, max_bytes=4).tobytes() == b"firs"
    with pytest.raises(ValueError, match=r"no \.py file"):
        example["corpus"].read_corpus(tmp_path / "empty")
    assert len(example["corpus"].read_corpus()) > 1_000_000


def test_targets_are_the_bytes_that_follow(example: dict[str, ModuleType]) -> None:
    windows = example["corpus"].Windows(np.arange(11, dtype=np.uint8), 5)
    assert len(windows) == 2
    assert windows[1]["tokens"].tolist() == [5, 6, 7, 8, 9]
    assert windows[1]["targets"].tolist() == [6, 7, 8, 9, 10]
    assert windows.batch([0, 1])["tokens"].shape == (2, 5)
    with pytest.raises(IndexError):
        windows[2]
    with pytest.raises(ValueError, match="no window"):
        example["corpus"].Windows(np.zeros(5, dtype=np.uint8), 5)


@pytest.mark.processes
def test_the_reference_is_plain_training_over_the_steps_samples(example: dict[str, ModuleType], tmp_path: Path) -> None:
    out = tmp_path / "losses.json"
    command = [sys.executable, str(GPT / "reference.py"), "--steps", "3", "--global-batch", "4", "--out", str(out)]
    subprocess.run(command, check=True, timeout=DEADLINE_S, env={"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"})
    losses = json.loads(out.read_text())["losses"]
    assert len(losses) == 3

    recipe, dataset = example["recipe"], example["recipe"].load_dataset()
    indices = replica_indices(
        1, dataset_size=len(dataset), global_batch=4, micro_batch=1, replica=0, replicas=1, seed=recipe.SEED
    )
    first = float(recipe.build_model()(**dataset.batch(indices))[0].detach())
    assert losses[0] == pytest.approx(first, rel=1e-6)
    assert losses[2] < losses[0]


def test_the_job_file_runs_the_script_on_a_batch_that_not_every_d_divides() -> None:
    spec = yaml.safe_load((GPT / "job.yaml").read_text())
    assert "train.py" in spec["run"]
    assert spec["global_batch"] % 3
    assert spec["global_batch"] % 4
