"""Prepare BERT's pre-training data from text: sentences, a WordPiece vocabulary, and hdf5 shards for both phases.

python examples/bert/prepare.py --input my-texts/ --output bert-data

Without --input the text is the documentation of this machine's own Python and NumPy (4 MB). Files that are already
complete are kept, so the same command continues an interrupted preparation. The result depends on the
input and the options, not on the number of processes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from corpus_python import python_documents, python_fingerprint
from corpus_reading import DOCUMENTS_BY, find_files, read_documents
from corpus_shards import SPLITS, TextShard, as_json, write_text_shards
from prepare_hdf5 import ShardJob, examples_in, stale_shards, write_shard
from prepare_masks import Masking
from prepare_processes import ordered_map, process_pool
from vocabulary import read_vocabulary, train_vocabulary

_SHARD_BYTES = 32 << 20  # text of a training shard unless --training-shards is given


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    try:
        _check(options)
        prepare(options)
    except ValueError as error:
        sys.exit(f"prepare.py: {error}")
    except OSError as error:
        sys.exit(f"prepare.py: {error.filename or options.output}: {error.strerror or error}")
    except BrokenExecutor:
        sys.exit("prepare.py: a process was killed, perhaps for memory: run it again with fewer --processes")


def prepare(options: argparse.Namespace) -> dict[str, Any]:
    """Make the missing files, print what was made, and return the printed figures."""
    with process_pool(options.processes) as executor:
        shards, text = _text(options, executor)
        vocabulary_sha256, vocabulary = _vocabulary(options, shards)
        phases = _examples(options, executor, shards, vocabulary_sha256)
    return {"text": text, "vocabulary": vocabulary, "phases": phases}


def _text(options: argparse.Namespace, executor: Executor | None) -> tuple[list[TextShard], dict[str, Any]]:
    """The text as shards of sentences: existing or new ones."""
    files = find_files(options.input, options.pattern) if options.input else []
    size = sum(path.stat().st_size for path in files)
    asked = {
        "input": [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
        or python_fingerprint(),
        "documents_by": options.documents_by,
        "one_sentence_per_line": options.one_sentence_per_line,
        "language": options.language,
        "encoding": [options.encoding, options.encoding_errors],
        "shards": [options.training_shards, options.test_shards, options.test_fraction],
        "seed": options.seed,
    }
    folder, note = options.output / "text", options.output / "text" / "shards.json"
    known = _read_json(note)
    shards = [TextShard(**row) for row in known.get("shards", [])]
    if known.get("asked") == asked and all((folder / shard.file).is_file() for shard in shards):
        print(f"text: {len(shards)} shards of sentences are there, in {folder}")
        return shards, {"seconds": 0.0, "characters": sum(shard.characters for shard in shards)}
    documents = (
        read_documents(
            files, documents_by=options.documents_by, encoding=options.encoding, errors=options.encoding_errors
        )
        if files
        else python_documents()
    )
    begin = time.perf_counter()
    with _progress("text", size or None) as progress:
        shards = write_text_shards(
            documents,
            folder,
            training_shards=options.training_shards or max(2, -(-size // _SHARD_BYTES)),
            test_shards=options.test_shards,
            test_fraction=options.test_fraction,
            seed=options.seed,
            language=options.language,
            one_per_line=options.one_sentence_per_line,
            executor=executor,
            processes=options.processes,
            advance=progress,
        )
    seconds = time.perf_counter() - begin
    _write_json(note, {"asked": asked, "shards": as_json(shards)})
    characters = sum(shard.characters for shard in shards)
    print(
        f"text: {sum(shard.documents for shard in shards)} documents, {sum(shard.sentences for shard in shards)} "
        f"sentences, {len(shards)} shards in {folder}: {characters / 1e6:.1f} MB in {seconds:.1f} s, "
        f"{characters / 1e6 / seconds:.2f} MB/s"
    )
    return shards, {"seconds": seconds, "characters": characters}


def _vocabulary(options: argparse.Namespace, shards: list[TextShard]) -> tuple[str, dict[str, Any]]:
    """`vocab.txt`: the user's, the existing one, or one trained on the training shards alone."""
    path, note = options.output / "vocab.txt", options.output / "vocab.json"
    training = [shard for shard in shards if shard.split == "training"]
    begin = time.perf_counter()
    if options.vocab_file:
        tokens = list(read_vocabulary(options.vocab_file).tokens)
        asked: dict[str, Any] = {"file": _sha256_of(tokens)}
    else:
        asked = {
            "text": [shard.sha256 for shard in training],
            "size": options.vocab_size,
            "alphabet": options.limit_alphabet,
            "cased": options.cased,
        }
        tokens = []
    if _read_json(note).get("asked") == asked and path.is_file():
        tokens = list(read_vocabulary(path).tokens)
        print(f"vocabulary: {len(tokens)} tokens are there, in {path}")
        return _sha256_of(tokens), {"seconds": 0.0, "size": len(tokens)}
    if not tokens:
        files = [options.output / "text" / shard.file for shard in training]
        tokens = train_vocabulary(
            files, size=options.vocab_size, lower_case=not options.cased, alphabet=options.limit_alphabet
        )
    _write(path, "".join(token + "\n" for token in tokens))
    _write_json(note, {"asked": asked})
    seconds = time.perf_counter() - begin
    fewer = f" ({options.vocab_size} were asked for; the text has no more)" if len(tokens) < options.vocab_size else ""
    print(f"vocabulary: {len(tokens)} tokens{'' if options.vocab_file else fewer} in {path}, in {seconds:.1f} s")
    return _sha256_of(tokens), {"seconds": seconds, "size": len(tokens)}


