"""BERT's data from text files to a dataset: documents, sentences, vocabulary, shards, resuming, and what is refused."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from transformers import BertTokenizer

from bert_text import write_texts
from example_modules import BERT, example_modules
from varuna.data import Batches

MODULES = ("prepare", "pretraining_data", "vocabulary", "corpus_reading", "corpus_python", "corpus_shards")
SMALL = ("--max-seq-length", "32", "64", "--max-predictions-per-seq", "5", "10", "--vocab-size", "300")
ONE_PHASE = ("--max-seq-length", "32", "--max-predictions-per-seq", "5", "--vocab-size", "300")


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, ModuleType]]:
    with pytest.MonkeyPatch.context() as patch, example_modules(patch, BERT, *MODULES) as modules:
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        yield modules


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"), documents=60)


@pytest.fixture(scope="module")
def prepared(example: dict[str, ModuleType], texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two phases of 4 training shards and 1 test shard."""
    output: Path = tmp_path_factory.mktemp("prepared")
    prepare(example, output, texts, *SMALL)
    return output


def prepare(example: dict[str, ModuleType], output: Path, texts: Path, *options: str, processes: int = 1) -> None:
    common = ("--input", str(texts), "--output", str(output), "--training-shards", "4", "--processes", str(processes))
    example["prepare"].main([*common, *options])


