"""Train every configuration of the equality matrix and compare each with plain PyTorch.

    make soak-matrix                              # all, some 17,000: hours; it may be stopped and begun again
    make soak-matrix SOAK="--sample 400 --seed 7" # some of them, at random

Finished rows are recorded in `matrix.jsonl` in --dir (default: test-artifacts/soak-matrix) and are not run again.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import torch

SUPPORT = Path(__file__).resolve().parents[1] / "support"
sys.path[:0] = [str(SUPPORT), *(str(SUPPORT / room) for room in ("training", "managers", "simulation"))]

from training_matrix import Configuration, assert_equal, full_product, plainly, run
from training_world import Outcome, Zygote

AT_ONCE = 16
"""Configurations that are trained in the same processes, one after the other."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, help="how many, chosen at random; default: all")
    parser.add_argument("--seed", type=int, default=0, help="which sample")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing new after so long")
    where = Path("test-artifacts/soak-matrix")
    parser.add_argument("--dir", type=Path, default=where, help="where the results are kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.dir.mkdir(parents=True, exist_ok=True)
    results = options.dir / "matrix.jsonl"
    lines = results.read_text().splitlines() if results.exists() else []
    flaws = {done["configuration"]: done["flaw"] for done in map(json.loads, lines)}
    wanted = list(full_product())
    if options.sample is not None:
        wanted = random.Random(options.seed).sample(wanted, options.sample)
    todo = sorted((c for c in wanted if str(c) not in flaws), key=lambda c: c.shape)
    print(f"{len(wanted)} configurations, {len(wanted) - len(todo)} of them compared before; results in {results}")
    ends_s = time.monotonic() + 60 * options.minutes
    zygote = Zygote()
    with results.open("a", buffering=1) as file:
        for batch in batches(todo):
            if time.monotonic() > ends_s:
                break
            for configuration, flaw in compare(zygote, batch):
                file.write(json.dumps({"configuration": str(configuration), "flaw": flaw}) + "\n")
                flaws[str(configuration)] = flaw
                if flaw:
                    print(f"FLAW: {configuration}: {flaw}", flush=True)
    zygote.close()
    return verdict(wanted, flaws)


def batches(configurations: Sequence[Configuration]) -> list[list[Configuration]]:
    """Batches of one shape each, in random order, so that a run that is stopped has covered some of everything."""
    of_a_shape = [list(group) for _, group in groupby(configurations, key=lambda c: c.shape)]
    cut = [group[i : i + AT_ONCE] for group in of_a_shape for i in range(0, len(group), AT_ONCE)]
    random.Random(0).shuffle(cut)
    return cut


def compare(zygote: Zygote, batch: Sequence[Configuration]) -> list[tuple[Configuration, str]]:
    """What is wrong with each configuration; empty: nothing."""
    folder = Path(tempfile.mkdtemp(prefix="varuna-matrix-"))
    try:
        outcomes: list[Outcome | str] = list(run(zygote, folder, batch))
    except AssertionError as error:
        outcomes = [f"not trained: {error}"] * len(batch)
    shutil.rmtree(folder)
    return [
        (c, outcome if isinstance(outcome, str) else flaw_of(c, outcome))
        for c, outcome in zip(batch, outcomes, strict=True)
    ]


def flaw_of(configuration: Configuration, outcome: Outcome) -> str:
    try:
        assert_equal(outcome, plainly(configuration), configuration.precision)
    except AssertionError as error:
        return " ".join(str(error).split()) or "losses or norms differ"
    return ""


def verdict(wanted: Sequence[Configuration], flaws: dict[str, str]) -> int:
    """Prints a table by shape and precision; 1 when anything is wrong."""
    compared, wrong, all_there = Counter[str](), Counter[str](), Counter[str]()
    for configuration in sorted(wanted, key=lambda c: (c.shape, c.precision)):
        row = f"{configuration.shape[0]}x{configuration.shape[1]} {configuration.precision}"
        all_there[row] += 1
        compared[row] += str(configuration) in flaws
        wrong[row] += bool(flaws.get(str(configuration)))
    print(f"{'':12}{'of':>8}{'compared':>10}{'flaws':>7}")
    for row, count in all_there.items():
        print(f"{row:12}{count:8}{compared[row]:10}{wrong[row]:7}")
    print(f"{'all':12}{all_there.total():8}{compared.total():10}{wrong.total():7}")
    return 1 if wrong.total() else 0


if __name__ == "__main__":
    sys.exit(main())