def _examples(
    options: argparse.Namespace, executor: Executor | None, shards: list[TextShard], vocabulary_sha256: str
) -> dict[str, Any]:
    """Make the missing hdf5 files of each phase. Returns the figures by folder."""
    figures = {}
    for length, predictions in zip(options.max_seq_length, options.max_predictions_per_seq, strict=True):
        folder = options.output / f"seq{length}_pred{predictions}"
        jobs = [
            ShardJob(
                text=options.output / "text" / shard.file,
                text_sha256=shard.sha256,
                vocabulary=options.output / "vocab.txt",
                vocabulary_sha256=vocabulary_sha256,
                lower_case=not options.cased,
                target=folder / f"{shard.name}.hdf5",
                shard=shard.name,
                max_seq_length=length,
                masking=Masking(
                    max_predictions=predictions,
                    probability=options.masked_lm_prob,
                    whole_words=options.whole_word_masking,
                ),
                short_seq_prob=options.short_seq_prob,
                dupe_factor=options.dupe_factor,
                seed=options.seed,
            )
            for shard in shards
        ]
        for path in stale_shards(folder, {job.target for job in jobs}):
            print(f"{folder}: removed {path.name} of an earlier preparation with more shards")
            path.unlink()
        figures[folder.name] = _make(jobs, folder, executor, options.processes)
    return figures


def _make(jobs: list[ShardJob], folder: Path, executor: Executor | None, processes: int) -> dict[str, Any]:
    there = {job.target: examples_in(job) for job in jobs}
    missing = [job for job in jobs if there[job.target] is None]
    begin, made = time.perf_counter(), 0
    with _progress(folder.name, len(missing)) as progress:
        results = ordered_map(executor, write_shard, missing, ahead=2 * processes)
        for job, examples in zip(missing, results, strict=True):
            there[job.target] = examples
            made += examples
            progress(1)
    seconds = time.perf_counter() - begin
    counts = dict.fromkeys(SPLITS, 0)
    for job in jobs:
        counts[job.shard.split("_")[0]] += there[job.target] or 0
    text = f"{folder.name}: {counts['training']} training and {counts['test']} test examples in {folder}"
    if missing:
        text += f": {made} in {seconds:.1f} s, {made / seconds:.0f} examples/s over {processes} processes"
    if len(missing) < len(jobs):
        text += f" ({len(jobs) - len(missing)} of {len(jobs)} shards were there)"
    print(text)
    return {"seconds": seconds, "made": made, "shards_made": len(missing), **counts}


