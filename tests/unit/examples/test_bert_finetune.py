"""BERT's fine-tuning: the task, the weights that it begins with, and the same result with Varuna and without."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch

from example_modules import BERT, example_modules

pytestmark = pytest.mark.slow


MODULES = ("finetune", "finetune_task", "model", "vocabulary", "corpus_reading")
FROM_LAUNCHER = ("--rank=0", "--local_rank=0", "--chunk_size=4", "--batch-size=24", "--stage_to_rank_map=0")
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "vocab_size": 160,
}


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, ModuleType]]:
    with pytest.MonkeyPatch.context() as patch, example_modules(patch, BERT, *MODULES) as modules:
        torch.set_num_threads(1)
        yield modules


@pytest.fixture(scope="module")
def documents(example: dict[str, ModuleType]) -> list[Any]:
    """Six modules of each subject, whose text has words of its own among words that all subjects share."""
    rng = random.Random(0)
    made = []
    for subject, (first, *_) in enumerate(example["finetune_task"].SUBJECTS.values()):
        for module in range(6):
            own, common = range(subject * 8, subject * 8 + 8), range(64, 128)
            sentences = [
                " ".join(f"w{rng.choice(own if place % 4 else common)}" for place in range(8)) for _ in range(12)
            ]
            name = f"{first}{':' if first == 'topic' else '.'}m{module}"
            text = f"Module {name} of all. " + ". ".join(sentence.capitalize() for sentence in sentences) + "."
            made.append(example["corpus_reading"].Document(name=name, text=text))
    return made


@pytest.fixture
def folder(
    example: dict[str, ModuleType], documents: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A vocabulary and a configuration, and `documents` where the script looks for Python's own."""
    tokens = (*example["vocabulary"].SPECIAL_TOKENS, *(f"w{index}" for index in range(128)), ".")
    (tmp_path / "vocab.txt").write_text("".join(token + "\n" for token in tokens))
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    monkeypatch.setattr(example["finetune"], "python_documents", lambda: documents)
    return tmp_path


def options(folder: Path, *more: str) -> list[str]:
    places = ("--vocab_file", str(folder / "vocab.txt"), "--config_file", str(folder / "config.json"))
    sizes = ("--labelled", "12", "--tested", "10", "--max_seq_length", "32")
    pace = ("--dropout", "0", "--learning_rate", "0.01", "--train_batch_size", "24")
    return [*places, *sizes, *pace, *more]


def test_subjects_are_told_by_the_names_of_modules(example: dict[str, ModuleType]) -> None:
    task = example["finetune_task"]
    names = ("topic:with", "tkinter", "tkinter.ttk", "email.mime.text", "numpy.linalg._linalg", "emails", "json")
    subjects = [task.subject_of(name) for name in names]
    assert [None if subject is None else list(task.SUBJECTS)[subject] for subject in subjects] == [
        "the language", "windows", "windows", "mail", "arrays", None, None,
    ]  # fmt: skip


def test_no_module_gives_passages_to_learn_from_and_to_test_with(
    example: dict[str, ModuleType], documents: list[Any]
) -> None:
    task = example["finetune_task"]
    training, test = task.make_task(documents, labelled=10, tested=8, seed=1)
    assert (len(training), len(test)) == (80, 64)
    sources = {
        passage: document.name
        for passage in {passage.text for passage in training + test}
        for document in documents
        if passage in document.text
    }
    assert not {sources[passage.text] for passage in training} & {sources[passage.text] for passage in test}
    for passage in training + test:
        assert task.subject_of(sources[passage.text]) == passage.subject
    assert task.make_task(documents, labelled=10, tested=8, seed=1) == (training, test)
    assert task.make_task(documents, labelled=10, tested=8, seed=2) != (training, test)
    with pytest.raises(ValueError, match=r"--labelled 1000: the language has \d+ to learn from"):
        task.make_task(documents, labelled=1000, tested=8, seed=1)


def test_it_learns_and_with_varuna_as_in_plain_pytorch(
    example: dict[str, ModuleType], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = {}
    for name, more in (("plain", ("--plain",)), ("varuna", FROM_LAUNCHER)):
        example["finetune"].main(options(folder, "--epochs", "16", *more))
        results[name] = re.search(r"accuracy (\S+) on (\d+) passages.*last loss (\S+),", capsys.readouterr().out)
    plain, varuna = results["plain"], results["varuna"]
    assert plain is not None
    assert varuna is not None
    assert plain[2] == varuna[2] == "80"
    assert float(plain[1]) > 0.8, "by chance it would be an eighth"
    # Rounding may change the class of two passages of 80.
    assert float(varuna[1]) == pytest.approx(float(plain[1]), abs=0.026)
    assert float(varuna[3]) == pytest.approx(float(plain[3]), rel=1e-2)


def test_the_encoder_begins_with_the_exported_weights_and_the_head_anew(
    example: dict[str, ModuleType], folder: Path
) -> None:
    config = example["model"].read_config(folder / "config.json")
    torch.manual_seed(7)
    pretrained = example["model"].BertPretraining(config, max_predictions=4)
    weights = folder / "bert.safetensors"
    safetensors.torch.save_file({name: value.clone() for name, value in pretrained.state_dict().items()}, weights)
    build, parse = example["finetune"].build_classifier, example["finetune"]._parser().parse_args
    built = build(parse(options(folder, "--model", str(weights))))
    expected = pretrained.model.bert.state_dict()
    for name, value in built.model.bert.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert built.model.classifier.out_features == 8
    pretrained.model.save_pretrained(folder / "folder")
    again = build(parse(options(folder, "--model", str(folder / "folder"))))
    for name, value in again.model.bert.state_dict().items():
        assert torch.equal(value, expected[name]) or name.startswith("pooler"), name


def test_weights_that_do_not_fit_are_refused_in_one_line(example: dict[str, ModuleType], folder: Path) -> None:
    def ends_with(model: str, message: str) -> None:
        with pytest.raises(SystemExit, match=message) as ended:
            example["finetune"].main(options(folder, "--model", model))
        assert "\n" not in str(ended.value)

    ends_with(str(folder / "nowhere"), r"^finetune\.py: .*nowhere: no such file.*varuna export")
    other = folder / "other.safetensors"
    safetensors.torch.save_file({"model.bert.x": torch.zeros(2)}, other)
    ends_with(str(other), r"other\.safetensors: is not of the model that --config_file")
    (folder / "vocab.txt").write_text("no\nvocabulary\n")
    ends_with(str(other), r"vocab\.txt: lacks \[PAD\]")