def contents(folder: Path) -> dict[str, str]:
    """The contents of each file, except the notes of where the input was."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "shards.json"
    }


def test_each_phase_has_a_folder_of_named_shards_with_nvidias_arrays(prepared: Path) -> None:
    for length, predictions in ((32, 5), (64, 10)):
        folder = prepared / f"seq{length}_pred{predictions}"
        names = ["test_0000.hdf5", *(f"training_{index:04d}.hdf5" for index in range(4))]
        assert sorted(path.name for path in folder.iterdir()) == names
        with h5py.File(folder / "training_0000.hdf5") as file:
            kinds = {name: (file[name].shape[1:], str(file[name].dtype)) for name in file}
            assert kinds == {
                "input_ids": ((length,), "int32"),
                "input_mask": ((length,), "int8"),
                "segment_ids": ((length,), "int8"),
                "masked_lm_positions": ((predictions,), "int32"),
                "masked_lm_ids": ((predictions,), "int32"),
                "next_sentence_labels": ((), "int8"),
            }
            assert file.attrs["vocab_size"] == len((prepared / "vocab.txt").read_text().splitlines())


def test_every_document_is_in_one_shard_whole_and_shards_are_even(prepared: Path, texts: Path) -> None:
    shards = {path.stem: path.read_text().strip().split("\n\n") for path in (prepared / "text").glob("*.txt")}
    documents = [document for shard in shards.values() for document in shard]
    assert sorted(documents) == sorted(path.read_text().strip() for path in texts.iterdir())
    sizes = {name: sum(map(len, shard)) for name, shard in shards.items()}
    total = sum(sizes.values())
    longest = max(map(len, documents))
    for name, size in sizes.items():
        share = 0.1 if name.startswith("test") else 0.9 / 4
        assert abs(size - share * total) <= longest, name


def test_the_result_is_the_same_whatever_the_number_of_processes(
    example: dict[str, ModuleType], prepared: Path, texts: Path, tmp_path: Path
) -> None:
    prepare(example, tmp_path, texts, *SMALL, processes=2)
    assert contents(tmp_path) == contents(prepared)


def test_what_is_whole_is_kept_and_the_rest_made_again_as_it_was(
    example: dict[str, ModuleType], prepared: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    before = contents(tmp_path)
    phase = tmp_path / "seq32_pred5"
    (phase / "training_0001.hdf5").unlink()
    cut_off = phase / "training_0002.hdf5"
    cut_off.write_bytes(cut_off.read_bytes()[:-100])
    kept = (phase / "training_0003.hdf5").stat().st_mtime_ns
    capsys.readouterr()
    prepare(example, tmp_path, texts, *SMALL)
    output = capsys.readouterr().out
    assert "(3 of 5 shards were there)" in output
    assert "(5 of 5 shards were there)" in output
    assert contents(tmp_path) == before
    assert (phase / "training_0003.hdf5").stat().st_mtime_ns == kept


def test_what_was_made_otherwise_is_made_again_and_shards_of_before_go(
    example: dict[str, ModuleType], prepared: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    before = contents(tmp_path / "seq32_pred5")
    prepare(example, tmp_path, texts, *ONE_PHASE, "--masked-lm-prob", "0.2")
    assert not set(before.values()) & set(contents(tmp_path / "seq32_pred5").values())
    capsys.readouterr()
    prepare(example, tmp_path, texts, *ONE_PHASE, "--training-shards", "3")
    assert "removed training_0003.hdf5" in capsys.readouterr().out
    assert len(example["pretraining_data"].PretrainingDataset(tmp_path / "seq32_pred5").files) == 3


def test_a_document_ends_where_the_option_says(example: dict[str, ModuleType], tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(b"\xef\xbb\xbfOne.\r\nTwo.\r\n\r\n\r\nThree.\rFour.")
    read = example["corpus_reading"].read_documents
    rules = example["corpus_reading"].DOCUMENTS_BY
    by = {rule: [document.text for document in read([text], documents_by=rule)] for rule in rules}
    assert by == {
        "file": ["One.\nTwo.\n\n\nThree.\nFour."],
        "blank-line": ["One.\nTwo.\n", "Three.\nFour."],
        "line": ["One.", "Two.", "Three.", "Four."],
    }


def test_sentences_do_not_cross_paragraphs_and_stay_as_they_are_when_given(example: dict[str, ModuleType]) -> None:
    split = example["corpus_shards"].split_sentences
    text = "Dr. Smith came\nat 3.15 p.m. and left. Why?\n\nNobody knows"
    assert split(text) == ["Dr. Smith came at 3.15 p.m. and left.", "Why?", "Nobody knows"]
    assert split("a b. c\n\n d  e ", one_per_line=True) == ["a b. c", "d e"]


def test_pythons_own_documentation_is_read_from_the_sources(example: dict[str, ModuleType], tmp_path: Path) -> None:
    (tmp_path / "package" / "tests").mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text('"""Says.\n\n>>> 1\n1\n"""\ndef f():\n    "Does."\n')
    (tmp_path / "package" / "tests" / "test_it.py").write_text('"""Not this."""')
    (tmp_path / "broken.py").write_text('"""Neither""" this(')
    (tmp_path / "silent.py").write_text("x = 1")
    documents = list(example["corpus_python"].module_documents(tmp_path))
    assert [(document.name, document.text.split("\n\n")) for document in documents] == [
        ("package", ["Says.", "1", "Does."])
    ]
    with pytest.raises(ValueError, match=r"no \.py file.*--input"):
        list(example["corpus_python"].module_documents(tmp_path / "none"))


def test_the_vocabulary_is_that_of_transformers_and_the_same_every_time(
    example: dict[str, ModuleType], prepared: Path
) -> None:
    module, path = example["vocabulary"], prepared / "vocab.txt"
    vocabulary = module.read_vocabulary(path)
    assert len(vocabulary) == 300
    assert vocabulary.tokens[:5] == module.SPECIAL_TOKENS
    assert (vocabulary.pad, vocabulary.mask) == (0, 4)
    texts = sorted((prepared / "text").glob("training*.txt"))
    assert tuple(module.train_vocabulary(texts, size=300)) == vocabulary.tokens
    theirs = BertTokenizer(vocab=str(path))
    for sentence in ("Pomura viba kilo: TEXT number 12!", "Größe, naïve; don't", "漢字 ok", ""):
        assert module.WordPieces(vocabulary).ids([sentence])[0] == theirs.encode(sentence, add_special_tokens=False)
    ids = module.WordPieces(vocabulary).ids(["the [MASK] and [SEP]"])[0]
    assert vocabulary.mask not in ids, "a text about BERT holds no special token"
    assert vocabulary.separate not in ids


def test_the_dataset_gives_what_the_shards_hold_with_labels_at_their_places(
    example: dict[str, ModuleType], prepared: Path
) -> None:
    folder = prepared / "seq32_pred5"
    dataset = example["pretraining_data"].PretrainingDataset(folder)
    assert [path.name for path in dataset.files] == [f"training_{index:04d}.hdf5" for index in range(4)]
    assert (dataset.max_seq_length, dataset.vocab_size) == (32, 300)
    index = 0
    for path in dataset.files:
        with h5py.File(path) as file:
            arrays = {name: file[name][:] for name in file}
        for row in range(len(arrays["input_ids"])):
            if row < 3 or row == len(arrays["input_ids"]) - 1:
                item = dataset[index]
                labels = np.full(32, -1)
                for position, token in zip(
                    arrays["masked_lm_positions"][row], arrays["masked_lm_ids"][row], strict=True
                ):
                    if position:
                        labels[position] = token
                assert item["masked_lm_labels"].tolist() == labels.tolist()
                assert item["input_ids"].tolist() == arrays["input_ids"][row].tolist()
                assert item["token_type_ids"].tolist() == arrays["segment_ids"][row].tolist()
                assert item["attention_mask"].tolist() == arrays["input_mask"][row].tolist()
                assert int(item["next_sentence_labels"]) == arrays["next_sentence_labels"][row]
                assert {value.dtype for value in item.values()} == {torch.int64}
            index += 1
    assert index == len(dataset)
    assert dataset[-1]["input_ids"].tolist() == dataset[len(dataset) - 1]["input_ids"].tolist()
    with pytest.raises(IndexError, match=f"example {index} of {index}"):
        dataset[index]
    fewer = example["pretraining_data"].PretrainingDataset(folder, max_predictions_per_seq=2, ignore_index=-100)
    assert int((fewer[0]["masked_lm_labels"] != -100).sum()) <= 2
    step, batch = next(iter(Batches(dataset, global_batch=6)))
    assert (step, batch["input_ids"].shape, batch["next_sentence_labels"].shape) == (1, (6, 32), (6,))


@pytest.mark.processes
def test_the_dataset_is_read_in_forks_and_copies_and_from_compressed_files(
    example: dict[str, ModuleType], prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = example["pretraining_data"]
    monkeypatch.setattr(module, "_OPEN_FILES", 2)  # so that files are closed and opened again
    plain = module.PretrainingDataset(prepared / "seq32_pred5")
    for path in plain.files:
        with h5py.File(path) as source, h5py.File(tmp_path / path.name, "w") as target:
            for name in source:
                target.create_dataset(name, data=source[name][:], compression="gzip")
    compressed = module.PretrainingDataset(tmp_path)
    assert compressed.vocab_size is None
    picked = [*range(0, len(plain), 40), 0]
    expected = read(plain, picked)
    assert read(compressed, picked) == expected
    assert read(pickle.loads(pickle.dumps(compressed)), picked) == expected
    assert read_in_fork(plain, picked) == read_in_fork(compressed, picked) == expected
    assert read(compressed, picked) == expected, "the fork has taken nothing from its parent"


def read(dataset: Any, indices: list[int]) -> str:
    digest = hashlib.sha256()
    for index in indices:
        for name, value in dataset[index].items():
            digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def read_in_fork(dataset: Any, indices: list[int]) -> str:
    """`read` in a forked child, as a data loader's worker does it."""
    out, into = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(into, read(dataset, indices).encode())
        finally:
            os._exit(0)
    os.close(into)
    with open(out) as pipe:  # noqa: PTH123 - a descriptor, no path
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def test_a_folder_that_cannot_be_read_is_refused_by_name(
    example: dict[str, ModuleType], prepared: Path, tmp_path: Path
) -> None:
    dataset = example["pretraining_data"].PretrainingDataset
    with pytest.raises(ValueError, match=r"no such folder.*prepare\.py"):
        dataset(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no hdf5 file with 'training'"):
        dataset(tmp_path)
    shutil.copy(prepared / "seq32_pred5" / "test_0000.hdf5", tmp_path)
    with pytest.raises(ValueError, match="1 hdf5 files, none with 'training'"):
        dataset(tmp_path)
    assert len(dataset(tmp_path, split="test")) == len(dataset(tmp_path, split=None)) > 0
    with pytest.raises(ValueError, match=r"sequences of 64 tokens, .* of 32"):
        dataset([tmp_path / "test_0000.hdf5", prepared / "seq64_pred10" / "test_0000.hdf5"])
    whole = (tmp_path / "test_0000.hdf5").read_bytes()
    (tmp_path / "test_0000.hdf5").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"test_0000\.hdf5: is no whole hdf5 file"):
        dataset(tmp_path, split="test")
    with h5py.File(tmp_path / "test_0000.hdf5", "w") as file:
        file["input_ids"] = np.zeros((1, 4))
    with pytest.raises(ValueError, match="lacks input_mask, segment_ids"):
        dataset(tmp_path, split="test")


