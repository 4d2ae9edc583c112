"""The cost of preparing BERT's data, with one process and with two, next to the usual way of making the examples.

The usual way goes through an example token by token in Python, as the scripts that accompany BERT do; here that is
`_naive_mask`, over the same pairs, so that the two do the same work. Figures of one run, side by side.

    .venv/bin/python benchmarks/bert_data.py --json
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "bert"))

import prepare
from prepare_hdf5 import read_tokens
from prepare_masks import Masking, make_examples
from prepare_pairs import Pairs, Tokens, make_pairs
from pretraining_data import PretrainingDataset
from vocabulary import Vocabulary, read_vocabulary

Result = TypeVar("Result")

_LENGTH, _PREDICTIONS = 128, 20
_ROWS = 4096
_COPIES = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        texts, first = Path(folder) / "texts", Path(folder) / str(arguments.processes[0])
        _write_texts(texts, Path(folder) / "default")
        prepared = {count: _prepare(texts, Path(folder) / str(count), count) for count in arguments.processes}
        figures = {"prepare": prepared, "one_process": _in_one_process(first), "read": _read(first)}
    print(json.dumps(figures, indent=1) if arguments.json else _table(figures))


def _write_texts(texts: Path, output: Path) -> None:
    """The sentences of the default corpus, several times over, as files to prepare again."""
    phase = ["--max-seq-length", "128", "--max-predictions-per-seq", "20"]
    with redirect_stdout(StringIO()):
        prepare.main(["--output", str(output), "--vocab-size", "4096", "--dupe-factor", "1", *phase])
    texts.mkdir()
    for path in (output / "text").glob("*.txt"):
        for copy in range(_COPIES):
            shutil.copy(path, texts / f"{path.stem}_{copy}.txt")


def _prepare(texts: Path, output: Path, processes: int) -> dict[str, float]:
    """The whole preparation, by its own clock."""
    options = ["--vocab-size", "4096", "--training-shards", "4", "--documents-by", "blank-line"]
    places = ["--input", str(texts), "--output", str(output), "--processes", str(processes)]
    parsed = prepare._parser().parse_args([*places, *options])
    began = time.perf_counter()
    with redirect_stdout(StringIO()):
        figures = prepare.prepare(parsed)
    phases = figures["phases"].values()
    return {
        "seconds": time.perf_counter() - began,
        "text_mb_per_s": figures["text"]["characters"] / 1e6 / figures["text"]["seconds"],
        "vocabulary_s": figures["vocabulary"]["seconds"],
        **{
            f"examples_per_s_seq{length}": phase["made"] / phase["seconds"]
            for length, phase in zip(parsed.max_seq_length, phases, strict=True)
        },
    }


def _in_one_process(prepared: Path) -> dict[str, float]:
    """Examples a second of each part of the work on one shard, and of the naive masking."""
    vocabulary = read_vocabulary(prepared / "vocab.txt")
    text = prepared / "text" / "training_0000.txt"
    tokens, tokens_s = _timed(lambda: read_tokens(text, vocabulary, lower_case=True))
    rng = np.random.default_rng(0)
    pairs, pairs_s = _timed(
        lambda: make_pairs(tokens, max_seq_length=_LENGTH, short_seq_prob=0.1, dupe_factor=5, rng=rng)
    )
    masking = Masking(max_predictions=_PREDICTIONS)
    _, masks_s = _timed(
        lambda: [
            make_examples(
                tokens.ids, pairs[begin : begin + _ROWS], vocabulary, length=_LENGTH, masking=masking, rng=rng
            )
            for begin in range(0, len(pairs), _ROWS)
        ]
    )
    few = pairs[:2000]
    _, naive_s = _timed(lambda: _naive_mask(tokens, few, vocabulary))
    return {
        "wordpiece_mb_per_s": text.stat().st_size / 1e6 / tokens_s,
        "pairs_per_s": len(pairs) / pairs_s,
        "masked_examples_per_s": len(pairs) / masks_s,
        "naively_masked_examples_per_s": len(few) / naive_s,
        "ratio_to_naive": (len(pairs) / masks_s) / (len(few) / naive_s),
    }


def _naive_mask(tokens: Tokens, pairs: Pairs, vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Masks the same examples one token at a time."""
    tosses = random.Random(0)
    ordinary = [index for index in range(len(vocabulary)) if not vocabulary.special[index]]
    made = []
    for index in range(len(pairs)):
        a = tokens.ids[pairs.a_begin[index] : pairs.a_end[index]].tolist()
        b = tokens.ids[pairs.b_begin[index] : pairs.b_end[index]].tolist()
        ids = [vocabulary.classify, *a, vocabulary.separate, *b, vocabulary.separate]
        places = [place for place, token in enumerate(ids) if not vocabulary.special[token]]
        tosses.shuffle(places)
        chosen = sorted(places[: min(_PREDICTIONS, max(1, round(len(places) * 0.15)))])
        labels = [ids[place] for place in chosen]
        for place in chosen:
            toss = tosses.random()
            if toss < 0.8:
                ids[place] = vocabulary.mask
            elif toss < 0.9:
                ids[place] = tosses.choice(ordinary)
        padding = [0] * (_LENGTH - len(ids))
        missing = [0] * (_PREDICTIONS - len(chosen))
        made.append(
            {
                "input_ids": np.array(ids + padding, dtype=np.int32),
                "input_mask": np.array([1] * len(ids) + padding, dtype=np.int8),
                "segment_ids": np.array([0] * (len(a) + 2) + [1] * (len(b) + 1) + padding, dtype=np.int8),
                "masked_lm_positions": np.array(chosen + missing, dtype=np.int32),
                "masked_lm_ids": np.array(labels + missing, dtype=np.int32),
                "next_sentence_labels": int(pairs.random_next[index]),
            }
        )
    return made


def _read(prepared: Path) -> dict[str, float]:
    """Examples a second in random order from the dataset."""
    dataset = PretrainingDataset(prepared / f"seq{_LENGTH}_pred{_PREDICTIONS}")
    order = np.random.default_rng(0).integers(len(dataset), size=5000).tolist()
    _, seconds = _timed(lambda: [dataset[index] for index in order])
    return {"dataset_examples_per_s": len(order) / seconds}


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


def _table(figures: dict[str, Any]) -> str:
    lines = [
        f"{processes} process{'es' if processes > 1 else ''}: {_row(row)}"
        for processes, row in figures["prepare"].items()
    ]
    lines += [f"one process, by part: {_row(figures['one_process'])}", f"reading: {_row(figures['read'])}"]
    return "\n".join(lines)


def _row(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" if value < 100 else f"{name} {value:.0f}" for name, value in figures.items())


if __name__ == "__main__":
    main()