@contextmanager
def _progress(name: str, total: int | None) -> Iterator[Any]:
    """A bar on the terminal; nothing where the output is a file."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=total)
        yield lambda done: progress.advance(task, done)


def _sha256_of(tokens: list[str]) -> str:
    return hashlib.sha256("\n".join(tokens).encode()).hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}  # not there or cut off: what it describes is made again


def _write_json(path: Path, value: dict[str, Any]) -> None:
    _write(path, json.dumps(value, indent=1))


def _write(path: Path, text: str) -> None:
    """Write a file atomically."""
    unfinished = path.with_name(path.name + ".partial")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def _check(options: argparse.Namespace) -> None:
    """Raises ValueError for an impossible option, naming it."""
    lengths, predictions = options.max_seq_length, options.max_predictions_per_seq
    if len(lengths) != len(predictions):
        raise ValueError(
            f"--max-seq-length has {len(lengths)} values and --max-predictions-per-seq {len(predictions)}: "
            "both need one for each phase"
        )
    checks: Iterable[tuple[str, float, bool, str]] = (
        *(("--max-seq-length", length, length >= 8, "at least 8 tokens") for length in lengths),
        *(("--max-predictions-per-seq", count, count >= 1, "at least 1") for count in predictions),
        ("--masked-lm-prob", options.masked_lm_prob, 0 < options.masked_lm_prob < 1, "between 0 and 1"),
        ("--short-seq-prob", options.short_seq_prob, 0 <= options.short_seq_prob <= 1, "from 0 to 1"),
        ("--test-fraction", options.test_fraction, 0 <= options.test_fraction < 1, "from 0 to less than 1"),
        ("--dupe-factor", options.dupe_factor, options.dupe_factor >= 1, "at least 1"),
        ("--processes", options.processes, options.processes >= 1, "at least 1"),
        ("--test-shards", options.test_shards, options.test_shards >= 1, "at least 1 (--test-fraction 0 for none)"),
        ("--training-shards", options.training_shards, options.training_shards >= 0, "at least 1"),
        ("--seed", options.seed, options.seed >= 0, "0 or more"),
    )
    for name, value, holds, rule in checks:
        if not holds:
            raise ValueError(f"{name} {value}: it must be {rule}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prepare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", nargs="+", type=Path, default=[], help="text files and folders of them (default: Python's own docs)")
    add("--output", type=Path, required=True, help="folder for text/, vocab.txt and one folder of hdf5 files a phase")
    add("--pattern", default="*.txt", help="which files of a folder are read (default: *.txt)")
    add("--documents-by", choices=DOCUMENTS_BY, default="file", help="where a document ends (default: with its file)")
    add("--one-sentence-per-line", action="store_true", help="the text is split into sentences already")
    add("--language", default="en", help="whose rules end a sentence: en, de, fr, zh, … (default: en)")
    add("--encoding", default="utf-8", help="of the input (default: utf-8)")
    add("--encoding-errors", choices=("strict", "replace", "ignore"), default="strict", help="(default: strict)")
    add("--vocab-file", type=Path, help="take this vocab.txt instead of training one")
    add("--vocab-size", type=int, default=30522, help="tokens of the vocabulary to train (default: 30522, as BERT's)")
    add("--limit-alphabet", type=int, default=1000, help="characters that the vocabulary keeps (default: 1000)")
    add("--cased", action="store_true", help="keep upper case and accents (default: uncased)")
    add("--max-seq-length", nargs="+", type=int, default=[128, 512], help="of each phase (default: 128 512)")
    add("--max-predictions-per-seq", nargs="+", type=int, default=[20, 80], help="of each phase (default: 20 80)")
    add("--masked-lm-prob", type=float, default=0.15, help="share of tokens to predict (default: 0.15)")
    add("--whole-word-masking", action="store_true", help="mask all pieces of a word together")
    add("--short-seq-prob", type=float, default=0.1, help="share of deliberately short sequences (default: 0.1)")
    add("--dupe-factor", type=int, default=5, help="passes over the text, each with new masks (default: 5)")
    add("--training-shards", type=int, default=0, help="(default: one for each 32 MB of text, at least 2)")
    add("--test-shards", type=int, default=1, help="(default: 1)")
    add("--test-fraction", type=float, default=0.1, help="share of the text kept for testing (default: 0.1)")
    add("--processes", type=int, default=os.cpu_count() or 1, help="(default: this machine's cores)")
    add("--seed", type=int, default=12345, help="of shards, pairs and masks (default: 12345)")
    return parser


if __name__ == "__main__":
    main()