def test_text_in_another_encoding_is_refused_with_its_byte_and_read_when_it_is_named(
    example: dict[str, ModuleType], tmp_path: Path
) -> None:
    path = tmp_path / "old.txt"
    path.write_bytes(b"x" * (1 << 20) + b"\ncaf\xe9 noir.")  # in the second chunk that is read
    read = example["corpus_reading"].read_documents
    with pytest.raises(ValueError, match=r"old\.txt: the byte 0xe9 at offset 1048580 is not utf-8: .*--encoding"):
        list(read([path]))
    assert next(read([path], encoding="latin-1")).text.endswith("café noir.")
    assert next(read([path], errors="replace")).text.endswith("caf� noir.")
    with pytest.raises(ValueError, match="--encoding utf-9"):
        list(read([path], encoding="utf-9"))
    path.write_bytes(b"PK\x00\x01")
    with pytest.raises(ValueError, match="is no text in utf-8, it holds NUL"):
        list(read([path]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--input", "nowhere"], "nowhere: no such file or folder"),
        (["--input", "{texts}", "--pattern", "*.md"], r"no file in this folder matches \*\.md"),
        (["--input", "{texts}", "{texts}/0001.txt"], "named twice"),
        (["--input", "{texts}/0001.txt"], r"has [01] of the corpus' 1 documents.*--training-shards 1"),
        (["--input", "{texts}", "--vocab-size", "20"], r"--vocab-size 20: .* take \d+: allow more"),
        (["--input", "{texts}", "--vocab-file", "{texts}/0001.txt"], r"0001\.txt: lacks \[PAD\]"),
        (["--input", "{texts}", "--max-seq-length", "128"], "--max-seq-length has 1 values and .* 2"),
        (["--input", "{texts}", "--dupe-factor", "0"], "--dupe-factor 0: it must be at least 1"),
        (["--input", "{texts}", "--test-fraction", "1"], r"--test-fraction 1\.0: it must be"),
    ],
)
def test_what_cannot_be_prepared_is_said_in_one_line(
    example: dict[str, ModuleType], texts: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    words = [option.replace("{texts}", str(texts)) for option in options]
    with pytest.raises(SystemExit, match=message) as ended:
        example["prepare"].main(["--output", str(tmp_path), "--processes", "1", *words])
    assert str(ended.value).startswith("prepare.py: ")
    assert "\n" not in str(ended.value)
    assert not list(tmp_path.glob("seq*")), "nothing half made"
