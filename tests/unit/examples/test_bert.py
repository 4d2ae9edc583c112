"""The BERT example: the loss does not depend on how a batch is cut; NVLAMB's rule; schedule, arguments, log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from example_modules import BERT, example_modules

MODULES = ("arguments", "lamb", "model", "run_log", "schedule")
GIVEN = ["--input_dir", "data", "--config_file", "config.json"]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    torch.set_num_threads(1)
    with example_modules(monkeypatch, BERT, *MODULES) as modules:
        yield modules


# The model


def small_config(folder: Path, **changes: float) -> Path:
    sizes = json.loads((BERT / "configs" / "tiny.json").read_text())
    sizes |= {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 21}
    path = folder / "config.json"
    path.write_text(json.dumps(sizes | changes))
    return path


def batch_of(labels: list[list[int]]) -> dict[str, Tensor]:
    """Examples of 6 tokens with these labels."""
    size = len(labels)
    words = torch.arange(6 * size).view(size, 6) % 20
    return {
        "input_ids": words,
        "token_type_ids": (torch.arange(6) > 3).long().expand(size, 6),
        "attention_mask": torch.ones(size, 6, dtype=torch.int64),
        "masked_lm_labels": torch.tensor(labels),
        "next_sentence_labels": torch.arange(size) % 2,
    }


LABELS = [[-1, 3, -1, 4, 5, -1], [-1, -1, 7, -1, -1, -1], [-1, 9, -1, -1, -1, 11], [-1, -1, -1, -1, -1, -1]]


def test_the_loss_of_a_batch_is_the_mean_over_its_examples_however_it_is_cut(
    example: dict[str, ModuleType], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = example["model"].BertPretraining(example["model"].read_config(small_config(tmp_path)), max_predictions=3)
    batch = batch_of(LABELS)
    whole = model(**batch)
    assert whole.shape == ()
    alone = [model(**{name: value[row : row + 1] for name, value in batch.items()}) for row in range(4)]
    torch.testing.assert_close(whole, torch.stack(alone).mean())


def test_the_loss_is_that_of_the_plain_model_with_scores_for_every_token(
    example: dict[str, ModuleType], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = example["model"].BertPretraining(example["model"].read_config(small_config(tmp_path)), max_predictions=5)
    batch = batch_of(LABELS[:1])
    plain = model.model(
        batch["input_ids"],
        attention_mask=batch["attention_mask"],
        token_type_ids=batch["token_type_ids"],
        labels=torch.where(batch["masked_lm_labels"] < 0, -100, batch["masked_lm_labels"]),
        next_sentence_label=batch["next_sentence_labels"],
    )
    torch.testing.assert_close(model(**batch), plain.loss)


def test_masked_places_come_in_order_and_are_filled_up(example: dict[str, ModuleType]) -> None:
    places, labels = example["model"].masked_places(torch.tensor(LABELS), 3)
    assert labels.tolist() == [[3, 4, 5], [7, -1, -1], [9, 11, -1], [-1, -1, -1]]
    assert places[0].tolist() == [1, 3, 4]
    assert places[2, :2].tolist() == [1, 5]


@pytest.mark.parametrize(("name", "parameters"), [("base", 110e6), ("large", 336e6)])
def test_the_papers_sizes(example: dict[str, ModuleType], name: str, parameters: float) -> None:
    config = example["model"].read_config(BERT / "configs" / f"{name}.json", 30522)
    assert config.vocab_size == 30528, "a multiple of 8"
    with torch.device("meta"):
        model = example["model"].BertPretraining(config, max_predictions=20)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.01)


def test_a_vocabulary_that_the_data_outgrows_is_refused(example: dict[str, ModuleType], tmp_path: Path) -> None:
    path = small_config(tmp_path)
    assert example["model"].read_config(path, 21).vocab_size == 24
    with pytest.raises(ValueError, match=r"config\.json has a vocab_size of 21, but the data was prepared with 22"):
        example["model"].read_config(path, 22)


# LAMB


def by_the_formula(
    weights: list[Tensor], gradients: list[list[Tensor]], lr: float, decays: list[float]
) -> list[Tensor]:
    """NVLAMB in float64, one number after the other as its formula has it. `gradients`: by step, then by tensor."""
    weights = [w.double() for w in weights]
    means, squares = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    for t, of_step in enumerate(gradients, 1):
        norm = torch.cat([g.double().flatten() for g in of_step]).norm()
        for i, gradient in enumerate(of_step):
            g = gradient.double() / max(1.0, float(norm))
            means[i] = 0.9 * means[i] + 0.1 * g
            squares[i] = 0.999 * squares[i] + 0.001 * g**2
            update = (means[i] / (1 - 0.9**t)) / ((squares[i] / (1 - 0.999**t)) ** 0.5 + 1e-6) + decays[i] * weights[i]
            ratio = float(weights[i].norm() / update.norm()) if decays[i] and weights[i].any() and update.any() else 1.0
            weights[i] = weights[i] - lr * ratio * update
    return weights


@pytest.mark.parametrize("size", [0.01, 10.0], ids=["below the bound", "above the bound"])
def test_lamb_is_nvlambs_formula(example: dict[str, ModuleType], size: float) -> None:
    torch.manual_seed(1)
    weights = [torch.randn(5, 7), torch.randn(4), torch.zeros(3), torch.randn(2, 2)]
    decays = [0.01, 0.0, 0.01, 0.3]
    gradients = [[size * torch.randn_like(w) for w in weights] for _ in range(6)]
    parameters = [torch.nn.Parameter(w.clone()) for w in weights]
    groups = [{"params": [p], "weight_decay": decay} for p, decay in zip(parameters, decays, strict=True)]
    lamb = example["lamb"].Lamb(groups, lr=0.05)
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient.clone()
        lamb.step()
    for parameter, expected in zip(parameters, by_the_formula(weights, gradients, 0.05, decays), strict=True):
        torch.testing.assert_close(parameter.detach(), expected.float(), rtol=1e-4, atol=1e-6)


def test_lamb_leaves_alone_what_has_no_gradient_and_counts_anew_for_phase_2(example: dict[str, ModuleType]) -> None:
    moved, still = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    lamb = example["lamb"].Lamb([moved, still], lr=0.1)
    moved.grad = torch.ones(3)
    lamb.step()
    assert still.tolist() == [1, 1, 1]
    assert still not in lamb.state
    before = lamb.state[moved]["exp_avg"].clone()
    example["lamb"].restart_bias_correction(lamb)
    assert float(lamb.state[moved]["step"]) == 0
    assert torch.equal(lamb.state[moved]["exp_avg"], before)


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"max_grad_norm": 0.0}])
def test_lamb_refuses_numbers_without_sense(example: dict[str, ModuleType], wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must|each"):
        example["lamb"].Lamb([torch.nn.Parameter(torch.ones(1))], **wrong)


# Schedule, arguments, log


def test_the_learning_rate_rises_in_the_warm_up_and_falls_as_a_square_root(example: dict[str, ModuleType]) -> None:
    rates = [example["schedule"].learning_rate(k, peak=6e-3, steps=100, warmup_proportion=0.2) for k in range(1, 101)]
    assert rates[0] == pytest.approx(6e-3 / 20)
    assert rates[18] == pytest.approx(6e-3 * 19 / 20)
    assert rates[19] == pytest.approx(6e-3 * 0.8**0.5)
    assert rates[74] == pytest.approx(6e-3 * 0.5)
    assert rates[99] == 0
    assert example["schedule"].learning_rate(1, peak=1.0, steps=4, warmup_proportion=0.0) == pytest.approx(0.75**0.5)


def test_arguments_of_the_recipe_that_change_nothing_say_so(example: dict[str, ModuleType]) -> None:
    arguments = example["arguments"]
    flags = ["--allreduce_post_accumulation", "--gradient_accumulation_steps", "512", "--do_train", "--amp"]
    parsed = arguments.parse_arguments([*GIVEN, *flags])
    warnings = "\n".join(arguments.without_effect(parsed))
    assert all(f"{name} changes nothing" in warnings for name in (flags[0], flags[1], flags[3]))
    assert parsed.fp16
    assert arguments.without_effect(arguments.parse_arguments(GIVEN)) == []
    launched = [
        "--rank",
        "1",
        "--local_rank",
        "0",
        "--stage_to_rank_map",
        "0;1",
        "--chunk_size",
        "2",
        "--batch-size",
        "4",
    ]
    assert arguments.without_effect(arguments.parse_arguments([*GIVEN, *launched])) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--phase2"], "pass the number of its steps as --phase1_end_step"),
        (["--phase1_end_step", "7"], "is for phase 2"),
        (["--fp16", "--bf16"], "take one of the two"),
        (["--warmup_proportion", "1.5"], "below 1"),
        (["--max_steps", "0"], "at least 1"),
        (["--init_checkpoint", "model.pt"], "is no checkpoint"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(
    example: dict[str, ModuleType], capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        example["arguments"].parse_arguments([*GIVEN, *flags])
    assert message in capsys.readouterr().err


def test_a_checkpoint_is_named_by_its_folder(example: dict[str, ModuleType]) -> None:
    assert example["arguments"].checkpoint_folder("s3://bucket/bert/varuna_ckpt_7038") == ("s3://bucket/bert", 7038)


def test_the_log_has_the_recipes_lines_and_goes_on_in_its_file(
    example: dict[str, ModuleType], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for _ in range(2):  # a job that was restarted
        log = example["run_log"].RunLog(tmp_path / "logs" / "summary.json")
        log.step(0, 1, {"average_loss": 11.25, "step_loss": 11.25, "learning_rate": 3e-06})
    assert (
        "Training Epoch: 0 Training Iteration: 1  average_loss : 11.25  step_loss : 11.25 " in capsys.readouterr().out
    )
    lines = (tmp_path / "logs" / "summary.json").read_text().splitlines()
    assert len(lines) == 2
    entry = json.loads(lines[1].removeprefix("DLLL "))
    assert entry["step"] == [0, 1]
    assert entry["data"]["step_loss"] == 11.25
